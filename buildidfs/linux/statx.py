# SPDX-License-Identifier: Apache-2.0
"""statx(2): the identity of a file in one system call.

os.stat cannot be used because it has no mount ID, and (st_dev, st_ino) alone is not safe: device
numbers of tmpfs, overlayfs and loop devices are reused as soon as they are free. The unique mount
ID (STATX_MNT_ID_UNIQUE, commit 98d2b43081972, Linux 6.8) is never reused until the next boot.

This runs once per mapping of every process, so the buffer is allocated once per thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
import threading

from buildidfs.linux import syscalls
from buildidfs.model import FileIdentity

_STATX_BASIC_STATS = 0x7FF
_STATX_MNT_ID_UNIQUE = 0x4000
_WANTED = _STATX_BASIC_STATS | _STATX_MNT_ID_UNIQUE

# struct statx of linux/stat.h up to stx_mnt_id; btime, atime and rdev are skipped.
_LAYOUT = struct.Struct(
    "=I 4x 8x 4x I I H 2x Q Q 8x 8x"  # mask; uid, gid, mode, ino, size
    "16x 16x q I 4x q I 4x"  # atime and btime are skipped; ctime, mtime
    "8x I I Q"  # rdev is skipped; dev_major, dev_minor, mnt_id
)
_BUFFER_SIZE = 256
_ATTRIBUTES = struct.Struct("=Q")
_ATTRIBUTES_AT = 8
_STATX_ATTR_MOUNT_ROOT = 0x2000

_ANONYMOUS_MAJOR = 0
_LOOP_MAJOR = 7
_RECYCLED_MAJORS = frozenset((_ANONYMOUS_MAJOR, _LOOP_MAJOR))

_statx = syscalls.libc.statx
_statx.argtypes = (
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
)
_statx.restype = ctypes.c_int


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_BUFFER_SIZE)
        self.address = ctypes.addressof(self.buffer)


_scratch = _Scratch()

# Any user may give a file on tmpfs or FUSE a time 292 years or more from 1970. In nanoseconds it
# takes more than 64 bits, for which there is no room.
_LAST_NS = (1 << 63) - 1


@functools.cache
def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of this kernel, empty if /proc does not have them.

    Source: /proc/sys/kernel/random/boot_id, random(4).
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            return bytes.fromhex(file.read().decode("ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


def identity(fd: int, *, ask: bool = True) -> FileIdentity:
    """Return the identity of an open file (O_PATH suffices); for ``ask`` see `identity_at`.

    Raises OSError.
    """
    return _identity(fd, b"", syscalls.AT_EMPTY_PATH | (0 if ask else syscalls.AT_STATX_DONT_SYNC))


def identity_on_mount(fd: int, *, ask: bool = True) -> tuple[FileIdentity, int | None]:
    """Return `identity` and `unique_mount_id` of an open file in one call. Raises OSError."""
    found = identity(fd, ask=ask)
    unpacked = _LAYOUT.unpack_from(_scratch.buffer)  # the kernel has just filled it in
    return found, int(unpacked[-1]) if unpacked[0] & _STATX_MNT_ID_UNIQUE else None


def identity_at(dir_fd: int, path: bytes, *, follow: bool = True, ask: bool = True) -> FileIdentity:
    """Return the identity of the file at ``path`` below ``dir_fd``, which is not opened.

    With ``follow``, a symbolic link at the end is followed, even a magic one of /proc. Without
    ``ask``, the kernel returns cached values, and waits for no server (FUSE, network). Raises
    OSError.
    """
    flags = syscalls.AT_NO_AUTOMOUNT | (0 if follow else syscalls.AT_SYMLINK_NOFOLLOW)
    flags |= 0 if ask else syscalls.AT_STATX_DONT_SYNC
    return _identity(dir_fd, syscalls.check_path(path), flags)


def unique_mount_id(fd: int) -> int | None:
    """Return the number of the mount that ``fd`` was opened on (O_PATH suffices).

    The number is not reused until the next boot. Returns None before Linux 6.8. No server is asked.
    Raises OSError.
    """
    scratch = _scratch
    flags = syscalls.AT_EMPTY_PATH | syscalls.AT_STATX_DONT_SYNC
    if _statx(fd, b"", flags, _STATX_MNT_ID_UNIQUE, scratch.address):
        raise syscalls.last_error()
    unpacked = _LAYOUT.unpack_from(scratch.buffer)
    return int(unpacked[-1]) if unpacked[0] & _STATX_MNT_ID_UNIQUE else None


def rooted_mount_id(fd: int) -> int | None:
    """Return the `unique_mount_id` of a mount if ``fd`` is its root directory; else None.

    Raises OSError.
    """
    mount = unique_mount_id(fd)
    attributes: int = _ATTRIBUTES.unpack_from(_scratch.buffer, _ATTRIBUTES_AT)[0]
    return mount if attributes & _STATX_ATTR_MOUNT_ROOT else None


def _identity(fd: int, path: bytes, flags: int) -> FileIdentity:
    scratch = _scratch
    if _statx(fd, path, flags, _WANTED, scratch.address):
        raise syscalls.last_error(path or None)
    (mask, uid, gid, mode, ino, size, ctime, ctime_ns, mtime, mtime_ns, major, minor, mount) = (
        _LAYOUT.unpack_from(scratch.buffer)
    )
    return FileIdentity(
        os.makedev(major, minor),
        ino,
        size,
        _nanoseconds(mtime, mtime_ns),
        _nanoseconds(ctime, ctime_ns),
        mode,
        uid,
        gid,
        _scope(major, ctime_ns, mask, mount),
    )


def _nanoseconds(seconds: int, rest: int) -> int:
    return max(-_LAST_NS, min(seconds * 1_000_000_000 + rest, _LAST_NS))


def _scope(major: int, ctime_ns: int, mask: int, mount: int) -> bytes | None:
    """Return the scope that makes the device number unambiguous; see `FileIdentity`.

    A change time of whole seconds means that the filesystem was made as an image with fixed times
    (squashfs, erofs, a reproducible root partition): its next version may have the same device,
    inode, size and times, and other bytes.
    """
    if major not in _RECYCLED_MAJORS and ctime_ns:
        return b""
    if not mask & _STATX_MNT_ID_UNIQUE:
        return None
    boot = boot_id()
    return boot + mount.to_bytes(8, "little") if boot else None
