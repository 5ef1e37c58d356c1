# SPDX-License-Identifier: Apache-2.0
"""ELF files made to order, so that no binary has to be kept in the repository.

`elf_file` lays out: ELF header, program headers, contents of the sections in the order given,
section names, section headers. It checks nothing: sizes, types and links may be as wrong as a
test wants them. Numbers are those of elf(5).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

ET_REL, ET_EXEC, ET_DYN, ET_CORE = 1, 2, 3, 4
EM_386, EM_PPC64, EM_X86_64 = 3, 21, 62
PT_LOAD, PT_DYNAMIC, PT_NOTE = 1, 2, 4
SHT_NULL, SHT_PROGBITS, SHT_SYMTAB, SHT_STRTAB, SHT_NOTE, SHT_NOBITS, SHT_DYNSYM = (
    0,
    1,
    2,
    3,
    7,
    8,
    11,
)
SHF_WRITE, SHF_ALLOC, SHF_EXECINSTR, SHF_COMPRESSED = 0x1, 0x2, 0x4, 0x800
NT_GNU_BUILD_ID = 3

Place = Literal["both", "segment", "section"]


class Section(NamedTuple):
    """A section, a segment, or both over the same bytes.

    ``segment`` is the type of a program header that covers it, 0 for none. An empty ``name`` with
    a segment makes the segment alone. ``size`` and ``offset`` override what the headers claim.
    """

    name: bytes
    data: bytes = b""
    type: int = SHT_PROGBITS
    flags: int = 0
    segment: int = 0
    align: int = 1
    link: int = 0
    info: int = 0
    entsize: int = 0
    size: int | None = None
    offset: int | None = None


TEXT = Section(b".text", b"\x90" * 16, flags=SHF_ALLOC | SHF_EXECINSTR, segment=PT_LOAD)
"""Code: makes a file an executable."""
TEXT_SPLIT = Section(b".text", type=SHT_NOBITS, flags=SHF_ALLOC | SHF_EXECINSTR, size=16)
"""What is left of code in a separate debug file."""
DWARF = Section(b".debug_info", b"\x01" * 11)
"""Debug information, by its name."""
SYMTAB = Section(b".symtab", type=SHT_SYMTAB)
"""A symbol table; the writer gives it the null symbol and the names of the sections to link to."""
DYNSYM = Section(b".dynsym", type=SHT_DYNSYM, flags=SHF_ALLOC)
"""A dynamic symbol table, likewise."""


def note(
    name: bytes, kind: int, desc: bytes, *, little_endian: bool = True, align: int = 4
) -> bytes:
    """One note; ``name`` with its NUL, if it is to have one."""
    head = struct.pack(("<" if little_endian else ">") + "III", len(name), len(desc), kind)
    body = _pad(head + name, align) + desc
    return _pad(body, align)


def build_id_note(build_id: bytes, *, little_endian: bool = True, align: int = 4) -> bytes:
    """The note that carries a build ID."""
    return note(b"GNU\0", NT_GNU_BUILD_ID, build_id, little_endian=little_endian, align=align)


def debuglink(name: bytes, crc: int, *, little_endian: bool = True) -> Section:
    """``.gnu_debuglink``."""
    checksum = crc.to_bytes(4, "little" if little_endian else "big")
    return Section(b".gnu_debuglink", _pad(name + b"\0", 4) + checksum, align=4)


def altlink(name: bytes, build_id: bytes) -> Section:
    """``.gnu_debugaltlink``."""
    return Section(b".gnu_debugaltlink", name + b"\0" + build_id)


def debug_sup(
    name: bytes, checksum: bytes, *, little_endian: bool = True, is_supplementary: bool = False
) -> Section:
    """``.debug_sup`` (DWARF 5, 7.3.6)."""
    version = (5).to_bytes(2, "little" if little_endian else "big")
    data = version + bytes([is_supplementary]) + name + b"\0" + bytes([len(checksum)]) + checksum
    return Section(b".debug_sup", data)


def gdb_scripts(text: str, *, name: bytes = b".debug_gdb_scripts") -> Section:
    """``.debug_gdb_scripts`` with one Python script inlined; ``text`` is its source."""
    return Section(name, b"\x04gdb.inlined-script\n" + text.encode() + b"\n\0")


def elf_file(
    sections: Sequence[Section] = (TEXT,),
    *,
    build_id: bytes | None = None,
    build_id_in: Place = "both",
    note_align: int = 4,
    bits: Literal[32, 64] = 64,
    little_endian: bool = True,
    etype: int = ET_DYN,
    machine: int = EM_X86_64,
    section_headers: bool = True,
    extended_numbering: bool = False,
    names_index: int | None = None,
) -> bytes:
    """The bytes of an ELF file with the given sections, preceded by the note of ``build_id``.

    ``extended_numbering`` puts the numbers of sections and segments and the index of the section
    names where they go when they are too large for the ELF header. ``names_index`` overrides that
    index.
    """
    everything = list(sections)
    if build_id is not None:
        everything.insert(
            0,
            Section(
                b".note.gnu.build-id" if build_id_in != "segment" else b"",
                build_id_note(build_id, little_endian=little_endian, align=note_align),
                SHT_NOTE,
                SHF_ALLOC,
                segment=PT_NOTE if build_id_in != "section" else 0,
                align=note_align,
            ),
        )
    return _Writer(bits, little_endian).file(
        everything, etype, machine, section_headers, extended_numbering, names_index
    )


class _Writer:
    def __init__(self, bits: Literal[32, 64], little_endian: bool) -> None:
        order = "<" if little_endian else ">"
        word = "Q" if bits == 64 else "I"
        self._bits = bits
        self._little_endian = little_endian
        self._ehdr = struct.Struct(f"{order}4sBBB9xHHI{word * 3}I6H")
        self._phdr = struct.Struct(order + ("IIQQQQQQ" if bits == 64 else "IIIIIIII"))
        self._shdr = struct.Struct(f"{order}II{word * 4}II{word * 2}")

    def file(
        self,
        sections: Sequence[Section],
        etype: int,
        machine: int,
        section_headers: bool,
        extended_numbering: bool,
        names_index: int | None,
    ) -> bytes:
        named = [section for section in sections if section.name]
        if section_headers:
            names = b"\0" + b"".join(s.name + b"\0" for s in named) + b".shstrtab\0"
            sections = [*sections, Section(b".shstrtab", names, SHT_STRTAB)]
            named.append(sections[-1])
        phnum = sum(1 for section in sections if section.segment)
        shnum = len(named) + 1 if section_headers else 0
        shstrndx = shnum - 1 if names_index is None else names_index

        sections = [self._with_symbols(section, shnum - 1) for section in sections]
        body = bytearray(self._ehdr.size + phnum * self._phdr.size)
        offsets = _place(sections, body)
        body += bytes(-len(body) % 8)
        segments = b"".join(
            self._segment(section, offset)
            for section, offset in zip(sections, offsets, strict=True)
            if section.segment
        )
        shoff = 0
        if section_headers:
            shoff = len(body)
            numbers = (shnum, shstrndx, phnum) if extended_numbering else (0, 0, 0)
            body += self._shdr.pack(0, SHT_NULL, 0, 0, 0, *numbers, 0, 0)
            name_at = 1
            for section, offset in zip(sections, offsets, strict=True):
                if section.name:
                    body += self._section(section, offset, name_at)
                    name_at += len(section.name) + 1
        if extended_numbering and section_headers:
            shnum, shstrndx, phnum = 0, 0xFFFF, 0xFFFF if phnum else 0
        body[: self._ehdr.size] = self._ehdr.pack(
            b"\x7fELF",
            1 if self._bits == 32 else 2,
            1 if self._little_endian else 2,
            1,
            etype,
            machine,
            1,
            0,
            self._ehdr.size if segments else 0,
            shoff,
            0,
            self._ehdr.size,
            self._phdr.size,
            phnum,
            self._shdr.size,
            shnum,
            shstrndx if section_headers else 0,
        )
        body[self._ehdr.size : self._ehdr.size + len(segments)] = segments
        return bytes(body)

    def _with_symbols(self, section: Section, names: int) -> Section:
        if section.data or section.type not in (SHT_SYMTAB, SHT_DYNSYM):
            return section
        size = 24 if self._bits == 64 else 16
        return section._replace(
            data=bytes(size), align=self._bits // 8, link=names, info=1, entsize=size
        )

    def _segment(self, section: Section, offset: int) -> bytes:
        size = len(section.data) if section.size is None else section.size
        flags = 5 if section.flags & SHF_EXECINSTR else 4
        flags |= 2 if section.flags & SHF_WRITE else 0
        place = (offset, _ADDRESS + offset, _ADDRESS + offset, size, size)
        if self._bits == 64:
            return self._phdr.pack(section.segment, flags, *place, section.align)
        return self._phdr.pack(section.segment, *place, flags, section.align)

    def _section(self, section: Section, offset: int, name_at: int) -> bytes:
        return self._shdr.pack(
            name_at,
            section.type,
            section.flags,
            _ADDRESS + offset if section.flags & SHF_ALLOC else 0,
            offset,
            len(section.data) if section.size is None else section.size,
            section.link,
            section.info,
            section.align,
            section.entsize,
        )


_ADDRESS = 0x400000  # where offset 0 is loaded


def _place(sections: Iterable[Section], body: bytearray) -> list[int]:
    """Append the contents of all sections; gives the offsets that the headers shall claim."""
    offsets = []
    for section in sections:
        body += bytes(-len(body) % max(section.align, 1))
        offsets.append(len(body) if section.offset is None else section.offset)
        body += section.data
    return offsets


def _pad(data: bytes, align: int) -> bytes:
    return data + bytes(-len(data) % align)
