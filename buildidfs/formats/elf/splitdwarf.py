# SPDX-License-Identifier: Apache-2.0
"""Split DWARF: references to debug information in ``.dwo`` files, or in a ``.dwp`` of them all.

The linked file has only skeleton units. Each skeleton has a DWO ID of 64 bits, which identifies the
complete unit that belongs to it, and the name of the file into which the compiler wrote the
complete unit. A package has an index of DWO IDs. DWARF 5, sections 3.1.2, 7.3.5 and 7.5.1.2, and,
for version 4, gcc.gnu.org/wiki/DebugFission, whose attributes are those beginning with DW_AT_GNU.

The numbers of units, abbreviations, attributes and bytes are bounded; no input raises.
"""

from __future__ import annotations

from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.header import SHF_COMPRESSED
from buildidfs.formats.elf.sections import Sections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import ReadAt

UNITS_MAX: Final = 4096
"""The most units that are read."""

# Declarations of attributes in all units together, which bounds the work for one file.
_WORK_MAX: Final = 1 << 16
_SECTION_MAX: Final = 8 << 20
_UNIT_BYTES: Final = 512  # for header and first entry of each unit: skeletons have about 50
_DECLARATIONS_MAX: Final = 64  # the first abbreviation of a skeleton is that of the unit
_ATTRIBUTES_MAX: Final = 64
_STRING_MAX: Final = 4096

_DW_UT_SKELETON: Final = 4
_DW_AT_COMP_DIR: Final = 0x1B
_DW_AT_STR_OFFSETS_BASE: Final = 0x72
_DW_AT_DWO_NAME: Final = (0x76, 0x2130)
_DW_AT_GNU_DWO_ID: Final = 0x2131

_ADDRESS: Final = -1
_OFFSET: Final = -2
_ULEB: Final = -3
# Forms by size, or by the encoding of their size; a form that no compiler uses in such a unit ends
# the reading.
_FORMS: Final = {
    0x01: _ADDRESS, 0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0D: _ULEB, 0x0E: _OFFSET,
    0x0F: _ULEB, 0x17: _OFFSET, 0x19: 0, 0x1A: _ULEB, 0x1B: _ULEB, 0x1E: 16, 0x1F: _OFFSET,
    0x20: 8, 0x21: 0, 0x22: _ULEB, 0x23: _ULEB, 0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4, 0x29: 1,
    0x2A: 2, 0x2B: 3, 0x2C: 4, 0x1F01: _ULEB, 0x1F02: _ULEB,
}  # fmt: skip
_STRING: Final = 0x08
_IMPLICIT_CONST: Final = 0x21
_STRP: Final = 0x0E
_LINE_STRP: Final = 0x1F
_INDEXED: Final = frozenset((0x1A, 0x25, 0x26, 0x27, 0x28, 0x1F02))

_INDEX_VERSIONS: Final = frozenset((2, 5))


class Skeleton(NamedTuple):
    """A unit whose debug information is in another file.

    ``name`` is the path of that file at compilation, relative to ``directory``; either may be
    empty.
    """

    dwo_id: int
    name: bytes
    directory: bytes


def skeletons(read_at: ReadAt, size: int, units: int = UNITS_MAX) -> Iterator[Skeleton]:
    """Yield the skeletons among the first ``units`` units in an ELF file of ``size`` bytes."""
    sections = Sections(read_at, size)
    info = sections.named(b".debug_info")
    if info is None or sections.named(b".debug_addr") is None:
        return
    if info.flags & SHF_COMPRESSED:
        plain = sections.contents(info, _SECTION_MAX)
        reader = _Reader(sections, lambda at, size: plain[at : at + size], len(plain))
        yield from reader.units(units)
    elif info.offset + info.size <= size:
        start, length = info.offset, info.size

        def within(at: int, size: int) -> bytes:
            return read_at(start + at, min(size, length - at))

        yield from _Reader(sections, within, length).units(units)


def packaged(read_at: ReadAt, size: int) -> frozenset[int]:
    """Return the DWO IDs of the units in a ``.dwp`` file of ``size`` bytes; empty for any other
    file.
    """
    sections = Sections(read_at, size)
    index = sections.contents(sections.named(b".debug_cu_index"), _SECTION_MAX)
    if len(index) < 16:
        return frozenset()
    order = "<" if sections.little_endian else ">"
    half, word = Struct(order + "H"), Struct(order + "4I")
    version, _, _, slots = word.unpack_from(index)
    if version not in _INDEX_VERSIONS and half.unpack_from(index)[0] not in _INDEX_VERSIONS:
        return frozenset()
    slots = min(slots, (len(index) - 16) // 8)
    return frozenset(Struct(f"{order}{slots}Q").unpack_from(index, 16)) - {0}


class Malformed(Exception):
    """A unit is malformed. Only the decoders of DWARF raise and catch this."""


class Cursor:
    """Reads numbers from bytes. Raises `Malformed` at their end."""

    def __init__(self, data: bytes, little_endian: bool, at: int = 0) -> None:
        self.data = data
        self.at = at
        self._little = little_endian

    def number(self, size: int) -> int:
        """Return an unsigned number of ``size`` bytes."""
        start, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise Malformed
        return _number(self.data[start : self.at], self._little)

    def uleb(self) -> int:
        """Read an unsigned LEB128 number. Can also be used to skip a signed one."""
        value = 0
        for shift in range(0, 70, 7):
            byte = self.number(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
        raise Malformed

    def unit_length(self) -> tuple[int, int]:
        """Read the length of a unit; return it, and the size of offsets in the unit, 4 or 8."""
        length = self.number(4)
        return (self.number(8), 8) if length == 0xFFFFFFFF else (length, 4)

    def string(self) -> bytes:
        """Return the bytes up to a NUL."""
        end = self.data.find(b"\0", self.at)
        if end < 0:
            raise Malformed
        text = self.data[self.at : end]
        self.at = end + 1
        return text


def _number(data: bytes, little_endian: bool) -> int:
    return int.from_bytes(data, "little" if little_endian else "big")


class _Unit(NamedTuple):
    """The header of a unit; ``offsets`` is the size of offsets, 4 or 8."""

    version: int
    offsets: int
    addresses: int
    abbreviations: int
    dwo_id: int | None


class _Reader:
    def __init__(self, sections: Sections, info: ReadAt, size: int) -> None:
        self._info = info
        self._size = size
        self._left = _WORK_MAX
        self._little = sections.little_endian
        self._abbreviations = sections.contents(sections.named(b".debug_abbrev"), _SECTION_MAX)
        self._strings = sections.contents(sections.named(b".debug_str"), _SECTION_MAX)
        self._line_strings = sections.contents(sections.named(b".debug_line_str"), _SECTION_MAX)
        self._offsets = sections.contents(sections.named(b".debug_str_offsets"), _SECTION_MAX)

    def units(self, most: int) -> Iterator[Skeleton]:
        """Yield the skeletons among complete units."""
        at = 0
        for _ in range(most):
            head = self._info(at, _UNIT_BYTES) if at < self._size else b""
            cursor = Cursor(head, self._little)
            try:
                length, offsets = cursor.unit_length()
            except Malformed:
                return
            at += cursor.at + length
            skeleton = None
            with suppress(Malformed):
                skeleton = self._skeleton(cursor, offsets)
            if skeleton is not None:
                yield skeleton

    def _skeleton(self, cursor: Cursor, offsets: int) -> Skeleton | None:
        version, dwo_id = cursor.number(2), None
        if version == 5:
            kind, addresses = cursor.number(1), cursor.number(1)
            abbreviations = cursor.number(offsets)
            if kind != _DW_UT_SKELETON:
                return None
            dwo_id = cursor.number(8)
        elif version == 4:
            abbreviations, addresses = cursor.number(offsets), cursor.number(1)
        else:
            return None
        unit = _Unit(version, offsets, addresses, abbreviations, dwo_id)
        return self._entry(cursor, unit)

    def _entry(self, cursor: Cursor, unit: _Unit) -> Skeleton | None:
        """Read the first entry of a unit."""
        numbers: dict[int, tuple[int, int]] = {}
        texts: dict[int, bytes] = {}
        for attribute, form in self._declaration(cursor.uleb(), unit.abbreviations):
            if form == _STRING:
                texts[attribute] = cursor.string()
            else:
                numbers[attribute] = form, self._value(cursor, form, unit)
        dwo_id = numbers.get(_DW_AT_GNU_DWO_ID, (0, unit.dwo_id))[1]
        if dwo_id is None:
            return None
        _, base = numbers.get(_DW_AT_STR_OFFSETS_BASE, (0, 0 if unit.version < 5 else 8))

        def text(*attributes: int) -> bytes:
            for each in attributes:
                if each in texts:
                    return texts[each]
                if each in numbers:
                    return self._text(*numbers[each], base, unit.offsets)
            return b""

        return Skeleton(dwo_id, text(*_DW_AT_DWO_NAME), text(_DW_AT_COMP_DIR))

    def _declaration(self, code: int, at: int) -> list[tuple[int, int]]:
        """Return attributes and forms of the abbreviation with that code."""
        cursor = Cursor(self._abbreviations, self._little, at)
        for _ in range(_DECLARATIONS_MAX):
            found = cursor.uleb()
            if not found:
                break
            cursor.uleb()
            cursor.number(1)
            pairs = []
            for _ in range(min(_ATTRIBUTES_MAX, self._left)):
                self._left -= 1
                pair = cursor.uleb(), cursor.uleb()
                if pair[1] == _IMPLICIT_CONST:
                    cursor.uleb()
                if pair == (0, 0):
                    break
                pairs.append(pair)
            else:
                break
            if found == code:
                return pairs
        raise Malformed

    def _value(self, cursor: Cursor, form: int, unit: _Unit) -> int:
        size = _FORMS.get(form)
        if size is None:
            raise Malformed
        if size == _ULEB:
            return cursor.uleb()
        return cursor.number({_ADDRESS: unit.addresses, _OFFSET: unit.offsets}.get(size, size))

    def _text(self, form: int, value: int, base: int, offsets: int) -> bytes:
        """Return the string to which an attribute's value refers; empty if there is none."""
        if form in _INDEXED:
            at = base + value * offsets
            form, value = _STRP, _number(self._offsets[at : at + offsets], self._little)
        table = {_STRP: self._strings, _LINE_STRP: self._line_strings}.get(form, b"")
        text, nul, _ = table[value : value + _STRING_MAX].partition(b"\0")
        return text if nul else b""
