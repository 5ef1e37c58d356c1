# SPDX-License-Identifier: Apache-2.0
"""Rows of an SQLite database, by number and by an index of one text.

The databases come from containers, so they are not read with a library made for trusted files. A
write-ahead log beside the file is not read. Source: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Value: TypeAlias = int | bytes | None
"""The value of a column: an integer, or the bytes of a text or blob; None for floating point."""

_MAGIC: Final = b"SQLite format 3\0"
_HEAD: Final = 100
_UTF8: Final = 1
_SCHEMA: Final = 1  # the page of the table of tables
_INDEX_INTERIOR, _TABLE_INTERIOR, _INDEX_LEAF, _TABLE_LEAF = 2, 5, 10, 13
_INTERIOR: Final = (_INDEX_INTERIOR, _TABLE_INTERIOR)
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_FLOAT, _ZERO, _ONE, _FIRST_BYTES = 7, 8, 9, 12

_DEPTH: Final = 20
_MOST_BYTES: Final = 128 << 20  # for one query, read or assembled
_RECORD_MAX: Final = 32 << 20
_COLUMNS: Final = 64
_MATCHES: Final = 4096


class Unusable(Exception):
    """The file is not a database, is damaged, or a query would exceed a limit."""


class _Page(NamedTuple):
    kind: int
    data: bytes
    cells: tuple[int, ...]
    right: int  # the last child of an interior page


class Database:
    """A database; ``read(size, offset)`` returns bytes of its file. All methods raise `Unusable`,
    and errors of ``read``.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._left = _MOST_BYTES
        head = read(_HEAD, 0)
        if len(head) != _HEAD or not head.startswith(_MAGIC):
            raise Unusable("not an SQLite database")
        (size,) = _U16.unpack_from(head, 16)
        self._size = 65536 if size == 1 else size
        self._usable = self._size - head[20]
        (encoding,) = _U32.unpack_from(head, 56)
        if self._size < 512 or self._size & (self._size - 1) or self._usable < 480:
            raise Unusable("a page size that no database has")
        if encoding != _UTF8:
            raise Unusable("its text is not UTF-8")

    def roots(self) -> dict[tuple[bytes, bytes], int]:
        """Return the first pages of tables and indexes, by type (``table``, ``index``) and name."""
        self._left = _MOST_BYTES
        found: dict[tuple[bytes, bytes], int] = {}
        for row in self._rows(_SCHEMA, _DEPTH):
            if len(row) >= 4:
                kind, name, _, root = row[:4]
                if isinstance(kind, bytes) and isinstance(name, bytes) and isinstance(root, int):
                    found[kind, name] = root
        return found

    def row(self, root: int, number: int) -> list[Value]:
        """Return the row of a table with this number; empty if there is none."""
        self._left = _MOST_BYTES
        page = self._page(root)
        for _ in range(_DEPTH):
            if page.kind == _TABLE_LEAF:
                return self._row_in(page, number)
            if page.kind != _TABLE_INTERIOR:
                break
            page = self._page(self._child(page, number))
        raise Unusable("a table that is no tree")

    def matches(self, root: int, text: bytes) -> list[int]:
        """Return the numbers of the rows that have ``text`` in the column of an index."""
        self._left = _MOST_BYTES
        found: list[int] = []
        self._search(root, text, found, _DEPTH)
        return found

    # --- trees -------------------------------------------------------------------------------

    def _rows(self, number: int, depth: int) -> Iterator[list[Value]]:
        page = self._page(number)
        if page.kind == _TABLE_LEAF:
            for at in page.cells:
                size, at = _varint(page.data, at)
                _, at = _varint(page.data, at)
                yield _record(self._payload(page, size, at))
        elif page.kind == _TABLE_INTERIOR and depth:
            for at in page.cells:
                yield from self._rows(_u32(page.data, at), depth - 1)
            yield from self._rows(page.right, depth - 1)
        else:
            raise Unusable("a table that is no tree")

    def _child(self, page: _Page, number: int) -> int:
        def last(cell: int) -> int:
            return _varint(page.data, cell + 4)[0]

        at = bisect_left(page.cells, number, key=last)
        return _u32(page.data, page.cells[at]) if at < len(page.cells) else page.right

    def _row_in(self, page: _Page, number: int) -> list[Value]:
        def identity(cell: int) -> int:
            return _varint(page.data, _varint(page.data, cell)[1])[0]

        index = bisect_left(page.cells, number, key=identity)
        if index == len(page.cells) or identity(page.cells[index]) != number:
            return []
        size, at = _varint(page.data, page.cells[index])
        return _record(self._payload(page, size, _varint(page.data, at)[1]))

    def _search(self, number: int, text: bytes, found: list[int], depth: int) -> None:
        page = self._page(number)
        if page.kind not in (_INDEX_LEAF, _INDEX_INTERIOR) or not depth:
            raise Unusable("an index that is no tree")
        cells = range(len(page.cells))
        low = bisect_left(cells, text, key=lambda cell: self._entry(page, cell)[0])
        for cell in range(low, len(page.cells) + 1):
            is_last = cell == len(page.cells)
            if page.kind == _INDEX_INTERIOR:
                child = page.right if is_last else _u32(page.data, page.cells[cell])
                self._search(child, text, found, depth - 1)
            if is_last:
                return
            key, row = self._entry(page, cell)
            if key != text or len(found) >= _MATCHES:
                return
            found.append(row)

    def _entry(self, page: _Page, cell: int) -> tuple[bytes, int]:
        at = page.cells[cell] + (4 if page.kind == _INDEX_INTERIOR else 0)
        size, at = _varint(page.data, at)
        row = _record(self._payload(page, size, at))
        if len(row) != 2 or not isinstance(row[0], bytes) or not isinstance(row[1], int):
            raise Unusable("an index of something else than a text")
        return row[0], row[1]

    # --- pages -------------------------------------------------------------------------------

    def _page(self, number: int) -> _Page:
        data = self._bytes_of(number)
        start = _HEAD if number == 1 else 0
        kind = data[start]
        (count,) = _U16.unpack_from(data, start + 3)
        first = start + (12 if kind in _INTERIOR else 8)
        if first + 2 * count > len(data):
            raise Unusable("more cells than a page can have")
        cells = struct.unpack_from(f">{count}H", data, first)
        return _Page(kind, data, cells, _u32(data, start + 8) if kind in _INTERIOR else 0)

    def _bytes_of(self, number: int) -> bytes:
        self._spend(self._size)
        if number < 1:
            raise Unusable("no such page")
        data = self._read(self._size, (number - 1) * self._size)
        if len(data) != self._size:
            raise Unusable("it ends too early")
        return data

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise Unusable("more bytes than any question needs")

    def _payload(self, page: _Page, size: int, at: int) -> bytes:
        """Return the bytes of a record, a part of which may be on overflow pages."""
        if size > _RECORD_MAX:
            raise Unusable("a record that is too large")
        self._spend(max(size, 0))
        room = self._usable
        least = (room - 12) * 32 // 255 - 23
        most = room - 35 if page.kind == _TABLE_LEAF else (room - 12) * 64 // 255 - 23
        local = size
        if size > most:
            local = least + (size - least) % (room - 4)
            local = local if local <= most else least
        parts = [page.data[at : at + local]]
        left = size - local
        following = _u32(page.data, at + local) if left else 0
        while left > 0:
            data = self._bytes_of(following)
            parts.append(data[4 : min(4 + left, room)])
            left -= len(parts[-1])
            following = _u32(data, 0)
        return b"".join(parts)


def _u32(data: bytes, at: int) -> int:
    if at + 4 > len(data):
        raise Unusable("a cell outside of its page")
    found: int = _U32.unpack_from(data, at)[0]
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of one to nine bytes, and the offset of its end."""
    value = 0
    for number in range(9):
        if at >= len(data):
            raise Unusable("a number outside of its page")
        byte = data[at]
        at += 1
        if number == 8:
            value = value << 8 | byte
            break
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value - (1 << 64) if value >> 63 else value, at


def _record(data: bytes) -> list[Value]:
    """Return the columns of a record."""
    end, at = _varint(data, 0)
    types: list[int] = []
    while at < end and len(types) < _COLUMNS:
        kind, at = _varint(data, at)
        types.append(kind)
    found: list[Value] = []
    at = max(end, at)
    for kind in types:
        value: Value = None
        size = _INTEGERS.get(kind, 0)
        if size:
            value = int.from_bytes(data[at : at + size], "big", signed=True)
        elif kind == _FLOAT:
            size = 8
        elif kind in (_ZERO, _ONE):
            value = kind - _ZERO
        elif kind >= _FIRST_BYTES:
            size = (kind - _FIRST_BYTES) // 2
            value = data[at : at + size]
        found.append(value)
        at += size
    return found
