# SPDX-License-Identifier: Apache-2.0
"""The compressed vmlinux in a bootable x86 kernel (bzImage, ``vmlinuz``).

The file begins with code for real mode. Its setup header has the length of that code and, since
boot protocol 2.08 (Linux 2.6.26), the extent of the payload behind it. The payload is the linked
ELF file with its build ID and without symbols; some bytes of relocations may follow. Kernels of
other architectures hold no ELF file. Source: Documentation/arch/x86/boot.rst.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from buildidfs.model import ByteRange

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
