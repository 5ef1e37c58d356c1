# SPDX-License-Identifier: Apache-2.0
"""The cheapest second copy of a file: share its extents, let the kernel copy, or copy.

Never a hard link of the original: that would be the same file, and a write to it would change what
was captured. `link_fd` gives a name to a copy that has none yet.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from buildidfs.linux import syscalls

_FICLONE = syscalls.ioc_write(0x94, 9, 4)
_SYNC_FILE_RANGE_WRITE = 2

# A copy stops to look for signals between pieces.
_PIECE = 64 << 20
_BUFFER = 1 << 20

_CANNOT = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.ETXTBSY)
)

_sync_file_range = syscalls.libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_sync_file_range.restype = ctypes.c_int


def reflink(src_fd: int, dst_fd: int) -> bool:
    """Make the empty file ``dst_fd`` share all extents of ``src_fd``; False where impossible.

    It is a snapshot: later writes to either do not show in the other. Raises OSError, ENOSPC
    and EDQUOT among others. Source: ioctl_ficlone(2).
    """
    try:
        fcntl.ioctl(dst_fd, _FICLONE, src_fd)
    except OSError as error:
        if error.errno in _CANNOT:
            return False
        raise
    return True


def copy_range(src_fd: int, dst_fd: int, size: int) -> int:
    """Copy the first ``size`` bytes of a file to the same place of another; returns how many.

    Fewer than ``size`` only if the file ends before. Neither file offset is used or moved.
    The kernel copies where it can (copy_file_range(2)), else the bytes pass through here.
    Raises OSError.
    """
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(src_fd, dst_fd, min(size - done, _PIECE), done, done)
        except OSError as error:
            # EPERM: a seccomp filter older than the system call. If it is the file that forbids
            # it, so will the write below.
            if error.errno not in _CANNOT and error.errno != errno.EPERM:
                raise
            break
        if not count:
            # The end, or a filesystem that claims to be empty (those in /proc and /sys): the
            # read below finds out.
            break
        done += count
    return done + _read_write(src_fd, dst_fd, done, size)


def _read_write(src_fd: int, dst_fd: int, start: int, size: int) -> int:
    offset = start
    while offset < size:
        piece = os.pread(src_fd, min(size - offset, _BUFFER), offset)
        if not piece:
            break
        view = memoryview(piece)
        while view:
            written = os.pwrite(dst_fd, view, offset)
            offset += written
            view = view[written:]
    return offset - start


def link_fd(fd: int, dir_fd: int, name: bytes) -> None:
    """Give the open file (O_TMPFILE, say) a name in the directory ``dir_fd``.

    Raises OSError: FileExistsError if the name is taken. Source: open(2), O_TMPFILE.
    """
    # AT_EMPTY_PATH needs CAP_DAC_READ_SEARCH; the link in /proc does not. Only with dst_dir_fd
    # does os.link call linkat(AT_SYMLINK_FOLLOW); without, Python 3.11 calls link(2), which fails.
    os.link(b"/proc/self/fd/%d" % fd, name, dst_dir_fd=dir_fd, follow_symlinks=True)


def start_writeback(fd: int, offset: int = 0, size: int = 0) -> None:
    """Begin to write dirty pages to the disk without waiting; ``size`` 0 is "to the end".

    A later fsync has less to do; by itself this makes nothing durable. Raises OSError.
    Source: sync_file_range(2).
    """
    if _sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE):
        raise syscalls.last_error()
