# SPDX-License-Identifier: Apache-2.0
"""The bytes of archives in their order, for `buildidfs.formats` to take them apart."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.archive import decompress
from buildidfs.formats.archive import common
from buildidfs.formats.archive.common import Damaged

if TYPE_CHECKING:
    from collections.abc import Iterator


class Limits(msgspec.Struct, frozen=True):
    """The limits for one archive: a few bytes of it may claim any size.

    ``unpacked_bytes`` of content and ``members`` end the archive there; a member of more than
    ``member_bytes`` is passed over.
    """

    unpacked_bytes: int = 64 << 30
    members: int = 2_000_000
    member_bytes: int = 8 << 30


DEFAULT_LIMITS: Final = Limits()


class Region(msgspec.Struct, frozen=True):
    """``size`` bytes from ``offset`` of an open file, which the caller closes."""

    fd: int
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes as they are; raises OSError."""
        return decompress.chunks(self.fd, self.offset, self.size)

    def packing(self) -> common.Packing | None:
        """Return how they are compressed, by their first bytes; raises OSError."""
        head = next(self.chunks(), b"")
        return common.packing(head[: common.PACKING_HEAD])


class Stream:
    """A `formats.archive.common.Source` made of pieces, limited to ``limit`` bytes.

    Whatever takes from it may get what the pieces raise: OSError, `CannotDecompress`.
    """

    def __init__(self, pieces: Iterator[bytes], limit: int) -> None:
        self._pieces = pieces
        self._piece = b""
        self._at = 0
        self._left = limit
        self._limit = limit
        self.position = 0

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes; fewer only at the end."""
        end = self._at + size
        if end > len(self._piece):
            return b"".join(self._up_to(size))
        taken = self._piece[self._at : end]
        self._at = end
        self.position += size
        return taken

    def skip(self, size: int) -> None:
        """Pass over so many bytes; raises `Damaged` if there are not that many."""
        if self._at + size <= len(self._piece):
            self._at += size
            self.position += size
        else:
            self._skip_pieces(size)

    def rest(self, size: int) -> Iterator[memoryview]:
        """The next ``size`` bytes in pieces; raises `Damaged` if there are not that many."""
        end = self.position + size
        yield from self._up_to(size)
        if self.position < end:
            raise Damaged("ends in the middle of a member")

    def all(self) -> Iterator[memoryview]:
        """Whatever there is still to come, in pieces."""
        return self._up_to(sys.maxsize)

    def _skip_pieces(self, size: int) -> None:
        for _ in self.rest(size):
            continue

    def _up_to(self, size: int) -> Iterator[memoryview]:
        while size > 0:
            if self._at == len(self._piece) and not self._next():
                return
            taken = memoryview(self._piece)[self._at : self._at + size]
            self._at += len(taken)
            self.position += len(taken)
            size -= len(taken)
            yield taken

    def _next(self) -> bool:
        """Go on to the next piece that is not empty; False at the end."""
        self._piece, self._at = b"", 0
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return False
            self._left -= len(piece)
            if self._left < 0:
                raise Damaged(f"more than {self._limit} bytes when decompressed")
            self._piece = piece
        return True


class PlainStream(Stream):
    """The bytes of a region as they are: what is passed over is not read."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.chunks(), region.size)
        self._region = region

    def _skip_pieces(self, size: int) -> None:
        ahead = self.position + size
        if ahead > self._region.size:
            raise Damaged("ends in the middle of a member")
        region = self._region
        self._pieces = Region(region.fd, region.offset + ahead, region.size - ahead).chunks()
        self._piece, self._at = b"", 0
        self._left = region.size - ahead
        self.position = ahead


def unpacked(region: Region, limit: int) -> Stream:
    """The content of a region, decompressed if it is compressed.

    Raises OSError, and what `decompress.plain` raises, now or when it is read.
    """
    packing = region.packing()
    if packing is None:
        return PlainStream(region)
    return Stream(decompress.plain(region.chunks(), packing), limit)
