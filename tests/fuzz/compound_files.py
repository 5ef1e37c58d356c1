# SPDX-License-Identifier: Apache-2.0
"""The decoders of what has files in it, or speaks of them: cores, compressed blobs, archives."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final

from msgspec import structs

from buildidfs.errors import IntegrityError
from buildidfs.formats import bundle_archive
from buildidfs.formats.archive import seekable_zstd
from buildidfs.formats.elf import core, header
from tests.fuzz import elf_mutation
from tests.fuzz.target import MEGABYTE, Target, filled, refusal
from tests.support.elf.corewriter import AT_PHDR, AT_SYSINFO_EHDR, PAGE, Mapped, core_file
from tests.support.elf.elfwriter import PT_NOTE, SHT_NOTE, Section, elf_file, note
from tests.support.filesystems.filereader import FileReader

# --- core files ----------------------------------------------------------------------------------


def _check_core(data: bytes) -> None:
    reader = FileReader(data)
    found = core.parse(reader, len(data))
    assert reader.bytes_read <= 5 * len(data) + (1 << 18)
    if found is None:
        return
    assert core.is_core(data)
    for module in found.modules:
        assert (module.build_id is None) != (module.unknown is None)
    if found.vdso is not None:
        assert found.vdso.offset + found.vdso.size <= len(data)


def _process(**options: object) -> bytes:
    form = {key: options[key] for key in ("bits", "little_endian") if key in options}
    page = elf_file([], build_id=elf_mutation.BUILD_ID, **form)[:PAGE].ljust(PAGE, b"\0")  # type: ignore[arg-type]  # as given
    return core_file(
        [
            Mapped(0x10000, page, b"/app/hot"),
            Mapped(0x11000, b"", b"/app/hot", PAGE, executable=True),
            Mapped(0x40000, page, b"/app/lib\xff.so (deleted)"),
            Mapped(0x50000, page, executable=True),
        ],
        auxiliary=[(AT_PHDR, 0x10040), (AT_SYSINFO_EHDR, 0x50000)],
        **options,  # type: ignore[arg-type]  # as given
    )


def _seed_core() -> Iterator[bytes]:
    for bits in (32, 64):
        for little_endian in (True, False):
            yield _process(bits=bits, little_endian=little_endian)
    yield _process(many=True, file_note=False)


def _huge_core() -> Iterator[bytes]:
    """The same page mapped again and again, under one name and many; notes, and names."""
    nothing = Section(b".n", filled(note(b"", 0, b""), PAGE - 200), SHT_NOTE, segment=PT_NOTE)
    page = elf_file([nothing], section_headers=False)[:PAGE].ljust(PAGE, b"\0")
    for name in (b"/same", b"/%d"):
        yield core_file(
            [
                Mapped(index * PAGE, page, name % index if b"%" in name else name, executable=True)
                for index in range(1, 220)
            ]
        )
    yield core_file([Mapped(index * PAGE, b"", b"/x") for index in range(1, 11_000)])
    yield core_file([Mapped(PAGE, page)], threads=7000)
    yield core_file([Mapped(PAGE, page)], extra_notes=filled(note(b"", 0, b""), MEGABYTE - 16384))
    yield core_file([Mapped(PAGE, page)], auxiliary=[(n, n) for n in range(60_000)])


# --- program headers -----------------------------------------------------------------------------


def _check_loads(data: bytes) -> None:
    loads = header.loaded(FileReader(data), len(data))
    assert len(loads) <= len(data) // 32
    for offset in (0, len(data)):
        address = header.address_of(loads, offset)
        assert address is None or loads
        header.is_loaded(loads, offset)


def _huge_loads() -> Iterator[bytes]:
    yield elf_file([Section(b"", b"", segment=1)] * 18_000, section_headers=False)
    yield elf_file([Section(b"", b"", segment=1)] * 32_000, section_headers=False, bits=32)


# --- compressed blobs ----------------------------------------------------------------------------


def _check_seekable(data: bytes) -> None:
    """As the store reads it: the last bytes say how long the table is."""

    def attempt() -> None:
        size = seekable_zstd.table_size(data[-seekable_zstd.FOOTER_SIZE :])
        table = seekable_zstd.unpack(data[-size:], len(data))
        for position in {0, table.size // 2, max(table.size - 1, 0)}:
            if position < table.size:
                frame = table.frame(table.at(position))
                assert frame.start <= position < frame.start + frame.length
                assert frame.offset + frame.size <= len(data)

    refusal(attempt, IntegrityError)


def _seed_seekable() -> Iterator[bytes]:
    yield bytes(30) + seekable_zstd.pack([(10, 100), (20, 50)])
    yield seekable_zstd.pack([])


def _huge_seekable() -> Iterator[bytes]:
    yield seekable_zstd.pack([(0, 1)] * (MEGABYTE // 8 - 3))
    yield seekable_zstd.pack([(0, 0)] * (MEGABYTE // 8 - 3))
    yield bytes(MEGABYTE // 2) + seekable_zstd.pack([(8, 1 << 31)] * (MEGABYTE // 16 - 3))


# --- bundles -------------------------------------------------------------------------------------


def _check_bundle(data: bytes) -> None:
    """As a reader of bundles goes about it: a header, the manifest, and where everything is."""

    def attempt() -> None:
        size = bundle_archive.manifest_size(data[: bundle_archive.BLOCK], len(data))
        manifest = bundle_archive.decode(data[bundle_archive.BLOCK : bundle_archive.BLOCK + size])
        blobs, inputs, listed = bundle_archive.members(manifest, size)
        files = (*blobs.values(), *inputs, *filter(None, [listed]))
        places = sorted((each.offset, each.size) for each in files)
        for (offset, length), (after, _) in pairwise(places):
            assert offset + length <= after
        assert bundle_archive.decode(bundle_archive.encode(manifest)) == manifest

    refusal(attempt, IntegrityError)


def _bundle(items: int, places: int = 1) -> bytes:
    seen = tuple(bundle_archive.BundlePlace(f"/{number}", 1, 2) for number in range(places))
    each = bundle_archive.Item("ab" * 20, "executable", "00" * 32, 5, 1, 0o755, 1, 1, places=seen)
    some = tuple(structs.replace(each, sha256=f"{number:064x}") for number in range(items))
    absent = (bundle_archive.Absent("cd" * 20, "never captured"),)
    sources = bundle_archive.SourceList(700, "ff" * 32, 3, absent=absent)
    text = bundle_archive.encode(
        bundle_archive.Manifest(1, "here", (bundle_archive.Input("x", 7),), some, absent, sources)
    )
    return bundle_archive.header(bundle_archive.MANIFEST, len(text)) + text


def _seed_bundle() -> Iterator[bytes]:
    yield _bundle(2)
    yield _bundle(0)


def _huge_bundle() -> Iterator[bytes]:
    yield _bundle(2200)[:MEGABYTE]
    yield _bundle(60, 256)[:MEGABYTE]
    nested = b'{"bundle":1,"items":' + b"[" * (MEGABYTE - 1024)
    yield bundle_archive.header(bundle_archive.MANIFEST, len(nested)) + nested


TARGETS: Final = {
    "bundle": Target(_check_bundle, _seed_bundle, _huge_bundle, ("bundle_archive",)),
    "core": Target(_check_core, _seed_core, _huge_core, ("elf.core",)),
    "loads": Target(_check_loads, elf_mutation.seeds, _huge_loads, ("elf.header",)),
    "seekable": Target(_check_seekable, _seed_seekable, _huge_seekable, ("archive.seekable_zstd",)),
}
