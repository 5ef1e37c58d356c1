# SPDX-License-Identifier: Apache-2.0
"""Mounts: finding our own, tuning them, taking them away. Source: proc(5), umount(2)."""

from __future__ import annotations

import ctypes
import os

from buildidfs.linux import machine, syscalls

FILESYSTEM_TYPE = b"fuse.buildidfs"

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

_umount2 = syscalls.libc.umount2
_umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_umount2.restype = ctypes.c_int


def mountinfo() -> bytes:
    """The mounts that this process sees, as text. `procfs.mountinfo` gives another's.

    Raises OSError.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        return file.read()


def initial_mountinfo() -> bytes:
    """The mounts that the first process sees, as text; where it may not be asked, our own.

    Raises OSError.
    """
    try:
        with open("/proc/1/mountinfo", "rb") as file:
            return file.read()
    except OSError:
        return mountinfo()


def how_to_get_fuse() -> str:
    """The way to /dev/fuse where it is missing, in words: by the host's kernel or its own /dev."""
    try:
        with open("/proc/filesystems", "rb") as file:
            is_loaded = b"nodev\tfuse" in file.read().splitlines()
    except OSError:
        is_loaded = False
    if machine.is_contained():
        load = "" if is_loaded else "modprobe fuse on the host, then "
        return f"{load}give the container --device /dev/fuse --cap-add SYS_ADMIN"
    return "mknod -m 666 /dev/fuse c 10 229" if is_loaded else "load the module with modprobe fuse"


def mount_id(fd: int) -> int:
    """The number in mountinfo of the mount that ``fd`` was opened on (O_PATH will do), -1 if the
    kernel does not tell. It means no other mount as long as the file is open. Raises OSError.
    """
    with open(f"/proc/self/fdinfo/{fd}", "rb") as lines:
        return next((int(line[7:]) for line in lines if line.startswith(b"mnt_id:")), -1)


def own_mount_devices(text: bytes) -> set[tuple[int, int]]:
    """The (major, minor) of every mount of ours in a mountinfo text.

    Capture leaves files on them alone: what is there is already held. Lines that do not look
    like mountinfo are passed over.
    """
    devices = set()
    for line in text.splitlines():
        # Blanks within fields are written as \040, so " - " is the separator.
        head, separator, tail = line.partition(b" - ")
        if not separator or tail.partition(b" ")[0] != FILESYSTEM_TYPE:
            continue
        fields = head.split(b" ")
        major, colon, minor = fields[2].partition(b":") if len(fields) > 2 else (b"", b"", b"")
        if colon and major.isdigit() and minor.isdigit():
            devices.add((int(major), int(minor)))
    return devices


def umount2(path: bytes, flags: int = 0) -> None:
    """Take away the mount at ``path``; MNT_DETACH does it even while it is in use.

    Raises OSError: EBUSY, EINVAL if nothing is mounted there, EPERM without CAP_SYS_ADMIN.
    """
    if _umount2(syscalls.check_path(path), flags):
        raise syscalls.last_error(path)


def set_read_ahead(st_dev: int, kib: int) -> None:
    """Let the kernel read ahead up to ``kib`` KiB on the filesystem with that device number.

    Raises OSError: EACCES without root, ENOENT if the filesystem has no read-ahead of its own.
    Source: Documentation/ABI/testing/sysfs-class-bdi.
    """
    path = f"/sys/class/bdi/{os.major(st_dev)}:{os.minor(st_dev)}/read_ahead_kb"
    with open(path, "wb", buffering=0) as file:
        file.write(b"%d\n" % kib)
