# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from buildidfs.formats.elf import identify
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.formats.elf.writer import symbol_file
from buildidfs.formats.perf import jit
from buildidfs.formats.perf.jit import JitDump, JitFunction, symbols
from buildidfs.model import Kind, Quality
from tests.support.elf.jit import dump, load, move, other
from tests.support.filesystems.filereader import FileReader


def test_lines_of_a_map() -> None:
    text = b"2000 10 JS:~f /a b.js:1\n0x1000 0x8 py::g:/x.py\nno line\n3000 0 empty\n4000 4"
    assert symbols(text) == [
        JitFunction(0x1000, 8, b"py::g:/x.py"),
        JitFunction(0x2000, 16, b"JS:~f /a b.js:1"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # the same address again: the code before it is gone
        (b"10 10 old\n10 10 new\n", [(0x10, 0x10, b"new")]),
        (b"10 8 old\n10 10 new\n", [(0x10, 0x10, b"new")]),
        (b"10 10 old\n10 8 new\n", [(0x10, 8, b"new"), (0x18, 8, b"old")]),
        # in the middle of an older one
        (b"10 30 old\n20 8 new\n", [(0x10, 0x10, b"old"), (0x20, 8, b"new"), (0x28, 0x18, b"old")]),
        # under a later one that begins before it
        (b"20 8 old\n10 30 new\n", [(0x10, 0x30, b"new")]),
        (b"18 10 old\n10 10 new\n", [(0x10, 0x10, b"new"), (0x20, 8, b"old")]),
        (b"10 10 a\n18 10 b\n20 10 c\n", [(0x10, 8, b"a"), (0x18, 8, b"b"), (0x20, 0x10, b"c")]),
    ],
)  # fmt: skip
def test_later_code_replaces_what_was_there(
    text: bytes, found: list[tuple[int, int, bytes]]
) -> None:
    assert [tuple(each) for each in symbols(text)] == found


def test_a_map_agrees_with_a_table_of_bytes() -> None:
    """Each byte belongs to the last function that covers it."""
    lines = [(7 * n % 61, 1 + 5 * n % 23, b"f%d" % n) for n in range(200)]
    owners: dict[int, bytes] = {}
    for start, size, name in lines:
        owners |= dict.fromkeys(range(start, start + size), name)
    text = b"".join(b"%x %x %b\n" % line for line in lines)
    found: dict[int, bytes] = {}
    for symbol in symbols(text):
        found |= dict.fromkeys(range(symbol.start, symbol.start + symbol.size), symbol.name)
    assert found == owners


def test_symbols_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "MAX_SYMBOLS", 10)
    text = b"".join(b"%x 1 f%d\n" % (number, number) for number in range(100))
    assert [each.name for each in symbols(text)] == [b"f%d" % number for number in range(90, 100)]


@pytest.mark.parametrize("order", ["<", ">"])
def test_dump_becomes_lines(order: str) -> None:
    data = dump(
        order,
        load(order, 0x1000, b"first", b"\xc3" * 16, 3),
        other(order, 2, bytes(64)),  # lines of the source
        other(order, 4, bytes(32)),  # how to unwind
        load(order, 0x2000, b"two\nlines", b"\xc3" * 8, 4),
        move(order, 0x1000, 0x3000, 16, 3),
        move(order, 0x9000, 0xA000, 16, 99),  # of no function that was loaded
        other(order, 3, b""),
    )
    reader = FileReader(data)
    lines = list(JitDump().lines(reader, len(data), 1 << 20))
    assert lines == [b"1000 10 first\n", b"2000 8 two lines\n", b"3000 10 first\n"]


def test_dump_is_read_as_it_grows() -> None:
    records = [load("<", 0x1000 * n, b"f%d" % n, b"\xc3" * 100, n) for n in range(1, 9)]
    data = dump("<", *records)
    reader, reading = FileReader(data), JitDump()
    lines: list[bytes] = []
    for size in range(0, len(data) + 1, 7):
        lines += reading.lines(reader, size, 1 << 20)
    lines += reading.lines(reader, len(data), 1 << 20)
    assert lines == [b"%x 64 f%d\n" % (0x1000 * n, n) for n in range(1, 9)]
    few = JitDump()
    assert len(list(few.lines(reader, len(data), 1))) == 1
    assert len(list(few.lines(reader, len(data), 1 << 20))) == 7


def test_what_is_no_dump_is_left_alone() -> None:
    for data in (b"x" * 100, dump("<") + bytes(64)):
        reading = JitDump()
        assert list(reading.lines(FileReader(data), len(data), 1 << 20)) == []
        assert reading.is_malformed
    short = JitDump()
    assert list(short.lines(FileReader(b"\1\2"), 2, 1 << 20)) == []
    assert not short.is_malformed  # its beginning may not be written yet


def test_file_made_of_names() -> None:
    named = [JitFunction(0x7F0000001010, 16, b"f"), JitFunction(0x7F0000002000, 32, b"g")]
    build_id, data = symbol_file(named, 62, b"of one process")
    described = identify.describe(FileReader(data), len(data))
    assert isinstance(described, ElfFile)
    assert (described.build_id, described.quality) == (build_id, Quality.SYMTAB)
    assert described.kinds == (Kind.EXECUTABLE, Kind.DEBUGINFO)
    assert (described.machine, described.truncated) == (62, "")
    assert symbol_file(named, 62, b"of one process") == (build_id, data)
    assert symbol_file(named, 62, b"of another")[0] != build_id
    assert symbol_file(named[:1], 62, b"of one process")[0] != build_id


def test_records_that_tell_nothing_are_read_in_parts() -> None:
    """They cost time, and leave no line by which that would be bounded."""
    count = 3 * jit._MOST_RECORDS
    data = dump("<") + other("<", 3, b"") * count + load("<", 0x1000, b"f", b"", 1)
    reading, reader = JitDump(), FileReader(data)
    parts = [list(reading.lines(reader, len(data), 1 << 20)) for _ in range(4)]
    assert parts == [[], [], [], [b"1000 10 f\n"]]
    assert reading.records == count + 1
