# SPDX-License-Identifier: Apache-2.0
"""Skeleton units and packages, as gcc and dwp make them, and in forms that others do."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from buildidfs.formats.elf import units
from buildidfs.formats.elf.units import Skeleton
from tests.support.clients.tools import run, tool
from tests.support.elf import debugforms
from tests.support.elf.elfwriter import SHF_COMPRESSED, Section, elf_file
from tests.support.filesystems.filereader import FileReader


def skeletons(data: bytes) -> list[Skeleton]:
    return list(units.skeletons(FileReader(data), len(data)))


def packaged(data: bytes) -> frozenset[int]:
    return units.packaged(FileReader(data), len(data))


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("compress", ["none", "zlib"])
def test_skeletons_of_gcc(tmp_path: Path, version: int, compress: str) -> None:
    binary = debugforms.library(tmp_path, f"-gdwarf-{version}", "-gsplit-dwarf")
    run([tool("objcopy"), f"--compress-debug-sections={compress}", binary], check=True)
    (found,) = skeletons(binary.read_bytes())
    (written,) = tmp_path.glob("*.dwo")
    assert (found.name, found.directory) == (written.name.encode(), bytes(tmp_path))
    dumped = run([tool("readelf"), "--debug-dump=info", binary]).out
    assert f"0x{found.dwo_id:x}" in dumped


def test_package(tmp_path: Path) -> None:
    binary = debugforms.library(tmp_path, "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(binary)
    (found,) = skeletons(binary.read_bytes())
    assert packaged(package.read_bytes()) == {found.dwo_id}
    assert skeletons(package.read_bytes()) == []


def test_no_skeletons_without_split_dwarf(tmp_path: Path) -> None:
    data = debugforms.library(tmp_path).read_bytes()
    assert (skeletons(data), packaged(data)) == ([], frozenset())
    assert (skeletons(b"text"), packaged(b"")) == ([], frozenset())


# --- what gcc does not make ----------------------------------------------------------------------

# DW_TAG_skeleton_unit without children: name by index, base of that, directory, size as a constant
_CLANG = bytes([1, 0x4A, 0, 0x76, 0x25, 0x72, 0x17, 0x1B, 0x1F, 0x12, 0x21, 9, 0, 0, 0])


def unit(
    entry: bytes, *, kind: int = 4, version: int = 5, order: str = "<", wide: bool = False
) -> bytes:
    """A unit with DWO ID 7; ``wide`` is in 64-bit DWARF."""
    offset = bytes(8 if wide else 4)
    body = (
        struct.pack(order + "HBB", version, kind, 8) + offset + struct.pack(order + "Q", 7) + entry
    )
    if wide:
        return b"\xff\xff\xff\xff" + struct.pack(order + "Q", len(body)) + body
    return struct.pack(order + "I", len(body)) + body


def split(info: bytes, abbreviations: bytes = _CLANG, **form: object) -> bytes:
    order = "<" if form.get("little_endian", True) else ">"
    offsets = struct.pack(order + "IHHI", 8, 5, 0, 2)
    return elf_file(
        [
            Section(b".debug_info", info),
            Section(b".debug_abbrev", abbreviations),
            Section(b".debug_addr", bytes(16)),
            Section(b".debug_str", b"x\0the.dwo\0"),
            Section(b".debug_line_str", b"/src\0"),
            Section(b".debug_str_offsets", offsets),
        ],
        **form,  # type: ignore[arg-type]  # as given
    )


@pytest.mark.parametrize("order", ["<", ">"])
def test_strings_by_index(order: str) -> None:
    entry = b"\x01\x00" + struct.pack(order + "II", 8, 0)
    data = split(unit(entry, order=order), little_endian=order == "<")
    assert skeletons(data) == [Skeleton(7, b"the.dwo", b"/src")]


def test_64_bit_dwarf() -> None:
    offsets = struct.pack("<QHHQ", 12, 5, 0, 2)
    data = split(unit(b"\x01\x00" + struct.pack("<QQ", 12, 0), wide=True))
    data = data.replace(struct.pack("<IHHI", 8, 5, 0, 2), offsets[:12])
    assert [found.dwo_id for found in skeletons(data)] == [7]
    assert skeletons(data)[0].directory == b"/src"


def test_units_that_are_no_skeletons_are_passed_over() -> None:
    entry = b"\x01\x00" + struct.pack("<II", 8, 0)
    other = unit(b"\x01" + bytes(700), kind=1)
    strange = unit(entry, version=6)
    undeclared = unit(b"\x05" + entry[1:])
    data = split(other + strange + undeclared + unit(entry))
    assert skeletons(data) == [Skeleton(7, b"the.dwo", b"/src")]


def test_unknown_form() -> None:
    data = split(unit(b"\x01" + bytes(40)), bytes([1, 0x4A, 0, 0x76, 0x7E, 0, 0, 0]))
    assert skeletons(data) == []


def test_damaged_compressed_section() -> None:
    data = elf_file(
        [
            Section(
                b".debug_info", struct.pack("<IIQQ", 1, 0, 100, 1) + b"text", flags=SHF_COMPRESSED
            ),
            Section(b".debug_addr", bytes(16)),
        ]
    )
    assert skeletons(data) == []


@pytest.mark.parametrize(("order", "head"), [("<", "<I"), ("<", "<HH"), (">", ">I"), (">", ">HH")])
def test_index_of_either_version(order: str, head: str) -> None:
    version = (2,) if head.endswith("I") else (5, 0)
    slots = struct.pack(order + "4Q", 0, 11, 0, 12)
    index = struct.pack(head, *version) + struct.pack(order + "3I", 1, 2, 4) + slots
    for data, found in ((index, {11, 12}), (index[:-8], {11}), (index[:15], frozenset())):
        section = Section(b".debug_cu_index", data)
        assert packaged(elf_file([section], little_endian=order == "<")) == found
    unknown = Section(b".debug_cu_index", struct.pack(order + "I", 3) + index[4:])
    assert packaged(elf_file([unknown], little_endian=order == "<")) == frozenset()
