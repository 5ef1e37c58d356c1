# SPDX-License-Identifier: Apache-2.0
"""An ELF file with an added note: the build ID under which it is kept, for readers that need one.

perf refuses a file whose ``.note.gnu.build-id`` is not that of the profile. `with_note` returns the
bytes that differ: the ELF header, and a tail with the note, its section header and its program
header beside copies of the other headers. All other bytes stay where they are. A file without a
section table gets one with the note alone.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.header import (
    PF_R,
    PN_XNUM,
    PT_NOTE,
    SHN_XINDEX,
    SHT_NOTE,
    SHT_NULL,
    SHT_STRTAB,
    Segment,
    parse_header,
)
from buildidfs.formats.elf.writer import BUILD_ID, build_id_note, program_header

if TYPE_CHECKING:
    from buildidfs.formats.elf.header import ReadAt

_TABLE_MAX: Final = 1 << 20
_SECTIONS_MAX: Final = 0xFF00 - 3  # larger numbers, from SHN_LORESERVE on, are stored elsewhere
_NOTE_NAME: Final = BUILD_ID + b"\0"
_NAMES_NAME: Final = b".shstrtab\0"


class Stamped(NamedTuple):
    """The parts of the file of ``size`` bytes: ``head``, then the bytes of the original file, then
    ``tail``.

    ``tail`` begins at ``at``, at or after the end of the original; zeros fill the gap.
    """

    head: bytes
    at: int
    tail: bytes

    @property
    def size(self) -> int:
        """The size of the file with the note."""
        return self.at + len(self.tail)


def with_note(read_at: ReadAt, size: int, build_id: bytes) -> Stamped | None:
    """Return the parts that differ in a file with a note of ``build_id``; None if it cannot be
    added.

    Raises only errors of ``read_at``.
    """
    parsed = parse_header(read_at(0, min(size, 64)))
    if parsed is None:
        return None
    layout, header = parsed
    shdr, phdr = layout.section, layout.segment
    fields = list(header)
    phoff, shoff, phnum, shnum, names_index = (fields[i] for i in (4, 5, 9, 11, 12))
    segments = _table(read_at, size, phoff, phnum * phdr.size) if phoff else b""
    sections = _table(read_at, size, shoff, shnum * shdr.size) if shoff and shnum else b""
    too_many = phnum >= PN_XNUM - 1 or shnum > _SECTIONS_MAX or names_index == SHN_XINDEX
    if segments is None or sections is None or too_many or (shoff and not shnum):
        return None
    at = -(-size // 16) * 16
    tail = _Tail(at)
    note = build_id_note(layout, build_id)
    note_at = tail.add(note)
    names = _names(read_at, size, shdr, sections, names_index)
    sections = _without_note(shdr, sections, names)
    note_name = len(names)
    names += _NOTE_NAME + _NAMES_NAME
    names_at = tail.add(names)
    table = sections or shdr.pack(*([0] * 10))
    table += shdr.pack(note_name, SHT_NOTE, 0, 0, note_at, len(note), 0, 0, 4, 0)
    strings = note_name + len(_NOTE_NAME), SHT_STRTAB, 0, 0, names_at, len(names), 0, 0, 1, 0
    table += shdr.pack(*strings)
    count = len(table) // shdr.size
    fields[5], fields[10:] = tail.add(table), (shdr.size, count, count - 1)
    entry = Segment(PT_NOTE, PF_R, note_at, 0, len(note), len(note), 4)
    segments = phdr.pack(*program_header(layout, entry, (note_at, len(note)))) + segments
    fields[4], fields[8], fields[9] = tail.add(segments), phdr.size, phnum + 1
    if layout.bits == 32 and at + len(tail.data) >= 1 << 32:
        return None
    head = read_at(0, 16) + layout.ehdr.pack(*fields)
    return Stamped(head, at, bytes(tail.data))


def _without_note(shdr: Struct, sections: bytes, names: bytes) -> bytes:
    """Return the section headers. A section with the name of the note, which has another ID, loses
    its name.
    """
    changed = bytearray(sections)
    for at in range(0, len(sections), shdr.size):
        fields = list(shdr.unpack_from(sections, at))
        if names.startswith(_NOTE_NAME, fields[0]):
            fields[0] = len(names) - 1  # the NUL at the end
            shdr.pack_into(changed, at, *fields)
    return bytes(changed)


class _Tail:
    """Bytes at the end of a file from an offset on; each part begins at a multiple of 8."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.data = bytearray()

    def add(self, part: bytes) -> int:
        """Add a part, and return its offset in the file."""
        self.data += bytes(-len(self.data) % 8)
        offset = self._at + len(self.data)
        self.data += part
        return offset


def _table(read_at: ReadAt, size: int, offset: int, length: int) -> bytes | None:
    """Return a table of headers, None if it is too large or incomplete."""
    if length > _TABLE_MAX or offset + length > size:
        return None
    data = read_at(offset, length)
    return data if len(data) == length else None


def _names(read_at: ReadAt, size: int, shdr: Struct, sections: bytes, index: int) -> bytes:
    """Return the names of the sections, with a NUL at the end; unreadable names are empty."""
    at = index * shdr.size
    if at + shdr.size > len(sections):
        return b"\0"
    _, kind, _, _, offset, length, *_ = shdr.unpack_from(sections, at)
    if kind == SHT_NULL or not 0 < length <= _TABLE_MAX or offset + length > size:
        return b"\0"
    return read_at(offset, length) + b"\0"
