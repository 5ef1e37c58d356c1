# SPDX-License-Identifier: Apache-2.0
"""Files on FUSE filesystems that a user mounted for themselves, which not even root may read.

Without allow_other the kernel admits only the mounter, or only processes in the mounter's user
namespace. So a process becomes that user, gives up all rights of root, and reads the file. The
process returns a copy, not the file: inside a user namespace root may not even read from a
descriptor that another process has opened, and neither inside nor outside of one may root get the
size of the file.

That process is a child of the helper process, because a process with threads cannot fork: for each
request a child becomes the user (`linux.credentials`), opens the file, and copies it. If the server
of the filesystem has taken a request and never answers, even a killed child does not end; it is
abandoned.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import socket
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.unresponsive import helper_process
from buildidfs.capture.unresponsive.filesystems import Device, Silences, no_answer
from buildidfs.capture.unresponsive.helper_process import BYTES_PER_SECOND, MAX_BYTES, Helper
from buildidfs.formats import proc_text
from buildidfs.linux import child, credentials, mounts, openat2, statx
from buildidfs.model import FileIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Seconds for which a filesystem that did not answer is not asked; device numbers are reused.
_SILENT_FOR_S: Final = 3600.0
_SILENCES_OF_A_USER: Final = 3
_STARTS: Final = 3

_MAX_NAMESPACES: Final = 33  # user namespaces are nested 32 deep at most
_DESCRIPTORS: Final = 1 << 20  # more than a process may have open, see fs.nr_open in proc(5)
_LAST_WORDS_S: Final = 1.0
_ONLY_FOR_THE_OWNER: Final = ~(stat.S_ISUID | stat.S_ISGID | stat.S_IRWXG | stat.S_IRWXO)


class Mounter(msgspec.Struct, frozen=True):
    """The user who mounted a FUSE filesystem, by the IDs of their user namespace."""

    uid: int
    gid: int


def mounters(text: bytes) -> dict[Device, Mounter]:
    """Return who mounted each FUSE filesystem of a mountinfo text, by (major, minor).

    Mounts of buildidfs are left out.
    """
    found = {}
    for mount in proc_text.mounts_in(text):
        if mount.fstype in (mounts.FILESYSTEM_TYPE, b"fusectl"):
            continue
        uid = proc_text.option(mount.super_options, b"user_id")
        gid = proc_text.option(mount.super_options, b"group_id")
        if mount.fstype.startswith(b"fuse") and uid and gid and uid.isdigit() and gid.isdigit():
            found[mount.dev] = Mounter(int(uid), int(gid))
    return found


class OwnedFile(msgspec.Struct, frozen=True):
    """A file that root may not open; ``path_fd`` (O_PATH) refers to it.

    ``device`` (major, minor) and ``inode`` are those of the mapping. ``user_namespaces`` are
    descriptors of the user namespaces, without our own, to which the mounter's IDs may belong, from
    the innermost outwards: `linux.namespaces.foreign_users` of a process that sees the mount.
    """

    path_fd: int
    device: Device
    inode: int
    mounter: Mounter
    user_namespaces: tuple[int, ...] = ()


class _Request(msgspec.Struct, array_like=True):
    """A request. Its descriptors are: the file (O_PATH), if ``copy`` the file to copy it to, and
    the user namespaces, besides our own, to which the IDs may belong.

    The file must have ``device`` and ``inode``. The server of the filesystem may take ``seconds``
    for an answer.
    """

    uid: int
    gid: int
    device: int
    inode: int
    copy: bool
    seconds: float


class _Answer(msgspec.Struct, array_like=True):
    """The ``identity`` of the file, with its owner in our user IDs; or an error, with
    its reason.
    """

    identity: FileIdentity | None = None
    errno: int = 0
    reason: str = ""


_NO_ANSWER: Final = _Answer(None, errno.EIO, "the process that read it has ended")
# Errors after which another namespace is tried: the child could not become the user, or was not
# admitted.
_ELSEWHERE: Final = frozenset((errno.EINVAL, errno.EPERM, errno.EACCES, errno.EOVERFLOW))


class AsOwner(Helper):
    """Reads files as the users who mounted their filesystems. Needs root.

    Each filesystem may take ``seconds`` for an answer; if it does not answer, it is not asked again
    for an hour.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        silences = Silences(_SILENT_FOR_S, _SILENCES_OF_A_USER)
        super().__init__(__name__, "the helper that reads files as their owners", silences, _STARTS)
        self._seconds = seconds

    def look(self, file: OwnedFile) -> FileIdentity:
        """Return the identity of a file, with a mode and owner that let only the mounter read it.

        Raises OSError: ETIMEDOUT if the filesystem does not answer, EACCES or EPERM if the mounter
        is not admitted or is root, ESTALE if it is another file.
        """
        return self._ask(file)

    def read(self, file: OwnedFile) -> tuple[FileIdentity, int]:
        """Return the result of `look`, and a descriptor of a copy, which the caller closes.

        Raises OSError as `look` does; EFBIG for more than `helper_process.MAX_BYTES`.
        """
        return helper_process.copy_to_scratch(lambda copy_fd: self._ask(file, copy_fd))

    def _ask(self, file: OwnedFile, *copy_fd: int) -> FileIdentity:
        mounter, device = file.mounter, os.makedev(*file.device)
        is_copy = bool(copy_fd)
        request = _Request(mounter.uid, mounter.gid, device, file.inode, is_copy, self._seconds)
        fds = [file.path_fd, *copy_fd, *file.user_namespaces]
        longest = (self._seconds + _LAST_WORDS_S) * (_MAX_NAMESPACES + 1)
        longest += MAX_BYTES / BYTES_PER_SECOND if is_copy else 0.0
        answer, _ = self.ask(file.device, request, fds, longest, _Answer, mounter)
        if answer.identity is None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return answer.identity


# --- the program --------------------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Answer requests on a socket until its other end is closed."""
    helper_process.serve(words, _Request, _MAX_NAMESPACES + 2, _answer)


def _answer(request: _Request, fds: list[int], opened: list[int]) -> _Answer:
    """Try each namespace, from the innermost outwards, until the filesystem admits the user."""
    path_fd, *rest = fds
    copy_fd = rest.pop(0) if request.copy else -1
    answer = _NO_ANSWER
    for namespace in (*rest, -1):
        try:
            answer = _attempt(request, (path_fd, copy_fd, namespace))
        except OSError as error:  # no further process is possible
            return _failure(error)
        if answer.identity is not None or answer.errno not in _ELSEWHERE:
            break
    return answer


def _attempt(request: _Request, fds: tuple[int, int, int]) -> _Answer:
    """Let a child handle the request within the time of the request. Raises OSError."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with its:
            reader = child.fork(lambda: _read(request, fds, its))
        answer = _next(ours, request.seconds)
        if request.copy and answer.identity is not None:
            size = min(answer.identity.size, MAX_BYTES)
            answer = _next(ours, request.seconds + size / BYTES_PER_SECOND)
    # Even closing the file asks the server, but the answer is there by then.
    seconds = _LAST_WORDS_S if answer.errno != errno.ETIMEDOUT else 0.0
    if reader.wait(seconds) is None:
        reader.end(seconds)
    return answer


def _next(channel: socket.socket, seconds: float) -> _Answer:
    """Return the next answer of the child; an error if there is none within that time."""
    ready, _, _ = select.select([channel], [], [], seconds)
    if not ready:
        return _failure(no_answer())
    data = channel.recv(helper_process.MESSAGE_MAX)
    return msgspec.msgpack.decode(data, type=_Answer) if data else _NO_ANSWER


def _failure(error: OSError) -> _Answer:
    return _Answer(None, error.errno or errno.EIO, error.strerror or str(error))


# --- the child ----------------------------------------------------------------------------------


def _read(request: _Request, fds: tuple[int, int, int], channel: socket.socket) -> None:
    """Become the user, send the identity of the file, and copy it if requested."""
    path_fd, copy_fd, namespace = fds
    try:
        _confine(keep=(path_fd, copy_fd, namespace, channel.fileno()))
        uid, gid = credentials.become(request.uid, request.gid, namespace)
        fd = openat2.reopen_regular(path_fd)
        answer = _look(fd, request, uid, gid)
        channel.send(msgspec.msgpack.encode(answer))
        if request.copy and answer.identity is not None:
            helper_process.copy_all(fd, copy_fd, answer.identity.size)
            os.close(copy_fd)
            channel.send(msgspec.msgpack.encode(answer))
    except OSError as error:
        channel.send(msgspec.msgpack.encode(_failure(error)))


def _confine(keep: Iterable[int]) -> None:
    """Take from a child, which talks to a hostile filesystem, all descriptors of the helper except
    ``keep``, allow it no further process, and limit the size of its files.
    """
    kept = sorted(fd for fd in keep if fd >= 0)
    for low, high in zip([-1, *kept], [*kept, _DESCRIPTORS], strict=True):
        os.closerange(low + 1, high)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # A file that is too large must cause an error, not a signal.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _look(fd: int, request: _Request, uid: int, gid: int) -> _Answer:
    """Return the identity of the file, with rights for its mounter only.

    Raises OSError.
    """
    identity = statx.identity(fd)
    if (identity.dev, identity.ino) != (request.device, request.inode):
        raise OSError(errno.ESTALE, "another file is mapped there meanwhile")
    # Whatever owner the server reports: only its user could read the file.
    mode = identity.mode & _ONLY_FOR_THE_OWNER
    return _Answer(msgspec.structs.replace(identity, uid=uid, gid=gid, mode=mode))
