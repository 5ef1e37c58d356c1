# SPDX-License-Identifier: Apache-2.0
"""Which mounts may never answer, found out without asking the filesystem."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Final

from buildidfs.linux import mounts, namespaces, statx

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity

# From linux/magic.h and the filesystems' own headers: FUSE, NFS, SMB, CIFS, SMB2, Ceph, 9P, AFS,
# Coda, Lustre, GFS2, OCFS2, BeeGFS, GPFS, OrangeFS.
_MAGICS: Final = frozenset(
    (
        0x65735546, 0x6969, 0x517B, 0xFF534D42, 0xFE534D42, 0x00C36400, 0x01021997, 0x5346414F,
        0x6B414653, 0x73757245, 0x0BD00BD0, 0x01161970, 0x7461636F, 0x19830326, 0x47504653,
        0x20030528,
    )
)  # fmt: skip
# What is made of other filesystems is as slow as they are, which may be mounted nowhere any more.
# Users may make an overlay in a user namespace of theirs, and a layer of it of a server of theirs.
_OVERLAY: Final = 0x794C7630
_MOST: Final = 4096


@functools.cache
def memory_device() -> int:
    """The st_dev of files that exist in memory only, whose mount is nowhere. It is never reused."""
    fd = os.memfd_create("buildidfs", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


class SlowMounts:
    """What was learned of mounts, by their number that is never used again."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self.host_user = namespaces.initial().user
        self._memory = memory_device()

    def is_stacked(self, fd: int) -> bool:
        """Whether the filesystem of a file that `is_slow` was asked about is made of others.

        Of those nobody can say whether they answer.
        """
        try:
            return self._known.get(statx.unique_mount_id(fd) or 0) == _OVERLAY
        except OSError:
            return True

    def is_users(self, user: int) -> bool:
        """Whether a user namespace is not the host's; so it is taken if it is not known (0)."""
        return user != self.host_user

    def is_slow(self, fd: int, identity: FileIdentity, mnt_ns_id: int, user: int = 0) -> bool:
        """Whether the filesystem of an open file (O_PATH will do) depends on somebody's answer.

        So it is taken if nobody knows: a mount that is not attached any more cannot be asked for.
        Of a filesystem on a block device it has to be known, since few of them are FUSE's.
        ``user`` is the user namespace of whoever uses the file, 0 if it is not known; what users
        can mount in one of their own is not trusted to answer.
        """
        if identity.dev == self._memory:
            return False
        on_disk = identity.scope == b""
        try:
            mount = statx.unique_mount_id(fd)
        except OSError:
            mount = None
        if mount is None:
            return not on_disk
        magic = self._known.get(mount)
        if magic is None:
            try:
                magic = mounts.mount_magic(mount, mnt_ns_id)
            except OSError:
                return not on_disk
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[mount] = magic
        return magic in _MAGICS or (magic == _OVERLAY and self.is_users(user))
