# SPDX-License-Identifier: Apache-2.0
"""Core files of any class and byte order, whole or not; what real ones say is in tests/system."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from buildidfs.formats.elf import core
from buildidfs.formats.elf.core import Core, Module, Unknown
from buildidfs.model import BuildId
from tests.support.elf.corewriter import (
    AT_ENTRY,
    AT_PHDR,
    AT_SYSINFO_EHDR,
    PAGE,
    Mapped,
    core_file,
    file_table,
)
from tests.support.elf.elfwriter import elf_file, note
from tests.support.filesystems.filereader import FileReader

EXE, LIB, OTHER = (BuildId(bytes([number]) * 20) for number in (0xE1, 0x11, 0x07))
FORMS = [(bits, little) for bits in (32, 64) for little in (True, False)]


def page(build_id: bytes | None, **options: Any) -> bytes:
    """The first page of a file."""
    return elf_file(build_id=build_id, **options)[:PAGE].ljust(PAGE, b"\0")


def parse(data: bytes) -> Core:
    found = core.parse(FileReader(data), len(data))
    assert found is not None
    return found


def process(**options: Any) -> bytes:
    """The core of a program with a library, some data and a vDSO."""
    form = {key: options[key] for key in ("bits", "little_endian") if key in options}
    return core_file(
        [
            Mapped(0x10000, page(EXE, **form), b"/app/hot"),
            Mapped(0x11000, b"", b"/app/hot", PAGE, executable=True),
            Mapped(0x20000, b"heap" * 1024),
            Mapped(0x30000, b"", b"/usr/lib/locale/archive"),
            Mapped(0x40000, page(LIB, **form), b"/app/lib\xff.so (deleted)"),
            Mapped(0x41000, b"", b"/app/lib\xff.so (deleted)", PAGE, executable=True),
            Mapped(0x50000, page(OTHER, **form), executable=True),
        ],
        auxiliary=[(AT_PHDR, 0x10040), (AT_SYSINFO_EHDR, 0x50000)],
        **options,
    )


@pytest.mark.parametrize(("bits", "little_endian"), FORMS)
def test_every_form(bits: Literal[32, 64], little_endian: bool) -> None:
    found = parse(process(bits=bits, little_endian=little_endian, threads=3))
    assert found.modules == (
        Module(b"/app/hot", 0x10000, 0x12000, EXE, main=True),
        Module(b"/app/lib\xff.so", 0x40000, 0x42000, LIB, deleted=True),
        Module(core.VDSO, 0x50000, 0x51000, OTHER),
    )
    assert (found.bits, found.little_endian) == (bits, little_endian)
    assert (found.name, found.arguments) == (b"hot", b"hot stuck")
    assert (found.pid, found.signal, found.threads) == (4711, 11, 3)


def test_vdso_bytes() -> None:
    data = process()
    found = parse(data)
    assert found.vdso is not None
    assert data[found.vdso.offset :][: found.vdso.size] == page(OTHER)
    assert found.claimed == len(data)
    # Not where part of it is missing.
    assert parse(data[:-1]).vdso is None
    short = Mapped(0x50000, page(OTHER)[:2048])
    assert parse(core_file([short], auxiliary=[(AT_SYSINFO_EHDR, 0x50000)])).vdso is None


def test_main_is_where_the_entry_is_without_program_headers() -> None:
    mappings = [
        Mapped(0x10000, page(LIB), b"/ld.so", executable=True),
        Mapped(0x20000, page(EXE), b"/hot", executable=True),
    ]
    found = parse(core_file(mappings, auxiliary=[(AT_ENTRY, 0x20010)]))
    assert [module.main for module in found.modules] == [False, True]


def test_core_that_was_cut_off() -> None:
    data = process()
    library = data.index(b"\x7fELF", data.index(b"\x7fELF", 1) + 1)
    found = parse(data[:library])
    assert [module.build_id for module in found.modules] == [EXE, None, None]
    assert [module.unknown for module in found.modules[1:]] == [Unknown.CUT_OFF] * 2
    assert found.claimed == len(data)
    # Within the notes, within the program headers, within the header.
    for size in range(library, -1, -97):
        cut = core.parse(FileReader(data[:size]), size)
        assert cut is None or cut.claimed <= len(data)
        assert (cut is None) == (size < 64)


def test_pages_that_were_not_dumped() -> None:
    mappings = [
        Mapped(0x10000, b"", b"/app/hot"),
        Mapped(0x11000, b"", b"/app/hot", PAGE, executable=True),
        Mapped(0x30000, b"", b"/usr/lib/locale/archive"),
        Mapped(0x40000, b"not ELF", b"/usr/share/data"),
        Mapped(0x50000, page(None), b"/app/nameless.so"),
        Mapped(0x60000, page(EXE)[:80], b"/app/half.so"),
    ]
    found = parse(core_file(mappings))
    assert [(module.path, module.unknown) for module in found.modules] == [
        (b"/app/hot", Unknown.NOT_DUMPED),
        (b"/app/nameless.so", Unknown.NO_BUILD_ID),
        (b"/app/half.so", Unknown.NO_BUILD_ID),
    ]


def test_core_without_a_list_of_files() -> None:
    found = parse(process(file_note=False))
    assert [(module.path, module.build_id) for module in found.modules] == [
        (b"", EXE), (b"", LIB), (core.VDSO, OTHER),
    ]  # fmt: skip


def test_same_path_other_file() -> None:
    """A library that was replaced and loaded again; and one whose first page is mapped twice."""
    mappings = [
        Mapped(0x10000, page(LIB), b"/lib.so", executable=True),
        Mapped(0x20000, page(OTHER), b"/lib.so", executable=True),
        Mapped(0x21000, page(OTHER), b"/lib.so"),
    ]
    found = parse(core_file(mappings))
    assert [(module.start, module.end, module.build_id) for module in found.modules] == [
        (0x10000, 0x11000, LIB), (0x20000, 0x22000, OTHER),
    ]  # fmt: skip


def test_library_within_another_file() -> None:
    found = parse(core_file([Mapped(0x10000, page(LIB), b"/base.apk", 16 * PAGE)]))
    assert found.modules == (Module(b"/base.apk", 0x10000, 0x11000, LIB),)


def test_notes_in_a_later_page() -> None:
    """As of gcore, which dumps all: the build ID need not be in the first page."""
    whole = elf_file([], build_id=EXE, section_headers=False, build_id_in="segment")
    place = whole.index(EXE) - 16
    moved = whole[:place].ljust(PAGE, b"\0") + whole[place:].ljust(PAGE, b"\0")
    # p_offset of the only program header
    moved = moved[:72] + PAGE.to_bytes(8, "little") + moved[80:]
    mappings = [
        Mapped(0x10000, moved[:PAGE], b"/hot"),
        Mapped(0x11000, moved[PAGE:], b"/hot", PAGE),
    ]
    assert parse(core_file(mappings)).modules[0].build_id == EXE
    without = [mappings[0], mappings[1]._replace(data=b"")]
    assert parse(core_file(without)).modules[0].unknown is Unknown.NO_BUILD_ID


def test_more_program_headers_than_the_header_can_count() -> None:
    mappings = [Mapped(0x100000 + PAGE * n, b"", size=PAGE) for n in range(70_000)]
    mappings.append(Mapped(0x10000, page(EXE), b"/hot"))
    data = core_file(mappings, many=True)
    assert [module.build_id for module in parse(data).modules] == [EXE]
    # The number is at the end, and may be lost; the notes are where the headers end.
    assert [module.build_id for module in parse(data[:-1]).modules] == [EXE]


def test_many_threads_are_not_read() -> None:
    registers = note(b"LINUX\0", 0x202, bytes(12_000)) * 1000
    data = core_file([Mapped(0x10000, page(EXE), b"/hot")], extra_notes=registers, threads=2)
    reader = FileReader(data)
    found = core.parse(reader, len(data))
    assert found is not None
    assert (found.threads, len(found.modules)) == (2, 1)


def test_core_of_gigabytes() -> None:
    size = 8 << 30
    mapping = Mapped(0x10000, page(EXE), b"/hot")
    data = bytearray(core_file([Mapped(0x100000, b"", size=size), mapping]))
    # p_filesz of the second program header, at whose offset there is the page, too
    data[64 + 56 + 32 : 64 + 56 + 40] = size.to_bytes(8, "little")
    reader = FileReader(bytes(data), len(data) + size)
    found = core.parse(reader, len(data) + size)
    assert found is not None
    assert [module.build_id for module in found.modules] == [EXE]
    assert reader.bytes_read < 100_000


def test_gcore_lists_files_last() -> None:
    mapping = Mapped(0x10000, page(EXE), b"/hot")
    table = note(b"CORE\0", 0x46494C45, file_table([mapping]))
    registers = note(b"LINUX\0", 0x202, bytes(70_000)) * 3
    found = parse(core_file([mapping], file_note=False, extra_notes=registers + table))
    assert [module.path for module in found.modules] == [b"/hot"]


def test_claims_of_a_list_of_files() -> None:
    mapping = Mapped(0x10000, page(EXE), b"/hot")
    good = file_table([mapping])
    word = 8
    for count in (2, 1 << 20, 2**64 - 1):
        table = note(b"CORE\0", 0x46494C45, count.to_bytes(word, "little") + good[word:])
        parse(core_file([mapping], file_note=False, extra_notes=table))
    for size in range(len(good)):
        table = note(b"CORE\0", 0x46494C45, good[:size])
        found = parse(core_file([mapping], file_note=False, extra_notes=table))
        # The path is whole, or there is none.
        assert [(module.path, module.build_id) for module in found.modules] == [(b"", EXE)]


@pytest.mark.parametrize(
    "data", [b"", b"\x7fELF", b"#!/bin/sh\n" * 10, elf_file(build_id=EXE), b"\x7fELF" + bytes(60)]
)
def test_other_files_are_no_core(data: bytes) -> None:
    assert not core.is_core(data)
    assert core.parse(FileReader(data), len(data)) is None


def test_core_of_nothing() -> None:
    found = parse(core_file([]))
    assert found.modules == ()
    assert found.pid == 4711
