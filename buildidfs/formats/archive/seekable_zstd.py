# SPDX-License-Identifier: Apache-2.0
"""The seekable format of zstd: frames that can be decoded on their own, and a table of them.

Any zstd decoder reads such a file from its start. The table is a skippable frame at the end; it
shows which frame has the bytes at an offset [zstd
contrib/seekable_format/zstd_seekable_compression_format.md, version 0.1.0].
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from struct import Struct
from typing import Final, NamedTuple

from buildidfs.errors import IntegrityError

FOOTER_SIZE: Final = 9
HEADER_SIZE: Final = 8

_FOOTER: Final = Struct("<IBI")
_HEADER: Final = Struct("<II")
_ENTRY: Final = Struct("<II")
_SKIPPABLE: Final = 0x184D2A5E
_MAGIC: Final = 0x8F92EAB1
_CHECKSUMS: Final = 0x80
_RESERVED: Final = 0x7C
_FRAMES_MAX: Final = 1 << 24


class FrameSpan(NamedTuple):
    """The place of a frame: ``size`` bytes from ``offset`` of the file, with ``length`` bytes of
    content.
    """

    offset: int
    size: int
    start: int
    length: int


class SeekTable:
    """The frames of a file. ``size`` is the number of bytes of content."""

    def __init__(self, entries: Iterable[tuple[int, int]]) -> None:
        """``entries`` are (bytes in the file, bytes of content) of each frame, in order."""
        self._offsets = array("Q", [0])
        self._starts = array("Q", [0])
        for size, length in entries:
            self._offsets.append(self._offsets[-1] + size)
            self._starts.append(self._starts[-1] + length)
        self.size = self._starts[-1]

    def __len__(self) -> int:
        return len(self._starts) - 1

    def frame(self, number: int) -> FrameSpan:
        """Return the frame with that number."""
        (offset, end), (start, stop) = (
            table[number : number + 2] for table in (self._offsets, self._starts)
        )
        return FrameSpan(offset, end - offset, start, stop - start)

    def at(self, position: int) -> int:
        """Return the number of the frame with the content at ``position``, which must be in the
        file.
        """
        return bisect_right(self._starts, position) - 1


def pack(entries: list[tuple[int, int]]) -> bytes:
    """Return the table for the end of the file."""
    body = b"".join(_ENTRY.pack(*entry) for entry in entries)
    footer = _FOOTER.pack(len(entries), 0, _MAGIC)
    return _HEADER.pack(_SKIPPABLE, len(body) + FOOTER_SIZE) + body + footer


def table_size(footer: bytes) -> int:
    """Return the size of the table at the end of the file in bytes; ``footer`` are its last bytes.

    Raises `IntegrityError` if there is no table.
    """
    if len(footer) != FOOTER_SIZE:
        raise IntegrityError("a compressed blob is too short to have a table of its frames")
    count, descriptor, magic = _FOOTER.unpack(footer)
    if magic != _MAGIC or descriptor & _RESERVED or count > _FRAMES_MAX:
        raise IntegrityError("a compressed blob does not end in a table of its frames")
    return int(HEADER_SIZE + count * _entry_size(descriptor) + FOOTER_SIZE)


def unpack(table: bytes, file_size: int) -> SeekTable:
    """Decode the table of a file of ``file_size`` bytes; ``table`` are its last `table_size` bytes.

    Raises `IntegrityError` for a table that does not fit the file.
    """
    _, descriptor, _ = _FOOTER.unpack_from(table, len(table) - FOOTER_SIZE)
    skippable, length = _HEADER.unpack_from(table)
    if (
        skippable != _SKIPPABLE
        or length != len(table) - HEADER_SIZE
        or len(table) != table_size(table[-FOOTER_SIZE:])
    ):
        raise IntegrityError("the table of a compressed blob's frames is damaged")
    step = _entry_size(descriptor)
    body = memoryview(table)[HEADER_SIZE:-FOOTER_SIZE]
    found = SeekTable(_ENTRY.unpack_from(body, at) for at in range(0, len(body), step))
    if len(found) and sum(found.frame(len(found) - 1)[:2]) != file_size - len(table):
        raise IntegrityError("the table of a compressed blob's frames is of another file")
    return found


def _entry_size(descriptor: int) -> int:
    return _ENTRY.size + (4 if descriptor & _CHECKSUMS else 0)
