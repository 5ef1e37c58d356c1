# SPDX-License-Identifier: Apache-2.0
"""Sightings of files in our own mount namespace, for scanners that look at no other process."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from buildidfs.capture import container
from buildidfs.formats import cgroup
from buildidfs.linux import namespaces, procfs, statx
from buildidfs.model import NamespaceSet, Origin, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Collection

# Where container managers keep the files of images, in the host's mount namespace and owned by
# root: whoever made the image wrote them.
_CONTAINER_STORAGE = (
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


class Here:
    """What is the same for all files that one scanner sees. Raises OSError.

    ``host`` names the machine and ``initial`` its namespaces, by default those we run on.
    """

    def __init__(
        self,
        scanner: str,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._scanner = scanner
        self._host = os.uname().nodename if host is None else host
        self._initial = initial or namespaces.initial()
        self._owners_believed: dict[int, bool] = {}
        self._cgroup, self._container = b"", ""
        pid_fd = procfs.open_pid(os.getpid())
        try:
            self._namespaces = namespaces.of(pid_fd)
            self._mnt_ns_id = namespaces.mnt_ns_id(pid_fd)
            if container.is_contained(self._namespaces, self._initial, container_namespaces):
                self._cgroup = cgroup.path(procfs.cgroup(pid_fd))
                self._container = container.label(self._cgroup, self._namespaces)
        finally:
            os.close(pid_fd)

    def sighting(self, path: bytes, fd: int, *, foreign: bool = False) -> Sighting:
        """The claim that an open file is at ``path`` now. Raises OSError.

        ``foreign`` says that it is in a mount namespace that is not ours, nobody knows which.
        """
        identity = statx.identity(fd)
        if foreign:
            seen_in, mnt_ns_id, trust = NamespaceSet(), 0, Trust.CONTAINER
        else:
            seen_in, mnt_ns_id = self._namespaces, self._mnt_ns_id
            trust = container.trust(
                identity,
                seen_in.mnt,
                self._initial.mnt,
                owners_believed=self._believes_owners(path, fd, identity.dev),
            )
        origin = Origin(
            path,
            identity,
            seen_in,
            mnt_ns_id,
            self._cgroup,
            self._container,
            self._host,
            trust,
            self._scanner,
        )
        return Sighting(origin, time.time_ns())

    def _believes_owners(self, path: bytes, fd: int, device: int) -> bool:
        if path.startswith(_CONTAINER_STORAGE):
            return False
        believed = self._owners_believed.get(device)
        if believed is None:
            believed = container.owners_believed(os.fstatvfs(fd).f_flag)
            self._owners_believed[device] = believed
        return believed
