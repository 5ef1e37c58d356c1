# SPDX-License-Identifier: Apache-2.0
"""What one file may cost, whatever whoever made it wants it to."""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs.capture.archive.elf_members import Spool
from buildidfs.capture.scan.tree import TreeScanner
from buildidfs.ingest import Ingest, StoreMemo, Summary, staging
from buildidfs.linux import statx
from buildidfs.model import Absence, Artifact, BuildId, Origin, Sighting
from buildidfs.store import NewAbsence, Store
from buildidfs.store.write import transaction
from tests.support.elfwriter import elf_file
from tests.support.mapped import SharedMapping

if TYPE_CHECKING:
    from buildidfs.model import Digest
    from buildidfs.store import Staged

ID = b"\x66" * 20


def tree(store: Store, path: Path) -> Summary:
    return Ingest(store).run(TreeScanner(StoreMemo(store), [os.fsencode(path)]))


def test_file_that_is_open_for_writing_is_taken_while_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held"
    path.write_bytes(elf_file(build_id=ID))
    with Store.create(tmp_path / "store") as store, path.open("r+b"):
        monkeypatch.setattr(staging, "_RESTING_NS", 3600_000_000_000)
        (unreadable,) = tree(store, path).unreadable
        assert unreadable.errno == errno.ETXTBSY, "its last write may not have ended"
        monkeypatch.setattr(staging, "_RESTING_NS", 0)
        assert tree(store, path).captured == 1


@pytest.mark.parametrize("leases", [True, False])
def test_stores_that_no_time_tells_of_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leases: bool
) -> None:
    """A page that is dirty already is written to through a mapping without a trace."""
    path = tmp_path / "mapped"
    path.write_bytes(elf_file(build_id=ID) + bytes(4096))
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    number = itertools.count(1)

    def write() -> None:
        shared[-1] = next(number)

    class Watched(Store):
        def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
            staged = super().stage(fd, limit)
            write()
            return staged

    if not leases:
        monkeypatch.setattr(staging.file_ops, "has_writer", lambda fd: None)
    write()
    with shared, Watched.create(tmp_path / "store") as store:
        (unreadable,) = tree(store, path).unreadable
        assert unreadable.errno == errno.ETXTBSY
        assert store.index.ordinal(ID) is None
    assert next(number) > 3, "it was tried again"


def test_without_leases_old_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    path.write_bytes(elf_file(build_id=ID))
    monkeypatch.setattr(staging.file_ops, "has_writer", lambda fd: None)
    monkeypatch.setattr(staging, "_WRITING_NS", 0)

    class Watched(Store):
        def digest_of(self, fd: int) -> Digest:
            raise AssertionError

    with Watched.create(tmp_path / "store") as store:
        assert tree(store, path).captured == 1


def test_huge_file_of_holes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(elf_file(build_id=ID))
    os.truncate(path, (8 << 30) + 1)  # which would take seconds to hash; others have 8 EiB
    with Store.create(tmp_path / "store") as store:
        summary = tree(store, path)
        (unreadable,) = summary.unreadable
        assert (unreadable.errno, unreadable.path) == (errno.EFBIG, os.fsencode(path))
        assert store.index.ordinal(ID) is None


def test_holes_of_moderate_size_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_HOLES_BYTES", 1 << 20)
    hollow, written = tmp_path / "hollow", tmp_path / "written"
    hollow.write_bytes(elf_file(build_id=ID))
    os.truncate(hollow, 1 << 20)
    written.write_bytes(elf_file(build_id=b"\x67" * 20) + os.urandom(2 << 20))
    with Store.create(tmp_path / "store") as store:
        for path in (hollow, written):
            assert (tree(store, path).captured, path.name) == (1, path.name)


def test_one_of_many_variants_is_copied_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare each new file with all before would take the square of their number."""
    monkeypatch.setattr(staging, "_MANY_VARIANTS", 2)
    asked = []

    with Store.create(tmp_path / "store") as store:
        variants = store.index.variants

        def watched(ordinal: int, kind: int) -> list[Artifact]:
            asked.append(kind)
            return variants(ordinal, kind)

        monkeypatch.setattr(store.index, "variants", watched)
        for number in range(4):
            path = tmp_path / str(number)
            path.write_bytes(elf_file(build_id=ID) + bytes(number))
            asked.clear()
            assert tree(store, path).captured == 1
            assert (1 in asked) == (0 < number < 3), number
        again = tmp_path / "again"
        again.write_bytes((tmp_path / "3").read_bytes())
        summary = tree(store, again)
        assert (summary.captured, summary.held) == (0, 1), "the store has these bytes"


def test_a_copy_of_our_own_has_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However new the file is that it was made from."""
    path = tmp_path / "packed"
    path.write_bytes(b"what it was unpacked from")
    identity = statx.identity_at(-1, os.fsencode(path))
    sighting = Sighting(Origin(os.fsencode(path), identity), time.time_ns())
    data = elf_file(build_id=ID)
    monkeypatch.setattr(staging, "_PAUSE", 3600)
    with Store.create(tmp_path / "store") as store:
        pinned = Spool().pin(sighting, len(data), [data])
        assert Ingest(store).run([pinned]).captured == 1


@pytest.mark.parametrize("build_id", [ID, None])
def test_file_with_a_writer_is_captured_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_id: bytes | None
) -> None:
    """A store through an older mapping leaves no trace in the identity of the file."""
    path = tmp_path / "mapped"
    path.write_bytes(elf_file(build_id=build_id).ljust(4096, b"\0"))
    monkeypatch.setattr(staging, "_RESTING_NS", 0)
    monkeypatch.setattr(transaction, "_RACY_NS", 0)
    with Store.create(tmp_path / "store") as store:
        with SharedMapping(path) as shared:
            first = tree(store, path)
            before = statx.identity_at(-1, os.fsencode(path))
            assert (first.captured, first.absent.total()) == ((1, 0) if build_id else (0, 1))
            assert store.index.recall(before) is None
            other = elf_file(build_id=b"\x67" * 20).ljust(4096, b"\0")
            shared.write(other)
            assert statx.identity_at(-1, os.fsencode(path)) == before, "no trace, on this kernel"
            again = tree(store, path)
            assert again.captured == 1
            assert store.index.ordinal(BuildId(b"\x67" * 20)) is not None
        assert tree(store, path).held == 1
        assert store.index.recall(statx.identity_at(-1, os.fsencode(path))) is not None


def test_row_of_a_file_that_has_a_writer_now_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(elf_file(build_id=ID))
    identity = msgspec.structs.replace(statx.identity_at(-1, os.fsencode(path)), ctime_ns=1)
    with Store.create(tmp_path / "store") as store:
        for remember in (True, False):
            absence = NewAbsence(identity, time.time_ns(), Absence.NOT_ELF, remember=remember)
            store.commit([], [absence])
            assert (store.index.recall(identity) is not None) is remember
