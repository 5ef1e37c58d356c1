# SPDX-License-Identifier: Apache-2.0
"""Profiles that are written here, and maps of processes: which of these name which code."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import pytest

from buildidfs.formats.perf.records import Events, Mapped
from buildidfs.model import Kind, NamespaceSet
from buildidfs.profile import repair
from buildidfs.profile.perf_data import Profile
from buildidfs.store import Store
from tests.support.elf.jit import jit_process
from tests.support.elf.perfwriter import PerfWriter

if TYPE_CHECKING:
    from buildidfs.profile.repair import Repaired

_SECOND: Final = 1_000_000_000
NOW: Final = time.time_ns()
"""When the profiles were recorded; their own clock has a second there."""

MAP: Final = b"10000 100 f\n10100 100 g\n"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.create(tmp_path / "store")


def keep(store: Store, pid: int, *, start_ns: int, last_ns: int = NOW, mnt: int = 5) -> None:
    """Keep the map of a process that lived at these times."""
    process = jit_process(pid, ticks=start_ns // 10**7)
    origin = msgspec.structs.replace(process.origin, namespaces=NamespaceSet(mnt=mnt), host="")
    process = msgspec.structs.replace(process, start_ns=start_ns, origin=origin)
    store.jit_maps.write(process, 0, MAP)
    path = next(each.path for each in store.jit_maps.of(pid) if each.process.start_ns == start_ns)
    os.utime(path, ns=(last_ns, last_ns))


def profile(tmp_path: Path, write: PerfWriter, records: bytes) -> Path:
    """A profile whose time of a second was now."""
    path = tmp_path / "perf.data"
    path.write_bytes(write.file(records))
    os.utime(path, ns=(NOW, NOW))
    return path


def mapped(
    write: PerfWriter, pid: int, name: bytes = b"//anon", start: int = 0x10000, **more: int
) -> bytes:
    return write.mmap2(pid, start, 0x1000, name, time=_SECOND - 1, **more) + write.sample(
        pid, start + 8, _SECOND
    )


def repaired(store: Store, path: Path) -> tuple[Repaired, list[Mapped]]:
    """What repair says of a profile, and the mappings in the new one."""
    out = path.with_name("repaired.data")
    done = repair.repair(store, bytes(path), bytes(out))
    with Profile(bytes(out)) as new:
        events = Events(new.layouts, new.header.order)
        found = [events.read(raw) for raw in new.records()]
    return done, [each for each in found if isinstance(each, Mapped)]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("name", [b"//anon", b"[anon:v8]", b"/memfd:v8 (deleted)"])
def test_anonymous_memory_becomes_a_file_with_names(
    store: Store, tmp_path: Path, order: str, name: bytes
) -> None:
    write = PerfWriter(order)
    keep(store, 7, start_ns=NOW - 60 * _SECOND)
    records = mapped(write, 7, name) + mapped(write, 8) + mapped(write, 7, b"[heap]", 0x90000)
    done, found = repaired(store, profile(tmp_path, write, records))
    (generated,) = done.generated
    assert (generated.pid, generated.functions, generated.name) == (7, 2, b"[jit:7]")
    ours, others, heap = found
    assert (ours.path, ours.build_id) == (b"[jit:7]", generated.build_id)
    assert (ours.start, ours.offset) == (0x10000, 0x10000)
    assert (others.path, heap.path) == (b"//anon", b"[heap]")
    assert done.unresolved == []


def test_file_is_for_the_owner_of_the_map(store: Store, tmp_path: Path) -> None:
    write = PerfWriter()
    keep(store, 7, start_ns=NOW - 60 * _SECOND)
    done, _ = repaired(store, profile(tmp_path, write, mapped(write, 7)))
    ordinal = store.index.ordinal(done.generated[0].build_id)
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
    assert artifact is not None
    assert (artifact.mode, artifact.uid, artifact.gid) == (0o400, 1000, 1000)
    (record,) = store.index.origins(ordinal)
    assert not record.origin.is_public
    assert (record.origin.path, record.origin.container) == (b"[jit:7]", "docker:abc")
    again, _ = repaired(store, profile(tmp_path, write, mapped(write, 7)))
    assert again.generated == done.generated


@pytest.mark.parametrize(
    ("start", "last", "is_it"),
    [
        (-60, 0, True),
        (-60, -50, True),  # nobody was there to say that it lived
        (-3600, -1800, False),  # it was another process with that number
        (3600, 7200, False),
    ],
)
def test_process_is_told_by_its_time(
    store: Store, tmp_path: Path, start: int, last: int, is_it: bool
) -> None:
    write = PerfWriter()
    keep(store, 7, start_ns=NOW + start * _SECOND, last_ns=NOW + last * _SECOND)
    done, found = repaired(store, profile(tmp_path, write, mapped(write, 7)))
    assert bool(done.generated) == is_it
    assert found[0].path == (b"[jit:7]" if is_it else b"//anon")


def test_of_two_processes_the_later_one_that_had_begun(store: Store, tmp_path: Path) -> None:
    write = PerfWriter()
    for start in (-900, -300, 900):
        keep(store, 7, start_ns=NOW + start * _SECOND, last_ns=NOW + 1000 * _SECOND)
    done, _ = repaired(store, profile(tmp_path, write, mapped(write, 7)))
    (generated,) = done.generated
    ordinal = store.index.ordinal(generated.build_id) or 0
    artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
    assert artifact is not None
    with store.blobs.open(artifact.digest) as blob:
        content = blob.read_at(0, blob.size)
    (ticks,) = re.findall(rb"7 (\d+) b00t", content)
    assert int(ticks) == (NOW - 300 * _SECOND) // 10**7


def test_process_is_told_by_its_mount_namespace(store: Store, tmp_path: Path) -> None:
    write = PerfWriter()
    for pid, mnt in ((7, 5), (8, 6)):
        keep(store, pid, start_ns=NOW - 60 * _SECOND, mnt=mnt)
    records = b"".join(
        write.namespaces(pid, [1, 1, 1, 1, 1, 5, 1], time=_SECOND - 2) + mapped(write, pid)
        for pid in (7, 8)
    )
    done, _ = repaired(store, profile(tmp_path, write, records))
    assert [each.pid for each in done.generated] == [7]


def test_map_without_a_function_names_nothing(store: Store, tmp_path: Path) -> None:
    write = PerfWriter()
    process = jit_process(7)
    process = msgspec.structs.replace(process, start_ns=NOW - 60 * _SECOND)
    store.jit_maps.write(process, 0, b"no line of a map\n" * 100)
    done, found = repaired(store, profile(tmp_path, write, mapped(write, 7)))
    assert (done.generated, found[0].path) == ([], b"//anon")


def test_store_that_cannot_be_written_is_told(store: Store, tmp_path: Path) -> None:
    write = PerfWriter()
    keep(store, 7, start_ns=NOW - 60 * _SECOND)
    path = profile(tmp_path, write, mapped(write, 7))
    with Store.open(tmp_path / "store", read_only=True) as reading:
        done, found = repaired(reading, path)
    assert (done.generated, found[0].path) == ([], b"//anon")
    assert any("opened for reading only" in note for note in done.notes)
