# SPDX-License-Identifier: Apache-2.0
"""Identify an ELF file by its GNU build ID, and tell what is in it.

`identify` runs for every file of a scan, so it is written for speed: in the usual case everything
is in the first page, which the caller has read already, and it unpacks one header, walks the
program headers and the first note. `describe` runs once for each file that is kept.

Every size, count and offset in a header is a claim. No claim makes more than `TABLE_MAX` bytes of
a table or ``_NOTES_MAX`` bytes of notes be read, nothing is allocated by claimed size, and no input
makes either function raise; an exception of ``read_at`` itself passes through.
"""

from __future__ import annotations

from buildidfs.formats.elf.header import (
    ET_CORE,
    LAYOUTS,
    MAGIC,
    PN_XNUM,
    PT_NOTE,
    SHT_NOTE,
    ReadAt,
    Source,
)
from buildidfs.formats.elf.notes import gnu_build_id
from buildidfs.formats.elf.sections import AltLink, DebugLink, ElfFile, classify, supplement_id
from buildidfs.model import Absence, BuildId

__all__ = ["HEAD_SIZE", "AltLink", "DebugLink", "ElfFile", "ReadAt", "describe", "identify"]

HEAD_SIZE = 4096
"""How much of the start of a file `identify` wants to be given."""

_AREA_MAX = 1 << 20  # the most that is read of one note segment or section
_NOTES_MAX = 4 << 20  # and of all of one file, before it counts as having no build ID
_AREA_MIN = 4096  # what an area counts for at least: the number of reads is bounded, too


def identify(head: bytes, read_at: ReadAt, size: int | None = None) -> BuildId | Absence:
    """The build ID of a file, or why it has none.

    ``head`` is the first `HEAD_SIZE` bytes of the file, or all of a smaller one; ``read_at`` is
    asked for what is not in there. ``size`` is that of the file if known; claims beyond it are not
    followed. PT_NOTE segments are searched first, as the kernel does, and SHT_NOTE sections if
    there was none: Go's linker puts the build ID into a section that no segment covers, and
    relocatable files have no segments. The first GNU build ID note decides. A supplementary file of
    DWARF 5 (``dwz --dwarf-5``) has none, and goes by its checksum.
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

    source = Source(head, read_at, size)
    if shoff and (phnum == PN_XNUM or not shnum):
        # The real numbers did not fit, and are in the section header of index 0.
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
    """What a file of ``size`` bytes is to debuggers, or why it cannot be kept.

    The same answers as `identify` for a file without a build ID, and MALFORMED for one whose
    section table is too large to be read: what is not looked at must not be served.
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
