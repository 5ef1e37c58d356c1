# SPDX-License-Identifier: Apache-2.0
"""What read(2) gives for a fanotify group (fanotify(7))."""

from __future__ import annotations

import struct

import msgspec

VERSION = 3

# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid
_METADATA = struct.Struct("=IBxHQii")

EVENT_SIZE = _METADATA.size
"""Bytes of an event of a group that reports descriptors: a buffer of N times this holds N."""


class FanotifyEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event.

    ``mask`` has the FAN_* bits. ``fd`` is the open file, which the receiver has to close, and
    negative where there is none. ``pid`` is the process that caused it, 0 if it is in a pid
    namespace that we do not see.
    """

    mask: int
    fd: int
    pid: int


def decode(buffer: bytes) -> list[FanotifyEvent]:
    """The events of one read, in their order; what is cut off at the end is left out.

    Information records behind an event are passed over, whatever is in them. Takes time in
    proportion to the buffer. Raises ValueError if the kernel speaks another version of the format,
    in which case nothing in it means anything.
    """
    events = []
    offset, end = 0, len(buffer)
    while end - offset >= EVENT_SIZE:
        length, version, header, mask, fd, pid = _METADATA.unpack_from(buffer, offset)
        if version != VERSION:
            raise ValueError(f"fanotify events of version {version}, not {VERSION}")
        if not EVENT_SIZE <= header <= length <= end - offset:
            break
        events.append(FanotifyEvent(mask, fd, pid))
        offset += length
    return events
