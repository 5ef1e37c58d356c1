# SPDX-License-Identifier: Apache-2.0
"""Program headers: offsets in the file and addresses, in all forms, and what is none."""

from __future__ import annotations

from typing import Literal

import pytest

from buildidfs.formats.elf import segments
from tests.support.elfwriter import PT_LOAD, TEXT, Section, elf_file
from tests.support.filereader import FileReader

_ADDRESS = 0x400000  # where the writer has offset 0


def loads(data: bytes) -> list[segments.Segment]:
    return segments.loaded(FileReader(data), len(data))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("extended", [False, True])
def test_addresses(bits: Literal[32, 64], little_endian: bool, extended: bool) -> None:
    data = elf_file(
        [TEXT, Section(b".data", b"data" * 4, segment=PT_LOAD)],
        bits=bits, little_endian=little_endian, extended_numbering=extended,
    )  # fmt: skip
    found = loads(data)
    assert [(load.flags & segments.PF_X, load.size) for load in found] == [(1, 16), (0, 16)]
    place = data.index(b"data")
    assert segments.address_of(found, place) == _ADDRESS + place
    assert segments.address_of(found, place + 16) is None
    assert segments.is_loaded(found, _ADDRESS + place)
    assert not segments.is_loaded(found, 0)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"no ELF file" * 9, elf_file()[:63]])
def test_what_is_no_elf_file(data: bytes) -> None:
    assert loads(data) == []


def test_file_that_was_cut_off() -> None:
    data = elf_file([TEXT] * 5)
    counts = [len(loads(data[:size])) for size in range(64, 64 + 5 * 56 + 1, 56)]
    assert counts == [0, 1, 2, 3, 4, 5]
