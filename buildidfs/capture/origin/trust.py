# SPDX-License-Identifier: Apache-2.0
"""The trust in a file: who may have written it.

A file in the host's mount namespace that belongs to root has trust HOST if its owner can be
believed (`Owners`): this module excludes all ways by which bytes of others come to look like that.
One way cannot be excluded: root of a container without a user namespace is root of the host, and
writes to the volumes of the container. So files of root also have a standing: directories of
package managers are not volumes of containers.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from buildidfs.formats import proc_text
from buildidfs.linux import mounts, openat2, statx
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import FileIdentity, Standing, Trust

if TYPE_CHECKING:
    from collections.abc import Callable

# Container managers keep the files of images here, in the host's mount namespace and owned by root,
# but the maker of the image wrote them.
CONTAINER_STORAGE: Final = (
    b"/var/lib/docker/",
    b"/var/lib/containerd/",
    b"/var/lib/containers/",
    b"/var/lib/machines/",
    b"/var/lib/lxc/",
    b"/var/lib/lxd/",
    b"/var/lib/incus/",
    b"/var/lib/kubelet/",
    b"/run/containerd/",
    b"/run/containers/",
)

# Copies that root's tools made of files that others ran: the blobs of a store like ours, perf's
# build ID cache and trees of its shape, and the downloads of debuginfod clients.
_COPIES: Final = re.compile(
    rb"/blobs/[0-9a-f]{2}/[0-9a-f]{64}\Z"
    rb"|/(?:[0-9a-f]{2}){2,120}/(?:elf|executable|debug|debuginfo|vdso)\Z"
)

# The directories of package managers, and those of software that is installed without one. The
# latter may contain volumes: /opt/app/data.
_SYSTEM: Final = (
    b"/usr/", b"/bin/", b"/sbin/", b"/lib/", b"/lib32/", b"/lib64/", b"/libx32/", b"/boot/",
    b"/nix/store/", b"/gnu/store/",
)  # fmt: skip
_INSTALLED: Final = (b"/usr/local/", b"/opt/")

_MOST_DIRECTORIES: Final = 4096
_OTHERS_WRITE: Final = 0o022


def trust_of(
    identity: FileIdentity, mnt: int, initial_mnt: int, *, owners_believed: bool = True
) -> Trust:
    """Return the trust in a file that was seen in the mount namespace ``mnt``.

    It is HOST if only root can have written the file and it was seen in the host's own mount
    namespace, CONTAINER in any other namespace, UNKNOWN otherwise. ``owners_believed`` is False if
    the owners shown by the filesystem are not to be believed, see `Owners`.
    """
    if not mnt or not initial_mnt:
        return Trust.UNKNOWN
    if mnt != initial_mnt:
        return Trust.CONTAINER
    if owners_believed and identity.uid == 0 and not identity.mode & _OTHERS_WRITE:
        return Trust.HOST
    return Trust.UNKNOWN


class Owners:
    """The mounts of one mount namespace, as far as known; ``mounts`` reads its mountinfo."""

    def __init__(self, mounts: Callable[[], bytes]) -> None:
        self._mounts = mounts
        self._known: dict[int, bool] = {}
        self._kept: dict[bytes, bool] = {}

    def believed(self, path: bytes, fd: int) -> bool:
        """Return True if the owner of an open file (O_PATH suffices) seen at ``path`` is believed.

        It is not believed on a mount that the namespace does not have: processes reach files of
        other namespaces through /proc/PID/root. Nor is it believed on a nosuid mount: this option
        means that files of root there may come from any user. The filesystems that users can
        mount (FUSE, removable media) could show any owner, and all of them are nosuid. Raises
        OSError.
        """
        if path.startswith(CONTAINER_STORAGE) or _COPIES.search(path):
            return False
        # Not by device number: one filesystem may be mounted in several places, and numbers are
        # reused at once.
        mount = statx.unique_mount_id(fd)
        known = None if mount is None else self._known.get(mount)
        if known is None:
            known = self._is_believed(fd)
            if mount is not None:
                self._known[mount] = known
        return known

    def standing(self, path: bytes) -> Standing:
        """Return the standing of a file of trust *host* at ``path``.

        Only a place to which root alone can move a file counts. Filesystems that may not answer are
        not asked. Does not raise.
        """
        if path.startswith(_INSTALLED):
            found = Standing.INSTALLED
        elif path.startswith(_SYSTEM):
            found = Standing.SYSTEM
        else:
            return Standing.ELSEWHERE
        with contextlib.suppress(OSError):
            if self._is_kept(os.path.dirname(path)):
                return found
        return Standing.ELSEWHERE

    def _is_kept(self, directory: bytes) -> bool:
        """Return True if only root can create entries in a directory and in those above it. Raises
        OSError.
        """
        below: list[bytes] = []
        while (kept := self._kept.get(directory, len(directory) <= 1 or None)) is None:
            below.append(directory)
            directory = os.path.dirname(directory)
        if len(self._kept) >= _MOST_DIRECTORIES:
            self._kept.clear()
        for each in reversed(below):
            self._kept[each] = kept = kept and _is_roots(each)
        return kept

    def _is_believed(self, fd: int) -> bool:
        # Its mount exists while the file is open, so no other mount has the number.
        number = mounts.mount_id(fd)
        return any(
            mount.mount_id == number and proc_text.option(mount.options, b"nosuid") is None
            for mount in proc_text.mounts_in(self._mounts())
        )


def _is_roots(directory: bytes) -> bool:
    """Return True if a directory belongs to root, and only root may write to it. Raises OSError."""
    with closing_fd(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
        try:
            fd = openat2.open_cached_in_root(root_fd, directory)
        except OSError:
            if directory.startswith(_INSTALLED):
                raise
            # The kernel has no cached answer, or cannot be told not to ask the filesystem.
            fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    with closing_fd(fd):
        found = statx.identity(fd, ask=False)
    return stat.S_ISDIR(found.mode) and found.uid == 0 and not found.mode & _OTHERS_WRITE
