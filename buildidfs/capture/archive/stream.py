# SPDX-License-Identifier: Apache-2.0
"""Decompressed streams of archives, for the decoders in `buildidfs.formats`.

Decompression runs outside the interpreter lock, so several threads can do it. The output of one
piece of input is bounded; the caller bounds the total.
"""

from __future__ import annotations

import os
import sys
import zlib
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec

from buildidfs.capture.base import memory_file
from buildidfs.formats.archive import common
from buildidfs.formats.archive.common import Damaged, Packing
from buildidfs.formats.budget import STEP_BYTES
from buildidfs.formats.elf.sections import packed_sections
from buildidfs.linux.file_ops import closing_on_error, write_fully, write_fully_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.formats.budget import Budget


class ArchiveLimits(msgspec.Struct, frozen=True):
    """The limits for one archive, because a few bytes of it may claim any size.

    Reading ends after ``unpacked_bytes`` of content or ``members``; a member of more than
    ``member_bytes`` is skipped.
    """

    unpacked_bytes: int = 64 << 30
    members: int = 2_000_000
    member_bytes: int = 8 << 30


DEFAULT_LIMITS: Final = ArchiveLimits()


class Region(msgspec.Struct, frozen=True):
    """``size`` bytes from ``offset`` of an open file, which the caller closes."""

    fd: int
    offset: int
    size: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes as they are; raises OSError."""
        return chunks(self.fd, self.offset, self.size)

    def packing(self) -> common.Packing | None:
        """Return the kind of compression, by the first bytes; raises OSError."""
        head = next(self.chunks(), b"")
        return common.packing(head[: common.PACKING_HEAD])


class LimitedStream:
    """A `formats.archive.common.ByteStream` made of pieces, limited to ``limit`` bytes.

    The pieces are decompressed from ``packed`` bytes, which make its budget.
    Its methods raise the errors of the pieces: OSError, `CannotDecompress`.
    """

    def __init__(self, pieces: Iterator[bytes], limit: int, packed: int) -> None:
        self.budget = common.budget_of(packed)
        self._pieces = pieces
        self._piece = b""
        self._at = 0
        self._left = limit
        self._limit = limit
        self.position = 0

    def take(self, size: int) -> bytes:
        """Return the next ``size`` bytes; fewer only at the end."""
        end = self._at + size
        if end > len(self._piece):
            return b"".join(self._up_to(size))
        taken = self._piece[self._at : end]
        self._at = end
        self.position += size
        return taken

    def skip(self, size: int) -> None:
        """Skip a number of bytes. Raises `Damaged` if there are fewer."""
        if self._at + size <= len(self._piece):
            self._at += size
            self.position += size
        else:
            self._skip_pieces(size)

    def rest(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces; raises `Damaged` if there are fewer."""
        end = self.position + size
        yield from self._up_to(size)
        if self.position < end:
            raise Damaged("ends in the middle of a member")

    def all(self) -> Iterator[memoryview]:
        """Yield all remaining bytes in pieces."""
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
        """Move to the next piece that is not empty; return False at the end."""
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


class PlainStream(LimitedStream):
    """The plain bytes of a region; skipped bytes are not read."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.chunks(), region.size, region.size)
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


def unpacked(region: Region, limit: int) -> LimitedStream:
    """Return the content of a region, decompressed if it is compressed.

    Raises OSError and the errors of `plain`, now or while it is read.
    """
    packing = region.packing()
    if packing is None:
        return PlainStream(region)
    most = _UNPACKED_LEAST + _UNPACKED_RATIO * region.size
    return LimitedStream(plain(region.chunks(), packing), min(limit, most), region.size)


MAX_BYTES: Final = 512 << 20
"""The default limit in bytes of `decompressed`, whose result is in memory."""

SECTIONS_MAX: Final = 4 << 30
"""The largest number of bytes that `unpack_sections` adds to a file."""

# Only zeros and the like grow more: text grows to 3 to 10 times its size.
_UNPACKED_RATIO: Final = 256
_UNPACKED_LEAST: Final = 128 << 20

# DWARF grows to 3 to 5 times its size.
_SECTIONS_RATIO: Final = 32
_SECTIONS_LEAST: Final = 16 << 20

_PIECE: Final = 256 << 10
# "xz -9" needs 65 MiB. A file that needs more than this was made to exhaust memory.
_XZ_MEMORY: Final = 256 << 20
_ZSTD_WINDOW: Final = 1 << 27  # the limit of zstd(1) without --long

# The legacy frames (doc/lz4_Frame_format.md of lz4, "Legacy frame") have no end mark and no
# checksum: the magic number, then blocks, each with its size in front and of 8 MiB when
# decompressed.
_LZ4_MAGIC: Final = b"\x02\x21\x4c\x18"
_LZ4_BLOCK: Final = 8 << 20
_LZ4_MOST: Final = _LZ4_BLOCK + _LZ4_BLOCK // 255 + 16  # LZ4_compressBound

_BY_SUFFIX: Final = {b".gz": Packing.GZIP, b".xz": Packing.XZ, b".zst": Packing.ZSTD}


class CannotDecompress(Damaged):
    """The data is damaged, too large, or of an unsupported kind; the text says which."""


def chunks(fd: int, offset: int = 0, size: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of an open file, or ``size`` of them from ``offset``. Raises OSError."""
    end = None if size is None else offset + size
    while end is None or offset < end:
        data = os.pread(fd, _PIECE if end is None else min(_PIECE, end - offset), offset)
        if not data:
            return
        offset += len(data)
        yield data


def plain(packed: Iterator[bytes], packing: Packing) -> Iterator[bytes]:
    """Decompress ``packed``, which may consist of several streams in a row.

    Raises `CannotDecompress`.
    """
    return _FORMATS[packing](packed)


def decompressed(
    fd: int, name: bytes, limit: int = MAX_BYTES, budget: Budget | None = None
) -> int | None:
    """Return the decompressed content of an open file as a file in memory; None if it is plain.

    The suffix of ``name`` tells the kind of compression. Raises `CannotDecompress`, OSError, and
    the error of a budget.
    """
    packing = _BY_SUFFIX.get(os.path.splitext(name)[1])
    if packing is None:
        return None
    memory_fd = memory_file(b"module", b"")
    size = 0
    with closing_on_error(memory_fd):
        for piece in plain(chunks(fd), packing):
            size += len(piece)
            if budget is not None:
                budget.charge(len(piece) // STEP_BYTES)
            if size > limit:
                raise CannotDecompress(f"more than {limit} bytes when decompressed")
            write_fully(memory_fd, piece)
    return memory_fd


def unpack_sections(fd: int, limit: int, above: int | None = None) -> None:
    """Decompress sections of an ELF file in forms that not all programs read, and append them to
    the file: those of `packed_sections`, which also explains ``above``.

    The decompressed sections may take at most ``limit`` bytes, and at most as many as are usual for
    debug information in a file of this size. Raises `CannotDecompress`, after which the sections
    before the damaged one are plain, and OSError.
    """
    size = end = os.fstat(fd).st_size
    limit = min(limit, SECTIONS_MAX, size * _SECTIONS_RATIO + _SECTIONS_LEAST)
    sections = packed_sections(lambda offset, length: os.pread(fd, length, offset), size, above)
    for section in sections:
        start = at = section.start(end)
        if section.plain > min(limit - (end - size), section.most - start):
            raise CannotDecompress("more debug information when decompressed than is read")
        packed = chunks(fd, section.offset, section.size)
        for piece in _zstd(packed) if section.is_zstd else _inflated(packed, zlib.MAX_WBITS):
            if at + len(piece) > start + section.plain:
                break
            write_fully_at(fd, piece, at)
            at += len(piece)
        if at != start + section.plain:
            raise CannotDecompress("damaged: a section does not have the size that it claims")
        if section.name_at:
            write_fully_at(fd, b".", section.name_at)
        write_fully_at(fd, section.header(start), section.header_at)
        end = at


class _Decoder(Protocol):
    """The common part of `lzma.LZMADecompressor` and `bz2.BZ2Decompressor`."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


def _streams(packed: Iterator[bytes], make: Callable[[], _Decoder]) -> Iterator[bytes]:
    """Decompress several streams in a row; zeros between them are skipped (xz: "Stream
    Padding").
    """
    decoder: _Decoder | None = None
    for data in packed:
        rest = data
        while rest or (decoder is not None and not decoder.needs_input):
            if decoder is None:
                if not (rest := rest.lstrip(b"\0")):
                    break
                decoder = make()
            piece = decoder.decompress(rest, _PIECE)
            rest = b""
            if piece:
                yield piece
            if decoder.eof:
                rest, decoder = decoder.unused_data, None
    if decoder is not None:
        raise CannotDecompress("damaged: ends too early")


def _xz(packed: Iterator[bytes]) -> Iterator[bytes]:
    import lzma

    try:
        yield from _streams(packed, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY))
    except lzma.LZMAError as error:
        raise CannotDecompress(f"damaged: {error}") from error


def _bzip2(packed: Iterator[bytes]) -> Iterator[bytes]:
    import bz2

    try:
        yield from _streams(packed, bz2.BZ2Decompressor)
    except OSError as error:
        raise CannotDecompress(f"damaged: {error}") from error


def _gzip(packed: Iterator[bytes]) -> Iterator[bytes]:
    return _inflated(packed, 16 + zlib.MAX_WBITS)


def _inflated(packed: Iterator[bytes], wbits: int) -> Iterator[bytes]:
    """Decompress as zlib.decompressobj(wbits) does, several streams in a row."""
    inflater = None
    try:
        for data in packed:
            rest, more = data, True
            while rest or more:
                if inflater is None:
                    if not (rest := rest.lstrip(b"\0")):
                        break
                    inflater = zlib.decompressobj(wbits)
                piece = inflater.decompress(rest, _PIECE)
                rest, more = inflater.unconsumed_tail, len(piece) == _PIECE
                if piece:
                    yield piece
                if inflater.eof:
                    rest, inflater = inflater.unused_data, None
    except zlib.error as error:
        raise CannotDecompress(f"damaged: {error}") from error
    if inflater is not None:
        raise CannotDecompress("damaged: ends too early")


class _Reader:
    """Presents an iterator of bytes as a file, from which zstandard reads."""

    def __init__(self, packed: Iterator[bytes]) -> None:
        self._packed = packed

    def read(self, size: int = -1) -> bytes:
        """The next piece, as long as it is."""
        return next(self._packed, b"")


def _zstd(packed: Iterator[bytes]) -> Iterator[bytes]:
    try:
        import zstandard
    except ImportError as error:
        raise CannotDecompress(
            "compressed with zstd: install python3-zstandard, or buildidfs[zstd] with pip"
        ) from error
    decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    try:
        source: Any = _Reader(packed)  # all that it is asked for is read()
        with decoder.stream_reader(source, read_across_frames=True) as reader:
            while piece := reader.read(_PIECE):
                yield piece
    except zstandard.ZstdError as error:
        raise CannotDecompress(f"damaged: {error}") from error


def _lz4(packed: Iterator[bytes]) -> Iterator[bytes]:
    try:
        import lz4.block
    except ImportError as error:
        raise CannotDecompress(
            "compressed with lz4: install python3-lz4, or buildidfs[lz4] with pip"
        ) from error
    pieces = LimitedStream(packed, sys.maxsize, 0)
    if pieces.take(len(_LZ4_MAGIC)) != _LZ4_MAGIC:
        raise CannotDecompress("damaged: no lz4 frame of the kind that kernels have")
    while head := pieces.take(4):
        if head == _LZ4_MAGIC:
            continue  # another frame
        size = int.from_bytes(head, "little")
        block = pieces.take(size) if size <= _LZ4_MOST else b""
        if len(head) < 4 or not size or len(block) < size:
            raise CannotDecompress("damaged: a block is too large, or ends too early")
        try:
            yield from _cut(lz4.block.decompress(block, uncompressed_size=_LZ4_BLOCK))
        except lz4.block.LZ4BlockError as error:
            raise CannotDecompress(f"damaged: {error}") from error


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[at : at + _PIECE] for at in range(0, len(data), _PIECE))


_FORMATS: Final[dict[Packing, Callable[[Iterator[bytes]], Iterator[bytes]]]] = {
    Packing.GZIP: _gzip,
    Packing.XZ: _xz,
    Packing.LZMA: _xz,
    Packing.ZSTD: _zstd,
    Packing.BZIP2: _bzip2,
    Packing.LZ4: _lz4,
}
