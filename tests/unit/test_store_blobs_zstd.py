# SPDX-License-Identifier: Apache-2.0
"""Compressed blobs: what went in comes out, from any offset, and of what is damaged nothing."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import IntegrityError
from buildidfs.formats.archive import seekable_zstd
from buildidfs.store.blobs.zstd import FRAME_BYTES, CompressedBlob, compress

_DICE = random.Random(3)
_CONTENT = b"".join(_DICE.randbytes(7) * 9000 for _ in range(13)) + b"the end"


def _compressed(content: bytes) -> bytes:
    hasher = hashlib.sha256()
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(content)
        source.flush()
        compress(source.fileno(), target.fileno(), hasher)
        target.seek(0)
        data = target.read()
    assert hasher.digest() == hashlib.sha256(content).digest()
    return data


def _opened(path: Path, data: bytes) -> CompressedBlob:
    path.write_bytes(data)
    return CompressedBlob(os.open(path, os.O_RDONLY))


@pytest.fixture(scope="module")
def data() -> bytes:
    assert len(_CONTENT) > 3 * FRAME_BYTES
    return _compressed(_CONTENT)


def test_any_decoder_reads_it(data: bytes) -> None:
    assert len(data) < len(_CONTENT) // 2
    stream = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
    assert stream.decompress(data) == _CONTENT


@given(st.integers(0, len(_CONTENT) + 10), st.integers(0, 3 * FRAME_BYTES))
def test_any_range(offset: int, size: int) -> None:
    blob = _BLOB
    assert blob.pread(size, offset) == _CONTENT[offset : offset + size]


@pytest.mark.parametrize("content", [b"", b"x", b"y" * FRAME_BYTES, b"z" * (FRAME_BYTES + 1)])
def test_lengths(tmp_path: Path, content: bytes) -> None:
    blob = _opened(tmp_path / "blob", _compressed(content))
    assert blob.size == len(content)
    assert blob.pread(len(content) + 5, 0) == content
    blob.close()
    blob.close()


@pytest.mark.parametrize("flip", [0x01, 0xFF])
def test_no_damaged_byte_gives_other_content(tmp_path: Path, flip: int) -> None:
    content = _DICE.randbytes(300) * 3
    good = _compressed(content)
    for at in range(len(good)):
        bad = bytearray(good)
        bad[at] ^= flip
        try:
            blob = _opened(tmp_path / "blob", bytes(bad))
        except IntegrityError:
            continue
        try:
            assert blob.pread(1 << 20, 0) == content
        except IntegrityError:
            continue
        finally:
            blob.close()


@pytest.mark.parametrize("cut", [0, 1, 8, 9, 16, 17, 30])
def test_cut_short(tmp_path: Path, data: bytes, cut: int) -> None:
    with pytest.raises(IntegrityError):
        _opened(tmp_path / "blob", data[:cut])
    with pytest.raises(IntegrityError):
        _opened(tmp_path / "blob", data[: len(data) - 1 - cut])


@given(st.binary(max_size=200))
def test_any_bytes_for_a_table(data: bytes) -> None:
    try:
        length = seekable_zstd.table_size(data[-seekable_zstd.FOOTER_SIZE :])
        if length <= len(data):
            seekable_zstd.unpack(data[len(data) - length :], len(data))
    except IntegrityError:
        pass


def test_many_threads_read_one_blob(tmp_path: Path) -> None:
    """As the kernel has it when it reads ahead: several parts at once, of one open file."""
    content = _CONTENT * 4  # more frames than are kept when they were decoded
    blob = _opened(tmp_path / "blob", _compressed(content))

    def read(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(100):
            offset = dice.randrange(len(content))
            assert blob.pread(100_000, offset) == content[offset : offset + 100_000]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    blob.close()


def _shared() -> CompressedBlob:
    fd = os.memfd_create("blob")
    os.write(fd, _compressed(_CONTENT))
    return CompressedBlob(fd)


_BLOB = _shared()
