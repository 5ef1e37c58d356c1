# SPDX-License-Identifier: Apache-2.0
"""Messages between the catcher and the watch.

Each datagram holds one message in msgpack; a `Caught` carries the descriptor of the file.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import threading
from collections import deque
from typing import Final

import msgspec

from buildidfs.capture.process.silent_processes import SilentProcess
from buildidfs.errors import InvalidBuildId
from buildidfs.linux.file_ops import close_fds
from buildidfs.model import BuildId, FileIdentity, NamespaceSet
from buildidfs.shares import HOST, Quota, Share

MAX_BYTES = 16 << 10
"""A path has at most 4096 bytes; the other fields of a message are small."""


MOST_DESCRIPTORS: Final = 2048
"""The most descriptors that wait to be sent."""


class ProcessPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a process. ``cgroup`` is a path, ``cgroup_id`` its number or 0.

    ``chrooted`` is True if the process has a root of its own, or its root is unknown. ``owner`` is
    `builder.owner`, 0 if unknown; for a file in the host's mount namespace it is the user of
    `FileUsers.of`.
    """

    namespaces: NamespaceSet
    mnt_ns_id: int
    cgroup: bytes
    cgroup_id: int = 0
    chrooted: bool = False
    owner: int = 0


class Caught(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A pinned file that was mapped executable; its descriptor is an O_PATH one.

    ``key`` is the name of the file at that place in a `Forget` message; ``path`` is the path as its
    users saw it. A message with ``build_id`` has no descriptor, because too many files were
    waiting.
    """

    key: bytes
    pid: int
    seen_ns: int
    path: bytes
    identity: FileIdentity
    place: ProcessPlace
    build_id: BuildId | None = None


class Missed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A mapped file that could not be opened, and the reason.

    ``place`` is that of its process, if known.
    """

    pid: int
    path: bytes
    reason: str
    errno: int
    place: ProcessPlace = ProcessPlace(NamespaceSet(), 0, b"")


class Lost(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Mappings were lost: all processes must be scanned. ``count`` is their number, if known."""

    count: int
    reason: str


class CatcherFailed(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The catcher cannot work any longer, and ends."""

    reason: str


class Counts(msgspec.Struct, array_like=True, tag=6):
    """Counts since the start: records read, files sent, missed and let go, records lost, and
    mappings beyond the rate of their share.
    """

    records: int = 0
    caught: int = 0
    missed: int = 0
    unpinned: int = 0
    lost: int = 0
    dropped: int = 0


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Files that were not captured: send them again when they are mapped again."""

    keys: tuple[bytes, ...]


class Flooded(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The number of mappings beyond the rate of a share, since the last such message.

    Processes at ``place`` map new files too fast; ``paths`` are a few of these files.
    """

    place: ProcessPlace
    count: int
    paths: tuple[bytes, ...]


class Generated(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """A process has made anonymous memory executable."""

    pid: int
    share: Share = HOST


class Silent(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The processes for which threads of the catcher have waited for a second, at most
    `MOST_NAMED`; ``count`` is the number of all. ``identifier_s`` is the time in seconds for which
    the identifier has worked on one file, 0 if it is less than a second. ``unasked`` are other
    processes of the same owners, whose files are looked up by path only.
    """

    processes: tuple[SilentProcess, ...]
    count: int
    identifier_s: float = 0.0
    unasked: tuple[int, ...] = ()


MOST_NAMED: Final = 64


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """The kernel's program is not there, and the reason: each mapping wakes a thread, also that of
    a known file.
    """

    reason: str


Message = (
    Caught
    | Missed
    | Lost
    | CatcherFailed
    | Counts
    | Forget
    | Flooded
    | Generated
    | Silent
    | Refused
)

# Build IDs are bytes of a type that msgspec does not know.
_encode = msgspec.msgpack.Encoder(enc_hook=bytes).encode
_decoder = msgspec.msgpack.Decoder(Message, dec_hook=lambda kind, data: kind(data))


def encode(message: Message) -> bytes:
    """Return the bytes of a message."""
    return _encode(message)


def send(sock: socket.socket, data: bytes, fd: int = -1) -> None:
    """Send an encoded message, with a copy of ``fd`` unless it is -1.

    Raises BlockingIOError if there is no room, OSError if the other end is closed.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd >= 0 else ()
    sock.sendmsg([data], rights)


def receive(sock: socket.socket) -> tuple[Message, int] | None:
    """Return the next message, and its descriptor or -1; None at the end.

    Raises BlockingIOError if none is waiting, OSError, and ValueError for an invalid message.
    """
    data, ancillary, _, _ = sock.recvmsg(MAX_BYTES, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    fd = fds[0] if fds else -1
    if not data:
        return None
    try:
        return _decoder.decode(data), fd
    except (msgspec.MsgspecError, ValueError, RecursionError, InvalidBuildId) as error:
        with contextlib.suppress(OSError):
            close_fds(fd)
        raise ValueError(f"not a message: {error}") from error


_NO_ROOM: Final = frozenset((errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM))


class Outbox:
    """Sends over a non-blocking socket; if there is no room, polls the socket with ``epoll``.
    Thread-safe.

    Descriptors are closed after they are sent. The receiver keeps its copies for a moment, because
    the last process to close a file may have to unmount its filesystem. At most ``most`` of them
    wait, which their owners divide; the host may have as many again. `put` does not wait for a
    `flush` of another thread, `hold` may. `flush` raises BrokenPipeError if the other end is
    closed.
    """

    def __init__(
        self, sock: socket.socket, epoll: select.epoll, most: int = MOST_DESCRIPTORS
    ) -> None:
        self._socket = sock
        self._epoll = epoll
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, int, Share]] = deque()
        self._is_blocked = False
        self._quotas = {True: Quota(2 * most), False: Quota(most)}  # the first one for the host

    def __len__(self) -> int:
        return len(self._waiting)

    def hold(self, share: Share) -> bool:
        """Take a place for a descriptor; return False if its owner would have too many."""
        with self._lock:
            return self._quotas[share == HOST].take(share.owner)

    def put(self, message: Message, fd: int = -1, share: Share = HOST) -> None:
        """Queue a message with a descriptor, which is closed after it is sent; ``share`` has a
        place for it.
        """
        self._waiting.append((encode(message), fd, share))

    def flush(self) -> None:
        """Send as many messages as there is room for."""
        with self._lock:
            self._send_waiting()
            if bool(self._waiting) != self._is_blocked:
                self._is_blocked = not self._is_blocked
                more = select.EPOLLOUT if self._is_blocked else 0
                self._epoll.modify(self._socket.fileno(), select.EPOLLIN | more)

    def _send_waiting(self) -> None:
        while self._waiting:
            data, fd, share = self._waiting[0]
            try:
                send(self._socket, data, fd)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
                break
            self._waiting.popleft()
            if fd >= 0:
                self._quotas[share == HOST].give_back(share.owner)
                os.close(fd)
