# SPDX-License-Identifier: Apache-2.0
"""Write an ELF file (elf(5)) of segments and sections, in 32 and 64 bit and either byte order.

The segments may be those of another file: their bytes are not in this file, except notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from buildidfs.formats.elf.header import (
    ET_DYN,
    EV_CURRENT,
    LAYOUTS,
    MAGIC,
    NT_GNU_BUILD_ID,
    PF_R,
    PF_X,
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
    Segment,
)
from buildidfs.model import BuildId, fingerprint

if TYPE_CHECKING:
    from buildidfs.formats.perf.jit import JitFunction

Part = bytes | bytearray | BinaryIO
"""Bytes of the file, or the whole content of another file."""

BUILD_ID: Final = b".note.gnu.build-id"

_NAMES: Final = b".shstrtab"


class NewSection(NamedTuple):
    """A section to be written: the fields of its header except its place.

    ``offset`` is for a section without contents (SHT_NOBITS). ``size`` is for such a section, and
    for one with a file among its parts. If two sections have the same object as their parts, they
    share these bytes in the file.
    """

    name: bytes
    type: int
    parts: Sequence[Part] = ()
    flags: int = 0
    address: int = 0
    offset: int = 0
    size: int = 0
    link: int = 0
    info: int = 0
    align: int = 1
    entry: int = 0


def byte_order(layout: ElfLayout) -> str:
    """Return the prefix of `struct` formats."""
    return "<" if layout.little_endian else ">"


def build_id_note(layout: ElfLayout, build_id: bytes) -> bytes:
    """Return the contents of a section `BUILD_ID`."""
    header = Struct(byte_order(layout) + "III").pack(4, len(build_id), NT_GNU_BUILD_ID)
    return header + b"GNU\0" + build_id + bytes(-len(build_id) % 4)


def elf_file(
    head: bytes, segments: Sequence[Segment], sections: Iterable[NewSection]
) -> Iterator[Part]:
    """Yield the parts of a file. A segment of notes gets the place of the section of notes.

    ``head`` is the header of an ELF file, from which class, byte order, type, machine, entry and
    flags are taken.
    """
    layout = LAYOUTS[head[4:6]]
    shdr, phdr = layout.section, layout.segment
    named, sections = _named(sections)
    at = layout.ehdr_size + len(segments) * phdr.size
    notes = (0, 0)
    parts: list[Part] = []
    rows = [shdr.pack(SHT_NULL, *bytes(9))]
    placed: dict[int, int] = {}
    for each in sections:
        offset = each.offset
        size = each.size or sum(len(x) for x in each.parts if isinstance(x, bytes | bytearray))
        if each.type != SHT_NOBITS:
            if (known := placed.get(id(each.parts))) is None:
                padding = -at % each.align
                offset = placed[id(each.parts)] = at + padding
                parts += (bytes(padding), *each.parts)
                at = offset + size
            else:
                offset = known
        if each.type == SHT_NOTE:
            notes = (offset, size)
        place = (each.address, offset, size, each.link, each.info, each.align, each.entry)
        rows.append(shdr.pack(named[each.name], each.type, each.flags, *place))
    padding = -at % (layout.bits // 8)
    fields = list(layout.ehdr.unpack_from(head, 16))
    fields[4:6] = layout.ehdr_size if segments else 0, at + padding
    fields[7:] = layout.ehdr_size, phdr.size, len(segments), shdr.size, len(rows), len(rows) - 1
    yield head[:6] + bytes((EV_CURRENT,)) + head[7:16] + layout.ehdr.pack(*fields)
    yield from (phdr.pack(*program_header(layout, each, notes)) for each in segments)
    yield from (*parts, bytes(padding), *rows)


def elf_bytes(head: bytes, segments: Sequence[Segment], sections: Iterable[NewSection]) -> bytes:
    """The bytes of a file as `elf_file` makes it, of sections that have no file as a part."""
    parts = elf_file(head, segments, sections)
    return b"".join(part for part in parts if isinstance(part, bytes | bytearray))


def _named(sections: Iterable[NewSection]) -> tuple[dict[bytes, int], list[NewSection]]:
    """Return the sections with one for their names added, and the offset of each name in it."""
    found = list(sections)
    names, places = bytearray(b"\0"), {b"": 0}
    for name in (*(each.name for each in found), _NAMES):
        if name not in places:
            places[name] = len(names)
            names += name + b"\0"
    return places, [*found, NewSection(_NAMES, SHT_STRTAB, (names,))]


def program_header(layout: ElfLayout, each: Segment, notes: tuple[int, int]) -> tuple[int, ...]:
    """Return the fields of a program header. A header of notes gets the offset and size in
    ``notes``.
    """
    offset, size, memory = each.offset, 0, each.memory
    if each.kind == PT_NOTE:
        offset, size, memory = *notes, notes[1]
    place = (offset, each.address, each.address, size, memory)
    if layout.bits == 64:
        return each.kind, each.flags, *place, each.align
    return each.kind, *place, each.flags, each.align


# --- a file of names ------------------------------------------------------------------------------

_SYMBOL: Final = Struct("<IBBHQQ")
_CLASS: Final = b"\x02\x01"  # 64 bit, little-endian
_LAYOUT: Final = LAYOUTS[_CLASS]
_GLOBAL_FUNCTION: Final = 0x12
_TEXT_INDEX: Final = 2
_STRTAB_INDEX: Final = 4
_ID_BYTES: Final = 20
_PAGE: Final = 4096


def symbol_file(
    symbols: Sequence[JitFunction], machine: int, source: bytes
) -> tuple[BuildId, bytes]:
    """Return the build ID and the bytes of a file that names ``symbols``, by ascending address.

    ``machine`` is its e_machine. The build ID is derived from the content and from ``source``,
    which identifies the process of the names.

    The code segment has no bytes in the file, and spans all functions. The segment has the same
    number as offset and as address. So if a mapping has its address as offset, addresses need no
    conversion. The file also has a section that would be loaded, so that it counts as an
    executable: perf reads names from a debug file only beside an executable.
    """
    strings, table = bytearray(b"\0"), bytearray(_SYMBOL.size)
    places: dict[bytes, int] = {}
    for start, size, name in symbols:
        at = places.get(name)
        if at is None:
            at = places[name] = len(strings)
            strings += name + b"\0"
        table += _SYMBOL.pack(at, _GLOBAL_FUNCTION, 0, _TEXT_INDEX, start, size)
    raw = fingerprint(b"".join((source, b"\0", table, strings)), _ID_BYTES)
    low = symbols[0].start & -_PAGE if symbols else 0
    high = symbols[-1].start + symbols[-1].size if symbols else 0
    segments = (
        Segment(PT_LOAD, PF_R | PF_X, low, low, 0, high - low, _PAGE),
        Segment(PT_NOTE, PF_R, 0, 0, 0, 0, 4),
    )
    sections = (
        NewSection(BUILD_ID, SHT_NOTE, [build_id_note(_LAYOUT, raw)], align=4),
        NewSection(
            b".text", SHT_NOBITS, flags=SHF_ALLOC | SHF_EXECINSTR, address=low, offset=low,
            size=high - low,
        ),
        NewSection(
            b".symtab", SHT_SYMTAB, [table], link=_STRTAB_INDEX, info=1, align=8, entry=_SYMBOL.size
        ),
        NewSection(b".strtab", SHT_STRTAB, [strings]),
        NewSection(b".source", SHT_PROGBITS, [source], SHF_ALLOC),
    )  # fmt: skip
    header = _LAYOUT.ehdr.pack(ET_DYN, machine, EV_CURRENT, *bytes(10))
    head = (MAGIC + _CLASS).ljust(16, b"\0") + header
    return BuildId(raw), elf_bytes(head, segments, sections)
