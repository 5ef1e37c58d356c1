# SPDX-License-Identifier: Apache-2.0
"""What it takes to mount a store, and whether the mounts that are there answer."""

from __future__ import annotations

import errno
import functools
import os
import shutil
import stat

from buildidfs.app.doctor.values import Answer, Probe, degraded, failed, ok
from buildidfs.formats import mountinfo
from buildidfs.linux import credentials, mounts
from buildidfs.store.errors import show

AREA = "fuse"

_DEVICE = "/dev/fuse"
_HELPER = "fusermount3"
_CONFIGURATION = "/etc/fuse.conf"
_DEAD = (errno.ENOTCONN, errno.ECONNABORTED)


def probes() -> list[Probe]:
    """The checks of FUSE, one for each mount of ours among them."""
    found = [
        Probe(AREA, "device", _device),
        Probe(AREA, "library", _library),
        Probe(AREA, "helper", _helper),
        Probe(AREA, "other users", _other_users),
    ]
    points = _own_mounts()
    if not points:
        return [*found, Probe(AREA, "mounts", lambda: ok("no store is mounted"))]
    for point in points:
        # Each may be silent by itself.
        name = f"mount {show(point)}"
        found.append(Probe(AREA, name, functools.partial(_mounted, point), name))
    return found


def _own_mounts() -> list[bytes]:
    try:
        text = mounts.mountinfo()
    except OSError:
        return []
    ours = (each for each in mountinfo.parse(text) if each.fstype == mounts.FILESYSTEM_TYPE)
    return list(dict.fromkeys(each.mount_point for each in ours))


def _device() -> Answer:
    try:
        os.close(os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except (FileNotFoundError, NotADirectoryError):
        return failed(f"{_DEVICE} does not exist", mounts.how_to_get_fuse())
    except PermissionError as error:
        if os.geteuid() == 0:  # a control group of a container forbids it
            return failed(f"{_DEVICE}: {error.strerror}", mounts.how_to_get_fuse())
        return failed(
            f"{_DEVICE} may not be opened by this user",
            f"as root: chmod 666 {_DEVICE}; give a container --device {_DEVICE}",
        )
    except OSError as error:
        return failed(f"{_DEVICE}: {error.strerror}", mounts.how_to_get_fuse())
    return ok(f"{_DEVICE} can be opened")


def _library() -> Answer:
    try:
        from buildidfs.mount import session  # noqa: F401 - whether it can be loaded
    except ImportError as error:
        return failed(
            f"pyfuse3 cannot be loaded: {error}", "install libfuse3, and pyfuse3 for this Python"
        )
    return ok("libfuse3 and pyfuse3 can be loaded")


def _helper() -> Answer:
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


def _other_users() -> Answer:
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


def _mounted(point: bytes) -> Answer:
    # Not stat(2): its answer may come from the kernel's cache long after the server was killed.
    try:
        os.statvfs(point)
    except PermissionError:
        return ok("it is another user's")
    except FileNotFoundError:
        return ok("it is gone meanwhile, or hidden under another mount")
    except OSError as error:
        if error.errno not in _DEAD:
            raise
        return degraded(
            "nobody serves it any more: every name in it is an error",
            f"buildidfs unmount {show(point)}, or mount it again",
        )
    return ok("answers")
