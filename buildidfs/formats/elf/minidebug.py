# SPDX-License-Identifier: Apache-2.0
"""``.gnu_debugdata``: the symbols that a stripped executable carries, as an ELF file of its own.

Distributions put a debug file there, compressed by xz, with only those functions that are not in
the executable's ``.dynsym`` (gdb manual, "MiniDebugInfo"). A program that reads the executable sees
both. perf and elfutils assume that a debug file has all names, so if they get this file, they
ignore the names in ``.dynsym``. Therefore `completed` adds those names to it. No input raises, and
the work is bounded by the limits below.
"""

from __future__ import annotations

import bisect
from struct import Struct
from typing import Final, NamedTuple

from buildidfs.formats.elf.header import SHF_ALLOC, SHT_DYNSYM, SHT_NOBITS, SHT_SYMTAB, ReadAt
from buildidfs.formats.elf.sections import SectionHeader, Sections

SYMBOLS_MAX_BYTES: Final = 4 << 20
"""The largest ``.dynsym`` in bytes: that of libLLVM, one of the largest, has one megabyte."""
NAMES_MAX_BYTES: Final = 16 << 20

_SHF_TLS: Final = 0x400
_SHN_UNDEF: Final = 0
_SHN_LORESERVE: Final = 0xFF00
_ALIGN: Final = 8
# STB_GLOBAL, STB_WEAK and STB_GNU_UNIQUE; STT_NOTYPE, STT_OBJECT, STT_FUNC and STT_GNU_IFUNC
_BINDINGS: Final = frozenset((1, 2, 10))
_TYPES: Final = frozenset((0, 1, 2, 10))

# Elf64_Sym and Elf32_Sym, and the places in them of name, value, size, info, other and section
# index.
_FORMS: Final = {64: ("IBBHQQ", (0, 4, 5, 1, 2, 3)), 32: ("IIIBBH", (0, 1, 2, 3, 4, 5))}


class DynamicSymbols(NamedTuple):
    """The contents of ``.dynsym`` and of its string table."""

    symbols: bytes = b""
    names: bytes = b""


def dynamic_symbols(read_at: ReadAt, size: int) -> DynamicSymbols | None:
    """Return the dynamic symbols of an ELF file of ``size`` bytes, empty if it has none.

    Returns None if they are too many.
    """
    sections = Sections(read_at, size)
    found = sections.typed(SHT_DYNSYM)
    if found is None:
        return DynamicSymbols()
    _, header = found
    if header.link >= len(sections.headers):
        return None
    symbols = sections.contents(header, SYMBOLS_MAX_BYTES)
    names = sections.contents(sections.headers[header.link], NAMES_MAX_BYTES)
    return DynamicSymbols(symbols, names) if symbols and names else None


def completed(mini: bytes, dynamic: DynamicSymbols) -> bytes | bytearray | None:
    """Return the debug file with the symbols of ``.dynsym`` in its ``.symtab``; None if it is
    damaged.

    Present bytes stay in place. The longer tables follow them, and their section headers lead
    there.
    """
    sections = Sections(lambda offset, size: mini[offset : offset + size], len(mini))
    found = sections.typed(SHT_SYMTAB)
    if found is None:
        return None
    number, header = found
    old = sections.contents(header, len(mini))
    if not old or header.link >= len(sections.headers) or header.link == number:
        return None
    names_header = sections.headers[header.link]
    names = sections.contents(names_header, len(mini))
    if not names.endswith(b"\0"):
        return None
    added = added_symbols(
        dynamic, sections.bits, sections.little_endian, sections.headers, len(names)
    )
    if not added:
        return mini
    symbols_at = len(mini) + -len(mini) % _ALIGN
    names_at = symbols_at + len(old) + len(added)
    padding = bytes(symbols_at - len(mini))
    whole = bytearray().join((mini, padding, old, added, names, dynamic.names, b"\0"))
    _move(sections, whole, number, symbols_at, names_at - symbols_at)
    _move(sections, whole, header.link, names_at, len(whole) - names_at)
    return whole


class _Places:
    """Finds the number of the section of the debug file that contains an address."""

    def __init__(self, headers: list[SectionHeader]) -> None:
        spans = sorted(
            (each.address, each.address + each.size, number)
            for number, each in enumerate(headers)
            if each.flags & SHF_ALLOC
            and each.size
            and number < _SHN_LORESERVE
            # .tbss has no place in memory; its address is that of the next section.
            and not (each.flags & _SHF_TLS and each.type == SHT_NOBITS)
        )
        self._starts = [start for start, _, _ in spans]
        self._spans = spans

    def section_of(self, address: int) -> int:
        """Return the number of the section at an address, 0 if there is none. The end of a section
        counts as part of it, because symbols such as ``_end`` are there.
        """
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address > self._spans[at][1]:
            return _SHN_UNDEF
        return self._spans[at][2]


def added_symbols(
    dynamic: DynamicSymbols,
    bits: int,
    little_endian: bool,
    headers: list[SectionHeader],
    names_at: int,
) -> bytes:
    """Return the defined symbols of ``.dynsym`` in the form for a debug file.

    ``headers`` are those of the debug file; the names of ``dynamic`` are at ``names_at`` of its
    string table.
    """
    places = _Places(headers)
    form, order = _FORMS[bits]
    packed = Struct(("<" if little_endian else ">") + form)
    symbols = dynamic.symbols
    added = bytearray()
    for fields in packed.iter_unpack(symbols[: len(symbols) - len(symbols) % packed.size]):
        name, value, size, info, other, index = (fields[at] for at in order)
        if not 0 < name < len(dynamic.names) or not _SHN_UNDEF < index < _SHN_LORESERVE:
            continue
        if info >> 4 not in _BINDINGS or info & 15 not in _TYPES:
            continue
        section = places.section_of(value)
        if not section or name + names_at > 0xFFFFFFFF:
            continue
        values = (name + names_at, value, size, info, other, section)
        row: list[int] = [0] * len(order)
        for at, each in zip(order, values, strict=True):
            row[at] = each
        added += packed.pack(*row)
    return bytes(added)


def _move(sections: Sections, whole: bytearray, number: int, offset: int, size: int) -> None:
    """Let the header of a section lead to ``size`` bytes at ``offset``."""
    at = sections.table + number * sections.form.size
    fields = list(sections.form.unpack_from(whole, at))
    fields[4:6] = offset, size
    whole[at : at + sections.form.size] = sections.form.pack(*fields)
