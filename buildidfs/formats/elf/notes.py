# SPDX-License-Identifier: Apache-2.0
"""ELF notes: the records of PT_NOTE, SHT_NOTE, /sys/kernel/notes and /sys/module/*/notes/*.

A note is three 32-bit words (size of name, size of descriptor, type), the name and the
descriptor. gABI wants name and descriptor padded to 8 bytes in 64-bit files; in practice it is 4,
except where the segment or section says that its own alignment is 8 (.note.gnu.property). elfutils
(gelf_getnote, ELF_T_NHDR8) and BFD (elf_parse_notes) go by that alignment, and so does this
module. Offsets are padded relative to the start of the area, as there.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

NT_GNU_BUILD_ID = 3

HEADER_LITTLE = struct.Struct("<III")
HEADER_BIG = struct.Struct(">III")


class Note(NamedTuple):
    """One note; ``name`` comes without the NUL that ends it, ``desc`` without padding."""

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
    """The descriptor of the first NT_GNU_BUILD_ID note, of whatever length; None without one.

    The hot path of identification: the same walk as `walk`, without a value for each note.
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
