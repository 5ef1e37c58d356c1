# SPDX-License-Identifier: Apache-2.0
"""The one place where scanners make a `model.Origin`: the container of a file and the trust in it.

The kernel has no containers, only namespaces and control groups. Only the namespaces of a process
decide if it is in a container, because a process cannot imitate them; the label is for people.

A file in the host's mount namespace that belongs to root has trust HOST if its owner can be
believed (`Owners`): this module excludes all ways by which bytes of others come to look like that.
One way cannot be excluded: root of a container without a user namespace is root of the host, and
writes to the volumes of the container. So files of root also have a standing: directories of
package managers are not volumes of containers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import stat
import time
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.capture.base import Known, Memo, Resighting, reached, resighted
from buildidfs.capture.origin.path_access import (
    CONTAINER_STORAGE,
    SCAN_KEEP_S,
    FileUsers,
    Reach,
    Root,
)
from buildidfs.errors import UsageError
from buildidfs.formats import proc_text
from buildidfs.formats.container import cgroup
from buildidfs.linux import inodes, machine, mounts, namespaces, procfs
from buildidfs.linux import namespaces as its_namespaces
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import (
    GROUP,
    NO_NAMES,
    OTHERS,
    OWNER,
    Access,
    ContainerNames,
    FileIdentity,
    NamespaceSet,
    Origin,
    Sighting,
    Standing,
    Trust,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping


_NAMES: Final = NamespaceSet.__struct_fields__
_SHOWN: Final = 5


def apart(namespaces: NamespaceSet, initial: NamespaceSet) -> int:
    """Return `Origin.apart`: bit 1<<i is set if the i-th namespace differs from the host's.

    An unknown namespace (0) counts as the host's.
    """
    bits = 0
    for number, name in enumerate(_NAMES):
        its, hosts = getattr(namespaces, name), getattr(initial, name)
        if its != hosts and its and hosts:
            bits |= 1 << number
    return bits


def apart_names(apart: int) -> list[str]:
    """Return the names of the namespaces in ``apart``, in the order of `NamespaceSet`."""
    return [name for number, name in enumerate(_NAMES) if apart & 1 << number]


def in_container(apart: int, names: Iterable[str] = ("mnt",)) -> bool:
    """Return True if each namespace of ``names`` differs from the host's according to ``apart``."""
    return all(apart & 1 << _NAMES.index(name) for name in names)


def maker(pid_fd: int, apart: int) -> Callable[[], int] | None:
    """Return `path_access.Root.maker` for a process with the namespaces ``apart``.

    Mounts that root makes in a mount namespace of another user count as root's.
    """
    if not in_container(apart, ("mnt",)):
        return None
    if not in_container(apart, ("user",)):
        return lambda: 0
    return functools.partial(its_namespaces.user_owner, pid_fd)


def owner(pid_fd: int, user_namespace: int, cgroup_path: bytes) -> int:
    """Return the user who made the surroundings of a process; 0 for root. Raises OSError."""
    user = group_maker(cgroup_path)
    if user or cgroup.outermost(cgroup_path):
        return user
    if user_namespace in (0, its_namespaces.own_user()):
        return 0
    return its_namespaces.outermost_owner(pid_fd) or 0


def group_maker(cgroup_path: bytes) -> int:
    """Return the user who made the control group of a container; 0 for root.

    A user to whom a part of the hierarchy belongs may make groups there with the ID of any
    container. So the owner of the group above counts; if that is gone, the part that systemd gives
    to each user.
    """
    outer = cgroup.outermost(cgroup_path)
    if not outer and cgroup.container_label(cgroup_path):
        outer = cgroup_path  # of a pod or task, which has no ID of a container
    maker = its_namespaces.cgroup_owner(outer.rpartition(b"/")[0] or b"/") if outer else None
    return (cgroup.user_id(cgroup_path) or 0) if maker is None else maker


def shown(label: str, cgroup_path: bytes, owner: int | None = None) -> str:
    """Return a label for reports, which is not that of a container of root if another user, or
    another container, has only taken its name.

    ``owner`` is the user who made the container, 0 for root; None looks at the control group, as
    long as that exists.
    """
    if owner is None and (not label or cgroup.container_label(cgroup_path) != label):
        return label
    maker = group_maker(cgroup_path) if owner is None else owner or cgroup.user_id(cgroup_path)
    return cgroup.label_of_maker(label, cgroup_path, maker or 0)


class _Seen(Protocol):
    """An `Origin`, or a row of the journal."""

    @property
    def container(self) -> str: ...
    @property
    def cgroup(self) -> bytes: ...
    @property
    def owner(self) -> int: ...


def reported(seen: _Seen) -> str:
    """Return `shown` for the container of a sighting."""
    return shown(seen.container, seen.cgroup, seen.owner)


def label(cgroup_path: bytes, namespaces: NamespaceSet, names: Collection[str] = ("mnt",)) -> str:
    """Return the label of the container of a contained process: ``docker:0123456789ab``.

    If the control group does not name the container, the label has the inode number of a namespace,
    ``mnt:4026532177``, which is unique only as long as the container runs. It is the mount
    namespace if that is among ``names``, the namespaces that define a container; else the first of
    them.
    """
    found = cgroup.container_label(cgroup_path)
    if found is not None:
        return found
    kind = "mnt" if "mnt" in names else next(iter(names))
    return f"{kind}:{getattr(namespaces, kind)}"


def label_by(
    cgroup_path: bytes, namespaces: NamespaceSet, apart: int, names: Collection[str]
) -> str:
    """Return the label of a process's container, if ``names`` define a container; empty if the
    process is in none.
    """
    return label(cgroup_path, namespaces, names) if in_container(apart, names) else ""


def choose(
    wanted: Iterable[str],
    labels: Collection[str],
    called: Mapping[str, ContainerNames] = MappingProxyType({}),
) -> frozenset[str]:
    """Return the labels of the containers that a user has named.

    Each text may be a whole label, or a unique beginning of the part after the colon; an ID longer
    than in labels (docker's 64 digits) is also accepted. ``called`` has the names of labels; a name
    selects all containers that have it. Raises `UsageError` for a text that fits none of
    ``labels``, or for a beginning that fits several.
    """
    found: set[str] = set()
    for text in wanted:
        named = {label for label in labels if label in called and called[label].fits(text)}
        found |= named or {_choose_one(text, labels)}
    return frozenset(found)


def fits(text: str, label: str, names: ContainerNames = NO_NAMES) -> bool:
    """Return True if the user's ``text`` may name the container ``label``; see `choose`."""
    if names.fits(text):
        return True
    manager, colon, its_id = text.rpartition(":")
    if not its_id or (colon and not label.startswith(f"{manager}:")):
        return text == label
    return text == label or _same_beginning(its_id, label.partition(":")[2])


def _choose_one(text: str, labels: Collection[str]) -> str:
    if text in labels:
        return text
    fitting = sorted(label for label in labels if fits(text, label))
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"several containers begin with {text!r}: {_listed(fitting)}")
    known = f"; running: {_listed(sorted(labels))}" if labels else "; none is running"
    raise UsageError(f"no container {text!r} to be seen{known}")


def _same_beginning(its_id: str, shown: str) -> bool:
    # Names must match from their beginning; only a hexadecimal ID may be cut off.
    if shown.startswith(its_id):
        return True
    return len(its_id) == 64 and len(shown) == 12 and its_id.startswith(shown)


def _listed(labels: list[str]) -> str:
    more = len(labels) - _SHOWN
    return ", ".join(labels[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


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
        mount = inodes.unique_mount_id(fd)
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
            fd = inodes.open_cached_in_root(root_fd, directory)
        except OSError:
            if directory.startswith(_INSTALLED):
                raise
            # The kernel has no cached answer, or cannot be told not to ask the filesystem.
            fd = os.open(directory, os.O_PATH | os.O_CLOEXEC)
    with closing_fd(fd):
        found = inodes.identity(fd, ask=False)
    return stat.S_ISDIR(found.mode) and found.uid == 0 and not found.mode & _OTHERS_WRITE


@contextlib.contextmanager
def own_root() -> Iterator[Root]:
    """Yield our own root in the form for `Reach.of`. Raises OSError."""
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        ours = namespaces.of(pid_fd)
        its_maker = maker(pid_fd, apart(ours, namespaces.initial()))
        with closing_fd(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
            yield Root(root_fd, b"/", mounts.mountinfo, user=ours.user, maker=its_maker)


def access_of(fd: int) -> Access:
    """Return the access to an open file at its present place; root alone if it cannot be found out.

    Does not raise.
    """
    try:
        identity = inodes.identity(fd)
        with own_root() as root:
            reach = Reach().of(fd, identity, root)
    except OSError:
        return Access(0)
    bits = ((OWNER, 0o400), (GROUP, 0o040), (OTHERS, 0o004))
    mode = sum(bit for who, bit in bits if reach & who) & identity.mode
    return Access(mode, identity.uid, identity.gid)


class Surroundings(msgspec.Struct, frozen=True):
    """The fields of an `Origin` that are the same for all files that one process sees.

    ``owner`` is `builder.owner`, 0 if unknown.
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
    bits = apart(its, initial)
    return Surroundings(
        its,
        namespaces.mnt_ns_id(pid_fd),
        path,
        namespaces.cgroup_id(cgroup.unified(text)),
        bits,
        label_by(path, its, bits, container_namespaces),
        owner(pid_fd, its.user, path),
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
        self._reach: tuple[Reach, Root] | None = None
        with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
            self._here = surroundings_of(pid_fd, self._initial, container_namespaces)
        self.container = self._here.container

    def sighting(self, path: bytes, fd: int, *, foreign: bool = False) -> Sighting:
        """Return the sighting of an open file at ``path``, without its reach. Raises OSError.

        ``foreign`` is True if the file is in an unknown mount namespace, which is not ours.
        """
        identity = inodes.identity(fd)
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
            stack = contextlib.ExitStack()
            self._reach = Reach(keep_s=SCAN_KEEP_S), stack.enter_context(own_root())
            weakref.finalize(self, stack.close)
        finder, root = self._reach
        return reached(sighting, finder.of(fd, sighting.origin.identity, root))

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
