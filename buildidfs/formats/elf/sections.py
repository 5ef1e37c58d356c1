# SPDX-License-Identifier: Apache-2.0
"""Find sections of an ELF file by name or type, and read their contents.

Contents compressed with zlib are inflated: those with the flag SHF_COMPRESSED, and those of
sections named ``.zdebug_*``, the form of GNU before 2015. `packed_sections` finds the sections in
forms that not all programs read. Sizes are claims: nothing is read beyond the given limit, and no
input raises; an exception of ``read_at`` itself passes through.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.header import (
    SHF_COMPRESSED,
    SHN_XINDEX,
    SHT_DYNSYM,
    SHT_NOBITS,
    SHT_NULL,
    SHT_SYMTAB,
    FileBytes,
    ReadAt,
    parse_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_HEAD_SIZE: Final = 64
_NAME_MAX: Final = 64
# 16,384 headers, and their names: a linked file has about 40.
_TABLE_MAX: Final = 1 << 20
# DWARF grows to 3 to 5 times its size.
_INFLATED_RATIO: Final = 32
_INFLATED_LEAST: Final = 1 << 20
_NAMES_MAX: Final = 4 << 20
_CH_ZLIB: Final = 1
_DEBUG: Final = b".debug_"
_PACKED: Final = b".zdebug_"
_PACKED_HEAD: Final = Struct(">4sQ")  # the magic, and the size of the plain bytes
_PACKED_MAGIC: Final = b"ZLIB"


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
    align: int = 1

    @property
    def is_packed(self) -> bool:
        """True if the contents are compressed."""
        return bool(self.flags & SHF_COMPRESSED) or self.name.startswith(_PACKED)


class Sections:
    """The sections of one file of ``size`` bytes; there are none if the file is not ELF, is
    damaged, or has too many sections.

    ``headers`` has all of them in order, so that the index of a header is its number in the file;
    ``table`` is the place of the headers in the file, ``names_at`` that of their names.
    """

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at = read_at
        self._size = size
        self.headers: list[SectionHeader] = []
        self.little_endian = True
        self.table = self.names_at = 0
        head = read_at(0, min(size, _HEAD_SIZE))
        parsed = parse_header(head)
        if parsed is None:
            return
        layout, header = parsed
        self.bits = layout.bits
        self.little_endian = layout.little_endian
        order = "<" if layout.little_endian else ">"
        self.chdr = Struct(order + ("I4xQQ" if layout.bits == 64 else "III"))
        self.form = layout.section
        self.table, count, names_index = header[5], header[11], header[12]
        source = FileBytes(head, read_at, size)
        first = source.read(self.table, self.form.size) if self.table else b""
        if len(first) < self.form.size:
            return
        zeroth = self.form.unpack(first)
        count = count or zeroth[5]
        if names_index == SHN_XINDEX:
            names_index = zeroth[6]
        self._load(source, count, names_index)

    def _load(self, source: FileBytes, count: int, names_index: int) -> None:
        if count * self.form.size > _TABLE_MAX:
            return
        rows = list(self.form.iter_unpack(source.table(self.form, self.table, count) or b""))
        names = b""
        if names_index < len(rows) and rows[names_index][5] <= _NAMES_MAX:
            self.names_at = rows[names_index][4]
            names = source.read(self.names_at, rows[names_index][5])
        for name, kind, flags, address, offset, length, link, info, align, _ in rows:
            spelled = names[name : name + _NAME_MAX].partition(b"\0")[0]
            self.headers.append(
                SectionHeader(spelled, kind, flags, address, offset, length, link, info, align)
            )

    def named(self, *names: bytes) -> SectionHeader | None:
        """Return the first section with one of these names that has contents in the file."""
        return next((each for each in self._real() if each.name in names), None)

    def debug(self, name: bytes) -> SectionHeader | None:
        """Return the first section with this name, which begins with ``.debug_``, or with the
        corresponding name that begins with ``.zdebug_``.
        """
        return self.named(name, _PACKED + name.removeprefix(_DEBUG))

    def typed(self, kind: int) -> tuple[int, SectionHeader] | None:
        """Return the first section of this type, and its number."""
        for number, each in enumerate(self.headers):
            if each.type == kind and each.size:
                return number, each
        return None

    def contents(self, section: SectionHeader | None, limit: int) -> bytes:
        """Return the bytes of a section; empty if they exceed ``limit``, or are damaged."""
        if section is None or section.type in (SHT_NOBITS, SHT_NULL):
            return b""
        if section.size > limit or section.offset + section.size > self._size:
            return b""
        data = self._read_at(section.offset, section.size)
        if len(data) < section.size:
            return b""
        if section.flags & SHF_COMPRESSED:
            is_zlib = len(data) >= self.chdr.size and self.chdr.unpack_from(data)[0] == _CH_ZLIB
            return _inflated(data[self.chdr.size :], limit) if is_zlib else b""
        if section.name.startswith(_PACKED) and data.startswith(_PACKED_MAGIC):
            return _inflated(data[_PACKED_HEAD.size :], limit)
        return data

    def _real(self) -> list[SectionHeader]:
        return [each for each in self.headers if each.type not in (SHT_NOBITS, SHT_NULL)]


def _inflated(data: bytes, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    limit = min(limit, _INFLATED_LEAST + _INFLATED_RATIO * len(data))
    try:
        plain = inflater.decompress(data, limit)
    except zlib.error:
        return b""
    return plain if inflater.eof else b""


# --- symbol tables -------------------------------------------------------------------------------

_STT_FUNC: Final = 2
_TABLE_BYTES: Final = 4 << 20
_STRINGS_BYTES: Final = 16 << 20
_FUNCTION_NAME_MAX: Final = 512


class FunctionSymbol(NamedTuple):
    """A function of a symbol table; the name is cut at 512 bytes."""

    name: bytes
    address: int
    size: int


def defines(sections: Sections, name: bytes, most: int) -> bool:
    """Return True if a symbol table of a file defines a symbol, which a reference does not.

    Tables of more than ``most`` bytes are not read.
    """
    wanted = name + b"\0"
    for kind in (SHT_SYMTAB, SHT_DYNSYM):
        found = sections.typed(kind)
        if found is None or not 0 < found[1].link < len(sections.headers):
            continue
        names = sections.contents(sections.headers[found[1].link], most)
        if wanted not in names:
            continue
        size, section = (24, 6) if sections.bits == 64 else (16, 14)  # Elf64_Sym, Elf32_Sym
        data = sections.contents(found[1], most)
        data = data[: len(data) // size * size]
        words, halves = array("I", data), array("H", data)
        if sections.little_endian != (sys.byteorder == "little"):
            words.byteswap()
            halves.byteswap()
        rows = zip(words[:: size // 4], halves[section // 2 :: size // 2], strict=True)
        if any(home and names.startswith(wanted, start) for start, home in rows):
            return True
    return False


def functions(sections: Sections) -> Iterator[FunctionSymbol]:
    """Yield the functions of the symbol table, else of the dynamic one, in its order.

    Of several functions at one address only the first is yielded. There are none if the table is
    damaged, or has more than 174,762 symbols.
    """
    found = sections.typed(SHT_SYMTAB) or sections.typed(SHT_DYNSYM)
    table = None if found is None else found[1]
    if table is None or not 0 < table.link < len(sections.headers):
        return
    names = sections.contents(sections.headers[table.link], _STRINGS_BYTES)
    data = sections.contents(table, _TABLE_BYTES)
    wide = sections.bits == 64
    form = Struct(("<" if sections.little_endian else ">") + ("IBBHQQ" if wide else "IIIBBH"))
    seen: set[int] = set()
    for row in form.iter_unpack(data[: len(data) // form.size * form.size]):
        if wide:
            name, info, _, section, address, size = row
        else:
            name, address, size, info, _, section = row
        if info & 15 == _STT_FUNC and section and size and address not in seen:
            seen.add(address)
            end = names.find(b"\0", name, name + _FUNCTION_NAME_MAX)
            end = name + _FUNCTION_NAME_MAX if end < 0 else end
            yield FunctionSymbol(names[name:end], address, size)


# --- sections in forms that not all programs read -------------------------------------------------

_CH_ZSTD: Final = 2
_SIZE_64: Final = 64
_NAME, _FLAGS, _OFFSET, _SIZE, _ALIGNMENT = 0, 2, 4, 5, 8  # fields of a section header


class PackedSection(NamedTuple):
    """A section whose ``size`` bytes from ``offset`` decompress to ``plain`` bytes.

    ``is_zstd`` is True for zstd, False for zlib. ``header_at`` is the offset of its header, which
    has these ``fields`` in this ``form``. If ``name_at`` is not 0, the byte there has to become a
    dot, because the name of the plain section begins with one.
    """

    header_at: int
    offset: int
    size: int
    plain: int
    alignment: int
    form: Struct
    fields: tuple[int, ...]
    is_zstd: bool = True
    name_at: int = 0

    def start(self, end: int) -> int:
        """Return the offset at which the plain bytes of the section begin if they are appended to a
        file that ends at ``end``.
        """
        alignment = max(1, min(self.alignment, 4096))
        return -(-end // alignment) * alignment

    @property
    def most(self) -> int:
        """Return the greatest offset that the form of its header can express."""
        return (1 << 64) - 1 if self.form.size == _SIZE_64 else (1 << 32) - 1

    def header(self, start: int) -> bytes:
        """Return the header for plain bytes at ``start``; they must end at or before ``most``."""
        fields = list(self.fields)
        fields[_NAME] += bool(self.name_at)
        fields[_FLAGS] &= ~SHF_COMPRESSED
        fields[_OFFSET], fields[_SIZE], fields[_ALIGNMENT] = start, self.plain, self.alignment
        return self.form.pack(*fields)


def packed_sections(read_at: ReadAt, size: int, above: int | None = None) -> list[PackedSection]:
    """Return the sections within a file whose form some programs cannot read.

    These are sections compressed by zstd (ELFCOMPRESS_ZSTD of 2022), which LLVM 15, elfutils 0.188
    and programs built without zstd cannot read, and sections named ``.zdebug_*``, which LLVM cannot
    read from version 16 on. With ``above`` these are also all compressed sections of more plain
    bytes than that. The caller can append the plain bytes to the file, and give the section
    `PackedSection.header`.
    """
    sections = Sections(read_at, size)
    found = []
    for number, section in enumerate(sections.headers):
        is_there = section.is_packed and section.type not in (SHT_NOBITS, SHT_NULL)
        if not is_there or section.offset + section.size > size:
            continue
        header_at = sections.table + number * sections.form.size
        row = read_at(header_at, sections.form.size)
        if len(row) == sections.form.size:
            fields = sections.form.unpack(row)
            packed = _packed(sections, section, header_at, fields, read_at, above)
            if packed is not None:
                found.append(packed)
    return found


def _packed(
    sections: Sections,
    section: SectionHeader,
    header_at: int,
    fields: tuple[int, ...],
    read_at: ReadAt,
    above: int | None,
) -> PackedSection | None:
    is_named = not section.flags & SHF_COMPRESSED
    form = _PACKED_HEAD if is_named else sections.chdr
    head = read_at(section.offset, form.size)
    if section.size < form.size or len(head) < form.size:
        return None
    if is_named:
        magic, plain = form.unpack(head)
        kind, alignment = (_CH_ZLIB if magic == _PACKED_MAGIC else 0), section.align
    else:
        kind, plain, alignment = form.unpack(head)
    is_large = above is not None and plain > above and kind == _CH_ZLIB
    if not is_large and kind != (_CH_ZLIB if is_named else _CH_ZSTD):
        return None
    payload = section.offset + form.size, section.size - form.size
    name_at = sections.names_at + fields[_NAME] + 1 if is_named else 0
    return PackedSection(
        header_at, *payload, plain, alignment, sections.form, fields, kind == _CH_ZSTD, name_at
    )
