# SPDX-License-Identifier: Apache-2.0
"""The users who can reach a file along its path: the directories above it count, too.

A copy of the file is shown elsewhere, with the owner, group and mode of the file. The result
(`model.Origin.reach`) restricts that mode: a class (owner, group, others) keeps its rights only if
*every* member of the class could search every directory down to the file. The path begins at the
root of the file's mount namespace; for a process in a chroot this is above its own root. If a mount
namespace shows a directory of a filesystem that the host has mounted, too, the path to that
directory on the host counts as well: at least one path to it on the host must have only directories
that the users can search. Two groups of files are exempt, because engines keep them below
directories of mode 0700:

- files in the root filesystem of a container whose mount namespace root has made. The root of a
  rootless container, or of ``unshare -Urm``, is not exempt. But if it is an overlay that the host
  has not mounted, the check starts at that root;
- files that lie only in the storage directories of engines (`CONTAINER_STORAGE`).

Every other overlay that the host has not mounted is for the owners of its files, because the
directories above its layers are unknown. If the three classes cannot express the permissions, the
result allows less:

- the owner of a directory, or a member of its group, may be in any class of a file that belongs to
  another user;
- rights that an access control list gives to named users and groups are ignored; rights that it
  takes from them are taken from all, see `formats.posix_acl`. A server may have more permissions
  than it shows: on a network filesystem the rights of all count, and those of the owner;
- all users can enter a FUSE filesystem (allow_other) according to the mode (default_permissions),
  or only the user who mounted it;
- a file belongs to its owner alone if it never had a name, like a memfd, if it was deleted or is no
  longer where its path leads, or if the root of its users cannot be entered any more: a directory
  that has the name now need not be the one in which the file was.

Root can read every file, whatever the result is.

`FileUsers` finds the user for whom a file in the host's mount namespace counts, in all that users
divide. The owner that a file shows is not always a fact. The server of a FUSE filesystem chooses
it, and any user may run one; so may the layer of an overlay that a user has mounted in a namespace,
and whose files the user's processes on the host open through /proc/PID/root.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.capture.unresponsive.filesystems import SlowMounts, is_slow_type
from buildidfs.formats import posix_acl, proc_text
from buildidfs.linux import file_ops, inodes, mounts, namespaces, procfs
from buildidfs.linux.file_ops import Fd, closing_fd, closing_on_error
from buildidfs.model import EVERYBODY, GROUP, OTHERS, OWNER

if TYPE_CHECKING:
    from buildidfs.capture.unresponsive.filesystems import Patience
    from buildidfs.model import FileIdentity

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


NOBODY: Final = 65534
"""Stands for an unknown user: the kernel shows this number for users without one."""

_MOST_MOUNTS: Final = 4096
_SHOWN: Final = -1  # the owner that the file shows
_ELSEWHERE: Final = -2  # the mount is not in the host's mount namespace
_FUSE: Final = (b"fuse", b"fuseblk")
_INIT: Final = 1


class FileUsers:
    """Finds the users of files. Several threads may use it; no filesystem is asked."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._host = 0

    def of(self, fd: int, identity: FileIdentity, pid: int) -> int:
        """Return the user for whom an open file counts (O_PATH suffices); process ``pid`` uses it.

        It is the user who mounted the FUSE filesystem with the file. For a file that is on no mount
        of the host's mount namespace (it was unmounted, is in memory, or belongs to another
        namespace) it is the user of the process, `NOBODY` if that is gone. For all other files it
        is the owner. Raises OSError.
        """
        mount = inodes.unique_mount_id(fd)
        user = None if mount is None else self._known.get(mount)
        if user is None:
            user = self._mounter(fd, mount)
            if mount is not None:
                if len(self._known) >= _MOST_MOUNTS:
                    self._known.clear()
                self._known[mount] = user
        if user == _ELSEWHERE:
            return known_user(pid)
        return identity.uid if user == _SHOWN else user

    def _mounter(self, fd: int, mount: int | None) -> int:
        """Return the user of a mount, which has a file at ``fd``. Raises OSError.

        Only the mounts of FUSE filesystems need all of mountinfo: any user can make many others.
        """
        self._host = self._host or _host_namespace()
        try:
            if mount is not None and self._host:
                fstype = mounts.placed(mount, self._host).fstype
                if fstype not in _FUSE:
                    return _SHOWN
        except FileNotFoundError:
            return _ELSEWHERE
        except OSError:  # before Linux 6.11, or not permitted
            pass
        return _mounter(mounts.mount_id(fd))


def _host_namespace() -> int:
    """Return the number of the mount namespace of `mounts.initial_mountinfo`, 0 if unknown."""
    for pid in (_INIT, os.getpid()):
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as pid_fd:
            return namespaces.mnt_ns_id(pid_fd)
    return 0


def user_of_process(pid: int) -> int:
    """Return the effective user of a process. Raises OSError if it is gone."""
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        return procfs.uids(pid_fd)[1]


def known_user(pid: int) -> int:
    """Return the effective user of a process; `NOBODY` if it is gone."""
    try:
        return user_of_process(pid)
    except OSError:
        return NOBODY


def _mounter(number: int) -> int:
    """Return the user whose mount has that number in mountinfo. Raises OSError."""
    mark = b"%d " % number
    lines = (line for line in mounts.initial_mountinfo().split(b"\n") if line.startswith(mark))
    found = next(proc_text.mounts_in(next(lines, b"")), None)
    if found is None:
        return _ELSEWHERE
    if found.fstype.partition(b".")[0] not in _FUSE:
        return _SHOWN
    # For a mount of root, the owners that it shows count: root has chosen them.
    return int(proc_text.option(found.super_options, b"user_id") or b"0") or _SHOWN


MAX_DEPTH: Final = 256
SCAN_KEEP_S: Final = 1.0
"""Seconds for which a scan assumes that a directory is unchanged."""

_SEARCH: Final = 0o111
_READ: Final = 0o444
_MOST_KNOWN: Final = 4096
_MOST_WAYS: Final = 16
# This is longer than a tick of the clock of change times. A filesystem with whole seconds has ticks
# of one second or, like FAT, of two.
_TICK_NS: Final = 20_000_000
_SECOND_NS: Final = 1_000_000_000
_NO_GROUP: Final = -1


class Root(msgspec.Struct, frozen=True):
    """The root directory of a file's users: ``fd`` (O_PATH suffices), which has the path ``path``
    for us.

    ``mnt_ns_id`` (0: ours) and ``user`` are the numbers of the mount and the user namespace of
    these users, ``mountinfo`` returns the mounts there. ``maker`` is None in the host's own mount
    namespace; for any other it returns the user ID of the maker of the user namespace that it
    belongs to, which is 0 for containers that root has made. Both raise OSError.
    """

    fd: int
    path: bytes
    mountinfo: Callable[[], bytes]
    mnt_ns_id: int = 0
    user: int = 0
    maker: Callable[[], int] | None = None


class _Ground(NamedTuple):
    """A mount. ``is_networked`` is True if its filesystem depends on a server, so that the mode
    bits may not be all of its permissions; ``only`` is the only user who may enter, None for all.
    """

    mount: int | None
    is_networked: bool
    only: int | None


class _Barrier(NamedTuple):
    """A directory that not all users may search: its owner and group, and the classes that may."""

    uid: int
    gid: int
    owner: bool
    group: bool
    other: bool

    def lets_through(self, uid: int, gid: int) -> int:
        """Return the classes (owner, group, others) of which every member may search
        the directory.
        """
        both = self.group and self.other
        reach = OWNER if uid == 0 or (self.owner if uid == self.uid else both) else 0
        # The owner of the directory may be another user than that of the file.
        if self.owner or self.uid in (uid, 0):
            same = gid == self.gid
            reach |= GROUP if both or (same and self.group) else 0
            reach |= OTHERS if both or (same and self.other) else 0
        return reach


class _Way(NamedTuple):
    """The permissions from the root down to a directory, and the mount of the directory.

    ``place`` is device and inode of the directory, ``begun_ns`` the Unix time before the first of
    the directories was read.
    """

    barriers: frozenset[_Barrier]
    ground: _Ground
    place: tuple[int, int]
    begun_ns: int


class Reach:
    """Remembers directories for ``keep_s`` seconds, so an object is for one thread or one scan.

    Without ``ask``, requests to filesystems that may not answer (``slow`` knows them) are avoided:
    if the kernel does not have the path in memory, the file belongs to its owner alone. ``host``
    saves reading the host's mounts for filesystems that the host does not have.
    """

    def __init__(
        self,
        slow: SlowMounts | None = None,
        *,
        ask: bool = True,
        keep_s: float = 0.0,
        host: mounts.InitialDevices | None = None,
    ) -> None:
        self._slow = slow or SlowMounts()
        self._ask = ask
        self._keep_s = keep_s
        self._host = host
        self._known: dict[tuple[int, bytes, bytes], _Way] = {}
        self._known_since = 0.0

    def of(
        self, fd: int, identity: FileIdentity, root: Root, patience: Patience | None = None
    ) -> int:
        """Return `Origin.reach` of an open file (O_PATH suffices); ``OWNER`` if it cannot be found
        out.

        Does not raise. With ``patience``, a filesystem may take only that long.
        """
        try:
            if patience is None:
                return self._of(fd, identity, root)
            return self._patiently(fd, identity, root, patience)
        except (OSError, ValueError):
            return OWNER

    def _patiently(self, fd: int, identity: FileIdentity, root: Root, patience: Patience) -> int:
        """Return the reach. Raises OSError: TimeoutError if there is no answer in time."""
        # Stands in for a device, because the device in question is unknown: any directory on the
        # path may be on the filesystem that does not answer. No device has that number.
        device = (-3, root.mnt_ns_id)
        if patience.is_silent(device):
            return OWNER
        text = root.mountinfo()
        # The thread may be abandoned, so it has descriptors of its own to close, and a copy of the
        # mounts: `root.mountinfo` may read a descriptor of the caller.
        with closing_on_error(os.dup(fd)) as own_fd:
            own_root = os.dup(root.fd)
        own = msgspec.structs.replace(root, fd=own_root, mountinfo=lambda: text)

        def question() -> int:
            with closing_fd(own_fd), closing_fd(own_root):
                return self._of(own_fd, identity, own)

        return patience.ask(device, question, lambda reach: None)

    def _of(self, fd: int, identity: FileIdentity, root: Root) -> int:
        # The kernel's own name of the file, not the one of the sighting: it follows renames, and
        # ends in " (deleted)" without one.
        path = _inside(os.readlink(b"/proc/self/fd/%d" % fd), root.path)
        directory, _, name = path.rpartition(b"/")
        mount = inodes.unique_mount_id(fd)
        way, parent = self._way(root, directory, identity.ctime_ns)
        with closing_fd(parent):
            # Another file may have got the name between readlink(2) and this lookup. Its directory
            # then says nothing of our file.
            if not self._is_there(parent, name, identity, way.ground):
                return OWNER
        barriers, ground = way.barriers, way.ground
        if mount is None or mount != ground.mount:  # the file may itself be a mount point
            ground = self._ground(fd, identity, mount, root)
            barriers |= self._kept_by(ground, fd, identity, root)
        reach = self._readers(fd, identity.mode, ground)
        for barrier in barriers:
            reach &= barrier.lets_through(identity.uid, identity.gid)
        return reach

    def _is_there(self, parent: int, name: bytes, identity: FileIdentity, ground: _Ground) -> bool:
        """Return True if the file with ``name`` in a directory is the one with ``identity``."""
        try:
            fd = inodes.pin_entry(parent, name, ask=self._ask or not ground.is_networked)
        except OSError:
            return False
        with closing_fd(fd):
            found = inodes.identity(fd, ask=self._ask)
        return (found.dev, found.ino) == (identity.dev, identity.ino)

    # --- directories -----------------------------------------------------------------------

    def _way(self, root: Root, directory: bytes, changed_ns: int = 0) -> tuple[_Way, int]:
        """Return the permissions on the path to a directory, and its descriptor; the caller closes
        it.

        A remembered directory counts only for a file that was last changed, at ``changed_ns``,
        before the directory was read: its earlier permissions say nothing of a file that was put
        there later. Raises OSError.
        """
        now = time.monotonic()
        if now - self._known_since > self._keep_s or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._known_since = now
        key = (root.mnt_ns_id, root.path, directory)
        way = self._known.get(key)
        # The change time of a file that was moved here is at least that of the rename. So a file
        # whose change time is earlier than the walk was in the directory when the walk read it.
        tick = _TICK_NS if changed_ns % _SECOND_NS else 2 * _SECOND_NS
        if way is not None and changed_ns < way.begun_ns - tick:
            fd = self._pinned(root, directory or b"/", way.place)
            if fd >= 0:
                return way, fd
        names = [name for name in directory.split(b"/") if name]
        if len(names) > MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), directory)
        way, fd = self._walked(root, names)
        if self._keep_s:
            self._known[key] = way
        return way, fd

    def _pinned(self, root: Root, path: bytes, place: tuple[int, int]) -> int:
        """Pin the directory at ``path`` if its device and inode are ``place``; else -1."""
        try:
            if self._ask:
                fd = inodes.open_in_root(root.fd, path, os.O_PATH | os.O_DIRECTORY)
            else:
                fd = inodes.open_cached_in_root(root.fd, path)
        except OSError:
            return -1
        with Fd(fd) as directory:
            found = inodes.identity(fd, ask=self._ask)
            return directory.release() if (found.dev, found.ino) == place else -1

    def _walked(self, root: Root, names: list[bytes]) -> tuple[_Way, int]:
        begun_ns = time.time_ns()
        # A root that is "/" even from outside is hidden only by directories of root above it. A
        # root below a directory (a chroot, /proc/PID/root of a container) is reached through that
        # one.
        barriers = set() if root.path == b"/" else self._above(root)
        with Fd(os.dup(root.fd)) as at:
            identity, ground, found = self._look(at.fd, None, root)
            barriers.update(found)
            for name in names:
                # No link is followed: the path comes from the kernel and contains none.
                at.replace(inodes.pin_entry(at.fd, name, ask=self._ask or not ground.is_networked))
                identity, ground, found = self._look(at.fd, ground, root)
                barriers.update(found)
            way = _Way(frozenset(barriers), ground, (identity.dev, identity.ino), begun_ns)
            return way, at.release()

    def _above(self, root: Root) -> set[_Barrier]:
        """Return the barriers of the directories above a root, up to the root of its mount
        namespace.

        Raises OSError.
        """
        barriers: set[_Barrier] = set()
        with Fd(os.dup(root.fd)) as at:
            here = inodes.identity_on_mount(at.fd, ask=self._ask)
            ground: _Ground | None = None
            if root.maker is None:  # a process in a chroot does not see the mounts above it
                root = msgspec.structs.replace(root, mountinfo=mounts.initial_mountinfo)
            for _ in range(MAX_DEPTH):
                at.replace(inodes.pin_parent(at.fd, ask=self._ask))
                above = inodes.identity_on_mount(at.fd, ask=self._ask)
                # ".." of the uppermost directory is that directory. The mount belongs to the
                # comparison, because a bind mount shows one directory twice.
                if (above[0].dev, above[0].ino, above[1]) == (here[0].dev, here[0].ino, here[1]):
                    return barriers
                here = above
                try:
                    _, ground, found = self._look(at.fd, ground, root)
                except OSError:
                    if root.maker is None or root.maker():
                        raise
                    return barriers  # root made the container, and hid the mounts above its root
                barriers.update(found)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _look(
        self, fd: int, before: _Ground | None, root: Root
    ) -> tuple[FileIdentity, _Ground, frozenset[_Barrier]]:
        """Return a directory, its mount, and the barriers of both. Raises OSError."""
        identity, mount = inodes.identity_on_mount(fd, ask=self._ask)
        if not stat.S_ISDIR(identity.mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        ground, barriers = before, frozenset[_Barrier]()
        # Once for each mount on the way, because this may read mountinfo. If the kernel does not
        # report mounts (None), it is necessary for each directory.
        if ground is None or mount is None or mount != ground.mount:
            ground = self._ground(fd, identity, mount, root)
            barriers = self._kept_by(ground, fd, identity, root)
        bits = self._searchers(fd, identity.mode, ground)
        if bits & _SEARCH != _SEARCH:
            owner, group, other = (bool(bits & bit) for bit in (0o100, 0o010, 0o001))
            barriers |= {_Barrier(identity.uid, identity.gid, owner, group, other)}
        return identity, ground, barriers

    def _kept_by(
        self, ground: _Ground, fd: int, identity: FileIdentity, root: Root
    ) -> frozenset[_Barrier]:
        """Return the barriers of the mount that ``fd`` is on. Raises OSError."""
        barriers = frozenset[_Barrier]()
        if root.maker is not None:
            barriers = self._outside(fd, identity, ground.mount, root)
        if ground.only is not None:
            barriers |= {_Barrier(ground.only, _NO_GROUP, owner=True, group=False, other=False)}
        return barriers

    # --- filesystems that the host has mounted, too ------------------------------------------

    def _outside(
        self, fd: int, identity: FileIdentity, mount: int | None, root: Root
    ) -> frozenset[_Barrier]:
        """Return the barriers on the host's path to a directory that another mount namespace shows.

        The result is empty if the host does not have that filesystem, which then belongs to the
        container. It is also empty for the root directory that root has given to a container, and
        for the directories in which engines keep the data of containers: for these files, the
        container's own users count, see the module. Raises OSError, and ValueError if the answer
        cannot be found.
        """
        assert root.maker is not None
        shown, is_root = self._shown(fd, mount, root)
        # A user can make a mount namespace in which the same files lie below directories of their
        # own. So for a namespace that root has not made, its root directory proves nothing.
        made_by_root = root.maker() == 0
        if made_by_root and is_root:
            return frozenset()
        ways = self._ways_outside(shown)
        if ways and not all(path.startswith(CONTAINER_STORAGE) for path in ways):
            return self._least(fd, identity, ways)
        if not ways and shown.fstype == b"overlay" and not is_root:
            raise OSError(errno.ENOENT, "an overlay, whose layers are not known")
        if ways or made_by_root or shown.root == b"/":
            return frozenset()
        raise OSError(errno.ENOENT, "a part of what the host does not have")

    def _shown(self, fd: int, mount: int | None, root: Root) -> tuple[mounts.ShownMount, bool]:
        """Return the mount that ``fd`` is on, and True if it is the root of its users. Raises
        OSError.
        """
        if mount is not None and root.mnt_ns_id and root.path == b"/":
            with contextlib.suppress(OSError):  # before Linux 6.11, or no longer mounted
                return mounts.placed(mount, root.mnt_ns_id), mount == inodes.rooted_mount_id(
                    root.fd
                )
        mark = b"%d " % mounts.mount_id(fd)
        lines = (line for line in root.mountinfo().split(b"\n") if line.startswith(mark))
        found = next(proc_text.mounts_in(next(lines, b"")), None)
        if found is None:
            raise OSError(errno.ENOENT, "not mounted where it was seen")
        return mounts.ShownMount(found.dev, found.root, found.fstype), found.mount_point == b"/"

    def _ways_outside(self, shown: mounts.ShownMount) -> list[bytes]:
        """Return paths on the host that may lead to the root of a mount. Raises OSError."""
        if shown.root.endswith(b"//deleted"):
            raise OSError(errno.ENOENT, "a directory that was deleted")
        if self._host is not None and not self._host.has(shown.dev):
            return []
        mark = b" %d:%d " % shown.dev
        ways = []
        lines = (line for line in mounts.initial_mountinfo().split(b"\n") if mark in line)
        for found in proc_text.mounts_in(b"\n".join(islice(lines, _MOST_WAYS))):
            above = found.root.rstrip(b"/")
            if found.dev == shown.dev and (shown.root + b"/").startswith(above + b"/"):
                ways.append(found.mount_point.rstrip(b"/") + shown.root[len(above) :])
        return ways

    def _least(self, fd: int, identity: FileIdentity, ways: list[bytes]) -> frozenset[_Barrier]:
        """Return the fewest barriers on one of ``ways``, the paths to the root of a mount.

        Raises OSError, and ValueError if no path leads to the mount that ``fd`` is on.
        """
        if stat.S_ISDIR(identity.mode):
            identity = self._root_of_mount(fd)
        host_fd, mnt_ns_id = namespaces.open_initial_root()
        with closing_fd(host_fd):
            user = self._slow.host_user
            host = Root(host_fd, b"/", mounts.initial_mountinfo, mnt_ns_id, user)
            found = [self._along(host, way, identity) for way in ways]
        # Any path on which fewer directories keep users out is a path that they can take. If none
        # of them leads to the mount, min() raises ValueError, and the file belongs to its owner.
        return min((barriers for barriers in found if barriers is not None), key=len)

    def _root_of_mount(self, fd: int) -> FileIdentity:
        """Return the uppermost directory of the mount that a directory is on. Raises OSError."""
        number = mounts.mount_id(fd)
        with Fd(os.dup(fd)) as at:
            here = inodes.identity(fd, ask=self._ask)
            for _ in range(MAX_DEPTH):
                at.replace(inodes.pin_parent(at.fd, ask=self._ask))
                above = inodes.identity(at.fd, ask=self._ask)
                same = (above.dev, above.ino) == (here.dev, here.ino)
                if same or mounts.mount_id(at.fd) != number:
                    return here
                here = above
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def _along(self, host: Root, way: bytes, identity: FileIdentity) -> frozenset[_Barrier] | None:
        """Return the barriers along a path of the host; None if the path leads to another file."""
        directory, _, name = way.rpartition(b"/")
        try:
            if stat.S_ISDIR(identity.mode):
                walked, fd = self._walked(host, [each for each in way.split(b"/") if each])
                os.close(fd)
                is_there = walked.place == (identity.dev, identity.ino)
            else:
                walked, fd = self._walked(host, [each for each in directory.split(b"/") if each])
                with closing_fd(fd):
                    is_there = self._is_there(fd, name, identity, walked.ground)
        except OSError:
            return None
        return walked.barriers if is_there else None

    def _ground(self, fd: int, identity: FileIdentity, mount: int | None, root: Root) -> _Ground:
        if not self._slow.is_slow(fd, identity, root.mnt_ns_id, root.user):
            return _Ground(mount, is_networked=False, only=None)
        number = mounts.mount_id(fd)
        for found in proc_text.mounts_in(root.mountinfo()):
            if found.mount_id == number:
                # Before Linux 6.11 only mountinfo shows that a filesystem is not a slow one.
                stacked = found.fstype == b"overlay" and self._slow.is_users(root.user)
                is_networked = stacked or is_slow_type(found.fstype)
                return _Ground(mount, is_networked, self._mounter(found, root))
        raise OSError(errno.ENOENT, "not mounted where it was seen")

    def _mounter(self, mount: proc_text.MountInfo, root: Root) -> int | None:
        """Return the only user who may enter a mount; None if others may, too."""
        options = mount.super_options
        if not mounts.is_fuse(mount.fstype):
            return None
        if all(
            proc_text.option(options, name) is not None
            for name in (b"allow_other", b"default_permissions")
        ):
            return None
        if self._slow.is_users(root.user):
            # The option has the user ID in the user namespace in which the filesystem was mounted.
            raise OSError(errno.EPERM, "mounted by an unknown user")
        return int(proc_text.option(options, b"user_id") or b"0")

    def _searchers(self, fd: int, mode: int, ground: _Ground) -> int:
        """Return the search bits of a directory's mode that hold for all members of a class.

        Raises OSError, ValueError.
        """
        if ground.is_networked:
            return mode if mode & _SEARCH == _SEARCH else mode & 0o700
        entries = file_ops.access_list(fd)
        return mode if entries is None else mode & posix_acl.certain_bits(entries)

    def _readers(self, fd: int, mode: int, ground: _Ground) -> int:
        """Return the classes for which the read bits in the mode of a file hold for all members.
        Raises as `_searchers`.
        """
        if ground.is_networked:
            return EVERYBODY if mode & _READ == _READ else OWNER
        entries = file_ops.access_list(fd)
        if entries is None:
            return EVERYBODY
        certain = posix_acl.certain_bits(entries)
        return sum(
            who for who, bit in ((OWNER, 0o400), (GROUP, 0o040), (OTHERS, 0o004)) if certain & bit
        )


def _inside(path: bytes, root: bytes) -> bytes:
    """Convert our name of a file to that of processes whose root is ``root`` for us."""
    if not path.startswith(b"/"):
        raise OSError(errno.ENOENT, "has no path", path)
    if root == b"/":
        return path
    if not path.startswith(root + b"/"):
        raise OSError(errno.ENOENT, "not below that root", path)
    return path[len(root) :]
