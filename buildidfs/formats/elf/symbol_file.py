# SPDX-License-Identifier: Apache-2.0
"""Make an ELF file that has nothing but names for addresses, and a build ID.

Its code segment has no bytes in the file, and spans all functions. Offset and address of the
segment are the same number, so that a mapping whose offset is its address is the identity. A
section that would be loaded makes it an executable: perf reads names of debug files only beside
one.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from buildidfs.formats.elf.header import (
    ET_DYN,
    EV_CURRENT,
    MAGIC,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_NULL,
    SHT_STRTAB,
    SHT_SYMTAB,
)
from buildidfs.model import BuildId, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.formats.perf.jit import Symbol

_EHDR: Final = Struct("<4s5B7xHHIQQQIHHHHHH")
_PHDR: Final = Struct("<IIQQQQQQ")
_SHDR: Final = Struct("<IIQQQQIIQQ")
_SYMBOL: Final = Struct("<IBBHQQ")
_NOTE: Final = Struct("<III4s")

_CLASS_64: Final = 2
_LITTLE_ENDIAN: Final = 1
_PF_EXECUTE_READ: Final = 5
_PF_READ: Final = 4
_SHT_PROGBITS: Final = 1
_SHF_EXECUTE: Final = 4
_GLOBAL_FUNCTION: Final = 0x12
_NT_GNU_BUILD_ID: Final = 3
_TEXT_INDEX: Final = 2
_NAMES: Final = b"\0.note.gnu.build-id\0.text\0.symtab\0.strtab\0.source\0.shstrtab\0"
_ID_BYTES: Final = 20
_ALIGN: Final = 8
_PAGE: Final = 4096


def symbol_file(symbols: Sequence[Symbol], machine: int, source: bytes) -> tuple[BuildId, bytes]:
    """The build ID and the bytes of a file that names ``symbols``, by ascending address.

    ``machine`` is its e_machine. The build ID is derived from the content and from ``source``,
    which says of which process the names are.
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
    content = bytes(table), bytes(strings), source
    return BuildId(raw), _laid_out(raw, content, machine, low, high - low)


def _laid_out(
    raw: bytes, content: tuple[bytes, bytes, bytes], machine: int, low: int, span: int
) -> bytes:
    table, strings, source = content
    note = _NOTE.pack(4, len(raw), _NT_GNU_BUILD_ID, b"GNU\0") + raw
    note_at = _EHDR.size + 2 * _PHDR.size
    table_at = -(-(note_at + len(note)) // _ALIGN) * _ALIGN
    strings_at = table_at + len(table)
    source_at = strings_at + len(strings)
    names_at = source_at + len(source)
    sections_at = -(-(names_at + len(_NAMES)) // _ALIGN) * _ALIGN
    segments = _PHDR.pack(PT_LOAD, _PF_EXECUTE_READ, low, low, low, 0, span, _PAGE) + _PHDR.pack(
        PT_NOTE, _PF_READ, note_at, 0, 0, len(note), len(note), 4
    )
    rows = (
        (b"", SHT_NULL, 0, 0, 0, 0, 0, 0, 0, 0),
        (b".note.gnu.build-id", SHT_NOTE, 0, 0, note_at, len(note), 0, 0, 4, 0),
        (b".text", SHT_NOBITS, SHF_ALLOC | _SHF_EXECUTE, low, low, span, 0, 0, 1, 0),
        (b".symtab", SHT_SYMTAB, 0, 0, table_at, len(table), 4, 1, _ALIGN, _SYMBOL.size),
        (b".strtab", SHT_STRTAB, 0, 0, strings_at, len(strings), 0, 0, 1, 0),
        (b".source", _SHT_PROGBITS, SHF_ALLOC, 0, source_at, len(source), 0, 0, 1, 0),
        (b".shstrtab", SHT_STRTAB, 0, 0, names_at, len(_NAMES), 0, 0, 1, 0),
    )
    sections = b"".join(_SHDR.pack(_NAMES.index(name + b"\0"), *rest) for name, *rest in rows)
    header = _EHDR.pack(
        *(MAGIC, _CLASS_64, _LITTLE_ENDIAN, EV_CURRENT, 0, 0, ET_DYN, machine, EV_CURRENT, 0),
        *(_EHDR.size, sections_at, 0, _EHDR.size, _PHDR.size, 2, _SHDR.size, len(rows)),
        len(rows) - 1,
    )
    body = (header + segments + note).ljust(table_at, b"\0")
    body += table + strings + source + _NAMES
    return body.ljust(sections_at, b"\0") + sections
