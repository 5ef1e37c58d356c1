# SPDX-License-Identifier: Apache-2.0
"""What read(2) gives for a fanotify group (fanotify(7))."""

from __future__ import annotations

import struct

import msgspec

VERSION = 3

# struct fanotify_event_metadata: event_len, vers, reserved, metadata_len, mask, fd, pid
_METADATA = struct.Struct("=IBxHQii")
# struct fanotify_event_info_header: info_type, pad, len
_INFO = struct.Struct("=BxH")
# struct fanotify_event_info_mnt: the header, padding, mnt_id (commit 0f46d81f2bce, Linux 6.14)
_INFO_MOUNT = struct.Struct("=8xQ")
_INFO_TYPE_MOUNT = 7

EVENT_SIZE = _METADATA.size
"""Bytes of an event of a group that reports descriptors: a buffer of N times this holds N."""

MOUNT_EVENT_SIZE = _METADATA.size + _INFO_MOUNT.size
"""Bytes of an event of a group that reports mounts."""


class FanotifyEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event.

    ``mask`` has the FAN_* bits. ``fd`` is the open file, which the receiver has to close, and
    negative where there is none. ``pid`` is the process that caused it, 0 if it is in a pid
    namespace that we do not see. ``mnt_id`` is the unique ID of the mount that a mount event is
    about (statmount(2)), else 0.
    """

    mask: int
    fd: int
    pid: int
    mnt_id: int = 0


def decode(buffer: bytes) -> list[FanotifyEvent]:
    """The events of one read, in their order; what is cut off at the end is left out.

    Information records of kinds not known here are passed over. Takes time in proportion to the
    buffer. Raises ValueError if the kernel speaks another version of the format, in which case
    nothing in it means anything.
    """
    events = []
    offset, end = 0, len(buffer)
    while end - offset >= EVENT_SIZE:
        length, version, header, mask, fd, pid = _METADATA.unpack_from(buffer, offset)
        if version != VERSION:
            raise ValueError(f"fanotify events of version {version}, not {VERSION}")
        if not EVENT_SIZE <= header <= length <= end - offset:
            break
        mnt_id = 0
        if length > header:
            mnt_id = _mount_id(buffer, offset + header, offset + length)
        events.append(FanotifyEvent(mask, fd, pid, mnt_id))
        offset += length
    return events


def _mount_id(buffer: bytes, offset: int, end: int) -> int:
    """The ID in the mount record among the information records of one event; 0 without one."""
    while end - offset >= _INFO.size:
        kind, length = _INFO.unpack_from(buffer, offset)
        if not _INFO.size <= length <= end - offset:
            break
        if kind == _INFO_TYPE_MOUNT and length >= _INFO_MOUNT.size:
            return int(_INFO_MOUNT.unpack_from(buffer, offset)[0])
        offset += length
    return 0
