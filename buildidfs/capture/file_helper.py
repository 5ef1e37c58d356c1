# SPDX-License-Identifier: Apache-2.0
"""Look at files on filesystems that may never answer, by a process that can be left behind.

A thread that waits for a FUSE server cannot be ended once the server has taken the request, and
keeps its whole process from ending. A server may answer for the first pages of a file and then fall
silent, so nothing on such a filesystem is read, asked for its attributes, or looked up by this
process. A helper does so, one question at a time, and hands back descriptors (O_PATH, whose close
asks nobody) and copies. When it does not answer in time it is killed, whether or not it can die,
and the next question starts another one.

The helper is this module run as a program. It has one thread and knows no store.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import signal
import socket
import stat
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import elf_file
from buildidfs.capture.as_owner.helper import BYTES_PER_SECOND, MAX_BYTES, copy_all
from buildidfs.linux import openat2, statx
from buildidfs.model import BuildId, FileIdentity, Mapping

if TYPE_CHECKING:
    import subprocess
    from types import TracebackType

_MOST_LEFT_BEHIND: Final = 16
_SILENT_FOR_S: Final = 300.0
_MESSAGE_MAX: Final = 8192
_END_S: Final = 1.0
_START: Final = """
import sys
sys.path.insert(0, sys.argv[2])
from buildidfs.capture import file_helper as filehelper
filehelper.main(int(sys.argv[1]))
"""

Device = tuple[int, int]

# Helpers that were killed and have not ended: their filesystems keep them.
_left_behind: list[subprocess.Popen[bytes]] = []


class _Request(msgspec.Struct, array_like=True):
    """``kind`` is ``open`` (of ``path`` in the root given), ``look`` or ``copy`` (of a pinned
    file, to a second descriptor), or ``identify`` (of what process ``pid`` has mapped).
    """

    kind: str
    path: bytes = b""
    pid: int = 0
    mapping: Mapping | None = None


class _Answer(msgspec.Struct, array_like=True):
    """The ``identity`` of the file, or its ``build_id`` (empty: none), or an error."""

    identity: FileIdentity | None = None
    build_id: bytes | None = None
    errno: int = 0
    reason: str = ""


class FileHelper:
    """Waits ``seconds`` for each answer, and then for minutes no more for that device.

    A ``device`` is a pair of numbers that stands for a filesystem, or for what is asked for
    together. Thread-safe: one question at a time. All methods raise OSError, TimeoutError where
    there is no answer.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._silent: dict[Device, float] = {}
        self._is_closed = False

    def __enter__(self) -> FileHelper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self, device: Device, root_fd: int, path: bytes) -> tuple[int, FileIdentity]:
        """Pin what is at ``path`` of a root (O_PATH), and say what it is. The caller closes it."""
        return _found(*self._ask(device, _Request("open", path), [root_fd], self._seconds))

    def look(self, device: Device, path_fd: int) -> FileIdentity:
        """What a pinned file is by now."""
        return _found(*self._ask(device, _Request("look"), [path_fd], self._seconds))[1]

    def build_id(self, device: Device, pid: int, mapping: Mapping) -> BuildId | None:
        """The build ID of a mapped file as the kernel or the memory of the process tells it."""
        request = _Request("identify", pid=pid, mapping=mapping)
        answer, _ = self._ask(device, request, [], self._seconds)
        return BuildId(answer.build_id) if answer.build_id else None

    def copy(self, device: Device, path_fd: int, size: int) -> tuple[FileIdentity, int]:
        """A descriptor for reading of a copy of a pinned regular file of about ``size`` bytes.

        The identity is that of the original. Raises OSError: EFBIG if it is too large, ETXTBSY if
        it changed meanwhile.
        """
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        scratch = elf_file.scratch_file()
        try:
            seconds = self._seconds + size / BYTES_PER_SECOND
            request = _Request("copy")
            _, identity = _found(*self._ask(device, request, [path_fd, scratch], seconds))
            # For reading only, so that nobody takes us for a writer of it.
            return identity, os.open(f"/proc/self/fd/{scratch}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(scratch)

    def close(self) -> None:
        """End the helper, or leave it behind, in the middle of a question too."""
        self._is_closed = True
        if (channel := self._channel) is not None:
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._lock:
            process = self._process
            self._leave()
        if process is not None:
            import subprocess

            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)

    def _ask(
        self, device: Device, request: _Request, fds: list[int], seconds: float
    ) -> tuple[_Answer, int]:
        with self._lock:
            now = time.monotonic()
            if now - self._silent.get(device, -_SILENT_FOR_S) < _SILENT_FOR_S:
                raise _silence()
            channel = self._started()
            try:
                socket.send_fds(channel, [msgspec.msgpack.encode(request)], fds)
                channel.settimeout(seconds)
                data, got, _, _ = socket.recv_fds(channel, _MESSAGE_MAX, 1)
            except TimeoutError:
                self._silent[device] = now
                self._leave()
                raise _silence() from None
            except OSError:
                data, got = b"", []
            if not data:
                self._leave()
                raise OSError(errno.EIO, "the process that reads such files was ended")
        answer = msgspec.msgpack.decode(data, type=_Answer)
        if answer.errno:
            raise OSError(answer.errno, answer.reason)
        return answer, got[0] if got else -1

    def _started(self) -> socket.socket:
        """The way to the helper, which is started if there is none. Raises OSError."""
        if self._is_closed:
            raise OSError(errno.ECANCELED, "the program is ending")
        if self._channel is not None:
            return self._channel
        _left_behind[:] = [process for process in _left_behind if process.poll() is None]
        if len(_left_behind) >= _MOST_LEFT_BEHIND:
            raise TimeoutError(errno.ETIMEDOUT, "too many filesystems do not answer")
        import subprocess  # most scans need none, and it takes as long as a few hundred files

        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        argv = [sys.executable, "-I", "-c", _START, str(its.fileno()), package]
        with its, contextlib.ExitStack() as on_error:
            on_error.enter_context(ours)
            # Whoever reads our output to its end must not wait for one that is left behind.
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
                cwd="/",
            )
            on_error.pop_all()
        self._channel = ours
        return ours

    def _leave(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.kill()
            _left_behind.append(self._process)
            self._process = None


def _found(answer: _Answer, fd: int) -> tuple[int, FileIdentity]:
    if answer.identity is None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return fd, answer.identity


def _silence() -> TimeoutError:
    return TimeoutError(errno.ETIMEDOUT, "its filesystem does not answer")


# --- the helper ---------------------------------------------------------------------------------


def main(fd: int) -> None:
    """Answer questions until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C goes to all processes of the program
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError), socket.socket(fileno=fd) as channel:
        while _serve(channel):
            pass


def _serve(channel: socket.socket) -> bool:
    data, fds, _, _ = socket.recv_fds(channel, _MESSAGE_MAX, 2)
    if not data:
        return False
    opened: list[int] = []
    try:
        try:
            answer = _answer(msgspec.msgpack.decode(data, type=_Request), fds, opened)
        except OSError as error:
            reason = error.strerror or str(error)
            answer = _Answer(errno=error.errno or errno.EIO, reason=reason)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))]
        channel.sendmsg([msgspec.msgpack.encode(answer)], rights if opened else [])
    finally:
        for fd in (*fds, *opened):
            os.close(fd)
    return True


def _answer(request: _Request, fds: list[int], opened: list[int]) -> _Answer:
    """Do what is asked; ``opened`` gets what is handed back. Raises OSError."""
    if request.kind == "open":
        opened.append(openat2.open_in_root(fds[0], request.path, os.O_PATH))
        return _Answer(statx.identity(opened[0]))
    if request.kind == "look":
        return _Answer(statx.identity(fds[0]))
    if request.mapping is not None:
        from buildidfs.capture.process.process import Process, Ways  # rarely needed, and large

        with Process(request.pid, Ways()) as process:
            return _Answer(build_id=bytes(process.build_id(request.mapping) or b""))
    path_fd, copy_fd = fds
    before = statx.identity(path_fd)
    if not stat.S_ISREG(before.mode):
        raise OSError(errno.EINVAL, "not a regular file")
    fd = openat2.reopen_regular(path_fd)
    try:
        copy_all(fd, copy_fd, before.size)
        if statx.identity(path_fd) != before:
            raise OSError(errno.ETXTBSY, "it changed while it was read")
    finally:
        fds.append(fd)  # closed when the answer is out: its server is asked for that, too
    return _Answer(before)
