# SPDX-License-Identifier: Apache-2.0
"""Boot images of Linux: the vmlinux in a bzImage, and the bzImage in a unified kernel image.

A bzImage (``vmlinuz`` of x86) begins with code for real mode. Its setup header has the length of
that code and, since boot protocol 2.08 (Linux 2.6.26), the extent of the payload behind it. The
payload is the linked ELF file with its build ID and without symbols; some bytes of relocations may
follow. Kernels of other architectures hold no ELF file. Source: Documentation/arch/x86/boot.rst.

A unified kernel image is a PE file with the boot image in the section ``.linux``. systemd-stub(7)
and ukify(1) make such files from a kernel, an initrd and a command line. Source: the PE format
specification of Microsoft; only the headers that lead to sections are read.

All numbers are bounded; no input raises, except for errors of ``read_at``.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from buildidfs.model import ByteRange

if TYPE_CHECKING:
    from buildidfs.formats.elf.header import ReadAt

HEAD_SIZE: Final = 0x250
"""The number of bytes at the start of a file that `payload` needs."""

_SECTOR: Final = 512
_SETUP_SECTORS: Final = 0x1F1
_BOOT_FLAG: Final = 0x1FE
_MAGIC: Final = 0x202
_PAYLOAD: Final = 0x248
_PROTOCOL_WITH_PAYLOAD: Final = 0x0208
_DEFAULT_SECTORS: Final = 4

_VERSION = Struct("<H")
_OFFSET_AND_SIZE = Struct("<II")


def payload(head: bytes, size: int) -> ByteRange | None:
    """Return the extent of the payload in a file of ``size`` bytes; None for other files.

    ``head`` is the first `HEAD_SIZE` bytes of the file. The extent lies within the file.
    """
    if len(head) < HEAD_SIZE or head[_BOOT_FLAG : _BOOT_FLAG + 2] != b"\x55\xaa":
        return None
    if head[_MAGIC : _MAGIC + 4] != b"HdrS":
        return None
    (version,) = _VERSION.unpack_from(head, _MAGIC + 4)
    if version < _PROTOCOL_WITH_PAYLOAD:
        return None
    sectors = 1 + (head[_SETUP_SECTORS] or _DEFAULT_SECTORS)
    offset, length = _OFFSET_AND_SIZE.unpack_from(head, _PAYLOAD)
    offset += sectors * _SECTOR
    if not length or offset + length > size:
        return None
    return ByteRange(offset, length)


# --- unified kernel images ------------------------------------------------------------------------

KERNEL: Final = b".linux"
"""The name of the section with the boot image of Linux."""

_DOS_MAGIC: Final = b"MZ"
_PE_AT: Final = 0x3C
_PE_MAGIC: Final = b"PE\0\0"
# struct coff_header after the magic: machine, sections, time, symbols, number of symbols, size of
# the optional header, characteristics.
_COFF: Final = Struct("<4s H H I I I H H")
# Name, size in memory, address, size in the file, offset; the rest is for object files.
_SECTION: Final = Struct("<8s I I I I 16x")
_MOST_SECTIONS: Final = 256
_WORD: Final = Struct("<I")


def section(read_at: ReadAt, size: int, name: bytes) -> ByteRange | None:
    """Return the extent of the first section with that name in a PE file of ``size`` bytes; None
    for other files. The extent lies within the file.
    """
    head = read_at(0, _PE_AT + _WORD.size)
    if not head.startswith(_DOS_MAGIC) or len(head) < _PE_AT + _WORD.size:
        return None
    (start,) = _WORD.unpack_from(head, _PE_AT)
    coff = read_at(start, _COFF.size)
    if not coff.startswith(_PE_MAGIC) or len(coff) < _COFF.size:
        return None
    _, _, count, _, _, _, optional, _ = _COFF.unpack(coff)
    table_at = start + _COFF.size + optional
    table = read_at(table_at, min(count, _MOST_SECTIONS) * _SECTION.size)
    for at in range(0, len(table) - _SECTION.size + 1, _SECTION.size):
        found, memory, _, length, offset = _SECTION.unpack_from(table, at)
        # The size in the file is rounded up; that in memory is the size of the contents.
        length = min(length, memory) if memory else length
        if found.rstrip(b"\0") == name and length and offset + length <= size:
            return ByteRange(offset, length)
    return None
