# SPDX-License-Identifier: Apache-2.0
"""The decoders of the names of generated code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from buildidfs.formats.elf import identify
from buildidfs.formats.elf.writer import symbol_file
from buildidfs.formats.perf import jit
from buildidfs.model import Kind
from tests.fuzz.target import MEGABYTE, Target, filled
from tests.support.elf.jit import dump, load, move
from tests.support.filesystems.filereader import FileReader


def _check_map(text: bytes) -> None:
    """Functions come by address and are disjoint, and the file made of them is an executable."""
    found = jit.symbols(text)
    end = 0
    for symbol in found:
        assert symbol.start >= end
        assert symbol.size > 0
        assert 0 < len(symbol.name) <= jit.MAX_NAME
        end = symbol.start + symbol.size
    assert len(found) <= 2 * jit.MAX_SYMBOLS
    assert jit.symbols(b"".join(map(jit.line, found))) == found
    build_id, data = symbol_file(found, 62, b"source")
    described = identify.describe(FileReader(data), len(data))
    assert isinstance(described, identify.ElfFile)
    assert described.build_id == build_id
    assert Kind.EXECUTABLE in described.kinds
    assert not described.truncated


def _seed_map() -> Iterator[bytes]:
    yield b"1000 10 first\n0x2000 0x20 second function\n1008 20 over\nbad line\n"
    yield b"7fab5c006180 1e0 JS:*inner /app/spin.js:1:15\n7fab5c006180 2e0 py::f:/app.py\n"


def _huge_map() -> Iterator[bytes]:
    yield filled(b"1 1 a\n")
    yield b"".join(b"%x %x n\n" % (number, 99999 - number) for number in range(60000))
    yield b"".join(b"%x %x n\n" % (99999 - number, 2 * number + 1) for number in range(60000))
    yield b"".join(b"1000 %x n\n" % (99999 - number) for number in range(60000))
    yield b"1000 10 " + b"n" * (MEGABYTE - 16)
    yield b"f" * MEGABYTE
    yield b"1 " * (MEGABYTE // 2)


def _check_dump(data: bytes) -> None:
    """The same lines come out however often the file has grown, and no more is read than there is.

    Code is passed over.
    """
    reader = FileReader(data)
    whole = jit.JitDump()
    lines = list(whole.lines(reader, len(data), 1 << 30))
    assert whole.at <= max(len(data), 40) or whole.is_malformed or not lines
    assert reader.bytes_read <= 2 * len(data) + 4096
    assert all(line.endswith(b"\n") and len(line) <= 2 * jit.MAX_NAME for line in lines)
    parts = jit.JitDump()
    again: list[bytes] = []
    for size in (len(data) // 3, len(data) // 2, len(data)):
        again += parts.lines(reader, size, 1 << 30)
    assert again == lines


def _seed_dump() -> Iterator[bytes]:
    for order in "<>":
        yield dump(
            order,
            load(order, 0x1000, b"first", b"\xc3" * 16, 0),
            load(order, 0x2000, b"second", b"\xc3" * 8, 1),
            move(order, 0x1000, 0x3000, 16, 0),
        )


def _huge_dump() -> Iterator[bytes]:
    for order in "<>":
        one = load(order, 0x1000, b"f", b"", 7)
        yield dump(order, filled(one, MEGABYTE - 64))
        yield dump(order, one, filled(move(order, 0x1000, 0x2000, 16, 7), MEGABYTE - 256))
        yield dump(order, load(order, 0x1000, b"n" * (MEGABYTE - 256), b"", 7))
        yield dump(order, filled(b"\2\0\0\0\x10\0\0\0" + bytes(8), MEGABYTE - 64))


TARGETS: Final = {
    "jitmap": Target(
        _check_map, _seed_map, _huge_map, ("perf.jit", "elf.writer"), cost=jit.symbols
    ),
    "jitdump": Target(_check_dump, _seed_dump, _huge_dump, ("perf.jit",)),
}
