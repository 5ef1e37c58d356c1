# SPDX-License-Identifier: Apache-2.0
"""A note that is added to an ELF file: what other readers make of it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import pytest

from buildidfs.formats.elf import added_note, identify
from buildidfs.formats.elf.sections import Sections
from tests.support.elf.elfwriter import DWARF, DYNSYM, SYMTAB, TEXT, Section, elf_file
from tests.support.filesystems.filereader import FileReader

_ID = bytes(range(16))


def with_note(data: bytes, build_id: bytes = _ID) -> bytes:
    parts = added_note.with_note(FileReader(data), len(data), build_id)
    assert parts is not None
    assert parts.at >= len(data)
    body = data[len(parts.head) :] + bytes(parts.at - len(data))
    whole = parts.head + body + parts.tail
    assert len(whole) == parts.size
    return whole


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("little_endian", [True, False])
@pytest.mark.parametrize("section_headers", [True, False])
@pytest.mark.parametrize("sections", [[], [TEXT], [TEXT, DYNSYM, SYMTAB, DWARF]])
def test_readelf_finds_the_note_and_all_that_was_there(
    tmp_path: Path,
    bits: Literal[32, 64],
    little_endian: bool,
    section_headers: bool,
    sections: list[Section],
) -> None:
    if not section_headers:
        sections = [each for each in sections if each.segment]
    data = elf_file(
        sections, bits=bits, little_endian=little_endian, section_headers=section_headers
    )
    whole = with_note(data)
    assert identify.identify(whole[:4096], FileReader(whole), len(whole)) == _ID
    before, after = (Sections(FileReader(each), len(each)) for each in (data, whole))
    assert after.headers[: len(before.headers)] == before.headers
    path = tmp_path / "file"
    path.write_bytes(whole)
    said = subprocess.run(
        ["readelf", "-W", "-n", "-l", "-S", path], capture_output=True, text=True, check=True
    )
    assert said.stdout.count(f"Build ID: {_ID.hex()}") == 1
    assert ".note.gnu.build-id" in said.stdout
    assert "Warning" not in said.stderr


@pytest.mark.parametrize("bits", [32, 64])
def test_note_comes_before_another_build_id(tmp_path: Path, bits: Literal[32, 64]) -> None:
    """As the one that Bazel gives to all Go programs."""
    whole = with_note(elf_file([TEXT], build_id=b"\x49" * 20, bits=bits))
    assert identify.identify(whole[:4096], FileReader(whole)) == _ID
    named = [each.name for each in Sections(FileReader(whole), len(whole)).headers]
    assert named.count(b".note.gnu.build-id") == 1
    path = tmp_path / "file"
    path.write_bytes(whole)
    said = subprocess.run(
        ["readelf", "-x", ".note.gnu.build-id", path], capture_output=True, text=True, check=True
    )
    assert _ID[:4].hex() in said.stdout


@pytest.mark.parametrize("size", [4, 16, 20, 21])
def test_build_id_of_any_length(size: int) -> None:
    whole = with_note(elf_file(), bytes(range(1, size + 1)))
    assert identify.identify(whole[:4096], FileReader(whole)) == bytes(range(1, size + 1))


@pytest.mark.parametrize(
    "data",
    [b"", b"#!/bin/sh\n", b"\x7fELF", elf_file(extended_numbering=True), elf_file()[:-40]],
)
def test_file_without_room_for_a_note_is_left_as_it_is(data: bytes) -> None:
    assert added_note.with_note(FileReader(data), len(data), _ID) is None
