# SPDX-License-Identifier: Apache-2.0
"""Make an ELF file that contains only names for addresses, and a build ID.

Its code segment has no bytes in the file, and spans all functions. The segment has the same number
as offset and as address. So if a mapping has its address as offset, addresses need no conversion.
The file also has a section that would be loaded, so that it counts as an executable: perf reads
names from a debug file only beside an executable.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from buildidfs.formats.elf.header import (
    ET_DYN,
    EV_CURRENT,
    LAYOUTS,
    MAGIC,
    PF_R,
    PF_X,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_PROGBITS,
    SHT_STRTAB,
    SHT_SYMTAB,
    Segment,
)
from buildidfs.formats.elf.writer import BUILD_ID, NewSection, build_id_note, elf_bytes
from buildidfs.model import BuildId, fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.formats.perf.jit import JitFunction

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
