# SPDX-License-Identifier: Apache-2.0
"""Files on FUSE filesystems that a user mounted for themselves, which not even root may read.

The kernel lets in the mounter only (without allow_other), or only who is in the mounter's user
namespace. So such a file is read by a process that has become that user, and has nothing left of
root's rights. It hands back a copy, not the file: inside a user namespace root may not even read
from a descriptor that somebody else has opened, and nowhere may it ask for the size.

That process is a child of a helper, a program of its own (`capture.as_owner.helper`), because a
process with threads cannot fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

import buildidfs
from buildidfs.capture import elf_file
from buildidfs.capture.as_owner import helper
from buildidfs.capture.as_owner.helper import Answer, Request
from buildidfs.formats import mountinfo
from buildidfs.linux import mounts

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity

_START: Final = """
import sys
sys.path.insert(0, sys.argv[2])
from buildidfs.capture.as_owner import helper
helper.main(int(sys.argv[1]))
"""

# A filesystem that did not answer is left alone for so long; device numbers are used again.
_SILENT_FOR_S: Final = 3600.0
# A user may mount any number of filesystems, and each may be waited for once.
_SILENCES_OF_A_USER: Final = 3
_STARTS: Final = 3


class Mounter(msgspec.Struct, frozen=True):
    """Who mounted a FUSE filesystem, by the IDs of their user namespace, whichever that is."""

    uid: int
    gid: int


def mounters(text: bytes) -> dict[tuple[int, int], Mounter]:
    """The FUSE filesystems of a mountinfo text by (major, minor), without ours."""
    found = {}
    for mount in mountinfo.parse(text):
        if mount.fstype in (mounts.FILESYSTEM_TYPE, b"fusectl"):
            continue
        uid = mountinfo.option(mount.super_options, b"user_id")
        gid = mountinfo.option(mount.super_options, b"group_id")
        if mount.fstype.startswith(b"fuse") and uid and gid and uid.isdigit() and gid.isdigit():
            found[mount.dev] = Mounter(int(uid), int(gid))
    return found


class Place(msgspec.Struct, frozen=True):
    """A file that root may not open: ``path_fd`` (O_PATH) stands for it.

    ``device`` (major, minor) and ``inode`` are those of the mapping. ``user_namespaces`` are
    descriptors of those in which the mounter's IDs may be meant, from the inside out, our own
    left out; `linux.namespaces.foreign_users` of a process that sees the mount.
    """

    path_fd: int
    device: tuple[int, int]
    inode: int
    mounter: Mounter
    user_namespaces: tuple[int, ...] = ()


class AsOwner:
    """Reads files as the users who mounted their filesystems. Needs root.

    The helper is started with the first question, and again if it was killed, a few times. Each
    filesystem may take ``seconds`` for an answer; one that does not is not asked again for an
    hour. May be used by several threads.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._starts = 0
        self._silent: dict[tuple[int, int], tuple[float, Mounter]] = {}

    def __enter__(self) -> AsOwner:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """The process ID of the helper, 0 while there is none."""
        return self._helper.pid if self._helper is not None else 0

    def close(self) -> None:
        """End the helper."""
        with self._lock:
            self._stop()

    def look(self, place: Place) -> FileIdentity:
        """What identifies the file, its mode and owner such that only the mounter may read it.

        Raises OSError: ETIMEDOUT for a filesystem that does not answer, EACCES or EPERM where the
        mounter is not let in or is root, ESTALE if it is another file.
        """
        return self._ask(place, -1)

    def read(self, place: Place) -> tuple[FileIdentity, int]:
        """`look`, and a descriptor of a copy that nobody else has, which the caller closes.

        Raises OSError as `look` does; EFBIG for more than `ownerhelper.MAX_BYTES`.
        """
        copy_fd = elf_file.scratch_file()
        try:
            identity = self._ask(place, copy_fd)
            # For reading only, so that nobody takes us for a writer of it.
            return identity, os.open(b"/proc/self/fd/%d" % copy_fd, os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(copy_fd)

    def _ask(self, place: Place, copy_fd: int) -> FileIdentity:
        request = Request(
            place.mounter.uid,
            place.mounter.gid,
            os.makedev(*place.device),
            place.inode,
            copy_fd >= 0,
            self._seconds,
        )
        fds = [place.path_fd, *place.user_namespaces]
        if copy_fd >= 0:
            fds.insert(1, copy_fd)
        with self._lock:
            if self._is_silent(place):
                answer = Answer(None, errno.ETIMEDOUT, "its filesystem does not answer")
            else:
                answer = self._answer(request, fds)
                if answer.errno == errno.ETIMEDOUT:
                    self._silent[place.device] = time.monotonic(), place.mounter
        if answer.identity is None:
            raise OSError(answer.errno, answer.reason)
        return answer.identity

    def _is_silent(self, place: Place) -> bool:
        now = time.monotonic()
        self._silent = {
            device: silence
            for device, silence in self._silent.items()
            if now - silence[0] < _SILENT_FOR_S
        }
        others = [mounter for _, mounter in self._silent.values() if mounter == place.mounter]
        return place.device in self._silent or len(others) >= _SILENCES_OF_A_USER

    def _answer(self, request: Request, fds: list[int]) -> Answer:
        """What the helper says. Raises OSError when it cannot be started or has ended."""
        channel = self._started()
        try:
            socket.send_fds(channel, [msgspec.msgpack.encode(request)], fds)
            channel.settimeout(helper.longest(request))
            data = channel.recv(helper.MESSAGE_MAX)
        except OSError:
            data = b""
        if not data:
            self._stop()
            raise OSError(errno.EIO, "the helper that reads files as their owners was ended")
        return msgspec.msgpack.decode(data, type=Answer)

    def _started(self) -> socket.socket:
        """The way to the helper, which is started if there is none. Raises OSError."""
        if self._channel is not None:
            return self._channel
        if self._starts >= _STARTS:
            raise OSError(
                errno.EIO, "the helper that reads files as their owners was ended too often"
            )
        self._starts += 1
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        package = os.path.dirname(os.path.dirname(os.path.abspath(buildidfs.__file__)))
        argv = [sys.executable, "-I", "-c", _START, str(its.fileno()), package]
        with its, contextlib.ExitStack() as on_error:
            on_error.enter_context(ours)
            self._helper = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], cwd="/"
            )
            on_error.pop_all()
        self._channel = ours
        return ours

    def _stop(self) -> None:
        """End the helper; its child, if a filesystem keeps it, ends with that."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._helper is not None:
            self._helper.kill()
            self._helper.wait()
            self._helper = None
