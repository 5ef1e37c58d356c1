# SPDX-License-Identifier: Apache-2.0
"""What a watch pins is captured soon, or tried again, and its identity is never lost."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.backoff import Backoff
from buildidfs.capture.base import Known, PinnedFile, Resighting, Unreadable
from buildidfs.errors import StoreError, StoreFull
from buildidfs.ingest import committer
from buildidfs.ingest.pending_files import PendingFile, PendingFiles
from buildidfs.linux import machine
from buildidfs.model import Absence, BuildId, Digest, Kind, Origin, Sighting
from buildidfs.store import CommitResult, NewAbsence, Staged, Store
from buildidfs.store.retention.eviction import Policy
from buildidfs.watch import pipeline
from buildidfs.watch.pipeline import Live, ResultListener
from buildidfs.watch.state import WatchLimits
from tests.support.clients.tools import run, tool, unmount
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.filesystems.silentfs import served
from tests.support.harness.captures import identity, sighting
from tests.support.harness.pinning import pinned
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

MIB = 1 << 20
A, B = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)


def numbered(number: int) -> BuildId:
    return BuildId(b"%020d" % number)


def program(path: Path, build_id: bytes, size: int = 0) -> Path:
    """An ELF file whose last change was long enough ago to be left alone."""
    path.write_bytes(elf_file([TEXT, Section(b".data", os.urandom(size))], build_id=build_id))
    return path


_LIMITS = WatchLimits()


class Watched(Store):
    """Counts, and can be told to fail."""

    staged = 0
    commits = 0
    failing: Callable[[str], None] = staticmethod(lambda what: None)

    def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
        self.failing("stage")
        self.staged += 1
        return super().stage(fd, limit, origin)

    def commit(self, *args: object) -> CommitResult:  # type: ignore[override]
        try:
            self.failing("commit" if args[0] else "journal")
        except BaseException:
            for capture in args[0]:  # type: ignore[attr-defined]
                if isinstance(capture.content, Staged):
                    capture.content.close()
            raise
        self.commits += 1
        return super().commit(*args)  # type: ignore[arg-type]


class Watch(ResultListener):
    """A store, pending files, a `Live` and what it told."""

    def __init__(
        self, path: Path, pins: PendingFiles | None = None, limits: WatchLimits = _LIMITS
    ) -> None:
        store = Watched.create(path)
        assert isinstance(store, Watched)
        self.store = store
        self.pending = PendingFiles() if pins is None else pins
        self.failures: list[tuple[Sighting, str]] = []
        self.forgotten: list[bytes] = []
        self.unread: list[bytes] = []
        self.recoveries = 0
        self.live = Live(store, self.pending, self, limits)

    def failed(self, sighting: Sighting, reason: str, build_id: BuildId | None = None) -> None:
        self.failures.append((sighting, reason))

    def unreadable(self, found: Unreadable) -> None:
        self.unread.append(found.path)

    def forget(self, key: bytes) -> None:
        self.forgotten.append(key)

    def recovered(self) -> None:
        self.recoveries += 1

    def put(self, *pins: PendingFile) -> None:
        for pin in pins:
            self.live.let_go(self.pending.put(pin))

    def has(self, *build_ids: BuildId) -> bool:
        return all(self.store.index.ordinal(build_id) is not None for build_id in build_ids)

    def journal(self) -> set[tuple[bytes, BuildId]]:
        return {(row.path, row.build_id) for row in self.store.journal.since()}


@contextlib.contextmanager
def watching(
    path: Path, pins: PendingFiles | None = None, limits: WatchLimits = _LIMITS
) -> Iterator[Watch]:
    """A watch; at the end nothing is open, no thread is left and the store is sound."""
    others, before = set(threading.enumerate()), open_descriptors()
    watch = Watch(path, pins, limits)
    try:
        yield watch
        assert watch.live._fault is None
    finally:
        watch.live.close()
        assert list(watch.store.check(digests=True)) == []
        watch.store.close()
    until(lambda: others.issuperset(threading.enumerate()), "all threads to end")
    assert open_descriptors() <= before


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Watch]:
    with watching(tmp_path / "store") as made:
        yield made


def place(path: Path) -> bytes:
    return os.fsencode(path)


# --- the usual ---------------------------------------------------------------------------------


def test_one_file_is_there_at_once(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else is coming, so it waits for nothing."""
    monkeypatch.setattr(committer, "_LATEST_S", 3600)
    path = program(tmp_path / "a", A)
    watch.put(pinned(path))
    until(lambda: watch.has(A), "the build ID")
    assert watch.live.flush(20)
    assert watch.journal() == {(place(path), A)}
    counters = watch.live.counters
    assert (counters.captured, counters.new_ids, counters.journaled) == (1, 1, 1)
    assert counters.copied_bytes == path.stat().st_size
    assert len(watch.pending) == 0


def test_when_more_is_coming_it_is_not_waited_for_long(watch: Watch, tmp_path: Path) -> None:
    watch.live._committer._is_idle = lambda: False
    watch.put(pinned(program(tmp_path / "a", A)))
    until(lambda: watch.has(A), "the build ID")


def test_many_are_committed_together(watch: Watch, tmp_path: Path) -> None:
    count = 400
    paths = [program(tmp_path / str(number), numbered(number)) for number in range(count)]
    watch.put(*map(pinned, paths))
    assert watch.live.flush(60)
    assert watch.has(*map(numbered, range(count)))
    assert watch.live.counters.captured == count
    assert watch.store.commits < count / 4
    assert watch.journal() == {(place(path), numbered(n)) for n, path in enumerate(paths)}
    assert watch.failures == []


def test_file_in_several_places_is_staged_once(watch: Watch, tmp_path: Path) -> None:
    path = program(tmp_path / "a", A, MIB)
    release = threading.Event()

    def wait(what: str) -> None:
        assert what != "stage" or release.wait(60)

    watch.store.failing = wait
    watch.put(*(pinned(path, mnt_ns_id=number) for number in range(1, 9)))
    until(lambda: watch.pending.idle, "all to be taken", seconds=60)
    release.set()
    assert watch.live.flush(20)
    assert watch.store.staged == 1
    ordinal = watch.store.index.ordinal(A)
    assert ordinal is not None
    places = {record.origin.mnt_ns_id for record in watch.store.index.origins(ordinal)}
    assert places == set(range(1, 9))
    counters = watch.live.counters
    assert (counters.captured, counters.held) == (1, 7)
    for number in range(1, 9):
        assert len(watch.store.journal.at(number, place(path))) == 1


def test_known_files_and_notes_are_journaled(watch: Watch, tmp_path: Path) -> None:
    path = program(tmp_path / "a", A)
    watch.put(pinned(path))
    assert watch.live.flush(20)
    ordinal = watch.store.index.ordinal(A)
    assert ordinal is not None
    (record,) = watch.store.index.origins(ordinal)
    elsewhere = Sighting(msgspec.structs.replace(record.origin, mnt_ns_id=8), time.time_ns())
    watch.live.seen(elsewhere, A)
    watch.live.note(sighting(b"/gone", mnt_ns_id=9), B)
    until(lambda: len(watch.journal()) == 2, "two rows")
    assert [row.build_id for row in watch.store.journal.at(8, place(path))] == [A]
    assert [row.build_id for row in watch.store.journal.at(9, b"/gone")] == [B]
    assert not watch.has(B)


def test_file_that_the_store_forgot_is_told_of(watch: Watch) -> None:
    unknown = sighting(b"/usr/bin/old", scope=b"")
    watch.live.seen(unknown, A)
    until(lambda: watch.failures, "a failure")
    assert watch.failures == [(unknown, "the store has forgotten it")]
    assert watch.journal() == {(b"/usr/bin/old", A)}


def test_file_that_made_way_and_is_still_there_is_no_loss(watch: Watch, tmp_path: Path) -> None:
    path = program(tmp_path / "here", A)
    pin = _here(pinned(path))
    os.close(pin.file.fd)
    watch.live.seen(pin.sighting, A)
    until(lambda: watch.live.counters.omitted == 1, "the note")
    assert watch.failures == []
    path.unlink()
    watch.live.seen(pin.sighting, A)
    until(lambda: watch.failures, "a failure")
    assert watch.failures == [(pin.sighting, "the store has forgotten it")]


def test_bytes_that_are_removed_before_they_are_recorded(watch: Watch, tmp_path: Path) -> None:
    path = program(tmp_path / "a", A)
    watch.put(pinned(path))
    assert watch.live.flush(20)
    copy = tmp_path / "copy"
    copy.write_bytes(path.read_bytes())
    digest = Digest(hashlib.sha256(path.read_bytes()).digest())

    def remove(what: str) -> None:
        if what == "commit":
            watch.store.remove([digest])

    watch.store.failing = remove
    watch.put(pinned(copy))
    until(lambda: watch.live.counters.retried, "another try")
    watch.store.failing = lambda what: None
    until(lambda: watch.has(A), "the build ID")
    assert watch.live.flush(20)
    assert watch.failures == []
    assert watch.store.staged == 2, "the second time there was nothing to compare with"


def test_absence_is_remembered(watch: Watch, tmp_path: Path) -> None:
    new = NewAbsence(identity(scope=b""), time.time_ns(), Absence.NOT_ELF)
    watch.live.absent(new)
    until(lambda: watch.store.index.recall(new.identity), "the memo")
    path = tmp_path / "script"
    path.write_bytes(b"#!/bin/sh\n")
    watch.put(pinned(path))
    assert watch.live.flush(20)
    assert watch.live.counters.absent == 2
    assert watch.journal() == set()


def test_what_was_overwritten_before_it_was_copied_is_in_the_journal(
    watch: Watch, tmp_path: Path
) -> None:
    """Its bytes are gone, and what was mapped is known: both build IDs were there."""
    path = program(tmp_path / "a", A)
    pin = pinned(path)
    program(path, B)
    watch.put(pin)
    assert watch.live.flush(20)
    assert watch.has(B)
    assert not watch.has(A)
    assert watch.journal() == {(place(path), A), (place(path), B)}


def test_what_cannot_be_read_is_told_of(watch: Watch, tmp_path: Path) -> None:
    pin = pinned(program(tmp_path / "a", A))
    os.close(pin.file.fd)
    pin.file.fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    watch.put(pin)
    assert watch.live.flush(20)
    assert watch.failures == [(pin.sighting, "Is a directory")]
    assert watch.live.counters.unreadable == 1
    assert {build_id for _, build_id in watch.journal()} == {A}


def test_what_there_is_no_room_for_is_told_of_and_journaled(tmp_path: Path) -> None:
    with watching(tmp_path / "store", PendingFiles(max_bytes=100)) as watch:
        pin = pinned(program(tmp_path / "a", A, MIB))
        watch.put(pin)
        ((told, reason),) = watch.failures
        assert told is pin.sighting
        assert watch.forgotten == [pin.key]
        assert "wait to be copied" in reason
        assert watch.live.flush(20)
        assert watch.journal() == {(place(tmp_path / "a"), A)}
        assert watch.live.counters.let_go == 1


# --- scans ---------------------------------------------------------------------------------------


def _here(pin: PendingFile) -> PendingFile:
    """As if this host had seen it."""
    origin = msgspec.structs.replace(pin.sighting.origin, host=machine.host_name())
    pin.file.sighting = Sighting(origin, pin.sighting.seen_ns)
    return pin


@pytest.mark.parametrize("stays", [True, False])
def test_a_new_file_without_room_is_captured_once_it_is_deleted(
    tmp_path: Path, stays: bool
) -> None:
    pins = PendingFiles(seconds=2.0) if stays else PendingFiles()
    with watching(tmp_path / "store", pins) as watch:
        gone = program(tmp_path / "gone", A, 1 << 20)
        watch.put(pinned(gone))  # of another host: it cannot be had again
        until(lambda: watch.has(A), "the first")
        stats = watch.store.stats()
        watch.store.retain(Policy(max_size=stats.stored_bytes + stats.index_bytes + (1 << 20)))
        path = program(tmp_path / "new", B, 1 << 20)
        watch.put(_here(pinned(path)))
        until(lambda: (place(path), B) in watch.journal(), "the note")
        assert watch.store.evictions().omitted == 1
        assert watch.has(A)
        assert not watch.has(B), "there is no room, and it is still there"
        if not stays:
            path.unlink()
            until(lambda: watch.has(B), "the capture")
            assert watch.store.evictions().losses == 1
            return
        until(lambda: watch.live.counters.omitted == 1, "the end of its time")
        assert (watch.live.counters.let_go, watch.failures) == (0, [])
        assert watch.has(A)
        assert not watch.has(B)


def test_new_file_without_room_that_is_deleted_just_before_the_end_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_OMITTED_CHECK_S", 3600.0)
    with watching(tmp_path / "store") as watch:
        path = _omitted(watch, tmp_path)
        path.unlink()
        assert watch.live.flush(20)
        assert watch.has(B)
        assert watch.store.evictions().losses == 1


def test_new_file_without_room_that_is_deleted_just_before_its_time_is_over_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_OMITTED_CHECK_S", 3600.0)
    with watching(tmp_path / "store", PendingFiles(seconds=2.0)) as watch:
        path = _omitted(watch, tmp_path)
        path.unlink()
        until(lambda: watch.failures, "the end of its time")
        assert [reason for _, reason in watch.failures] == [
            "there was no room, and it was deleted before the next look"
        ]
        counters = watch.live.counters
        assert (counters.omitted, counters.let_go) == (0, 1)


def _omitted(watch: Watch, tmp_path: Path) -> Path:
    """A new file that there is no room for beside one that is gone."""
    watch.put(pinned(program(tmp_path / "gone", A, 1 << 20)))
    until(lambda: watch.has(A), "the first")
    stats = watch.store.stats()
    watch.store.retain(Policy(max_size=stats.stored_bytes + stats.index_bytes + (1 << 20)))
    path = program(tmp_path / "new", B, 1 << 20)
    watch.put(_here(pinned(path)))
    until(lambda: (place(path), B) in watch.journal() and watch.pending.at_rest, "the note")
    return path


def scanned(path: Path) -> PinnedFile:
    pin = pinned(path)
    return pin.file


def test_scans_are_taken_in(watch: Watch, tmp_path: Path) -> None:
    count = 100
    for number in range(count):
        watch.live.take(scanned(program(tmp_path / str(number), numbered(number))))
    known = sighting(b"/none", scope=b"")
    watch.live.take(Resighting(known, Known(absence=Absence.EMPTY)))
    watch.live.take(Unreadable(b"/secret", "no", errno.EACCES))
    assert watch.live.flush(60)
    assert watch.has(*map(numbered, range(count)))
    counters = watch.live.counters
    assert (counters.captured, counters.absent, counters.unreadable) == (count, 1, 1)
    assert watch.unread == [b"/secret"]


def test_whoever_scans_waits_for_those_who_copy(watch: Watch, tmp_path: Path) -> None:
    release, taken = threading.Event(), []

    def wait(what: str) -> None:
        assert what != "stage" or release.wait(60)

    watch.store.failing = wait

    def scan() -> None:
        for number in range(60):
            watch.live.take(scanned(program(tmp_path / str(number), numbered(number))))
            taken.append(number)

    scanner = threading.Thread(target=scan)
    before = open_descriptors()
    scanner.start()
    until(lambda: len(taken) >= 16, "the queue to fill")
    scanner.join(0.3)
    assert scanner.is_alive()
    assert open_descriptors() < before + 40
    release.set()
    scanner.join(60)
    assert watch.live.flush(60)
    assert watch.live.counters.captured == 60


def test_kinds_of_a_scan_are_kept(watch: Watch, tmp_path: Path) -> None:
    pinned_file = scanned(program(tmp_path / "a", A))
    pinned_file.kind = Kind.VDSO
    watch.live.take(pinned_file)
    assert watch.live.flush(20)
    ordinal = watch.store.index.ordinal(A)
    assert ordinal is not None
    assert watch.store.index.artifact(ordinal, Kind.VDSO) is not None
    assert watch.store.index.artifact(ordinal, Kind.EXECUTABLE) is None


# --- writers -------------------------------------------------------------------------------------


def test_file_is_captured_when_its_writer_is_done(watch: Watch, tmp_path: Path) -> None:
    whole = elf_file([TEXT, Section(b".data", os.urandom(20 * MIB))], build_id=A)
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(whole[: 10 * MIB])
        file.flush()
        watch.put(pinned(path))
        until(lambda: watch.live.counters.retried >= 2, "tries")
        file.write(whole[10 * MIB :])
    until(lambda: watch.has(A), "the build ID")
    assert watch.live.flush(20)
    ordinal = watch.store.index.ordinal(A)
    assert ordinal is not None
    (artifact,) = watch.store.index.variants(ordinal, Kind.EXECUTABLE)
    assert artifact.size == len(whole), "all of it, and never a part"
    assert watch.failures == []
    assert watch.store.staged == 1


@pytest.mark.parametrize("scan", [False, True], ids=["pin", "scan"])
def test_writer_that_never_ends_is_told_of(tmp_path: Path, scan: bool) -> None:
    path = program(tmp_path / "a", A, MIB)
    with watching(tmp_path / "store", PendingFiles(seconds=1.5)) as watch, path.open("r+b") as file:
        stop = threading.Event()

        def write() -> None:
            while not stop.wait(0.02):
                file.seek(2000)
                file.write(os.urandom(100))
                file.flush()

        writer = threading.Thread(target=write)
        writer.start()
        try:
            if scan:
                watch.live.take(scanned(path))
            else:
                watch.put(pinned(path))
            until(lambda: watch.failures, "a report")
        finally:
            stop.set()
            writer.join(20)
        ((told, reason),) = watch.failures
        assert len(watch.forgotten) == 1
        assert told.origin.path == place(path)
        assert reason == "a process keeps writing to it"
        assert not watch.has(A)
        assert watch.live.counters.retried >= 3
        if not scan:
            until(lambda: watch.journal() == {(place(path), A)}, "the journal")


def test_kind_of_a_scanned_file_is_kept_when_it_is_tried_again(
    watch: Watch, tmp_path: Path
) -> None:
    path = program(tmp_path / "a", A, MIB)
    found = scanned(path)
    found.kind = Kind.VDSO
    with path.open("r+b") as file:

        def write(what: str) -> None:
            if what == "stage":
                file.seek(2000)
                file.write(os.urandom(100))
                file.flush()

        watch.store.failing = write
        watch.live.take(found)
        until(lambda: watch.live.counters.retried, "another try")
        watch.store.failing = lambda what: None
    until(lambda: watch.has(A), "the build ID")
    assert watch.live.flush(20)
    ordinal = watch.store.index.ordinal(A)
    assert ordinal is not None
    assert watch.store.index.artifact(ordinal, Kind.VDSO) is not None
    assert watch.store.index.artifact(ordinal, Kind.EXECUTABLE) is None


# --- slow filesystems ----------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.fuse
def test_silent_filesystem_delays_nobody(directory: Path) -> None:
    mountpoint = directory / "mnt"
    mountpoint.mkdir()
    source = program(directory / "source", A)
    with (
        served(mountpoint, source) as server,
        watching(directory / "store", PendingFiles(seconds=3)) as watch,
    ):
        good = pinned(mountpoint / "app", slow=True)
        watch.put(good)
        until(lambda: watch.has(A), "it answers")
        assert watch.live.flush(20)
        silent = [pinned(mountpoint / "app", slow=True) for _ in range(2)]
        try:
            server.send_signal(signal.SIGSTOP)
            watch.put(*silent)
            for number in range(20):
                watch.put(pinned(program(directory / str(number), numbered(number))))
            until(lambda: watch.has(*map(numbered, range(20))), "the others")
            assert watch.failures == []
            until(lambda: len(watch.failures) == 2, "a report of each")
        finally:
            server.send_signal(signal.SIGCONT)
        assert set(watch.forgotten) == {pin.key for pin in silent}
        assert "its filesystem does not answer" in {reason for _, reason in watch.failures}


# --- when the store cannot be written ------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (committer, pipeline):
        monkeypatch.setattr(module, "ROW_DELAYS", Backoff(0.05, 0.2))


@pytest.mark.root
def test_full_store_loses_nothing(tmp_path: Path, impatient: None) -> None:
    point = tmp_path / "small"
    point.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=8m", "tmpfs", point], check=True)
    try:
        with watching(point / "store", PendingFiles(seconds=60)) as watch:
            ballast = point / "ballast"
            ballast.write_bytes(bytes((os.statvfs(point).f_bavail - 64) * 4096))
            large = program(tmp_path / "large", A, 2 * MIB)
            watch.put(pinned(large))
            until(lambda: watch.live.counters.retried >= 2, "tries")
            counters = watch.live.counters
            assert "no space left" in counters.store_error
            assert 0 < counters.store_full_since <= time.time()
            watch.live.note(sighting(b"/gone"), B)
            until(lambda: (b"/gone", B) in watch.journal(), "what was seen has room")
            assert watch.journal() == {(b"/gone", B), (place(large), A)}
            watch.live.take(scanned(program(tmp_path / "scanned", B, 2 * MIB)))
            until(lambda: watch.failures, "what a scan has to find again")
            assert watch.recoveries == 0
            ballast.unlink()
            until(lambda: watch.has(A), "the build ID")
            until(lambda: watch.recoveries == 1, "to be told")
            until(lambda: not counters.store_error, "the end of the trouble")
            assert counters.store_full_since == 0
            assert len(watch.failures) == 1
            assert watch.forgotten == [], "nothing that was caught is lost"
    finally:
        unmount(point)


@pytest.mark.parametrize("error", [StoreFull("full"), StoreError("locked")], ids=["full", "other"])
def test_nothing_can_be_written_for_a_while(
    tmp_path: Path, impatient: None, caplog: pytest.LogCaptureFixture, error: StoreError
) -> None:
    """Neither bytes nor rows: what was seen waits in memory, also of what was let go."""
    with watching(tmp_path / "store", PendingFiles(seconds=0.5)) as watch:
        broken = True

        def fail(what: str) -> None:
            if broken:
                raise error

        watch.store.failing = fail
        paths = [program(tmp_path / str(number), numbered(number)) for number in range(20)]
        watch.put(*map(pinned, paths))
        watch.live.note(sighting(b"/gone"), B)
        until(lambda: len(watch.failures) == 20, "all to be let go")
        assert {reason for _, reason in watch.failures} == {str(error)}
        assert watch.live.counters.let_go == 20
        assert watch.journal() == set()
        assert watch.recoveries == 0
        watch.put(pinned(program(tmp_path / "a", A)))
        broken = False
        until(lambda: watch.has(A), "the build ID")
        seen = {(place(path), numbered(number)) for number, path in enumerate(paths)}
        seen |= {(b"/gone", B), (place(tmp_path / "a"), A)}
        until(lambda: watch.journal() == seen, "all that was seen")
        until(lambda: watch.recoveries == 1, "to be told")
        assert watch.live.counters.store_error == ""
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        f"{error}; trying again until it can be written",
        "the store can be written again",
    ]


def test_recovery_is_noticed_when_nothing_comes(
    watch: Watch, tmp_path: Path, impatient: None
) -> None:
    """Nobody would try otherwise, and a scan would find what was lost."""
    broken = True

    def fail(what: str) -> None:
        if broken and what == "stage":
            raise StoreFull("full")

    watch.store.failing = fail
    watch.live.take(scanned(program(tmp_path / "a", A)))
    until(lambda: watch.failures, "a failure")
    assert watch.live.flush(20)
    assert (watch.recoveries, watch.live.counters.store_error) == (0, "full")
    broken = False
    until(lambda: watch.recoveries == 1, "to be told")
    assert watch.live.counters.store_error == ""


def test_one_that_cannot_be_committed_does_not_take_others_with_it(
    tmp_path: Path, impatient: None
) -> None:
    with watching(tmp_path / "store", PendingFiles(seconds=2)) as watch:
        release = threading.Event()
        bad = numbered(7)
        real = watch.store.commit

        def commit(captures: list[object], *args: object) -> CommitResult:
            release.wait(60)
            if any(capture.build_id == bad for capture in captures):  # type: ignore[attr-defined]
                for capture in captures:
                    if isinstance(capture.content, Staged):  # type: ignore[attr-defined]
                        capture.content.close()  # type: ignore[attr-defined]
                raise StoreError("it does not want this one")
            return real(captures, *args)

        watch.store.commit = commit  # type: ignore[method-assign, assignment]
        for number in range(20):
            watch.put(pinned(program(tmp_path / str(number), numbered(number))))
        release.set()
        others = [numbered(number) for number in range(20) if number != 7]
        until(lambda: watch.has(*others), "the others")
        until(lambda: watch.failures, "a report")
        ((_, reason),) = watch.failures
        assert reason == "it does not want this one"
        assert not watch.has(bad)
        assert (place(tmp_path / "7"), bad) in watch.journal()


def test_a_fault_of_the_program_is_raised_and_lets_nobody_wait(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "store")

    def fail(what: str) -> None:
        raise ZeroDivisionError

    watch.store.failing = fail
    watch.put(pinned(program(tmp_path / "a", A)))
    until(lambda: watch.live._fault, "the fault")
    with pytest.raises(ZeroDivisionError):
        watch.live.note(sighting(b"/any"), B)
    with pytest.raises(ZeroDivisionError):
        watch.live.flush(20)
    watch.live.close()
    watch.store.close()


# --- the end -------------------------------------------------------------------------------------


def test_closing_commits_what_is_staged_and_notes_what_is_not(tmp_path: Path) -> None:
    release = threading.Event()
    with watching(tmp_path / "store", limits=WatchLimits(workers=1)) as watch:

        def wait(what: str) -> None:
            assert what != "stage" or release.wait(60)

        watch.store.failing = wait
        first, second = program(tmp_path / "a", A), program(tmp_path / "b", B, MIB)
        watch.put(pinned(first))
        until(lambda: len(watch.pending) == 1 and watch.pending.idle, "the first to be taken")
        until(lambda: watch.live._busy == 1, "the first to be staged")
        watch.put(pinned(second))
        end = threading.Thread(target=watch.live.close)
        end.start()
        until(lambda: watch.pending.closed, "the end to begin")
        release.set()
        end.join(20)
        assert not end.is_alive()
        assert watch.has(A)
        assert not watch.has(B)
        assert watch.journal() == {(place(first), A), (place(second), B)}
        assert [reason for _, reason in watch.failures] == ["the recorder is ending"]
        watch.live.close()


def test_killed_at_any_time_leaves_a_sound_store(tmp_path: Path) -> None:
    choice, path, files = random.Random(3), tmp_path / "store", tmp_path / "files"
    files.mkdir()
    for number in range(300):
        program(files / str(number), numbered(number), 5000)
    Store.create(path).close()
    found, longest = 0, 0.4
    for round_ in range(12):
        delay = choice.uniform(0.02, longest)
        child = os.fork()
        if child == 0:
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                with watching(path) as watch:
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    for number in range(300):
                        watch.put(pinned(files / str((number + 25 * round_) % 300)))
                    watch.live.flush(60)
                    signal.pause()
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), status
        with Store.open(path) as store:
            assert list(store.check(digests=True)) == []
            journal = {row.build_id for row in store.journal.since()}
            ids = {build_id for _, build_id in store.index.build_ids_from()}
            assert ids <= journal, "a capture and its entry are one transaction"
            found = max(found, len(ids))
        if not found:
            longest *= 1.5  # the machine has others to serve
    assert found > 0


@pytest.mark.slow
def test_memory_stays_flat(watch: Watch, tmp_path: Path) -> None:
    """Four thousand pins of the files of two hundred paths, each time with other bytes."""

    def anonymous() -> int:
        with open("/proc/self/status", encoding="ascii") as status:
            (line,) = [line for line in status if line.startswith("RssAnon")]
        return int(line.split()[1])

    def put(name: Path, number: int) -> None:
        name.unlink(missing_ok=True)
        name.write_bytes(elf_file(build_id=b"%020d" % number))
        watch.put(pinned(name))

    def settle(number: int) -> None:
        """Let the last batch have one file: a thread keeps its last batch until the next one."""
        assert watch.live.flush(60)
        put(tmp_path / "last", number)
        assert watch.live.flush(60)
        gc.collect()

    memory = objects = pins = 0
    for round_ in range(20):
        for number in range(200):
            put(tmp_path / str(number), round_ * 200 + number)
            pins += 1
        assert watch.live.flush(60)
        if round_ == 5:
            settle(5000)
            memory, objects, pins = anonymous(), sys.getallocatedblocks(), 0
    settle(5001)
    assert watch.live.counters.captured == 4002
    assert sys.getallocatedblocks() - objects < pins  # not even one object of each
    assert anonymous() - memory < 2048  # KiB
