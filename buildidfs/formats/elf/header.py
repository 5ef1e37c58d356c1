# SPDX-License-Identifier: Apache-2.0
"""The layout of ELF headers (elf(5)) in all four forms: 32 and 64 bit, either byte order."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, size)`` gives up to ``size`` bytes of a file, fewer only at its end."""

MAGIC: Final = b"\x7fELF"

ET_REL: Final = 1
ET_EXEC: Final = 2
ET_DYN: Final = 3
ET_CORE: Final = 4

EV_CURRENT: Final = 1
PT_LOAD: Final = 1
PT_DYNAMIC: Final = 2
PT_NOTE: Final = 4
PN_XNUM: Final = 0xFFFF  # e_phnum is in sh_info of section 0

SHT_NULL: Final = 0
SHT_SYMTAB: Final = 2
SHT_STRTAB: Final = 3
SHT_NOTE: Final = 7
SHT_NOBITS: Final = 8
SHT_DYNSYM: Final = 11
SHF_ALLOC: Final = 0x2
SHF_COMPRESSED: Final = 0x800
SHN_XINDEX: Final = 0xFFFF  # e_shstrndx is in sh_link of section 0

TABLE_MAX: Final = 16 << 20
"""The most bytes of program or section headers that are looked at."""


OFFSET_MAX: Final = 1 << 62  # no file is larger; keeps offsets within what pread(2) takes


class Layout(NamedTuple):
    """How one of the four forms is laid out. The structures unpack to

    - ``ehdr`` (at offset 16): type, machine, version, entry, phoff, shoff, flags, ehsize,
      phentsize, phnum, shentsize, shnum, shstrndx;
    - ``phdr``: type, offset, filesz, align;
    - ``load``: the same entry as type and three fields in an order of its own: address, size in
      memory, flags;
    - ``shdr``: name, type, flags, offset, size, link, info, addralign.

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


def _layout(bits: int, little_endian: bool) -> Layout:
    order = "<" if little_endian else ">"
    if bits == 64:
        forms = ("HHIQQQIHHHHHH", "I4xQ16xQ8xQ", "II8xQ16xQ8x", "IIQ8xQQIIQ8x", 64)
    else:
        forms = ("HHIIIIIHHHHHH", "II8xI8xI", "I4xI8xII4x", "III4xIIIII4x", 52)
    ehdr, phdr, load, shdr, size = forms
    return Layout(
        little_endian,
        bits,
        size,
        struct.Struct(order + ehdr),
        struct.Struct(order + phdr),
        struct.Struct(order + load),
        struct.Struct(order + shdr),
    )


LAYOUTS: Final = {
    b"\x01\x01": _layout(32, True),
    b"\x01\x02": _layout(32, False),
    b"\x02\x01": _layout(64, True),
    b"\x02\x02": _layout(64, False),
}
"""By the two bytes EI_CLASS and EI_DATA."""


class Source:
    """The bytes of a file, by offset: from its head where they are in there, else by ``read_at``.

    ``short`` tells that some claim led past the end of the file.
    """

    __slots__ = ("_head", "_read_at", "_size", "short")

    def __init__(self, head: bytes, read_at: ReadAt, size: int | None) -> None:
        self._head = head
        self._read_at = read_at
        self._size = OFFSET_MAX if size is None else size
        self.short = False

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes; fewer at the end of the file. The caller bounds ``size``."""
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
        """Whole entries of a table of headers, those that exist; None if the table is too large."""
        if count * form.size > TABLE_MAX:
            return None
        data = self.read(offset, count * form.size)
        return data[: len(data) - len(data) % form.size]
