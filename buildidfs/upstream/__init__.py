# SPDX-License-Identifier: Apache-2.0
"""Servers to fetch files from that the store lacks: debuginfod servers, directories, mirrors.

`symbol_servers` has those that take files: Parca and Pyroscope.

`fetcher.Upstreams` is for a process that may write to the store. `agent.Agent` is for a front door,
which may not: it has a process of its own fetch. `options.Options` has the servers and limits.
Nothing here knows names in a mount or requests of HTTP clients. Only `http_client` sees the HTTP
library. Nothing is imported here, because a front door needs the least part.
"""
