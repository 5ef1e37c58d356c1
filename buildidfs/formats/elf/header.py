# SPDX-License-Identifier: Apache-2.0
"""ELF headers, program headers and notes (elf(5)), in 32 and 64 bit and either byte order.

Numbers in a header are claims: at most `TABLE_MAX` bytes of headers are read, and nothing here
raises, except for errors of ``read_at``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, size)`` returns up to ``size`` bytes of a file, fewer only at its end."""

MAGIC: Final = b"\x7fELF"

ET_EXEC: Final = 2
ET_DYN: Final = 3
ET_CORE: Final = 4

EV_CURRENT: Final = 1
PT_LOAD: Final = 1
PT_DYNAMIC: Final = 2
PT_NOTE: Final = 4
PN_XNUM: Final = 0xFFFF  # e_phnum is in sh_info of section 0

SHT_NULL: Final = 0
SHT_PROGBITS: Final = 1
SHT_SYMTAB: Final = 2
SHT_STRTAB: Final = 3
SHT_NOTE: Final = 7
SHT_NOBITS: Final = 8
SHT_DYNSYM: Final = 11
SHF_ALLOC: Final = 0x2
SHF_EXECINSTR: Final = 0x4
SHF_COMPRESSED: Final = 0x800
SHN_XINDEX: Final = 0xFFFF  # e_shstrndx is in sh_link of section 0

TABLE_MAX: Final = 16 << 20
"""The most bytes of program or section headers that are read."""


OFFSET_MAX: Final = 1 << 62  # no file is larger, and pread(2) accepts such offsets


class ElfLayout(NamedTuple):
    """The layout of one of the four forms. The structures unpack to

    - ``ehdr`` (at offset 16): type, machine, version, entry, phoff, shoff, flags, ehsize,
      phentsize, phnum, shentsize, shnum, shstrndx;
    - ``phdr``: type, offset, filesz, align;
    - ``load``: type of the same entry, then address, size in memory and flags, in its order;
    - ``shdr``: name, type, flags, offset, size, link, info, addralign;
    - ``section``: all fields of a section header, in the order of elf(5);
    - ``segment``: all fields of a program header, whose order depends on ``bits``, see `segments`.

    ``phdr`` and ``shdr`` have what `identify` needs of each file that is captured.

    Tables are walked in steps of the structure's own size, whatever e_phentsize and e_shentsize
    claim: BFD refuses other values, the kernel and elfutils do not look at them.
    """

    little_endian: bool
    bits: int
    ehdr_size: int
    ehdr: struct.Struct
    phdr: struct.Struct
    load: struct.Struct
    shdr: struct.Struct
    section: struct.Struct
    segment: struct.Struct


def _layout(bits: int, little_endian: bool) -> ElfLayout:
    order = "<" if little_endian else ">"
    if bits == 64:
        size, forms = 64, "HHIQQQIHHHHHH I4xQ16xQ8xQ II8xQ16xQ8x IIQ8xQQIIQ8x IIQQQQIIQQ IIQQQQQQ"
    else:
        size, forms = 52, "HHIIIIIHHHHHH II8xI8xI I4xI8xII4x III4xIIIII4x IIIIIIIIII IIIIIIII"
    return ElfLayout(
        little_endian, bits, size, *(struct.Struct(order + form) for form in forms.split())
    )


LAYOUTS: Final = {
    b"\x01\x01": _layout(32, True),
    b"\x01\x02": _layout(32, False),
    b"\x02\x01": _layout(64, True),
    b"\x02\x02": _layout(64, False),
}
"""The layouts by the two bytes EI_CLASS and EI_DATA."""


def parse_header(head: bytes) -> tuple[ElfLayout, tuple[int, ...]] | None:
    """Return the layout of an ELF file that begins with ``head``, and the fields of its header.

    Returns None for any other file. `identify.identify` does the same inline, for speed and to find
    the reason.
    """
    layout = LAYOUTS.get(head[4:6])
    if head[:4] != MAGIC or layout is None or len(head) < layout.ehdr_size:
        return None
    return layout, layout.ehdr.unpack_from(head, 16)


class FileBytes:
    """The bytes of a file by offset. They come from its head as far as it has them, else from
    ``read_at``.

    ``short`` is True if a claim led past the end of the file.
    """

    __slots__ = ("_head", "_read_at", "_size", "short")

    def __init__(self, head: bytes, read_at: ReadAt, size: int | None) -> None:
        self._head = head
        self._read_at = read_at
        self._size = OFFSET_MAX if size is None else size
        self.short = False

    def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes; fewer at the end of the file. The caller bounds ``size``."""
        end = offset + size
        if end <= len(self._head):
            return self._head[offset:end]
        if not size:
            return b""
        if end > self._size:
            self.short = True
            if offset >= self._size:
                return b""
            size = self._size - offset
        data = self._read_at(offset, size)
        if len(data) < size:
            self.short = True
        return data

    def table(self, form: struct.Struct, offset: int, count: int) -> bytes | None:
        """Return the complete entries of a table of headers that are in the file; None if the table
        is too large.
        """
        if count * form.size > TABLE_MAX:
            return None
        data = self.read(offset, count * form.size)
        return data[: len(data) - len(data) % form.size]


# --- program headers -----------------------------------------------------------------------------

PF_X: Final = 1
PF_W: Final = 2
PF_R: Final = 4

_HEAD_SIZE: Final = 4096


class Segment(NamedTuple):
    """One program header: ``size`` bytes from ``offset`` of the file are at ``address``.

    ``memory`` is the size in memory. The fields are p_type, p_flags, p_offset, p_vaddr, p_filesz,
    p_memsz and p_align of elf(5).
    """

    kind: int
    flags: int
    offset: int
    address: int
    size: int
    memory: int
    align: int


def segments(layout: ElfLayout, table: bytes) -> Iterator[Segment]:
    """Yield the entries of a table of program headers."""
    size = layout.segment.size
    for fields in layout.segment.iter_unpack(table[: len(table) - len(table) % size]):
        if layout.bits == 64:
            kind, flags, offset, address, _, in_file, memory, align = fields
        else:
            kind, offset, address, _, in_file, memory, flags, align = fields
        yield Segment(kind, flags, offset, address, in_file, memory, align)


def loaded(read_at: ReadAt, size: int) -> list[Segment]:
    """Return the loaded segments of an ELF file of ``size`` bytes; empty for any other file."""
    head = read_at(0, min(size, _HEAD_SIZE))
    parsed = parse_header(head)
    if parsed is None:
        return []
    layout, header = parsed
    phoff, shoff, phnum = header[4], header[5], header[9]
    source = FileBytes(head, read_at, size)
    if phnum == PN_XNUM and shoff:
        first = source.read(shoff, layout.shdr.size)
        if len(first) == layout.shdr.size:
            phnum = layout.shdr.unpack(first)[6] or phnum
    table = source.read(phoff, min(phnum * layout.phdr.size, TABLE_MAX)) if phoff else b""
    return [segment for segment in segments(layout, table) if segment.kind == PT_LOAD]


def address_of(loads: Iterable[Segment], offset: int) -> int | None:
    """Return the address of the byte at ``offset`` of the file; None if it is not loaded.

    Whole pages are mapped, so the same byte may be at two addresses: the result is the one in the
    segment that claims the byte.
    """
    for load in loads:
        if load.offset <= offset < load.offset + load.size:
            return load.address + offset - load.offset
    return None


def code_places(loads: Iterable[Segment]) -> list[tuple[int, int, int]]:
    """Return offset, size and address of the executable segments. The address is relative to the
    first of them, because a file keeps the offsets of its code if all of it moves in memory.
    """
    code = [each for each in loads if each.flags & PF_X and each.size]
    return [(each.offset, each.size, each.address - code[0].address) for each in code]


def is_loaded(loads: Iterable[Segment], address: int) -> bool:
    """Return True if a byte of the file is loaded at ``address``."""
    return any(load.address <= address < load.address + load.memory for load in loads)


# --- notes ---------------------------------------------------------------------------------------

NT_GNU_BUILD_ID = 3

HEADER_LITTLE = struct.Struct("<III")
HEADER_BIG = struct.Struct(">III")


class Note(NamedTuple):
    """One note; ``name`` has no final NUL, ``desc`` no padding."""

    name: bytes
    type: int
    desc: bytes


def walk(data: bytes | memoryview, little_endian: bool, align: int = 4) -> Iterator[Note]:
    """Yield the notes of an area, up to the first that does not fit it.

    ``align`` is p_align or sh_addralign of the area: 8 means 8, anything else means 4.
    """
    header = HEADER_LITTLE if little_endian else HEADER_BIG
    mask = 7 if align == 8 else 3
    end = len(data)
    at = 0
    while at + 12 <= end:
        name_size, desc_size, kind = header.unpack_from(data, at)
        name_at = at + 12
        desc_at = (name_at + name_size + mask) & ~mask
        at = desc_at + desc_size
        if name_at + name_size > end or (desc_size and at > end):
            return
        name = bytes(data[name_at : name_at + name_size])
        yield Note(name.rstrip(b"\0"), kind, bytes(data[desc_at:at]))
        at = (at + mask) & ~mask


def gnu_build_id(
    data: bytes | memoryview, little_endian: bool = True, align: int = 4
) -> bytes | None:
    """Return the descriptor of the first NT_GNU_BUILD_ID note, of any length; None without one.

    This is on the hot path of identification: the same walk as `walk`, without a value for each
    note.
    """
    unpack = (HEADER_LITTLE if little_endian else HEADER_BIG).unpack_from
    mask = 7 if align == 8 else 3
    end = len(data)
    at = 0
    while at + 12 <= end:
        name_size, desc_size, kind = unpack(data, at)
        name_at = at + 12
        desc_at = (name_at + name_size + mask) & ~mask
        desc_end = desc_at + desc_size
        if name_at + name_size > end or (desc_size and desc_end > end):
            return None
        if kind == 3 and name_size == 4 and data[name_at : name_at + 4] == b"GNU\0":
            return bytes(data[desc_at:desc_end])
        at = (desc_end + mask) & ~mask
    return None
