# SPDX-License-Identifier: Apache-2.0
"""What is pinned becomes captures of the bytes that were staged, once, or is accounted for."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from buildidfs.capture.base import Found, Known, PinnedFile, Resighting, Unreadable, memory_file
from buildidfs.capture.scan.tree import TreeScanner
from buildidfs.errors import IntegrityError, Interrupted, StoreFull, UsageError
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo, committer, pipeline, staging
from buildidfs.linux import inodes, machine
from buildidfs.model import (
    OWNER,
    Absence,
    BuildId,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Trust,
)
from buildidfs.store import CommitResult, Staged, Store
from tests.support.elf.elfwriter import (
    DWARF,
    ET_REL,
    TEXT,
    TEXT_SPLIT,
    Section,
    elf_file,
    gdb_scripts,
)
from tests.support.harness.captures import read_blob
from tests.support.harness.children import cat_program
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Callable

A, B = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)
ELF_A = elf_file(build_id=A)
ELF_B = elf_file(build_id=B)


class Watched(Store):
    """A store that tells what was copied and hashed, and lets a test meddle in between."""

    staged = 0
    hashed = 0
    before_staging: Callable[[], None] = staticmethod(lambda: None)
    after_staging: Callable[[], None] = staticmethod(lambda: None)
    before_committing: Callable[[], None] = staticmethod(lambda: None)

    def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
        self.staged += 1
        self.before_staging()
        staged = super().stage(fd, limit, origin)
        self.after_staging()
        return staged

    def digest_of(self, fd: int) -> bytes:  # type: ignore[override]
        self.hashed += 1
        return super().digest_of(fd)

    def commit(self, *args: Any) -> CommitResult:
        self.before_committing()
        return super().commit(*args)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Watched]:
    """An empty store; at the end it has to be sound, and every descriptor closed."""
    with Watched.open(tmp_path / "store", create=True) as opened:
        assert isinstance(opened, Watched)
        before = open_descriptors()
        yield opened
        assert open_descriptors() <= before
        assert list(opened.check()) == []


def _batches_of(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "BATCH_FILES", files)
    monkeypatch.setattr(committer, "BATCH_FILES", files)


def sighting(path: Path | bytes, fd: int, **changes: object) -> Sighting:
    name = path if isinstance(path, bytes) else os.fsencode(path)
    origin = Origin(name, inodes.identity(fd), host="here", trust=Trust.HOST, scanner="test")
    return Sighting(msgspec.structs.replace(origin, **changes), time.time_ns())


def pin(path: Path, **changes: object) -> PinnedFile:
    fd = os.open(path, os.O_RDONLY)
    return PinnedFile(sighting(path, fd, **changes), fd)


def ingest(store: Store, *found: Found) -> ScanSummary:
    return Ingest(store).run(found)


def tree(store: Store, path: Path) -> ScanSummary:
    return Ingest(store).run(TreeScanner(StoreMemo(store), [os.fsencode(path)]))


def held(store: Store, build_id: BuildId, kind: Kind = Kind.EXECUTABLE) -> list[bytes]:
    """The bytes of every variant."""
    ordinal = store.index.ordinal(build_id)
    if ordinal is None:
        return []
    return [read_blob(store, variant.digest) for variant in store.index.variants(ordinal, kind)]


def origins(store: Store, build_id: BuildId) -> list[Origin]:
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    return [record.origin for record in store.index.origins(ordinal)]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


# --- the usual ---------------------------------------------------------------------------------


def test_captures_and_counts(store: Watched, tmp_path: Path) -> None:
    summary = ingest(
        store,
        pin(write(tmp_path / "a", ELF_A)),
        pin(write(tmp_path / "b", ELF_B)),
        pin(write(tmp_path / "text", b"text")),
        pin(write(tmp_path / "none", elf_file(etype=ET_REL))),
        Unreadable(b"/secret", "Permission denied", 13),
    )
    assert (summary.files, summary.captured, summary.held, summary.new_ids) == (5, 2, 0, 2)
    assert summary.copied_bytes == len(ELF_A) + len(ELF_B)
    assert summary.absent == {Absence.NOT_ELF: 1, Absence.NO_BUILD_ID: 1}
    assert summary.unreadable == [Unreadable(b"/secret", "Permission denied", 13)]
    assert held(store, A) == [ELF_A]
    assert held(store, B) == [ELF_B]
    assert store.staged == 2  # what has no build ID is not copied


def test_describes_what_it_captured(store: Watched, tmp_path: Path) -> None:
    data = elf_file([TEXT, DWARF, gdb_scripts("print()")], build_id=A)
    path = write(tmp_path / "a", data)
    path.chmod(0o750)
    ingest(store, pin(path, container="docker:x", mnt_ns_id=7, trust=Trust.CONTAINER))
    ordinal = store.index.ordinal(A)
    assert ordinal is not None
    for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO):
        artifact = store.index.artifact(ordinal, kind)
        assert artifact is not None
        assert artifact.quality is Quality.DEBUGINFO
        assert artifact.trust is Trust.CONTAINER
        assert artifact.mtime_ns == path.stat().st_mtime_ns
        (scripts,) = artifact.scripts
        assert b"print()" in data[scripts.offset : scripts.offset + scripts.size]
    (origin,) = origins(store, A)
    assert (origin.path, origin.container) == (os.fsencode(path), "docker:x")
    assert (origin.mnt_ns_id, origin.host) == (7, "here")


def test_second_scan_reads_nothing(store: Watched) -> None:
    first = tree(store, cat_program())
    assert (first.captured, store.staged, store.hashed) == (1, 1, 0)
    second = tree(store, cat_program())
    assert (second.captured, second.held, second.copied_bytes) == (0, 1, 0)
    assert (store.staged, store.hashed) == (1, 0)


def test_bytes_that_are_held_are_hashed_and_not_copied(store: Watched, tmp_path: Path) -> None:
    ingest(store, pin(write(tmp_path / "a", ELF_A)))
    summary = ingest(store, pin(write(tmp_path / "copy", ELF_A)))
    assert (summary.captured, summary.held, summary.copied_bytes) == (0, 1, 0)
    assert (store.staged, store.hashed) == (1, 1)
    assert {origin.path for origin in origins(store, A)} == {
        os.fsencode(tmp_path / "a"),
        os.fsencode(tmp_path / "copy"),
    }


def test_other_bytes_of_the_same_size_and_build_id_are_a_variant(
    store: Watched, tmp_path: Path
) -> None:
    other = bytearray(ELF_A)
    other[ELF_A.index(TEXT.data)] ^= 1
    ingest(store, pin(write(tmp_path / "a", ELF_A)))
    summary = ingest(store, pin(write(tmp_path / "b", bytes(other))))
    assert (summary.captured, summary.new_ids) == (1, 0)
    assert sorted(held(store, A)) == sorted([ELF_A, bytes(other)])


def test_bytes_that_are_removed_before_they_are_recorded(store: Watched, tmp_path: Path) -> None:
    """What the store held a moment ago was only hashed: now it has to be read."""
    first = write(tmp_path / "a", ELF_A)
    ingest(store, pin(first))
    digests = [Digest(hashlib.sha256(ELF_A).digest())]
    store.before_committing = lambda: store.remove(digests) and None
    summary = ingest(store, pin(write(tmp_path / "copy", ELF_A)), pin(write(tmp_path / "b", ELF_B)))
    assert (summary.files, summary.captured, summary.held) == (2, 1, 0)
    assert summary.unreadable == [Unreadable(os.fsencode(tmp_path / "copy"), pipeline.REMOVED)]
    assert (held(store, A), held(store, B)) == ([], [ELF_B])

    with pin(first) as pinned:
        known = Resighting(pinned.sighting, Known(A, None))
    summary = ingest(store, known)
    assert (summary.files, summary.held) == (1, 0)
    assert summary.unreadable == [Unreadable(os.fsencode(first), pipeline.REMOVED)]


def test_files_that_made_way_meanwhile_and_are_still_there_are_noted(
    store: Watched, tmp_path: Path
) -> None:
    first = write(tmp_path / "a", ELF_A)
    ingest(store, pin(first))
    digests = [Digest(hashlib.sha256(ELF_A).digest())]
    store.before_committing = lambda: store.remove(digests) and None
    summary = ingest(store, _here(pin(write(tmp_path / "copy", ELF_A))))
    assert (summary.held, summary.omitted, summary.unreadable) == (0, 1, [])
    with _here(pin(first)) as pinned:
        known = Resighting(pinned.sighting, Known(A, None))
    summary = ingest(store, known)
    assert (summary.held, summary.omitted, summary.unreadable) == (0, 1, [])


def _here(pinned: PinnedFile) -> PinnedFile:
    """As if this host had seen it, at a place that only root writes to."""
    origin = msgspec.structs.replace(
        pinned.sighting.origin, host=machine.host_name(), trust=Trust.HOST
    )
    pinned.sighting = Sighting(origin, pinned.sighting.seen_ns)
    return pinned


def test_one_file_in_twenty_places(store: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "a", ELF_A)
    summary = ingest(store, *(pin(path, mnt_ns_id=place) for place in range(1, 21)))
    assert (summary.files, summary.captured, summary.held) == (20, 1, 19)
    assert held(store, A) == [ELF_A]
    assert {origin.mnt_ns_id for origin in origins(store, A)} == set(range(1, 21))
    assert store.staged == 1


def test_another_name_of_a_file_that_is_being_stored(
    store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scanner of archives meets a file once, and its other names later, when it has no file."""
    monkeypatch.setattr(pipeline, "BATCH_ROWS", 1)
    first = pin(write(tmp_path / "app", ELF_A))
    identity = msgspec.structs.replace(
        first.sighting.origin.identity, dev=0, ctime_ns=0, scope=b"archive"
    )

    def named(name: bytes) -> Sighting:
        origin = msgspec.structs.replace(first.sighting.origin, path=name, identity=identity)
        return Sighting(origin, time.time_ns())

    pinned = PinnedFile(named(b"/app"), first.fd)
    links = [Resighting(named(b"/link%d" % number), Known(A)) for number in range(3)]
    summary = ingest(store, pinned, *links)
    assert (summary.files, summary.captured, summary.held) == (4, 1, 3)
    later = ingest(store, Resighting(named(b"/later"), Known(A)))
    assert (later.files, later.held) == (1, 1)
    names = {origin.path for origin in origins(store, A)}
    assert names == {b"/app", b"/link0", b"/link1", b"/link2", b"/later"}


def test_twenty_files_with_the_same_bytes(store: Watched, tmp_path: Path) -> None:
    files = [pin(write(tmp_path / f"{number}", ELF_A)) for number in range(20)]
    summary = ingest(store, *files)
    assert (summary.captured, summary.held) == (1, 19)
    assert summary.copied_bytes == len(ELF_A)
    assert held(store, A) == [ELF_A]
    assert len(origins(store, A)) == 20


def test_places_of_what_has_no_build_id_are_counted(store: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "text", b"text")
    summary = ingest(store, *(pin(path, mnt_ns_id=place) for place in range(1, 4)))
    assert (summary.files, summary.absent) == (3, {Absence.NOT_ELF: 3})


def test_absence_is_remembered(store: Watched) -> None:
    script = Path(os.__file__)  # old enough to be remembered, and no ELF file
    ingest(store, pin(script))
    fd = os.open(script, os.O_RDONLY)
    assert StoreMemo(store).recall(inodes.identity(fd)) == Known(absence=Absence.NOT_ELF)
    os.close(fd)


def test_absence_that_the_scanner_knows_is_counted(store: Watched, tmp_path: Path) -> None:
    fd = os.open(write(tmp_path / "x", b""), os.O_RDONLY)
    summary = ingest(store, Resighting(sighting(b"/x", fd), Known(absence=Absence.EMPTY)))
    os.close(fd)
    assert (summary.files, summary.absent) == (1, {Absence.EMPTY: 1})


def test_memo_of_an_unknown_file(store: Watched) -> None:
    fd = os.open(cat_program(), os.O_RDONLY)
    assert StoreMemo(store).recall(inodes.identity(fd)) is None
    os.close(fd)


def test_many_files_in_many_batches(
    store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _batches_of(7, monkeypatch)
    count = 100
    files = tmp_path / "files"
    files.mkdir()
    for number in range(count):
        write(files / str(number), elf_file(build_id=b"%020d" % number))
    summary = tree(store, files)
    assert (summary.captured, summary.new_ids) == (count, count)
    assert store.stats().ids == count


def test_open_files_are_bounded(
    store: Watched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of the batch that a slow disk commits, of the next batch, of queue and workers."""
    count, commit = 600, store.commit

    def slowly(*arguments: Any) -> CommitResult:
        time.sleep(0.3)
        return commit(*arguments)

    monkeypatch.setattr(store, "commit", slowly)
    files = tmp_path / "files"
    files.mkdir()
    for number in range(count):
        write(files / str(number), elf_file(build_id=b"%020d" % number))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # This process may have any number of other files open.
    most = len(os.listdir("/proc/self/fd")) + 2 * committer.BATCH_FILES + 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        summary = tree(store, files)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (summary.captured, summary.unreadable) == (count, [])


# --- what has no file of its own ---------------------------------------------------------------


def stand_in(data: bytes, name: bytes, kind: Kind, build_id: BuildId | None = None) -> PinnedFile:
    identity = FileIdentity(0, 0, len(data), 0, 0, 0o100400, 0, 0, b"made up")
    origin = Origin(name, identity, trust=Trust.HOST)
    return PinnedFile(Sighting(origin, time.time_ns()), memory_file(b"x", data), kind, build_id)


def test_vdso(store: Watched) -> None:
    pinned = stand_in(ELF_A, b"[vdso]", Kind.VDSO)
    identity = pinned.sighting.origin.identity
    ingest(store, pinned)
    assert held(store, A, Kind.VDSO) == [ELF_A]
    assert held(store, A, Kind.EXECUTABLE) == []
    assert StoreMemo(store).recall(identity) == Known(A)


def test_kernel_symbols(store: Watched) -> None:
    text = b"ffffffff81000000 T _stext\n"
    ingest(store, stand_in(text, b"[kernel.kallsyms]", Kind.KALLSYMS, A))
    assert held(store, A, Kind.KALLSYMS) == [text]
    ordinal = store.index.ordinal(A)
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, Kind.KALLSYMS)
    assert artifact is not None
    assert artifact.mode == 0o400


def test_debug_file_that_is_given_a_build_id(store: Watched) -> None:
    data = elf_file([TEXT_SPLIT, DWARF, gdb_scripts("print()")])
    ingest(store, stand_in(data, b"/a.debug", Kind.DEBUGINFO, A))
    assert held(store, A, Kind.DEBUGINFO) == [data]
    ordinal = store.index.ordinal(A)
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
    assert artifact is not None
    assert artifact.scripts  # they are to be hidden here as well


# --- files that change -------------------------------------------------------------------------


def test_staged_bytes_decide(store: Watched, tmp_path: Path) -> None:
    """Overwritten after it was seen and before it was read."""
    path = write(tmp_path / "a", ELF_A)
    pinned = pin(path)
    write(path, ELF_B)
    ingest(store, pinned)
    assert held(store, A) == []
    assert held(store, B) == [ELF_B]
    (origin,) = origins(store, B)
    assert origin.identity.ctime_ns == path.stat().st_ctime_ns


def test_overwritten_while_staged_is_tried_again(store: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "a", ELF_A)
    times = iter(range(1))

    def overwrite() -> None:
        for _ in times:
            write(path, ELF_B)

    store.after_staging = overwrite
    summary = ingest(store, pin(path))
    assert (summary.captured, summary.unreadable) == (1, [])
    assert held(store, A) == []
    assert held(store, B) == [ELF_B]


def test_what_is_written_to_all_the_time_is_not_captured(store: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "a", ELF_A)

    def overwrite() -> None:
        with path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"\0")

    store.after_staging = overwrite
    summary = ingest(store, pin(path))
    assert summary.captured == 0
    (item,) = summary.unreadable
    assert "writing" in item.reason
    assert held(store, A) == []
    assert store.stats().blobs == 0


def test_half_of_each_is_never_captured(store: Watched, tmp_path: Path) -> None:
    """The head of one version and the tail of the other would have the build ID of the first."""
    tail = Section(b".data", bytes(3 << 20))
    old = elf_file([TEXT, tail], build_id=A)
    new = elf_file([TEXT, tail._replace(data=b"\1" * len(tail.data))], build_id=B)
    path = write(tmp_path / "a", old)
    writes = iter([new, old])

    def overwrite() -> None:
        for data in writes:
            with path.open("r+b") as file:  # in place, after the head was read
                file.write(data)
            return

    store.before_staging = overwrite
    ingest(store, pin(path))
    assert set(held(store, A)) <= {old}
    assert set(held(store, B)) <= {new}
    assert held(store, A) + held(store, B)


def test_changed_owner_loses_trust(store: Watched, tmp_path: Path) -> None:
    path = write(tmp_path / "a", ELF_A)
    path.chmod(0o755)
    pinned = pin(path)
    path.chmod(0o777)
    ingest(store, pinned)
    assert origins(store, A)[0].trust is Trust.UNKNOWN
    assert origins(store, A)[0].reach == OWNER, "nor is it known who could get at it"


def test_just_written_file_is_staged_after_a_tick(tmp_path: Path) -> None:
    """A second write within the same tick of the clock would not show in its times."""
    fd = os.open(write(tmp_path / "a", ELF_A), os.O_RDONLY)
    with PinnedFile(sighting(b"/a", fd), fd) as pinned:
        changed_ns = os.fstat(fd).st_ctime_ns
        while staging.premature(pinned)[0]:
            time.sleep(0.001)
        assert time.time_ns() - changed_ns >= staging.limits.tick * 1e9


def test_source_that_cannot_be_read(store: Watched, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    summary = ingest(store, PinnedFile(sighting(b"/d", fd), fd))
    assert summary.unreadable == [Unreadable(b"/d", "Is a directory", 21)]


# --- when the store or the scanner fails --------------------------------------------------------


def test_full_store_keeps_what_it_has(store: Watched, tmp_path: Path) -> None:
    count = iter(range(10))

    def fill() -> None:
        if next(count) >= 3:
            raise StoreFull("full")

    store.before_staging = fill
    paths = [write(tmp_path / f"{n}", elf_file(build_id=b"%020d" % n)) for n in range(9)]
    with pytest.raises(StoreFull):
        Ingest(store, workers=1).run(map(pin, paths))
    assert store.stats().ids == 3


def test_full_store_stops_the_scanner(store: Watched, tmp_path: Path) -> None:
    asked = 0

    def found() -> Iterator[Found]:
        nonlocal asked
        for number in range(1000):
            asked += 1
            yield pin(write(tmp_path / "x", elf_file(build_id=b"%020d" % number)))

    def fill() -> None:
        raise StoreFull("full")

    store.before_staging = fill
    with pytest.raises(StoreFull):
        Ingest(store, workers=1).run(found())
    assert asked < 100


class FailingCommit(Watched):
    """A store whose first commit fails."""

    failures = 1

    def commit(self, *args: object) -> CommitResult:  # type: ignore[override]
        if self.failures:
            self.failures -= 1
            until(lambda: self.staged >= 4, "two more to be staged meanwhile")
            for capture in args[0]:  # type: ignore[attr-defined]
                capture.content.close()
            raise StoreFull("full")
        return super().commit(*args)  # type: ignore[arg-type]


def test_commit_that_fails_is_told_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _batches_of(2, monkeypatch)
    monkeypatch.setattr(pipeline, "_MOST_QUEUED", 1)
    paths = [write(tmp_path / f"{n}", elf_file(build_id=b"%020d" % n)) for n in range(6)]
    with FailingCommit.open(tmp_path / "store", create=True) as store:
        before = open_descriptors()
        with pytest.raises(StoreFull):
            Ingest(store, workers=1).run(map(pin, paths))
        assert open_descriptors() <= before
        assert 0 < store.stats().ids <= 4
        assert list(store.check()) == []


@pytest.mark.parametrize("error", [UsageError("no such container"), KeyboardInterrupt()])
def test_scanner_that_fails_loses_nothing(
    store: Watched, tmp_path: Path, error: BaseException
) -> None:
    def found() -> Iterator[Found]:
        yield pin(write(tmp_path / "a", ELF_A))
        raise error

    with pytest.raises(type(error)):
        Ingest(store).run(found())
    # What was not begun is dropped, what was is kept whole.
    assert held(store, A) in ([], [ELF_A])


def test_scanner_is_closed_when_the_store_fails(store: Watched, tmp_path: Path) -> None:
    closed = []

    def found() -> Iterable[Found]:
        try:
            while True:
                yield pin(write(tmp_path / "a", os.urandom(8)))
                yield pin(write(tmp_path / "a", ELF_A))
        finally:
            closed.append(True)

    def break_() -> None:
        raise IntegrityError("damaged")

    store.before_staging = break_
    with pytest.raises(IntegrityError):
        Ingest(store).run(found())
    assert closed


def test_progress_is_told(store: Watched, tmp_path: Path) -> None:
    told: list[tuple[int, str, float | None]] = []

    def tell(done: int, what: str, *, size: int = 0, share: float | None = None) -> None:
        told.append((done, what, share))

    path = write(tmp_path / "a", ELF_A)
    Ingest(store).run([pin(path)], tell, lambda: 0.5)
    assert told == [(1, os.fspath(path), 0.5)]


def test_ctrl_c_keeps_what_was_captured(store: Watched, tmp_path: Path) -> None:
    """Files that only wait in the queue are dropped, so the first one has to be begun with."""
    is_begun = threading.Event()
    store.before_staging = is_begun.set

    def found() -> Iterator[PinnedFile]:
        yield pin(write(tmp_path / "a", ELF_A))
        assert is_begun.wait(60)
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match=r"^1 file kept; run it again$"):
        Ingest(store).run(found())
    assert store.stats().blobs == 1


def test_sum_of_two_scans_has_every_count() -> None:
    """A field that `ScanSummary.add` forgets stays at the count of the first scan."""
    whole, part = ScanSummary(), ScanSummary()
    for each in (whole, part):
        for field in msgspec.structs.fields(ScanSummary):
            if isinstance(getattr(each, field.name), int):
                setattr(each, field.name, 3)
        each.absent[Absence.NO_BUILD_ID] = 3
        each.unreadable.append(Unreadable(b"/x", "gone"))
        each.removed.losses = 3
    whole.add(part)
    counts = {name: value for name, value in msgspec.structs.asdict(whole).items()
              if isinstance(value, int)}  # fmt: skip
    assert set(counts.values()) == {6}, counts
    assert whole.absent[Absence.NO_BUILD_ID] == whole.removed.losses == 6
    assert len(whole.unreadable) == 2
