# SPDX-License-Identifier: Apache-2.0
"""The program under a kernel that lacks something, as far as the program can tell.

A seccomp filter (seccomp(2)) answers chosen system calls, or ioctls with a chosen request, with an
error, as an older kernel or a container runtime does. Everything else is the real kernel's.
"""

from __future__ import annotations

import os
import struct
import sys

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.tools import Argument, Result, run

#: (audit architecture, numbers)
_MACHINES = {
    "x86_64": (0xC000003E, {"ioctl": 16, "fcntl": 72, "perf_event_open": 298,
                            "sched_setscheduler": 144, "openat2": 437, "unshare": 272}),
    "aarch64": (0xC00000B7, {"ioctl": 29, "fcntl": 25, "perf_event_open": 241,
                             "sched_setscheduler": 119, "openat2": 437, "unshare": 97}),
}  # fmt: skip

# struct seccomp_data: nr, arch, instruction_pointer, args (u64 each, low half first)
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 16 + 8
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000

# $1 is the program of the filter in hexadecimal; what follows are the words of the command.
_FILTER = """
import ctypes, os, sys
code = bytes.fromhex(sys.argv[1])
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0
assert prctl(22, 2, ctypes.byref(Filter(len(code) // 8, code)), 0, 0) == 0
"""
_INSTALL = f"""{_FILTER}
from buildidfs.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""
_RUN = f"{_FILTER}os.execvp(sys.argv[2], sys.argv[2:])"


def forbidding(name: str, error: int, request: int | None, *arguments: Argument) -> Result:
    """Run the program while the system call ``name`` fails with ``error`` (0: seems to work).

    With a ``request``, only if its second argument is that one.
    """
    program = _program(name, error, request)
    return run([sys.executable, "-c", _INSTALL, program.hex(), *arguments], cwd=ROOT)


def refusing(name: str, error: int, *argv: Argument) -> list[Argument]:
    """The command ``argv`` while the system call ``name`` fails with ``error``."""
    return [sys.executable, "-c", _RUN, _program(name, error, None).hex(), *argv]


def _program(name: str, error: int, request: int | None) -> bytes:
    """The filter, for the machine that this is."""
    machine = _MACHINES.get(os.uname().machine)
    if machine is None:
        pytest.skip(f"no numbers of system calls known for {os.uname().machine}")
    architecture, numbers = machine
    wanted = [(_NUMBER, numbers[name])]
    wanted += [] if request is None else [(_FLAGS, request)]
    program = _instruction(_LOAD, _ARCHITECTURE) + _jump(architecture, 2 * len(wanted) + 1)
    for place, (offset, value) in enumerate(wanted):
        program += _instruction(_LOAD, offset) + _jump(value, 2 * (len(wanted) - place) - 1)
    return program + _instruction(_RETURN, _ERRNO | error) + _instruction(_RETURN, _ALLOW)


def _instruction(code: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, 0, 0, value)


def _jump(value: int, unequal: int) -> bytes:
    """Go on if the loaded word is ``value``, else pass over so many instructions."""
    return struct.pack("=HBBI", _EQUAL, 0, unequal, value)
