# SPDX-License-Identifier: Apache-2.0
"""Giving up the right to change files, and to reach other processes. Source: landlock(7)."""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Final

from buildidfs.linux import syscalls

# The same on every architecture.
_CREATE_RULESET: Final = 444
_RESTRICT_SELF: Final = 446
_VERSION: Final = 1

_WRITE_FILE: Final = 1 << 1
_REMOVE_AND_MAKE: Final = sum(1 << bit for bit in range(4, 13))
_REFER: Final = 1 << 13  # of the second version
_TRUNCATE: Final = 1 << 14  # third
_TCP: Final = 0b11  # fourth: to bind, to connect
_SCOPES: Final = 0b11  # sixth: abstract Unix sockets, signals


def forbid_changes() -> None:
    """Take from this process the right to open any file for writing, to create, rename or remove.

    What it starts has not got it either. A newer kernel takes TCP, abstract Unix sockets and
    signals to other processes, too. Needs no_new_privs. Raises OSError: ENOSYS or EOPNOTSUPP where
    the kernel has no Landlock.
    """
    version = syscalls.syscall(_CREATE_RULESET, 0, 0, _VERSION)
    files = _WRITE_FILE | _REMOVE_AND_MAKE
    files |= _REFER if version >= 2 else 0
    files |= _TRUNCATE if version >= 3 else 0
    text = struct.pack(
        "=QQQ", files, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0
    )  # struct landlock_ruleset_attr; an older kernel takes zeros at the end
    attributes = ctypes.create_string_buffer(text, len(text))
    fd = syscalls.syscall(_CREATE_RULESET, ctypes.addressof(attributes), len(text), 0)
    try:
        syscalls.syscall(_RESTRICT_SELF, fd, 0)
    finally:
        os.close(fd)
