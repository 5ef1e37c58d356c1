# SPDX-License-Identifier: Apache-2.0
"""The servers for the URLs in the settings: debuginfod servers and directories.

A debuginfod server may be ours, any other one, or a bucket with the layout ``/buildid/ID/KIND``. A
directory has files by build ID in any layout that clients and servers use:

    .build-id/ab/cdef[.debug]                      /usr/lib/debug, and executables by link
    .build-id/ab/cdef/{elf,debug}                  perf's build ID cache (--buildid-dir)
    buildid/ID/{executable,debuginfo}              a bucket; what file:// in DEBUGINFOD_URLS names
    ID/{executable,debuginfo}                      the cache of debuginfod clients

Links are followed within the directory only. The files keep the permissions that they have there.
"""

from __future__ import annotations

import errno
import os
import urllib.parse
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.capture import walk
from buildidfs.capture.origin.builder import access_of
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.errors import UsageError, needs_extra
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import PUBLIC_ACCESS, Access, Kind
from buildidfs.upstream.options import (
    NotThere,
    ServerFile,
    Unavailable,
    forwarded,
    host_of,
    identity_of_copy,
    without_password,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import BuildId
    from buildidfs.upstream.http_client import HttpClient
    from buildidfs.upstream.options import DownloadSpool, FetchOptions, RequestedFile, Server

_KINDS: Final = {Kind.EXECUTABLE: "executable", Kind.DEBUGINFO: "debuginfo"}
_ABSENT: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP))
_NAMES: Final = {
    Kind.EXECUTABLE: (b"", (b"elf", b"executable"), b"executable"),
    Kind.DEBUGINFO: (b".debug", (b"debug", b"debuginfo"), b"debuginfo"),
}


def servers_of(options: FetchOptions, spool: DownloadSpool, token: str) -> list[Server]:
    """Return the servers of the options in their order. Raises `UsageError`."""
    servers: list[Server] = []
    for url in options.urls:
        if url.startswith(("http://", "https://")):
            servers.append(DebuginfodServer(_checked(url), _client(options), spool, token))
        elif url.startswith(("/", "file:///")):
            path = urllib.parse.unquote(url.removeprefix("file://")) if url[0] != "/" else url
            servers.append(Directory(os.fsencode(path), options.timeout))
        else:
            raise _unknown(url)
    return servers


def _client(options: FetchOptions) -> HttpClient:
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


def _unknown(url: str) -> UsageError:
    return UsageError(
        f"not an upstream: {without_password(url)[:80]!r}; try https://HOST or a directory"
    )


class DebuginfodServer:
    """A debuginfod server at a URL.

    The server gets ``token`` as our name, so that we recognise our own requests.
    """

    is_local = False

    def __init__(self, url: str, client: HttpClient, spool: DownloadSpool, token: str) -> None:
        self.label = host_of(url)
        self._url = url.rstrip("/")
        self._client = client
        self._spool = spool
        self._token = token
        parts = urllib.parse.urlsplit(url)
        # A file that needed a password is not for all users of this host.
        is_private = bool(parts.username or client.headers)
        owner = Access(0o400, os.geteuid(), os.getegid())
        self._access = owner if is_private else PUBLIC_ACCESS

    def fetch(self, wanted: RequestedFile) -> ServerFile:
        """Return the file. Raises the errors of `Server.fetch`."""
        kind = _KINDS.get(wanted.kind)
        if kind is None:
            raise NotThere
        most = self._spool.most()
        headers = [("X-DEBUGINFOD-MAXSIZE", str(most))]
        headers += forwarded(wanted.hops, wanted.via, self._token)
        url = f"{self._url}/buildid/{wanted.build_id}/{kind}"
        with closing_on_error(self._spool.file()) as fd:
            done = self._client.download(url, fd, most, headers, self._spool.progress)
        return ServerFile(fd, identity_of_copy(done.size, done.modified_ns, self._access))

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


class Directory:
    """A directory on this machine. Its filesystem may hang."""

    is_local = True

    def __init__(self, path: bytes, timeout_s: float) -> None:
        self.label = os.fsdecode(path)
        self._path = path
        self._timeout_s = timeout_s

    def fetch(self, wanted: RequestedFile) -> ServerFile:
        """Return the file. Raises the errors of `Server.fetch`."""
        if wanted.kind not in _NAMES:
            raise NotThere
        try:
            return Patience(self._timeout_s).ask(
                (0, 0), lambda: self._find(wanted), lambda found: found.close()
            )
        except TimeoutError:
            raise Unavailable(
                f"its filesystem gave no answer within {self._timeout_s:g} s", hangs=True
            ) from None

    def close(self) -> None:
        """Do nothing: no descriptor is kept open."""

    def _find(self, wanted: RequestedFile) -> ServerFile:
        try:
            root_fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"cannot be opened: {error.strerror}") from error
        with closing_fd(root_fd):
            refused = walk.Mounts().refused(os.fstat(root_fd).st_dev, root_fd)
            if refused is not None:
                # A mount of this store would wait for us.
                raise Unavailable(
                    f"is on a filesystem of type {os.fsdecode(refused)}, whose server may wait for"
                    " this command: let buildidfs serve offer that store, and give its URL"
                    " (http://HOST:8002)",
                    lasting=True,
                )
            for path in _paths(wanted.build_id, wanted.kind):
                found = _opened(root_fd, path)
                if found is not None:
                    return found
        raise NotThere


def _paths(build_id: BuildId, kind: Kind) -> Iterator[bytes]:
    """Yield the names that a file may have in a directory, relative to the directory."""
    suffix, in_perf, in_buildid = _NAMES[kind]
    first, rest = names.split(build_id)
    for base in (b".build-id/", b""):
        split = base + first + b"/" + rest
        yield split + suffix
        for name in in_perf:
            yield split + b"/" + name
    spelled = names.spell(build_id)
    for base in (b"buildid/", b""):
        yield base + spelled + b"/" + in_buildid


def _opened(root_fd: int, path: bytes) -> ServerFile | None:
    """Open a regular file below a directory; None if there is none. Raises `Unavailable`."""
    try:
        fd = inodes.open_regular_in_root(root_fd, path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise Unavailable(f"cannot be read: {error.strerror}") from error
    status = os.fstat(fd)
    identity = identity_of_copy(status.st_size, status.st_mtime_ns, access_of(fd))
    return ServerFile(fd, identity, is_copy=False)
