# SPDX-License-Identifier: Apache-2.0
"""Compressed data comes out in bounded pieces, or with the reason why not."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zstandard

from buildidfs.capture.archive import stream
from buildidfs.capture.archive.stream import CannotDecompress, chunks, plain
from buildidfs.formats.archive.common import Packing
from tests.support.elf.kernels import PACKERS

COMPRESS: dict[Packing, Callable[[bytes], bytes]] = {
    Packing.GZIP: gzip.compress,
    Packing.XZ: lzma.compress,
    Packing.LZMA: lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
    Packing.BZIP2: bz2.compress,
    Packing.ZSTD: zstandard.compress,
    Packing.LZ4: PACKERS["lz4"],
}
RANDOM = random.Random(1).randbytes(300_000)
CONTENTS = [b"", b"x", RANDOM, bytes(3_000_000), b"abc" * 700_000]
# One after the other, as gzip(1), xz(1), zstd(1) and bzip2(1) take them; lzma has no such thing.
SEVERAL = [packing for packing in COMPRESS if packing is not Packing.LZMA]


def cut(data: bytes, size: int) -> Iterator[bytes]:
    return (data[at : at + size] for at in range(0, len(data), size))


@pytest.mark.parametrize("packing", COMPRESS)
@pytest.mark.parametrize("content", CONTENTS, ids=len)
@pytest.mark.parametrize("size", [977, 65536])
def test_content(packing: Packing, content: bytes, size: int) -> None:
    pieces = list(plain(cut(COMPRESS[packing](content), size), packing))
    assert b"".join(pieces) == content
    assert max(map(len, pieces), default=0) <= 256 << 10


@pytest.mark.parametrize("packing", SEVERAL)
def test_several_streams(packing: Packing) -> None:
    packed = b"".join(COMPRESS[packing](content) for content in CONTENTS)
    assert b"".join(plain(cut(packed, 5000), packing)) == b"".join(CONTENTS)


@pytest.mark.parametrize("packing", [Packing.GZIP, Packing.XZ])
def test_zeros_between_and_behind_streams(packing: Packing) -> None:
    one = COMPRESS[packing](b"one")
    packed = one + bytes(512) + one + bytes(40_000)
    for size in (1, 100, 65536):
        assert b"".join(plain(cut(packed, size), packing)) == b"oneone"


@pytest.mark.parametrize(
    "packing", [packing for packing in COMPRESS if packing is not Packing.ZSTD]
)
def test_too_short(packing: Packing) -> None:
    packed = COMPRESS[packing](RANDOM)
    with pytest.raises(CannotDecompress, match="ends too early"):
        list(plain(cut(packed[:-20], 5000), packing))


@pytest.mark.parametrize("packing", [each for each in COMPRESS if each is not Packing.LZ4])
def test_damaged(packing: Packing) -> None:
    packed = bytearray(COMPRESS[packing](RANDOM))
    packed[len(packed) // 2 :] = b"\x55" * (len(packed) - len(packed) // 2)
    with pytest.raises(CannotDecompress, match="damaged"):
        list(plain(cut(bytes(packed), 5000), packing))


@pytest.mark.parametrize(
    "packed",
    [
        COMPRESS[Packing.LZ4](bytes(3_000_000))[:8] + b"\x55" * 12_000,  # no checksum tells of less
        b"\x02\x21\x4c\x18" + (9 << 20).to_bytes(4, "little") + bytes(9 << 20),
        b"\x02\x21\x4c\x18" + bytes(4),
        b"\x02\x21\x4c\x18\1\0",
        b"\x04\x22\x4d\x18" + bytes(20),
    ],
)
def test_damaged_lz4(packed: bytes) -> None:
    with pytest.raises(CannotDecompress, match="damaged"):
        list(plain(cut(packed, 5000), Packing.LZ4))


def test_lz4_blocks_are_bounded() -> None:
    """A block that becomes more than the 8 MiB that there may be is refused, however small."""
    import lz4.block

    block = lz4.block.compress(bytes(100 << 20), store_size=False)
    packed = b"\x02\x21\x4c\x18" + len(block).to_bytes(4, "little") + block
    with pytest.raises(CannotDecompress, match="damaged"):
        list(plain(cut(packed, 5000), Packing.LZ4))


def test_memory_that_xz_may_want() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    packed = lzma.compress(b"x", filters=filters)
    with pytest.raises(CannotDecompress, match=r"[Mm]emory"):
        list(plain(iter([packed]), Packing.XZ))


def test_memory_that_zstd_may_want() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(b"x") + compressor.flush()
    with pytest.raises(CannotDecompress, match="memory"):
        list(plain(iter([packed]), Packing.ZSTD))


def test_chunks_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(RANDOM)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        assert b"".join(chunks(fd)) == RANDOM
        assert b"".join(chunks(fd, 1000, 270_000)) == RANDOM[1000:271_000]
        assert b"".join(chunks(fd, 299_990, 1 << 40)) == RANDOM[-10:]
        assert list(chunks(fd, 5, 0)) == []
    finally:
        os.close(fd)


def test_by_the_end_of_the_name(tmp_path: Path) -> None:
    path = tmp_path / "module"
    for suffix, packing in ((b".gz", Packing.GZIP), (b".xz", Packing.XZ), (b".zst", Packing.ZSTD)):
        path.write_bytes(COMPRESS[packing](RANDOM))
        fd = os.open(path, os.O_RDONLY)
        try:
            assert stream.decompressed(fd, b"module.ko") is None
            plain_fd = stream.decompressed(fd, b"module.ko" + suffix)
            assert plain_fd is not None
            assert b"".join(chunks(plain_fd)) == RANDOM
            os.close(plain_fd)
            with pytest.raises(CannotDecompress, match="more than 1000 bytes"):
                stream.decompressed(fd, b"x" + suffix, 1000)
        finally:
            os.close(fd)
