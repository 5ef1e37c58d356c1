# SPDX-License-Identifier: Apache-2.0
"""Debug files made of captured executables: when, of which, and how far they are believed."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from buildidfs.capture.base import PinnedFile
from buildidfs.ingest import Ingest, derived
from buildidfs.linux import inodes
from buildidfs.model import (
    AliasType,
    Artifact,
    BuildId,
    Kind,
    Origin,
    Quality,
    Sighting,
    Standing,
    Trust,
)
from buildidfs.store import Store
from buildidfs.store.index.ranking import rank
from tests.support.elf.elfwriter import DWARF, SYMTAB, TEXT, TEXT_SPLIT, Section, elf_file
from tests.support.elf.gowriter import Function, Row
from tests.support.elf.gowriter import program as go_program
from tests.support.harness.captures import read_blob
from tests.support.harness.waiting import until

ID = BuildId(b"\x0b" * 20)
FUNCTIONS = [Function("main.main", [Row(8, "/src/main.go", 12)])]
# More than the clock of any filesystem: see `staging`.
_A_WHILE_NS = 2_000_000_000


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened
        assert list(opened.check(digests=True)) == []


def ingest(
    store: Store,
    path: Path,
    data: bytes,
    trust: Trust = Trust.HOST,
    standing: Standing = Standing.SYSTEM,
) -> None:
    path.write_bytes(data)
    path.chmod(0o755)
    fd = os.open(path, os.O_RDONLY)
    origin = Origin(
        os.fsencode(path), inodes.identity(fd), trust=trust, standing=standing, scanner="test"
    )
    summary = Ingest(store).run([PinnedFile(Sighting(origin, time.time_ns() + _A_WHILE_NS), fd)])
    assert summary.captured == 1


def debuginfo(store: Store, build_id: bytes = ID) -> list[Artifact]:
    return store.index.variants(store.index.ordinal(BuildId(build_id)) or 0, Kind.DEBUGINFO)


def test_a_debug_file_is_made_after_the_capture(store: Store, tmp_path: Path) -> None:
    started: list[int] = []
    store.derive_with(lambda: started.append(1), lambda: None)
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    assert started == [1]
    assert debuginfo(store) == []
    ((digest, build_id),) = store.derivations()
    assert build_id == ID
    derived.work(store)
    assert store.derivations() == []
    (artifact,) = debuginfo(store)
    assert (artifact.quality, artifact.made_of) == (Quality.GOPCLNTAB, ".gopclntab")
    assert (artifact.trust, artifact.mode) == (Trust.PACKAGE, 0o444)
    assert bytes(digest) in read_blob(store, artifact.digest)
    executable = store.index.artifact(artifact.ordinal, Kind.EXECUTABLE)
    assert executable is not None
    assert executable.segments == artifact.segments
    records = store.index.origins(artifact.ordinal)
    assert {record.origin.path for record in records} == {os.fsencode(tmp_path / "app")}


def test_a_debug_file_that_was_made_has_its_aliases(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    derived.work(store)
    (artifact,) = debuginfo(store)
    types = {alias.type for alias in store.aliases.of(artifact.digest)}
    assert {AliasType.HTL, AliasType.CRC32} <= types  # else a repair adds them later


def test_a_program_without_a_build_id_gets_one_under_its_adopted_id(
    store: Store, tmp_path: Path
) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS, build_id=None))
    ((_, build_id),) = store.derivations()
    assert len(build_id) == 16
    derived.work(store)
    (artifact,) = debuginfo(store, build_id)
    assert artifact.quality is Quality.GOPCLNTAB
    executable = store.index.artifact(artifact.ordinal, Kind.EXECUTABLE)
    assert executable is not None
    assert executable.adopted


def test_what_was_asked_for_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path) as first:
        ingest(first, tmp_path / "app", go_program(FUNCTIONS))
    with Store.open(path) as again:
        assert len(again.derivations()) == 1
        assert list(again.check()) == []
        derived.work(again)
        assert [each.quality for each in debuginfo(again)] == [Quality.GOPCLNTAB]
    with Store.open(path) as last:
        assert last.derivations() == []
        assert list(last.check(digests=True)) == []


@pytest.mark.parametrize("section", [SYMTAB, DWARF], ids=["symtab", "dwarf"])
def test_a_program_with_symbols_of_its_own_is_not_asked_for(
    store: Store, tmp_path: Path, section: Section
) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS, more=[section]))
    assert store.derivations() == []


def test_a_program_that_is_not_of_go_is_not_asked_for(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", elf_file([TEXT], build_id=ID))
    assert store.derivations() == []


def test_real_debuginfo_that_is_there_is_enough(store: Store, tmp_path: Path) -> None:
    data = go_program(FUNCTIONS)
    ingest(store, tmp_path / "app", data)
    debug = elf_file([TEXT_SPLIT, DWARF], build_id=ID)
    ingest(store, tmp_path / "app.debug", debug)
    derived.work(store)
    assert [each.quality for each in debuginfo(store)] == [Quality.DEBUGINFO]


def test_a_damaged_table_gives_nothing_and_is_not_tried_again(store: Store, tmp_path: Path) -> None:
    data = go_program(FUNCTIONS, alter=lambda table: table[:8] + bytes(len(table) - 8))
    ingest(store, tmp_path / "app", data)
    assert len(store.derivations()) == 1
    derived.work(store)
    assert (debuginfo(store), store.derivations()) == ([], [])


def test_a_program_that_was_removed_is_passed_over(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    ((digest, _),) = store.derivations()
    store.remove([digest])
    derived.work(store)
    assert store.derivations() == []


def test_one_process_at_a_time_makes_them(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    os.makedirs(os.path.join(store.path, b"run"), exist_ok=True)
    with open(os.path.join(store.path, b"run/derive.lock"), "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        worker = threading.Thread(target=derived.work, args=[store])
        worker.start()
        until(lambda: not worker.is_alive() or _waits(other.fileno()), "the lock is waited for")
        assert debuginfo(store) == []
        assert derived.is_at_work(store)
    worker.join()
    assert len(debuginfo(store)) == 1
    assert not derived.is_at_work(store)


def _waits(fd: int) -> bool:
    """Return True if the lock of a file is waited for."""
    inode = f":{os.fstat(fd).st_ino} "
    locks = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and inode in line for line in locks)


def test_debuginfo_of_a_package_comes_before_what_was_made(store: Store, tmp_path: Path) -> None:
    """Also if the program lies at a better place than the package."""
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    derived.work(store)
    (made,) = debuginfo(store)
    assert made.standing is Standing.GIVEN
    debug = elf_file([TEXT_SPLIT, DWARF], build_id=ID)
    ingest(store, tmp_path / "app.debug", debug, Trust.PACKAGE, Standing.GIVEN)
    best, last = debuginfo(store)
    assert read_blob(store, best.digest) == debug
    assert last.digest == made.digest


def test_a_container_is_not_believed_more_for_it(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS), Trust.CONTAINER, Standing.ELSEWHERE)
    derived.work(store)
    assert [each.trust for each in debuginfo(store)] == [Trust.CONTAINER]


def test_order_of_qualities(store: Store, tmp_path: Path) -> None:
    ingest(store, tmp_path / "app", go_program(FUNCTIONS))
    derived.work(store)
    (made,) = debuginfo(store)
    alike = [replace(made, quality=quality, size=1) for quality in Quality]
    alike.sort(key=lambda artifact: rank(artifact, None))
    assert [each.quality for each in alike] == [
        Quality.DEBUGINFO, Quality.GOPCLNTAB, Quality.SYMTAB, Quality.DYNSYM, Quality.NONE,
    ]  # fmt: skip


def test_numbers_of_qualities_on_disk_stay() -> None:
    assert [each.stored for each in Quality] == [0, 1, 2, 4, 3]
