# SPDX-License-Identifier: Apache-2.0
"""Sections of an ELF file that are compressed by zstd (ELFCOMPRESS_ZSTD of 2022).

What reads debug information can do so for some years only, or was built without: LLVM 15 and
elfutils 0.188 show nothing. Such a section can be made plain behind the end of the file, with
another header. Sizes are claims; no input makes anything here raise.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple

from buildidfs.formats.elf.contents import Sections
from buildidfs.formats.elf.header import SHF_COMPRESSED, SHT_NOBITS, SHT_NULL, ReadAt

_CH_ZSTD: Final = 2
_SIZE_64: Final = 64
_FLAGS, _OFFSET, _SIZE, _ALIGNMENT = 2, 4, 5, 8  # fields of a section header


class Packed(NamedTuple):
    """A section, of which ``size`` bytes from ``offset`` on stand for ``plain`` bytes.

    ``header_at`` is where its header is, with these ``fields`` in this ``form``.
    """

    header_at: int
    offset: int
    size: int
    plain: int
    alignment: int
    form: Struct
    fields: tuple[int, ...]

    def start(self, end: int) -> int:
        """Where the plain section begins in a file that ends at ``end`` so far."""
        alignment = max(1, min(self.alignment, 4096))
        return -(-end // alignment) * alignment

    @property
    def most(self) -> int:
        """The greatest offset that its header can tell."""
        return (1 << 64) - 1 if self.form.size == _SIZE_64 else (1 << 32) - 1

    def header(self, start: int) -> bytes:
        """Its header when its plain bytes are at ``start``, which end before ``most``."""
        fields = list(self.fields)
        fields[_FLAGS] &= ~SHF_COMPRESSED
        fields[_OFFSET], fields[_SIZE], fields[_ALIGNMENT] = start, self.plain, self.alignment
        return self.form.pack(*fields)


def find(read_at: ReadAt, size: int) -> list[Packed]:
    """All such sections of a file of ``size`` bytes that lie within it."""
    sections = Sections(read_at, size)
    found = []
    for number, section in enumerate(sections.headers):
        is_packed = section.flags & SHF_COMPRESSED and section.type not in (SHT_NOBITS, SHT_NULL)
        if not is_packed or section.offset + section.size > size:
            continue
        form = Struct(("<" if sections.little_endian else ">") + _FORMS[sections.bits])
        head = read_at(section.offset, form.size)
        header_at = sections.table + number * sections.form.size
        row = read_at(header_at, sections.form.size)
        if section.size < form.size or len(head) < form.size or len(row) < sections.form.size:
            continue
        kind, plain, alignment = form.unpack(head)
        if kind == _CH_ZSTD:
            payload = section.offset + form.size, section.size - form.size
            fields = sections.form.unpack(row)
            found.append(Packed(header_at, *payload, plain, alignment, sections.form, fields))
    return found


# Elf32_Chdr and Elf64_Chdr: type, size, alignment.
_FORMS: Final = {32: "III", 64: "I4xQQ"}
