# SPDX-License-Identifier: Apache-2.0
"""What the section headers of an ELF file say it is: executable, debug information, scripts.

The extents of ``.debug_gdb_scripts`` are a matter of safety: gdb runs what is in there, so the
front doors show the section of an untrusted file as zeros, and every section that gdb would take
for it has to be found. gdb asks BFD for a section of that name, so the rules here are those of BFD
(elfcode.h, elf.c) or wider:

- e_shnum and e_shstrndx may be escapes to fields of section 0; a string table index out of range
  counts as 0, and the type of the string table is not looked at;
- BFD puts a NUL over the last byte of a string table that lacks one (earlier versions put it after
  it), so a name that runs into the end counts with and without its last character;
- ``.zdebug_gdb_scripts`` is renamed when BFD decompresses, as gdb asks it to; SHF_COMPRESSED
  changes the contents but not the extent;
- SHT_NOBITS has no bytes in the file. Any other type counts.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from buildidfs.formats.elfheader import (
    LAYOUTS,
    PN_XNUM,
    PT_DYNAMIC,
    PT_LOAD,
    SHF_ALLOC,
    SHF_COMPRESSED,
    SHN_XINDEX,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_NULL,
    SHT_SYMTAB,
    TABLE_MAX,
    Layout,
    ReadAt,
    Source,
)
from buildidfs.model import Absence, BuildId, ByteRange, Kind, Quality

_NAME_MAX: Final = 64  # longer than any section name that means something here
_LINK_MAX: Final = 4096 + 128  # a path and a build ID or checksum
_SCRIPTS_MAX: Final = 64

_SCRIPTS: Final = frozenset((b".debug_gdb_scripts", b".zdebug_gdb_scripts"))
_DWARF: Final = frozenset(
    (b".debug_info", b".zdebug_info", b".debug_line", b".zdebug_line", b".debug_types")
)


class DebugLink(msgspec.Struct, frozen=True):
    """``.gnu_debuglink``: base name of the separate debug file and the CRC-32 of its bytes.

    The checksum is the one of zlib: ``zlib.crc32(data)``.
    """

    name: bytes
    crc: int


class AltLink(msgspec.Struct, frozen=True):
    """``.gnu_debugaltlink``: path and build ID of the file with what dwz found in several."""

    name: bytes
    build_id: BuildId


class ElfFile(msgspec.Struct, frozen=True):
    """What one ELF file is to debuggers.

    ``kinds`` is not empty. ``scripts`` are the extents of ``.debug_gdb_scripts`` within the file,
    ascending and disjoint. ``truncated`` says that headers claim bytes beyond the end of the file:
    a copy taken while it was being written, or one that was damaged on purpose.
    """

    build_id: BuildId
    kinds: tuple[Kind, ...]
    quality: Quality
    debuglink: DebugLink | None
    altlink: AltLink | None
    scripts: tuple[ByteRange, ...]
    machine: int
    bits: int
    little_endian: bool
    etype: int
    truncated: bool


class _Section(NamedTuple):
    names: tuple[bytes, ...]
    type: int
    flags: int
    offset: int
    size: int


def classify(build_id: BuildId, head: bytes, read_at: ReadAt, size: int) -> ElfFile | Absence:
    """Describe a file whose ELF header is known to be whole (`elf.identify` found a build ID).

    MALFORMED when the section table, or the table of section names, is too large to be read.
    """
    layout = LAYOUTS[head[4:6]]
    etype, machine, _, _, phoff, shoff, _, _, _, phnum, _, shnum, shstrndx = (
        layout.ehdr.unpack_from(head, 16)
    )
    source = Source(head, read_at, size)
    if shoff:
        first = source.read(shoff, layout.shdr.size)
        if len(first) == layout.shdr.size:
            _, _, _, _, many_sections, link, many_segments, _ = layout.shdr.unpack(first)
            shnum = shnum or many_sections
            if shstrndx == SHN_XINDEX:
                shstrndx = link
            if phnum == PN_XNUM:
                phnum = many_segments or phnum
    table = source.table(layout.shdr, shoff, shnum) if shoff else b""
    segments = source.table(layout.phdr, phoff, phnum) if phoff else b""
    if table is None or segments is None:
        return Absence.MALFORMED
    sections = _sections(layout, table, shstrndx if shstrndx < shnum else 0, source)
    if sections is None:
        return Absence.MALFORMED
    kinds, quality = _contents(
        sections, [(kind, length) for kind, _, length, _ in layout.phdr.iter_unpack(segments)]
    )
    return ElfFile(
        build_id,
        kinds,
        quality,
        _debuglink(sections, source, layout),
        _altlink(sections, source),
        _scripts(sections, size),
        machine,
        layout.bits,
        layout.little_endian,
        etype,
        source.short or _claims_beyond(size, layout, segments, sections),
    )


def _sections(
    layout: Layout, table: bytes, names_index: int, source: Source
) -> list[_Section] | None:
    """All sections with their names; None if the table of names is too large."""
    headers = list(layout.shdr.iter_unpack(table))
    names = b""
    if names_index < len(headers):
        _, _, _, offset, size, _, _, _ = headers[names_index]
        if size > TABLE_MAX:
            return None
        names = source.read(offset, size)
    return [
        _Section(_names_at(names, name), kind, flags, offset, size)
        for name, kind, flags, offset, size, _, _, _ in headers
        if kind != SHT_NULL
    ]


def _names_at(names: bytes, at: int) -> tuple[bytes, ...]:
    # Sliced first: a search for the NUL through a large table, once per section, is quadratic.
    name, nul, _ = names[at : at + _NAME_MAX].partition(b"\0")
    if nul or at + len(name) < len(names):
        return (name,)
    return (name, name[:-1])


def _contents(
    sections: list[_Section], segments: list[tuple[int, int]]
) -> tuple[tuple[Kind, ...], Quality]:
    """The kinds a file can serve as, and how good it is."""
    types = {section.type for section in sections}
    dwarf = any(section.names[0] in _DWARF and section.type != SHT_NOBITS for section in sections)
    if sections:
        loaded = any(
            section.flags & SHF_ALLOC
            and section.size
            and section.type not in (SHT_NOBITS, SHT_NOTE)
            for section in sections
        )
    else:
        loaded = any(kind == PT_LOAD and length for kind, length in segments)
    debug = dwarf or SHT_SYMTAB in types
    kinds: tuple[Kind, ...] = (Kind.EXECUTABLE,) if loaded or not debug else ()
    if debug:
        kinds += (Kind.DEBUGINFO,)
    if dwarf:
        return kinds, Quality.DEBUGINFO
    if SHT_SYMTAB in types:
        return kinds, Quality.SYMTAB
    if SHT_DYNSYM in types or any(kind == PT_DYNAMIC and length for kind, length in segments):
        return kinds, Quality.DYNSYM
    return kinds, Quality.NONE


def _link(sections: list[_Section], source: Source, wanted: bytes) -> tuple[bytes, bytes] | None:
    """The file name in a link section, and what follows its NUL."""
    for section in sections:
        if section.names[0] == wanted and section.type != SHT_NOBITS:
            if section.flags & SHF_COMPRESSED or section.size > _LINK_MAX:
                return None
            name, nul, rest = source.read(section.offset, section.size).partition(b"\0")
            return (name, rest) if name and nul else None
    return None


def _debuglink(sections: list[_Section], source: Source, layout: Layout) -> DebugLink | None:
    if (found := _link(sections, source, b".gnu_debuglink")) is None:
        return None
    name, rest = found
    padding = -(len(name) + 1) % 4
    crc = rest[padding : padding + 4]
    if len(crc) != 4:
        return None
    return DebugLink(name, int.from_bytes(crc, "little" if layout.little_endian else "big"))


def _altlink(sections: list[_Section], source: Source) -> AltLink | None:
    if (found := _link(sections, source, b".gnu_debugaltlink")) is None:
        return None
    name, raw = found
    if not BuildId.MIN_BYTES <= len(raw) <= BuildId.MAX_BYTES:
        return None
    return AltLink(name, BuildId(raw))


def _scripts(sections: list[_Section], size: int) -> tuple[ByteRange, ...]:
    """The extents of script sections: clipped to the file, ascending, merged, few."""
    spans: list[tuple[int, int]] = []
    for section in sorted(sections, key=lambda section: section.offset):
        start, end = section.offset, min(section.offset + section.size, size)
        if section.type == SHT_NOBITS or start >= end or _SCRIPTS.isdisjoint(section.names):
            continue
        if spans and start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
        else:
            spans.append((start, end))
    if len(spans) > _SCRIPTS_MAX:
        # No linker makes so many. Hide what lies between the last of them as well.
        spans[_SCRIPTS_MAX - 1 :] = [(spans[_SCRIPTS_MAX - 1][0], spans[-1][1])]
    return tuple(ByteRange(start, end - start) for start, end in spans)


def _claims_beyond(size: int, layout: Layout, segments: bytes, sections: list[_Section]) -> bool:
    """Whether a segment or section lies, in part, past the end of the file."""
    if any(
        section.type != SHT_NOBITS and section.offset + section.size > size for section in sections
    ):
        return True
    return any(
        kind == PT_LOAD and offset + length > size
        for kind, offset, length, _ in layout.phdr.iter_unpack(segments)
    )
