# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.write.uses: uses by readers reach the index, once, and are bounded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.model import BuildId, Digest, Kind
from buildidfs.store import NewSeen, Staged, Store, schema
from buildidfs.store import store as store_module
from buildidfs.store.index import environment
from buildidfs.store.write import uses
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

IDS = [b"%08d" % number for number in range(3)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        commit(made, *(capture(made, build_id, build_id) for build_id in IDS))
        yield made


def _digests(store: Store) -> list[Digest]:
    found = [store.index.artifact(store.index.ordinal(build_id) or 0, 1) for build_id in IDS]
    return [artifact.digest for artifact in found if artifact is not None]


def _files(store: Store) -> list[Path]:
    return sorted(Path(os.fsdecode(store.path), "run").glob("uses-*"))


def test_what_a_reader_opens_is_known_to_the_next_writer(store: Store, tmp_path: Path) -> None:
    first, second, third = _digests(store)
    store.close()
    with Store.open(tmp_path / "store", read_only=True) as reader:
        for digest in (first, first, second):
            reader.open_blob(digest).close()
        reader.blobs.open(third).close()
        assert _files(reader) == []
        reader.flush_uses()
        assert len(_files(reader)) == 1
        reader.flush_uses()
        assert len(_files(reader)) == 1, "nothing was opened since"
        blob = reader.open_blob_now(first)
        assert blob is not None
        blob.close()
    with Store.open(tmp_path / "store") as writer:
        assert len(_files(writer)) == 2, "closing says the rest"
        assert writer.fold_uses() == 2
        assert _files(writer) == []
        assert writer.fold_uses() == 0
        now = time.time()
        assert now - 100 < writer.index.last_use(first) <= now
        assert now - 100 < writer.index.last_use(second) <= now
        assert writer.index.last_use(third) < now - 1000
        assert list(writer.check()) == []


def test_nothing_is_written_for_a_second_use_within_the_hour(store: Store) -> None:
    digest = _digests(store)[0]
    for omitted in (1, 0):
        store.open_blob(digest).close()
        store.flush_uses()
        assert store.fold_uses() == omitted


def test_bytes_that_are_gone_are_passed_over(store: Store) -> None:
    digests = _digests(store)
    for digest in digests:
        store.open_blob(digest).close()
    store.flush_uses()
    store.remove(digests[:1])
    assert store.fold_uses() == 2
    assert list(store.check()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"buildidfs uses 1\n", b"buildidfs uses 1\n\0\0\0\1" + b"x" * 33, b"\0" * 100, b"x" * 53],
)
def test_files_that_are_not_ours_are_passed_over(
    store: Store, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory = Path(os.fsdecode(store.path), "run")
    directory.mkdir(exist_ok=True)
    (directory / "uses-1-1").write_bytes(content)
    assert store.fold_uses() == 0
    assert _files(store) == []
    assert "not a record of uses" in caplog.text


def test_a_clock_that_was_ahead_does_not_protect_for_ever(store: Store) -> None:
    digest = _digests(store)[0]
    directory = Path(os.fsdecode(store.path), "run")
    directory.mkdir(exist_ok=True)
    stamp = schema.U32.pack(2**32 - 1)
    (directory / "uses-1-1").write_bytes(b"buildidfs uses 1\n" + stamp + digest)
    assert store.fold_uses() == 1
    assert store.index.last_use(digest) <= time.time()


def test_what_nobody_takes_in_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_MOST_USES", 2)
    monkeypatch.setattr(uses, "_MOST_FILES", 3)
    for _ in range(5):
        for digest in _digests(store):
            store.open_blob(digest).close()
        store.flush_uses()
    assert [len(path.read_bytes()) for path in _files(store)] == [17 + 4 + 2 * 32] * 3


def test_a_store_that_cannot_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"not a directory")
    uses.leave(os.fsencode(tmp_path), [Digest(bytes(32))])
    assert (tmp_path / "run").read_bytes() == b"not a directory"


def test_presence_does_not_take_them_for_processes(store: Store) -> None:
    from buildidfs.store import run_files

    store.open_blob(_digests(store)[0]).close()
    store.flush_uses()
    assert run_files.present(store.path) == []
    assert len(_files(store)) == 1


def test_the_order_of_uses_follows(store: Store) -> None:
    digests = _digests(store)
    store.open_blob(digests[0]).close()
    store.flush_uses()
    store.fold_uses()
    env = environment.acquire(store.path, read_only=False)
    try:
        with env.read() as txn, txn.cursor(env.tables["uses"]) as cursor:
            order = [schema.USE.unpack(key)[2] for key in cursor.iternext(values=False)]
    finally:
        environment.release(env)
    assert order[-1] == digests[0]
    assert sorted(order) == sorted(digests)


CENTURY_NS = 100 * 365 * 86_400 * SECOND


def test_claimed_times_are_at_most_now_and_never_negative(store: Store) -> None:
    """A bundle, a bucket, or a clock that was ahead may claim any time."""
    before = time.time_ns()
    build_id = BuildId(b"claimed")
    for claim in (before + CENTURY_NS, -CENTURY_NS):
        at = sighting(b"/srv/claimed", seen_ns=claim, container="docker:0123456789ab")
        commit(store, capture(store, b"claimed", build_id, at=at))
        store.touch([at])
        store.note_seen([NewSeen(at, build_id)])
    now = time.time_ns()
    ordinal = store.index.ordinal(build_id) or 0
    (place,) = store.index.origins(ordinal)
    assert place.first_seen_ns == 0
    assert before <= place.last_seen_ns <= now
    (artifact,) = store.index.variants(ordinal, Kind.EXECUTABLE)
    assert before <= artifact.first_seen_ns <= now
    assert store.index.last_use(artifact.digest) <= now // SECOND
    (row,) = store.journal.of(build_id)
    assert 0 <= row.first_seen_ns <= row.last_seen_ns <= now
    (container,) = store.containers.every()
    assert 0 <= container.first_seen_ns <= container.last_seen_ns <= now


def test_import_of_a_bundle_is_the_use_of_its_files(store: Store) -> None:
    for number, claim in enumerate([NOW, time.time_ns() + CENTURY_NS]):
        at = sighting(seen_ns=claim, scanner="bundle", host="elsewhere", ino=number)
        new = capture(store, b"%d of a bundle" % number, b"%d bundle" % number, at=at)
        before = int(time.time())
        commit(store, new)
        assert isinstance(new.content, Staged)
        assert before <= store.index.last_use(new.content.digest) <= time.time()
