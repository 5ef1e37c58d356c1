# SPDX-License-Identifier: Apache-2.0
"""The headers of a profile written anew, around records that have changed.

What stands before the records stays as it is, byte by byte, but for the sizes and flags in it. What
stands behind them is laid out again.
"""

from __future__ import annotations

from bisect import bisect_left
from struct import Struct
from typing import TYPE_CHECKING, Final

from buildidfs.errors import UsageError
from buildidfs.formats.perf import headers
from buildidfs.formats.perf.headers import pack_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from buildidfs.formats.perf.headers import Header, Named

_SECTION: Final = 16
_DATA_SIZE_AT: Final = 48
_FLAGS_AT: Final = 72


def require_usual(header: Header) -> None:
    """Raise `UsageError` unless all that describes the events stands before the records."""
    begin = header.data.offset
    places = [header.attr_table, header.event_types]
    if any(place.size and place.offset + place.size > begin for place in places):
        raise UsageError("has its events behind its records, which perf does not write")


def beginning(original: bytes, header: Header, data_size: int, features: Iterable[int]) -> bytes:
    """The first `perfdata.HEADER_SIZE` bytes, for so many bytes of records and these features."""
    order = header.order
    flags = sum(1 << number for number in features)
    words = [flags >> 64 * number & (1 << 64) - 1 for number in range(4)]
    changed = bytearray(original)
    Struct(f"{order}Q").pack_into(changed, _DATA_SIZE_AT, data_size)
    Struct(f"{order}4Q").pack_into(changed, _FLAGS_AT, *words)
    return bytes(changed)


def section_table(header: Header, start: int, sizes: Sequence[int]) -> bytes:
    """The table of features at ``start``, behind which they stand, in order of their numbers."""
    form = Struct(f"{header.order}QQ")
    at = start + _SECTION * len(sizes)
    table = b""
    for size in sizes:
        table += form.pack(at, size)
        at += size
    return table


def build_id_feature(entries: Iterable[Named], order: str) -> bytes:
    """The feature `perfdata.BUILD_ID`."""
    return b"".join(pack_named(entry, order) for entry in entries)


def moved_traces(data: bytes, order: str, old: Sequence[int], new: Sequence[int]) -> bytes:
    """The feature `perfdata.AUXTRACE`: where records with traces are, after they have moved.

    ``old`` is in ascending order; ``new`` is where each of them is now. Entries for others are
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


NOT_KEPT: Final = frozenset((headers.COMPRESSED, headers.DIR_FORMAT))
"""Features that speak of how the records were stored."""
