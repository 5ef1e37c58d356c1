# SPDX-License-Identifier: Apache-2.0
"""The scheduling of threads, and their names.

Source: sched(7), prctl(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os

from buildidfs.linux import syscalls

_NICE = -15

# Architectures after x86 have the numbers of asm-generic/unistd.h.
_SYS_IOPRIO_SET = {"x86_64": 251, "i686": 289, "ppc64le": 273, "s390x": 282}
_SYS_IOPRIO_SET_GENERIC = 30
_IOPRIO_WHO_PROCESS = 1
_IOPRIO_CLASS_IDLE = 3


def hurry(priority: int = 1) -> str:
    """Run this thread before all that is not real-time; tell in words what is lacking, if anything.

    SCHED_RR takes CAP_SYS_NICE (or RLIMIT_RTPRIO); where it is refused a low nice value is tried.
    Children do not inherit it.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(priority))
        return ""
    except OSError as error:
        refused = f"no real-time scheduling ({error.strerror}; needs CAP_SYS_NICE)"
    try:
        os.setpriority(os.PRIO_PROCESS, 0, _NICE)
        os.sched_setscheduler(0, os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    except OSError:
        return f"{refused}, and no better nice value either: what is short-lived may be missed"
    return (
        f"{refused}, runs at nice {_NICE} instead: on a busy host what is short-lived may be missed"
    )


def stand_back() -> None:
    """Let this thread run and read the disk only when no other wants to, as far as possible.

    Source: ioprio_set(2), for which the C library has no function.
    """
    number = _SYS_IOPRIO_SET.get(os.uname().machine, _SYS_IOPRIO_SET_GENERIC)
    with contextlib.suppress(OSError):
        syscalls.syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_CLASS_IDLE << 13)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # of the thread, on Linux


def name_thread(name: bytes) -> None:
    """Set the name that ps and top show for this thread: at most 15 bytes."""
    buffer = ctypes.create_string_buffer(name[:15])
    syscalls.prctl(syscalls.PR_SET_NAME, ctypes.addressof(buffer))
