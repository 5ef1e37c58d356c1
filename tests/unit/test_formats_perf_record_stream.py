# SPDX-License-Identifier: Apache-2.0
"""Records of perf.data, one after the other: in pieces, compressed, cut off, damaged."""

from __future__ import annotations

import random
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import UsageError
from buildidfs.formats.perf.record_stream import AUXTRACE, TRACING_DATA, Raw, RecordStream
from buildidfs.model import ByteRange
from tests.support.elf.perfwriter import PerfWriter
from tests.support.filesystems.filereader import FileReader

ORDERS = ["<", ">"]
COMPRESSED, COMPRESSED2 = 81, 83
PIECE = 65519
"""The most that perf puts into one compressed record of the second kind."""


def stream(data: bytes, order: str = "<", *, is_pipe: bool = False) -> tuple[list[Raw], str]:
    """All records, and what is wrong at the end."""
    found = RecordStream(
        FileReader(b"header.." + data), ByteRange(8, len(data)), order, is_pipe=is_pipe
    )
    records = list(found)
    return records, found.truncated


def content(raw: Raw) -> bytes:
    return raw.data[raw.at : raw.at + raw.size]


def some_records(write: PerfWriter, count: int) -> list[bytes]:
    """Records of many sizes, up to the largest."""
    sizes = random.Random(7)
    return [
        write.record(9 if number % 5 else 10, bytes([number % 256]) * (8 * sizes.choice(CHOICES)))
        for number in range(count)
    ]


CHOICES = [0, 1, 2, 5, 8, 20, 100, 1000, 8190]


@pytest.mark.parametrize("order", ORDERS)
def test_all_of_a_large_file(order: str) -> None:
    written = some_records(PerfWriter(order), 3000)
    data = b"".join(written)
    records, truncated = stream(data, order)
    assert [content(raw) for raw in records] == written
    assert truncated == ""
    position = 8
    for raw in records:
        assert raw.position == position
        position += raw.size


def test_little_is_read_at_a_time() -> None:
    data = b"".join(some_records(PerfWriter(), 3000))
    reader = FileReader(data)
    found = iter(RecordStream(reader, ByteRange(0, len(data)), "<", is_pipe=False))
    next(found)
    assert reader.bytes_read < 1 << 20 < len(data)


@pytest.mark.parametrize("order", ORDERS)
def test_data_that_follows_a_record(order: str) -> None:
    write = PerfWriter(order)
    sample = write.sample(1, 2, 3)
    traces = [
        write.record(AUXTRACE, write.pack("QQQIIII", size, 0, 0, 0, 0, 0, 0)) + b"\xff" * size
        for size in (0, 8, 1 << 20)
    ]
    data = sample + traces[0] + sample + traces[1] + traces[2] + sample
    reader = FileReader(data)
    found = RecordStream(reader, ByteRange(0, len(data)), order, is_pipe=False)
    records = list(found)
    assert [raw.kind for raw in records] == [9, 71, 9, 71, 71, 9]
    assert [raw.payload.size for raw in records if raw.payload] == [0, 8, 1 << 20]
    assert found.truncated == ""
    assert reader.bytes_read < 1 << 20  # what is not looked at is not read
    for raw in records:
        if raw.payload is not None:
            place = raw.payload
            assert data[place.offset : place.offset + place.size] == b"\xff" * place.size


@pytest.mark.parametrize("order", ORDERS)
def test_descriptions_of_tracepoints_in_a_pipe(order: str) -> None:
    write = PerfWriter(order)
    described = write.record(TRACING_DATA, write.pack("I", 13)) + b"x" * 16
    data = described + write.sample(1, 2, 3)
    records, truncated = stream(data, order, is_pipe=True)
    assert ([raw.kind for raw in records], truncated) == ([66, 9], "")


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_end_is_missing(cut: int) -> None:
    write = PerfWriter()
    data = write.sample(1, 2, 3) * 2
    records, truncated = stream(data[:-cut])
    assert len(records) == (1 if cut < len(data) // 2 else 0)
    assert "the last record is not all there" in truncated


def test_bytes_that_are_no_record() -> None:
    write = PerfWriter()
    records, truncated = stream(write.sample(1, 2, 3) + bytes(64))
    assert len(records) == 1
    assert truncated == "a record without a size (at byte 48)"
    large = write.record(AUXTRACE, write.pack("QQQQQ", 1 << 63, 0, 0, 0, 0))
    records, truncated = stream(large + write.sample(1, 2, 3))
    assert len(records) == 1
    assert "trace data that is not all there" in truncated


# --- compressed ----------------------------------------------------------------------------


def compressed(
    write: PerfWriter, records: list[bytes], *, size: int, kind: int = COMPRESSED
) -> bytes:
    """Compress records as perf does: one stream, flushed after each turn, cut into pieces."""
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    out = b""
    turn = max(len(records) // 4, 1)
    for begin in range(0, len(records), turn):
        data = compressor.compress(b"".join(records[begin : begin + turn]))
        data += compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for at in range(0, len(data), size):
            piece = data[at : at + size]
            if kind == COMPRESSED:
                out += write.pack("IHH", COMPRESSED, 0, 8 + len(piece)) + piece
            else:
                out += write.record(COMPRESSED2, write.pack("Q", len(piece)) + piece, 0)
        out += write.record(68, b"", 0)
    return out


@pytest.mark.parametrize("kind", [COMPRESSED, COMPRESSED2])
@pytest.mark.parametrize("size", [9, 1000, 60_000])
@pytest.mark.parametrize("order", ORDERS)
def test_compressed(order: str, size: int, kind: int) -> None:
    write = PerfWriter(order)
    written = some_records(write, 200)
    before = write.comm(1, b"x")
    data = before + compressed(write, written, size=size, kind=kind)
    records, truncated = stream(data, order)
    assert truncated == ""
    assert content(records[0]) == before
    assert [content(raw) for raw in records[1:] if raw.kind != 68] == written
    assert sum(raw.kind == 68 for raw in records) >= 4


def incompressible(write: PerfWriter, size: int) -> list[bytes]:
    bytes_of = random.Random(3).randbytes
    return [write.record(9, bytes_of(8000)) for _ in range(size // 8000)]


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_size_of_a_compressed_record_that_overflows(pieces: int) -> None:
    """As perf has written them since Linux 6.16: see `RecordStream._compressed2`."""
    write = PerfWriter()
    written = incompressible(write, pieces * PIECE - 1000)
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    packed = compressor.compress(b"".join(written))
    packed += compressor.flush()
    if pieces == 1:
        # Between 65529 and 65535 bytes in all, which rounded up is 0: with a frame to be skipped.
        filler = PIECE - len(packed) - 8
        packed += b"\x50\x2a\x4d\x18" + filler.to_bytes(4, "little") + bytes(filler)
    total = 16 + len(packed) + 16 * (pieces - 1)
    rounded = total + -total % 8
    data = write.pack("IHHQ", COMPRESSED2, 0, rounded % (1 << 16), total - 16) + packed[:PIECE]
    for begin in range(PIECE, len(packed), PIECE):
        piece = packed[begin : begin + PIECE]
        data += write.pack("IHHQ", COMPRESSED2, 0, 16 + len(piece), 0xDEAD) + piece
    after = write.sample(1, 2, 3)
    records, truncated = stream(data + after)
    assert truncated == ""
    assert [content(raw) for raw in records] == [*written, after]


def test_compressed_and_cut_off() -> None:
    write = PerfWriter()
    written = some_records(write, 100)
    data = compressed(write, written, size=5000)
    records, truncated = stream(data[: len(data) * 2 // 3])
    assert truncated
    found = [content(raw) for raw in records if raw.kind != 68]
    assert 0 < len(found) < 100
    assert found == written[: len(found)]


def test_compressed_and_damaged() -> None:
    write = PerfWriter()
    data = bytearray(compressed(write, some_records(write, 100), size=5000))
    data[100:200] = bytes(100)
    _, truncated = stream(bytes(data))
    assert truncated


def test_compressed_to_nearly_nothing() -> None:
    """A gigabyte that takes 32 KiB: what comes out is looked at piece by piece."""
    write = PerfWriter()
    block = write.record(9, bytes(32760))
    compressor = zstandard.ZstdCompressor(level=19).compressobj()
    packed = b"".join(compressor.compress(block * 512) for _ in range(8))
    packed += compressor.flush()
    data = b""
    for begin in range(0, len(packed), 60_000):
        piece = packed[begin : begin + 60_000]
        data += write.pack("IHH", COMPRESSED, 0, 8 + len(piece)) + piece
    largest = count = 0
    found = RecordStream(FileReader(data), ByteRange(0, len(data)), "<", is_pipe=False)
    for raw in found:
        largest = max(largest, len(raw.data))
        count += 1
    assert (count, found.truncated) == (4096, "")
    assert largest < 40 << 20


def test_compressed_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    write = PerfWriter()
    data = compressed(write, some_records(write, 4), size=5000)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UsageError, match="install python3-zstandard, or buildidfs\\[zstd\\]"):
        stream(data)


KINDS = st.sampled_from([1, 9, 66, 68, 71, 81, 83])


@given(st.lists(st.tuples(KINDS, st.integers(0, 60), st.binary(max_size=80))), st.booleans())
def test_any_stream(parts: list[tuple[int, int, bytes]], is_pipe: bool) -> None:
    write = PerfWriter()
    data = b"".join(write.pack("IHH", kind, 0, size) + body for kind, size, body in parts)
    records, truncated = stream(data, is_pipe=is_pipe)
    assert truncated or sum(raw.size for raw in records) <= len(data)
    for raw in records:
        assert len(content(raw)) == raw.size >= 8
