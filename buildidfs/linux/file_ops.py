# SPDX-License-Identifier: Apache-2.0
"""Open files: owners of descriptors, cheap copies, leases, fs-verity, access lists.

A copy is never a hard link of the original: the link would be the same file, and a write to it
would change the captured bytes. `link_fd` gives a name to a file without a name.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable
from struct import Struct
from typing import Final, Self

Buffer = bytes | bytearray | memoryview

_FICLONE = 0x40049409  # _IOW(0x94, 9, int)
_SYNC_FILE_RANGE_WRITE = 2
_CHUNK = 1 << 26

_CANNOT_REFLINK = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.ETXTBSY)
)

_NO_TMPFILE: Final = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT))

FS_IOC_ENABLE_VERITY: Final = 0x40806685  # _IOW('f', 133, struct fsverity_enable_arg)

_HASH_SHA256: Final = 1
_BLOCK_BYTES: Final = 4096

# version, algorithm, block size, salt size, salt, signature size, reserved, signature, reserved
_ENABLE: Final = Struct("=IIIIQIIQ88x")

_NOT_OFFERED: Final = frozenset((errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL))

_ACCESS: Final = b"system.posix_acl_access"
_NO_ACCESS_LIST: Final = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


class Fd:
    """Owns the descriptor ``fd`` until `close` or `release`; a context manager.

    ``fd`` is -1 when nothing is open. Classes that own one descriptor derive from this class.
    """

    __slots__ = ("fd",)

    def __init__(self, fd: int = -1) -> None:
        self.fd = fd

    def fileno(self) -> int:
        """Return the descriptor."""
        return self.fd

    def release(self) -> int:
        """Return the descriptor, which the caller then owns."""
        fd, self.fd = self.fd, -1
        return fd

    def replace(self, fd: int) -> None:
        """Close the descriptor, and own ``fd`` in its place."""
        close_fds(self.release())
        self.fd = fd

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        close_fds(self.release())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def close_fds(*fds: int) -> None:
    """Close all descriptors that are not negative."""
    for fd in fds:
        if fd >= 0:
            os.close(fd)


class on_error:
    """Calls ``undo`` if the ``with`` block raises, also after ^C."""

    __slots__ = ("_undo",)

    def __init__(self, undo: Callable[[], object]) -> None:
        self._undo = undo

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self._undo()


class closing_fd:
    """Closes a descriptor at the end of a ``with`` block; ``as`` binds the descriptor.

    Code that runs for each mapping of the host does not use this class, because it takes a third of
    a microsecond.
    """

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        os.close(self._fd)


class closing_on_error(closing_fd):
    """Closes the descriptor only if the block raises."""

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            os.close(self._fd)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    import ctypes  # loaded on first use, so that processes that only read a store start quickly

    from buildidfs.linux import syscalls

    function = syscalls.libc.sync_file_range
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


def sync_directory(path: bytes) -> None:
    """Make the names in a directory durable. Raises OSError."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def reflink(src_fd: int, dst_fd: int) -> bool:
    """Make the empty file ``dst_fd`` share all extents of ``src_fd``; return False if impossible.

    The copy is a snapshot: later writes to one file do not show in the other. Raises OSError,
    ENOSPC and EDQUOT among others. Source: ioctl_ficlone(2).
    """
    try:
        fcntl.ioctl(dst_fd, _FICLONE, src_fd)
    except OSError as error:
        if error.errno in _CANNOT_REFLINK:
            return False
        raise
    return True


def copy(src_fd: int, dst_fd: int) -> None:
    """Copy all bytes of ``src_fd`` to the empty file ``dst_fd``, as a reflink if possible.

    Raises OSError.
    """
    if reflink(src_fd, dst_fd):
        return
    offset = 0
    while count := os.sendfile(dst_fd, src_fd, offset, _CHUNK):
        offset += count


def open_unnamed(directory: bytes, mode: int = 0o600) -> int | None:
    """Open a new file without a name in ``directory`` for reading and writing.

    Returns None if the filesystem or the kernel has no such files. Raises OSError. Source: open(2),
    O_TMPFILE.
    """
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
        return None


def unnamed_file(directory: bytes) -> int:
    """Do as `open_unnamed`; where that is not possible, the new file loses its name at once.

    Raises OSError.
    """
    fd = open_unnamed(directory)
    if fd is not None:
        return fd
    import tempfile  # imports much that is rarely needed

    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def link_fd(fd: int, dir_fd: int, name: bytes) -> None:
    """Give the open file (for example an O_TMPFILE) a name in the directory ``dir_fd``.

    Raises OSError: FileExistsError if the name is taken. Source: open(2), O_TMPFILE.
    """
    # AT_EMPTY_PATH needs CAP_DAC_READ_SEARCH; the link in /proc does not. os.link calls
    # linkat(AT_SYMLINK_FOLLOW) only with dst_dir_fd; otherwise Python 3.11 calls link(2), which
    # fails.
    os.link(b"/proc/self/fd/%d" % fd, name, dst_dir_fd=dir_fd, follow_symlinks=True)


def start_writeback(fd: int) -> None:
    """Start writing dirty pages to the disk without waiting.

    A later fsync has less to do; this call alone makes nothing durable. Raises OSError.
    Source: sync_file_range(2).
    """
    if _sync_file_range()(fd, 0, 0, _SYNC_FILE_RANGE_WRITE):
        from buildidfs.linux import syscalls

        raise syscalls.last_error()


def has_writer(fd: int) -> bool | None:
    """Return True if a process has the file open, or mapped shared, for writing; None: unknown.

    ``fd`` must be open for reading only. The caller must own the file or have CAP_LEASE, and the
    filesystem must be local: network filesystems do not know all writers. The kernel grants a read
    lease if there is no writer (fcntl(2), "Leases"). The lease is released at once; a process that
    opens the file for writing in between waits for the release.

    On an overlay False covers open descriptors only: a shared mapping belongs to the file of the
    layer below, whose writers the overlay does not count. See `has_no_writer`.
    """
    import signal  # short commands do not need it

    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return None
        # The kernel signals the holder when a writer waits for the lease; the default action of its
        # signal is to kill.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def has_no_writer(fd: int) -> bool | None:
    """Return True if no process can change the file without opening it first; None: unknown.

    A negative answer of `has_writer` counts as unknown on an overlay, which may overlook a mapping.
    """
    writer = has_writer(fd)
    if writer is not False:
        return None if writer is None else False
    from buildidfs.linux import mounts  # for the same reason as `_sync_file_range`

    try:
        return None if mounts.filesystem_magic(fd) == mounts.OVERLAY_MAGIC else True
    except OSError:
        return None


def enable_verity(fd: int) -> bool:
    """Enable fs-verity for a file: from now on the kernel reports changed bytes as a read error.

    fs-verity keeps a hash of each block beside a file; the file can never be written to again. ext4
    (made with ``-O verity``), f2fs and btrfs have it since Linux 5.4 (Documentation/filesystems/
    fsverity.rst). The caller must own the file, with ``fd`` open for reading only; the kernel reads
    all of it. Returns False if the kernel or the filesystem does not support fs-verity, or does not
    support it with this block size. A second call does nothing. Raises OSError: ETXTBSY if a
    process has the file open for writing, EACCES for files of other users.
    """
    argument = bytearray(_ENABLE.pack(1, _HASH_SHA256, _BLOCK_BYTES, 0, 0, 0, 0, 0))
    try:
        fcntl.ioctl(fd, FS_IOC_ENABLE_VERITY, argument)
    except OSError as error:
        if error.errno == errno.EEXIST:
            return True
        if error.errno in _NOT_OFFERED:
            return False
        raise
    return True


def access_list(fd: int) -> bytes | None:
    """Return the access control list of an open file or directory (O_PATH suffices), or None.

    `formats.posix_acl` decodes it. The call may ask the server of the filesystem. Raises OSError.
    Source: xattr(7).
    """
    try:
        # By its link in /proc, because a descriptor opened with O_PATH is refused.
        return os.getxattr(b"/proc/self/fd/%d" % fd, _ACCESS)
    except OSError as error:
        if error.errno in _NO_ACCESS_LIST:
            return None
        raise


def read_fully(fd: int, size: int, offset: int) -> bytes:
    """Return all of ``size`` bytes, fewer only at the end of the file. Raises OSError."""
    data = os.pread(fd, size, offset)
    while 0 < len(data) < size:
        more = os.pread(fd, size - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def write_fully(fd: int, data: Buffer) -> None:
    """Write all of ``data`` at the position of the descriptor. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_fully_at(fd: int, data: Buffer, offset: int) -> None:
    """Write all of ``data`` at ``offset``. Raises OSError."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
