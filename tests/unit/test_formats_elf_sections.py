# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.elf.sections: the functions of symbol tables, good and hostile ones."""

from __future__ import annotations

import struct

import pytest

from buildidfs.formats.elf.sections import FunctionSymbol, Sections, defines, functions
from tests.support.elf.elfwriter import SHT_DYNSYM, SHT_STRTAB, SHT_SYMTAB, TEXT, Section, elf_file
from tests.support.filesystems.filereader import FileReader

FUNCTION, OBJECT = 0x12, 0x11
NAMES = b"\0main\0helper\0" + b"x" * 600 + b"\0"


def symbols(*rows: tuple[int, int, int, int, int], bits: int = 64, order: str = "<") -> bytes:
    """A table of (name, info, section, address, size), after the null symbol."""
    table = bytes(24 if bits == 64 else 16)
    for name, info, section, address, size in rows:
        if bits == 64:
            table += struct.pack(order + "IBBHQQ", name, info, 0, section, address, size)
        else:
            table += struct.pack(order + "IIIBBH", name, address, size, info, 0, section)
    return table


def found(*sections: Section, **form: object) -> list[FunctionSymbol]:
    data = elf_file([TEXT, *sections], **form)  # type: ignore[arg-type]
    return list(functions(Sections(FileReader(data), len(data))))


def table(data: bytes, kind: int = SHT_SYMTAB, name: bytes = b".symtab") -> Section:
    return Section(name, data, kind, link=3)


STRINGS = Section(b".strtab", NAMES, SHT_STRTAB)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("little_endian", [True, False])
def test_functions_have_name_address_and_size(bits: int, little_endian: bool) -> None:
    rows = ((1, FUNCTION, 1, 0x1000, 16), (6, FUNCTION, 1, 0x2000, 8))
    data = symbols(*rows, bits=bits, order="<" if little_endian else ">")
    assert found(table(data), STRINGS, bits=bits, little_endian=little_endian) == [
        FunctionSymbol(b"main", 0x1000, 16),
        FunctionSymbol(b"helper", 0x2000, 8),
    ]


def test_only_defined_functions_with_a_size_count_and_each_address_once() -> None:
    data = symbols(
        (1, FUNCTION, 0, 0x1000, 16),
        (1, OBJECT, 1, 0x1000, 16),
        (1, FUNCTION, 1, 0x1000, 0),
        (6, FUNCTION, 1, 0x1000, 4),
        (1, FUNCTION, 1, 0x1000, 16),
    )
    assert found(table(data), STRINGS) == [FunctionSymbol(b"helper", 0x1000, 4)]


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("little_endian", [True, False])
def test_a_reference_is_no_definition(bits: int, little_endian: bool) -> None:
    order = "<" if little_endian else ">"
    rows = symbols((1, FUNCTION, 0, 0, 0), (5, FUNCTION, 1, 16, 16), bits=bits, order=order)
    strings = Section(b".strtab", b"\0far\0near\0", SHT_STRTAB)
    data = elf_file([TEXT, table(rows), strings], bits=bits, little_endian=little_endian)
    sections = Sections(FileReader(data), len(data))
    names = (b"far", b"near", b"ear", b"nea", b"absent")
    assert [name for name in names if defines(sections, name, 1 << 20)] == [b"near"]


def test_dynamic_symbols_count_where_there_are_no_others() -> None:
    data = symbols((1, FUNCTION, 1, 0x1000, 16))
    assert [each.name for each in found(table(data, SHT_DYNSYM, b".dynsym"), STRINGS)] == [b"main"]


def test_long_name_is_cut() -> None:
    (only,) = found(table(symbols((13, FUNCTION, 1, 0x1000, 16))), STRINGS)
    assert only.name == b"x" * 512


@pytest.mark.parametrize("link", [0, 99])
def test_table_without_names_has_no_functions(link: int) -> None:
    data = symbols((1, FUNCTION, 1, 0x1000, 16))
    assert found(Section(b".symtab", data, SHT_SYMTAB, link=link), STRINGS) == []


def test_name_beyond_the_strings_is_empty() -> None:
    data = symbols((9999, FUNCTION, 1, 0x1000, 16))
    assert [each.name for each in found(table(data), STRINGS)] == [b""]


def test_table_that_is_too_large_has_no_functions() -> None:
    data = symbols((1, FUNCTION, 1, 0x1000, 16)) + bytes(24 * 174_762)
    assert found(table(data), STRINGS) == []
