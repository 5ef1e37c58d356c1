# SPDX-License-Identifier: Apache-2.0
"""A debug file for a stripped Go program, made of its ``.gopclntab``.

It has the functions with their exact sizes (``.symtab``), and files and lines (``.debug_line``). In
code that was inlined, file and line are those of the inlined function, and the name is that of the
function it was inlined into, as ``go tool addr2line`` has it. Go 1.18 to 1.20 write ``[...]`` for
type arguments. Functions of C that Go's own linker took in have no lines, and reach to the next
one. Headers are those of the program, as ``objcopy --only-keep-debug`` makes them, so that
addresses and offsets mean the same in both files.

Nothing raises for any input, except what ``read_at`` raises itself.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Final, NamedTuple

from buildidfs.formats.elf import gopclntab
from buildidfs.formats.elf.go_lines import VERSION, Lines
from buildidfs.formats.elf.header import (
    ET_DYN,
    ET_EXEC,
    EV_CURRENT,
    NT_GNU_BUILD_ID,
    PF_X,
    PN_XNUM,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_NULL,
    SHT_STRTAB,
    SHT_SYMTAB,
    Layout,
    ReadAt,
    Segment,
    Source,
    parse_header,
    segments,
)
from buildidfs.formats.elf.identify import MADE_OF_GOPCLNTAB
from buildidfs.formats.elf.sections import Sections

PRODUCER: Final = b"buildidfs: made of .gopclntab"

_BUILD_ID: Final = b".note.gnu.build-id"
_PROGBITS: Final = 1
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

# Elf64_Sym and Elf32_Sym, made of name, value, size and section index.
_SYMBOLS: Final = {64: "IBBHQQ", 32: "IIIBBH"}

# DWARF 4, 7.5: tags, attributes and forms of the one unit and its functions.
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


class _Section(NamedTuple):
    """A section to be written. ``size`` is that of a section without contents."""

    name: bytes
    type: int
    contents: bytes | bytearray = b""
    flags: int = 0
    address: int = 0
    offset: int = 0
    size: int = 0
    link: int = 0
    info: int = 0
    align: int = 1
    entry: int = 0


def debug_file(read_at: ReadAt, size: int, build_id: bytes, source: bytes) -> bytes | None:
    """The debug file of a Go program of ``size`` bytes; None if it has no sound ``.gopclntab``.

    ``build_id`` is the one that the debug file shall have, ``source`` the SHA-256 of the program.
    """
    read_at = Source(b"", read_at, size).read
    head = read_at(0, _HEAD_BYTES)
    parsed = parse_header(head)
    if parsed is None or parsed[1][0] not in (ET_EXEC, ET_DYN):
        return None
    layout, header = parsed
    table = gopclntab.find(read_at, size)
    if table is None:
        return None
    sections = Sections(read_at, size)
    loads = _segments(read_at, layout, header)
    kept = _kept(sections, loads)
    writer = _Writer(layout, kept, loads)
    made = writer.sections(table, build_id, source)
    del table  # it may have more bytes than the file
    return writer.file(head, made) if made is not None else None


def _segments(read_at: ReadAt, layout: Layout, header: tuple[int, ...]) -> list[Segment]:
    """The program headers that debuggers know, with one for notes."""
    count = header[9] if header[9] != PN_XNUM else 0
    data = read_at(header[4], min(count, _KEPT_SEGMENTS) * layout.phdr.size) if header[4] else b""
    found = [each for each in segments(layout, data) if each.kind in _KEPT_KINDS]
    notes = [each for each in found if each.kind == PT_NOTE]
    return [each for each in found if each not in notes[1:]]


def _kept(sections: Sections, loads: list[Segment]) -> list[_Section]:
    """The sections of the program without their bytes; one for each segment where it has none."""
    kept = [
        _Section(
            each.name,
            SHT_NOBITS,
            b"",
            each.flags,
            each.address,
            each.offset,
            each.size,
            align=each.align,
        )
        for each in sections.headers
        if each.flags & SHF_ALLOC and each.type != SHT_NULL and each.name != _BUILD_ID
    ]
    if kept:
        return kept[:_KEPT_SECTIONS]
    return [
        _Section(
            b".text" if each.flags & PF_X else b".data",
            SHT_NOBITS,
            b"",
            SHF_ALLOC | (SHF_EXECINSTR if each.flags & PF_X else 0),
            each.address,
            each.offset,
            each.memory,
        )
        for each in loads
        if each.kind == PT_LOAD and each.memory
    ]


class _Writer:
    def __init__(self, layout: Layout, kept: list[_Section], loads: list[Segment]) -> None:
        self._bits = layout.bits
        self._order = "<" if layout.little_endian else ">"
        self._kept = kept
        self._segments = loads
        word = "Q" if layout.bits == 64 else "I"
        self._address = Struct(self._order + word)
        self._ehdr = Struct(f"{self._order}16sHHI{word * 3}I6H")
        self._shdr = Struct(f"{self._order}II{word * 4}II{word * 2}")
        self._phdr = Struct(self._order + ("IIQQQQQQ" if layout.bits == 64 else "IIIIIIII"))

    def sections(
        self, table: gopclntab.GoTable, build_id: bytes, source: bytes
    ) -> list[_Section] | None:
        """The sections of the file, without that of their names; None if no function is sound."""
        lines = Lines(table, self._address)
        names = _Names(table)
        symbols, functions, start, end = self._functions(table, names, lines)
        if start >= end:
            return None
        note = self._note(build_id)
        noted = next((each for each in self._segments if each.kind == PT_NOTE), None)
        address = noted.address if noted is not None else 0
        number, entry = len(self._kept) + 3, 24 if self._bits == 64 else 16
        return [
            *self._kept,
            _Section(
                _BUILD_ID, SHT_NOTE, note, SHF_ALLOC if noted else 0, address, align=4
            ),
            _Section(
                b".symtab", SHT_SYMTAB, symbols, link=number, info=len(symbols) // entry,
                align=self._address.size, entry=entry,
            ),
            _Section(b".strtab", SHT_STRTAB, names.contents()),
            _Section(b".debug_str", _PROGBITS, flags=_STRINGS, entry=1),
            _Section(b".debug_abbrev", _PROGBITS, _ABBREVIATIONS),
            _Section(b".debug_info", _PROGBITS, self._unit(start, end, functions)),
            _Section(b".debug_aranges", _PROGBITS, self._ranges(start, end)),
            _Section(b".debug_line", _PROGBITS, lines.contents()),
            _Section(MADE_OF_GOPCLNTAB, _PROGBITS, source),
        ]  # fmt: skip

    def _functions(
        self, table: gopclntab.GoTable, names: _Names, lines: Lines
    ) -> tuple[bytearray, bytearray, int, int]:
        """The functions as symbols and as entries of ``.debug_info``, and where they begin and end.

        LLVM takes names from symbols only where these are in the program.
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
        """A function that gives the number of the section of code that an address is in, or 0.

        It is to be asked in the order of addresses.
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

    def _note(self, build_id: bytes) -> bytes:
        header = Struct(self._order + "III").pack(4, len(build_id), NT_GNU_BUILD_ID)
        return header + b"GNU\0" + build_id + bytes(-len(build_id) % 4)

    def _unit(self, start: int, end: int, functions: bytearray) -> bytes:
        """``.debug_info``: one unit with all lines and functions."""
        language = Struct(self._order + "H").pack(_DW_LANG_GO)
        die = b"\x01" + PRODUCER + b"\0" + language + b".gopclntab\0" + self._address.pack(start)
        die += Struct(self._order + "QI").pack(end - start, 0) + functions + b"\0"
        form = Struct(self._order + "HIB")
        return self._counted(form.pack(VERSION, 0, self._address.size) + die)

    def _ranges(self, start: int, end: int) -> bytes:
        """``.debug_aranges``, without which elfutils looks through all units."""
        head = Struct(self._order + "HIBB").pack(2, 0, self._address.size, 0)
        padding = bytes(-(4 + len(head)) % (2 * self._address.size))
        pack = self._address.pack
        return self._counted(head + padding + pack(start) + pack(end - start) + pack(0) + pack(0))

    def _counted(self, data: bytes) -> bytes:
        return Struct(self._order + "I").pack(len(data)) + data

    def file(self, head: bytes, sections: list[_Section]) -> bytes:
        """The file with these sections; ``head`` is the ELF header of the program."""
        names = bytearray(b"\0")
        named = {b"": 0}
        for name in (*(each.name for each in sections), b".shstrtab"):
            if name not in named:
                named[name] = len(names)
                names += name + b"\0"
        sections = [*sections, _Section(b".shstrtab", SHT_STRTAB, bytes(names))]
        kept = self._segments
        at = self._ehdr.size + len(kept) * self._phdr.size
        parts, rows = [], [self._shdr.pack(*bytes(10))]
        strings = (0, 0)
        for each in sections:
            offset, size = each.offset, each.size
            if each.name == b".debug_str":
                offset, size = strings  # the same bytes under two names
            elif each.type != SHT_NOBITS:
                padding = -at % each.align
                offset, size = at + padding, len(each.contents)
                parts += [bytes(padding), each.contents]
                at = offset + size
                strings = (offset, size) if each.type == SHT_STRTAB else strings
                if each.name == _BUILD_ID:
                    kept = [
                        x._replace(offset=offset, size=size, memory=size)
                        if x.kind == PT_NOTE
                        else x
                        for x in kept
                    ]
            rows.append(
                self._shdr.pack(
                    named[each.name], each.type, each.flags, each.address, offset, size,
                    each.link, each.info, each.align, each.entry,
                )
            )  # fmt: skip
        padding = -at % self._address.size
        fields = list(self._ehdr.unpack_from(head))
        fields[0] = head[:6] + bytes((EV_CURRENT,)) + head[7:16]
        fields[5] = self._ehdr.size if kept else 0
        fields[6] = at + padding
        fields[8:] = (
            self._ehdr.size, self._phdr.size, len(kept), self._shdr.size, len(rows), len(rows) - 1,
        )  # fmt: skip
        segments = [self._segment(each) for each in kept]
        return b"".join((self._ehdr.pack(*fields), *segments, *parts, bytes(padding), *rows))

    def _segment(self, each: Segment) -> bytes:
        size = each.size if each.kind == PT_NOTE else 0
        place = (each.offset, each.address, each.address, size, each.memory)
        if self._bits == 64:
            return self._phdr.pack(each.kind, each.flags, *place, each.align)
        return self._phdr.pack(each.kind, *place, each.flags, each.align)


class _Names:
    """``.strtab``: the names of a table as they are there; of Go 1.2 one after the other.

    The middle dot, which Go has in names of local types, becomes a full stop, as in the symbols
    that its linker writes.
    """

    def __init__(self, table: gopclntab.GoTable) -> None:
        self._data = data = table.data
        self._start, self._end = table.names, table.names_end
        self._is_whole = table.version != gopclntab.GO_1_2
        self._known: dict[int, int] = {}
        self._out = bytearray(b"\0")
        if self._is_whole:
            self._out += memoryview(data)[self._start : self._end]
            self._out += b"\0"
            dot = data.find(_DOT, self._start, self._end)
            while dot >= 0:
                place = data.rfind(b"\0", self._start, dot) + 1 or self._start
                end = self._append(place)
                dot = data.find(_DOT, max(end, dot + 1), self._end)

    def at(self, place: int) -> int:
        """Return the offset in the section of the name at an offset of the table; 0 if there is
        none."""
        if not self._start <= place < self._end or not place or not self._data[place]:
            return 0
        known = self._known.get(place, 0)
        if not known and self._is_whole:
            return 1 + place - self._start
        if not known and len(self._out) <= len(self._data):
            self._append(place)
            known = self._known.get(place, 0)
        return known

    def _append(self, place: int) -> int:
        """Add a name of the table, and return where it ends there."""
        end = self._data.find(b"\0", place, min(place + _NAME_MAX, self._end))
        if end > place:
            self._known[place] = len(self._out)
            self._out += self._data[place : end + 1].replace(_DOT, b".")
        return end

    def contents(self) -> bytearray:
        return self._out
