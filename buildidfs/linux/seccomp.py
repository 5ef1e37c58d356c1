# SPDX-License-Identifier: Apache-2.0
"""Giving up system calls. Source: seccomp(2), linux/filter.h, linux/audit.h."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from buildidfs.linux import syscalls

_PR_SET_SECCOMP: Final = 22
_MODE_FILTER: Final = 2
_CLONE_THREAD: Final = 0x10000

# Audit architecture, and numbers of what differs. All of them have the low half of an argument
# first, and the flags as the first one of clone.
_MACHINES: Final = {
    "x86_64": (
        0xC000003E,
        {
            "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "ptrace": 101, "add_key": 248,
            "request_key": 249, "keyctl": 250, "process_vm_readv": 310, "process_vm_writev": 311,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "socket": 198, "clone": 220, "ptrace": 117, "add_key": 217, "request_key": 218,
            "keyctl": 219, "process_vm_readv": 270, "process_vm_writev": 271,
        },
    ),
}  # fmt: skip
# The same on every architecture.
_NUMBERS: Final = {"io_uring_setup": 425, "pidfd_getfd": 438}
_CLONE3: Final = 435
_X32: Final = 0x40000000

# Offsets in struct seccomp_data, and codes of linux/bpf_common.h.
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _HAS_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _Step(NamedTuple):
    """An instruction; ``holds`` and ``fails`` are labels to go on at, empty for the next one."""

    code: int
    value: int
    holds: str = ""
    fails: str = ""
    label: str = ""


def forbid(names: Sequence[str]) -> None:
    """Have these system calls fail with EPERM, in this process and in what it becomes.

    So do all that make another process (not a thread), and those of another architecture that the
    kernel can run. Needs no_new_privs. Raises OSError: ENOSYS on a machine whose numbers are not
    known here.
    """
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    architecture, own = machine
    numbers = [own[name] if name in own else _NUMBERS[name] for name in names]
    numbers += [own[name] for name in ("fork", "vfork") if name in own]
    code = _assembled(
        [
            _Step(_LOAD, _ARCHITECTURE),
            _Step(_EQUAL, architecture, fails="refuse"),
            _Step(_LOAD, _NUMBER),
            _Step(_AT_LEAST, _X32, holds="refuse"),
            *(_Step(_EQUAL, number, holds="refuse") for number in numbers),
            # Its arguments are out of sight; without it the C library takes clone.
            _Step(_EQUAL, _CLONE3, holds="unknown"),
            _Step(_EQUAL, own["clone"], fails="allow"),
            _Step(_LOAD, _FIRST_ARGUMENT),
            _Step(_HAS_BITS, _CLONE_THREAD, fails="refuse"),
            _Step(_RETURN, _ALLOW, label="allow"),
            _Step(_RETURN, _ERRNO | errno.EPERM, label="refuse"),
            _Step(_RETURN, _ERRNO | errno.ENOSYS, label="unknown"),
        ]
    )
    program = _Program(len(code) // 8, code)
    if syscalls.libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0):
        raise syscalls.last_error()


def _assembled(steps: Sequence[_Step]) -> bytes:
    """struct sock_filter of each; a jump tells how many to pass over."""
    places = {step.label: at for at, step in enumerate(steps) if step.label}
    return b"".join(
        struct.pack(
            "=HBBI",
            step.code,
            places[step.holds] - at - 1 if step.holds else 0,
            places[step.fails] - at - 1 if step.fails else 0,
            step.value,
        )
        for at, step in enumerate(steps)
    )
