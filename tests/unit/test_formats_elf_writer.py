# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io

import pytest
from elftools.elf.elffile import ELFFile

from buildidfs.formats.elf import header
from buildidfs.formats.elf.header import ElfLayout, Segment
from buildidfs.formats.elf.writer import BUILD_ID, NewSection, build_id_note, elf_file

RAW = bytes(range(20))


def _head(layout: ElfLayout, kind: bytes) -> bytes:
    fields = (header.ET_DYN, 62, 1, 0x1234, 99, 99, 7, *bytes(6))
    return (header.MAGIC + kind).ljust(16, b"\0") + layout.ehdr.pack(*fields)


def _written(head: bytes, segments: list[Segment], sections: list[NewSection]) -> bytes:
    found = elf_file(head, segments, sections)
    return b"".join(part if isinstance(part, bytes | bytearray) else part.read() for part in found)


@pytest.mark.parametrize("kind", header.LAYOUTS, ids=bytes.hex)
def test_readelf_finds_what_was_written(kind: bytes) -> None:
    layout = header.LAYOUTS[kind]
    strings = bytearray(b"\0one\0")
    shared = [strings[:2], io.BytesIO(strings[2:])]
    data = _written(
        _head(layout, kind),
        [
            Segment(header.PT_LOAD, 5, 0x1000, 0x2000, 9, 0x300, 0x1000),
            Segment(header.PT_NOTE, 4, 9, 0, 9, 9, 4),
        ],
        [
            NewSection(b".text", header.SHT_NOBITS, (), 6, 0x2000, 0x1000, 0x300),
            NewSection(BUILD_ID, header.SHT_NOTE, [build_id_note(layout, RAW)], align=4),
            NewSection(b".strtab", header.SHT_STRTAB, shared, size=5),
            NewSection(b".debug_str", header.SHT_PROGBITS, shared, size=5),
            NewSection(b".odd", header.SHT_PROGBITS, [strings], align=16),
        ],
    )
    read = ELFFile(io.BytesIO(data))
    assert (read["e_entry"], read["e_flags"], read["e_ident"]["EI_VERSION"]) == (
        0x1234, 7, "EV_CURRENT",
    )  # fmt: skip
    text, note, strtab, debug, odd = list(read.iter_sections())[1:-1]
    assert (text["sh_offset"], text["sh_size"], text["sh_addr"]) == (0x1000, 0x300, 0x2000)
    assert [each["n_desc"] for each in note.iter_notes()] == [RAW.hex()]
    assert strtab.data() == debug.data() == odd.data() == strings
    assert strtab["sh_offset"] == debug["sh_offset"] != odd["sh_offset"]
    assert odd["sh_offset"] % 16 == 0
    load, notes = read.iter_segments()
    assert (load["p_filesz"], load["p_memsz"], load["p_flags"]) == (0, 0x300, 5)
    assert (notes["p_offset"], notes["p_filesz"]) == (note["sh_offset"], note["sh_size"])
    assert read.get_section(read["e_shstrndx"]).name == ".shstrtab"


def test_a_file_without_segments_has_no_table_of_them() -> None:
    layout = header.LAYOUTS[b"\x02\x01"]
    read = ELFFile(io.BytesIO(_written(_head(layout, b"\x02\x01"), [], [])))
    assert (read["e_phoff"], read.num_segments(), read.num_sections()) == (0, 0, 2)
