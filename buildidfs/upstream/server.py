# SPDX-License-Identifier: Apache-2.0
"""A source of files, and the ways in which it may fail."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
import time
import urllib.parse
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.linux.file_ops import close_fds
from buildidfs.model import BuildId, FileIdentity, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import Access

_NO_TMPFILE: Final = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT))


class NotThere(Exception):
    """The server does not have the file, and says so."""


class Unacceptable(Exception):
    """The server has a file under that build ID which cannot be accepted, now or later."""


class Unavailable(Exception):
    """The server cannot be asked now.

    ``hangs`` is True if the server used up its time limit, ``lasting`` if it will refuse the next
    request, too. ``transient`` is True if another attempt may help, in ``after`` seconds if that is
    known.
    """

    def __init__(
        self,
        why: str,
        *,
        hangs: bool = False,
        lasting: bool = False,
        transient: bool = False,
        after: float = 0.0,
    ) -> None:
        super().__init__(why)
        self.hangs = hangs
        self.lasting = lasting
        self.transient = transient
        self.after = after


class RequestedFile(msgspec.Struct, frozen=True):
    """A requested file.

    ``hops`` is the number of servers that have passed the request on. ``via`` has the names that
    some of them have added.
    """

    build_id: BuildId
    kind: Kind
    hops: int = 0
    via: str = ""


class ServerFile(msgspec.Struct):
    """An open file from a server, which the receiver closes.

    ``is_copy`` is True if no other process can write to it.
    """

    fd: int
    identity: FileIdentity
    is_copy: bool = True

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, self.fd = self.fd, -1
        close_fds(fd)


class Server(Protocol):
    """One upstream. Thread-safe."""

    label: str
    """The name of the server for people and in origins, without a password."""
    is_local: bool
    """True if the server needs no network."""

    def fetch(self, wanted: RequestedFile) -> ServerFile:
        """Return the file.

        Raises `NotThere`, `Unacceptable`, `Unavailable`, and OSError if our disk fails.
        """

    def close(self) -> None:
        """Close connections and files."""


def identity_of_copy(size: int, modified_ns: int, access: Access) -> FileIdentity:
    """Return an identity for a file that came from elsewhere. It never equals that of a later file.

    ``access`` has the users who could read the file there, ``modified_ns`` is 0 if unknown.
    """
    return FileIdentity(
        0,
        secrets.randbits(62),
        size,
        modified_ns or time.time_ns(),
        0,
        stat.S_IFREG | access.mode,
        access.uid,
        access.gid,
        b"upstream:" + secrets.token_bytes(16),
    )


def forwarded(hops: int, via: str, token: str) -> list[tuple[str, str]]:
    """Return the headers of a forwarded request: the number of hops, and our names.

    They contain nothing about the client: its address does not concern the next server.
    """
    headers = [("Via", ", ".join(filter(None, (via, f"1.1 {token}"))))]
    if hops:
        headers.append(("X-Forwarded-For", ", ".join(["unknown"] * hops)))
    return headers


def host_of(url: str) -> str:
    """Return host and port of a URL, without user and password."""
    return urllib.parse.urlsplit(url).netloc.rpartition("@")[2] or url


class DownloadSpool:
    """Makes files without a name beside the store. ``progress`` is called with received bytes."""

    def __init__(
        self, directory: bytes, max_size: int, progress: Callable[[int], None] = lambda count: None
    ) -> None:
        self._directory = directory
        self._max_size = max_size
        self.progress = progress

    def most(self) -> int:
        """Return the maximum size of a file: the limit, or the room on the disk. Raises OSError."""
        room = os.statvfs(self._directory)
        # Adding it to the store copies it, unless the filesystem shares the bytes.
        return min(self._max_size, room.f_bavail * room.f_frsize // 2)

    def file(self) -> int:
        """Return the descriptor of a new file. Raises OSError."""
        try:
            flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
            return os.open(self._directory, flags, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        with tempfile.TemporaryFile(dir=self._directory) as file:
            return os.dup(file.fileno())
