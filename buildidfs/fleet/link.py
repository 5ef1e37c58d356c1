# SPDX-License-Identifier: Apache-2.0
"""`Link`: the process that makes the requests to one bucket (`requests`), and the way to it.

The process has a limit of memory, and is started with the first request. If it ends, requests fail
until it is started again. Each request in progress has a channel, a
socket of packets, so that requests do not wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.linux.child import Supervised
from buildidfs.linux.file_ops import closing_fd, on_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PACKET: Final = 200 << 10
"""The size of a packet, which the kernel limits."""
INLINE: Final = 128 << 10
"""The bytes of an object that are in a packet; more bytes go to a descriptor."""

_SPARE_S: Final = 5.0
_MOST_IDLE: Final = 64
_MOST_LINE: Final = 16 << 10
_MOST_PART: Final = 1 << 20
_PIPE: Final = 64 << 10

MISSING: Final = "missing"
EXISTS: Final = "exists"
CHANGED: Final = "changed"
NO_ROOM: Final = "no room"
TOO_LARGE: Final = "too large"
DENIED: Final = "denied"
UNAVAILABLE: Final = "unavailable"
"""The values of `Reply.failure`: there is no object, or there is one already, or another version;
the descriptor takes no more bytes (the reason is an error number); it has more bytes than were
requested; access is denied, or there is no bucket; no usable answer.
"""


class RequestLimits(NamedTuple):
    """Limits of requests: seconds for an attempt, seconds for a connection, and the number of
    retries.
    """

    timeout_s: float = 60.0
    connect_s: float = 5.0
    retries: int = 2

    @property
    def patience_s(self) -> float:
        """The seconds after which the process itself does not answer."""
        return self.timeout_s * (self.retries + 1) + _SPARE_S


class Introduction(msgspec.Struct, array_like=True):
    """The bucket of a process, and the options of its client."""

    url: str
    options: dict[str, str]


class BucketRequest(msgspec.Struct, array_like=True):
    """A request for an object or a prefix ``key``.

    ``size`` is the greatest number of bytes, from ``offset`` if it is a range. They go to ``at`` of
    the descriptor that comes with the request, if one does. ``etag`` is a version, the other key of
    a copy, or the key that a listing begins behind.
    """

    op: str
    key: str
    limits: RequestLimits
    size: int = 0
    offset: int = 0
    is_range: bool = False
    at: int = 0
    etag: str = ""
    data: bytes = b""
    metadata: dict[str, str] = {}


class Reply(msgspec.Struct, array_like=True):
    """The answer to a request: a failure with its reason, or the facts about an object, and the
    number of its bytes that were read.
    """

    failure: str = ""
    why: str = ""
    size: int = 0
    metadata: dict[str, str] = {}
    modified: float = 0.0
    etag: str = ""
    data: bytes = b""
    count: int = 0


class LinkDown(Exception):
    """The process has ended, or does not answer; the text is the reason."""


_encode = msgspec.msgpack.Encoder().encode
_replies = msgspec.msgpack.Decoder(Reply)


class _Process:
    """A running process: its socket, and its idle channels."""

    def __init__(self, program: Supervised) -> None:
        """Start the process. Raises OSError."""
        self._program = program
        self._control = program.start()
        self.idle: list[socket.socket] = []
        self.lock = threading.Lock()

    def channel(self) -> socket.socket:
        """Return a channel, which the caller owns. Raises OSError."""
        with self.lock:
            if self.idle:
                return self.idle.pop()
            ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with its:
                try:
                    socket.send_fds(self._control, [b"."], [its.fileno()])
                except OSError:
                    ours.close()
                    raise
            return ours

    def give_back(self, channel: socket.socket) -> None:
        """Take back a channel without a request."""
        with self.lock:
            if len(self.idle) < _MOST_IDLE:
                self.idle.append(channel)
                return
        channel.close()

    def end(self) -> None:
        """Kill the process."""
        with self.lock:
            for channel in self.idle:
                channel.close()
            self.idle.clear()
            self._program.kill(0)


class Link:
    """Sends requests to the process of a bucket. Thread-safe."""

    def __init__(self, introduction: Introduction) -> None:
        self._program = Supervised(
            "buildidfs.fleet.requests", introduction=_encode(introduction), quiet=True
        )
        self._lock = threading.Lock()
        self._uploading = threading.Lock()
        self._process: _Process | None = None
        self._finalizer: weakref.finalize[[], Link] | None = None

    @property
    def pid(self) -> int:
        """The number of the process, 0 while there is none."""
        return self._program.pid

    def ask(self, request: BucketRequest, fd: int = -1) -> Reply:
        """Send a request, and wait for its answer. Raises `LinkDown`."""
        with self._channel() as channel:
            return self._exchanged(channel, request, fd)

    def rows(self, request: BucketRequest) -> Iterator[bytes | Reply]:
        """Yield the lines of a listing, then its answer. Raises `LinkDown`."""
        with self._channel() as channel, contextlib.ExitStack() as stack:
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            with closing_fd(writing):
                socket.send_fds(channel, [_encode(request)], [writing])
            left = b""
            while True:
                if not select.select([reading], [], [], request.limits.patience_s)[0]:
                    raise TimeoutError
                data = os.read(reading, _PIPE)
                *lines, left = (left + data).split(b"\n")
                yield from lines
                if not data or len(left) > _MOST_LINE:
                    break
            yield self._received(channel, request)

    def write(self, request: BucketRequest, chunks: Iterable[bytes]) -> Reply:
        """Send a request with the chunks of an object. Raises `LinkDown`, and as ``chunks``."""
        # One upload at a time, because the parts of each are in memory.
        with self._uploading, self._channel() as channel:
            reading, writing = os.pipe()
            with closing_fd(writing):
                with closing_fd(reading):
                    socket.send_fds(channel, [_encode(request)], [reading])
                with contextlib.suppress(BrokenPipeError):  # the answer has the reason
                    for part in _parts(chunks):
                        _write_all(writing, len(part).to_bytes(4) + part, request.limits)
                    _write_all(writing, bytes(4) + b".", request.limits)
            return self._received(channel, request)

    def _exchanged(self, channel: socket.socket, request: BucketRequest, fd: int) -> Reply:
        socket.send_fds(channel, [_encode(request)], [fd] if fd >= 0 else [])
        return self._received(channel, request)

    def _received(self, channel: socket.socket, request: BucketRequest) -> Reply:
        channel.settimeout(request.limits.patience_s)
        data = channel.recv(PACKET)
        if not data:
            raise ConnectionResetError
        self._program.restarts.succeeded()
        return _replies.decode(data)

    @contextlib.contextmanager
    def _channel(self) -> Iterator[socket.socket]:
        """Lend a channel; a channel whose request was not answered is closed."""
        process = self._started()
        try:
            channel = process.channel()
        except OSError as error:
            self._drop(process)
            raise LinkDown(_ENDED) from error
        with on_error(channel.close):  # the next request must not get the answer of this one
            try:
                yield channel
            except (TimeoutError, ConnectionError) as error:
                self._drop(process)
                late = isinstance(error, TimeoutError)
                raise LinkDown("no answer in time" if late else _ENDED) from error
        process.give_back(channel)

    def _started(self) -> _Process:
        with self._lock:
            if self._process is not None:
                return self._process
            try:
                self._process = _Process(self._program)
            except BlockingIOError:
                raise LinkDown(_ENDED) from None
            except OSError as error:
                raise LinkDown(
                    f"the process that asks it cannot start: {error.strerror}"
                ) from error
            self._finalizer = weakref.finalize(self, self._process.end)
            return self._process

    def _drop(self, process: _Process) -> None:
        """Kill a process that has failed, unless another thread has done so."""
        with self._lock:
            if self._process is process:
                self._process = None
                if self._finalizer is not None:
                    self._finalizer()
                self._program.restarts.failed()


_ENDED: Final = "its answers took too much memory, or the process that asks it was killed"


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield chunks in parts that are small enough for the process."""
    for chunk in chunks:
        for start in range(0, len(chunk), _MOST_PART):
            yield chunk[start : start + _MOST_PART]


def _write_all(fd: int, data: bytes, limits: RequestLimits) -> None:
    """Write to a pipe. Raises TimeoutError if no process reads it, BrokenPipeError."""
    os.set_blocking(fd, False)
    rest = memoryview(data)
    while rest:
        if not select.select([], [fd], [], limits.patience_s)[1]:
            raise TimeoutError
        rest = rest[os.write(fd, rest) :]
