# SPDX-License-Identifier: Apache-2.0
"""Copies of a file that cost little, and how they get a name and reach the disk.

Never a hard link of the original: that would be the same file, and a write to it would change what
was captured. `link_fd` gives a name to a copy that has none yet.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
from collections.abc import Callable

_FICLONE = 0x40049409  # _IOW(0x94, 9, int)
_SYNC_FILE_RANGE_WRITE = 2
_CHUNK = 1 << 26

_CANNOT = frozenset(
    (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.ETXTBSY)
)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int]:
    import ctypes  # not before it is needed: those who only read a store are quick to start

    from buildidfs.linux import syscalls

    function = syscalls.libc.sync_file_range
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    function.restype = ctypes.c_int
    return function


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


def content(src_fd: int, dst_fd: int) -> None:
    """Give the empty file ``dst_fd`` all bytes of ``src_fd``, at no cost where that is possible.

    Raises OSError.
    """
    if reflink(src_fd, dst_fd):
        return
    offset = 0
    while count := os.sendfile(dst_fd, src_fd, offset, _CHUNK):
        offset += count


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
    if _sync_file_range()(fd, offset, size, _SYNC_FILE_RANGE_WRITE):
        from buildidfs.linux import syscalls

        raise syscalls.last_error()
