# SPDX-License-Identifier: Apache-2.0
"""What is in the sections of an ELF file, for those few that are read and not only described.

Sections are found by name or type as in `elfsections`. Contents that are compressed the way of
SHF_COMPRESSED by zlib are inflated. Sizes are claims: nothing is read beyond the limit given, and
no input makes anything here raise; an exception of ``read_at`` itself passes through.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import Final, NamedTuple

from buildidfs.formats.elf.header import (
    LAYOUTS,
    MAGIC,
    SHF_COMPRESSED,
    SHN_XINDEX,
    SHT_NOBITS,
    SHT_NULL,
    ReadAt,
    Source,
)

_HEAD_SIZE: Final = 64
_NAME_MAX: Final = 64
# 16,384 headers, and their names: what is linked has some 40.
_TABLE_MAX: Final = 1 << 20
_NAMES_MAX: Final = 4 << 20
_CH_ZLIB: Final = 1


class SectionHeader(NamedTuple):
    """One section header; the fields are those of elf(5)."""

    name: bytes
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int


class Sections:
    """The sections of one file of ``size`` bytes; none if it is not ELF, damaged, or of too many.

    ``headers`` has them all in their order, so that the index of one is its number in the file;
    ``table`` is where the headers are in the file.
    """

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self._size = size
        self.headers: list[SectionHeader] = []
        self.table = 0
        head = read_at(0, min(size, _HEAD_SIZE))
        layout = LAYOUTS.get(head[4:6])
        if head[:4] != MAGIC or layout is None or len(head) < layout.ehdr_size:
            return
        self.bits = layout.bits
        self.little_endian = layout.little_endian
        order = "<" if layout.little_endian else ">"
        self._chdr = Struct(order + ("I4xQQ" if layout.bits == 64 else "III"))
        self.form = Struct(order + ("IIQQQQIIQQ" if layout.bits == 64 else "IIIIIIIIII"))
        header = layout.ehdr.unpack_from(head, 16)
        self.table, count, names_index = header[5], header[11], header[12]
        source = Source(head, read_at, size)
        first = source.read(self.table, self.form.size) if self.table else b""
        if len(first) < self.form.size:
            return
        zeroth = self.form.unpack(first)
        count = count or zeroth[5]
        if names_index == SHN_XINDEX:
            names_index = zeroth[6]
        self._load(source, count, names_index)

    def _load(self, source: Source, count: int, names_index: int) -> None:
        if count * self.form.size > _TABLE_MAX:
            return
        rows = list(self.form.iter_unpack(source.table(self.form, self.table, count) or b""))
        names = b""
        if names_index < len(rows) and rows[names_index][5] <= _NAMES_MAX:
            names = source.read(rows[names_index][4], rows[names_index][5])
        for name, kind, flags, address, offset, length, link, info, _, _ in rows:
            spelled = names[name : name + _NAME_MAX].partition(b"\0")[0]
            self.headers.append(
                SectionHeader(spelled, kind, flags, address, offset, length, link, info)
            )

    def named(self, *names: bytes) -> SectionHeader | None:
        """The first section of one of these names that has contents in the file."""
        return next((each for each in self._real() if each.name in names), None)

    def typed(self, kind: int) -> tuple[int, SectionHeader] | None:
        """The first section of this type, and its number."""
        for number, each in enumerate(self.headers):
            if each.type == kind and each.size:
                return number, each
        return None

    def contents(self, section: SectionHeader | None, limit: int) -> bytes:
        """What is in a section; nothing where that is more than ``limit`` bytes, or damaged."""
        if section is None or section.type in (SHT_NOBITS, SHT_NULL):
            return b""
        if section.size > limit or section.offset + section.size > self._size:
            return b""
        data = self._read_at(section.offset, section.size)
        if len(data) < section.size:
            return b""
        return self._inflated(data, limit) if section.flags & SHF_COMPRESSED else data

    def _real(self) -> list[SectionHeader]:
        return [each for each in self.headers if each.type not in (SHT_NOBITS, SHT_NULL)]

    def _inflated(self, data: bytes, limit: int) -> bytes:
        if len(data) < self._chdr.size or self._chdr.unpack_from(data)[0] != _CH_ZLIB:
            return b""
        inflater = zlib.decompressobj()
        try:
            plain = inflater.decompress(data[self._chdr.size :], limit)
        except zlib.error:
            return b""
        return plain if inflater.eof else b""
