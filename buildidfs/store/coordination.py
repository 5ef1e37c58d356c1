# SPDX-License-Identifier: Apache-2.0
"""Locks between the processes that use one store, and messages about commits.

**Naming and removing** (`naming`, `removing`). A commit finds a blob in place, and then writes the
row that speaks of it; a removal deletes the row, and then the blob. Neither may come between the
two steps of the other. LMDB's lock covers rows only, so flock(2) on the file ``lock`` goes around
it, shared for naming: always taken before a write transaction begins, never within one. Each use
opens the file anew, because the lock belongs to the open file description, and so holds between
threads, too. flock gives no turn to an exclusive lock while shared ones come and go; so all pass a
gate first, the directory ``blobs``, which a removal closes behind it.

**Announcements** (`Listener`, `announce`). Each listener binds a datagram socket in
``listeners/``. A committer sends one message, msgpack [count, [ordinal, ...]], to all of them, and
with it the writing end of one pipe; a listener that has forgotten what it had cached closes its
copy. When the last copy is closed the pipe ends, which is what the committer waits for, one second
at most. A listener that dies closes its copy too, and one that is gone already refuses the
connection: its socket is then removed. ``count`` is the number of announced commits. A listener
that finds one missing (its queue was full, the committer was killed) takes everything for changed.
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

from buildidfs.store.errors import translated

#: A longer list is sent as "everything": it has to fit one datagram.
_MOST_ORDINALS = 4096

_MESSAGE_BYTES = 64 << 10
_PATIENCE_S = 1.0

_Ordinal = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Message = tuple[_Ordinal, list[_Ordinal]]
_decoder = msgspec.msgpack.Decoder(_Message)
_numbers = itertools.count()


class Listener:
    """The receiving side. Poll `fileno`; then `receive`, act on it, and `acknowledge`."""

    def __init__(self, root: bytes, count: Callable[[], int]) -> None:
        directory = os.path.join(root, b"listeners")
        self._path = os.path.join(directory, b"%d-%d.sock" % (os.getpid(), next(_numbers)))
        self._socket = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self._waiting: list[int] = []
        try:
            with translated(root):
                os.makedirs(directory, 0o700, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._path)  # of an earlier process with our number
                with _short(directory) as short:
                    self._socket.bind(short + os.path.basename(self._path))
        except BaseException:
            self._socket.close()
            raise
        # Only now: a commit between the two is in the queue, and not taken for a missing one.
        self._count = count()

    def fileno(self) -> int:
        """Readable when there is something to `receive`."""
        return self._socket.fileno()

    def receive(self) -> list[int] | None:
        """Ordinals that changed; an empty list: everything; None: there was nothing to read.

        Takes all that is waiting. The committers wait until `acknowledge`.
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
        """Let the committers of all that was received go on."""
        while self._waiting:
            os.close(self._waiting.pop())

    def close(self) -> None:
        """Stop listening; safe to call twice."""
        self.acknowledge()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        self._socket.close()


def announce(root: bytes, count: int, ordinals: Sequence[int]) -> bool:
    """Tell every listener, and wait until each has acknowledged, for a second at most.

    ``count`` is that of the commit. True when all have. Never fails: the commit is done already.
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
    told = False
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError), _short(directory) as short:
            sent = [_send(short + name, message, writing, deadline) for name in names]
            told = all(sent)
        os.close(writing)
        writing = -1
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        return told and bool(ended)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _send(path: bytes, message: bytes, writing: int, deadline: float) -> bool:
    """Return True if one listener was told, or is gone."""
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
    """A name for the directory that fits a socket address (108 bytes) however long it is."""
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield b"/proc/self/fd/%d/" % fd
    finally:
        os.close(fd)


_FILE = b"lock"
_GATE = b"blobs"


@contextlib.contextmanager
def naming(root: bytes) -> Iterator[None]:
    """While blobs get names, until the commit that speaks of them. Raises `StoreError`."""
    with contextlib.ExitStack() as stack:
        with translated(root), _held(_opened_gate(root), fcntl.LOCK_SH):
            stack.enter_context(_held(_opened_file(root), fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def removing(root: bytes) -> Iterator[None]:
    """While rows and then their blobs are removed. Raises `StoreError`."""
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
    try:
        fcntl.flock(fd, how)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the description too, and would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
