# SPDX-License-Identifier: Apache-2.0
"""The servers that the URLs of the settings name: debuginfod servers and directories."""

from __future__ import annotations

import os
import re
import urllib.parse
from typing import TYPE_CHECKING, Final

from buildidfs.errors import UsageError, needs_extra
from buildidfs.upstream.directory import Directory

if TYPE_CHECKING:
    from buildidfs.upstream.http_client import HttpClient
    from buildidfs.upstream.options import Options
    from buildidfs.upstream.server import Server, Spool


PREFIX: Final = "apt:"
_CREDENTIALS: Final = re.compile(r"(https?://)[^/\s]*@")


def servers_of(options: Options, spool: Spool, directory: bytes, token: str) -> list[Server]:
    """The servers of the options in their order.

    ``directory`` is for what they keep of each other's answers. Raises `UsageError`.
    """
    servers: list[Server] = []
    for url in options.urls:
        if url.startswith(("http://", "https://")):
            from buildidfs.upstream.debuginfod import Debuginfod

            servers.append(Debuginfod(_checked(url), _client(options), spool, token))
        elif url.startswith(("/", "file:///")):
            path = urllib.parse.unquote(url.removeprefix("file://")) if url[0] != "/" else url
            servers.append(Directory(os.fsencode(path), options.timeout))
        elif url.startswith(PREFIX):
            servers.append(_mirror(url, options, spool, directory, token))
        else:
            raise _unknown(url)
    return servers


def _mirror(url: str, options: Options, spool: Spool, directory: bytes, token: str) -> Server:
    from buildidfs.upstream.apt import AptMirror, parse

    suite = parse(url)
    is_remote = suite.url.startswith("http")
    if is_remote:
        _checked(suite.url)
    return AptMirror(suite, _client(options) if is_remote else None, spool, directory, token)


def _client(options: Options) -> HttpClient:
    with needs_extra("upstream"):
        from buildidfs.upstream.http_client import HttpClient
    return HttpClient(options.timeout, options.headers)


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url or not url.isprintable():
        raise _unknown(url)
    return url


def without_password(url: str) -> str:
    """The URL for people, without user and password."""
    return _CREDENTIALS.sub(r"\1***@", url)


def _unknown(url: str) -> UsageError:
    return UsageError(
        f"not an upstream: {without_password(url)[:80]!r}; try https://HOST, a directory, or"
        " apt:URL SUITE COMPONENT"
    )
