# SPDX-License-Identifier: Apache-2.0
"""A debug file for a stripped Go program, made from its ``.gopclntab``.

It has the functions with their exact sizes (``.symtab``), and files and lines (``.debug_line``). In
inlined code, file and line are those of the inlined function, and the name is that of the function
it was inlined into, as in ``go tool addr2line``. Go 1.18 to 1.20 write ``[...]`` for type
arguments. C functions in a program that Go's own linker made have no lines; each extends to the
next function. Headers are those of the program, as ``objcopy --only-keep-debug`` makes them, so
that addresses and offsets mean the same in both files.

No input raises, except for errors of ``read_at``.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import BinaryIO, Final

from buildidfs.formats.elf.header import (
    ET_DYN,
    ET_EXEC,
    PF_X,
    PN_XNUM,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_NULL,
    SHT_PROGBITS,
    SHT_STRTAB,
    SHT_SYMTAB,
    ElfLayout,
    FileBytes,
    ReadAt,
    Segment,
    parse_header,
    segments,
)
from buildidfs.formats.elf.identify import MADE_OF_GOPCLNTAB
from buildidfs.formats.elf.minidebug import DynamicSymbols, added_symbols
from buildidfs.formats.elf.sections import SectionHeader, Sections
from buildidfs.formats.elf.writer import BUILD_ID, NewSection, build_id_note, byte_order, elf_file
from buildidfs.formats.go import gopclntab
from buildidfs.formats.go.lines import VERSION, Lines

PRODUCER: Final = b"buildidfs: made of .gopclntab"

_PIECE: Final = 1 << 16
_STRINGS: Final = 0x30  # SHF_MERGE, SHF_STRINGS
_SIZE_MAX: Final = 0xFFFFFFFF
# PT_LOAD, PT_DYNAMIC, PT_INTERP, PT_NOTE, PT_TLS; PT_GNU_EH_FRAME to PT_GNU_PROPERTY
_KEPT_KINDS: Final = frozenset((1, 2, 3, 4, 7, *range(0x6474E550, 0x6474E554)))
_KEPT_SECTIONS: Final = 4096
_KEPT_SEGMENTS: Final = 256
_NAME_MAX: Final = 1 << 16
_DOT: Final = "\N{MIDDLE DOT}".encode()
# STB_LOCAL and STT_FUNC
_FUNC: Final = 2
_HEAD_BYTES: Final = 64

# Elf64_Sym and Elf32_Sym, made from name, value, size and section index.
_SYMBOLS: Final = {64: "IBBHQQ", 32: "IIIBBH"}

# DWARF 4, 7.5: tags, attributes and forms of the unit and its functions.
_ABBREVIATIONS: Final = bytes((
    1, 0x11, 1,  # DW_TAG_compile_unit with children
    0x25, 0x08,  # DW_AT_producer, DW_FORM_string
    0x13, 0x05,  # DW_AT_language, DW_FORM_data2
    0x03, 0x08,  # DW_AT_name, DW_FORM_string
    0x11, 0x01,  # DW_AT_low_pc, DW_FORM_addr
    0x12, 0x07,  # DW_AT_high_pc, DW_FORM_data8
    0x10, 0x17,  # DW_AT_stmt_list, DW_FORM_sec_offset
    0, 0,
    2, 0x2E, 0,  # DW_TAG_subprogram without children
    0x03, 0x0E,  # DW_AT_name, DW_FORM_strp
    0x11, 0x01,  # DW_AT_low_pc, DW_FORM_addr
    0x12, 0x06,  # DW_AT_high_pc, DW_FORM_data4
    0, 0, 0,
))  # fmt: skip
_DW_LANG_GO: Final = 0x16

_NO_SYMBOLS: Final = DynamicSymbols()


def write_debug_file(
    read_at: ReadAt,
    size: int,
    build_id: bytes,
    source: bytes,
    out: BinaryIO,
    *,
    scratch: BinaryIO,
    dynamic: DynamicSymbols = _NO_SYMBOLS,
) -> bool:
    """Write the debug file of a Go program of ``size`` bytes to ``out``.

    ``build_id`` is the one for the debug file, ``source`` the SHA-256 of the program, ``dynamic``
    its symbols of C. ``scratch`` is an empty file for a part of the result that may be too large
    for memory. Returns False, and writes nothing to ``out``, if the program has no valid
    ``.gopclntab``.
    """
    read_at = FileBytes(b"", read_at, size).read
    head = read_at(0, _HEAD_BYTES)
    parsed = parse_header(head)
    if parsed is None or parsed[1][0] not in (ET_EXEC, ET_DYN):
        return False
    layout, header = parsed
    table = gopclntab.find(read_at, size)
    if table is None:
        return False
    sections = Sections(read_at, size)
    loads = _segments(read_at, layout, header)
    kept = _kept(sections, loads)
    made = _Maker(layout, kept, loads).sections(table, build_id, source, scratch, dynamic)
    if made is None:
        return False
    for part in elf_file(head, loads, made):
        if isinstance(part, bytes | bytearray):
            out.write(part)
        else:
            part.seek(0)
            while piece := part.read(_PIECE):
                out.write(piece)
    return True


def _segments(read_at: ReadAt, layout: ElfLayout, header: tuple[int, ...]) -> list[Segment]:
    """Return the program headers that debuggers use, with one for notes."""
    count = header[9] if header[9] != PN_XNUM else 0
    data = read_at(header[4], min(count, _KEPT_SEGMENTS) * layout.phdr.size) if header[4] else b""
    found = [each for each in segments(layout, data) if each.kind in _KEPT_KINDS]
    notes = [each for each in found if each.kind == PT_NOTE]
    return [each for each in found if each not in notes[1:]]


def _kept(sections: Sections, loads: list[Segment]) -> list[NewSection]:
    """Return the sections of the program without their bytes; if it has none, one for
    each segment.
    """
    kept = [
        NewSection(
            each.name, SHT_NOBITS, (), each.flags, each.address, each.offset, each.size,
            align=each.align,
        )
        for each in sections.headers
        if each.flags & SHF_ALLOC and each.type != SHT_NULL and each.name != BUILD_ID
    ]  # fmt: skip
    return kept[:_KEPT_SECTIONS] or [
        NewSection(
            b".text" if each.flags & PF_X else b".data", SHT_NOBITS, (),
            SHF_ALLOC | (SHF_EXECINSTR if each.flags & PF_X else 0), each.address, each.offset,
            each.memory,
        )
        for each in loads
        if each.kind == PT_LOAD and each.memory
    ]  # fmt: skip


class _Maker:
    def __init__(self, layout: ElfLayout, kept: list[NewSection], loads: list[Segment]) -> None:
        self._layout = layout
        self._bits = layout.bits
        self._order = byte_order(layout)
        self._kept = kept
        self._segments = loads
        self._address = Struct(self._order + ("Q" if layout.bits == 64 else "I"))

    def sections(
        self,
        table: gopclntab.GoTable,
        build_id: bytes,
        source: bytes,
        scratch: BinaryIO,
        dynamic: DynamicSymbols,
    ) -> list[NewSection] | None:
        """Return the sections of the debug file; None if no function is valid."""
        lines = Lines(table, self._address, scratch)
        names = _Names(table)
        symbols, functions, start, end = self._functions(table, names, lines)
        if start >= end:
            return None
        note = build_id_note(self._layout, build_id)
        segment = next((each for each in self._segments if each.kind == PT_NOTE), None)
        address = segment.address if segment is not None else 0
        number, entry = len(self._kept) + 3, 24 if self._bits == 64 else 16
        local = len(symbols) // entry
        strings = names.contents()
        if added := self._added(dynamic, len(names)):
            symbols += added
            strings += [dynamic.names, b"\0"]
        head = lines.header()
        return [
            *self._kept, NewSection(BUILD_ID, SHT_NOTE, [note], SHF_ALLOC if segment else 0,
            address, align=4), NewSection(
                b".symtab", SHT_SYMTAB, [symbols], link=number, info=local,
                align=self._address.size, entry=entry,
            ),
            NewSection(b".strtab", SHT_STRTAB, strings),
            NewSection(b".debug_str", SHT_PROGBITS, strings, _STRINGS, entry=1),
            NewSection(b".debug_abbrev", SHT_PROGBITS, [_ABBREVIATIONS]),
            NewSection(b".debug_info", SHT_PROGBITS, self._unit(start, end, functions)),
            NewSection(b".debug_aranges", SHT_PROGBITS, [self._ranges(start, end)]),
            NewSection(
                b".debug_line", SHT_PROGBITS, [head, scratch], size=len(head) + lines.size
            ),
            NewSection(MADE_OF_GOPCLNTAB, SHT_PROGBITS, [source]),
        ]  # fmt: skip

    def _added(self, dynamic: DynamicSymbols, names_at: int) -> bytes:
        """Return the symbols of C functions, which Go's table lacks."""
        headers = [
            SectionHeader(each.name, each.type, each.flags, each.address, 0, each.size, 0, 0)
            for each in (NewSection(b"", SHT_NULL), *self._kept)
        ]
        return added_symbols(dynamic, self._bits, self._order == "<", headers, names_at)

    def _functions(
        self, table: gopclntab.GoTable, names: _Names, lines: Lines
    ) -> tuple[bytearray, bytearray, int, int]:
        """Return the functions as symbols and as entries of ``.debug_info``, and their first and
        last address.

        Both are needed, because LLVM takes names from symbols only if these are in the program.
        """
        form = Struct(self._order + _SYMBOLS[self._bits])
        described = Struct(self._order + f"BI{'Q' if self._bits == 64 else 'I'}I").pack
        most = (1 << self._bits) - 1
        out, entries = bytearray(form.size), bytearray()
        low, high = most, 0
        find, pack, is_wide = self._section_of(), form.pack, self._bits == 64
        for function in table.walk():
            entry = function.entry
            section = find(entry)
            name = names.at(function.name)
            if entry + function.room > most or not section or not name:
                continue
            size = lines.add(function)
            if is_wide:
                out += pack(name, _FUNC, 0, section, entry, size)
            else:
                out += pack(name, entry, size, _FUNC, 0, section)
            if size and size <= _SIZE_MAX:
                entries += described(2, name, entry, size)
            if entry < low:
                low = entry
            high = entry + size
        return out, entries, low, high

    def _section_of(self) -> Callable[[int], int]:
        """Return a function that maps an address to the number of its code section, or 0.

        The function must be called in the order of addresses.
        """
        spans = sorted(
            (
                (each.address, each.address + each.size, number)
                for number, each in enumerate(self._kept, 1)
                if each.flags & SHF_EXECINSTR
            ),
            reverse=True,
        )
        start = end = found = 0

        def find(address: int) -> int:
            nonlocal start, end, found
            while address >= end and spans:
                start, end, found = spans.pop()
            return found if start <= address < end else 0

        return find

    def _unit(self, start: int, end: int, functions: bytearray) -> tuple[bytes, bytearray, bytes]:
        """Return ``.debug_info``: one unit with all lines and functions."""
        language = Struct(self._order + "H").pack(_DW_LANG_GO)
        die = b"\x01" + PRODUCER + b"\0" + language + b".gopclntab\0" + self._address.pack(start)
        die += Struct(self._order + "QI").pack(end - start, 0)
        head = Struct(self._order + "HIB").pack(VERSION, 0, self._address.size) + die
        size = Struct(self._order + "I").pack(len(head) + len(functions) + 1)
        return size + head, functions, b"\0"

    def _ranges(self, start: int, end: int) -> bytes:
        """Return ``.debug_aranges``, without which elfutils searches all units."""
        head = Struct(self._order + "HIBB").pack(2, 0, self._address.size, 0)
        padding = bytes(-(4 + len(head)) % (2 * self._address.size))
        pack = self._address.pack
        return self._counted(head + padding + pack(start) + pack(end - start) + pack(0) + pack(0))

    def _counted(self, data: bytes) -> bytes:
        return Struct(self._order + "I").pack(len(data)) + data


class _Names:
    """The section ``.strtab`` with the names of a table; for the layout of Go 1.2, the names are
    collected one after another.

    The middle dot in Go's names of local types becomes a full stop, as in the symbols of Go's
    linker.
    """

    def __init__(self, table: gopclntab.GoTable) -> None:
        self._names = names = table.names
        self._is_whole = table.version != gopclntab.GO_1_2
        self._known: dict[int, int] = {}
        self._before = [b"\0", names, b"\0"] if self._is_whole else [b"\0"]
        self._start = sum(map(len, self._before))
        self._added = bytearray()
        if self._is_whole:
            end, dot = 0, names.find(_DOT)
            while dot >= 0:
                self._add(names.rfind(b"\0", end, dot) + 1)
                end = names.find(b"\0", dot)
                dot = names.find(_DOT, end) if end >= 0 else -1

    def at(self, place: int) -> int:
        """Return the offset in the section of the name at an offset of the table; 0 if there is
        none.
        """
        if place >= len(self._names) or not self._names[place]:
            return 0
        known = self._known.get(place, 0)
        if known:
            return known
        if self._is_whole:
            return 1 + place
        if place and len(self._added) <= len(self._names):
            self._add(place)
        return self._known.get(place, 0)

    def _add(self, place: int) -> None:
        """Add a name of the table."""
        end = self._names.find(b"\0", place, place + _NAME_MAX)
        if end > place:
            self._known[place] = len(self)
            self._added += self._names[place : end + 1].replace(_DOT, b".")

    def __len__(self) -> int:
        return self._start + len(self._added)

    def contents(self) -> list[bytes | bytearray]:
        return [*self._before, self._added]
