# SPDX-License-Identifier: Apache-2.0
"""Sightings of files in our own mount namespace, for scanners that look at no other process."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from buildidfs.capture.base import Known, Memo, SeenAgain, reached, seen_again
from buildidfs.capture.origin import container
from buildidfs.capture.origin.ownership import Owners
from buildidfs.capture.origin.path_access import SCAN_KEEP_S, Reach, Root
from buildidfs.formats import mountinfo
from buildidfs.formats.container import cgroup
from buildidfs.linux import machine, mounts, namespaces, procfs, statx
from buildidfs.model import (
    GROUP,
    OTHERS,
    OWNER,
    Access,
    NamespaceSet,
    Origin,
    Sighting,
    Standing,
    Trust,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator


@contextlib.contextmanager
def own_root() -> Iterator[Root]:
    """Our own root, as `Reach.of` asks for it. Raises OSError."""
    pid_fd = procfs.open_pid(os.getpid())
    try:
        ours = namespaces.of(pid_fd)
        maker = container.maker(pid_fd, container.apart(ours, namespaces.initial()))
        root_fd = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield Root(root_fd, b"/", mounts.mountinfo, user=ours.user, maker=maker)
        finally:
            os.close(root_fd)
    finally:
        os.close(pid_fd)


def access_of(fd: int) -> Access:
    """Who may read an open file where it is now; root alone if that cannot be told.

    Does not raise.
    """
    try:
        identity = statx.identity(fd)
        with own_root() as root:
            reach = Reach().of(fd, identity, root)
    except OSError:
        return Access(0)
    bits = ((OWNER, 0o400), (GROUP, 0o040), (OTHERS, 0o004))
    mode = sum(bit for who, bit in bits if reach & who) & identity.mode
    return Access(mode, identity.uid, identity.gid)


class Here:
    """What is the same for all files that one scanner sees. Raises OSError.

    ``host`` names the machine and ``initial`` its namespaces, by default those we run on. ``given``
    says that the operator named the files, or a directory that they are in.
    ``container`` is the label of the container that we run in, empty on the host.
    """

    def __init__(
        self,
        scanner: str,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
        *,
        given: bool = True,
    ) -> None:
        self._scanner = scanner
        self._least = Standing.GIVEN if given else Standing.ELSEWHERE
        self._host = host or machine.host_name()
        self._initial = initial or namespaces.initial()
        self._owners = Owners(mounts.mountinfo)
        self._reach: Reach | None = None
        pid_fd = procfs.open_pid(os.getpid())
        try:
            self._namespaces = namespaces.of(pid_fd)
            self._mnt_ns_id = namespaces.mnt_ns_id(pid_fd)
            text = procfs.cgroup(pid_fd)
            self._cgroup = cgroup.path(text)
            self._cgroup_id = namespaces.cgroup_id(cgroup.unified(text))
        finally:
            os.close(pid_fd)
        self._apart = container.apart(self._namespaces, self._initial)
        self.container = container.label_by(
            self._cgroup, self._namespaces, self._apart, container_namespaces
        )

    def sighting(self, path: bytes, fd: int, *, foreign: bool = False) -> Sighting:
        """The claim that an open file is at ``path`` now, without its reach. Raises OSError.

        ``foreign`` says that it is in a mount namespace that is not ours, nobody knows which.
        """
        identity = statx.identity(fd)
        if foreign:
            seen_in, apart, mnt_ns_id, trust = NamespaceSet(), 0, 0, Trust.CONTAINER
        else:
            seen_in, apart, mnt_ns_id = self._namespaces, self._apart, self._mnt_ns_id
            trust = container.trust(
                identity,
                seen_in.mnt,
                self._initial.mnt,
                owners_believed=identity.uid == 0 and self._owners.believed(path, fd),
            )
        origin = Origin(
            path,
            identity,
            seen_in,
            mnt_ns_id,
            self._cgroup,
            self.container,
            self._host,
            trust,
            self._scanner,
            apart,
            self._cgroup_id,
            reach=0,
            standing=(
                max(self._least, self._owners.standing(path))
                if trust is Trust.HOST
                else Standing.GIVEN
            ),
        )
        return Sighting(origin, time.time_ns())

    def reached(self, sighting: Sighting, fd: int) -> Sighting:
        """The same, with the reach of the file, which is open (O_PATH will do). Raises OSError."""
        if self._reach is None:
            self._reach = Reach(keep_s=SCAN_KEEP_S)
        with own_root() as root:
            return reached(sighting, self._reach.of(fd, sighting.origin.identity, root))

    def seen_again(self, memo: Memo, sighting: Sighting, known: Known, fd: int) -> SeenAgain:
        """A file that the memo knows, which is open; with its reach if the place is new."""
        return seen_again(memo, sighting, known, lambda each: self.reached(each, fd))


def is_foreign(fd: int) -> bool:
    """Whether an open file is on no mount of ours: /proc/PID/root leads to others'.

    Raises OSError.
    """
    number = mounts.mount_id(fd)
    return all(mount.mount_id != number for mount in mountinfo.parse(mounts.mountinfo()))
