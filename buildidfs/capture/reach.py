# SPDX-License-Identifier: Apache-2.0
"""Who could get at a file along its path: the directories above it have permissions, too.

What is found out is meant for a mode that is shown elsewhere, with the owner and group of the file:
for each of its three classes, whether *everybody* who is in it could search every directory from
the root of its users down (`model.Origin.reach`). Where these three cannot say it, less is said:

- who owns a directory, or is in its group, may be in any class of a file that is another's;
- what an access control list lets named users and groups do is not said; what it keeps them from,
  everybody is kept from, see `formats.posixacl`. A server may have more of the kind than it shows:
  on a network filesystem counts what all have, and what the owner has;
- into a FUSE filesystem come all (allow_other) by the mode (default_permissions), or the one
  who mounted it;
- a file that never had a name, like a memfd, one that is not where its path leads, and one whose
  users' root nobody can enter any more, is its owner's.

Root reads everything, here as there.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.capture.patience import is_slow_type
from buildidfs.capture.slow import SlowMounts
from buildidfs.formats import mountinfo, posixacl
from buildidfs.linux import mounts, openat2, statx, xattr
from buildidfs.model import EVERYBODY, GROUP, OTHERS, OWNER

if TYPE_CHECKING:
    from buildidfs.capture.patience import Patience
    from buildidfs.model import FileIdentity

MAX_DEPTH: Final = 256
SCAN_KEEP_S: Final = 1.0
"""How long a scan takes a directory to be as it was."""

_SEARCH: Final = 0o111
_READ: Final = 0o444
_DELETED: Final = b" (deleted)"
_MOST_KNOWN: Final = 4096
_NOBODY: Final = -1


class Root(msgspec.Struct, frozen=True):
    """Where the paths of a file's users begin: ``fd`` (O_PATH will do), which is ``path`` to us.

    ``mnt_ns_id`` (0: ours) and ``user`` are the numbers of the mount and the user namespace of
    these users, ``mountinfo`` tells what is mounted there.
    """

    fd: int
    path: bytes
    mountinfo: Callable[[], bytes]
    mnt_ns_id: int = 0
    user: int = 0


class _Ground(NamedTuple):
    """A mount. ``told`` says that its filesystem depends on somebody's answer, and that the bits of
    a mode may not be all there is to its permissions; ``only`` is who is let in, if not everybody.
    """

    mount: int | None
    told: bool
    only: int | None


class _Barrier(NamedTuple):
    """A directory that not everybody may search: who owns it, and which of its classes may."""

    uid: int
    gid: int
    owner: bool
    group: bool
    other: bool

    def lets_through(self, uid: int, gid: int) -> int:
        """Of a file's owner, its group and all others those of whom everybody may search it."""
        both = self.group and self.other
        reach = OWNER if uid == 0 or (self.owner if uid == self.uid else both) else 0
        # Whoever owns the directory may be anybody but the owner of the file.
        if self.owner or self.uid in (uid, 0):
            same = gid == self.gid
            reach |= GROUP if both or (same and self.group) else 0
            reach |= OTHERS if both or (same and self.other) else 0
        return reach


class _Way(NamedTuple):
    """What was met from the root down to a directory, and the mount that this is on."""

    barriers: frozenset[_Barrier]
    ground: _Ground


class Reach:
    """Remembers directories for ``keep_s`` seconds, so one is for one thread or one scan.

    Without ``ask`` no filesystem is waited for that may not answer (``slow`` knows which): where
    the kernel does not have the way in memory, the file counts as its owner's.
    """

    def __init__(
        self, slow: SlowMounts | None = None, *, ask: bool = True, keep_s: float = 0.0
    ) -> None:
        self._slow = slow or SlowMounts()
        self._ask = ask
        self._keep_s = keep_s
        self._known: dict[tuple[int, bytes, bytes], _Way] = {}
        self._known_since = 0.0

    def of(
        self, fd: int, identity: FileIdentity, root: Root, patience: Patience | None = None
    ) -> int:
        """`Origin.reach` of an open file (O_PATH will do). What cannot be found out is ``OWNER``;
        it does not raise. With ``patience`` filesystems are not waited for any longer than that.
        """
        try:
            if patience is None:
                return self._of(fd, identity, root)
            return self._patiently(fd, identity, root, patience)
        except (OSError, ValueError):
            return OWNER

    def _patiently(self, fd: int, identity: FileIdentity, root: Root, patience: Patience) -> int:
        """Raises OSError: TimeoutError if there is no answer in time."""
        # In place of a device, since nobody knows which will be met. There is none of that number.
        device = (-3, root.mnt_ns_id)
        if patience.is_silent(device):
            return OWNER
        text = root.mountinfo()
        # Whoever asks may be left behind, and then has descriptors that nobody else closes.
        own_fd = os.dup(fd)
        try:
            own_root = os.dup(root.fd)
        except OSError:
            os.close(own_fd)
            raise
        own = Root(own_root, root.path, lambda: text, root.mnt_ns_id, root.user)

        def question() -> int:
            try:
                return self._of(own_fd, identity, own)
            finally:
                os.close(own_fd)
                os.close(own_root)

        return patience.ask(device, question, lambda reach: None)

    def _of(self, fd: int, identity: FileIdentity, root: Root) -> int:
        path = _inside(os.readlink(b"/proc/self/fd/%d" % fd), root.path)
        directory, _, name = path.rpartition(b"/")
        mount = statx.unique_mount_id(fd)
        way, parent = self._way(root, directory)
        try:
            if not self._is_there(parent, name, identity, mount, way.ground):
                return OWNER
        finally:
            os.close(parent)
        barriers, ground = way
        if mount is None or mount != ground.mount:  # a file may be mounted itself
            ground = self._ground(fd, identity, mount, root)
            barriers |= _kept_by(ground)
        reach = self._readers(fd, identity.mode, ground)
        for barrier in barriers:
            reach &= barrier.lets_through(identity.uid, identity.gid)
        return reach

    def _is_there(
        self, parent: int, name: bytes, identity: FileIdentity, mount: int | None, ground: _Ground
    ) -> bool:
        """Whether a file is, or was until it was deleted, in the directory its path names."""
        try:
            fd = openat2.pin_entry(parent, name, ask=self._ask or not ground.told)
        except OSError:
            pass
        else:
            try:
                found = statx.identity(fd, ask=self._ask)
            finally:
                os.close(fd)
            if (found.dev, found.ino) == (identity.dev, identity.ino):
                return True
        # Nothing else may have been mounted over that directory, or taken its name.
        return (
            name.endswith(_DELETED)
            and name != b"#%d" % identity.ino + _DELETED  # O_TMPFILE: it never had a name
            and mount is not None
            and mount == ground.mount
        )

    # --- directories -----------------------------------------------------------------------

    def _way(self, root: Root, directory: bytes) -> tuple[_Way, int]:
        """The way to a directory, and its descriptor, which is the caller's. Raises OSError."""
        now = time.monotonic()
        if now - self._known_since > self._keep_s or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
            self._known_since = now
        key = (root.mnt_ns_id, root.path, directory)
        way = self._known.get(key)
        if way is not None:
            flags = os.O_PATH | os.O_DIRECTORY
            return way, openat2.open_in_root(root.fd, directory or b"/", flags)
        names = [name for name in directory.split(b"/") if name]
        if len(names) > MAX_DEPTH:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), directory)
        way, fd = self._walked(root, names)
        if self._keep_s:
            self._known[key] = way
        return way, fd

    def _walked(self, root: Root, names: list[bytes]) -> tuple[_Way, int]:
        fd = os.dup(root.fd)
        try:
            ground, found = self._look(fd, None, root)
            barriers = set(found)
            for name in names:
                # No link is followed: the kernel told the path, and there is none on the way.
                entry = openat2.pin_entry(fd, name, ask=self._ask or not ground.told)
                os.close(fd)
                fd = entry
                ground, found = self._look(fd, ground, root)
                barriers.update(found)
        except BaseException:
            os.close(fd)
            raise
        return _Way(frozenset(barriers), ground), fd

    def _look(
        self, fd: int, before: _Ground | None, root: Root
    ) -> tuple[_Ground, frozenset[_Barrier]]:
        """The mount a directory is on, and what it keeps out. Raises OSError."""
        identity, mount = statx.identity_on_mount(fd, ask=self._ask)
        if not stat.S_ISDIR(identity.mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        ground, barriers = before, frozenset[_Barrier]()
        if ground is None or mount is None or mount != ground.mount:
            ground = self._ground(fd, identity, mount, root)
            barriers = _kept_by(ground)
        bits = self._searchers(fd, identity.mode, ground)
        if bits & _SEARCH != _SEARCH:
            owner, group, other = (bool(bits & bit) for bit in (0o100, 0o010, 0o001))
            barriers |= {_Barrier(identity.uid, identity.gid, owner, group, other)}
        return ground, barriers

    def _ground(self, fd: int, identity: FileIdentity, mount: int | None, root: Root) -> _Ground:
        if not self._slow.is_slow(fd, identity, root.mnt_ns_id, root.user):
            return _Ground(mount, told=False, only=None)
        number = mounts.mount_id(fd)
        for found in mountinfo.parse(root.mountinfo()):
            if found.mount_id == number:
                # Before Linux 6.11 only the text can say that a filesystem is not a slow one.
                stacked = found.fstype == b"overlay" and self._slow.is_users(root.user)
                told = stacked or is_slow_type(found.fstype)
                return _Ground(mount, told, self._mounter(found, root))
        raise OSError(errno.ENOENT, "not mounted where it was seen")

    def _mounter(self, mount: mountinfo.MountInfo, root: Root) -> int | None:
        """Who alone is let in, None if that is not so."""
        options = mount.super_options
        if mount.fstype not in (b"fuse", b"fuseblk") and not mount.fstype.startswith(b"fuse."):
            return None
        if all(
            mountinfo.option(options, name) is not None
            for name in (b"allow_other", b"default_permissions")
        ):
            return None
        if self._slow.is_users(root.user):
            # It says who mounted it in the numbers of the user namespace it was mounted in.
            raise OSError(errno.EPERM, "mounted by somebody unknown")
        return int(mountinfo.option(options, b"user_id") or b"0")

    def _searchers(self, fd: int, mode: int, ground: _Ground) -> int:
        """The bits of a directory's mode that hold for everybody in a class.

        Raises OSError, ValueError.
        """
        if ground.told:
            return mode if mode & _SEARCH == _SEARCH else mode & 0o700
        entries = xattr.access_list(fd)
        return mode if entries is None else mode & posixacl.certain_bits(entries)

    def _readers(self, fd: int, mode: int, ground: _Ground) -> int:
        """The classes for which the mode of a file says who may read it. Raises as `_searchers`."""
        if ground.told:
            return EVERYBODY if mode & _READ == _READ else OWNER
        entries = xattr.access_list(fd)
        if entries is None:
            return EVERYBODY
        certain = posixacl.certain_bits(entries)
        return sum(
            who for who, bit in ((OWNER, 0o400), (GROUP, 0o040), (OTHERS, 0o004)) if certain & bit
        )


def _inside(path: bytes, root: bytes) -> bytes:
    """What is called ``path`` by us, as those call it whose root is called ``root``."""
    if not path.startswith(b"/"):
        raise OSError(errno.ENOENT, "has no path", path)
    if root == b"/":
        return path
    if not path.startswith(root + b"/"):
        raise OSError(errno.ENOENT, "not below that root", path)
    return path[len(root) :]


def _kept_by(ground: _Ground) -> frozenset[_Barrier]:
    if ground.only is None:
        return frozenset()
    return frozenset((_Barrier(ground.only, _NOBODY, owner=True, group=False, other=False),))
