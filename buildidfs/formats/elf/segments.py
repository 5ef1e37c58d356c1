# SPDX-License-Identifier: Apache-2.0
"""Program headers: which bytes of an ELF file are at which address when it is loaded.

Numbers in a header are claims; no more than `elfheader.TABLE_MAX` bytes of headers are looked at,
and nothing here raises, except what ``read_at`` raises itself.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.header import (
    LAYOUTS,
    MAGIC,
    PN_XNUM,
    PT_LOAD,
    TABLE_MAX,
    Layout,
    ReadAt,
    Source,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

PF_X: Final = 1

_HEAD_SIZE: Final = 4096

# type, flags, offset, address, size in the file, size in memory, alignment; the address that is
# passed over is the physical one.
_FORMS: Final = {
    64: ("IIQQ8xQQQ", (0, 1, 2, 3, 4, 5, 6)),
    32: ("III4xIIII", (0, 5, 1, 2, 3, 4, 6)),
}


class Segment(NamedTuple):
    """One program header: ``size`` bytes from ``offset`` of the file are at ``address``.

    In memory there are ``memory`` bytes. The fields are p_type, p_flags, p_offset, p_vaddr,
    p_filesz, p_memsz and p_align of elf(5).
    """

    kind: int
    flags: int
    offset: int
    address: int
    size: int
    memory: int
    align: int


def segments(layout: Layout, table: bytes) -> Iterator[Segment]:
    """The entries of a table of program headers."""
    form, order = _FORMS[layout.bits]
    packed = struct.Struct(("<" if layout.little_endian else ">") + form)
    for fields in packed.iter_unpack(table[: len(table) - len(table) % packed.size]):
        yield Segment(*[fields[index] for index in order])


def loaded(read_at: ReadAt, size: int) -> list[Segment]:
    """What is loaded of an ELF file of ``size`` bytes; empty for anything else."""
    head = read_at(0, min(size, _HEAD_SIZE))
    layout = LAYOUTS.get(head[4:6])
    if head[:4] != MAGIC or layout is None or len(head) < layout.ehdr_size:
        return []
    header = layout.ehdr.unpack_from(head, 16)
    phoff, shoff, phnum = header[4], header[5], header[9]
    source = Source(head, read_at, size)
    if phnum == PN_XNUM and shoff:
        first = source.read(shoff, layout.shdr.size)
        if len(first) == layout.shdr.size:
            phnum = layout.shdr.unpack(first)[6] or phnum
    table = source.read(phoff, min(phnum * layout.phdr.size, TABLE_MAX)) if phoff else b""
    return [segment for segment in segments(layout, table) if segment.kind == PT_LOAD]


def address_of(loads: Iterable[Segment], offset: int) -> int | None:
    """Where the byte at ``offset`` of the file is loaded; None if it is not.

    Pages are mapped whole, so the same byte may be at two places: the one counts whose segment
    claims it.
    """
    for load in loads:
        if load.offset <= offset < load.offset + load.size:
            return load.address + offset - load.offset
    return None


def is_loaded(loads: Iterable[Segment], address: int) -> bool:
    """Whether something of the file is loaded there."""
    return any(load.address <= address < load.address + load.memory for load in loads)
