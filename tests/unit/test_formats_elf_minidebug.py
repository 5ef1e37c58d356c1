# SPDX-License-Identifier: Apache-2.0
"""The symbols of .gnu_debugdata, completed by those of .dynsym, as readelf sees them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from buildidfs.formats.elf import minidebug
from buildidfs.formats.elf.minidebug import DynamicSymbols
from tests.support.clients.tools import run, tool
from tests.support.elf import debugforms
from tests.support.elf.elfwriter import SHF_ALLOC, SHT_DYNSYM, SHT_STRTAB, SYMTAB, Section, elf_file
from tests.support.filesystems.filereader import FileReader

_FUNC, _GLOBAL, _LOCAL = 2, 1 << 4, 0


@pytest.fixture(scope="module")
def mini(tmp_path_factory: pytest.TempPathFactory) -> debugforms.Mini:
    """A library with mini debuginfo."""
    directory = tmp_path_factory.mktemp("mini")
    return debugforms.with_mini_debuginfo(debugforms.library(directory), directory / "shipped")


def dynamic_of(path: Path) -> DynamicSymbols | None:
    data = path.read_bytes()
    return minidebug.dynamic_symbols(FileReader(data), len(data))


def functions(path: Path) -> dict[str, str]:
    """The functions in .symtab and the sections they are in, by name."""
    sections = {"UND": ""}
    for line in run([tool("readelf"), "-SW", path]).out.splitlines():
        number, _, rest = line.partition("]")
        if number.strip("[ ").isdecimal():
            sections[number.strip("[ ")] = rest.split()[0] if rest.split() else ""
    found = {}
    for line in run([tool("readelf"), "-sW", path]).out.splitlines():
        fields = line.split()
        if len(fields) == 8 and fields[3] == "FUNC":
            found[fields[7]] = sections[fields[6]]
    return found


def test_names_for_linking_are_added(mini: debugforms.Mini, tmp_path: Path) -> None:
    assert "hidden" in functions(mini.plain)
    assert "exported" not in functions(mini.plain)
    dynamic = dynamic_of(mini.shipped)
    assert dynamic is not None
    whole = minidebug.completed(mini.plain.read_bytes(), dynamic)
    assert whole is not None
    path = tmp_path / "whole"
    path.write_bytes(whole)
    found = functions(path)
    assert {name: found[name] for name in ("hidden", "exported")} == {
        "hidden": ".text",
        "exported": ".text",
    }
    lint = run([tool("eu-elflint"), "--gnu-ld", "-d", path])
    assert lint.rc == 0, str(lint)


def test_without_symbols_for_linking_nothing_changes(mini: debugforms.Mini) -> None:
    data = mini.plain.read_bytes()
    assert minidebug.completed(data, DynamicSymbols()) == data


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("little_endian", [True, False])
def test_all_forms_of_elf(bits: int, little_endian: bool) -> None:
    code = Section(b".text", bytes(64), flags=SHF_ALLOC)
    form = {"bits": bits, "little_endian": little_endian}
    old = symbol(b"", **form) + symbol(b"old", name_at=1, value=0x400100, **form)
    debug = elf_file(
        [
            code,
            SYMTAB._replace(data=old, link=3, info=2),
            Section(b".strtab", b"\0old\0", SHT_STRTAB),
        ],
        **form,  # type: ignore[arg-type]  # as given
    )
    start = 64 if bits == 64 else 52  # where the writer puts what comes first
    wanted = symbol(b"new", name_at=1, value=0x400000 + start + 8, info=_GLOBAL | _FUNC, **form)
    dynamic = DynamicSymbols(symbol(b"", **form) + wanted, b"\0new\0")
    whole = minidebug.completed(debug, dynamic)
    assert whole is not None
    assert whole.endswith(b"\0old\0\0new\0\0")
    assert (
        symbol(b"new", name_at=6, value=0x400000 + start + 8, info=_GLOBAL | _FUNC, **form) in whole
    )


def symbol(
    name: bytes,
    *,
    name_at: int = 0,
    value: int = 0,
    info: int = 0,
    bits: int = 64,
    little_endian: bool = True,
    section: int = 1,
) -> bytes:
    """One entry of a symbol table; the one without a name is the first of all."""
    order = "<" if little_endian else ">"
    section = section if name else 0
    if bits == 64:
        return struct.pack(order + "IBBHQQ", name_at, info, 0, section, value, 0)
    return struct.pack(order + "IIIBBH", name_at, value, 0, info, 0, section)


@pytest.mark.parametrize(
    "change",
    [
        {"info": _LOCAL | _FUNC},
        {"info": _GLOBAL | 6},  # of a thread: its value is no address
        {"section": 0},  # of another file
        {"section": 0xFFF1},  # an absolute number
        {"name_at": 99},
        {"value": 0x10},
    ],
)
def test_symbols_that_are_no_names_of_places(change: dict[str, int]) -> None:
    debug = elf_file(
        [
            Section(b".text", bytes(64), flags=SHF_ALLOC),
            SYMTAB._replace(data=symbol(b""), link=3, info=1),
            Section(b".strtab", b"\0", SHT_STRTAB),
        ]
    )
    good = {"name_at": 1, "value": 0x400048, "info": _GLOBAL | _FUNC}
    for values, is_added in ((good, True), (good | change, False)):
        dynamic = DynamicSymbols(symbol(b"") + symbol(b"x", **values), b"\0x\0")
        whole = minidebug.completed(debug, dynamic)
        assert (whole != debug) == is_added


@pytest.mark.parametrize("link", [0, 2, 77])
def test_a_debug_file_whose_names_are_not_there(link: int) -> None:
    debug = elf_file(
        [
            Section(b".text", bytes(64), flags=SHF_ALLOC),
            SYMTAB._replace(data=symbol(b""), link=link, info=1),
        ]
    )
    assert minidebug.completed(debug, DynamicSymbols(bytes(24), b"\0")) is None
    assert minidebug.completed(elf_file(), DynamicSymbols()) is None
    assert minidebug.completed(b"text", DynamicSymbols()) is None


def test_too_many_symbols_are_left_alone() -> None:
    def claimed(size: int) -> DynamicSymbols | None:
        data = elf_file(
            [
                Section(b".dynsym", bytes(24), SHT_DYNSYM, SHF_ALLOC, link=2, size=size),
                Section(b".dynstr", b"\0x\0", SHT_STRTAB),
            ]
        )
        return minidebug.dynamic_symbols(FileReader(data, 1 << 30), 1 << 30)

    assert claimed(24) == DynamicSymbols(bytes(24), b"\0x\0")
    assert claimed(minidebug.SYMBOLS_MAX_BYTES) is not None
    assert claimed(minidebug.SYMBOLS_MAX_BYTES + 1) is None
