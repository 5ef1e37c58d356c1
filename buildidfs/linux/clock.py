# SPDX-License-Identifier: Apache-2.0
"""The clock of the machine, and that of perf events. Source: adjtimex(2), perf_event_open(2)."""

from __future__ import annotations

import ctypes
import struct
import sys
import time
from typing import Final

from buildidfs.formats.perf.attributes import SAMPLE_ID_ALL, SAMPLE_TIME
from buildidfs.linux import perf_event, syscalls

# struct timex: modes; offset, freq, maxerror, esterror; status. The rest is passed over.
_TIMEX: Final = struct.Struct("@I4li")
_TIMEX_SIZE: Final = 512  # more than it has anywhere
_STA_UNSYNC: Final = 0x40

_NAME_SIZE: Final = 16
_TIME_SIZE: Final = 8
_TRIES: Final = 5


def is_synchronised() -> bool:
    """Return True if a service (NTP, PTP, the hypervisor) keeps the clock of the kernel right.

    Raises OSError.
    """
    buffer = ctypes.create_string_buffer(_TIMEX_SIZE)  # modes 0: nothing is set
    if syscalls.libc.adjtimex(buffer) < 0:
        raise syscalls.last_error()
    return not _TIMEX.unpack_from(buffer)[-1] & _STA_UNSYNC


def perf_offset() -> tuple[int, int]:
    """Return what to add to times of perf events to get Unix time, and its possible error (ns).

    The clock of perf events (local_clock() of the kernel) begins with the machine, cannot be set,
    and no call reads it, but each record of an event has its time. So an event of this thread is
    made to leave one. Raises OSError as `perf_event.OwnEvent` does.
    """
    events = perf_event.COMM | SAMPLE_ID_ALL
    with perf_event.OwnEvent(events, SAMPLE_TIME) as event:
        return min((_look(event) for _ in range(_TRIES)), key=lambda found: found[1])


def _look(event: perf_event.OwnEvent) -> tuple[int, int]:
    before = time.time_ns()
    _rename()
    after = time.time_ns()
    # A record ends with its time.
    event_time = int.from_bytes(event.records()[-_TIME_SIZE:], sys.byteorder)
    return (before + after) // 2 - event_time, (after - before) // 2 + 1


def _rename() -> None:
    """Give this thread the name that it has, which makes a record."""
    name = ctypes.create_string_buffer(_NAME_SIZE)
    for operation in (syscalls.PR_GET_NAME, syscalls.PR_SET_NAME):
        syscalls.prctl(operation, ctypes.addressof(name))
