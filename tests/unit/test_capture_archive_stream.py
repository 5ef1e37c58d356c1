# SPDX-License-Identifier: Apache-2.0
"""Bytes in their order, from pieces and from files."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.archive.stream import (
    CannotDecompress,
    LimitedStream,
    PlainStream,
    Region,
    unpacked,
)
from buildidfs.formats.archive.common import Damaged

CONTENT = bytes(range(256)) * 4096  # a megabyte, so several pieces


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file with something before and after the content."""
    (tmp_path / "file").write_bytes(b"before" + CONTENT + b"after")
    opened = os.open(tmp_path / "file", os.O_RDONLY)
    yield opened
    os.close(opened)


def pieces() -> LimitedStream:
    return LimitedStream(
        iter([CONTENT[:10], b"", CONTENT[10:5000], CONTENT[5000:]]), len(CONTENT), 0
    )


@pytest.fixture(params=["pieces", "region"])
def stream(request: pytest.FixtureRequest, fd: int) -> LimitedStream:
    return pieces() if request.param == "pieces" else PlainStream(Region(fd, 6, len(CONTENT)))


def test_take(stream: LimitedStream) -> None:
    taken = [stream.take(size) for size in (0, 3, 7, 5000, 300_000)]
    assert [len(each) for each in taken] == [0, 3, 7, 5000, 300_000]
    assert b"".join(taken) == CONTENT[:305_010]
    assert stream.position == 305_010
    assert stream.take(1 << 40) == CONTENT[305_010:]
    assert stream.take(1) == b""
    assert stream.position == len(CONTENT)


def test_skip(stream: LimitedStream) -> None:
    assert stream.take(2) == CONTENT[:2]
    stream.skip(1)
    stream.skip(0)
    assert stream.take(2) == CONTENT[3:5]
    stream.skip(700_000)
    assert stream.position == 700_005
    assert stream.take(5) == CONTENT[700_005:700_010]
    stream.skip(len(CONTENT) - 700_010)
    assert stream.take(1) == b""
    with pytest.raises(Damaged, match="in the middle"):
        stream.skip(1)


def test_skip_beyond_the_end(stream: LimitedStream) -> None:
    with pytest.raises(Damaged, match="in the middle"):
        stream.skip(len(CONTENT) + 1)


def test_rest(stream: LimitedStream) -> None:
    stream.skip(100)
    assert b"".join(stream.rest(600_000)) == CONTENT[100:600_100]
    assert list(stream.rest(0)) == []
    assert stream.position == 600_100
    with pytest.raises(Damaged, match="in the middle"):
        list(stream.rest(len(CONTENT)))


def test_limit() -> None:
    stream = LimitedStream(iter([b"x" * 60, b"y" * 60]), 100, 0)
    assert stream.take(60) == b"x" * 60
    with pytest.raises(Damaged, match="more than 100 bytes"):
        stream.take(1)


def test_skipped_bytes_are_not_read(tmp_path: Path) -> None:
    """Terabytes of a hole: reading them would take an hour."""
    path = tmp_path / "sparse"
    path.write_bytes(b"x")
    os.truncate(path, 8 << 40)
    opened = os.open(path, os.O_RDONLY)
    try:
        stream = PlainStream(Region(opened, 0, 8 << 40))
        stream.skip((8 << 40) - 3)
        assert stream.take(10) == bytes(3)
    finally:
        os.close(opened)


def test_unpacked(tmp_path: Path, fd: int) -> None:
    (tmp_path / "packed").write_bytes(b"before" + gzip.compress(CONTENT))
    packed = os.open(tmp_path / "packed", os.O_RDONLY)
    size = os.fstat(packed).st_size - 6
    try:
        assert unpacked(Region(packed, 6, size), 1 << 30).take(1 << 30) == CONTENT
        with pytest.raises(Damaged, match="more than 1000 bytes"):
            unpacked(Region(packed, 6, size), 1000).take(1)
        with pytest.raises(CannotDecompress, match="too early"):
            unpacked(Region(packed, 6, size - 1), 1 << 30).take(1 << 30)
    finally:
        os.close(packed)
    assert isinstance(unpacked(Region(fd, 6, 10), 5), PlainStream)
    assert unpacked(Region(fd, 6, 0), 5).take(5) == b""
