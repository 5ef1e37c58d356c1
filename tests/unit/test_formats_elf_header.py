# SPDX-License-Identifier: Apache-2.0
"""Program headers, and notes with both alignments and both byte orders."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.elf import header
from buildidfs.formats.elf.header import Note, gnu_build_id, walk
from tests.support.elf.elfwriter import PT_LOAD, TEXT, Section, build_id_note, elf_file, note
from tests.support.filesystems.filereader import FileReader

ID = bytes(range(20))


@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("align", [4, 8])
def test_walk_gives_every_note(little_endian: bool, align: int) -> None:
    wanted = [(b"GNU", 5, b"\x07" * 9), (b"Go", 4, b""), (b"CORE", 3, ID), (b"GNU", 3, ID)]
    area = b"".join(
        note(name + b"\0", kind, desc, little_endian=little_endian, align=align)
        for name, kind, desc in wanted
    )
    assert list(walk(area, little_endian, align)) == [Note(*each) for each in wanted]
    assert list(walk(memoryview(area), little_endian, align)) == [Note(*each) for each in wanted]
    assert gnu_build_id(area, little_endian, align) == ID
    assert gnu_build_id(memoryview(area), little_endian, align) == ID


def test_the_first_build_id_wins() -> None:
    assert gnu_build_id(build_id_note(b"first") + build_id_note(b"second")) == b"first"


@pytest.mark.parametrize(
    "area",
    [
        pytest.param(b"", id="empty"),
        pytest.param(build_id_note(ID)[:-1], id="descriptor cut short"),
        pytest.param(build_id_note(ID)[:15], id="name cut short"),
        pytest.param(build_id_note(ID)[:11], id="header cut short"),
        pytest.param(note(b"GNU\0", 1, ID), id="other type"),
        pytest.param(note(b"Go\0\0", 3, ID), id="other owner"),
        pytest.param(note(b"GNU", 3, ID), id="name without its NUL"),
        pytest.param(b"\xff" * 64, id="sizes of 4 GiB"),
        pytest.param(note(b"GNU\0", 1, b"12345678", align=4) + build_id_note(ID)[4:], id="shifted"),
    ],
)
def test_notes_without_build_id(area: bytes) -> None:
    assert gnu_build_id(area) is None


def test_an_area_aligned_to_8_is_not_read_as_one_aligned_to_4() -> None:
    area = note(b"GNU\0", 5, b"\x01" * 4, align=8) + build_id_note(ID, align=8)
    assert gnu_build_id(area, True, 8) == ID
    assert gnu_build_id(area, True, 4) is None


def test_an_alignment_that_is_not_8_counts_as_4() -> None:
    area = note(b"GNU\0", 5, b"\x01" * 4) + build_id_note(ID)
    for align in (0, 1, 2, 4, 16):
        assert gnu_build_id(area, True, align) == ID


def test_an_empty_descriptor_at_the_end_needs_no_padding() -> None:
    assert list(walk(note(b"Xen\0", 7, b"", align=8)[:16], True, 8)) == [Note(b"Xen", 7, b"")]


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.booleans(), st.sampled_from([0, 4, 8]))
def test_both_walks_agree_on_any_bytes(data: bytes, little_endian: bool, align: int) -> None:
    found = [
        each.desc
        for each in walk(data, little_endian, align)
        if (each.name, each.type) == (b"GNU", 3)
    ]
    single = gnu_build_id(data, little_endian, align)
    # The name must be "GNU" and one NUL; walk() does not tell how many NULs there were.
    assert single is None or single in found


# --- program headers -----------------------------------------------------------------------------

_ADDRESS = 0x400000  # where the writer has offset 0


def loads(data: bytes) -> list[header.Segment]:
    return header.loaded(FileReader(data), len(data))


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("extended", [False, True])
def test_addresses(bits: Literal[32, 64], little_endian: bool, extended: bool) -> None:
    data = elf_file(
        [TEXT, Section(b".data", b"data" * 4, segment=PT_LOAD)],
        bits=bits, little_endian=little_endian, extended_numbering=extended,
    )  # fmt: skip
    found = loads(data)
    assert [(load.flags & header.PF_X, load.size) for load in found] == [(1, 16), (0, 16)]
    place = data.index(b"data")
    assert header.address_of(found, place) == _ADDRESS + place
    assert header.address_of(found, place + 16) is None
    assert header.is_loaded(found, _ADDRESS + place)
    assert not header.is_loaded(found, 0)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"no ELF file" * 9, elf_file()[:63]])
def test_other_files_have_no_segments(data: bytes) -> None:
    assert loads(data) == []


def test_file_that_was_cut_off() -> None:
    data = elf_file([TEXT] * 5)
    counts = [len(loads(data[:size])) for size in range(64, 64 + 5 * 56 + 1, 56)]
    assert counts == [0, 1, 2, 3, 4, 5]
