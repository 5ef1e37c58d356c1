# SPDX-License-Identifier: Apache-2.0
"""Attributes of perf events. They request fields, and decide where each field is in a record.

`pack_attr` makes struct perf_event_attr for an event of this machine, `parse_attr` reads that of a
profile. A sample has the fields in its event's ``sample_type``, in a fixed order; other records end
with some of them (``sample_id_all``). If events have different fields, the number of the event is
in each record, at a place that does not depend on the fields (PERF_SAMPLE_IDENTIFIER). Source:
include/uapi/linux/perf_event.h, perf_event_open(2).
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final

import msgspec

SAMPLE_IP: Final = 1 << 0
SAMPLE_TID: Final = 1 << 1
SAMPLE_TIME: Final = 1 << 2
SAMPLE_ADDR: Final = 1 << 3
SAMPLE_READ: Final = 1 << 4
SAMPLE_CALLCHAIN: Final = 1 << 5
SAMPLE_ID: Final = 1 << 6
SAMPLE_CPU: Final = 1 << 7
SAMPLE_PERIOD: Final = 1 << 8
SAMPLE_RAW: Final = 1 << 10
SAMPLE_STREAM_ID: Final = 1 << 9
SAMPLE_IDENTIFIER: Final = 1 << 16

READ_TIME_ENABLED: Final = 1 << 0
_READ_TIMES: Final = (READ_TIME_ENABLED, 1 << 1)  # time enabled, time running
_READ_ID: Final = 1 << 2
_READ_GROUP: Final = 1 << 3
_READ_LOST: Final = 1 << 4

SAMPLE_ID_ALL: Final = 1 << 18
"""The flag with which each record ends with some of the fields of ``sample_type``."""
_WATERMARK: Final = 1 << 14
_USE_CLOCKID: Final = 1 << 25

_TYPE_SOFTWARE: Final = 1
COUNT_DUMMY: Final = 9
"""Counts nothing."""
COUNT_BPF_OUTPUT: Final = 10
"""Counts the records that programs of bpf(2) write (commit a43eec304259a, Linux 4.4)."""

# struct perf_event_attr. The first version: type, size, config, period, sample_type, read_format,
# flags, watermark, bp_type, config1. Then: config2, branch_sample_type, sample_regs_user,
# sample_stack_user, clockid. The remaining fields are 0 here.
_FIRST_FORM: Final = "IIQQQQQIIQ"
_CLOCKID_FORM: Final = f"{_FIRST_FORM}QQQIi"
_REST: Final = "QIHHIIQ"
_OWN: Final = Struct(f"={_CLOCKID_FORM}{_REST}")

ATTR_MIN: Final = Struct(f"={_FIRST_FORM}").size
"""The bytes of the first version of struct perf_event_attr, the smallest that a file can have."""

# The order of fields in a sample up to the first of variable size, and in the trailer.
_HEAD: Final = (
    SAMPLE_IDENTIFIER, SAMPLE_IP, SAMPLE_TID, SAMPLE_TIME, SAMPLE_ADDR, SAMPLE_ID,
    SAMPLE_STREAM_ID, SAMPLE_CPU, SAMPLE_PERIOD,
)  # fmt: skip
_TRAILER: Final = (
    SAMPLE_TID, SAMPLE_TIME, SAMPLE_ID, SAMPLE_STREAM_ID, SAMPLE_CPU, SAMPLE_IDENTIFIER,
)  # fmt: skip

_HEADER_SIZE: Final = 8


class Attr(msgspec.Struct, frozen=True):
    """One event: its sampled fields, and the numbers that its records carry.

    ``clockid`` is the clock of its times, None for perf's own clock.
    """

    sample_type: int
    read_format: int
    sample_id_all: bool
    clockid: int | None
    ids: tuple[int, ...] = ()


def pack_attr(
    flags: int,
    sample_type: int = 0,
    *,
    read_format: int = 0,
    watermark: int = 0,
    clockid: int | None = None,
    config: int = COUNT_DUMMY,
) -> bytes:
    """Return attributes of a software event of this machine, which is ``config``.

    ``flags`` are the bits after read_format; ``watermark`` is the number of bytes of records that
    make its descriptor readable, ``clockid`` the clock of its times.
    """
    flags |= (_WATERMARK if watermark else 0) | (0 if clockid is None else _USE_CLOCKID)
    period = int(config == COUNT_BPF_OUTPUT)
    head = (_TYPE_SOFTWARE, _OWN.size, config, period, sample_type, read_format, flags, watermark)
    return _OWN.pack(*head, *(0,) * 6, clockid or 0, *(0,) * len(_REST))


def parse_attr(data: bytes, order: str, ids: tuple[int, ...] = ()) -> Attr:
    """Read struct perf_event_attr from at least `ATTR_MIN` bytes."""
    sample_type, read_format, flags = Struct(f"{order}{_FIRST_FORM}").unpack_from(data)[4:7]
    if order == ">":
        # In that byte order, bit fields are allocated from the other end.
        flags = int(f"{flags:064b}"[::-1], 2)
    clockid = None
    form = Struct(f"{order}{_CLOCKID_FORM}")
    if flags & _USE_CLOCKID and len(data) >= form.size:
        clockid = form.unpack_from(data)[-1]
    return Attr(sample_type, read_format, bool(flags & SAMPLE_ID_ALL), clockid, ids)


MAX_CONTEXT: Final = (1 << 64) - 4095
"""PERF_CONTEXT_MAX: all addresses are lower than the markers in a call chain."""
CONTEXT_KERNEL: Final = (1 << 64) - 128
CONTEXT_USER: Final = (1 << 64) - 512
CONTEXT_USER_DEFERRED: Final = (1 << 64) - 640
"""The user part of the chain is in a record of its own, found by the number after the marker."""
CONTEXT_GUESTS: Final = frozenset((1 << 64) - each for each in (2048, 2176, 2560))


class _Layout:
    """The places of fields in the records of one event; offsets in bytes, -1 for absent ones."""

    def __init__(self, attr: Attr, order: str) -> None:
        kinds = attr.sample_type
        at, self.size = _offsets(kinds, _HEAD)
        self.is_located = SAMPLE_IP in at and SAMPLE_TID in at
        self.has_time = SAMPLE_TIME in at
        # One call for all of them: address, process and thread, time.
        form = {SAMPLE_IP: "Q", SAMPLE_TID: "II", SAMPLE_TIME: "Q"}
        self.head = Struct(order + "".join(form.get(field, "8x") for field in at))
        self.read = bool(kinds & SAMPLE_READ)
        self.chain = bool(kinds & SAMPLE_CALLCHAIN)
        trailer, size = _offsets(kinds, _TRAILER)
        self.trailer = size if attr.sample_id_all else 0
        self.trailer_time = trailer.get(SAMPLE_TIME, -1) if attr.sample_id_all else -1
        form_of_read = attr.read_format
        self.group = bool(form_of_read & _READ_GROUP)
        self.times = 8 * sum(bool(form_of_read & bit) for bit in _READ_TIMES)
        self.each = 8 + 8 * bool(form_of_read & _READ_ID) + 8 * bool(form_of_read & _READ_LOST)


def _offsets(kinds: int, fields: Sequence[int]) -> tuple[dict[int, int], int]:
    present = [field for field in fields if kinds & field]
    return {field: 8 * number for number, field in enumerate(present)}, 8 * len(present)


class Layouts:
    """Finds the fields of records of all events in ``attrs``.

    For records that are too short for their event, the result is None.
    """

    def __init__(self, attrs: Sequence[Attr], order: str) -> None:
        self._word = Struct(f"{order}Q")
        self._order = order
        layouts = [_Layout(attr, order) for attr in attrs]
        self._first = layouts[0] if layouts else _Layout(Attr(0, 0, False, None), order)
        kinds = {(attr.sample_type, attr.read_format) for attr in attrs}
        numbered = all(attr.sample_type & SAMPLE_IDENTIFIER for attr in attrs)
        self._by_id: dict[int, _Layout] = {}
        if len(kinds) > 1 and numbered:
            for attr, layout in zip(attrs, layouts, strict=True):
                for number in attr.ids:
                    self._by_id[number] = layout
        self.have_time = any(attr.sample_type & SAMPLE_TIME for attr in attrs)

    def head(self, data: bytes, at: int, size: int) -> tuple[int, int, int, int | None] | None:
        """Return the address, process, thread and time of the sample at ``at``.

        The time is None if it was not recorded.
        """
        layout = self._first
        if self._by_id:
            layout = self._layout(data, at, size)
        if layout.size > size - _HEADER_SIZE or not layout.is_located:
            return None
        if layout.has_time:
            found: tuple[int, int, int, int] = layout.head.unpack_from(data, at + _HEADER_SIZE)
            return found
        ip, pid, tid = layout.head.unpack_from(data, at + _HEADER_SIZE)
        return ip, pid, tid, None

    def chain(self, data: bytes, at: int, size: int) -> tuple[int, ...]:
        """Return the call chain of the sample at ``at``, for which `head` returned a value.

        It has addresses and, in between, the markers PERF_CONTEXT_*, from `MAX_CONTEXT` on.
        """
        layout = self._layout(data, at, size) if self._by_id else self._first
        if not layout.chain:
            return ()
        return self._chain(layout, data, at + _HEADER_SIZE + layout.size, at + size)

    def deferred(self, data: bytes, at: int, size: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of a deferred call chain and the chain, from its record at ``at``."""
        begin, end = at + _HEADER_SIZE, at + size
        if begin + 16 > end:
            return None
        (number,) = self._word.unpack_from(data, begin)
        (count,) = self._word.unpack_from(data, begin + 8)
        if count > (end - begin - 16) // 8:
            return None
        return number, Struct(f"{self._order}{count}Q").unpack_from(data, begin + 16)

    def _layout(self, data: bytes, at: int, size: int) -> _Layout:
        """Return the layout of a sample's event, by the number at its beginning."""
        if size < _HEADER_SIZE + 8:
            return self._first
        (number,) = self._word.unpack_from(data, at + _HEADER_SIZE)
        return self._by_id.get(number, self._first)

    def _chain(self, layout: _Layout, data: bytes, at: int, end: int) -> tuple[int, ...]:
        word = self._word
        if layout.read:
            values = 1
            if layout.group:
                if at + 8 > end:
                    return ()
                (values,) = word.unpack_from(data, at)
                at += 8
            at += layout.times + values * layout.each
        if at + 8 > end:
            return ()
        (count,) = word.unpack_from(data, at)
        if count > (end - at - 8) // 8:
            return ()
        return Struct(f"{self._order}{count}Q").unpack_from(data, at + 8)

    def trailer(self, data: bytes, at: int, size: int) -> tuple[int, int | None]:
        """Return the number of bytes of the fields at the end of a record that is not a sample, and
        its time.
        """
        layout = self._first
        end = at + size
        if self._by_id and size >= _HEADER_SIZE + 8:
            layout = self._by_id.get(self._word.unpack_from(data, end - 8)[0], layout)
        if layout.trailer > size - _HEADER_SIZE:
            return 0, None
        if layout.trailer_time < 0:
            return layout.trailer, None
        (time,) = self._word.unpack_from(data, end - layout.trailer + layout.trailer_time)
        return layout.trailer, time
