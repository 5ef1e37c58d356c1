# SPDX-License-Identifier: Apache-2.0
"""Helper processes: a program of this package that answers one question at a time over a socket.

The program accesses filesystems in place of this process. If a filesystem does not answer, the
program is killed, or abandoned if the kernel keeps it alive. It has one thread and knows no store.
It returns copies of files, and descriptors opened with O_PATH, because closing such a descriptor
asks no server.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import msgspec

from buildidfs.capture import elf_file
from buildidfs.capture.unresponsive.filesystems import Silences, no_answer
from buildidfs.linux import file_ops, supervised
from buildidfs.linux.file_ops import close_fds, closing_fd
from buildidfs.linux.supervised import Supervised
from buildidfs.shares import HOST, Quota, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

    from buildidfs.capture.unresponsive.filesystems import Device
    from buildidfs.linux.child import Child
    from buildidfs.model import FileIdentity

MAX_BYTES: Final = 1 << 30
"""The largest file that is copied: a server may report any size, and send bytes without end."""

BYTES_PER_SECOND: Final = 8 << 20
"""The least speed of a filesystem that counts as answering."""

MESSAGE_MAX: Final = 8192

_MOST_LEFT_BEHIND: Final = 16
_MOST_OF_HOST: Final = 4
_CHUNK: Final = 1 << 20
_END_S: Final = 1.0


class Reply(Protocol):
    """The answer to a request: the error number and its reason if it is not 0."""

    errno: int
    reason: str


_ReplyT = TypeVar("_ReplyT", bound=Reply)
_RequestT = TypeVar("_RequestT")


class LeftBehind:
    """The killed helpers that the kernel keeps, by the owner of the file for which each of them
    waits. Thread-safe.

    The owners divide ``most`` places, see `Quota`; `HOST` has ``hosts`` places of its own.
    """

    def __init__(self, most: int = _MOST_LEFT_BEHIND, hosts: int = _MOST_OF_HOST) -> None:
        self._lock = threading.Lock()
        self._quotas = {True: Quota(2 * hosts), False: Quota(most)}  # a single owner has half
        self._children: list[tuple[Child, str]] = []

    def has_room(self, share: Share) -> bool:
        """Return True if one more helper may be left behind for files of the owner."""
        with self._lock:
            kept = []
            for process, owner in self._children:
                if process.poll() is None:
                    kept.append((process, owner))
                else:
                    self._quota(owner).give_back(owner)
            self._children = kept
            return self._quota(share.owner).has(share.owner)

    def add(self, process: Child, share: Share) -> None:
        """Remember a helper that was left behind."""
        with self._lock:
            if self._quota(share.owner).take(share.owner):
                self._children.append((process, share.owner))

    def _quota(self, owner: str) -> Quota:
        return self._quotas[owner == HOST.owner]


_left_behind: Final = LeftBehind()


class Helper:
    """The client of a helper process; a context manager. Thread-safe: one question at a time.

    ``module`` has the `main` of the program, and ``name`` is for messages.
    """

    def __init__(self, module: str, name: str, silences: Silences) -> None:
        self._program = Supervised(module, quiet=True)
        self._name = name
        self._silences = silences
        self._lock = threading.Lock()
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process ID of the helper, 0 while there is none."""
        return self._program.pid

    def close(self) -> None:
        """End the helper, or abandon it, even while a question is being answered."""
        self._is_closed = True
        if (channel := self._program.channel) is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._program.kill(_END_S)

    def ask(
        self,
        device: Device,
        request: msgspec.Struct,
        fds: Sequence[int],
        seconds: float,
        kind: type[_ReplyT],
        share: Share,
    ) -> tuple[_ReplyT, int]:
        """Return the answer to a request about a filesystem, and the descriptor that came with it,
        or -1.

        ``share`` is that of the file, or of the process that uses it. Raises OSError: TimeoutError
        if there is no answer, and the error in the answer.
        """
        with self._lock:
            if self._silences.has(device):
                raise no_answer()
            if not _left_behind.has_room(share):
                raise TimeoutError(errno.ETIMEDOUT, "too many filesystems of its owner are silent")
            channel = self._started()
            try:
                socket.send_fds(channel, [msgspec.msgpack.encode(request)], fds)
                channel.settimeout(seconds)
                data, got, _, _ = socket.recv_fds(channel, MESSAGE_MAX, 1)
            except TimeoutError:
                self._silences.add(device)
                if (process := self._program.kill(0)) is not None:
                    _left_behind.add(process, share)
                raise no_answer() from None
            except OSError:
                data, got = b"", []
            if not data:
                self._program.kill(0)
                raise OSError(errno.EIO, f"{self._name} was ended")
            answer = msgspec.msgpack.decode(data, type=kind)
            if answer.errno == errno.ETIMEDOUT:
                self._silences.add(device)
        if answer.errno:
            raise OSError(answer.errno, answer.reason)
        return answer, got[0] if got else -1

    def _started(self) -> socket.socket:
        """Return the socket of the helper; start the helper if there is none. Raises OSError."""
        if self._is_closed:
            raise OSError(errno.ECANCELED, "the program is ending")
        try:
            # A slow start on a busy machine is not the fault of a filesystem.
            return self._program.start()
        except OSError as error:
            raise OSError(errno.EIO, f"{self._name} did not start: {error.strerror}") from error


def copy_to_scratch(copy: Callable[[int], FileIdentity]) -> tuple[FileIdentity, int]:
    """Let ``copy`` fill a scratch file; return its result, and a descriptor of the file.

    The caller closes the descriptor. It is for reading only, so that other programs do not see a
    writer. Raises OSError.
    """
    with closing_fd(elf_file.scratch_file()) as scratch:
        identity = copy(scratch)
        return identity, os.open(f"/proc/self/fd/{scratch}", os.O_RDONLY | os.O_CLOEXEC)


# --- the program --------------------------------------------------------------------------------


def serve(
    words: Sequence[str],
    kind: type[_RequestT],
    most_fds: int,
    answer: Callable[[_RequestT, list[int], list[int]], msgspec.Struct],
) -> None:
    """Answer requests on the socket of a command line until its other end is closed.

    ``answer`` gets the request, its descriptors, and a list for the descriptors to return. All are
    closed after the answer is sent, because closing may ask a server, too. ``answer`` must not
    raise OSError.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ^C goes to all processes of the program
    with contextlib.suppress(ConnectionError), socket.socket(fileno=int(words[0])) as channel:
        supervised.report_ready(channel)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, MESSAGE_MAX, most_fds)
            if not data:
                return
            opened: list[int] = []
            try:
                reply = answer(msgspec.msgpack.decode(data, type=kind), fds, opened)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))]
                channel.sendmsg([msgspec.msgpack.encode(reply)], rights if opened else [])
            finally:
                close_fds(*fds, *opened)


def copy_all(fd: int, copy_fd: int, size: int) -> None:
    """Copy all bytes of a file of about ``size`` bytes. Raises OSError, EFBIG for too many."""
    if size > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    offset = 0
    while chunk := os.pread(fd, _CHUNK, offset):
        file_ops.write_fully_at(copy_fd, chunk, offset)
        offset += len(chunk)
        if offset > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
