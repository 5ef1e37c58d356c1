# SPDX-License-Identifier: Apache-2.0
"""Mount points: options of a mount (``-o``, buildidfs.toml(5)), its state, and its end."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pwd
import shutil
import stat
import subprocess
from typing import TYPE_CHECKING, Literal

import msgspec

from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.errors import MountError, UsageError
from buildidfs.formats import proc_text
from buildidfs.linux import mounts, namespaces, procfs
from buildidfs.linux.file_ops import closing_fd

if TYPE_CHECKING:
    from collections.abc import Iterable


log = logging.getLogger(__name__)

_ANSWER_S = 5.0
_FUSE = "/dev/fuse"
_CONFIGURATION = "/etc/fuse.conf"
_HELPER = "fusermount3"
_NO_HELPER = f"{_HELPER} is not installed (package fuse3), and only root can do without it"


def mounted_at(point: bytes) -> proc_text.MountInfo | None:
    """Return the topmost mount exactly at a path, None if there is none."""
    top = None
    for mount in proc_text.mounts_in(mounts.mountinfo()):
        if mount.mount_point == point:
            top = mount  # later ones lie on top of earlier ones
    return top


def is_ours(point: bytes) -> bool:
    """Return True if a mount of ours is visible at ``point``, even if its server does
    not answer.
    """
    mount = mounted_at(point)
    return mount is not None and mount.fstype == mounts.FILESYSTEM_TYPE


def prepare(point: bytes, *, allow_other: bool) -> None:
    """Check that ``point`` can be mounted on; raises `MountError` with the reason.

    Remains of killed mounts of buildidfs at ``point`` are unmounted.
    """
    shown = os.fsdecode(point)
    point = resolved(point)
    clear(point)
    _check_free(point, shown)
    _check_directory(point, shown)
    _check_fuse(allow_other=allow_other)


def unmount(point: bytes) -> bool:
    """Unmount a mount of buildidfs; open files stay readable until they are closed.

    Return True if its filesystem stays in use: a file is open, or another mount namespace has a
    copy of the mount. Raises `MountError` if there is no such mount, or it may not be unmounted.
    """
    shown = os.fsdecode(point)
    point = resolved(point)
    top = mounted_at(point)
    if top is None or top.fstype != mounts.FILESYSTEM_TYPE:
        raise MountError(f"{shown} is not a mount of buildidfs")
    owner = int(proc_text.option(top.super_options, b"user_id") or 0)
    if os.geteuid() not in (0, owner):
        raise MountError(f"{shown} is a mount of {_user(owner)}: only {_may(owner)} can unmount it")
    if take_away(point):
        log.info("%s is in use: it goes when the last open file is closed", shown)
        return True
    if _has_copy(top.dev):
        log.info("%s goes on in other mount namespaces, until they end", shown)
        return True
    return False


def _has_copy(device: tuple[int, int]) -> bool:
    """Return True if a process that we may inspect still has the filesystem mounted."""
    namespaces_seen = set()
    for pid in procfs.pids():
        with contextlib.suppress(OSError), closing_fd(procfs.open_pid(pid)) as pid_fd:
            namespace = namespaces.mnt(pid_fd)
            if namespace not in namespaces_seen:
                namespaces_seen.add(namespace)
                if device in mounts.own_mount_devices(procfs.mountinfo(pid_fd)):
                    return True
    return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def _may(owner: int) -> str:
    return f"{_user(owner)} and root" if owner else "root"


def take_away(point: bytes) -> bool:
    """Unmount ``point``; return True if it was in use, and therefore only detached.

    Raises `MountError`.
    """
    if os.geteuid() != 0:
        return _take_away_as_user(point)
    try:
        try:
            mounts.umount2(point, mounts.UMOUNT_NOFOLLOW)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            mounts.umount2(point, mounts.UMOUNT_NOFOLLOW | mounts.MNT_DETACH)
            return True
    except OSError as error:
        raise MountError(f"cannot unmount {os.fsdecode(point)}: {error.strerror}") from error
    return False


def _take_away_as_user(point: bytes) -> bool:
    for extra in ((), ("-z",)):
        try:
            done = subprocess.run(
                [_HELPER, "-u", *extra, "--", point],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise MountError(f"cannot unmount {os.fsdecode(point)}: {_NO_HELPER}") from None
        if done.returncode == 0:
            return bool(extra)
    reason = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
    raise MountError(f"cannot unmount {os.fsdecode(point)}: {reason}")


def clear(point: bytes) -> bool:
    """Unmount the remains of killed mounts of buildidfs at ``point``; return False if there are
    none.

    Several may lie on top of each other. Raises `MountError`, also if the mount has a live server
    that does not answer.
    """
    found = False
    while is_ours(point) and not _answers(point):
        log.info("%s: taking away what a killed mount has left", os.fsdecode(point))
        take_away(point)
        found = True
    return found


def _check_free(point: bytes, shown: str) -> None:
    top = mounted_at(point)
    if top is None:
        return
    if is_ours(point):
        raise MountError(
            f"{shown} is busy: a store is mounted there already; buildidfs unmount {shown} takes it"
            " away, or mount at another directory"
        )
    if not _answers(point):
        kind = top.fstype.decode(errors="replace")
        raise MountError(
            f"{shown} is busy: the {kind} mounted there does not answer; mount at another directory"
        )


def _answers(point: bytes) -> bool:
    """Return True if the mount at ``point`` has a server. Raises `MountError` if the server does
    not answer.
    """
    # Not stat(2): the kernel's cache may answer it long after the server was killed.
    try:
        Patience(_ANSWER_S).ask((0, 0), lambda: os.statvfs(point), lambda answer: None)
    except TimeoutError:
        raise _silent(point) from None
    except OSError as error:
        return error.errno not in mounts.SERVER_GONE
    return True


def resolved(point: bytes) -> bytes:
    """Resolve the links in a path. This sends requests to all filesystems on it. Raises
    `MountError`.
    """
    try:
        return Patience(_ANSWER_S).ask((0, 0), lambda: os.path.realpath(point), lambda answer: None)
    except TimeoutError:
        path = os.path.abspath(point)
        if mounted_at(path) is None:
            raise _silent(point) from None
        return path


def _silent(point: bytes) -> MountError:
    shown = os.fsdecode(point)
    if is_ours(point):
        return MountError(
            f"{shown} is busy: the store mounted there does not answer, its server may be stopped:"
            f" buildidfs unmount {shown} takes it away"
        )
    return MountError(f"{shown} cannot be used: its filesystem does not answer")


def _check_directory(point: bytes, shown: str) -> None:
    try:
        if not stat.S_ISDIR(os.stat(point).st_mode):
            raise MountError(f"{shown} is not a directory")
        with os.scandir(point) as entries:
            if next(entries, None) is not None:
                raise MountError(f"{shown} is not empty: what is in it would be hidden")
    except (FileNotFoundError, NotADirectoryError):
        raise MountError(f"{shown} does not exist: make it with mkdir -p {shown}") from None
    except OSError as error:
        raise MountError(f"{shown} cannot be used: {error.strerror}") from error


def _check_fuse(*, allow_other: bool) -> None:
    if not os.path.exists(_FUSE):
        raise MountError(f"{_FUSE} does not exist: {mounts.how_to_get_fuse()}")
    if not os.access(_FUSE, os.R_OK | os.W_OK):
        raise MountError(f"{_FUSE} may not be opened by this user: root can chmod 666 it")
    if os.geteuid() == 0:
        return
    if shutil.which(_HELPER) is None:
        raise MountError(_NO_HELPER)
    if allow_other and not _others_allowed():
        raise MountError(
            f"allow_other needs the line user_allow_other in {_CONFIGURATION}, which root can add"
        )


def _others_allowed() -> bool:
    try:
        with open(_CONFIGURATION, encoding="utf-8", errors="replace") as file:
            return any(line.strip() == "user_allow_other" for line in file)
    except OSError:
        return False


READ_AHEAD_KIB = 1024
"""The largest request of FUSE in KiB: a client that reads whole files gains most from it."""

_ALWAYS = ("ro", "nosuid", "nodev", "noexec")
_PERMISSIONS = "default_permissions"


class MountOptions(msgspec.Struct, frozen=True):
    """Options of one mount. Paths are absolute; buildidfs-mount(7) explains ``gdb_scripts``.

    ``allow_other`` admits other users (each only to files that the mode of the original allows),
    and ``list_all`` also lists for them files that they may not read; ``loop`` chooses between
    `loop.FastLoop` and `loop.PlainLoop`; ``read_ahead_kib`` needs root. With ``bundle``, ``store``
    is the path of a bundle. ``settings`` are the `config.marks` of the configuration.
    """

    store: bytes
    mountpoint: bytes
    allow_other: bool
    list_all: bool = False
    loop: Literal["fast", "plain"] = "fast"
    gdb_scripts: Literal["zero", "keep"] = "zero"
    read_ahead_kib: int = READ_AHEAD_KIB
    bundle: bool = False
    settings: dict[str, str] = {}

    def for_fuse(self) -> set[str]:
        """Return the options in the form of libfuse."""
        options = {"fsname=buildidfs", "subtype=buildidfs", *_ALWAYS}
        # If only one user may access the mount and the store, the user could read the blobs as
        # well.
        return options | {"allow_other", _PERMISSIONS} if self.allow_other else options


def parse(
    store: str | bytes | os.PathLike[str],
    mountpoint: str | bytes | os.PathLike[str],
    options: Iterable[str] = (),
    gdb_scripts: str = "zero",
    *,
    list_all: bool = False,
    bundle: bool = False,
) -> MountOptions:
    """Parse options of a command line; raises `UsageError` naming the wrong one.

    ``options`` are single ones, without commas; if two contradict each other, the later one counts.
    If root mounts, other users are admitted by default.
    """
    values: dict[str, object] = {
        "store": _absolute(store),
        "mountpoint": _absolute(mountpoint),
        "allow_other": os.geteuid() == 0,
        "gdb_scripts": gdb_scripts,
        "list_all": list_all,
        "bundle": bundle,
    }
    for option in options:
        name, equals, value = option.partition("=")
        if option in (*_ALWAYS, _PERMISSIONS):
            continue
        if option == "list_all":
            values["list_all"] = True
        elif option in ("allow_other", "noallow_other"):
            values["allow_other"] = option == "allow_other"
        elif equals and name in ("loop", "gdb_scripts"):
            values[name] = value
        elif equals and name == "read_ahead_kb" and value.isdecimal() and len(value) < 10:
            values["read_ahead_kib"] = int(value)
        else:
            raise UsageError(f"no such mount option: {option} (see buildidfs-mount(7))")
    try:
        return msgspec.convert(values, MountOptions)
    except (msgspec.ValidationError, UnicodeError) as error:  # also for bytes that are not text
        raise UsageError(f"mount options: {error}") from error


def _absolute(path: str | bytes | os.PathLike[str]) -> bytes:
    return os.path.abspath(os.fsencode(path))
