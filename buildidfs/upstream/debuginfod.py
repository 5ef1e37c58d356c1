# SPDX-License-Identifier: Apache-2.0
"""A debuginfod server, ours or any other, or a bucket of that layout: ``/buildid/ID/KIND``."""

from __future__ import annotations

import os
import urllib.parse
from typing import TYPE_CHECKING, Final

from buildidfs.model import PUBLIC_ACCESS, Access, Kind
from buildidfs.upstream.server import Found, NotThere, identity_of_copy

if TYPE_CHECKING:
    from buildidfs.upstream.http_client import HttpClient
    from buildidfs.upstream.server import Spool, Wanted

_KINDS: Final = {Kind.EXECUTABLE: "executable", Kind.DEBUGINFO: "debuginfo"}


class Debuginfod:
    """A server at a URL. It gets ``token`` as our name, by which we know our own requests."""

    is_local = False

    def __init__(self, url: str, client: HttpClient, spool: Spool, token: str) -> None:
        self.label = host_of(url)
        self._url = url.rstrip("/")
        self._client = client
        self._spool = spool
        self._token = token
        parts = urllib.parse.urlsplit(url)
        # A file that took a password is not for all users of this host.
        is_private = bool(parts.username or client.headers)
        owner = Access(0o400, os.geteuid(), os.getegid())
        self._access = owner if is_private else PUBLIC_ACCESS

    def fetch(self, wanted: Wanted) -> Found:
        """The file. Raises what `Server.fetch` does."""
        kind = _KINDS.get(wanted.kind)
        if kind is None:
            raise NotThere
        most = self._spool.most()
        headers = [("X-DEBUGINFOD-MAXSIZE", str(most))]
        headers += forwarded(wanted.hops, wanted.via, self._token)
        url = f"{self._url}/buildid/{wanted.build_id}/{kind}"
        fd = self._spool.file()
        try:
            done = self._client.download(url, fd, most, headers, self._spool.progress)
        except BaseException:
            os.close(fd)
            raise
        return Found(fd, identity_of_copy(done.size, done.modified_ns, self._access))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def forwarded(hops: int, via: str, token: str) -> list[tuple[str, str]]:
    """The headers of a request that is passed on: how often, and by which of us.

    They tell nothing of the client: its address is no matter of the next server.
    """
    headers = [("Via", ", ".join(filter(None, (via, f"1.1 {token}"))))]
    if hops:
        headers.append(("X-Forwarded-For", ", ".join(["unknown"] * hops)))
    return headers


def host_of(url: str) -> str:
    """Host and port of a URL, without user and password."""
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2] or url
