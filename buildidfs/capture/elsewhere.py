# SPDX-License-Identifier: Apache-2.0
"""Finding a file whose process is gone already: by its path, where others still can see it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buildidfs.linux import namespaces, openat2, procfs

if TYPE_CHECKING:
    from buildidfs.capture.tasks import Home
    from buildidfs.formats.perfrecords import Mapped


class Elsewhere:
    """Looks into the roots of processes of the same mount namespace; the host's is always there."""

    def __init__(self) -> None:
        self._host = namespaces.initial().mnt

    def find(self, record: Mapped, home: Home) -> int:
        """A readable descriptor of the file that was mapped, or -1.

        A path alone proves nothing: the inode has to be that of the mapping. (The device need not:
        overlayfs and btrfs show one in mappings and another one to stat(2).)
        """
        if home.namespaces is None:
            return -1
        pids = [pid for pid in home.pids if pid != record.pid]
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
            path_fd = openat2.open_in_root(root_fd, record.path, os.O_PATH)
        finally:
            os.close(pid_fd)
            if root_fd >= 0:
                os.close(root_fd)
        try:
            if os.fstat(path_fd).st_ino != record.inode:
                return -1
            return openat2.reopen_regular(path_fd)
        finally:
            os.close(path_fd)
