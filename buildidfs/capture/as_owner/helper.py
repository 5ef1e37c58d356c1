# SPDX-License-Identifier: Apache-2.0
"""The process that reads files as their owners, for `capture.as_owner.client`, which starts it.

It has one thread and knows nothing of stores, so that it may fork: for each request a child that
becomes the user (`linux.credentials`), opens the file, and copies it. A filesystem whose server has
taken a request and says nothing keeps even a killed child: such a child is left behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import select
import signal
import socket
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.linux import credentials, openat2, statx
from buildidfs.model import FileIdentity

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import NoReturn

MAX_BYTES: Final = 1 << 30
"""The largest file that is copied: a server may tell any size, and then never end."""

BYTES_PER_SECOND: Final = 8 << 20
"""How fast a filesystem has to be, at least."""

MESSAGE_MAX: Final = 4096
MAX_NAMESPACES: Final = 33  # user namespaces are nested 32 deep at most

_CHUNK: Final = 1 << 20
_DESCRIPTORS: Final = 1 << 20  # more than anybody may have open, see fs.nr_open in proc(5)
_LAST_WORDS_S: Final = 1.0
_ONLY_FOR_THE_OWNER: Final = ~(stat.S_ISUID | stat.S_ISGID | stat.S_IRWXG | stat.S_IRWXO)


class Request(msgspec.Struct, array_like=True):
    """What the helper is asked; descriptors come along: the file (O_PATH), what to copy it to if
    ``copy``, and user namespaces in which the IDs may be meant, besides our own.

    ``device`` and ``inode`` are those that the file must have. The server of the filesystem may
    take ``seconds`` for an answer.
    """

    uid: int
    gid: int
    device: int
    inode: int
    copy: bool
    seconds: float


class Answer(msgspec.Struct, array_like=True):
    """``identity`` of the file, its owner as we know them; or an error, with its reason."""

    identity: FileIdentity | None = None
    errno: int = 0
    reason: str = ""


_SILENCE: Final = Answer(None, errno.ETIMEDOUT, "its filesystem does not answer")
_NO_ANSWER: Final = Answer(None, errno.EIO, "the process that read it has ended")
# One that cannot become that user there, or is not let in: in another namespace it may be right.
_ELSEWHERE: Final = frozenset((errno.EINVAL, errno.EPERM, errno.EACCES, errno.EOVERFLOW))


def longest(request: Request) -> float:
    """For how many seconds at most the helper is busy with a request."""
    copying = MAX_BYTES / BYTES_PER_SECOND if request.copy else 0.0
    return (request.seconds + _LAST_WORDS_S) * (MAX_NAMESPACES + 1) + copying


def serve(channel: socket.socket) -> None:
    """Answer requests until the other end is closed."""
    decoder = msgspec.msgpack.Decoder(Request)
    lingering: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(channel, MESSAGE_MAX, MAX_NAMESPACES + 2)
        if not data:
            return
        try:
            answer = _answer(decoder.decode(data), fds, channel, lingering)
        finally:
            _close(fds)
        channel.send(msgspec.msgpack.encode(answer))
        lingering -= {pid for pid in lingering if _has_ended(pid)}


def _answer(
    request: Request, fds: list[int], channel: socket.socket, lingering: set[int]
) -> Answer:
    """Try each namespace, from the inside out, until the filesystem lets somebody in."""
    path_fd, *rest = fds
    copy_fd = rest.pop(0) if request.copy else -1
    answer = _NO_ANSWER
    for namespace in (*rest, -1):
        answer = _attempt(request, (path_fd, copy_fd, namespace), channel, lingering)
        if answer.identity is not None or answer.errno not in _ELSEWHERE:
            break
    return answer


def _attempt(
    request: Request, fds: tuple[int, int, int], channel: socket.socket, lingering: set[int]
) -> Answer:
    """Have a child do it, and wait for no longer than it may take."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        channel.close()
        _child(request, fds, its)
    its.close()
    with ours:
        answer = _next(ours, request.seconds)
        if request.copy and answer.identity is not None:
            size = min(answer.identity.size, MAX_BYTES)
            answer = _next(ours, request.seconds + size / BYTES_PER_SECOND)
    # Even closing the file asks the server, but by then we have what we want.
    patience = _LAST_WORDS_S if answer.errno != errno.ETIMEDOUT else 0.0
    if not _ends_within(pid, patience):
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still its own
        if not _ends_within(pid, patience):
            lingering.add(pid)
    return answer


def _next(channel: socket.socket, seconds: float) -> Answer:
    """What the child says within that time."""
    ready, _, _ = select.select([channel], [], [], seconds)
    if not ready:
        return _SILENCE
    data = channel.recv(MESSAGE_MAX)
    return msgspec.msgpack.decode(data, type=Answer) if data else _NO_ANSWER


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a child is gone by then, and its number with it."""
    pid_fd = os.pidfd_open(pid)
    try:
        select.select([pid_fd], [], [], seconds)
    finally:
        os.close(pid_fd)
    return _has_ended(pid)


def _has_ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


# --- the child ----------------------------------------------------------------------------------


def _child(request: Request, fds: tuple[int, int, int], channel: socket.socket) -> NoReturn:
    """Become the user, say what the file is, copy it if asked to, and end."""
    path_fd, copy_fd, namespace = fds
    try:
        try:
            _confine(keep=(path_fd, copy_fd, namespace, channel.fileno()))
            uid, gid = credentials.become(request.uid, request.gid, namespace)
            fd = openat2.reopen_regular(path_fd)
            answer = _look(fd, request, uid, gid)
            channel.send(msgspec.msgpack.encode(answer))
            if request.copy and answer.identity is not None:
                copy_all(fd, copy_fd, answer.identity.size)
                os.close(copy_fd)
                channel.send(msgspec.msgpack.encode(answer))
        except OSError as error:
            reason = error.strerror or str(error)
            channel.send(msgspec.msgpack.encode(Answer(None, error.errno or errno.EIO, reason)))
    finally:
        os._exit(0)


def _confine(keep: Iterable[int]) -> None:
    """Leave nothing of the helper's to a child that speaks with a hostile filesystem."""
    kept = sorted(fd for fd in keep if fd >= 0)
    for low, high in zip([-1, *kept], [*kept, _DESCRIPTORS], strict=True):
        os.closerange(low + 1, high)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    # Too large a file is to be an error, and no death.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _look(fd: int, request: Request, uid: int, gid: int) -> Answer:
    """What the file is, with the rights that its mounter alone has. Raises OSError."""
    identity = statx.identity(fd)
    if (identity.dev, identity.ino) != (request.device, request.inode):
        return Answer(None, errno.ESTALE, "another file is mapped there meanwhile")
    # Whatever the server says of owners: only its user could read it.
    mode = identity.mode & _ONLY_FOR_THE_OWNER
    return Answer(msgspec.structs.replace(identity, uid=uid, gid=gid, mode=mode))


def copy_all(fd: int, copy_fd: int, size: int) -> None:
    """Copy all there is of a file of about ``size`` bytes. Raises OSError, EFBIG for too many."""
    if size > MAX_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    offset = 0
    while chunk := os.pread(fd, _CHUNK, offset):
        view = memoryview(chunk)
        while view:
            written = os.pwrite(copy_fd, view, offset)
            offset += written
            view = view[written:]
        if offset > MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def main(fd: int) -> None:
    """Serve the socket ``fd`` until its other end is closed."""
    # Whoever may stop the program stops it; ^C goes to all of its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ConnectionError), socket.socket(fileno=fd) as channel:
        serve(channel)
