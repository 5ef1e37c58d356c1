# SPDX-License-Identifier: Apache-2.0
"""Upstream servers, from which missing files are fetched: debuginfod servers and directories.

`fetcher.Upstreams` is for a process that may write to the store. `agent.Agent` is for mount and
server, which may not: another process fetches for them. `options.FetchOptions` has the servers and
limits. Nothing here knows names in a mount or requests of HTTP clients. Only `http_client` uses the
HTTP library. This module imports nothing, because mount and server need only a small part.
"""
