# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.placement: the executable of a build ID that a process had mapped."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Kind, Origin, Sighting, Trust
from buildidfs.store import Store, placement
from buildidfs.store.placement import (
    NOT_AS_MAPPED,
    OFFSETS_DIFFER,
    Extent,
    Placement,
)
from tests.support.elf.elfwriter import note
from tests.support.harness.captures import capture, sighting
from tests.unit.test_ingest_aliases import htl

ID = BuildId(b"\x42" * 20)
BASE = 0x7F0000000000
_FIXED, _SHARED = 2, 3


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened
        assert list(opened.check(digests=True)) == []


def program(offset: int, *, kind: int = _SHARED, address: int = 0x401000, size: int = 64) -> bytes:
    """A program with its code at that offset and address, and a read-only segment before it."""
    notes = note(b"GNU\0", 3, bytes(ID), little_endian=True)
    head = struct.pack("<4s5B7xHHIQQQIHHHHHH", b"\x7fELF", 2, 1, 1, 0, 0, kind, 62, 1, address, 64,
                       0, 0, 64, 56, 3, 64, 0, 0)  # fmt: skip
    at = 64 + 3 * 56
    loads = [
        (4, 4, at, 0x400000 + at, len(notes), 4),
        (1, 4, 0, 0x400000, at + len(notes), 4096),
        (1, 5, offset, address, size, 4096),
    ]
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, where, at, at, length, length, align)
        for kind, flags, where, at, length, align in loads
    )
    return (head + table + notes).ljust(offset, b"\0") + b"\x90" * size


def taken(
    store: Store, data: bytes, name: bytes, *, scanner: str = "tree", trust: Trust = Trust.HOST
) -> None:
    fd = os.memfd_create("captured")
    os.write(fd, data)
    origin = Origin(b"/app/" + name, inodes.identity(fd), scanner=scanner, trust=trust)
    sighting = Sighting(origin, 1_700_000_000_000_000_000)
    assert Ingest(store).run([PinnedFile(sighting, fd, is_copy=True)]).captured == 1


def choose(store: Store, *extents: tuple[int, int, int]) -> tuple[BuildId, str]:
    return Placement(store).choose(ID, [Extent(*each) for each in extents])


def test_offset_of_the_mapping_decides(store: Store) -> None:
    near, far = program(0x1000), program(0x4000)
    for number, data in enumerate((near, far)):
        taken(store, data, b"%d" % number)
    assert choose(store, (BASE, BASE + 0x1000, 0x1000)) == (htl(near), "")
    assert choose(store, (BASE, BASE + 0x1000, 0x4000)) == (htl(far), "")
    assert choose(store, (BASE, BASE + 0x1000, 0x2000)) == (ID, NOT_AS_MAPPED)
    assert choose(store) == (ID, OFFSETS_DIFFER)


def test_address_decides_for_programs_with_a_fixed_one(store: Store) -> None:
    """A large mapping begins at both of them."""
    one = program(0x1000, kind=_FIXED, address=0x401000, size=0x1800)
    two = program(0x1000, kind=_FIXED, address=0x402000, size=0x1810)
    for number, data in enumerate((one, two)):
        taken(store, data, b"%d" % number)
    assert choose(store, (0x401000, 0x403000, 0x1000)) == (htl(one), "")
    assert choose(store, (0x402000, 0x404000, 0x1000)) == (htl(two), "")
    assert choose(store, (0x409000, 0x40B000, 0x1000)) == (ID, NOT_AS_MAPPED)


def test_only_file_has_to_fit(store: Store) -> None:
    taken(store, program(0x4000), b"0")
    for offset, why in ((0x4000, ""), (0, ""), (0x1000, NOT_AS_MAPPED), (0x5000, NOT_AS_MAPPED)):
        assert choose(store, (BASE, BASE + 0x1000, offset)) == (ID, why), hex(offset)
    assert choose(store) == (ID, "")


def test_file_that_only_moved_in_memory_is_the_same(store: Store) -> None:
    one, two = program(0x1000), program(0x1000, address=0x401020)
    for number, data in enumerate((one, two)):
        taken(store, data, b"%d" % number)
    found = Placement(store)
    assert found.differing(ID) == ()
    assert found.choose(ID, [Extent(BASE, BASE + 0x1000, 0x1000)]) == (ID, "")
    assert [found.is_moved(ID, each) for each in (0x401000, 0x401030)] == [False, True]


@pytest.mark.parametrize(
    ("scanners", "expected"),
    [
        (("tree", "tree"), None),
        (("proc", "tree"), 0),
        (("tree", "watch"), 1),
        (("proc", "watch"), None),
    ],
)
def test_reader_by_offsets_gets_the_only_one_that_was_mapped(
    store: Store, scanners: tuple[str, str], expected: int | None
) -> None:
    files = [program(0x1000), program(0x4000)]
    for number, (data, scanner) in enumerate(zip(files, scanners, strict=True)):
        taken(store, data, b"%d" % number, scanner=scanner)
    ordinal = store.index.ordinal(ID) or 0
    found = placement.for_offsets(store, ordinal, Kind.EXECUTABLE)
    wanted = None if expected is None else len(files[expected])
    assert (None if found is None else found.size) == wanted


def test_container_does_not_decide_for_the_host(store: Store) -> None:
    own, forged = program(0x1000), program(0x4000)
    taken(store, own, b"0", scanner="proc")
    taken(store, forged, b"1", scanner="proc", trust=Trust.CONTAINER)
    ordinal = store.index.ordinal(ID) or 0
    found = placement.for_offsets(store, ordinal, Kind.EXECUTABLE)
    assert found is not None
    assert found.size == len(own)


def test_files_of_an_earlier_version_do_not_differ(store: Store) -> None:
    for number in range(2):
        at = sighting(b"/app/%d" % number)
        store.commit([capture(store, b"content %d" % number, ID, at=at)])
    ordinal = store.index.ordinal(ID) or 0
    assert len(store.index.variants(ordinal, Kind.EXECUTABLE)) == 2
    assert not placement.differs(store, ordinal)
