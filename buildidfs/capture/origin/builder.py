# SPDX-License-Identifier: Apache-2.0
"""The one place where scanners make a `model.Origin`, and sightings in our own mount namespace."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.base import Known, Memo, Resighting, reached, resighted
from buildidfs.capture.origin import container
from buildidfs.capture.origin.file_users import FileUsers
from buildidfs.capture.origin.path_access import SCAN_KEEP_S, Reach, Root
from buildidfs.capture.origin.trust import Owners, trust_of
from buildidfs.formats import proc_text
from buildidfs.formats.container import cgroup
from buildidfs.linux import machine, mounts, namespaces, procfs, statx
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import (
    GROUP,
    OTHERS,
    OWNER,
    Access,
    FileIdentity,
    NamespaceSet,
    Origin,
    Sighting,
    Standing,
    Trust,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator


@contextlib.contextmanager
def own_root() -> Iterator[Root]:
    """Yield our own root in the form for `Reach.of`. Raises OSError."""
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        ours = namespaces.of(pid_fd)
        maker = container.maker(pid_fd, container.apart(ours, namespaces.initial()))
        with closing_fd(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
            yield Root(root_fd, b"/", mounts.mountinfo, user=ours.user, maker=maker)


def access_of(fd: int) -> Access:
    """Return the access to an open file at its present place; root alone if it cannot be found out.

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


class Surroundings(msgspec.Struct, frozen=True):
    """The fields of an `Origin` that are the same for all files that one process sees.

    ``owner`` is `container.owner`, 0 if unknown.
    """

    namespaces: NamespaceSet = NamespaceSet()
    mnt_ns_id: int = 0
    cgroup: bytes = b""
    cgroup_id: int = 0
    apart: int = 0
    container: str = ""
    owner: int = 0

    def origin(
        self,
        path: bytes,
        identity: FileIdentity,
        *,
        host: str,
        trust: Trust,
        scanner: str,
        reach: int = 0,
        archive: bytes = b"",
        signature: bytes = b"",
        standing: Standing = Standing.GIVEN,
        owner: int | None = None,
    ) -> Origin:
        """Return the origin of a file at ``path`` in these surroundings; see `Origin`
        for the rest. ``owner`` is None for that of the surroundings.
        """
        return Origin(
            path,
            identity,
            namespaces=self.namespaces,
            mnt_ns_id=self.mnt_ns_id,
            cgroup=self.cgroup,
            container=self.container,
            host=host,
            trust=trust,
            scanner=scanner,
            apart=self.apart,
            cgroup_id=self.cgroup_id,
            reach=reach,
            archive=archive,
            signature=signature,
            standing=standing,
            owner=self.owner if owner is None else owner,
        )


UNKNOWN: Final = Surroundings()
"""For files without a process, or with an unknown one."""


def surroundings_of(
    pid_fd: int,
    initial: NamespaceSet,
    container_namespaces: Collection[str],
    cgroup_path: Callable[[bytes], bytes] = cgroup.path,
) -> Surroundings:
    """Return the surroundings of a process, by its directory in /proc. Raises OSError."""
    its = namespaces.of(pid_fd)
    text = procfs.cgroup(pid_fd)
    path = cgroup_path(text)
    apart = container.apart(its, initial)
    return Surroundings(
        its,
        namespaces.mnt_ns_id(pid_fd),
        path,
        namespaces.cgroup_id(cgroup.unified(text)),
        apart,
        container.label_by(path, its, apart, container_namespaces),
        container.owner(pid_fd, its.user, path),
    )


class Here:
    """The surroundings of files that our own process sees. Raises OSError.

    ``initial`` are the host's namespaces; the default is those of this machine.
    ``given`` is True if the operator named the files, or a directory that they are in.
    ``container`` is the label of the container that we run in, empty on the host.
    """

    def __init__(
        self,
        scanner: str,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
        *,
        given: bool = True,
    ) -> None:
        self._scanner = scanner
        self._least = Standing.GIVEN if given else Standing.ELSEWHERE
        self._host = machine.host_name()
        self._initial = initial or namespaces.initial()
        self._owners = Owners(mounts.mountinfo)
        self._users = FileUsers()
        self._reach: Reach | None = None
        with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
            self._here = surroundings_of(pid_fd, self._initial, container_namespaces)
        self.container = self._here.container

    def sighting(self, path: bytes, fd: int, *, foreign: bool = False) -> Sighting:
        """Return the sighting of an open file at ``path``, without its reach. Raises OSError.

        ``foreign`` is True if the file is in an unknown mount namespace, which is not ours.
        """
        identity = statx.identity(fd)
        owner = None
        if foreign:
            here = self._here
            seen_in = Surroundings(
                cgroup=here.cgroup, cgroup_id=here.cgroup_id, container=here.container
            )
            trust = Trust.CONTAINER
        else:
            seen_in = self._here
            if seen_in.namespaces.mnt == self._initial.mnt:
                owner = self._users.of(fd, identity, os.getpid())
            trust = trust_of(
                identity,
                seen_in.namespaces.mnt,
                self._initial.mnt,
                owners_believed=identity.uid == 0 and self._owners.believed(path, fd),
            )
        origin = seen_in.origin(
            path,
            identity,
            host=self._host,
            trust=trust,
            scanner=self._scanner,
            standing=(
                max(self._least, self._owners.standing(path))
                if trust is Trust.HOST
                else Standing.GIVEN
            ),
            owner=owner,
        )
        return Sighting(origin, time.time_ns())

    def reached(self, sighting: Sighting, fd: int) -> Sighting:
        """Return the sighting with the reach of the file, which is open at ``fd`` (O_PATH
        suffices). Raises OSError.
        """
        if self._reach is None:
            self._reach = Reach(keep_s=SCAN_KEEP_S)
        with own_root() as root:
            return reached(sighting, self._reach.of(fd, sighting.origin.identity, root))

    def resighted(self, memo: Memo, sighting: Sighting, known: Known, fd: int) -> Resighting:
        """Return the record of an open file that the memo knows, with its reach if the place is
        new.
        """
        return resighted(memo, sighting, known, lambda each: self.reached(each, fd))


def is_foreign(fd: int) -> bool:
    """Return True if an open file is on no mount of our namespace, as behind /proc/PID/root.

    Raises OSError.
    """
    number = mounts.mount_id(fd)
    return all(mount.mount_id != number for mount in proc_text.mounts_in(mounts.mountinfo()))
