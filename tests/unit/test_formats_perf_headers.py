# SPDX-License-Identifier: Apache-2.0
"""Headers of perf.data files, as perf writes them, and damaged ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import UsageError
from buildidfs.formats.perf import headers
from buildidfs.formats.perf.attributes import ATTR_MIN, Layouts, parse_attr
from buildidfs.formats.perf.headers import BuildIdEntry, Clock
from tests.support.elf.perfwriter import (
    CALLCHAIN,
    CPU,
    IDENTIFIER,
    IP,
    KERNEL,
    PERIOD,
    READ,
    TID,
    TIME,
    USUAL,
    PerfWriter,
    sample_of,
)
from tests.support.filesystems.filereader import FileReader

ID, OTHER = bytes(range(1, 21)), b"\xee" * 16


@pytest.fixture(params=["<", ">"])
def write(request: pytest.FixtureRequest) -> PerfWriter:
    return PerfWriter(request.param)


def parse(data: bytes) -> headers.Header:
    return headers.parse_header(FileReader(data), len(data))


def test_file(write: PerfWriter) -> None:
    records = write.comm(1, b"x")
    features = {
        headers.BUILD_ID: write.build_id(b"/bin/a", ID),
        headers.HOSTNAME: write.text(b"box"),
        headers.SAMPLE_TIME: write.pack("QQ", 3, 9),
        headers.CLOCK_DATA: write.pack("IIQQ", 1, 1, 1000, 10),
        200: b"later",
    }
    data = write.file(records, features)
    header = parse(data)
    assert (header.order, header.is_pipe, header.truncated) == (write.order, False, "")
    place = header.data
    assert data[place.offset : place.offset + place.size] == records
    (attr,) = header.attrs
    assert (attr.sample_type, attr.sample_id_all, attr.ids) == (USUAL, True, (7,))
    assert attr.clockid is None

    def content(number: int) -> bytes:
        return headers.feature(FileReader(data), header, number)

    assert headers.text(content(headers.HOSTNAME), write.order) == b"box"
    assert headers.times(content(headers.SAMPLE_TIME), write.order) == (3, 9)
    assert headers.times(bytes(16), write.order) is None, "perf record --no-buildid"
    assert headers.clock(content(headers.CLOCK_DATA), write.order) == Clock(1, 1000, 10)
    assert content(200) == b"later"
    assert content(4) == b""
    assert list(headers.build_id_table(FileReader(data), header)) == [
        BuildIdEntry(b"/bin/a", ID, 1 << 15 | 2)
    ]


def test_clock_of_the_events(write: PerfWriter) -> None:
    assert parse_attr(write.attr(clockid=1), write.order).clockid == 1
    assert parse_attr(write.attr(clockid=1)[:ATTR_MIN], write.order).clockid is None


def test_pipe(write: PerfWriter) -> None:
    data = write.pipe(b"")
    header = parse(data)
    assert header.is_pipe
    assert (header.data.offset, header.data.size) == (16, len(data) - 16)


def test_many_build_ids_of_all_lengths(write: PerfWriter) -> None:
    names = [b"/usr/lib/%d/" % number + b"x" * (number % 200) for number in range(2000)]
    table = b"".join(
        write.build_id(name, ID[: 2 + number % 19]) for number, name in enumerate(names)
    )
    data = write.file(write.comm(1, b"x"), {headers.BUILD_ID: table})
    found = list(headers.build_id_table(FileReader(data), parse(data)))
    assert [each.name for each in found] == names
    assert [each.build_id for each in found] == [ID[: 2 + n % 19] for n in range(2000)]


def test_build_id_of_before_there_were_sizes(write: PerfWriter) -> None:
    for build_id in (ID, OTHER):
        raw = write.build_id(b"[kernel.kallsyms]", build_id, KERNEL, sized=False)
        named = headers.named(raw, 0, len(raw), KERNEL, write.order)
        assert named == BuildIdEntry(b"[kernel.kallsyms]", build_id, KERNEL)


@pytest.mark.parametrize("length", [2, 8, 16, 20])
@pytest.mark.parametrize("name", [b"", b"/a", b"/" + b"n" * 400])
def test_build_id_written_and_read(write: PerfWriter, name: bytes, length: int) -> None:
    entry = BuildIdEntry(name, ID[:length], KERNEL, 17)
    raw = headers.pack_named(entry, write.order)
    assert len(raw) % 8 == 0
    misc = int.from_bytes(raw[4:6], "little" if write.order == "<" else "big")
    found = headers.named(raw, 0, len(raw), misc, write.order)
    assert found == BuildIdEntry(name, ID[:length], KERNEL | 1 << 15, 17)


def test_build_ids_that_say_nothing(write: PerfWriter) -> None:
    for build_id in (b"", b"\1", bytes(20)):
        raw = write.build_id(b"/a", build_id)
        assert headers.named(raw, 0, len(raw), 1 << 15, write.order) is None
    raw = write.build_id(b"/a", ID)
    assert headers.named(raw, 0, 36, 1 << 15, write.order) is None


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "is empty"),
        (b"\x7fELF" + bytes(200), "is not a perf.data file"),
        (b"PERFFILE" + bytes(200), "before Linux 3.0"),
        (b"PERFILE2", "only the beginning"),
        (b"PERFILE2" + bytes(200), "only the beginning"),
        (b"PERFILE2" + (104).to_bytes(8, "little") + bytes(200), "is a damaged perf.data file"),
    ],
)
def test_not_a_profile(data: bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        parse(data)


def test_end_is_missing(write: PerfWriter) -> None:
    records = write.comm(1, b"x") * 100
    data = write.file(records, {headers.HOSTNAME: write.text(b"box")})
    begin = parse(data).data.offset
    cut = parse(data[: begin + 50])
    assert (cut.data.size, cut.truncated, cut.features) == (50, "its end is missing", {})
    killed = bytearray(data)
    killed[48:56] = bytes(8)  # perf writes the size when it ends
    header = parse(bytes(killed))
    assert header.data.size == len(data) - begin
    assert header.truncated == "its end is missing"
    header = parse(data[: begin + len(records) + 20])
    assert header.data.size == len(records)
    assert "behind the records" in header.truncated


def test_places_beyond_the_end(write: PerfWriter) -> None:
    data = bytearray(write.file(write.comm(1, b"x"), {headers.HOSTNAME: write.text(b"box")}))
    far = write.pack("Q", (1 << 64) - 8)
    ids_at, table_at = 104 + 8 + 128, 24
    changed = data[:ids_at] + far + data[ids_at + 8 :]
    assert parse(bytes(changed)).attrs[0].ids == ()
    changed = data[:table_at] + far + data[table_at + 8 :]
    with pytest.raises(UsageError, match="only the beginning"):
        parse(bytes(changed))
    begin = parse(bytes(data)).data
    behind = begin.offset + begin.size
    changed = data[:behind] + far + data[behind + 8 :]
    assert parse(bytes(changed)).features == {}


@given(st.binary(max_size=300), st.sampled_from([b"PERFILE2", b"2ELIFREP"]))
def test_any_header(rest: bytes, magic: bytes) -> None:
    data = magic + (104).to_bytes(8, "little" if magic == b"PERFILE2" else "big") + rest
    try:
        header = parse(data)
    except UsageError:
        return
    assert header.data.offset + header.data.size <= max(len(data), header.data.offset)
    list(headers.build_id_table(FileReader(data), header))


@given(st.binary(max_size=200), st.integers(0, (1 << 16) - 1), st.sampled_from("<>"))
def test_any_build_id(data: bytes, misc: int, order: str) -> None:
    headers.named(data, 0, len(data), misc, order)


# --- where fields are ------------------------------------------------------------------


def test_samples(write: PerfWriter) -> None:
    for kinds in (USUAL, IP | TID, IP | TID | TIME | CPU | PERIOD, USUAL | CALLCHAIN):
        writer = PerfWriter(write.order, kinds)
        layouts = Layouts([parse_attr(writer.attr(), write.order, (7,))], write.order)
        raw = b"before.." + writer.sample(42, 0x4000, 99, chain=[1, 2, 1 << 63])
        sample = sample_of(layouts, raw, 8, len(raw) - 8, chains=True)
        assert sample is not None
        assert (sample.pid, sample.tid, sample.ip) == (42, 42, 0x4000)
        assert sample.time == (99 if kinds & TIME else None)
        assert sample.chain == ((1, 2, 1 << 63) if kinds & CALLCHAIN else ())
        assert layouts.have_time == bool(kinds & TIME)


@pytest.mark.parametrize("group", [False, True])
def test_call_chain_behind_counts(write: PerfWriter, group: bool) -> None:
    read_format = 1 | 2 | 4 | 16 | (8 if group else 0)
    counts = [2, 1, 1, *([5, 6, 7] * 2)] if group else [5, 1, 1, 6, 7]
    kinds = IP | TID | READ | CALLCHAIN
    body = write.pack("QIIQ", 0x10, 1, 1, counts[0])[:-8] + write.pack(f"{len(counts)}Q", *counts)
    raw = write.record(9, body + write.pack("QQQ", 2, 0xA, 0xB))
    layouts = Layouts([parse_attr(write.attr(kinds, read_format), write.order)], write.order)
    sample = sample_of(layouts, raw, 0, len(raw), chains=True)
    assert sample is not None
    assert sample.chain == (0xA, 0xB)


def test_events_that_record_different_fields(write: PerfWriter) -> None:
    first = parse_attr(write.attr(IDENTIFIER | IP | TID), write.order, (7,))
    second = parse_attr(write.attr(IDENTIFIER | IP | TID | TIME), write.order, (8, 9))
    layouts = Layouts([first, second], write.order)
    short = write.record(9, write.pack("QQII", 7, 0x10, 1, 1))
    long = write.record(9, write.pack("QQIIQ", 9, 0x20, 2, 2, 55))
    other = write.record(9, write.pack("QQII", 1234, 0x30, 3, 3))
    found = [sample_of(layouts, raw, 0, len(raw)) for raw in (short, long, other)]
    assert [(each.ip, each.time) for each in found if each] == [
        (0x10, None), (0x20, 55), (0x30, None),
    ]  # fmt: skip
    ended = write.record(4, bytes(24) + write.pack("IIQQ", 2, 2, 77, 8))
    assert layouts.trailer(ended, 0, len(ended)) == (24, 77)


def test_samples_that_are_too_short(write: PerfWriter) -> None:
    layouts = Layouts([parse_attr(write.attr(), write.order, (7,))], write.order)
    raw = write.sample(1, 2, 3)
    for size in range(8, len(raw)):
        assert sample_of(layouts, raw, 0, size, chains=True) is None
    assert layouts.trailer(raw, 0, 16) == (0, None)


def test_profile_without_events() -> None:
    layouts = Layouts([], "<")
    assert sample_of(layouts, bytes(64), 0, 64) is None
    assert layouts.trailer(bytes(64), 0, 64) == (0, None)
    assert not layouts.have_time


@given(st.binary(min_size=8, max_size=200), st.integers(0, (1 << 25) - 1), st.integers(0, 31))
def test_any_sample(data: bytes, kinds: int, read_format: int) -> None:
    write = PerfWriter("<")
    first = parse_attr(write.attr(kinds | IDENTIFIER, read_format), "<", (0,))
    second = parse_attr(write.attr(USUAL), "<", (1,))
    layouts = Layouts([first, second], "<")
    sample_of(layouts, data, 0, len(data), chains=True)
    size, _ = layouts.trailer(data, 0, len(data))
    assert size <= len(data) - 8
