# SPDX-License-Identifier: Apache-2.0
"""The type of a mount, by its number. No filesystem is asked.

Source: statmount(2).
"""

from __future__ import annotations

import ctypes
import struct
from typing import Final

from buildidfs.linux import syscalls

_SYS_STATMOUNT: Final = 457  # the same on every architecture but alpha
_STATMOUNT_SB_BASIC: Final = 1

_REQUEST: Final = struct.Struct("=IIQQQ")  # size, spare, mount, mask, mount namespace
_ANSWER: Final = struct.Struct("=4x4xQIIQ")  # size, options; mask, major, minor, magic
_ANSWER_SIZE: Final = 512


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
