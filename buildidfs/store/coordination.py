# SPDX-License-Identifier: Apache-2.0
"""Locks between the processes that use one store, and messages about commits.

**Naming and removing** (`naming`, `removing`). A commit finds a blob in place, and then writes the
row that refers to it; a removal deletes the row, and then the blob. Neither may run between the two
steps of the other. LMDB's lock covers rows only, so both also take flock(2) on the file ``lock``,
commits a shared lock and removals an exclusive one, always before a write transaction begins. Each
use opens the file anew: the lock belongs to the open file description, so it also works between
threads. With flock an exclusive lock can wait for ever while shared locks come and go. So all
processes first take a lock on the directory ``blobs``, which a removal holds while it waits.

**Announcements** (`ChangeListener`, `announce`). Each listener binds a datagram socket in
``listeners/``. A committer sends one message, msgpack [count, [ordinal, ...]], to all sockets,
together with the write end of one pipe. A listener closes its copy of this end after it has dropped
its cache. The committer waits until the last copy is closed, for one second at most. If a listener
dies, the kernel closes its copy; if a listener is gone already, its socket refuses the connection,
and the committer removes the socket. ``count`` is the number of announced commits. If a listener
misses a number (its queue was full, the committer was killed), it treats everything as changed.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec

from buildidfs.linux.file_ops import close_fds, closing_fd, on_error
from buildidfs.store.errors import translated

#: A longer list is sent as "everything", because the message must fit in one datagram.
_MOST_ORDINALS = 4096

_MESSAGE_BYTES = 64 << 10
_PATIENCE_S = 1.0

_Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Message = tuple[_Ordinal, list[_Ordinal]]
_decoder = msgspec.msgpack.Decoder(_Message)
_numbers = itertools.count()


class ChangeListener:
    """The receiving side: poll `fileno`, call `receive`, update the caches, call `acknowledge`."""

    def __init__(self, root: bytes, count: Callable[[], int]) -> None:
        directory = os.path.join(root, b"listeners")
        self._path = os.path.join(directory, b"%d-%d.sock" % (os.getpid(), next(_numbers)))
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._waiting: list[int] = []
        with on_error(self._socket.close), translated(root):
            os.makedirs(directory, 0o700, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # the socket of an earlier process with our number
            with _short(directory) as short:
                self._socket.bind(short + os.path.basename(self._path))
        # Read after the bind: a commit between the two is in the queue, and does not count as
        # missing.
        self._count = count()

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is something to `receive`."""
        return self._socket.fileno()

    def receive(self) -> list[int] | None:
        """Return the ordinals of the changed build IDs; [] if all may have changed; None without a
        message.

        Takes all waiting messages. Their committers wait until `acknowledge`.
        """
        ordinals: dict[int, None] | None = {}
        some = False
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, socket.CMSG_SPACE(4))
            except BlockingIOError:
                break
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
                    self._waiting.extend(fds)
            some = True
            named = self._decode(data)
            ordinals = None if named is None or ordinals is None else ordinals | named
        if not some:
            return None
        return list(ordinals or ())

    def _decode(self, data: bytes) -> dict[int, None] | None:
        try:
            count, ordinals = _decoder.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None
        missed = count > self._count + 1
        self._count = max(count, self._count)
        return None if missed or not ordinals else dict.fromkeys(ordinals)

    def acknowledge(self) -> None:
        """Let the committers of all received messages continue."""
        waiting, self._waiting = self._waiting, []
        close_fds(*waiting)

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self.acknowledge()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket.close()


def announce(root: bytes, count: int, ordinals: Sequence[int]) -> bool:
    """Tell every listener, and wait until each has acknowledged, for a second at most.

    ``count`` is the number of the commit. Returns True if all listeners acknowledged. Raises no
    errors, because the commit is done already.
    """
    directory = os.path.join(root, b"listeners")
    try:
        names = [name for name in os.listdir(directory) if name.endswith(b".sock")]
    except OSError:
        return False
    if not names:
        return True
    message = msgspec.msgpack.encode((count, ordinals if len(ordinals) <= _MOST_ORDINALS else ()))
    deadline = time.monotonic() + _PATIENCE_S
    all_sent = False
    reading, writing = os.pipe2(os.O_CLOEXEC)
    with closing_fd(reading):
        with closing_fd(writing), contextlib.suppress(OSError), _short(directory) as short:
            sent = [_send(short + name, message, writing, deadline) for name in names]
            all_sent = all(sent)
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return all_sent and bool(ended)


def _send(path: bytes, message: bytes, writing: int, deadline: float) -> bool:
    """Send the message to one listener; return True if it was sent, or the listener is gone."""
    flags = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
    with socket.socket(socket.AF_UNIX, flags) as sender:
        try:
            sender.connect(path)
        except ConnectionRefusedError:  # its process is gone
            with contextlib.suppress(OSError):
                os.unlink(path)
            return True
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing]))]
        while True:
            try:
                sender.sendmsg([message], rights)
                return True
            except BlockingIOError:  # its queue is full: it is slow, or hangs
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([], [sender], [], left)[1]:
                    return False
            except OSError:  # it died just now
                return True


@contextlib.contextmanager
def _short(directory: bytes) -> Iterator[bytes]:
    """Yield a path of the directory that is short enough for a socket address (108 bytes)."""
    with closing_fd(os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        yield b"/proc/self/fd/%d/" % fd


_FILE = b"lock"
_GATE = b"blobs"


@contextlib.contextmanager
def naming(root: bytes) -> Iterator[None]:
    """Hold the lock for giving names to blobs, until the commit of their rows. Raises
    `StoreError`.
    """
    with contextlib.ExitStack() as stack:
        with translated(root), _held(_opened_gate(root), fcntl.LOCK_SH):
            stack.enter_context(_held(_opened_file(root), fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def removing(root: bytes) -> Iterator[None]:
    """Hold the lock for removing rows and then their blobs. Raises `StoreError`."""
    with contextlib.ExitStack() as stack:
        with translated(root):
            stack.enter_context(_held(_opened_gate(root), fcntl.LOCK_EX))
            stack.enter_context(_held(_opened_file(root), fcntl.LOCK_EX))
        yield


def _opened_gate(root: bytes) -> int:
    return os.open(os.path.join(root, _GATE), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _opened_file(root: bytes) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(root, _FILE), flags, 0o600)


@contextlib.contextmanager
def _held(fd: int, how: int) -> Iterator[None]:
    with closing_fd(fd):
        fcntl.flock(fd, how)
        try:
            yield
        finally:
            # A child forked meanwhile shares the file description, and would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
