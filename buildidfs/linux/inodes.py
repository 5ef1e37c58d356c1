# SPDX-License-Identifier: Apache-2.0
"""Identify a file in one statx(2), and open a path inside the root of another process without ever
leaving it.

os.stat cannot be used because it has no mount ID, and (st_dev, st_ino) alone is not safe: device
numbers of tmpfs, overlayfs and loop devices are reused as soon as they are free. The unique mount
ID (STATX_MNT_ID_UNIQUE, commit 98d2b43081972, Linux 6.8) is never reused until the next boot.
statx(2) runs once per mapping of every process, so the buffer is allocated once per thread.

Paths below /proc/PID/root come from containers that may be hostile: a symbolic link or ``..`` there
must lead to a place in that root, never to the host's file of the same name. openat2(2) (Linux 5.6)
resolves paths that way in the kernel. If it is missing, or a seccomp filter forbids it, this module
walks the path itself, one component at a time over O_PATH descriptors.

`reopen_regular` is the gate to the bytes of files that a container or another user may have placed:
a path is pinned first, and only a stored, regular file is ever opened for reading.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import struct
import threading

from buildidfs.linux import mounts, syscalls
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import FileIdentity, bounded_ns

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


def major_minor(st_dev: int) -> tuple[int, int]:
    """Return the numbers by which mountinfo and /proc/PID/maps name the device ``st_dev``."""
    return os.major(st_dev), os.minor(st_dev)


def identity(fd: int, *, ask: bool = True) -> FileIdentity:
    """Return the identity of an open file (O_PATH suffices).

    Without ``ask``, the kernel returns cached values, and waits for no server (FUSE, network).
    Raises OSError.
    """
    return _identity(fd, b"", syscalls.AT_EMPTY_PATH | (0 if ask else syscalls.AT_STATX_DONT_SYNC))


def identity_on_mount(fd: int, *, ask: bool = True) -> tuple[FileIdentity, int | None]:
    """Return `identity` and `unique_mount_id` of an open file in one call. Raises OSError."""
    found = identity(fd, ask=ask)
    unpacked = _LAYOUT.unpack_from(_scratch.buffer)  # the kernel has just filled it in
    return found, int(unpacked[-1]) if unpacked[0] & _STATX_MNT_ID_UNIQUE else None


def identity_at(dir_fd: int, path: bytes, *, follow: bool = True) -> FileIdentity:
    """Return the identity of the file at ``path`` below ``dir_fd``, which is not opened.

    With ``follow``, a symbolic link at the end is followed, even a magic one of /proc. The kernel
    returns cached values, and waits for no server (FUSE, network). Raises OSError.
    """
    flags = syscalls.AT_NO_AUTOMOUNT | syscalls.AT_STATX_DONT_SYNC
    flags |= 0 if follow else syscalls.AT_SYMLINK_NOFOLLOW
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
        bounded_ns(mtime * 1_000_000_000 + mtime_ns),
        bounded_ns(ctime * 1_000_000_000 + ctime_ns),
        mode,
        uid,
        gid,
        _scope(major, ctime_ns, mask, mount),
    )


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


_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_CACHED = 0x20  # commit 99668f618062, Linux 5.12

# struct open_how: flags, mode, resolve
_OPEN_HOW = struct.Struct("=QQQ")

# EAGAIN: a rename somewhere interfered with a "..", and the kernel asks to try again. A process
# that keeps renaming does not win: in the end this module walks the path itself, which never waits.
_INTERRUPTED = frozenset((errno.EAGAIN, errno.EINTR))
_ATTEMPTS = 8
_MAX_SYMLINKS = 40
_PATH_MAX = 4096


def open_in_root(root_fd: int, path: bytes, flags: int) -> int:
    """Open ``path`` like a process with the root ``root_fd``; O_CLOEXEC is added.

    ``path`` is relative to that root even without a leading slash. ``flags`` may contain O_PATH,
    O_RDONLY, O_DIRECTORY, O_NOFOLLOW, O_NONBLOCK and O_NOCTTY; nothing is ever created. Without
    O_PATH, a file of any type is opened, with all effects of opening a FIFO or a device: use
    `open_regular_in_root` for content.

    Raises OSError; ELOOP for a magic link of /proc (without openat2 such a link is followed as the
    text it shows, within the root).
    """
    if have_openat2():
        return _openat2(root_fd, path, flags | os.O_CLOEXEC)
    return walk_in_root(root_fd, path, flags)


def open_cached_in_root(root_fd: int, path: bytes, flags: int = 0) -> int:
    """Pin the file at ``path`` in the root ``root_fd`` (O_PATH) without asking any filesystem.

    ``flags`` may contain O_NOFOLLOW. The call never waits for a server on the path, because the
    kernel has the path to each mount point in memory. Raises OSError: EAGAIN if the kernel would
    have to ask, EINVAL or ENOSYS before Linux 5.12, which has no way to forbid it to ask.
    """
    return _open_cached(root_fd, path, flags | os.O_PATH | os.O_CLOEXEC)


def _open_cached(dir_fd: int, path: bytes, flags: int, *, in_root: bool = True) -> int:
    for _ in range(_ATTEMPTS - 1):
        # The kernel reports a rename in the same way as a need to ask.
        with contextlib.suppress(BlockingIOError):
            return _openat2_once(dir_fd, path, flags, _RESOLVE_CACHED, in_root=in_root)
    return _openat2_once(dir_fd, path, flags, _RESOLVE_CACHED, in_root=in_root)


def pin_entry(dir_fd: int, name: bytes, *, ask: bool = True) -> int:
    """Pin the entry ``name`` of a directory (O_PATH): a symbolic link itself, the root of a mount.

    Without ``ask`` no filesystem is asked. Raises OSError: EINVAL if the name has several
    components; for other errors see `open_cached_in_root`.
    """
    if not name or b"/" in name or name in (b".", b".."):
        raise OSError(errno.EINVAL, "not the name of an entry", name)
    flags = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, dir_fd=dir_fd) if ask else _open_cached(dir_fd, name, flags)


def pin_parent(dir_fd: int, *, ask: bool = True) -> int:
    """Pin the parent of the directory ``dir_fd`` (O_PATH), even if it is above the root of its
    users.

    At the root of a mount namespace, and at our own root, the parent is the directory itself.
    Without ``ask`` no filesystem is asked. Raises OSError, see `open_cached_in_root`.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    if ask:
        return os.open(b"..", flags, dir_fd=dir_fd)
    return _open_cached(dir_fd, b"..", flags, in_root=False)


def open_regular_in_root(root_fd: int, path: bytes) -> int:
    """Open the regular file at ``path`` in the root ``root_fd`` for reading.

    Raises OSError, see `reopen_regular`.
    """
    with closing_fd(open_in_root(root_fd, path, os.O_PATH)) as path_fd:
        return reopen_regular(path_fd)


def open_regular(path: str | bytes | os.PathLike[str], *, pipe: bool = False) -> int:
    """Open the regular file at a path of our own for reading; links are followed.

    With ``pipe``, the path may also be a pipe without a name, which the shell makes for
    <(command). A FIFO may have no writer for ever. Raises OSError, see `reopen_regular`.
    """
    with closing_fd(os.open(path, os.O_PATH | os.O_CLOEXEC)) as path_fd:
        if pipe and mounts.filesystem_magic(path_fd) == mounts.PIPE_MAGIC:
            return os.open(b"/proc/self/fd/%d" % path_fd, os.O_RDONLY | os.O_CLOEXEC)
        return reopen_regular(path_fd)


def reopen_regular(path_fd: int, status: os.stat_result | None = None) -> int:
    """Open the regular file behind an O_PATH descriptor for reading; both descriptors stay open.
    ``status`` is that of the file, if the caller has it.

    Raises OSError, EINVAL if it is not a regular file, or a file of an interface of the kernel
    (`mounts.stores_files`). Such a file is not opened, because opening may have any effect.
    """
    status = status or os.fstat(path_fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if not mounts.stores_files(path_fd, status):
        raise OSError(errno.EINVAL, "not a stored file, but an interface of the kernel")
    return os.open(
        b"/proc/self/fd/%d" % path_fd, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    )


@functools.cache
def have_openat2() -> bool:
    """Return True if the kernel has openat2 and no filter forbids it."""
    try:
        os.close(_openat2(syscalls.AT_FDCWD, b"/", os.O_PATH | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def _openat2(root_fd: int, path: bytes, flags: int) -> int:
    for _ in range(_ATTEMPTS):
        try:
            return _openat2_once(root_fd, path, flags)
        except OSError as error:
            if error.errno not in _INTERRUPTED:
                raise
    return walk_in_root(root_fd, path, flags)


def _openat2_once(
    root_fd: int, path: bytes, flags: int, resolve: int = 0, *, in_root: bool = True
) -> int:
    resolve |= _RESOLVE_NO_MAGICLINKS | (_RESOLVE_IN_ROOT if in_root else 0)
    how = _OPEN_HOW.pack(flags, 0, resolve)
    return syscalls.syscall(
        syscalls.SYS_OPENAT2, root_fd, syscalls.check_path(path), how, len(how), filename=path
    )


def walk_in_root(root_fd: int, path: bytes, flags: int) -> int:
    """Do as `open_in_root`, without openat2. Raises OSError."""
    walk = _Walk(root_fd, syscalls.check_path(path))
    try:
        return walk.run(flags)
    finally:
        walk.close()


class _Walk:
    """One resolution: the directories entered so far, from the root down, and the remaining
    components.

    ``..`` goes back to the descriptor of the directory that was entered, not to its present parent
    in the kernel, so a directory that is moved out of the root meanwhile does not lead out.
    """

    def __init__(self, root_fd: int, path: bytes) -> None:
        self._path = path
        self._root_fd = root_fd
        self._entered: list[int] = []
        self._pending = path.split(b"/")[::-1]
        self._symlinks = 0

    def close(self) -> None:
        for fd in self._entered:
            os.close(fd)
        self._entered.clear()

    def run(self, flags: int) -> int:
        if not self._path:
            raise self._error(errno.ENOENT)
        if len(self._path) >= _PATH_MAX:
            raise self._error(errno.ENAMETOOLONG)
        while self._pending:
            name = self._pending.pop()
            if name in (b"", b".", b".."):
                self._require_directory()
                if name == b".." and self._entered:
                    os.close(self._entered.pop())
                continue
            self._enter(name, last_nofollow=bool(flags & os.O_NOFOLLOW) and not self._pending)
        return self._finish(flags)

    def _top(self) -> int:
        return self._entered[-1] if self._entered else self._root_fd

    def _enter(self, name: bytes, *, last_nofollow: bool) -> None:
        """Open one component; a symbolic link is replaced by the components of its target."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._top())
        if last_nofollow or not stat.S_ISLNK(os.fstat(fd).st_mode):
            self._entered.append(fd)
            return
        with closing_fd(fd):
            target = os.readlink(b"", dir_fd=fd)
        self._symlinks += 1
        if self._symlinks > _MAX_SYMLINKS:
            raise self._error(errno.ELOOP)
        if not target:
            raise self._error(errno.ENOENT)
        if target.startswith(b"/"):
            self.close()
        self._pending.extend(target.split(b"/")[::-1])

    def _require_directory(self) -> None:
        if not stat.S_ISDIR(os.fstat(self._top()).st_mode):
            raise self._error(errno.ENOTDIR)

    def _finish(self, flags: int) -> int:
        mode = os.fstat(self._top()).st_mode
        if flags & os.O_DIRECTORY:
            self._require_directory()
        if flags & os.O_PATH:
            return os.dup(self._top())
        if stat.S_ISLNK(mode):
            raise self._error(errno.ELOOP)
        flags &= ~os.O_NOFOLLOW
        return os.open(b"/proc/self/fd/%d" % self._top(), flags | os.O_CLOEXEC)

    def _error(self, number: int) -> OSError:
        return OSError(number, os.strerror(number), self._path)
