# SPDX-License-Identifier: Apache-2.0
"""The HTTP front door: a debuginfod over the same `view` that a mount presents.

Outsiders call `server.run` with `server.ServeOptions`. Inside, requests pass through

    server      sockets, workers, signals, the clock of all connections
    connection  one client of aiohttp: limits, slow clients, resets, sending of files
    site        routes, answers to all failures, counts
    debuginfod  files, sections and sources of a build ID; metadata
    symbolication  names, sources and instructions for the Firefox Profiler
    counters    requests, and missing build IDs that clients requested, of all workers
    backend     the open store, which may be replaced while it is served

The package serves only files that a caller without an account may read (`permissions.PUBLIC`). It
does not use FUSE, and resolves no path of a client on the host.
"""

from __future__ import annotations
