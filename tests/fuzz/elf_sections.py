# SPDX-License-Identifier: Apache-2.0
"""The decoders of what is in sections of ELF files, and of kernels around one."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from buildidfs.formats import kernel_image
from buildidfs.formats.elf import identify, loaded_names, minidebug, units
from buildidfs.formats.elf.minidebug import DynamicSymbols
from buildidfs.formats.elf.sections import Sections, functions
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled
from tests.support.elf import godebug, gowriter
from tests.support.elf.elfwriter import (
    SHF_ALLOC,
    SHF_COMPRESSED,
    SHT_DYNSYM,
    SHT_STRTAB,
    SHT_SYMTAB,
    Section,
    elf_file,
)
from tests.support.elf.kernels import bzimage_file, unified_file
from tests.support.filesystems.filereader import FileReader

# --- tables of Go --------------------------------------------------------------------------------


def _check_go(data: bytes) -> None:
    """Given as a whole file, as a table in a program of ours, and found there by its magic."""
    _check_go_file(data)
    for headers in (True, False):
        _check_go_file(go_program(data, headers=headers))


def _check_go_file(data: bytes) -> None:
    debug = godebug.made(data)
    if debug is not None:
        assert len(debug) <= 16 * len(data) + (1 << 20)
        found = identify.describe(FileReader(debug), len(debug))
        assert isinstance(found, identify.ElfFile)
        assert not found.truncated


def go_program(table: bytes, *, headers: bool = True) -> bytes:
    """A program with any bytes as its table."""
    functions = [gowriter.Function("f", [], bare=4096)]
    return gowriter.program(functions, alter=lambda old: table, headers=headers)


_GO_FUNCTIONS: Final = [
    gowriter.Function(
        "main.f",
        [
            gowriter.Row(4, "/a.go", 3),
            gowriter.Row(4, "/b.go", 3),
            gowriter.Row(400, "/b.go", 900),
        ],
        4,
    ),
    gowriter.Function("main.g\N{MIDDLE DOT}1", [gowriter.Row(4, "/b.go", 70_000)]),
    gowriter.Function("c", [], bare=32),
]


def _seed_go() -> Iterator[bytes]:
    for magic in gowriter.MAGICS:
        for little_endian in (True, False):
            form = gowriter.Form(magic, 64 if little_endian else 32, little_endian)
            yield gowriter.program(_GO_FUNCTIONS, form)
            yield gowriter.table(_GO_FUNCTIONS, 0x400000, form)


def _huge_go() -> Iterator[bytes]:
    """Many functions that share one long table, or one long name, and files that change in it."""
    few = gowriter.Row(1, "/a.go", 1), gowriter.Row(1, "/b.go", 2)
    rows = [gowriter.Row(1, "/a.go", at * 7919 % 100_000) for at in range(100_000)]
    both = [
        [gowriter.Row(1, files[at % len(files)], at % 3) for at in range(90_000)]
        for files in (["/a.go"], ["/a.go", "/b.go"])
    ]
    for magic in (gowriter.GO_1_2, gowriter.GO_1_16, gowriter.GO_1_20):
        form = gowriter.Form(magic)
        yield gowriter.program([gowriter.Function("f", few * 60_000)], form)
        yield gowriter.program([gowriter.Function("f", few[:1], 15)] * 8000, form)
        yield gowriter.program([gowriter.Function("f" * 400_000, few)], form)
        yield gowriter.program([gowriter.Function("f", rows)], form)
        for shared in both:
            yield gowriter.program([gowriter.Function("f", shared, bare=16)] * 6000, form)
    yield filled(gowriter.table(_GO_FUNCTIONS[:1], 0, gowriter.Form())[:128])
    yield go_program(filled(b"\xf1\xff\xff\xff\0\0\1\x08", 900_000), headers=False)


# --- kernels -------------------------------------------------------------------------------------


def _check_bzimage(data: bytes) -> None:
    found = kernel_image.payload(data[: kernel_image.HEAD_SIZE], len(data))
    assert found is None or (found.size and found.offset + found.size <= len(data))


def _seed_bzimage() -> Iterator[bytes]:
    yield bzimage_file(b"payload")
    yield bzimage_file(b"payload", sectors=0, offset=0)


def _check_unified(data: bytes) -> None:
    found = kernel_image.section(FileReader(data), len(data), kernel_image.KERNEL)
    assert found is None or 0 < found.size <= found.offset + found.size <= len(data)


def _seed_unified() -> Iterator[bytes]:
    yield unified_file(bzimage_file(b"payload"))
    yield unified_file(b"payload", b".other")


def _huge_unified() -> Iterator[bytes]:
    yield unified_file(bytes(MEGABYTE - 20_000))


# --- lists of a dynamic linker -------------------------------------------------------------------

_AUXILIARY: Final = 80


def _check_links(data: bytes) -> None:
    """The memory is the input, and begins with the auxiliary vector."""

    def read(address: int, size: int) -> bytes:
        if not 0 <= address < len(data):
            raise OSError
        return data[address : address + size]

    found = loaded_names.names(data[:_AUXILIARY], read)
    assert all(name.startswith(b"/") and b"\0" not in name for name in found)
    assert len(set(found)) == len(found)


def _links(*rows: tuple[int, bytes], bits: int = 64) -> bytes:
    """Memory with a list of names, each with the address of the next row."""
    word = "<Q" if bits == 64 else "<I"

    def words(*values: int) -> bytes:
        return b"".join(struct.pack(word, value) for value in values)

    # The type, the flags or the offset, and the address of the dynamic section.
    header = struct.pack("<II8xQ32x" if bits == 64 else "<III20x", 2, 0, 0x200)
    vector = words(3, 0x100, 4, len(header), 5, 1, 31, 0x180, 0, 0)
    data = vector.ljust(0x100, b"\0") + header
    data = data.ljust(0x180, b"\0") + b"/bin/app\0"
    data = data.ljust(0x200, b"\0") + words(21, 0x280, 0, 0)
    data = data.ljust(0x280, b"\0") + words(1, 0x300)
    for number, (following, name) in enumerate(rows):
        at = 0x300 + 64 * number
        data = data.ljust(at, b"\0") + words(0, at + bits // 2, 0, following) + name + b"\0"
    return data


def _seed_links() -> Iterator[bytes]:
    for bits in (64, 32):
        yield _links((0x340, b""), (0x380, b"/lib/a.so"), (0, b"/lib/b.so"), bits=bits)


def _huge_links() -> Iterator[bytes]:
    yield _links((0x300, b"/lib/a.so"))  # without an end
    rows = [(0x340 + 64 * number, b"/lib/%d" % number) for number in range(10_000)]
    yield _links(*rows)
    yield _links((0x300, b"/")).ljust(MEGABYTE, b"/")


def _huge_bzimage() -> Iterator[bytes]:
    yield bzimage_file(bytes(MEGABYTE - 20_000))


# --- symbols -------------------------------------------------------------------------------------

_SYMBOL = struct.pack("<IBBHQQ", 1, 0x12, 0, 1, 0x400048, 4)


def _check_functions(data: bytes) -> None:
    for each in functions(Sections(FileReader(data), len(data))):
        assert len(each.name) <= 512
        assert each.size


def _check_minidebug(data: bytes) -> None:
    """The file is its own debug file: both sides of the merge are hostile."""
    dynamic = minidebug.dynamic_symbols(FileReader(data), len(data))
    for symbols in (dynamic, DynamicSymbols(_SYMBOL, b"\0name\0")):
        if symbols is None:
            continue
        whole = minidebug.completed(data, symbols)
        if whole is None:
            continue
        grown = 2 * len(data) + len(symbols.symbols) + len(symbols.names) + 16
        assert len(data) <= len(whole) <= grown


def _seed_minidebug() -> Iterator[bytes]:
    yield from elf_mutation.seeds()
    yield elf_file(
        [
            Section(b".text", bytes(64), flags=SHF_ALLOC),
            Section(b".dynsym", bytes(24) + _SYMBOL, SHT_DYNSYM, SHF_ALLOC, link=3, info=1),
            Section(b".dynstr", b"\0one\0", SHT_STRTAB, SHF_ALLOC),
            Section(b".symtab", bytes(24) + _SYMBOL, SHT_SYMTAB, link=5, info=1),
            Section(b".strtab", b"\0two\0", SHT_STRTAB),
        ]
    )


def _huge_minidebug() -> Iterator[bytes]:
    """As many symbols as fit, in as many sections."""
    text = Section(b".text", bytes(64), flags=SHF_ALLOC)
    names = Section(b".strtab", b"\0one\0", SHT_STRTAB)
    symbols = filled(_SYMBOL, MEGABYTE - 4096)
    yield elf_file(
        [
            text,
            Section(b".dynsym", symbols, SHT_DYNSYM, link=3),
            names,
            Section(b".symtab", bytes(24), SHT_SYMTAB, link=3),
        ]
    )
    half = symbols[: len(symbols) // 2 // 24 * 24]
    many = [Section(b".t", b"", flags=SHF_ALLOC, size=1 << 40, offset=64)] * 7000
    yield elf_file(
        [
            text,
            Section(b".dynsym", half, SHT_DYNSYM, link=3),
            names,
            Section(b".symtab", bytes(24), SHT_SYMTAB, link=3),
            *many,
        ]
    )


# --- split DWARF ---------------------------------------------------------------------------------

_DECLARED = bytes([1, 0x4A, 0, 0x76, 0x25, 0x72, 0x17, 0x1B, 0x1F, 0, 0])


def _check_splitdwarf(data: bytes) -> None:
    reader = FileReader(data)
    found = list(units.skeletons(reader, len(data)))
    assert len(found) <= units.UNITS_MAX
    assert reader.bytes_read <= 8 * len(data) + (4 << 20)
    for each in found:
        assert 0 <= each.dwo_id < 1 << 64
        assert b"\0" not in each.name + each.directory
    assert 0 not in units.packaged(FileReader(data), len(data))


def _units(entry: bytes, *, version: int = 5) -> bytes:
    if version == 5:
        body = struct.pack("<HBBIQ", 5, 4, 8, 0, 7) + entry
    else:
        body = struct.pack("<HIB", 4, 0, 8) + entry
    return struct.pack("<I", len(body)) + body


def _split(info: bytes, abbreviations: bytes, flags: int = 0) -> bytes:
    return elf_file(
        [
            Section(b".debug_info", info, flags=flags),
            Section(b".debug_abbrev", abbreviations),
            Section(b".debug_addr", bytes(8)),
            Section(b".debug_str", b"x\0the.dwo\0"),
            Section(b".debug_line_str", b"/src\0"),
            Section(b".debug_str_offsets", struct.pack("<IHHI", 8, 5, 0, 2)),
        ]
    )


def _seed_splitdwarf() -> Iterator[bytes]:
    entry = b"\x01\x00" + struct.pack("<II", 8, 0)
    yield _split(_units(entry) * 2, _DECLARED + b"\0")
    gnu = bytes([1, 0x11, 0]) + b"\xb0\x42\x0e\x1b\x0e\xb1\x42\x07\x25\x08\0\0\0"
    yield _split(_units(b"\x01" + struct.pack("<IIQ", 2, 0, 7) + b"c\0", version=4), gnu)
    slots = struct.pack("<4I4Q", 2, 1, 2, 4, 0, 11, 0, 12)
    yield elf_file([Section(b".debug_cu_index", slots)])


def _huge_splitdwarf() -> Iterator[bytes]:
    """Units without end, each with all there may be to read; packages of everything."""
    long_one = bytes([2, 0x4A, 0]) + b"\x76\x0b" * 60 + b"\0\0"
    yield _split(filled(_units(b"\x02" + bytes(60)), MEGABYTE - 65536), _DECLARED * 62 + long_one)
    yield _split(filled(_units(b"\x02"), MEGABYTE - 65536), long_one.replace(b"\x02", b"\x03") * 99)
    yield _split(bytes(MEGABYTE - 4096), _DECLARED)
    entry = b"\x01\x00" + struct.pack("<II", 8, 0)
    yield _split(filled(_units(entry), MEGABYTE - 4096), _DECLARED)
    bomb = struct.pack("<I4xQQ", 1, 1 << 30, 1) + _deflated(64)
    yield _split(bomb, _DECLARED, SHF_COMPRESSED)
    index = struct.pack("<4I", 5, 1, 1, 1 << 30) + bytes(range(256)) * 4000
    yield elf_file([Section(b".debug_cu_index", index)])


def _deflated(megabytes: int) -> bytes:
    import zlib

    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(MEGABYTE)) for _ in range(megabytes)) + packer.flush()


def _check_sections(data: bytes) -> None:
    reader = FileReader(data)
    sections = Sections(reader, len(data))
    for header in sections.headers[:64]:
        assert len(sections.contents(header, 4096)) <= 4096
    assert reader.bytes_read <= 8 * len(data) + 4096


def _huge_sections() -> Iterator[bytes]:
    yield elf_file([Section(b".n", b"", size=1 << 62)] * 12_000)
    yield elf_file([Section(b".n", bytes(MEGABYTE - 4096), SHT_STRTAB)])


TARGETS: Final = {
    "bzimage": Target(_check_bzimage, _seed_bzimage, _huge_bzimage, ("kernel_image",)),
    "elfcontents": Target(_check_sections, _seed_minidebug, _huge_sections, ("elf.sections",)),
    "go_debug": Target(
        _check_go,
        _seed_go,
        _huge_go,
        ("go.debug_file", "go.lines", "go.gopclntab", "elf.writer"),
        cost=_check_go_file,
    ),
    "functions": Target(_check_functions, _seed_minidebug, _huge_minidebug, ("elf.sections",)),
    "minidebug": Target(
        _check_minidebug,
        _seed_minidebug,
        _huge_minidebug,
        ("elf.minidebug",),
        cost=lambda data: minidebug.completed(
            data, minidebug.dynamic_symbols(FileReader(data), len(data)) or DynamicSymbols()
        ),
    ),
    "splitdwarf": Target(_check_splitdwarf, _seed_splitdwarf, _huge_splitdwarf, ("elf.units",)),
    "unified": Target(_check_unified, _seed_unified, _huge_unified, ("kernel_image",)),
    "linkmaps": Target(_check_links, _seed_links, _huge_links, ("elf.loaded_names",)),
}
