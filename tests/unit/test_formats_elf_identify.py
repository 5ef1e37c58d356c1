# SPDX-License-Identifier: Apache-2.0
"""Identification and description of ELF files: made, hostile, and those of this system."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from typing import Literal

import pytest

from buildidfs.formats.elf.header import gnu_build_id
from buildidfs.formats.elf.identify import (
    HEAD_SIZE,
    AltLink,
    DebugLink,
    ElfFile,
    describe,
    identify,
)
from buildidfs.model import Absence, BuildId, ByteRange, Kind, Quality
from tests.support.elf import elfwriter
from tests.support.elf.elfwriter import (
    DWARF,
    DYNSYM,
    ET_CORE,
    ET_EXEC,
    ET_REL,
    PT_LOAD,
    PT_NOTE,
    SHF_ALLOC,
    SHF_COMPRESSED,
    SHT_NOBITS,
    SHT_NOTE,
    SHT_STRTAB,
    SYMTAB,
    TEXT,
    TEXT_SPLIT,
    Place,
    Section,
    altlink,
    build_id_note,
    debug_sup,
    debuglink,
    elf_file,
    gdb_scripts,
    note,
)
from tests.support.filesystems.filereader import FileReader

ID = bytes(range(0x30, 0x44))


def identified(data: bytes) -> BuildId | Absence:
    """The answer of `identify`, which is the same with and without the size."""
    reader = FileReader(data)
    answer = identify(data[:HEAD_SIZE], reader)
    assert identify(data[:HEAD_SIZE], reader, len(data)) == answer
    return answer


def described(data: bytes) -> ElfFile:
    answer = describe(FileReader(data), len(data))
    assert isinstance(answer, ElfFile)
    return answer


class TestIdentify:
    @pytest.mark.parametrize("bits", [32, 64])
    @pytest.mark.parametrize("little_endian", [True, False])
    @pytest.mark.parametrize("etype", [ET_REL, ET_EXEC, elfwriter.ET_DYN])
    @pytest.mark.parametrize("place", ["both", "segment", "section"])
    @pytest.mark.parametrize("align", [4, 8])
    @pytest.mark.parametrize("extended", [False, True])
    def test_every_form(
        self,
        bits: Literal[32, 64],
        little_endian: bool,
        etype: int,
        place: Place,
        align: int,
        extended: bool,
    ) -> None:
        data = elf_file(
            build_id=ID,
            build_id_in=place,
            note_align=align,
            bits=bits,
            little_endian=little_endian,
            etype=etype,
            extended_numbering=extended,
        )
        answer = identified(data)
        assert answer == ID
        assert isinstance(answer, BuildId)

    @pytest.mark.parametrize("length", [2, 3, 8, 16, 20, 32, 64, 120])
    def test_any_length(self, length: int) -> None:
        assert identified(elf_file(build_id=b"\xa5" * length)) == b"\xa5" * length

    @pytest.mark.parametrize("length", [0, 1, 121, 5000])
    @pytest.mark.parametrize("place", ["segment", "section"])
    def test_an_impossible_length(self, length: int, place: Place) -> None:
        data = elf_file(build_id=b"\xa5" * length, build_id_in=place)
        assert identified(data) is Absence.BAD_BUILD_ID
        assert describe(FileReader(data), len(data)) is Absence.BAD_BUILD_ID

    def test_the_segment_comes_before_the_section(self) -> None:
        other = Section(b".note.other", build_id_note(b"other"), SHT_NOTE, align=4)
        assert identified(elf_file([other, TEXT], build_id=ID, build_id_in="segment")) == ID

    def test_a_segment_with_other_notes_does_not_hide_the_section(self) -> None:
        # As Go's linker does it: PT_NOTE covers .note.go.buildid alone.
        go = Section(
            b".note.go.buildid", note(b"Go\0\0", 4, b"abc"), SHT_NOTE, SHF_ALLOC, PT_NOTE, 4
        )
        assert identified(elf_file([go, TEXT], build_id=ID, build_id_in="section")) == ID

    def test_the_first_of_several_segments_with_a_build_id_wins(self) -> None:
        second = Section(b"", build_id_note(b"second"), segment=PT_NOTE, align=4)
        assert identified(elf_file([second], build_id=ID)) == ID

    def test_notes_and_headers_far_into_the_file(self) -> None:
        padding = Section(b".rodata", bytes(3 * HEAD_SIZE), flags=SHF_ALLOC)
        late = Section(b".note", build_id_note(ID), SHT_NOTE, SHF_ALLOC, PT_NOTE, 4)
        assert identified(elf_file([padding, late])) == ID
        assert identified(elf_file([padding, late._replace(segment=0)])) == ID

    def test_a_file_smaller_than_its_head(self) -> None:
        data = elf_file(build_id=ID, section_headers=False)
        assert len(data) < 300
        assert identified(data) == ID

    @pytest.mark.parametrize(
        ("data", "absence"),
        [
            (b"", Absence.EMPTY),
            (b"\x7fEL", Absence.NOT_ELF),
            (b"#!/bin/sh\n", Absence.NOT_ELF),
            (bytes(5000), Absence.NOT_ELF),
            (b"\x7fELF", Absence.TRUNCATED),
            (b"\x7fELF\x02\x01" + bytes(57), Absence.TRUNCATED),
            (b"\x7fELF\x01\x01" + bytes(45), Absence.TRUNCATED),
            (b"\x7fELF\x03\x01" + bytes(100), Absence.MALFORMED),
            (b"\x7fELF\x02\x00" + bytes(100), Absence.MALFORMED),
            (b"\x7fELF\x02\x01" + bytes(58), Absence.NO_BUILD_ID),
            (elf_file(), Absence.NO_BUILD_ID),
            (elf_file(section_headers=False), Absence.NO_BUILD_ID),
            (elf_file(build_id=ID, etype=ET_CORE), Absence.NO_BUILD_ID),
        ],
    )
    def test_absence(self, data: bytes, absence: Absence) -> None:
        assert identified(data) is absence
        assert describe(FileReader(data), len(data)) is absence

    def test_a_file_cut_off_before_its_notes_is_truncated(self) -> None:
        data = elf_file([Section(b".data", bytes(100)), TEXT], build_id=ID, build_id_in="section")
        end_of_its_header = _sections(data)[0] + 2 * 64
        for length in range(64, end_of_its_header):
            assert identified(data[:length]) is Absence.TRUNCATED

    def test_a_file_cut_off_after_its_notes_is_known_by_its_segment(self) -> None:
        data = elf_file(build_id=ID)
        assert identified(data[:-10]) == ID
        assert described(data[:-10]).truncated
        assert not described(data).truncated


class TestDescribe:
    def test_header(self) -> None:
        file = described(elf_file(build_id=ID, bits=32, little_endian=False, machine=20))
        assert (file.build_id, file.bits, file.little_endian) == (ID, 32, False)
        assert (file.machine, file.etype) == (20, elfwriter.ET_DYN)

    @pytest.mark.parametrize(
        ("sections", "kinds", "quality"),
        [
            ([TEXT], {Kind.EXECUTABLE}, Quality.NONE),
            ([TEXT, DYNSYM], {Kind.EXECUTABLE}, Quality.DYNSYM),
            ([TEXT, DYNSYM, SYMTAB], {Kind.EXECUTABLE, Kind.DEBUGINFO}, Quality.SYMTAB),
            ([TEXT, DYNSYM, SYMTAB, DWARF], {Kind.EXECUTABLE, Kind.DEBUGINFO}, Quality.DEBUGINFO),
            ([TEXT, DWARF], {Kind.EXECUTABLE, Kind.DEBUGINFO}, Quality.DEBUGINFO),
            ([TEXT_SPLIT, DWARF, SYMTAB], {Kind.DEBUGINFO}, Quality.DEBUGINFO),
            ([TEXT_SPLIT, SYMTAB], {Kind.DEBUGINFO}, Quality.SYMTAB),
            # What dwz shares between files: debug information and nothing else.
            ([DWARF], {Kind.DEBUGINFO}, Quality.DEBUGINFO),
            ([DWARF._replace(name=b".zdebug_info")], {Kind.DEBUGINFO}, Quality.DEBUGINFO),
            ([TEXT_SPLIT], {Kind.EXECUTABLE}, Quality.NONE),
            ([TEXT, DWARF._replace(type=SHT_NOBITS)], {Kind.EXECUTABLE}, Quality.NONE),
            ([TEXT, DWARF._replace(data=b"")], {Kind.EXECUTABLE}, Quality.NONE),
            ([], {Kind.EXECUTABLE}, Quality.NONE),
        ],
    )
    def test_kinds_and_quality(
        self, sections: list[Section], kinds: set[Kind], quality: Quality
    ) -> None:
        file = described(elf_file(sections, build_id=ID))
        assert set(file.kinds) == kinds
        assert len(file.kinds) == len(kinds)
        assert file.quality is quality

    def test_without_section_headers(self) -> None:
        dynamic = Section(b"", bytes(16), segment=elfwriter.PT_DYNAMIC)
        file = described(elf_file([TEXT, dynamic], build_id=ID, section_headers=False))
        assert file.kinds == (Kind.EXECUTABLE,)
        assert file.quality is Quality.DYNSYM
        assert not file.truncated

    def test_segments_of_a_debug_file_describe_another_file(self) -> None:
        original = Section(b"", segment=PT_LOAD, offset=0x1000, size=0x100000)
        file = described(elf_file([original, TEXT_SPLIT, DWARF], build_id=ID))
        assert file.kinds == (Kind.DEBUGINFO,)
        assert not file.truncated

    def test_a_section_past_the_end_is_truncation(self) -> None:
        data = elf_file([TEXT._replace(size=1 << 20)], build_id=ID)
        assert described(data).truncated

    def test_says_what_would_be_beyond_the_end(self) -> None:
        data = elf_file([TEXT, SYMTAB], build_id=ID)
        size = len(data)
        assert described(data).truncated == ""
        assert described(data + b"signature").truncated == ""
        assert described(data[:-1]).truncated == (
            f"truncated: its section headers would end at byte {size}, and the file does"
            f" at {size - 1}"
        )
        longer = elf_file([TEXT._replace(size=1 << 20)], build_id=ID)
        assert "a section would end" in described(longer).truncated
        segment = Section(b"", segment=PT_LOAD, offset=0x1000, size=0x100000)
        assert "a segment would end" in described(elf_file([segment, TEXT], build_id=ID)).truncated

    @pytest.mark.parametrize(
        ("at", "value", "why"),
        [
            (56, 0xFFFF, "e_phnum is 0xffff"),
            (54, 32, "its headers have another size"),
            (58, 40, "its headers have another size"),
            (6, 2, "its ELF version is 2"),
            (60, 0, "e_shnum is 0"),
            (40, 0, "its section headers are not where it says"),
            (40, 16, "its section headers are not where it says"),
        ],
    )
    def test_headers_that_debuggers_refuse(self, at: int, value: int, why: str) -> None:
        data = bytearray(elf_file([TEXT, SYMTAB], build_id=ID)) + bytes(4 << 20)
        assert described(bytes(data)).truncated == ""
        struct.pack_into("<H", data, at, value)
        assert described(bytes(data)).truncated.startswith("malformed: ")
        assert why in described(bytes(data)).truncated

    def test_section_headers_that_are_not_written(self) -> None:
        data = bytearray(elf_file([TEXT, SYMTAB], build_id=ID))
        shoff, _ = _sections(bytes(data))
        data[shoff:] = bytes(len(data) - shoff)
        assert described(bytes(data)).truncated == "truncated: its section headers are not written"

    @pytest.mark.parametrize("little_endian", [True, False])
    @pytest.mark.parametrize("name", [b"x", b"abc.debug", b"abcdefg", b"abcdefgh", b"\xff.debug"])
    def test_debuglink(self, name: bytes, little_endian: bool) -> None:
        crc = zlib.crc32(b"the debug file")
        link = debuglink(name, crc, little_endian=little_endian)
        data = elf_file([TEXT, link], build_id=ID, little_endian=little_endian)
        assert described(data).debuglink == DebugLink(name, crc)

    def test_altlink(self) -> None:
        data = elf_file([TEXT, altlink(b"/usr/lib/debug/.dwz/x", b"\x01" * 20)], build_id=ID)
        assert described(data).altlink == AltLink(b"/usr/lib/debug/.dwz/x", BuildId(b"\x01" * 20))

    @pytest.mark.parametrize("little_endian", [True, False])
    def test_supplementary_file_of_dwarf_5(self, little_endian: bool) -> None:
        link = debug_sup(b"/usr/lib/debug/.dwz/x", b"\x01" * 20, little_endian=little_endian)
        data = elf_file([TEXT, DWARF, link], build_id=ID, little_endian=little_endian)
        assert described(data).altlink == AltLink(b"/usr/lib/debug/.dwz/x", BuildId(b"\x01" * 20))
        link = debug_sup(b"", b"\x01" * 20, little_endian=little_endian, is_supplementary=True)
        file = described(elf_file([DWARF, link], little_endian=little_endian))
        assert (file.build_id, file.kinds) == (BuildId(b"\x01" * 20), (Kind.DEBUGINFO,))
        assert file.altlink is None
        other = described(elf_file([DWARF, link], build_id=ID, little_endian=little_endian))
        assert other.build_id == ID, "a build ID comes first"

    @pytest.mark.parametrize(
        "link",
        [
            debug_sup(b"x", b"\1" * 20),
            debug_sup(b"", b"", is_supplementary=True),
            debug_sup(b"", b"\1" * 121, is_supplementary=True),
            Section(b".debug_sup", b""),
            Section(b".debug_sup", b"\5\0"),
            Section(b".debug_sup", b"\5\0\1\0"),
            Section(b".debug_sup", b"\5\0\1\0\x14" + bytes(19)),
            Section(b".debug_sup", b"\4\0\1\0\x14" + bytes(20)),
            Section(b".debug_sup", b"\5\0\2\0\x14" + bytes(20)),
            Section(b".debug_sup", b"\5\0\1\0\x14" + bytes(20), flags=SHF_COMPRESSED),
            Section(b".debug_sup", b"\5\0\1\0\x14" + bytes(20), size=1 << 20),
            Section(b".debug_supply", b"\5\0\1\0\x14" + bytes(20)),
        ],
    )
    def test_no_supplementary_file(self, link: Section) -> None:
        assert identified(elf_file([DWARF, link])) is Absence.NO_BUILD_ID

    @pytest.mark.parametrize(
        "link",
        [
            debug_sup(b"", b"\1" * 20),
            debug_sup(b"x", b"\1" * 20, is_supplementary=True),
            debug_sup(b"x", b""),
            Section(b".debug_sup", b"\5\0\0abc"),
            Section(b".gnu_debuglink", b""),
            Section(b".gnu_debuglink", b"name without its end"),
            Section(b".gnu_debuglink", b"\0\0\0\0\1\2\3\4"),
            Section(b".gnu_debuglink", b"abc\0\1\2\3"),
            Section(b".gnu_debuglink", b"abc\0\1\2\3\4", type=SHT_NOBITS),
            Section(b".gnu_debuglink", b"abc\0\1\2\3\4", flags=SHF_COMPRESSED),
            Section(b".gnu_debuglink", b"abc\0\1\2\3\4", size=1 << 30),
            Section(b".gnu_debuglink", b"abc\0\1\2\3\4", offset=1 << 60),
            Section(b".gnu_debugaltlink", b"abc\0\1"),
            Section(b".gnu_debugaltlink", b"abc\0" + bytes(121)),
            Section(b".gnu_debugaltlink", b"\0" + bytes(20)),
            Section(b".gnu_debugaltlink", b"abc"),
        ],
    )
    def test_links_that_lead_nowhere(self, link: Section) -> None:
        file = described(elf_file([TEXT, link], build_id=ID))
        assert (file.debuglink, file.altlink) == (None, None)


class TestScripts:
    """The extents of .debug_gdb_scripts; what gdb would find decides (see `identify`)."""

    SCRIPT = gdb_scripts("print('loaded')")

    @pytest.mark.parametrize(
        "section",
        [
            SCRIPT,
            gdb_scripts("pass", name=b".zdebug_gdb_scripts"),
            SCRIPT._replace(flags=SHF_COMPRESSED),
            SCRIPT._replace(flags=SHF_ALLOC),
            SCRIPT._replace(type=SHT_NOTE),
            SCRIPT._replace(type=SHT_STRTAB),
            SCRIPT._replace(type=0x60001234),
        ],
    )
    @pytest.mark.parametrize("bits", [32, 64])
    @pytest.mark.parametrize("little_endian", [True, False])
    @pytest.mark.parametrize("extended", [False, True])
    def test_found(
        self, section: Section, bits: Literal[32, 64], little_endian: bool, extended: bool
    ) -> None:
        data = elf_file(
            [TEXT, section, DWARF],
            build_id=ID,
            bits=bits,
            little_endian=little_endian,
            extended_numbering=extended,
        )
        [extent] = described(data).scripts
        assert data[extent.offset : extent.offset + extent.size] == section.data

    @pytest.mark.parametrize(
        "section",
        [
            SCRIPT._replace(type=SHT_NOBITS),
            SCRIPT._replace(type=elfwriter.SHT_NULL),
            SCRIPT._replace(name=b".debug_gdb_scripts2"),
            SCRIPT._replace(name=b"debug_gdb_scripts"),
            SCRIPT._replace(offset=1 << 63),
            SCRIPT._replace(size=0),
        ],
    )
    def test_not_there(self, section: Section) -> None:
        assert described(elf_file([TEXT, section], build_id=ID)).scripts == ()

    def test_every_section_of_that_name(self) -> None:
        first, second = gdb_scripts("first"), gdb_scripts("second", name=b".zdebug_gdb_scripts")
        data = elf_file([first, TEXT, second], build_id=ID)
        extents = described(data).scripts
        assert [data[each.offset : each.offset + each.size] for each in extents] == [
            first.data,
            second.data,
        ]

    def test_extents_are_clipped_and_merged(self) -> None:
        clipped = self.SCRIPT._replace(size=1 << 40)
        data = elf_file([TEXT, self.SCRIPT, clipped, clipped._replace(size=3)], build_id=ID)
        file = described(data)
        start = data.index(self.SCRIPT.data)
        assert file.scripts == (ByteRange(start, len(data) - start),)
        assert file.truncated

    def test_a_swarm_of_sections_is_covered_with_few_extents(self) -> None:
        gap = Section(b".gap", b"gap")
        data = elf_file([self.SCRIPT, gap] * 500, build_id=ID)
        extents = described(data).scripts
        assert len(extents) == 64
        hidden = bytearray(data)
        for extent in extents:
            hidden[extent.offset : extent.offset + extent.size] = bytes(extent.size)
        assert b"loaded" in data
        assert b"loaded" not in hidden

    def test_a_name_that_runs_into_the_end_of_the_table(self) -> None:
        # BFD ends a string table that does not end itself, at or over its last byte.
        for tail, found in ((b"", True), (b"\0", True), (b"X", True), (b"XY", False)):
            names = b"\0" + self.SCRIPT.name + tail
            data = self._with_names(names, name_at=1)
            assert bool(described(data).scripts) is found

    def test_the_index_of_the_names_out_of_range_counts_as_zero(self) -> None:
        data = bytearray(elf_file([TEXT, self.SCRIPT], build_id=ID))
        shoff, shnum = _sections(data)
        names = data[shoff + (shnum - 1) * 64 : shoff + shnum * 64]
        struct.pack_into("<H", data, 62, 999)
        assert described(bytes(data)).scripts == ()
        data[shoff : shoff + 64] = names
        assert len(described(bytes(data)).scripts) == 1

    def test_a_section_table_cut_off_still_gives_what_is_there(self) -> None:
        data = bytearray(elf_file([self.SCRIPT, TEXT], build_id=ID))
        struct.pack_into("<H", data, 60, 1000)
        file = described(bytes(data))
        assert len(file.scripts) == 1
        assert file.truncated

    def _with_names(self, names: bytes, name_at: int) -> bytes:
        """A file whose only script section is named at ``name_at`` of a table of names."""
        table = Section(b".names", names, SHT_STRTAB)
        data = bytearray(elf_file([self.SCRIPT, table], build_id=ID, names_index=3))
        shoff, shnum = _sections(data)
        for index in range(shnum):
            struct.pack_into("<I", data, shoff + index * 64, name_at if index == 2 else 0)
        return bytes(data)


class TestBounds:
    """Headers may claim anything; reading stays within a few megabytes and few calls."""

    GIGABYTES = 4 << 30

    def test_too_many_sections(self) -> None:
        data = bytearray(elf_file(build_id=ID, extended_numbering=True))
        shoff, _ = _sections(data)
        for many in ((16 << 20) // 64 + 1, 2**63):
            struct.pack_into("<Q", data, shoff + 32, many)
            assert identified(bytes(data)) == ID
            reader = FileReader(bytes(data), self.GIGABYTES)
            assert describe(reader, self.GIGABYTES) is Absence.MALFORMED
            assert reader.bytes_read < 10_000

    def test_too_many_segments(self) -> None:
        data = bytearray(elf_file(build_id=ID, extended_numbering=True))
        shoff, _ = _sections(data)
        struct.pack_into("<I", data, shoff + 44, 2**32 - 1)
        reader = FileReader(bytes(data), self.GIGABYTES)
        assert describe(reader, self.GIGABYTES) is Absence.MALFORMED
        assert reader.bytes_read < 10_000

    def test_section_names_too_large(self) -> None:
        data = bytearray(elf_file(build_id=ID))
        shoff, shnum = _sections(data)
        struct.pack_into("<Q", data, shoff + (shnum - 1) * 64 + 32, 1 << 31)
        reader = FileReader(bytes(data), self.GIGABYTES)
        assert describe(reader, self.GIGABYTES) is Absence.MALFORMED
        assert reader.bytes_read < 10_000

    def test_notes_as_large_as_the_file(self) -> None:
        huge = Section(b".note", b"", SHT_NOTE, SHF_ALLOC, PT_NOTE, size=self.GIGABYTES)
        data = elf_file([huge] * 100)
        reader = FileReader(data, self.GIGABYTES)
        assert identify(data[:HEAD_SIZE], reader, self.GIGABYTES) is Absence.NO_BUILD_ID
        assert reader.bytes_read <= 5 << 20

    def test_a_swarm_of_small_notes(self) -> None:
        other = Section(b"", note(b"GNU\0", 1, b""), segment=PT_NOTE, align=4)
        data = elf_file([other] * 20_000, section_headers=False)
        reader = FileReader(data)
        assert identify(data[:HEAD_SIZE], reader) is Absence.NO_BUILD_ID
        assert reader.calls <= 1100

    def test_the_largest_tables_that_are_read(self) -> None:
        """All sections share the longest name there can be, and none of it is searched twice."""
        data = bytearray(elf_file(build_id=ID, extended_numbering=True))
        shoff, _ = _sections(data)
        names_at, count = 32 << 20, (16 << 20) // 64
        struct.pack_into("<Q", data, shoff + 32, count)
        data[shoff + 64 :] = struct.pack(
            "<IIQQQQIIQQ", 5, SHT_STRTAB, 0, 0, names_at, 16 << 20, 0, 0, 1, 0
        ) * (count - 1)
        data += bytes(names_at - len(data)) + b"x" * (16 << 20)
        reader = FileReader(bytes(data))
        file = describe(reader, len(data))
        assert isinstance(file, ElfFile)
        assert file.scripts == ()
        assert reader.bytes_read < 40 << 20


class TestThisSystem:
    def test_the_interpreter(self) -> None:
        fd = os.open(sys.executable, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            file = describe(lambda offset, length: os.pread(fd, length, offset), size)
        finally:
            os.close(fd)
        if file is Absence.NO_BUILD_ID:
            pytest.skip("this Python was linked without a build ID")
        assert isinstance(file, ElfFile)
        assert Kind.EXECUTABLE in file.kinds
        assert (file.little_endian, file.bits) == (
            sys.byteorder == "little",
            struct.calcsize("P") * 8,
        )
        assert not file.truncated
        assert file.scripts == ()

    def test_the_vdso(self) -> None:
        """As it is in memory, which is all there is of it."""
        with open("/proc/self/maps", "rb") as file:
            line = next((each for each in file if each.rstrip().endswith(b"[vdso]")), None)
        if line is None:
            pytest.skip("no vDSO here")
        start, end = (int(each, 16) for each in line.split()[0].split(b"-"))
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            image = os.pread(memory.fileno(), end - start, start)
        assert isinstance(identified(image), BuildId)
        assert described(image).kinds[0] is Kind.EXECUTABLE

    def test_the_running_kernel(self) -> None:
        try:
            with open("/sys/kernel/notes", "rb") as file:
                notes = file.read()
        except OSError as error:
            pytest.skip(f"no notes of the kernel: {error}")
        assert len(gnu_build_id(notes, sys.byteorder == "little") or b"") >= 8


def _sections(data: bytes | bytearray) -> tuple[int, int]:
    """Offset and number of the section headers (64 bit, little endian)."""
    (shoff,) = struct.unpack_from("<Q", data, 40)
    (shnum,) = struct.unpack_from("<H", data, 60)
    return shoff, shnum
