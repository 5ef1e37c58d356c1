# SPDX-License-Identifier: Apache-2.0
"""ELF files that lie: the numbers of good ones replaced by those at which readers go wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from buildidfs.formats.elf.identify import HEAD_SIZE, ElfFile, classify, describe, identify
from buildidfs.model import Absence, BuildId
from tests.support.elf.elfwriter import (
    DWARF,
    DYNSYM,
    ET_EXEC,
    ET_REL,
    PT_DYNAMIC,
    PT_NOTE,
    SHF_ALLOC,
    SHF_COMPRESSED,
    SHT_NOTE,
    SYMTAB,
    TEXT,
    TEXT_SPLIT,
    Section,
    altlink,
    debuglink,
    elf_file,
    gdb_scripts,
    note,
)
from tests.support.filesystems.filereader import FileReader

BUILD_ID: Final = bytes(range(20))

_BOUNDARIES: Final = (
    *(0, 1, 2, 3, 4, 7, 8, 11, 12, 0x7F, 0xFF, 0x7FFF, 0xFFFE, 0xFFFF, 0x10000, 1 << 20, 1 << 24),
    *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 62) + 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1),
)

# Offset and width of each number in the headers, by EI_CLASS; elf(5).
_EHDR: Final = {
    1: ((16, 2), (18, 2), (24, 4), (28, 4), (32, 4), (40, 2), (42, 2), (44, 2), (46, 2), (48, 2),
        (50, 2)),
    2: ((16, 2), (18, 2), (24, 8), (32, 8), (40, 8), (52, 2), (54, 2), (56, 2), (58, 2), (60, 2),
        (62, 2)),
}  # fmt: skip
_WORDS_32: Final = tuple((at, 4) for at in range(0, 40, 4))
_PHDR_64: Final = ((0, 4), (4, 4), (8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8))
_SHDR_64: Final = (*_PHDR_64[:6], (40, 4), (44, 4), (48, 8), (56, 8))

# Of each table of headers: where its offset and its count are, how large an entry is, its numbers.
_TABLES: Final = {
    1: ((28, 44, 32, _WORDS_32[:8]), (32, 48, 40, _WORDS_32)),
    2: ((32, 56, 56, _PHDR_64), (40, 60, 64, _SHDR_64)),
}
_MOST_ENTRIES: Final = 64


class Number(NamedTuple):
    """Where a number is in a file."""

    offset: int
    width: int


def numbers(data: bytes) -> list[Number]:
    """The numbers of all headers of a file, as far as they are in it; none if it is not ELF."""
    if data[:4] != b"\x7fELF" or len(data) < 64 or data[4] not in _EHDR or data[5] not in (1, 2):
        return []
    order: Literal["little", "big"] = "little" if data[5] == 1 else "big"
    word = 4 * data[4]
    found = [Number(*field) for field in _EHDR[data[4]]]
    for start_at, count_at, size, fields in _TABLES[data[4]]:
        start = int.from_bytes(data[start_at : start_at + word], order)
        count = int.from_bytes(data[count_at : count_at + 2], order)
        for entry in range(start, start + size * min(count, _MOST_ENTRIES), size):
            found += [Number(entry + offset, width) for offset, width in fields]
    return [number for number in found if number.offset + number.width <= len(data)]


def mutated(data: bytes, chosen: random.Random) -> bytes:
    """The file with a few numbers of its headers, or of its notes, at a boundary; or cut short."""
    damaged = bytearray(data)
    places = numbers(data)
    for _ in range(chosen.randint(1, 6)):
        if places and chosen.random() < 0.8:
            place = chosen.choice(places)
        else:
            place = Number(chosen.randrange(max(len(data) - 8, 1)), chosen.choice((1, 2, 4, 8)))
        if place.offset + place.width > len(damaged):
            continue
        number = chosen.choice(
            (
                *_BOUNDARIES,
                *(len(data) + step for step in (-64, -1, 0, 1)),
                chosen.randrange(len(data) + 1),
            )
        )
        damaged[place.offset : place.offset + place.width] = (
            number & ((1 << 8 * place.width) - 1)
        ).to_bytes(place.width, "big" if data[5:6] == b"\x02" else "little")
    if chosen.random() < 0.2:
        del damaged[chosen.randrange(len(damaged) + 1) :]
    return bytes(damaged)


def seeds() -> Iterator[bytes]:
    """Small good files of all forms, with everything in them that is looked at."""
    everything = [
        TEXT,
        DWARF,
        SYMTAB,
        DYNSYM,
        debuglink(b"file.debug", 1),
        altlink(b"/usr/lib/debug/.dwz/common", b"\x02" * 20),
        gdb_scripts("print(1)"),
        Section(b".note.x", note(b"Go\0\0", 4, b"abc"), SHT_NOTE, SHF_ALLOC, PT_NOTE, 4),
        Section(b".dynamic", bytes(32), 6, SHF_ALLOC, PT_DYNAMIC, 8),
        Section(b".gnu_debugdata", b"\xfd7zXZ\0"),
        Section(b".zdebug_gdb_scripts", b"ZLIB" + bytes(8)),
        Section(b".debug_line", bytes(24), flags=SHF_COMPRESSED),
    ]
    for bits in (32, 64):
        for little in (True, False):
            yield elf_file(
                everything,
                build_id=BUILD_ID,
                bits=bits,
                little_endian=little,
            )
    yield elf_file([TEXT_SPLIT, DWARF], build_id=BUILD_ID, build_id_in="section", etype=ET_REL)
    yield elf_file(everything, build_id=BUILD_ID, extended_numbering=True)
    yield elf_file([TEXT], build_id=BUILD_ID, section_headers=False, etype=ET_EXEC)
    yield elf_file([TEXT, SYMTAB])


# The most that one file may make its reader read: four tables of at most 16 MiB, and notes.
_BYTES_MAX: Final = 70 << 20
_CALLS_MAX: Final = 1100


def examine(data: bytes, size: int | None = None) -> ElfFile | Absence:
    """Read a file of ``size`` bytes, sparse behind ``data``, and hold the readers to their word."""
    reader = FileReader(data, size)
    size = len(data) if size is None else size
    identity = identify(reader(0, HEAD_SIZE), reader, size)
    assert identify(reader(0, HEAD_SIZE), reader) == identity or size < len(data)
    assert isinstance(identity, BuildId | Absence)

    reader = FileReader(data, size)
    answer = describe(reader, size)
    assert reader.bytes_read <= _BYTES_MAX
    assert reader.calls <= _CALLS_MAX
    if isinstance(answer, Absence):
        assert answer is (identity if isinstance(identity, Absence) else Absence.MALFORMED)
        if answer is Absence.NO_BUILD_ID:  # as for a debug file that a link leads to
            classify(BuildId(BUILD_ID), data[:HEAD_SIZE], reader, size)
        return answer
    assert answer.build_id == identity
    assert answer.kinds
    end = 0
    for extent in answer.scripts:
        assert extent.offset >= end
        assert extent.size > 0
        end = extent.offset + extent.size
    assert end <= size
    return answer
