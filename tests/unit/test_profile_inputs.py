# SPDX-License-Identifier: Apache-2.0
"""The build IDs of profiles: those they name, those the store knows, and what is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildidfs.catalog.remedies import NO_BUILD_ID
from buildidfs.formats.perf import headers
from buildidfs.model import BuildId
from buildidfs.profile import inputs
from buildidfs.store import NewSeen, Store
from tests.support.elf.perfwriter import CALLCHAIN, USUAL, PerfWriter
from tests.support.harness.captures import NOW, SECOND, capture, sighting

RED, BLUE, LONG = BuildId(b"\x01" * 20), BuildId(b"\x02" * 20), BuildId(b"\x03" * 32)
START = 10 * SECOND
DISK = os.makedev(8, 1)


def saved(path: Path, write: PerfWriter, records: bytes) -> bytes:
    clock = {headers.CLOCK_DATA: write.pack("IIQQ", 1, 1, NOW, START)}
    path.write_bytes(write.file(records, clock))
    return bytes(path)


def test_files_without_build_ids_are_looked_up(tmp_path: Path, store: Store) -> None:
    """One file is captured, one in the journal only, one unknown, one mapped and never sampled."""
    captured = sighting(b"/app", seen_ns=NOW, dev=DISK, ino=5)
    store.commit([capture(store, b"app", RED, at=captured)])
    store.commit(
        [capture(store, b"long", LONG, at=sighting(b"/long", seen_ns=NOW, dev=DISK, ino=9))]
    )
    store.note_seen([NewSeen(sighting(b"/lost", seen_ns=NOW, ino=6), BLUE)])
    write = PerfWriter(sample_type=USUAL | CALLCHAIN)
    records = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    records += write.mmap2(1, 0x20000, 0x1000, b"/lost", time=START, inode=6)
    records += write.mmap2(1, 0x30000, 0x1000, b"/gone", time=START, inode=7)
    records += write.mmap2(1, 0x40000, 0x1000, b"/idle", time=START, inode=8)
    records += write.mmap2(1, 0x50000, 0x1000, b"/long", time=START, inode=9)
    records += write.mmap2(1, 0x60000, 0x1000, b"//anon", time=START)
    for address in (0x10008, 0x20008, 0x30008, 0x50008, 0x60008):
        records += write.sample(1, address, START + 1)
    records += write.sample(1, 0x10008, START + 1, chain=(0x10008, 0x30008))
    found = inputs.build_ids_named(store, saved(tmp_path / "p", write, records))
    assert found.paths == {RED: b"/app", BLUE: b"/lost", LONG: b"/long"}
    assert found.is_resolved
    assert found.incomplete == ""
    (left,) = found.nameless
    assert (left.path, left.samples, left.why) == (b"/gone", 2, NO_BUILD_ID)
    assert left.share == pytest.approx(100 * 2 / 6)


def test_samples_are_not_read_where_each_file_has_a_build_id(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PerfWriter()
    records = write.mmap2(1, 0x10000, 0x1000, b"/a", time=START, build_id=bytes(RED))
    records += write.mmap2(1, 0x20000, 0x1000, b"//anon", time=START)
    records += write.sample(1, 0x10008, START + 1)
    path = saved(tmp_path / "p", write, records)
    monkeypatch.delattr("buildidfs.profile.reading.Reading.hits")
    found = inputs.build_ids_named(store, path)
    assert (found.paths, found.nameless, found.is_resolved) == ({RED: b"/a"}, [], False)


def test_a_profile_that_is_cut_off(tmp_path: Path, store: Store) -> None:
    write = PerfWriter()
    records = write.mmap2(1, 0x10000, 0x1000, b"/a", time=START, build_id=bytes(RED))
    path = tmp_path / "p"
    path.write_bytes(write.pipe(records + write.sample(1, 0x10008, START + 1))[:-9])
    found = inputs.build_ids_named(store, bytes(path))
    assert found.paths == {RED: b"/a"}
    assert f"{path} is not whole" in found.incomplete
