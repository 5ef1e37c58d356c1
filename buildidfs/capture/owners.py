# SPDX-License-Identifier: Apache-2.0
"""Is what a file says of its owner to be believed: can only root have put these bytes there.

A file in the host's mount namespace that belongs to root is trusted, so all ways by which the
bytes of others come to look like that are ruled out here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from buildidfs.formats import mountinfo
from buildidfs.linux import mounts, statx

if TYPE_CHECKING:
    from collections.abc import Callable

# Where container managers keep the files of images, in the host's mount namespace and owned by
# root: whoever made the image wrote them.
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

# Copies that root's tools made of what others ran: the blobs of a store like ours, perf's build ID
# cache and trees of its shape, and what debuginfod clients have downloaded.
_COPIES: Final = re.compile(
    rb"/blobs/[0-9a-f]{2}/[0-9a-f]{64}\Z"
    rb"|/(?:[0-9a-f]{2}){2,120}/(?:elf|executable|debug|debuginfo|vdso)\Z"
)


class Owners:
    """What was learned of mounts in one mount namespace, whose ``mounts`` give its mountinfo."""

    def __init__(self, mounts: Callable[[], bytes]) -> None:
        self._mounts = mounts
        self._known: dict[int, bool] = {}

    def believed(self, path: bytes, fd: int) -> bool:
        """Whether the owner of an open file (O_PATH will do) seen at ``path`` counts.

        Not on a mount that the namespace does not have: through /proc/PID/root its processes
        reach files of others. Not on one that is nosuid: that says that root's files there may be
        anybody's. All that users can mount is (FUSE, removable media), and they could show any
        owner. Raises OSError.
        """
        if path.startswith(CONTAINER_STORAGE) or _COPIES.search(path):
            return False
        # Not by device number: one filesystem may be mounted here and there, and numbers are
        # given to the next filesystem at once.
        mount = statx.unique_mount_id(fd)
        known = None if mount is None else self._known.get(mount)
        if known is None:
            known = self._is_believed(fd)
            if mount is not None:
                self._known[mount] = known
        return known

    def _is_believed(self, fd: int) -> bool:
        # As long as the file is open its mount exists, and so no other has the number.
        number = mounts.mount_id(fd)
        return any(
            mount.mount_id == number and mountinfo.option(mount.options, b"nosuid") is None
            for mount in mountinfo.parse(self._mounts())
        )
