# SPDX-License-Identifier: Apache-2.0
"""Capture the ELF files below directories.

A file is judged by its first page: 64,000 of them take less than a second, so what has no build
ID is looked at again each time, which costs less than to remember it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from buildidfs.capture import container, walk
from buildidfs.capture.base import Found, Known, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.capture.files import reader
from buildidfs.formats import elf, mountinfo
from buildidfs.linux import mounts, namespaces, procfs, statx
from buildidfs.model import Absence, BuildId, NamespaceSet, Origin, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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


def identify_tree(
    paths: Iterable[bytes],
) -> Iterator[tuple[bytes, BuildId | Absence | Unreadable]]:
    """The build ID of every regular file at or below ``paths``, or why there is none.

    Nothing is captured, nothing remembered. Paths begin with the one given. What can be opened
    is told in the same way as `TreeScanner` tells it.
    """
    devices = walk.Devices()
    for path in paths:
        try:
            start_fd = walk.open_start(path)
        except OSError as error:
            yield path, walk.unreadable(path, error)
            continue
        try:
            for file in walk.files(start_fd, path, devices):
                if isinstance(file, Unreadable):
                    yield file.path, file
                    continue
                try:
                    yield file.path, _identify(file.fd)
                except OSError as error:
                    yield file.path, walk.unreadable(file.path, error)
                finally:
                    os.close(file.fd)
        finally:
            os.close(start_fd)


def _identify(fd: int) -> BuildId | Absence:
    head = os.pread(fd, elf.HEAD_SIZE, 0)
    if head[:4] != b"\x7fELF" and head:
        return Absence.NOT_ELF  # most files: saves two calls
    return elf.identify(head, reader(fd))


class TreeScanner:
    """One pass over the regular files at or below ``paths``; see `capture.base`.

    A path may be a symbolic link; none below it is followed. Mounts of other filesystems are
    entered, except those of kernel interfaces and our own. What cannot be read comes as
    `Unreadable`; a file without a build ID as `SeenAgain`, since all about it is known. ``host``
    names the machine and ``initial`` its namespaces, by default those we run on.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        *,
        host: str | None = None,
        initial: NamespaceSet | None = None,
    ) -> None:
        self._memo = memo
        self._paths = list(paths)
        self._host = os.uname().nodename if host is None else host
        self._initial = initial

    def __iter__(self) -> Iterator[Found]:
        initial = self._initial or namespaces.initial()
        devices = walk.Devices()
        for path in self._paths:
            try:
                start_fd = walk.open_start(path)
            except OSError as error:
                yield walk.unreadable(path, error)
                continue
            try:
                place = _Place(start_fd, self._host, initial)
                for file in walk.files(start_fd, place.path, devices):
                    yield file if isinstance(file, Unreadable) else self._found(file, place)
            finally:
                os.close(start_fd)

    def _found(self, file: walk.OpenFile, place: _Place) -> Found:
        """Judge a file; takes over its descriptor."""
        keep = False
        try:
            answer = _identify(file.fd)
            sighting = place.sighting(file)
            if isinstance(answer, Absence):
                return SeenAgain(sighting, Known(absence=answer))
            known = self._memo.recall(sighting.origin.identity)
            if known is not None and known.build_id == answer:
                return SeenAgain(sighting, known)
            keep = True
            return PinnedFile(sighting, file.fd)
        except OSError as error:
            return walk.unreadable(file.path, error)
        finally:
            if not keep:
                os.close(file.fd)


class _Place:
    """Where a walk starts: the path of that, the mount namespace it is in, whom to believe."""

    def __init__(self, start_fd: int, host: str, initial: NamespaceSet) -> None:
        self.path = os.readlink(b"/proc/self/fd/%d" % start_fd)
        self._host = host
        self._initial = initial
        self._namespaces = NamespaceSet()
        self._mnt_ns_id = 0
        self._foreign = not _in_own_mount_namespace(start_fd)
        if not self._foreign:
            pid_fd = procfs.open_pid(os.getpid())
            try:
                self._namespaces = namespaces.of(pid_fd)
                self._mnt_ns_id = namespaces.mnt_ns_id(pid_fd)
            finally:
                os.close(pid_fd)
        self._owners_believed: dict[int, bool] = {}

    def sighting(self, file: walk.OpenFile) -> Sighting:
        """The claim that this file is there now. Raises OSError."""
        identity = statx.identity(file.fd)
        if self._foreign:
            trust = Trust.CONTAINER
        else:
            trust = container.trust(
                identity,
                self._namespaces.mnt,
                self._initial.mnt,
                owners_believed=self._believes_owners(file),
            )
        origin = Origin(
            file.path,
            identity,
            self._namespaces,
            self._mnt_ns_id,
            host=self._host,
            trust=trust,
            scanner="tree",
        )
        return Sighting(origin, time.time_ns())

    def _believes_owners(self, file: walk.OpenFile) -> bool:
        if file.path.startswith(_CONTAINER_STORAGE):
            return False
        believed = self._owners_believed.get(file.device)
        if believed is None:
            believed = container.owners_believed(os.fstatvfs(file.fd).f_flag)
            self._owners_believed[file.device] = believed
        return believed


def _in_own_mount_namespace(fd: int) -> bool:
    """Whether an open file is on a mount of ours: /proc/PID/root leads to others."""
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                mount_id = int(line.split()[1])
                return any(
                    mount.mount_id == mount_id for mount in mountinfo.parse(mounts.mountinfo())
                )
    return False
