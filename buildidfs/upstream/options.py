# SPDX-License-Identifier: Apache-2.0
"""The upstream servers that are configured; what a source of files is, and how it may fail.

The configuration is in the settings and in the variables of debuginfod clients.
"""

from __future__ import annotations

import enum
import os
import re
import secrets
import stat
import time
import urllib.parse
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs import config
from buildidfs.errors import UsageError
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import close_fds, unnamed_file
from buildidfs.model import BuildId, FileIdentity, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from buildidfs.config import UpstreamSettings
    from buildidfs.model import Access


class FetchState(enum.StrEnum):
    """The result of a request for a file."""

    FETCHED = "fetched"
    HELD = "held"
    ABSENT = "absent"
    """No server has an acceptable file; they are not asked again for a while."""
    UNAVAILABLE = "unavailable"
    """A server that may have the file could not be asked."""
    FAILED = "failed"
    """A server returned the file, but the store could not take it."""


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
        return unnamed_file(self._directory)


TIMEOUT_S: Final = 10.0
_MOST_HEADERS_BYTES: Final = 64 << 10

URLS: Final = "DEBUGINFOD_URLS"
TIMEOUT: Final = "DEBUGINFOD_TIMEOUT"
HEADERS_FILE: Final = "DEBUGINFOD_HEADERS_FILE"

_CREDENTIALS: Final = re.compile(r"(https?://)[^/\s]*@")


class FetchOptions(msgspec.Struct, frozen=True):
    """The servers in the order in which they are asked, and the limits for each.

    A server has ``timeout`` seconds to answer, and again for each 100 KiB of a file. A file has at
    most ``max_size`` bytes. If no server has a file, it is not requested again for ``absent_s``
    seconds. ``wait`` is the number of seconds for which an open of the mount, or a request, waits
    for a file. ``headers`` are sent to all HTTP servers.
    """

    urls: tuple[str, ...] = ()
    timeout: float = TIMEOUT_S
    wait: float = 10.0
    max_size: int = 2 << 30
    absent_s: int = 3600
    headers: tuple[tuple[str, str], ...] = ()
    offline: bool = False

    @property
    def scope(self) -> tuple[str, ...]:
        """The servers to which a remembered answer applies."""
        return (*map(without_password, self.urls), "offline" if self.offline else "")


def without_password(url: str) -> str:
    """Return a URL for people, without user and password."""
    return _CREDENTIALS.sub(r"\1***@", url)


def of_settings(settings: UpstreamSettings, environ: Mapping[str, str]) -> FetchOptions:
    """Return the options from settings and environment.

    The servers of the settings come first. Raises `UsageError`.
    """
    named = (*map(os.path.expanduser, settings.urls), *environ.get(URLS, "").split())
    return FetchOptions(
        tuple(dict.fromkeys(named)),
        settings.timeout or seconds(environ.get(TIMEOUT, "")) or TIMEOUT_S,
        settings.wait,
        config.size(settings.max_size),
        config.seconds(settings.remember_absent),
        headers_in(settings.headers_file or environ.get(HEADERS_FILE, "")),
        settings.offline,
    )


def seconds(text: str) -> float | None:
    """Return the value of DEBUGINFOD_TIMEOUT; None if it is invalid.

    Other programs ignore an invalid value, too.
    """
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 86_400 else None


def headers_in(path: str) -> tuple[tuple[str, str], ...]:
    """Return the headers in a file, one per line; none without a path.

    Raises `UsageError`; its message contains no header.
    """
    if not path:
        return ()
    try:
        fd = inodes.open_regular(os.path.expanduser(path))
        with open(fd, encoding="latin-1") as file:
            text = file.read(_MOST_HEADERS_BYTES)
    except OSError as error:
        raise UsageError(
            f"cannot read the headers for servers: {path}: {error.strerror}"
        ) from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip().isascii() or " " in name.strip():
            raise UsageError(f"{path}: line {number} is not a header; try Name: value")
        found.append((name.strip(), value.strip()))
    return tuple(found)
