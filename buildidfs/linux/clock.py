# SPDX-License-Identifier: Apache-2.0
"""Whether the clock of this machine is kept right. Source: adjtimex(2)."""

from __future__ import annotations

import ctypes
import struct

from buildidfs.linux import syscalls

# struct timex: modes; offset, freq, maxerror, esterror; status. What follows is passed over.
_TIMEX = struct.Struct("@I4li")
_SIZE = 512  # more than it has anywhere
_STA_UNSYNC = 0x40


def is_synchronised() -> bool:
    """Whether something (NTP, PTP, the hypervisor) tells the kernel that the time is right.

    Raises OSError.
    """
    buffer = ctypes.create_string_buffer(_SIZE)  # modes 0: nothing is set
    if syscalls.libc.adjtimex(buffer) < 0:
        raise syscalls.last_error()
    return not _TIMEX.unpack_from(buffer)[-1] & _STA_UNSYNC
