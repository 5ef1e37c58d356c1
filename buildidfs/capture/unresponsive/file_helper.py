# SPDX-License-Identifier: Apache-2.0
"""Access files on filesystems that may never answer, through a process that can be abandoned.

A server may answer for the first pages of a file and then stop. So this process neither reads a
file on such a filesystem, nor gets its attributes, nor looks it up; a helper process does. If the
helper does not answer in time, it is killed, or abandoned if the kernel keeps it alive, and the
next question starts another one. The helper has one thread and knows no store. It returns copies of
files, and descriptors opened with O_PATH, because closing such a descriptor asks no server.
"""

from __future__ import annotations

import array
import contextlib
import errno
import logging
import os
import re
import signal
import socket
import stat
import threading
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base
from buildidfs.capture.unresponsive.filesystems import Silences, is_slow_type, no_answer
from buildidfs.errors import UsageError
from buildidfs.formats import proc_text
from buildidfs.linux import child, file_ops, inodes, mounts
from buildidfs.linux.child import Supervised
from buildidfs.linux.file_ops import close_fds, closing_fd
from buildidfs.model import BuildId, FileIdentity, Mapping
from buildidfs.shares import HOST, Quota, Share

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from buildidfs.capture.unresponsive.filesystems import Device
    from buildidfs.linux.child import Child


MAX_BYTES: Final = 1 << 30
"""The largest file that is copied: a server may report any size, and send bytes without end."""

BYTES_PER_SECOND: Final = 8 << 20
"""The least speed of a filesystem that counts as answering."""

_log = logging.getLogger(__name__)

_MESSAGE_MAX: Final = 8192

_MOST_LEFT_BEHIND: Final = 16
_MOST_OF_HOST: Final = 4
_END_S: Final = 1.0
_SILENT_FOR_S: Final = 300.0
_IDENTIFY_S: Final = 60.0
_CHUNK: Final = 1 << 20


class _Request(msgspec.Struct, array_like=True):
    """A request. ``kind`` is ``open`` (of ``path`` in the given root), ``start`` (of ``path`` from
    the given directory, as open(2) does), ``look``, ``read`` or ``copy`` (of a pinned file; a copy
    goes to a second descriptor), or ``identify`` (of a mapping of process ``pid``).
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


class FileHelper:
    """The client of the helper process; a context manager. Thread-safe: one question at a time.

    It waits ``seconds`` for each answer; after a timeout it does not ask that device for some
    minutes. ``share`` is that of the file, or of the process that uses it: if many filesystems of
    an owner do not answer, no other one of that owner is asked (`LeftBehind`). All methods raise
    OSError, TimeoutError if there is no answer.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._program = Supervised(__name__, quiet=True)
        self._silences = Silences(_SILENT_FOR_S)
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

    def open(
        self, device: Device, root_fd: int, path: bytes, share: Share = HOST
    ) -> tuple[int, FileIdentity]:
        """Open the file at ``path`` of a root (O_PATH), and return its identity.

        The caller closes the descriptor.
        """
        answer, fd = self._ask(device, _Request("open", path), [root_fd], share)
        return fd, _identity(answer)

    def start(self, device: Device, directory_fd: int, path: bytes) -> tuple[int, FileIdentity]:
        """Do as `open`, for a path that the operator gave: all links are followed."""
        answer, fd = self._ask(device, _Request("start", path), [directory_fd], HOST)
        return fd, _identity(answer)

    def read(self, device: Device, path_fd: int, size: int) -> None:
        """Read all of a pinned regular file of about ``size`` bytes, to test that all of it can be
        read.
        """
        self._ask(device, _Request("read"), [path_fd], HOST, size / BYTES_PER_SECOND)

    def look(self, device: Device, path_fd: int, share: Share = HOST) -> FileIdentity:
        """Return the present identity of a pinned file."""
        return _identity(self._ask(device, _Request("look"), [path_fd], share)[0])

    def build_id(
        self, device: Device, pid: int, mapping: Mapping, share: Share = HOST
    ) -> BuildId | None:
        """Return the build ID of a mapped file, from the kernel or the memory of the process."""
        answer, _ = self._ask(device, _Request("identify", pid=pid, mapping=mapping), [], share)
        return BuildId(answer.build_id) if answer.build_id else None

    def copy(
        self, device: Device, path_fd: int, size: int, share: Share = HOST
    ) -> tuple[FileIdentity, int]:
        """Return the identity of a pinned regular file of about ``size`` bytes, and the descriptor
        of a copy.

        Raises OSError: EFBIG if it is too large, ETXTBSY if it changed meanwhile.
        """
        if size > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        seconds = size / BYTES_PER_SECOND
        with closing_fd(base.scratch_file()) as scratch:
            fds = [path_fd, scratch]
            answer, _ = self._ask(device, _Request("copy"), fds, share, seconds)
            # For reading only, so that other programs do not see a writer.
            identity = _identity(answer)
            return identity, os.open(f"/proc/self/fd/{scratch}", os.O_RDONLY | os.O_CLOEXEC)

    def _ask(
        self,
        device: Device,
        request: _Request,
        fds: list[int],
        share: Share,
        more_seconds: float = 0.0,
    ) -> tuple[_Answer, int]:
        with self._lock:
            if self._silences.has(device):
                raise no_answer()
            if not _left_behind.has_room(share):
                raise TimeoutError(errno.ETIMEDOUT, "too many filesystems of its owner are silent")
            channel = self._started()
            try:
                socket.send_fds(channel, [msgspec.msgpack.encode(request)], fds)
                channel.settimeout(self._seconds + more_seconds)
                data, got, _, _ = socket.recv_fds(channel, _MESSAGE_MAX, 1)
            except TimeoutError:
                _log.debug("device %d, mount %d: no answer, not asked for a while", *device)
                self._silences.add(device)
                if (process := self._program.kill(0)) is not None:
                    _left_behind.add(process, share)
                raise no_answer() from None
            except OSError:
                data, got = b"", []
            if not data:
                self._program.kill(0)
                raise OSError(errno.EIO, "the process that reads such files was ended")
            answer = msgspec.msgpack.decode(data, type=_Answer)
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
            reason = f"the process that reads such files did not start: {error.strerror}"
            raise OSError(errno.EIO, reason) from error


def _identity(answer: _Answer) -> FileIdentity:
    if answer.identity is None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return answer.identity


# --- the program --------------------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Answer questions on a socket until its other end is closed.

    Descriptors are closed after the answer is sent, because closing may ask a server, too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ^C goes to all processes of the program
    with contextlib.suppress(ConnectionError), socket.socket(fileno=int(words[0])) as channel:
        child.report_ready(channel)
        while True:
            data, fds, _, _ = socket.recv_fds(channel, _MESSAGE_MAX, 2)
            if not data:
                return
            opened: list[int] = []
            try:
                reply = _answer(msgspec.msgpack.decode(data, type=_Request), fds, opened)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))]
                channel.sendmsg([msgspec.msgpack.encode(reply)], rights if opened else [])
            finally:
                close_fds(*fds, *opened)


def _answer(request: _Request, fds: list[int], opened: list[int]) -> _Answer:
    try:
        return _look(request, fds, opened)
    except OSError as error:
        return _Answer(errno=error.errno or errno.EIO, reason=error.strerror or str(error))


def _look(request: _Request, fds: list[int], opened: list[int]) -> _Answer:
    """Handle a request; ``opened`` gets the descriptors to return. Raises OSError."""
    if request.kind == "open":
        opened.append(inodes.open_in_root(fds[0], request.path, os.O_PATH))
        return _Answer(inodes.identity(opened[0]))
    if request.kind == "start":
        opened.append(os.open(request.path, os.O_PATH | os.O_CLOEXEC, dir_fd=fds[0]))
        return _Answer(inodes.identity(opened[0]))
    if request.kind == "read":
        fds.append(inodes.reopen_regular(fds[0]))
        while os.read(fds[1], _CHUNK):
            pass
        return _Answer()
    if request.kind == "look":
        return _Answer(inodes.identity(fds[0]))
    if request.mapping is not None:
        from buildidfs.capture.process.process import (  # rarely needed, and large
            PinnedProcess,
            Ways,
        )

        # The client ends this process if there is no answer in time.
        with PinnedProcess(request.pid, Ways(answer_s=_IDENTIFY_S)) as process:
            return _Answer(build_id=bytes(process.build_id(request.mapping) or b""))
    path_fd, copy_fd = fds
    before = inodes.identity(path_fd)
    if not stat.S_ISREG(before.mode):
        raise OSError(errno.EINVAL, "not a regular file")
    fd = inodes.reopen_regular(path_fd)
    fds.append(fd)
    _copy_all(fd, copy_fd, before.size)
    if inodes.identity(path_fd) != before:
        raise OSError(errno.ETXTBSY, "it changed while it was read")
    return _Answer(before)


def _copy_all(fd: int, copy_fd: int, size: int) -> None:
    """Copy all bytes of a file of about ``size`` bytes. Raises OSError, EFBIG for too many."""
    if size > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    offset = 0
    while chunk := os.pread(fd, _CHUNK, offset):
        file_ops.write_fully_at(copy_fd, chunk, offset)
        offset += len(chunk)
        if offset > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


_MOST_STEPS: Final = 4096
_OF_PROCESS: Final = re.compile(rb"/proc/[0-9]+/(root|cwd)$")


_NAMED_S: Final = 10.0


class NamedFileProbe:
    """Checks that files named by the operator can be read, before this process reads them.

    Only files on FUSE filesystems are read, and those seen through another process. A server may
    still stop answering later. A context manager.
    """

    def __init__(self) -> None:
        self._helper = FileHelper(_NAMED_S)
        self._fuse = {
            mount.mount_point: mount.dev
            for mount in proc_text.mounts_in(mounts.mountinfo())
            if is_slow_type(mount.fstype)
        }

    def __enter__(self) -> NamedFileProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._helper.close()

    def check(self, path: bytes) -> None:
        """Raise TimeoutError if the filesystem does not answer; other errors are left to the
        reader.
        """
        try:
            device = self._device(path)
            if device is None:
                return
            with closing_fd(os.open(b".", os.O_PATH | os.O_CLOEXEC)) as here:
                path_fd, identity = self._helper.start(device, here, path)
            with closing_fd(path_fd):
                if stat.S_ISREG(identity.mode):
                    self._helper.read(device, path_fd, identity.size)
        except TimeoutError:
            raise
        except OSError:
            return

    def _device(self, path: bytes) -> Device | None:
        """Return the filesystem that a path leads to, if it may not answer, without asking it.

        Raises OSError.
        """
        if not self._fuse and not path.startswith(b"/proc/"):
            return None
        current, rest = b"/", os.path.join(os.getcwdb(), path).split(b"/")[::-1]
        for _ in range(_MOST_STEPS):
            if not rest:
                return None
            if (name := rest.pop()) in (b"", b"."):
                continue
            current = os.path.normpath(os.path.join(current, name))
            if current in self._fuse:
                return self._fuse[current]
            if _OF_PROCESS.match(current):
                return -1, int(current.split(b"/")[2])
            with contextlib.suppress(OSError):
                target = os.readlink(current)
                rest += target.split(b"/")[::-1]
                current = b"/" if target.startswith(b"/") else os.path.dirname(current)
        return None


def check_readable(path: bytes) -> None:
    """Raise `UsageError` if a file named by the operator is on a filesystem that does
    not answer.
    """
    with NamedFileProbe() as probe:
        try:
            probe.check(path)
        except TimeoutError as error:
            raise UsageError(f"cannot read {os.fsdecode(path)!r}: {error.strerror}") from error
