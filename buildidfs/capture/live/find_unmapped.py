# SPDX-License-Identifier: Apache-2.0
"""Finding a file that is not mapped any more as it was, or whose process is gone already."""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final

from buildidfs.linux import namespaces, openat2, procfs, procmap_query, statx

if TYPE_CHECKING:
    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.ring_records import Mapped


_NO_QUERY: Final = frozenset((errno.ENOTTY, errno.EINVAL))


def end_now(record: Mapped) -> int:
    """Where the mapping that began at ``record.start`` ends by now, 0 if it is gone.

    Where code and data are not on pages of their own (all that was linked before 2018), the first
    mapping of a file spans all of it, and the data is mapped over its end at once.
    """
    try:
        maps_fd = os.open(b"/proc/%d/maps" % record.pid, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        found = procmap_query.executable_at(maps_fd, record.start)
        return found[1] if found is not None and found[0] == record.start else 0
    except OSError as error:
        return _end_in_listing(record) if error.errno in _NO_QUERY else 0
    finally:
        os.close(maps_fd)


def _end_in_listing(record: Mapped) -> int:
    """`end_now` before Linux 6.11."""
    begin = b"%x-" % record.start
    try:
        names = os.listdir(b"/proc/%d/map_files" % record.pid)
    except OSError:
        return 0
    return next((int(name[len(begin) :], 16) for name in names if name.startswith(begin)), 0)


class Elsewhere:
    """Looks into the roots of processes of the same mount namespace; ``host`` is always there."""

    def __init__(self, host: int) -> None:
        self._host = host

    def find(self, record: Mapped, home: Home) -> int:
        """An O_PATH descriptor of the file that was mapped, or -1. No filesystem is asked.

        A path alone proves nothing: the inode has to be that of the mapping. (The device need not:
        overlayfs and btrfs show one in mappings and another one to stat(2).)
        """
        if home.namespaces is None:
            return -1
        # A copy, made at once: others may add to it meanwhile.
        pids = [pid for pid in list(home.pids) if pid != record.pid]
        if home.namespaces.mnt == self._host:
            pids.append(os.getpid())
        for pid in reversed(pids):
            try:
                fd = self._open(pid, home.namespaces.mnt, record)
            except OSError:
                continue
            if fd >= 0:
                return fd
        return -1

    def _open(self, pid: int, mnt: int, record: Mapped) -> int:
        pid_fd = procfs.open_pid(pid)
        root_fd = -1
        try:
            if namespaces.mnt(pid_fd) != mnt:
                return -1
            root_fd = procfs.open_root(pid_fd)
            path_fd = openat2.open_cached_in_root(root_fd, record.path)
        finally:
            os.close(pid_fd)
            if root_fd >= 0:
                os.close(root_fd)
        try:
            identity = statx.identity(path_fd, ask=False)
            if identity.ino == record.inode and stat.S_ISREG(identity.mode):
                found, path_fd = path_fd, -1
                return found
            return -1
        finally:
            if path_fd >= 0:
                os.close(path_fd)
