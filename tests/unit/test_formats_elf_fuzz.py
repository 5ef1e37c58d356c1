# SPDX-License-Identifier: Apache-2.0
"""No input makes the ELF reader raise or read much, and valid files mean what pyelftools says."""

from __future__ import annotations

import io
import struct

from elftools.elf.elffile import ELFFile
from elftools.elf.sections import NoteSection
from elftools.elf.segments import NoteSegment
from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.elf.identify import ElfFile
from buildidfs.model import Absence
from tests.fuzz.elf_mutation import examine
from tests.support.elf.elfwriter import (
    DWARF,
    DYNSYM,
    ET_DYN,
    ET_EXEC,
    ET_REL,
    PT_NOTE,
    SHF_ALLOC,
    SHT_NOBITS,
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

SECTIONS = st.sampled_from(
    [
        TEXT,
        TEXT_SPLIT,
        DWARF,
        SYMTAB,
        DYNSYM,
        debuglink(b"file.debug", 1),
        altlink(b"/dwz", b"\x02" * 20),
        gdb_scripts("print(1)"),
        gdb_scripts("print(2)", name=b".zdebug_gdb_scripts"),
        gdb_scripts("print(3)")._replace(type=SHT_NOBITS),
        Section(b".note.x", note(b"Go\0\0", 4, b"abc"), SHT_NOTE, SHF_ALLOC, PT_NOTE, 4),
        Section(b".rodata", bytes(5000), flags=SHF_ALLOC),
    ]
)
FILES = st.builds(
    elf_file,
    st.lists(SECTIONS, max_size=6),
    build_id=st.none() | st.binary(min_size=2, max_size=120),
    build_id_in=st.sampled_from(["both", "segment", "section"]),
    note_align=st.sampled_from([4, 8]),
    bits=st.sampled_from([32, 64]),
    little_endian=st.booleans(),
    etype=st.sampled_from([ET_REL, ET_EXEC, ET_DYN]),
    section_headers=st.booleans(),
    extended_numbering=st.booleans(),
)
NUMBERS = st.sampled_from(
    [
        *(0, 1, 2, 3, 4, 7, 8, 11, 0x7F, 0xFF, 0x7FFF, 0xFFFE, 0xFFFF, 0x10000, 1 << 20, 1 << 24),
        *((1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32),
        *((1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1),
    ]
)
# Where, as a part of the whole from either end (the headers are there), and a number to put there.
MUTATIONS = st.lists(
    st.tuples(
        st.integers(0, 700), st.booleans(), st.sampled_from("HIQ"), st.sampled_from("<>"), NUMBERS
    ),
    max_size=8,
)
SIZES = st.none() | st.sampled_from([0, 100, 5000, 4 << 30, 1 << 62])


def mutated(data: bytes, mutations: list[tuple[int, bool, str, str, int]]) -> bytes:
    """The file with some of its numbers replaced."""
    damaged = bytearray(data)
    for where, from_end, form, order, number in mutations:
        width = struct.calcsize(form)
        at = len(data) - width - where if from_end else where
        if 0 <= at <= len(data) - width:
            struct.pack_into(order + form, damaged, at, number & ((1 << 8 * width) - 1))
    return bytes(damaged)


@settings(max_examples=400, deadline=None)
@given(FILES, MUTATIONS, st.integers(0, 400), SIZES)
def test_damaged_files(
    data: bytes, mutations: list[tuple[int, bool, str, str, int]], cut: int, size: int | None
) -> None:
    damaged = mutated(data, mutations)
    examine(damaged, None)
    examine(damaged[: len(damaged) - cut], None)
    if size is not None:
        examine(damaged[:size], size)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.sampled_from([b"", b"\x7fELF\x01\x01", b"\x7fELF\x02\x02"]))
def test_any_bytes(data: bytes, start: bytes) -> None:
    examine(start + data, None)


@settings(max_examples=80, deadline=None)
@given(FILES)
def test_valid_files_mean_what_another_reader_says(data: bytes) -> None:
    answer = examine(data, None)
    wanted = _elftools_build_id(data)
    if wanted is None:
        assert answer is Absence.NO_BUILD_ID
        return
    assert isinstance(answer, ElfFile)
    assert answer.build_id.hex() == wanted
    assert not answer.truncated
    hidden = {
        at for extent in answer.scripts for at in range(extent.offset, extent.offset + extent.size)
    }
    assert hidden == {
        at
        for section in ELFFile(io.BytesIO(data)).iter_sections()
        if section.name in (".debug_gdb_scripts", ".zdebug_gdb_scripts")
        and section["sh_type"] != "SHT_NOBITS"
        for at in range(section["sh_offset"], section["sh_offset"] + section["sh_size"])
    }


def _elftools_build_id(data: bytes) -> str | None:
    file = ELFFile(io.BytesIO(data))
    for part in (*file.iter_segments(), *file.iter_sections()):
        if isinstance(part, NoteSegment | NoteSection):
            for each in part.iter_notes():
                if each["n_type"] == "NT_GNU_BUILD_ID":
                    return str(each["n_desc"])
    return None
