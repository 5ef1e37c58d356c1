# SPDX-License-Identifier: Apache-2.0
"""Giving up system calls. Source: seccomp(2), linux/filter.h, linux/audit.h."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import Final

from buildidfs.linux import syscalls

_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2

# Audit architecture, and numbers of what `forbid` takes by name.
_MACHINES: Final = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271},
    ),
}
# The same on every architecture.
_NUMBERS: Final = {"io_uring_setup": 425, "pidfd_getfd": 438}
_X32: Final = 0x40000000

# struct seccomp_data begins with the number and the architecture.
_NUMBER, _ARCHITECTURE = 0, 4
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def forbid(names: Sequence[str]) -> None:
    """Have these system calls fail with EPERM, in this process and in what it starts.

    Those of another architecture that the kernel can run fail all. Needs no_new_privs. Raises
    OSError: ENOSYS on a machine whose numbers are not known here.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    architecture, own = machine
    numbers = [own[name] if name in own else _NUMBERS[name] for name in names]
    count = len(numbers)
    # A jump tells how many instructions to pass over where it holds, and where it does not.
    code = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_EQUAL, architecture, 0, count + 3),
        _instruction(_LOAD, _NUMBER),
        _instruction(_AT_LEAST, _X32, count + 1, 0),
        *(_instruction(_EQUAL, number, count - at, 0) for at, number in enumerate(numbers)),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
    ]
    program = _Program(len(code), b"".join(code))
    if syscalls.libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise syscalls.last_error()


def _instruction(code: int, value: int, holds: int = 0, fails: int = 0) -> bytes:
    return struct.pack("=HBBI", code, holds, fails, value)
