# SPDX-License-Identifier: Apache-2.0
"""The user for whom a file in the host's mount namespace counts, in all that users divide.

The owner that a file shows is not always a fact. The server of a FUSE filesystem chooses it, and
any user may run one; so may the layer of an overlay that a user has mounted in a namespace, and
whose files the user's processes on the host open through /proc/PID/root.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from buildidfs.formats import proc_text
from buildidfs.linux import mounts, namespaces, procfs, statx
from buildidfs.linux.file_ops import closing_fd

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity

NOBODY: Final = 65534
"""Stands for an unknown user: the kernel shows this number for users without one."""

_MOST_MOUNTS: Final = 4096
_SHOWN: Final = -1  # the owner that the file shows
_ELSEWHERE: Final = -2  # the mount is not in the host's mount namespace
_FUSE: Final = (b"fuse", b"fuseblk")
_INIT: Final = 1


class FileUsers:
    """Finds the users of files. Several threads may use it; no filesystem is asked."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._host = 0

    def of(self, fd: int, identity: FileIdentity, pid: int) -> int:
        """Return the user for whom an open file counts (O_PATH suffices); process ``pid`` uses it.

        It is the user who mounted the FUSE filesystem with the file. For a file that is on no mount
        of the host's mount namespace (it was unmounted, is in memory, or belongs to another
        namespace) it is the user of the process, `NOBODY` if that is gone. For all other files it
        is the owner. Raises OSError.
        """
        mount = statx.unique_mount_id(fd)
        user = None if mount is None else self._known.get(mount)
        if user is None:
            user = self._mounter(fd, mount)
            if mount is not None:
                if len(self._known) >= _MOST_MOUNTS:
                    self._known.clear()
                self._known[mount] = user
        if user == _ELSEWHERE:
            return known_user(pid)
        return identity.uid if user == _SHOWN else user

    def _mounter(self, fd: int, mount: int | None) -> int:
        """Return the user of a mount, which has a file at ``fd``. Raises OSError.

        Only the mounts of FUSE filesystems need all of mountinfo: any user can make many others.
        """
        self._host = self._host or _host_namespace()
        try:
            if mount is not None and self._host:
                fstype = mounts.placed(mount, self._host).fstype
                if fstype not in _FUSE:
                    return _SHOWN
        except FileNotFoundError:
            return _ELSEWHERE
        except OSError:  # before Linux 6.11, or not permitted
            pass
        return _mounter(mounts.mount_id(fd))


def _host_namespace() -> int:
    """Return the number of the mount namespace of `mounts.initial_mountinfo`, 0 if unknown."""
    for pid in (_INIT, os.getpid()):
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as pid_fd:
            return namespaces.mnt_ns_id(pid_fd)
    return 0


def user_of_process(pid: int) -> int:
    """Return the effective user of a process. Raises OSError if it is gone."""
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        return procfs.uids(pid_fd)[1]


def known_user(pid: int) -> int:
    """Return the effective user of a process; `NOBODY` if it is gone."""
    try:
        return user_of_process(pid)
    except OSError:
        return NOBODY


def _mounter(number: int) -> int:
    """Return the user whose mount has that number in mountinfo. Raises OSError."""
    mark = b"%d " % number
    lines = (line for line in mounts.initial_mountinfo().split(b"\n") if line.startswith(mark))
    found = next(proc_text.mounts_in(next(lines, b"")), None)
    if found is None:
        return _ELSEWHERE
    if found.fstype.partition(b".")[0] not in _FUSE:
        return _SHOWN
    # Root's mounts show users whom root lets them show.
    return int(proc_text.option(found.super_options, b"user_id") or b"0") or _SHOWN
