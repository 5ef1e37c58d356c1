# SPDX-License-Identifier: Apache-2.0
"""The first entries of the units in ``.debug_info``, and numbers and strings of DWARF.

The first entry of a unit names its source file, the directory of the compilation, its line table,
and the file with the rest of a unit that is split. DWARF 5, sections 3.1 and 7.5.1; versions 2 to 5
are read.

If the debug information is split into ``.dwo`` files, the linked file has only skeleton units. Each
skeleton has a DWO ID of 64 bits, which identifies the complete unit that belongs to it, and the
name of the file into which the compiler wrote the complete unit. A package of these files
(``.dwp``) has an index of DWO IDs. DWARF 5, sections 3.1.2, 7.3.5 and 7.5.1.2, and, for version 4,
gcc.gnu.org/wiki/DebugFission, whose attributes are those beginning with DW_AT_GNU.

The numbers of units, abbreviations, attributes and bytes are bounded; no input raises, except for
errors of ``read_at``.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.sections import Sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.formats.elf.header import ReadAt

    Alternate = Callable[[], tuple[ReadAt, int] | None]

SECTION_MAX: Final = 64 << 20
"""The most bytes of a section that are decompressed."""

AT_STMT_LIST: Final = 0x10
AT_LOW_PC: Final = 0x11
AT_COMP_DIR: Final = 0x1B
"""Attributes of the first entry of a unit."""

FORM_ADDRESS: Final = 0x01
"""The form of an address in the entry itself."""

UT_SKELETON: Final = 4
"""The type of a unit that is split, from version 5 on."""

_UNIT_BYTES: Final = 1024  # for header and first entry of each unit: usually about 50
_DECLARATIONS_MAX: Final = 64  # the abbreviation of the first entry is one of the first
_ATTRIBUTES_MAX: Final = 64
_STRING_MAX: Final = 4096
_AT_STR_OFFSETS_BASE: Final = 0x72

_ADDRESS: Final = -1
_OFFSET: Final = -2
_ULEB: Final = -3
# Forms by size, or by the encoding of their size; a form that no compiler uses in such an entry
# ends the reading.
_FORMS: Final = {
    0x01: _ADDRESS, 0x05: 2, 0x06: 4, 0x07: 8, 0x0B: 1, 0x0C: 1, 0x0D: _ULEB, 0x0E: _OFFSET,
    0x0F: _ULEB, 0x17: _OFFSET, 0x19: 0, 0x1A: _ULEB, 0x1B: _ULEB, 0x1E: 16, 0x1F: _OFFSET,
    0x20: 8, 0x21: 0, 0x22: _ULEB, 0x23: _ULEB, 0x25: 1, 0x26: 2, 0x27: 3, 0x28: 4, 0x29: 1,
    0x2A: 2, 0x2B: 3, 0x2C: 4, 0x1F01: _ULEB, 0x1F02: _ULEB, 0x1F20: _OFFSET, 0x1F21: _OFFSET,
    0x1D: _OFFSET,
}  # fmt: skip
_STRING: Final = 0x08
_IMPLICIT_CONST: Final = 0x21
_STRP: Final = 0x0E
_LINE_STRP: Final = 0x1F
_ALTERNATE: Final = frozenset((0x1D, 0x1F21))  # a string in the file that dwz(1) makes
_INDEXED: Final = frozenset((0x1A, 0x25, 0x26, 0x27, 0x28, 0x1F02))


class Malformed(Exception):
    """A unit is malformed. Only the decoders of DWARF raise and catch this."""


class Cursor:
    """Reads numbers from bytes. Raises `Malformed` at their end."""

    def __init__(self, data: bytes, little_endian: bool) -> None:
        self.data = data
        self.at = 0
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


class DebugSection:
    """A debug section by its name; it is read in parts, or decompressed whole."""

    def __init__(self, sections: Sections, name: bytes, read_at: ReadAt, size: int) -> None:
        self.name = name
        self._read_at = read_at
        self._start, self.size, self._plain = 0, 0, b""
        header = sections.debug(name)
        if header is not None and header.is_packed:
            self._plain = sections.contents(header, SECTION_MAX)
            self.size = len(self._plain)
        elif header is not None and header.offset + header.size <= size:
            self._start, self.size = header.offset, header.size

    def read(self, at: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``at``."""
        if self._plain:
            return self._plain[at : at + size]
        size = min(size, self.size - at)
        return self._read_at(self._start + at, size) if size > 0 else b""

    def text(self, at: int) -> bytes:
        """Return the bytes up to a NUL. Raises `Malformed`."""
        found, nul, _ = self.read(at, _STRING_MAX).partition(b"\0")
        if not nul:
            raise Malformed
        return found


class _Header(NamedTuple):
    """The header of a unit; ``offsets`` is the size of offsets, 4 or 8."""

    version: int
    offsets: int
    addresses: int
    abbreviations: int
    dwo_id: int | None


class UnitEntry:
    """The first entry of a unit. ``dwo_id`` is that in the header of a skeleton."""

    def __init__(self, header: _Header, strings: _Strings) -> None:
        self.dwo_id = header.dwo_id
        self._header = header
        self._strings = strings
        self.numbers: dict[int, tuple[int, int]] = {}
        self.texts: dict[int, bytes] = {}

    def number(self, attribute: int) -> int | None:
        """Return the value of an attribute; None if it is missing."""
        found = self.numbers.get(attribute)
        return None if found is None else found[1]

    def text(self, *attributes: int) -> bytes:
        """Return the string of the first of these attributes that the entry has; empty if it has
        none, or if the string is in an unknown file.
        """
        default = (0, 0 if self._header.version < 5 else 8)
        _, base = self.numbers.get(_AT_STR_OFFSETS_BASE, default)
        for each in attributes:
            if each in self.texts:
                return self.texts[each]
            if each in self.numbers:
                return self._strings.at(*self.numbers[each], base, self._header.offsets)
        return b""


class _Strings:
    """The tables of strings."""

    def __init__(
        self, part: Callable[[bytes], DebugSection], little_endian: bool, alternate: Alternate
    ) -> None:
        self._alternate = alternate
        self._tables = {_STRP: part(b".debug_str"), _LINE_STRP: part(b".debug_line_str")}
        self._offsets = part(b".debug_str_offsets")
        self._little = little_endian

    def at(self, form: int, value: int, base: int, offsets: int) -> bytes:
        """Return the string to which an attribute's value refers; empty if there is none."""
        if form in _INDEXED:
            raw = self._offsets.read(base + value * offsets, offsets)
            form, value = _STRP, _number(raw, self._little)
        table = self._in_alternate if form in _ALTERNATE else self._tables.get(form)
        with suppress(Malformed):
            return b"" if table is None else table.text(value)
        return b""

    @cached_property
    def _in_alternate(self) -> DebugSection | None:
        found = self._alternate()
        return None if found is None else DebugSection(Sections(*found), b".debug_str", *found)


class Units:
    """Reads the first entries of the units in an ELF file of ``size`` bytes.

    ``work`` is the number of declarations of attributes that are read for all units together.
    ``alternate`` returns the file to which dwz(1) has moved strings, None if it is unknown.
    """

    def __init__(
        self,
        sections: Sections,
        read_at: ReadAt,
        size: int,
        work: int,
        alternate: Alternate = lambda: None,
    ) -> None:
        def part(name: bytes) -> DebugSection:
            return DebugSection(sections, name, read_at, size)

        self._info = part(b".debug_info")
        self._abbreviations = part(b".debug_abbrev")
        self._little = sections.little_endian
        self._strings = _Strings(part, self._little, alternate)
        self._left = work

    def entries(self, most: int, is_wanted: Callable[[int, int], bool]) -> Iterator[UnitEntry]:
        """Yield the entries of the first ``most`` units whose version and type are wanted; the type
        is 0 before version 5.
        """
        at = 0
        for _ in range(most):
            head = self._info.read(at, _UNIT_BYTES) if at < self._info.size else b""
            cursor = Cursor(head, self._little)
            try:
                length, offsets = cursor.unit_length()
            except Malformed:
                return
            at += cursor.at + length
            entry = None
            with suppress(Malformed):
                entry = self._entry(cursor, offsets, is_wanted)
            if entry is not None:
                yield entry

    def _entry(
        self, cursor: Cursor, offsets: int, is_wanted: Callable[[int, int], bool]
    ) -> UnitEntry | None:
        version, kind, dwo_id = cursor.number(2), 0, None
        if version == 5:
            kind, addresses = cursor.number(1), cursor.number(1)
            abbreviations = cursor.number(offsets)
            dwo_id = cursor.number(8) if kind == UT_SKELETON else None
        elif 2 <= version <= 4:
            abbreviations, addresses = cursor.number(offsets), cursor.number(1)
        else:
            return None
        if not is_wanted(version, kind):
            return None
        header = _Header(version, offsets, addresses, abbreviations, dwo_id)
        entry = UnitEntry(header, self._strings)
        for attribute, form in self._declaration(cursor.uleb(), abbreviations):
            if form == _STRING:
                entry.texts[attribute] = cursor.string()
            else:
                entry.numbers[attribute] = form, _value(cursor, form, header)
        return entry

    def _declaration(self, code: int, at: int) -> list[tuple[int, int]]:
        """Return attributes and forms of the abbreviation with that code."""
        # A declaration has at most 4 bytes for code, tag and flag, and each attribute 4 or 5.
        cursor = Cursor(self._abbreviations.read(at, _UNIT_BYTES), self._little)
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


def _value(cursor: Cursor, form: int, header: _Header) -> int:
    size = _FORMS.get(form)
    if size is None:
        raise Malformed
    if size == _ULEB:
        return cursor.uleb()
    return cursor.number({_ADDRESS: header.addresses, _OFFSET: header.offsets}.get(size, size))


# --- split DWARF ----------------------------------------------------------------------------------

UNITS_MAX: Final = 4096
"""The most units that are read."""

# Declarations of attributes in all units together, which bounds the work for one file.
_WORK_MAX: Final = 1 << 16
_INDEX_MAX: Final = 8 << 20

_DW_AT_DWO_NAME: Final = (0x76, 0x2130)
_DW_AT_GNU_DWO_ID: Final = 0x2131

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
    if sections.debug(b".debug_info") is None or sections.debug(b".debug_addr") is None:
        return
    for entry in Units(sections, read_at, size, _WORK_MAX).entries(units, _may_be_skeleton):
        dwo_id = entry.number(_DW_AT_GNU_DWO_ID)
        if dwo_id is None:
            dwo_id = entry.dwo_id
        if dwo_id is not None:
            yield Skeleton(dwo_id, entry.text(*_DW_AT_DWO_NAME), entry.text(AT_COMP_DIR))


def _may_be_skeleton(version: int, kind: int) -> bool:
    return version == 4 or (version == 5 and kind == UT_SKELETON)


def packaged(read_at: ReadAt, size: int) -> frozenset[int]:
    """Return the DWO IDs of the units in a ``.dwp`` file of ``size`` bytes; empty for any other
    file.
    """
    sections = Sections(read_at, size)
    index = sections.contents(sections.named(b".debug_cu_index"), _INDEX_MAX)
    if len(index) < 16:
        return frozenset()
    order = "<" if sections.little_endian else ">"
    half, word = Struct(order + "H"), Struct(order + "4I")
    version, _, _, slots = word.unpack_from(index)
    if version not in _INDEX_VERSIONS and half.unpack_from(index)[0] not in _INDEX_VERSIONS:
        return frozenset()
    slots = min(slots, (len(index) - 16) // 8)
    return frozenset(Struct(f"{order}{slots}Q").unpack_from(index, 16)) - {0}
