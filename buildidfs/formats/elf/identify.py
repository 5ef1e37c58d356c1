# SPDX-License-Identifier: Apache-2.0
"""Identify an ELF file by its GNU build ID, and describe it from its section headers.

`identify` runs for every file of a scan, so it is written for speed: in the usual case everything
is in the first page, which the caller has read already, and it unpacks one header, walks the
program headers and the first note. `describe` runs once for each file that is kept.

Every size, count and offset in a header is a claim. At most `TABLE_MAX` bytes of a table and
``_NOTES_MAX`` bytes of notes are read, no memory is allocated by claimed size, and no input makes
either function raise; an exception of ``read_at`` itself passes through.

The extents of ``.debug_gdb_scripts`` matter for safety: gdb runs these scripts, so mount and server
show the section of an untrusted file as zeros, and `describe` must find every section that gdb
would use as such. gdb asks BFD for a section of that name, so the rules here are those of BFD
(elfcode.h, elf.c) or wider:

- e_shnum and e_shstrndx may be escapes to fields of section 0; a string table index out of range
  counts as 0, and the type of the string table is not looked at;
- BFD puts a NUL over the last byte of a string table that lacks one (earlier versions put it after
  it), so a name that runs into the end counts with and without its last character;
- ``.zdebug_gdb_scripts`` is renamed when BFD decompresses, as gdb asks it to; SHF_COMPRESSED
  changes the contents but not the extent;
- SHT_NOBITS has no bytes in the file, SHT_NULL is no section. Any other type counts.

An ELF file within the file (``.gnu_debugdata``) needs no care: gdb loads no scripts from a file
that lies within another (SYMFILE_NOT_FILENAME).
"""

from __future__ import annotations

from itertools import islice
from typing import Final

import msgspec

from buildidfs.formats.elf.header import (
    ET_CORE,
    EV_CURRENT,
    LAYOUTS,
    MAGIC,
    PN_XNUM,
    PT_DYNAMIC,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHF_COMPRESSED,
    SHN_XINDEX,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_NULL,
    SHT_SYMTAB,
    TABLE_MAX,
    ElfLayout,
    FileBytes,
    ReadAt,
    gnu_build_id,
)
from buildidfs.formats.elf.units import skeletons
from buildidfs.model import Absence, BuildId, ByteRange, Kind, Quality, fingerprint

__all__ = ["HEAD_SIZE", "AltLink", "DebugLink", "ElfFile", "ReadAt", "describe", "identify"]

HEAD_SIZE = 4096
"""The number of bytes at the start of a file that `identify` needs."""

_AREA_MAX = 1 << 20  # the most bytes read of one note segment or section
_NOTES_MAX = 4 << 20  # the most for one file, before it counts as having no build ID
_AREA_MIN = 4096  # a smaller area counts as this much, which also bounds the number of reads


def identify(head: bytes, read_at: ReadAt, size: int | None = None) -> BuildId | Absence:
    """Return the build ID of a file, or why it has none.

    ``head`` is the first `HEAD_SIZE` bytes of the file, or all of a smaller one; ``read_at`` reads
    other bytes. ``size`` is that of the file if known; claims beyond it are not followed. PT_NOTE
    segments are searched first, as the kernel does, and SHT_NOTE sections if there was none: Go's
    linker puts the build ID into a section that no segment covers, and relocatable files have no
    segments. The first GNU build ID note decides. A supplementary file of DWARF 5 (``dwz
    --dwarf-5``) has none; its checksum is used instead.
    """
    if head[:4] != MAGIC:
        return Absence.NOT_ELF if head else Absence.EMPTY
    layout = LAYOUTS.get(head[4:6])
    if layout is None:
        return Absence.MALFORMED if len(head) >= 6 else Absence.TRUNCATED
    if len(head) < layout.ehdr_size:
        return Absence.TRUNCATED
    header = layout.ehdr.unpack_from(head, 16)
    etype, phoff, shoff, phnum, shnum = header[0], header[4], header[5], header[9], header[11]
    if etype == ET_CORE:
        return Absence.NO_BUILD_ID  # the notes of a core describe the process, not the file

    source = FileBytes(head, read_at, size)
    if shoff and (phnum == PN_XNUM or not shnum):
        # The real numbers did not fit into the header; they are in section header 0.
        first = source.read(shoff, layout.shdr.size)
        if len(first) == layout.shdr.size:
            _, _, _, _, many_sections, _, many_segments, _ = layout.shdr.unpack(first)
            shnum = shnum or many_sections
            if phnum == PN_XNUM:
                phnum = many_segments or phnum
    budget = _NOTES_MAX
    segments = source.table(layout.phdr, phoff, phnum) if phoff else b""
    for kind, at, length, align in layout.phdr.iter_unpack(segments or b""):
        if kind == PT_NOTE:
            area = source.read(at, min(length, _AREA_MAX, budget))
            if (raw := gnu_build_id(area, layout.little_endian, align)) is not None:
                return _checked(raw)
            if (budget := budget - max(len(area), _AREA_MIN)) <= 0:
                return Absence.NO_BUILD_ID
    sections = source.table(layout.shdr, shoff, shnum) if shoff else b""
    for _, kind, _, at, length, _, _, align in layout.shdr.iter_unpack(sections or b""):
        if kind == SHT_NOTE:
            area = source.read(at, min(length, _AREA_MAX, budget))
            if (raw := gnu_build_id(area, layout.little_endian, align)) is not None:
                return _checked(raw)
            if (budget := budget - max(len(area), _AREA_MIN)) <= 0:
                return Absence.NO_BUILD_ID
    if segments is None or sections is None:
        return Absence.MALFORMED
    if source.short:
        return Absence.TRUNCATED
    found = supplement_id(source, layout, sections, header[12])
    return Absence.NO_BUILD_ID if found is None else found


def describe(read_at: ReadAt, size: int) -> ElfFile | Absence:
    """Describe a file of ``size`` bytes for debuggers, or say why it cannot be kept.

    For a file without a build ID the answers are those of `identify`. A section table that is too
    large to be read gives MALFORMED, because unexamined sections must not be served.
    """
    head = read_at(0, min(size, HEAD_SIZE))
    build_id = identify(head, read_at, size)
    if isinstance(build_id, Absence):
        return build_id
    return classify(build_id, head, read_at, size)


def _checked(raw: bytes) -> BuildId | Absence:
    if BuildId.MIN_BYTES <= len(raw) <= BuildId.MAX_BYTES:
        return BuildId(raw)
    return Absence.BAD_BUILD_ID


# --- classification ------------------------------------------------------------------------------

_NAME_MAX: Final = 64  # longer than any section name that is used here
_LINK_MAX: Final = 4096 + 128  # a path and a build ID or checksum
_SUPPLEMENT_NAMES_MAX: Final = 4096  # files made by dwz have a dozen sections
_SCRIPTS_MAX: Final = 64
_SEGMENTS_MAX: Final = 256
# Units of assembler files come first, and are not skeletons.
_UNITS_MAX: Final = 64
_DWO_IDS_MAX: Final = 16

_SCRIPTS: Final = frozenset((b".debug_gdb_scripts", b".zdebug_gdb_scripts"))
_DWARF: Final = frozenset(
    (
        b".debug_info", b".zdebug_info", b".debug_line", b".zdebug_line", b".debug_types",
        b".debug_info.dwo",
    )
)  # fmt: skip
_MINI: Final = b".gnu_debugdata"
# Go writes the last two into each program, even if the C linker puts the table of functions into
# another section.
_GO: Final = frozenset(
    (b".gopclntab", b".data.rel.ro.gopclntab", b".go.buildinfo", b".note.go.buildid")
)
MADE_OF_GOPCLNTAB: Final = b".buildidfs.gopclntab"
"""The section of a debug file made by `formats.go`. It has the SHA-256 of the program."""
_SPLIT: Final = b".debug_addr"
_SUPPLEMENTARY: Final = b".debug_sup"
_LINKS: Final = frozenset((b".gnu_debuglink", b".gnu_debugaltlink", _SUPPLEMENTARY))
_DWARF_VERSION: Final = 5


class DebugLink(msgspec.Struct, frozen=True):
    """``.gnu_debuglink``: base name of the separate debug file and the CRC-32 of its bytes.

    The checksum is the one of zlib: ``zlib.crc32(data)``.
    """

    name: bytes
    crc: int


class AltLink(msgspec.Struct, frozen=True):
    """``.gnu_debugaltlink``: path and build ID of the file with the data that dwz found in several
    files.

    ``.debug_sup`` (``dwz --dwarf-5``) is treated the same: the file has its checksum in place of a
    build ID, see `supplement_id`.
    """

    name: bytes
    build_id: BuildId


class ElfFile(msgspec.Struct, frozen=True):
    """One ELF file as debuggers see it.

    ``kinds`` is not empty. ``scripts`` are the extents of ``.debug_gdb_scripts`` within the file,
    ascending and disjoint. ``truncated`` is empty for a whole file. Else it is the reason why
    debuggers refuse the file: headers claim bytes beyond its end, or have an impossible size. Such
    a file is an incomplete copy, or was damaged on purpose. ``segments`` is `Artifact.segments`.
    ``mini`` is the extent of ``.gnu_debugdata``, for `minidebug`, and ``dwo_ids`` are those of the
    first skeleton units, see `units`. ``shared`` is the ID in its note if unrelated files have
    this ID by mistake; ``build_id`` is then another ID. ``go`` is True if it may be a Go program.
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
    truncated: str
    segments: int
    mini: ByteRange | None = None
    dwo_ids: tuple[int, ...] = ()
    shared: BuildId | None = None
    go: bool = False

    @property
    def is_stripped_go(self) -> bool:
        """True if `formats.go` may make a debug file from it, and it has no names of its own."""
        return self.go and not self.truncated and Kind.DEBUGINFO not in self.kinds

    @property
    def supplement(self) -> tuple[bytes, BuildId] | None:
        """Return name and build ID of the dwz file that its DWARF needs, if any.

        Strip leaves ``altlink`` in executables, although no section refers to it any more.
        """
        if self.altlink is None or self.quality < Quality.DEBUGINFO:
            return None
        return self.altlink.name, self.altlink.build_id


def classify(build_id: BuildId, head: bytes, read_at: ReadAt, size: int) -> ElfFile | Absence:
    """Describe a file whose ELF header is known to be whole (`identify` found a build ID).

    The result is MALFORMED if the section table, or the table of section names, is too large to be
    read.
    """
    layout = LAYOUTS[head[4:6]]
    etype, machine, _, _, phoff, shoff, _, _, _, phnum, _, shnum, names_index = (
        layout.ehdr.unpack_from(head, 16)
    )
    source = FileBytes(head, read_at, size)
    many_segments = 0
    if shoff and (first := source.read(shoff, layout.shdr.size)) and not source.short:
        _, _, _, _, many_sections, names_link, many_segments, _ = layout.shdr.unpack(first)
        shnum = shnum or many_sections
        if names_index == SHN_XINDEX:
            names_index = names_link
    survey = _Survey(size)
    survey.flaw = _header_flaw(layout, head, shnum, many_segments)
    if phnum == PN_XNUM:
        phnum = many_segments or phnum
    table = source.table(layout.shdr, shoff, shnum) if shoff else b""
    segments = source.table(layout.phdr, phoff, phnum) if phoff else b""
    if table is None or segments is None:
        return Absence.MALFORMED
    names_index = names_index if names_index < shnum else 0
    if names_index and _type_at(layout, table, names_index) == SHT_NULL:
        survey.flaw = "truncated: its section headers are not written"
    names = _names(layout, table, names_index, source)
    if names is None:
        return Absence.MALFORMED

    survey.claim("its section headers", shoff + shnum * layout.shdr.size if shoff and shnum else 0)
    survey.claim("its program headers", phoff + phnum * layout.phdr.size if phoff and phnum else 0)
    for name, kind, flags, offset, length, _, _, _ in layout.shdr.iter_unpack(table):
        if kind != SHT_NULL:
            survey.section(_names_at(names, name), kind, flags, offset, length)
    for kind, offset, length, _ in layout.phdr.iter_unpack(segments):
        survey.segment(kind, offset, length)
    return ElfFile(
        build_id,
        survey.kinds(),
        survey.quality(),
        _debuglink(survey.links.get(b".gnu_debuglink"), source, layout),
        _altlink(survey.links.get(b".gnu_debugaltlink"), source)
        or _supplementary_link(survey.links.get(_SUPPLEMENTARY), source, layout),
        survey.scripts(),
        machine,
        layout.bits,
        layout.little_endian,
        etype,
        survey.truncated(),
        _segments(layout, segments),
        survey.mini,
        _dwo_ids(read_at, size) if survey.is_split else (),
        go=survey.is_go or not table,
    )


def _header_flaw(layout: ElfLayout, head: bytes, shnum: int, many_segments: int) -> str | None:
    """Return what is wrong with an ELF header, or None.

    ``shnum`` is the number of sections, and ``many_segments`` that of segments in section 0.
    """
    _, _, _, _, _, shoff, _, _, phentsize, phnum, shentsize, _, _ = layout.ehdr.unpack_from(
        head, 16
    )
    if (phnum and phentsize != layout.phdr.size) or (shnum and shentsize != layout.shdr.size):
        return "malformed: its headers have another size than those of such a file"
    if phnum == PN_XNUM and not many_segments:
        return "malformed: e_phnum is 0xffff, and section 0 has no other number"
    if shnum and shoff < layout.ehdr_size:
        return "malformed: its section headers are not where it says"
    if shoff and not shnum:
        return "malformed: e_shnum is 0, and section 0 has no other number"
    return f"malformed: its ELF version is {head[6]}" if head[6] != EV_CURRENT else None


def _dwo_ids(read_at: ReadAt, size: int) -> tuple[int, ...]:
    found = skeletons(read_at, size, _UNITS_MAX)
    return tuple(skeleton.dwo_id for skeleton in islice(found, _DWO_IDS_MAX))


def _segments(layout: ElfLayout, table: bytes) -> int:
    """Return a hash of addresses, sizes in memory and flags of the loaded segments.

    objcopy --only-keep-debug and eu-strip leave these unchanged, but not offsets and sizes in the
    file. The result is 0 if nothing is loaded.
    """
    entries = (entry[1:] for entry in layout.load.iter_unpack(table) if entry[0] == PT_LOAD)
    loaded = list(islice(entries, _SEGMENTS_MAX))
    return int.from_bytes(fingerprint(repr(loaded).encode())[:8], "big") if loaded else 0


class _Survey:
    """Findings of one pass over the headers. Irrelevant sections leave nothing."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sections = self._loaded = self._dwarf = self._symtab = self._dynsym = False
        self._scripts: list[tuple[int, int]] = []
        self.links: dict[bytes, tuple[int, int]] = {}
        self.mini: ByteRange | None = None
        self.is_split = self.is_go = self._made = False
        self.flaw: str | None = None
        self._end = (0, "")

    def claim(self, what: str, end: int) -> None:
        """Record the offset in the file at which a part would end."""
        if end > self._end[0]:
            self._end = (end, what)

    def truncated(self) -> str:
        """Return the reason for `ElfFile.truncated`."""
        end, what = self._end
        if self.flaw or end <= self._size:
            return self.flaw or ""
        return f"truncated: {what} would end at byte {end}, and the file does at {self._size}"

    def section(
        self, names: tuple[bytes, ...], kind: int, flags: int, offset: int, length: int
    ) -> None:
        """Record a section. ``names`` are all names under which readers may see it."""
        self._sections = True
        if kind == SHT_NOBITS or not length:
            return
        end = offset + length
        name = names[0]
        if flags & SHF_ALLOC and kind != SHT_NOTE:
            self._loaded = True
        if kind == SHT_SYMTAB:
            self._symtab = True
        elif kind == SHT_DYNSYM:
            self._dynsym = True
        elif name in _DWARF:
            self._dwarf = True
        elif name in _LINKS and not flags & SHF_COMPRESSED and length <= _LINK_MAX:
            self.links.setdefault(name, (offset, length))
        elif name == _MINI and end <= self._size:
            self.mini = ByteRange(offset, length)
        elif name == _SPLIT:
            self.is_split = True
        elif name in _GO:
            self.is_go = True
        elif name == MADE_OF_GOPCLNTAB:
            self._made = True
        if not _SCRIPTS.isdisjoint(names) and offset < self._size:
            self._scripts.append((offset, min(end, self._size)))
        self.claim("a section", end)

    def segment(self, kind: int, offset: int, length: int) -> None:
        """Record a segment, after all sections.

        Segments of a debug file describe the file it was split from (eu-strip leaves the offsets
        unchanged), so they count only if sections are loaded from the file, or there are none.
        """
        if not length:
            return
        if kind == PT_DYNAMIC:
            self._dynsym = True
        elif kind == PT_LOAD and (self._loaded or not self._sections):
            self._loaded = True
            self.claim("a segment", offset + length)

    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds under which the file can be served."""
        if not (self._dwarf or self._symtab):
            return (Kind.EXECUTABLE,)
        return (Kind.EXECUTABLE, Kind.DEBUGINFO) if self._loaded else (Kind.DEBUGINFO,)

    def quality(self) -> Quality:
        """Return the quality for a debugger."""
        if self._made and not self._loaded:
            return Quality.GOPCLNTAB
        if self._dwarf:
            return Quality.DEBUGINFO
        if self._symtab:
            return Quality.SYMTAB
        return Quality.DYNSYM if self._dynsym else Quality.NONE

    def scripts(self) -> tuple[ByteRange, ...]:
        """Return the extents of script sections, ascending, merged if they meet, and few."""
        spans: list[tuple[int, int]] = []
        for start, end in sorted(self._scripts):
            if spans and start <= spans[-1][1]:
                spans[-1] = (spans[-1][0], max(end, spans[-1][1]))
            else:
                spans.append((start, end))
        if len(spans) > _SCRIPTS_MAX:
            # No linker makes so many. The bytes between the last of them are hidden as well.
            spans[_SCRIPTS_MAX - 1 :] = [(spans[_SCRIPTS_MAX - 1][0], spans[-1][1])]
        return tuple(ByteRange(start, end - start) for start, end in spans)


def _names(layout: ElfLayout, table: bytes, index: int, source: FileBytes) -> bytes | None:
    """Return the table of section names, as far as it is in the file; None if it is too large."""
    at = index * layout.shdr.size
    if at >= len(table):
        return b""
    _, _, _, offset, size, _, _, _ = layout.shdr.unpack_from(table, at)
    return None if size > TABLE_MAX else source.read(offset, size)


def _type_at(layout: ElfLayout, table: bytes, index: int) -> int | None:
    """Return the type of a section; None if its header is not in the file."""
    at = index * layout.shdr.size
    return layout.shdr.unpack_from(table, at)[1] if at < len(table) else None


def _names_at(names: bytes, at: int) -> tuple[bytes, ...]:
    # Sliced first, because a search for the NUL in a large table, once per section, is quadratic.
    name, nul, _ = names[at : at + _NAME_MAX].partition(b"\0")
    if nul or at + len(name) < len(names):
        return (name,)
    return (name, name[:-1])


def _link(where: tuple[int, int] | None, source: FileBytes) -> tuple[bytes, bytes]:
    """Return the file name in a link section, and the bytes after the NUL; empty if
    there is none.
    """
    if where is None:
        return b"", b""
    name, nul, rest = source.read(*where).partition(b"\0")
    return (name, rest) if nul else (b"", b"")


def _debuglink(
    where: tuple[int, int] | None, source: FileBytes, layout: ElfLayout
) -> DebugLink | None:
    name, rest = _link(where, source)
    padding = -(len(name) + 1) % 4
    crc = rest[padding : padding + 4]
    if not name or len(crc) != 4:
        return None
    return DebugLink(name, int.from_bytes(crc, "little" if layout.little_endian else "big"))


def _altlink(where: tuple[int, int] | None, source: FileBytes) -> AltLink | None:
    name, raw = _link(where, source)
    if not name or not BuildId.MIN_BYTES <= len(raw) <= BuildId.MAX_BYTES:
        return None
    return AltLink(name, BuildId(raw))


def supplement_id(
    source: FileBytes, layout: ElfLayout, sections: bytes, names_index: int
) -> BuildId | None:
    """Return the ID that a supplementary file of DWARF 5 has instead of a build ID; else None.

    It is the checksum in ``.debug_sup``, which the files that refer to it contain. ``sections`` are
    the section headers of the file.
    """
    at = names_index * layout.shdr.size
    if at >= len(sections):
        return None
    _, _, _, offset, size, _, _, _ = layout.shdr.unpack_from(sections, at)
    names = source.read(offset, min(size, _SUPPLEMENT_NAMES_MAX))
    wanted = names.find(b"\0" + _SUPPLEMENTARY + b"\0") + 1
    if not wanted:
        return None
    for name, _, flags, at, length, _, _, _ in layout.shdr.iter_unpack(sections):
        if name == wanted and not flags & SHF_COMPRESSED and length <= _LINK_MAX:
            found = _debug_sup(source.read(at, length), layout)
            return found[2] if found is not None and found[0] else None
    return None


def _supplementary_link(
    where: tuple[int, int] | None, source: FileBytes, layout: ElfLayout
) -> AltLink | None:
    found = None if where is None else _debug_sup(source.read(*where), layout)
    if found is None or found[0] or not found[1]:
        return None
    return AltLink(found[1], found[2])


def _debug_sup(data: bytes, layout: ElfLayout) -> tuple[bool, bytes, BuildId] | None:
    """Decode ``.debug_sup``: True for the supplementary file itself, the name of that file, and its
    checksum. Source: DWARF 5, 7.3.6.
    """
    if int.from_bytes(data[:2], "little" if layout.little_endian else "big") != _DWARF_VERSION:
        return None
    name, nul, rest = data[3:].partition(b"\0")
    # The length is a LEB128 number; a checksum whose length takes more than one byte is not a build
    # ID.
    size = rest[0] if rest else 0
    checksum = rest[1 : 1 + size]
    if not nul or data[2] > 1 or len(checksum) != size:
        return None
    if not BuildId.MIN_BYTES <= size <= BuildId.MAX_BYTES:
        return None
    return data[2] == 1, name, BuildId(checksum)
