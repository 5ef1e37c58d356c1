# SPDX-License-Identifier: Apache-2.0
"""perf.data: the headers of a profile.

A file begins with the sizes and places of three parts: the events, the records (`stream`), and the
features after the records, such as the build IDs of files. A profile that was written to a pipe has
special records in place of events and features. Either byte order. Source:
tools/perf/Documentation/perf.data-file-format.txt and tools/perf/util/header.c.

Every size, count and offset is a claim; nothing is read or allocated beyond fixed bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import UsageError
from buildidfs.formats.perf.attributes import ATTR_MIN, Attr, parse_attr
from buildidfs.model import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ReadAt = Callable[[int, int], bytes]
"""(offset, size) -> bytes, fewer only at the end of the file."""

BUILD_ID: Final = 2
HOSTNAME: Final = 3
OSRELEASE: Final = 4
AUXTRACE: Final = 18
SAMPLE_TIME: Final = 21
DIR_FORMAT: Final = 24
COMPRESSED: Final = 27
CLOCK_DATA: Final = 29
"""Numbers of features, HEADER_* of tools/perf/util/header.h."""

FEATURES: Final = 256
HEADER_SIZE: Final = 104
PIPE_HEADER_SIZE: Final = 16

_ORDERS: Final = {b"PERFILE2": "<", b"2ELIFREP": ">"}
_OLD: Final = (b"PERFFILE", b"ELIFFREP")
_MAX_ATTRS: Final = 1 << 14
_MAX_ATTR_SIZE: Final = 1 << 12
_MAX_IDS: Final = 1 << 20
_MAX_TEXT: Final = 1 << 20
_CHUNK: Final = 1 << 16
_PATH_MAX: Final = 4096

_RECORD: Final = 67  # PERF_RECORD_HEADER_BUILD_ID
_MISC_HAS_SIZE: Final = 1 << 15
_ID_FIELD: Final = 24
MIN_ID: Final = 2
MAX_ID: Final = 20
"""The shortest and the longest build ID that a profile can contain."""

CPUMODE: Final = 7
KERNEL: Final = 1
USER: Final = 2
GUEST_KERNEL: Final = 4
GUEST_USER: Final = 5


class Header(msgspec.Struct):
    """The places of the parts of a file, and its events.

    ``order`` is the byte order in the notation of struct ("<", ">"); ``data`` is the place of the
    records. Without ``is_pipe``, ``features`` has the place of each feature by number; ``flags``
    has bit 1<<number. ``truncated`` is the reason if the end is missing. The other fields are
    places in the file, for a writer.
    """

    order: str
    is_pipe: bool
    data: ByteRange
    attrs: list[Attr]
    features: dict[int, ByteRange]
    flags: int = 0
    attr_size: int = 0
    attr_table: ByteRange = ByteRange(0, 0)
    event_types: ByteRange = ByteRange(0, 0)
    truncated: str = ""


class Clock(msgspec.Struct, frozen=True):
    """The clock of the events and the time of day at the same moment, in nanoseconds."""

    clockid: int
    wall_ns: int
    event_ns: int


class BuildIdEntry(msgspec.Struct, frozen=True):
    """An entry of the table of build IDs: the build ID of the file with that name.

    ``misc`` is that of the record; its ``CPUMODE`` bits distinguish files of the kernel and of
    guests (``pid`` is then that of the guest) from others.
    """

    name: bytes
    build_id: bytes
    misc: int = USER
    pid: int = -1


def parse_header(read_at: ReadAt, size: int) -> Header:
    """Read the headers of a file of ``size`` bytes. Raises `UsageError` if it is no profile."""
    head = read_at(0, HEADER_SIZE)
    order = _ORDERS.get(head[:8])
    if order is None:
        if head[:8] in _OLD:
            raise UsageError("is a profile in the format of perf before Linux 3.0, not read here")
        raise UsageError("is not a perf.data file" if head else "is empty, not a perf.data file")
    if len(head) < PIPE_HEADER_SIZE:
        raise UsageError("is only the beginning of a perf.data file")
    (header_size,) = Struct(f"{order}Q").unpack_from(head, 8)
    if header_size == PIPE_HEADER_SIZE:
        data = ByteRange(PIPE_HEADER_SIZE, size - PIPE_HEADER_SIZE)
        return Header(order, True, data, [], {})
    if len(head) < HEADER_SIZE or header_size < HEADER_SIZE:
        raise UsageError("is only the beginning of a perf.data file")
    words = Struct(f"{order}13Q").unpack_from(head)
    attr_size, attrs, data = words[2], ByteRange(*words[3:5]), ByteRange(*words[5:7])
    flags = sum(word << 64 * number for number, word in enumerate(words[9:13]))
    header = Header(order, False, data, [], {}, flags, attr_size, attrs, ByteRange(*words[7:9]))
    header.attrs = list(_attrs(read_at, header, size))
    if not HEADER_SIZE <= data.offset <= size:
        raise UsageError("is only the beginning of a perf.data file")
    _find_end(read_at, header, size)
    return header


def _attrs(read_at: ReadAt, header: Header, size: int) -> Iterator[Attr]:
    section = Struct(f"{header.order}QQ")
    entry = header.attr_size
    if not ATTR_MIN + section.size <= entry <= _MAX_ATTR_SIZE:
        raise UsageError(f"is a damaged perf.data file: events of {entry} bytes each")
    budget = _MAX_IDS
    table = header.attr_table
    if table.offset + table.size > size:
        raise UsageError("is only the beginning of a perf.data file")
    for number in range(min(table.size // entry, _MAX_ATTRS)):
        data = read_at(table.offset + number * entry, entry)
        if len(data) < entry:
            raise UsageError("is only the beginning of a perf.data file")
        offset, length = section.unpack_from(data, entry - section.size)
        count = min(length // 8, budget)
        budget -= count
        ids = read_at(offset, count * 8) if count and offset + count * 8 <= size else b""
        numbers = Struct(f"{header.order}{len(ids) // 8}Q").unpack_from(ids)
        yield parse_attr(data, header.order, numbers)


def _find_end(read_at: ReadAt, header: Header, size: int) -> None:
    """Find the features after the records, or record that they are missing."""
    data = header.data
    if not data.size or data.offset + data.size > size:
        # perf writes the size last: this one was killed, or the file is incomplete.
        header.data = ByteRange(data.offset, max(size - data.offset, 0))
        header.truncated = "its end is missing"
        return
    section = Struct(f"{header.order}QQ")
    present = [number for number in range(FEATURES) if header.flags & 1 << number]
    table = read_at(data.offset + data.size, section.size * len(present))
    for place, number in enumerate(present[: len(table) // section.size]):
        found = ByteRange(*section.unpack_from(table, place * section.size))
        if found.offset + found.size <= size:
            header.features[number] = found
    if len(header.features) < len(present):
        header.truncated = "some of what stands behind the records is missing"


def feature(read_at: ReadAt, header: Header, number: int) -> bytes:
    """Return the bytes of a small feature of a file; empty if it is missing or too large."""
    place = header.features.get(number)
    if place is None or place.size > _MAX_TEXT:
        return b""
    return read_at(place.offset, place.size)


def text(data: bytes, order: str) -> bytes:
    """Return the string of a feature that consists of one."""
    if len(data) < 4:
        return b""
    (size,) = Struct(f"{order}I").unpack_from(data)
    return data[4 : 4 + size].partition(b"\0")[0]


def clock(data: bytes, order: str) -> Clock | None:
    """Decode the feature `CLOCK_DATA`."""
    form = Struct(f"{order}IIQQ")
    if len(data) < form.size:
        return None
    version, clockid, wall, event = form.unpack_from(data)
    return Clock(clockid, wall, event) if version == 1 else None


def times(data: bytes, order: str) -> tuple[int, int] | None:
    """Decode the feature `SAMPLE_TIME`: the times of the first and the last sample.

    Returns None if it is missing: `perf record --no-buildid` reads no samples, and writes zeros.
    """
    form = Struct(f"{order}QQ")
    if len(data) < form.size:
        return None
    first, last = form.unpack_from(data)
    return (first, last) if 0 < first <= last else None


def build_id_table(read_at: ReadAt, header: Header) -> Iterator[BuildIdEntry]:
    """Yield the entries of the feature `BUILD_ID`, which may be many."""
    place = header.features.get(BUILD_ID)
    if place is None:
        return
    form = Struct(f"{header.order}IHH")
    at, end = place.offset, place.offset + place.size
    buffer = b""
    while at + form.size <= end:
        if len(buffer) < form.size or len(buffer) < form.unpack_from(buffer)[2]:
            buffer = read_at(at, min(_CHUNK, end - at))
            if len(buffer) < form.size:
                return
        _, misc, size = form.unpack_from(buffer)
        if size < form.size or size > len(buffer):
            return
        found = named(buffer, 0, size, misc, header.order)
        if found is not None:
            yield found
        buffer = buffer[size:]
        at += size


def named(data: bytes, at: int, size: int, misc: int, order: str) -> BuildIdEntry | None:
    """Decode struct perf_record_header_build_id at ``at``; None if it has no build ID."""
    name = at + 8 + 4 + _ID_FIELD
    if name >= at + size:
        return None
    (pid,) = Struct(f"{order}i").unpack_from(data, at + 8)
    raw = data[at + 12 : at + 12 + MAX_ID]
    if misc & _MISC_HAS_SIZE:
        raw = raw[: data[at + 12 + MAX_ID]]
    elif not any(raw[16:]):
        # Before there was a size field, shorter build IDs (16 bytes, MD5) were padded with zeros.
        raw = raw[:16]
    path = data[name : at + size].partition(b"\0")[0]
    if len(raw) < MIN_ID or not any(raw) or len(path) >= _PATH_MAX:
        return None
    return BuildIdEntry(path, raw, misc, pid)


def pack_named(entry: BuildIdEntry, order: str) -> bytes:
    """The inverse of `named`, as a record of its own."""
    fixed = 8 + 4 + _ID_FIELD
    size = fixed + len(entry.name) + 1
    size += -size % 8
    head = Struct(f"{order}IHHi").pack(_RECORD, entry.misc | _MISC_HAS_SIZE, size, entry.pid)
    build_id = entry.build_id.ljust(MAX_ID, b"\0") + bytes((len(entry.build_id), 0, 0, 0))
    return (head + build_id + entry.name).ljust(size, b"\0")


# --- headers written anew ------------------------------------------------------------------------
#
# Bytes before the records stay as they are, but for sizes and flags; features are laid out again.

_SECTION: Final = 16
_DATA_SIZE_AT: Final = 48
_FLAGS_AT: Final = 72


def require_usual(header: Header) -> None:
    """Raise `UsageError` unless all descriptions of events precede the records."""
    begin = header.data.offset
    places = [header.attr_table, header.event_types]
    if any(place.size and place.offset + place.size > begin for place in places):
        raise UsageError("has its events behind its records, which perf does not write")


def beginning(original: bytes, header: Header, data_size: int, features: Iterable[int]) -> bytes:
    """Return the first `HEADER_SIZE` bytes, for ``data_size`` bytes of records and
    these features.
    """
    order = header.order
    flags = sum(1 << number for number in features)
    words = [flags >> 64 * number & (1 << 64) - 1 for number in range(4)]
    changed = bytearray(original)
    Struct(f"{order}Q").pack_into(changed, _DATA_SIZE_AT, data_size)
    Struct(f"{order}4Q").pack_into(changed, _FLAGS_AT, *words)
    return bytes(changed)


def section_table(header: Header, start: int, sizes: Sequence[int]) -> bytes:
    """Return the table of features for the offset ``start``; the features follow it in the order of
    their numbers.
    """
    form = Struct(f"{header.order}QQ")
    at = start + _SECTION * len(sizes)
    table = b""
    for size in sizes:
        table += form.pack(at, size)
        at += size
    return table


def build_id_feature(entries: Iterable[BuildIdEntry], order: str) -> bytes:
    """Return the feature `BUILD_ID`."""
    return b"".join(pack_named(entry, order) for entry in entries)


def moved_traces(data: bytes, order: str, old: Sequence[int], new: Sequence[int]) -> bytes:
    """Return the feature `AUXTRACE`, the places of records with traces, after they have moved.

    ``old`` is in ascending order; ``new`` has the new place of each. Entries for other places are
    left out. Source: auxtrace_index__write in tools/perf/util/auxtrace.c.
    """
    word, entry = Struct(f"{order}Q"), Struct(f"{order}QQ")
    kept = []
    for at in range(word.size, len(data) - entry.size + 1, entry.size):
        offset, size = entry.unpack_from(data, at)
        number = bisect_left(old, offset)
        if number < len(old) and old[number] == offset:
            kept.append(entry.pack(new[number], size))
    return word.pack(len(kept)) + b"".join(kept)


NOT_KEPT: Final = frozenset((COMPRESSED, DIR_FORMAT))
"""Features that describe how the records were stored."""
