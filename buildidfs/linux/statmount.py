# SPDX-License-Identifier: Apache-2.0
"""Mounts by their number: what there is in a mount namespace, and of which kind.

No filesystem is asked. Source: statmount(2), listmount(2).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from buildidfs.linux import syscalls

_SYS_STATMOUNT: Final = 457  # these two are the same on every architecture but alpha
_SYS_LISTMOUNT: Final = 458
_LSMT_ROOT: Final = (1 << 64) - 1
_STATMOUNT_SB_BASIC: Final = 1

_REQUEST: Final = struct.Struct("=IIQQQ")  # size, spare, mount, mask, mount namespace
_ANSWER: Final = struct.Struct("=4x4xQIIQ")  # size, options; mask, major, minor, magic
_ANSWER_SIZE: Final = 512
_MOST_MOUNTS: Final = 4096


def magic(mount: int, namespace: int = 0) -> int:
    """The magic number, as statfs(2) has it, of the filesystem of a mount.

    ``mount`` is a number of `statx.unique_mount_id`, ``namespace`` one of `namespaces.mnt_ns_id`,
    or 0 for our own. Raises OSError: ENOENT if it is not mounted there, ENOSYS before Linux 6.8
    (commit 46eae99ef7330), and EINVAL for other namespaces before 6.11 (commit 71aacb4c8c76b).
    """
    request = ctypes.create_string_buffer(
        _REQUEST.pack(_REQUEST.size, 0, mount, _STATMOUNT_SB_BASIC, namespace), _REQUEST.size
    )
    answer = ctypes.create_string_buffer(_ANSWER_SIZE)
    syscalls.syscall(
        _SYS_STATMOUNT, ctypes.addressof(request), ctypes.addressof(answer), _ANSWER_SIZE, 0
    )
    found: int = _ANSWER.unpack_from(answer)[3]
    return found


def mounts_of(namespace: int) -> bytes:
    """The numbers of all mounts of a namespace, 8 bytes each, never used again until the next boot.

    ``namespace`` is one of `namespaces.mnt_ns_id`. Raises OSError: ENOSYS before Linux 6.8, EINVAL
    before 6.11, EOVERFLOW for more than 4096 mounts.
    """
    request = ctypes.create_string_buffer(
        _REQUEST.pack(_REQUEST.size, 0, _LSMT_ROOT, 0, namespace), _REQUEST.size
    )
    numbers = ctypes.create_string_buffer(8 * _MOST_MOUNTS)
    count = syscalls.syscall(
        _SYS_LISTMOUNT, ctypes.addressof(request), ctypes.addressof(numbers), _MOST_MOUNTS, 0
    )
    if count >= _MOST_MOUNTS:
        raise OSError(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW))
    return bytes(memoryview(numbers)[: 8 * count])
