# SPDX-License-Identifier: Apache-2.0
"""buildidfs.symbolize.kernel_symbols: names of the kernel and its modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.catalog.remedies import AMBIGUOUS, NO_KALLSYMS
from buildidfs.formats.perf.script_output import KALLSYMS, KernelMapping
from buildidfs.formats.symbolizer_output import Frame
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from buildidfs.symbolize.addresses import NO_NAME, NamedFrames
from buildidfs.symbolize.kernel_symbols import NO_MAPPING, OTHER_BOOT, KernelSymbols
from tests.support.harness.captures import capture, sighting

ID, OTHER = BuildId(b"\x01" * 20), BuildId(b"\x02" * 20)
TEXT, MODULE = 0xFFFFFFFF81000000, 0xFFFFFFFFA0000000
KERNEL = KernelMapping(TEXT, TEXT + 0x1000, b"_text", TEXT)
EXT4 = KernelMapping(MODULE, MODULE + 0x2000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened


def seen(store: Store, build_id: BuildId, size: int, *, base: int = TEXT) -> None:
    """The kallsyms of a kernel with that much code."""
    text = f"{base:x} T _text\n{base + 0x40:x} T vfs_read\n{base + size:x} T _etext\n"
    text += f"{MODULE + 16:x} t ext4_open\t[ext4]\n"
    at = sighting(KALLSYMS, scanner="kernel")
    kinds = (Kind.KALLSYMS,)
    store.commit([capture(store, text.encode(), build_id, at=at, kinds=kinds, trust=Trust.HOST)])


def named(
    store: Store, address: int, dso: bytes = KALLSYMS, listed: BuildId | None = None,
    **changes: KernelMapping,
) -> NamedFrames:  # fmt: skip
    mapped = {KALLSYMS: changes.get("kernel", KERNEL), b"[ext4]": changes.get("ext4", EXT4)}
    return KernelSymbols(store, listed).at(mapped, dso, address)


def test_only_the_kernel_with_as_much_code_fits(store: Store) -> None:
    seen(store, OTHER, 0x2000)
    assert named(store, TEXT + 0x50).why == NO_KALLSYMS
    seen(store, ID, 0x1000)
    assert named(store, TEXT + 0x50).frames == (Frame("vfs_read", start=TEXT + 0x40),)
    assert named(store, TEXT + 0x2000).why == NO_NAME


def test_kernel_of_another_boot_is_at_another_address(store: Store) -> None:
    seen(store, ID, 0x1000, base=TEXT + 0x600000)
    assert named(store, TEXT + 0x50).frames == (Frame("vfs_read", start=TEXT + 0x40),)


def test_build_id_decides_among_kernels_of_one_size(store: Store) -> None:
    seen(store, OTHER, 0x1000, base=TEXT + 0x1000)
    seen(store, ID, 0x1000)
    assert named(store, TEXT + 0x50).why == AMBIGUOUS
    assert named(store, TEXT + 0x50, listed=ID).frames
    event = KernelMapping(TEXT, TEXT + 0x1000, b"_text", TEXT, ID)
    assert named(store, TEXT + 0x50, kernel=event).frames
    assert named(store, TEXT + 0x50, listed=BuildId(b"\x03" * 20)).why == NO_KALLSYMS


def test_modules_of_another_boot_have_no_names(store: Store) -> None:
    seen(store, ID, 0x1000)
    found = named(store, MODULE + 0x20, b"[ext4]")
    assert found.frames == (Frame("ext4_open", start=MODULE + 16),)
    moved = KernelMapping(MODULE - 0x4000, MODULE + 0x1000)
    assert named(store, MODULE + 0x20, b"[ext4]", ext4=moved).why == OTHER_BOOT


def test_without_the_event_of_the_kernel(store: Store) -> None:
    seen(store, ID, 0x1000)
    assert KernelSymbols(store, None).at({}, KALLSYMS, TEXT + 0x50).why == NO_MAPPING
