# SPDX-License-Identifier: Apache-2.0
"""The names of generated code: maps for perf, and dumps of JIT compilers.

A map is text, one function per line: address and size in hexadecimal, then the name. A dump
(``jit-PID.dump``) has a record for each function, in the byte order of its maker. `JitDump`
converts the records into lines of a map, and skips the code. Compilers append to both files, and
reuse addresses: if two functions have one address, the later one counts. Source:
tools/perf/Documentation/jit-interface.txt and jitdump-specification.txt.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from struct import Struct
from typing import Final, NamedTuple

MAX_SYMBOLS: Final = 1 << 19
MAX_NAME: Final = 1024

_LINE: Final = re.compile(
    rb"^(?:0x)?([0-9a-fA-F]{1,16}) (?:0x)?([0-9a-fA-F]{1,16}) ([^\n\0]+)$", re.MULTILINE
)
_USER_END: Final = 1 << 63


class JitFunction(NamedTuple):
    """A function: its address, its size in bytes, and its name."""

    start: int
    size: int
    name: bytes


def symbols(text: bytes) -> list[JitFunction]:
    """Return the functions of a map, by ascending address, without overlaps.

    If functions overlap, each byte belongs to the last of them; a function that is covered in part
    has a row for each remaining part. Lines of another form are skipped, names are cut at
    `MAX_NAME` bytes. Of a map with more than `MAX_SYMBOLS` lines, the last ones are used.
    """
    latest: dict[tuple[int, int], tuple[int, bytes]] = {}
    for number, match in enumerate(_LINE.finditer(text)):
        start, size = int(match[1], 16), int(match[2], 16)
        if not size or start + size > _USER_END:
            continue
        latest.pop((start, size), None)
        latest[start, size] = number, match[3][:MAX_NAME]
        if len(latest) > MAX_SYMBOLS:
            del latest[next(iter(latest))]
    rows = sorted((start, -number, size, name) for (start, size), (number, name) in latest.items())
    return list(_disjoint(rows))


_Row = tuple[int, int, int, bytes]  # start, negative number, size, name


def _disjoint(rows: list[_Row]) -> Iterator[JitFunction]:
    """Yield the functions of ``rows``; those that overlap are cut."""
    first = 0
    while first < len(rows):
        end = rows[first][0] + rows[first][2]
        last = first + 1
        while last < len(rows) and rows[last][0] < end:
            end = max(end, rows[last][0] + rows[last][2])
            last += 1
        if last == first + 1:
            start, _, size, name = rows[first]
            yield JitFunction(start, size, name)
        else:
            yield from _cut(rows[first:last])
        first = last


def _cut(rows: list[_Row]) -> Iterator[JitFunction]:
    """Yield the functions without overlaps: a byte that several functions cover belongs to the one
    that was added last.
    """
    edges = sorted({edge for start, _, size, _ in rows for edge in (start, start + size)})
    active: list[tuple[int, int, bytes]] = []  # negative number, end, name
    at = 0
    begun: tuple[int, int, bytes] | None = None
    since = 0
    for edge in edges:
        while at < len(rows) and rows[at][0] == edge:
            start, number, size, name = rows[at]
            heapq.heappush(active, (number, start + size, name))
            at += 1
        while active and active[0][1] <= edge:
            heapq.heappop(active)
        top = active[0] if active else None
        if top != begun:
            if begun is not None:
                yield JitFunction(since, edge - since, begun[2])
            begun, since = top, edge


def line(symbol: JitFunction) -> bytes:
    """Return the line of a map for a function; a name of several lines becomes one line."""
    name = symbol.name[:MAX_NAME].replace(b"\n", b" ").replace(b"\0", b"")
    return b"%x %x %b\n" % (symbol.start, symbol.size, name)


# --- dumps ---------------------------------------------------------------------------------------

ReadAt = Callable[[int, int], bytes]

_MAGIC: Final = 0x4A695444
_HEADER: Final = 40
_RECORD: Final = 16
_LOAD: Final = 0
_MOVE: Final = 1
_LOAD_FIXED: Final = 40
_MOVE_FIXED: Final = 48
_MOST_INDEXED: Final = 1 << 17
_MOST_RECORDS: Final = 1 << 15
_LOAD_READ: Final = _LOAD_FIXED + MAX_NAME


class JitDump:
    """Reads a dump, from the position at which the last call ended.

    ``at`` is the offset of the first unread record, ``records`` the number of records read.
    """

    def __init__(self) -> None:
        self.at = self.records = 0
        self.is_malformed = False
        self._order = "<"
        self._names: dict[int, bytes] = {}

    def lines(self, read_at: ReadAt, size: int, most: int) -> Iterator[bytes]:
        """Yield the functions in the records up to ``size`` as lines of a map.

        Stops after the line that reaches ``most`` bytes in total, after about ten thousand records,
        and at an incomplete record. ``is_malformed`` is set at an invalid record: nothing after it
        can be read.
        """
        if not self.at and not self._begin(read_at, size):
            return
        record = Struct(f"{self._order}II")
        total = 0
        for _ in range(_MOST_RECORDS):
            if self.at + _RECORD > size or total >= most:
                return
            head = read_at(self.at, _RECORD)
            if len(head) < _RECORD:
                return
            kind, length = record.unpack_from(head)
            if length < _RECORD:
                self.is_malformed = True
                return
            if self.at + length > size:
                return
            for symbol in self._symbols(read_at, kind, length):
                text = line(symbol)
                total += len(text)
                yield text
            self.at += length
            self.records += 1

    def _begin(self, read_at: ReadAt, size: int) -> bool:
        head = read_at(0, _HEADER)
        if len(head) < _HEADER:
            return False
        for order in "<>":
            magic, _, length = Struct(f"{order}III").unpack_from(head)
            if magic == _MAGIC and length >= _HEADER:
                self._order, self.at = order, length
                return True
        self.is_malformed = True
        return False

    def _symbols(self, read_at: ReadAt, kind: int, length: int) -> Iterable[JitFunction]:
        if kind == _LOAD and length > _RECORD + _LOAD_FIXED:
            body = read_at(self.at + _RECORD, min(length - _RECORD, _LOAD_READ))
            if len(body) <= _LOAD_FIXED:
                return
            _, _, _, address, size, index = Struct(f"{self._order}IIQQQQ").unpack_from(body)
            name = body[_LOAD_FIXED:].partition(b"\0")[0]
            if len(self._names) < _MOST_INDEXED:
                self._names[index] = name
            if name and size:
                yield JitFunction(address, size, name)
        elif kind == _MOVE and length >= _RECORD + _MOVE_FIXED:
            body = read_at(self.at + _RECORD, _MOVE_FIXED)
            if len(body) < _MOVE_FIXED:
                return
            _, _, _, _, address, size, index = Struct(f"{self._order}IIQQQQQ").unpack_from(body)
            moved = self._names.get(index)
            if moved and size:
                yield JitFunction(address, size, moved)
