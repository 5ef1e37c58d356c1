# SPDX-License-Identifier: Apache-2.0
"""``.gopclntab``: the functions of a Go program, with their files and lines.

The Go runtime needs this table for stack traces, so a stripped program keeps it. Its layout has
four versions, of Go 1.2, 1.16, 1.18 and 1.20; Go 1.20 to 1.27 write the last one. No input raises,
except for errors of ``read_at``, and the work is bounded by `TABLE_MAX`.

Source: golang.org/s/go12symtab; debug/gosym/pclntab.go, runtime/symtab.go and
cmd/link/internal/ld/pcln.go of Go 1.19 and 1.27.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from buildidfs.formats.elf.header import (
    PF_X,
    FileBytes,
    ReadAt,
    Segment,
    is_loaded,
    loaded,
)
from buildidfs.formats.elf.sections import Sections

TABLE_MAX: Final = 256 << 20
"""The largest size of a table in bytes. The table of kubectl 1.31 has 18 MB, that of CockroachDB
about 70 MB.
"""

SECTIONS: Final = (b".gopclntab", b".data.rel.ro.gopclntab")
"""The names of the section: the second is that of position-independent programs."""

FUNCTIONS_MAX: Final = 1 << 22

GO_1_2, GO_1_16, GO_1_18 = range(3)
"""Layouts. Go 1.20 has the layout of 1.18 with another magic number."""

_MAGICS: Final = {
    0xFFFFFFFB: GO_1_2,
    0xFFFFFFFA: GO_1_16,
    0xFFFFFFF0: GO_1_18,
    0xFFFFFFF1: GO_1_18,
}
_HEADER: Final = re.compile(
    rb"(?:[\xfb\xfa\xf0\xf1]\xff\xff\xff|\xff\xff\xff[\xfb\xfa\xf0\xf1])"
    rb"\0\0[\x01\x02\x04][\x04\x08]"
)
_HEADER_BYTES: Final = 8 + 8 * 8

# The most bytes of a file that a search reads, and the most candidates that it examines.
_SEARCHED_BYTES: Final = 1 << 30
_CANDIDATES: Final = 64
_SEGMENTS_MAX: Final = 256
_CHUNK: Final = 1 << 20
# Records that are out of order are read at most this many times.
_READS_PER_CHUNK: Final = 4
_ALIGN: Final = 4

_NO_OFFSET: Final = 0xFFFFFFFF


class TableCandidate(NamedTuple):
    """A possible place of the table: ``size`` bytes at ``offset`` of the file, loaded at
    ``address``.
    """

    offset: int
    address: int
    size: int


class GoFunction(NamedTuple):
    """One function. ``room`` is the distance to the next one, in bytes.

    The other fields are the offset of its name in `GoTable.names`, the offsets of its tables of
    files and lines in `GoTable.values` (0 for none), and the index in `GoTable.units` at which its
    file numbers start.
    """

    entry: int
    room: int
    name: int
    files: int
    lines: int
    unit: int


class _Part:
    """The ``size`` bytes at ``offset`` of a file, at most `TABLE_MAX`."""

    def __init__(self, read_at: ReadAt, offset: int, size: int) -> None:
        self._read_at = read_at
        self._offset = offset
        self.size = max(min(size, TABLE_MAX), 0)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` to ``end``; fewer if the part or the file ends before."""
        end = min(end, self.size)
        return self._read_at(self._offset + start, end - start) if start < end else b""


class GoTable:
    """A table with a valid header.

    ``names`` has the names of functions, ``values`` the tables of files and lines; in the layout of
    Go 1.2, both are the whole table. ``quantum`` is the least number of bytes of an instruction,
    ``size`` the total size.
    """

    def __init__(self, part: _Part, header: _Header, rows: Sequence[int], text: int) -> None:
        self.quantum = header.quantum
        self.version = header.version
        self.size = part.size
        self._header = header
        self._part = part
        self._rows = rows
        self._text = text if header.version == GO_1_18 else 0
        offsets = header.offsets
        if header.version == GO_1_2:  # this version has no separate parts
            self.names = self.values = self._paths = part.read(0, part.size)
        else:
            self.names, self.values, self._paths = (
                part.read(start, min((each for each in offsets if each > start), default=part.size))
                for start in (offsets.names, offsets.values, offsets.files)
            )
        self.units = self._units()

    def walk(self) -> Iterator[GoFunction]:
        """Yield the functions in the order of their addresses, up to the first that is out of
        order.

        Their records are read a megabyte at a time, because most tables have them in the same
        order.
        """
        header, rows = self._header, self._rows
        record = Struct(header.order + f"{header.field}xI8xIII4xI")
        short = Struct(header.order + f"{header.field}xI8xIII")
        form = short if header.version == GO_1_2 else record
        text, records, size = self._text, header.offsets.records, form.size
        window, start, last = b"", 0, -1
        reads = _READS_PER_CHUNK * (1 + self.size // _CHUNK)
        entry = text + rows[0]
        for at, following in zip(rows[1::2], rows[2::2], strict=True):
            following += text
            if following < entry:
                return
            at += records
            if not start <= at <= last:
                window = self._part.read(at, at + _CHUNK)
                start, last = at, at + len(window) - size
                reads -= 1
                if not reads:
                    return
            if at <= last:
                name, _, files, lines, *unit = form.unpack_from(window, at - start)
                yield GoFunction(
                    entry, following - entry, name, files, lines, unit[0] if unit else 0
                )
            entry = following

    def file(self, offset: int) -> bytes:
        """Return the path for an offset from ``units``; empty if there is none."""
        if offset == _NO_OFFSET:
            return b""
        end = self._paths.find(b"\0", offset, offset + _PATH_MAX)
        return self._paths[offset:end] if end >= 0 else b""

    def _units(self) -> Sequence[int]:
        """Return the offsets of file names by the numbers in the tables of files, see
        `GoFunction.unit`.
        """
        header = self._header
        start, end = header.offsets.units, header.offsets.files
        if header.version == GO_1_2:
            end = start + 4 * header.unit_files
        data = self._part.read(start, end)
        return _words(data[: len(data) & ~3], "I", header.is_swapped)


_PATH_MAX: Final = 4096


class _Offsets(NamedTuple):
    names: int
    units: int
    files: int
    values: int
    records: int


class _Header(NamedTuple):
    version: int
    order: str
    quantum: int
    word: int
    functions: int
    unit_files: int
    text: int
    offsets: _Offsets

    @property
    def is_swapped(self) -> bool:
        """True if the byte order is not that of this machine."""
        return (self.order == "<") != (sys.byteorder == "little")

    @property
    def field(self) -> int:
        """Return the size of a field of the table of functions."""
        return 4 if self.version == GO_1_18 else self.word

    @property
    def table_bytes(self) -> int:
        return (2 * self.functions + 1) * self.field

    def rows(self, part: _Part) -> Sequence[int] | None:
        """Return the table of functions: entry and place of the record alternate; the last item is
        the end.
        """
        start = 8 + self.word if self.version == GO_1_2 else self.offsets.records
        found = part.read(start, start + self.table_bytes)
        if len(found) < self.table_bytes or not self.functions:
            return None
        return _words(found, "I" if self.field == 4 else "Q", self.is_swapped)


def _words(data: bytes, code: str, is_swapped: bool) -> Sequence[int]:
    words = array(code)
    words.frombytes(data)
    if is_swapped:
        words.byteswap()
    return words


def _header(data: bytes, size: int) -> _Header | None:
    """Return the header of a table of ``size`` bytes that begins with ``data``.

    Returns None if the header is invalid, or has an offset outside of the table.
    """
    if len(data) < _HEADER_BYTES or not _HEADER.match(data):
        return None
    order = "<" if data[1] == 0xFF and data[0] != 0xFF else ">"
    (magic,) = Struct(order + "I").unpack_from(data)
    version, quantum, word = _MAGICS[magic], data[6], data[7]
    fields = Struct(order + ("8I" if word == 4 else "8Q")).unpack_from(data, 8)
    functions, files, text = fields[0], 0, 0
    if version == GO_1_2:
        offsets = _Offsets(0, 0, 0, 0, 0)
    else:
        files = fields[1]
        starts = fields[2:7]
        if version == GO_1_18:
            text, starts = fields[2], fields[3:8]
        offsets = _Offsets(*starts)
    found = _Header(version, order, quantum, word, functions, files, text, offsets)
    if not 0 < functions <= FUNCTIONS_MAX or max(offsets) >= size:
        return None
    if version != GO_1_2 and not min(offsets) >= _HEADER_BYTES // 2:
        return None
    return found if found.table_bytes < size else None


# --- the place of the table ----------------------------------------------------------------------


def find(read_at: ReadAt, size: int) -> GoTable | None:
    """Return the table of an ELF file of ``size`` bytes; None if it has none, or an invalid one."""
    sections = Sections(read_at, size)
    read_at = FileBytes(b"", read_at, size).read
    loads = loaded(read_at, size)[:_SEGMENTS_MAX]
    for place in _places(read_at, size, sections, loads):
        part = _Part(read_at, place.offset, place.size)
        header = _header(part.read(0, _HEADER_BYTES), part.size)
        if header is None or (header := _with_files(header, part)) is None:
            continue
        rows = header.rows(part)
        if rows is not None:
            text = _text(read_at, size, sections, loads, place, header, rows)
            return GoTable(part, header, rows, text)
    return None


def _places(
    read_at: ReadAt, size: int, sections: Sections, loads: list[Segment]
) -> Iterator[TableCandidate]:
    """Yield the named section, or places in the segments that look like the start of a table."""
    named = sections.named(*SECTIONS)
    if named is not None:
        yield TableCandidate(
            named.offset, named.address, max(0, min(named.size, size - named.offset))
        )
        return
    left, candidates = min(_SEARCHED_BYTES, 2 * size), _CANDIDATES
    for load in sorted(loads, key=lambda each: bool(each.flags & PF_X)):
        end = min(load.offset + load.size, size, load.offset + left)
        left -= max(0, end - load.offset)
        for at in range(load.offset, end, _CHUNK):
            # Chunks overlap, because the start of a table may lie across two of them.
            data = read_at(at, min(_CHUNK + _ALIGN, end - at))
            for found in _HEADER.finditer(data):
                start = at + found.start()
                if (start - load.offset) % _ALIGN or found.start() >= _CHUNK:
                    continue
                yield TableCandidate(start, load.address + start - load.offset, end - start)
                candidates -= 1
                if not candidates:
                    return


def _with_files(header: _Header, part: _Part) -> _Header | None:
    """Return the header. In the layout of Go 1.2, read the table of files, which follows the
    functions, and add it to the header.
    """
    if header.version != GO_1_2:
        return header
    number = Struct(header.order + "I")

    def number_at(at: int) -> int | None:
        data = part.read(at, at + number.size)
        return number.unpack(data)[0] if len(data) == number.size else None

    units = number_at(8 + header.word + header.table_bytes)
    files = None if units is None else number_at(units)
    if units is None or files is None:
        return None
    return header._replace(unit_files=files, offsets=header.offsets._replace(units=units))


# --- the place of the functions ------------------------------------------------------------------

# Fields of struct moduledata (runtime/symtab.go): number of words from its start.
_MIN_PC: Final = 20
_TEXT: Final = 22
_OCCURRENCES: Final = 256
_SHT_RELA: Final = 4
_RELOCATIONS_MAX: Final = 64 << 20
_DATA_MAX: Final = 64 << 20
_WRITABLE: Final = 2


def _text(
    read_at: ReadAt,
    size: int,
    sections: Sections,
    loads: list[Segment],
    place: TableCandidate,
    header: _Header,
    rows: Sequence[int],
) -> int:
    """Return the base address of the addresses of functions, in the layout of Go 1.18.

    The base address is in the header until Go 1.25, and in the module data of the runtime since
    then. In a position-independent program, relocations fill either place. ``.text`` begins at this
    address unless C code precedes it.
    """
    if header.version != GO_1_18:
        return 0
    code = [load for load in loads if load.flags & PF_X]
    span = rows[-1]

    def is_code(text: int) -> bool:
        return is_loaded(code, text + rows[0]) and is_loaded(code, text + max(span - 1, 0))

    if header.text and is_code(header.text):
        return header.text
    memory = _Memory(read_at, size, sections, loads, header)
    word = header.word
    own = memory.relocated(place.address + 8 + 2 * word)
    if own and is_code(own):
        return own
    for module in memory.pointers_to(place.address):
        text = memory.word_at(module + _TEXT * word)
        if is_code(text) and memory.word_at(module + _MIN_PC * word) == text + rows[0]:
            return text
    named = sections.named(b".text")
    text = named.address if named is not None else min((each.address for each in code), default=0)
    return text if is_code(text) else 0


class _Memory:
    """The words of the program after relocation, if it is loaded at the addresses in its
    headers.
    """

    def __init__(
        self,
        read_at: ReadAt,
        size: int,
        sections: Sections,
        loads: list[Segment],
        header: _Header,
    ) -> None:
        self._read_at = read_at
        self._size = size
        self._loads = loads
        self._word = Struct(header.order + ("I" if header.word == 4 else "Q"))
        kind = next(
            (each for each in sections.headers if each.type == _SHT_RELA and each.size), None
        )
        self._relocations = sections.contents(kind, _RELOCATIONS_MAX)

    def word_at(self, address: int) -> int:
        """Return the word at an address; 0 if nothing is loaded there."""
        relocated = self.relocated(address)
        if relocated:
            return relocated
        for load in self._loads:
            if load.address <= address <= load.address + load.size - self._word.size:
                data = self._read_at(load.offset + address - load.address, self._word.size)
                return int(self._word.unpack(data)[0]) if len(data) == self._word.size else 0
        return 0

    def relocated(self, address: int) -> int:
        """Return the addend of the relocation of the word at an address; 0 if there is none."""
        for at in self._rows(address, 0):
            return int(self._word.unpack_from(self._relocations, at + 2 * self._word.size)[0])
        return 0

    def pointers_to(self, address: int) -> Iterator[int]:
        """Yield the places of a few words of the program that hold an address."""
        for at in self._rows(address, 2):
            yield self._word.unpack_from(self._relocations, at)[0]
        if address >> 8 * self._word.size:
            return
        wanted = self._word.pack(address)
        left = _DATA_MAX
        for load in self._loads:
            if load.flags & _WRITABLE:
                data = self._read_at(load.offset, min(load.size, left))
                left -= len(data)
                for at in _occurrences(data, wanted):
                    if not at % self._word.size:
                        yield load.address + at

    def _rows(self, value: int, field: int) -> Iterator[int]:
        """Yield the relocations that have a value in a field (0: the place, 2: the addend)."""
        if not self._relocations or value >> 8 * self._word.size:
            return
        size, end = self._word.size, len(self._relocations)
        for at in _occurrences(self._relocations, self._word.pack(value)):
            start = at - field * size
            if not start % (3 * size) and start + 3 * size <= end:
                yield start


def _occurrences(data: bytes, wanted: bytes) -> Iterator[int]:
    """Yield the first few offsets at which ``wanted`` occurs in ``data``."""
    at = data.find(wanted)
    for _ in range(_OCCURRENCES):
        if at < 0:
            return
        yield at
        at = data.find(wanted, at + 1)
