# SPDX-License-Identifier: Apache-2.0
"""The clock that perf events are timed by unless somebody asks for another.

It begins with the machine, nobody sets it, and there is no call to read it: but each record of an
event has its time. So an event of our own thread is made to leave one. Source: perf_event_open(2),
local_clock() of the kernel.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from typing import Final

from buildidfs.linux import perf_event, syscalls

_ATTRIBUTES: Final = struct.Struct("=IIQQQQQ24x")  # the first version, 64 bytes
_TYPE_SOFTWARE: Final = 1
_COUNT_DUMMY: Final = 9
_SAMPLE_TIME: Final = 1 << 2
_EXCLUDE_KERNEL: Final = 1 << 5  # or it takes CAP_PERFMON
_EXCLUDE_HYPERVISOR: Final = 1 << 6
_COMM: Final = 1 << 9
_SAMPLE_ID_ALL: Final = 1 << 18

_HEAD: Final = struct.Struct("=Q")
_HEAD_OFFSET: Final = 1024  # in struct perf_event_mmap_page
_PR_SET_NAME: Final = 15
_PR_GET_NAME: Final = 16
_NAME_SIZE: Final = 16
_TRIES: Final = 5


def offset() -> tuple[int, int]:
    """What to add to times of events to get Unix time, and by how much that may be wrong (ns).

    Raises OSError: EACCES or EPERM where events of one's own are not allowed, ENOSYS.
    """
    attributes = _ATTRIBUTES.pack(
        _TYPE_SOFTWARE,
        _ATTRIBUTES.size,
        _COUNT_DUMMY,
        0,
        _SAMPLE_TIME,
        0,
        _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | _COMM | _SAMPLE_ID_ALL,
    )
    fd = perf_event.open_event(attributes, 0, -1)
    try:
        ring = mmap.mmap(fd, 2 * mmap.PAGESIZE)
    finally:
        os.close(fd)
    with ring:
        return min((_look(ring) for _ in range(_TRIES)), key=lambda found: found[1])


def _look(ring: mmap.mmap) -> tuple[int, int]:
    before = time.time_ns()
    _rename()
    after = time.time_ns()
    (head,) = _HEAD.unpack_from(ring, _HEAD_OFFSET)
    # The time is what a record ends with; there are too few of them for the ring to be full.
    (event,) = _HEAD.unpack_from(ring, mmap.PAGESIZE + head - _HEAD.size)
    return (before + after) // 2 - event, (after - before) // 2 + 1


def _rename() -> None:
    """Give our thread the name that it has."""
    name = ctypes.create_string_buffer(_NAME_SIZE)
    for operation in (_PR_GET_NAME, _PR_SET_NAME):
        if syscalls.libc.prctl(operation, name, 0, 0, 0) < 0:
            raise syscalls.last_error()
