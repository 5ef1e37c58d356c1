# SPDX-License-Identifier: Apache-2.0
"""Probes of FUSE, of the mounts of stores, and of the store itself."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat
import time

from buildidfs.doctor.probe import Probe, ProbeOutcome, degraded, failed, ok
from buildidfs.errors import BuildIdFsError, StoreVersionError, UsageError, needs_extra
from buildidfs.formats import proc_text
from buildidfs.linux import credentials, mounts
from buildidfs.linux.file_ops import closing_fd
from buildidfs.names import printable
from buildidfs.store.errors import FULL
from buildidfs.wording import counted

_FUSE = "fuse"

_DEVICE = "/dev/fuse"
_HELPER = "fusermount3"
_CONFIGURATION = "/etc/fuse.conf"
_STORE = "store"
_GIB = 1 << 30
_LEAST_BYTES = 16 << 20
_LEAST_SHARE = 0.05
_FEW_INODES = 10_000
_LEAST_INODES = 100
_VOLATILE = frozenset((b"tmpfs", b"ramfs"))
_LAYERED = frozenset((b"overlay", b"aufs"))
_HOUR = 3600
_FREE = "free some room, or move the store to a larger filesystem (--store)"


def fuse_probes() -> list[Probe]:
    """Return the probes of FUSE, with one for each mount of ours."""
    found = [
        Probe(_FUSE, "device", _device),
        Probe(_FUSE, "library", _library),
        Probe(_FUSE, "helper", _helper),
        Probe(_FUSE, "other users", _other_users),
    ]
    points = _own_mounts()
    if not points:
        return [*found, Probe(_FUSE, "mounts", lambda: ok("no store is mounted"))]
    for point in points:
        # Each mount may hang by itself.
        name = f"mount {printable(point)}"
        found.append(Probe(_FUSE, name, functools.partial(_mounted, point), name))
    return found


def _own_mounts() -> list[bytes]:
    try:
        text = mounts.mountinfo()
    except OSError:
        return []
    ours = (each for each in proc_text.mounts_in(text) if each.fstype == mounts.FILESYSTEM_TYPE)
    return list(dict.fromkeys(each.mount_point for each in ours))


def _device() -> ProbeOutcome:
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        return failed(f"{_DEVICE} does not exist", mounts.how_to_get_fuse())
    except PermissionError as error:
        if os.geteuid() == 0:  # the control group of a container forbids it
            return failed(f"{_DEVICE}: {error.strerror}", mounts.how_to_get_fuse())
        return failed(
            f"{_DEVICE} may not be opened by this user",
            f"as root: chmod 666 {_DEVICE}; give a container --device {_DEVICE}",
        )
    except OSError as error:
        return failed(f"{_DEVICE}: {error.strerror}", mounts.how_to_get_fuse())
    return ok(f"{_DEVICE} can be opened")


def _library() -> ProbeOutcome:
    try:
        with needs_extra("mount"):
            from buildidfs.mount import session  # noqa: F401 - whether it can be loaded
    except UsageError as error:
        reason, _, remedy = str(error).rpartition(": ")
        return failed(reason, remedy)
    return ok("libfuse3 and pyfuse3 can be loaded")


def _helper() -> ProbeOutcome:
    if os.geteuid() == 0:
        if "CAP_SYS_ADMIN" in credentials.effective_capabilities():
            return ok(f"root mounts without {_HELPER}")
        return failed("root cannot mount here", credentials.how_to_get("CAP_SYS_ADMIN"))
    path = shutil.which(_HELPER)
    if path is None:
        return failed(
            f"{_HELPER} is not installed, and only root can mount without it",
            "install the package fuse3",
        )
    status = os.stat(path)
    if status.st_uid != 0 or not status.st_mode & stat.S_ISUID:
        return degraded(
            f"{path} does not run as root",
            f"as root: chmod u+s {path}, unless it has file capabilities instead",
        )
    return ok(f"{path} runs as root")


def _other_users() -> ProbeOutcome:
    if os.geteuid() == 0:
        return ok("root may let other users read its mounts")
    try:
        with open(_CONFIGURATION, encoding="utf-8", errors="replace") as file:
            allowed = any(line.strip() == "user_allow_other" for line in file)
    except FileNotFoundError:
        allowed = False
    if allowed:
        return ok("users may let other users read their mounts")
    return degraded(
        f"only root may let other users read a mount: {_CONFIGURATION} lacks user_allow_other",
        f"as root: echo user_allow_other >>{_CONFIGURATION}",
    )


def _mounted(point: bytes) -> ProbeOutcome:
    # Not stat(2): the kernel's cache may answer it long after the server was killed.
    try:
        os.statvfs(point)
    except PermissionError:
        return ok("it is another user's")
    except FileNotFoundError:
        return ok("it is gone meanwhile, or hidden under another mount")
    except OSError as error:
        if error.errno not in mounts.SERVER_GONE:
            raise
        return degraded(
            "its server is gone: every name in it is an error",
            f"buildidfs unmount {printable(point)}, or mount it again",
        )
    return ok("answers")


def store_probes(root: bytes) -> list[Probe]:
    """Return the probes of the store at ``root``, or of the place where it would be made."""
    asked = {
        "directory": _directory,
        "filesystem": _filesystem,
        "writing": _writing,
        "free space": _free_space,
        "free inodes": _free_inodes,
        "unnamed files": _unnamed_files,
        "index": _index,
        "leftovers": _leftovers,
    }
    return [
        Probe(_STORE, name, functools.partial(ask, root), place=_STORE)
        for name, ask in asked.items()
    ]


def _is_there(root: bytes) -> bool:
    return os.path.exists(os.path.join(root, b"format"))


def _place(root: bytes) -> bytes:
    """Return the store, or the nearest existing directory above it."""
    while not os.path.isdir(root) and root != b"/":
        root = os.path.dirname(root)
    return root


def _directory(root: bytes) -> ProbeOutcome:
    shown = printable(root)
    try:
        status = os.stat(root)
    except FileNotFoundError:
        return ok(f"{shown} is not there yet: the first scan makes it")
    except PermissionError:
        return failed(
            f"{shown} may not be looked at by this user",
            "run as its owner, or name another: --store",
        )
    if not stat.S_ISDIR(status.st_mode):
        return failed(f"{shown} is not a directory", "name another: --store")
    if not os.access(root, os.R_OK | os.X_OK, effective_ids=True):
        return failed(
            f"{shown} belongs to user {status.st_uid}, and may not be entered by this one",
            "run as its owner, or name another: --store",
        )
    if not _is_there(root):
        if os.listdir(root):
            return failed(
                f"{shown} is not a store, and not empty", "name another directory: --store"
            )
        return ok(f"{shown} is empty: the first scan makes the store")
    if status.st_uid != os.geteuid():
        return degraded(
            f"{shown} belongs to user {status.st_uid}, who may not read what this one captures",
            f"run as its owner, or chown -R {os.geteuid()} it",
        )
    if status.st_mode & 0o077:
        return degraded(
            f"{shown} has mode {stat.S_IMODE(status.st_mode):04o}: others may read what they could"
            " not where it was captured",
            f"chmod 700 {shown}",
        )
    return ok(shown)


def _filesystem(root: bytes) -> ProbeOutcome:
    place = _place(root)
    mount = _mount_of(place)
    kind = mount.fstype.decode("utf-8", "backslashreplace")
    where = f"{kind} at {printable(mount.mount_point)}"
    if mounts.needs_server(mount.fstype):
        return failed(
            f"{where}: an index that is mapped through a server is damaged sooner or later",
            "put the store on a local filesystem: --store",
        )
    if mount.fstype in _VOLATILE:
        return degraded(f"{where}: lost at reboot", "put the store on a disk: --store")
    if mount.fstype in _LAYERED:
        return degraded(
            f"{where}: lost with the container, if it is the root of one",
            "put the store on a volume: --store",
        )
    return ok(where)


def _mount_of(place: bytes) -> proc_text.MountInfo:
    """Return the mount that a directory is on.

    The mount is found by its number, because on btrfs and overlayfs mountinfo and stat(2) show
    different device numbers.
    """
    with closing_fd(os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        number = mounts.mount_id(fd)
    for mount in proc_text.mounts_in(mounts.mountinfo()):
        if mount.mount_id == number:
            return mount
    raise FileNotFoundError(errno.ENOENT, "its mount is not below the root of this process", place)


def _writing(root: bytes) -> ProbeOutcome:
    place = _place(root)
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return failed(
            f"{printable(place)} is on a read-only filesystem: nothing can be captured into it",
            "mount -o remount,rw, or name another: --store; if the disk failed, see dmesg",
        )
    if not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        return failed(
            f"{printable(place)} may not be written to by this user",
            "run as its owner, or name another: --store",
        )
    return ok("allowed")


def _free_space(root: bytes) -> ProbeOutcome:
    usage = os.statvfs(_place(root))
    free, whole = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    share = free / whole if whole else 1.0
    found = f"{free / _GIB:.1f} GiB, {share:.0%} of its filesystem"
    if free < _LEAST_BYTES:
        return failed(f"{free >> 10} KiB: hardly anything more can be captured", _FREE)
    if free < _GIB or share < _LEAST_SHARE:
        return degraded(found, _FREE)
    return ok(found)


def _free_inodes(root: bytes) -> ProbeOutcome:
    usage = os.statvfs(_place(root))
    if not usage.f_files:
        return ok("its filesystem makes them as needed")
    found = f"{usage.f_favail}; each captured file needs one"
    if usage.f_favail < _LEAST_INODES:
        return failed(found, _FREE)
    if usage.f_favail < _FEW_INODES:
        return degraded(found, _FREE)
    return ok(found)


def _unnamed_files(root: bytes) -> ProbeOutcome:
    try:
        os.close(os.open(_place(root), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if error.errno in FULL:
            return failed("no room for another file", _FREE)
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        return degraded(
            "its filesystem has none (O_TMPFILE): what is being copied when the machine stops is"
            " left behind until the next scan",
            "put the store on ext4, xfs, btrfs or another local filesystem: --store",
        )
    return ok("can be made (O_TMPFILE)")


def _index(root: bytes) -> ProbeOutcome:
    if not _is_there(root):
        return ok("not there yet")
    from buildidfs.store import Store

    try:
        if not os.path.exists(os.path.join(root, b"index", b"lock.mdb")):
            # Opening the store would create the file.
            return degraded("lock.mdb is missing from it", "the next scan makes it again")
        with Store.open(root, read_only=True) as store:
            held = store.stats()
    except StoreVersionError as error:
        found, _, remedy = str(error).rpartition(": ")
        return failed(found, remedy)
    except BuildIdFsError as error:
        return failed(str(error), "move the store away, or name another (--store), and scan again")
    return ok(f"opens: {counted(held.ids, 'build ID')}, {counted(held.blobs, 'blob')}")


def _leftovers(root: bytes) -> ProbeOutcome:
    count = size = 0
    try:
        with os.scandir(os.path.join(root, b"staging")) as entries:
            for entry in entries:
                status = entry.stat(follow_symlinks=False)
                if status.st_mtime < time.time() - _HOUR:
                    count, size = count + 1, size + status.st_blocks * 512
    except FileNotFoundError:
        pass
    if count:
        return degraded(
            f"{counted(count, 'file')}, {size >> 10} KiB, half copied when a process ended",
            "the next scan removes them; see why it ended",
        )
    return ok("nothing half copied is left")
