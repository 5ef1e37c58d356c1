# SPDX-License-Identifier: Apache-2.0
"""What kind of filesystem an open file is on, also where its mount cannot be seen.

Source: statfs(2), include/uapi/linux/magic.h.
"""

from __future__ import annotations

import ctypes
from typing import Final

from buildidfs.linux import syscalls

# struct statfs begins with f_type, a word; the rest is less than this on every architecture.
_SIZE: Final = 256

_fstatfs = syscalls.libc.fstatfs
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_fstatfs.restype = ctypes.c_int


def magic(fd: int) -> int:
    """The magic number of the filesystem (O_PATH will do); a server, if it has one, is asked.

    Raises OSError.
    """
    answer = ctypes.create_string_buffer(_SIZE)
    if _fstatfs(fd, ctypes.addressof(answer)):
        raise syscalls.last_error()
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF
