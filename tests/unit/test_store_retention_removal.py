# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.retention.removal

What goes with a blob, what stays, and that the index does not grow.
"""

from __future__ import annotations

import contextlib
import os
import select
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.errors import ArtifactMissing, StoreError
from buildidfs.model import Digest, Kind, Quality, Trust
from buildidfs.store import NewCapture, Outcome, Store, schema
from buildidfs.store.index import environment
from buildidfs.store.retention import removal
from tests.support.harness.captures import NOW, SECOND, capture, commit, read_blob, sighting

ID = b"\xab\xcd\xef\x01"
OTHER = b"\x12\x34\x56\x78"


def _digest(store: Store, build_id: bytes = ID, kind: Kind = Kind.EXECUTABLE) -> Digest:
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, kind)
    assert artifact is not None
    return artifact.digest


def _rows(store: Store) -> dict[str, int]:
    """Rows of all tables but those that remember what was, and are bounded themselves."""
    env = environment.acquire(store.path, read_only=False)
    try:
        rows = env.entries()
    finally:
        environment.release(env)
    return {name: rows[name] for name in rows if name not in ("seen", "journal", "recent", "meta")}


def _names(store: Store) -> list[str]:
    return sorted(str(build_id) for _, build_id in store.index.build_ids_from())


def test_nothing_is_left_of_a_build_id(store: Store) -> None:
    empty = _rows(store)
    path = b"/usr/lib/debug/.dwz/x86_64/app.debug"
    commit(store, capture(store, b"app", at=sighting(path), kinds=(Kind.DEBUGINFO,)))
    commit(store, capture(store, b"exe", at=sighting(b"/opt/app/bin/app")))
    digests = [_digest(store), _digest(store, kind=Kind.DEBUGINFO)]
    assert store.index.supplementary(b"x86_64/app.debug") == 1
    removed = store.remove(digests)
    assert (removed.blobs, removed.ids) == (2, 1)
    assert removed.bytes >= 6, "what it took on the disk"
    assert _rows(store) == empty
    assert list(store.check()) == []
    assert [store.blobs.size(digest) for digest in digests] == [None, None]
    stats = store.stats()
    assert (stats.blobs, stats.blob_bytes, stats.ids) == (0, 0, 0)
    assert sum(stats.artifacts.values()) == 0
    with pytest.raises(ArtifactMissing):
        store.index.match(ID.hex())


def test_numbers_are_not_used_again(store: Store) -> None:
    commit(store, capture(store, b"one", at=sighting(b"/opt/one")))
    path = store.index.primary_path(1)
    store.remove([_digest(store)])
    commit(store, capture(store, b"one", at=sighting(b"/opt/one")))
    assert store.index.ordinal(ID) == 2
    assert store.index.primary_path(2) not in (None, path)
    assert read_blob(store, _digest(store)) == b"one"


def test_other_build_ids_keep_their_share(store: Store) -> None:
    commit(store, capture(store, b"one", at=sighting(b"/opt/app/bin/one")))
    commit(store, capture(store, b"two", OTHER, at=sighting(b"/opt/app/lib/two")))
    before = _rows(store)
    commit(store, capture(store, b"three", b"\x77\x77", at=sighting(b"/opt/app/bin/x/three")))
    store.remove([_digest(store, b"\x77\x77")])
    assert _rows(store) == before
    assert store.paths.spelled(store.index.primary_path(1) or 0) == b"/opt/app/bin/one"
    assert _names(store) == sorted([ID.hex(), OTHER.hex()])
    assert list(store.check(digests=True)) == []


def test_bytes_with_several_build_ids_go_for_all(store: Store) -> None:
    empty = _rows(store)
    commit(store, capture(store, b"vdso", ID), capture(store, b"vdso", OTHER))
    assert store.remove([_digest(store)]).ids == 2
    assert _rows(store) == empty
    assert list(store.check()) == []


def test_what_remains_of_a_build_id_is_served(store: Store) -> None:
    host = sighting(b"/usr/bin/app", trust=Trust.HOST)
    other = sighting(b"/opt/app", trust=Trust.CONTAINER)
    commit(store, capture(store, b"best", at=host))
    best = _digest(store)
    commit(store, capture(store, b"next", at=other), capture(store, b"next", at=host))
    commit(store, capture(store, b"dbg", at=sighting(b"/d.debug"), kinds=(Kind.DEBUGINFO,)))
    assert _digest(store) == best
    removed = store.remove([best])
    assert (removed.blobs, removed.ids) == (1, 0)
    assert read_blob(store, _digest(store)) == b"next"
    assert list(store.check()) == []
    assert {bytes(each.origin.path) for each in store.index.origins(1)} == {
        b"/opt/app", b"/usr/bin/app", b"/d.debug"
    }  # fmt: skip


def test_the_first_path_goes_with_the_bytes_seen_there(store: Store) -> None:
    commit(store, capture(store, b"best", at=sighting(b"/a/first"), trust=Trust.HOST))
    best = _digest(store)
    commit(store, capture(store, b"other", at=sighting(b"/b/second", seen_ns=NOW + SECOND)))
    store.remove([best])
    assert store.paths.spelled(store.index.primary_path(1) or 0) == b"/b/second"
    assert store.paths.child(0, b"a") is None
    assert list(store.check()) == []


def test_debuginfo_alone_has_no_path(store: Store) -> None:
    commit(store, capture(store, b"exe", at=sighting(b"/a/b/app")))
    commit(store, capture(store, b"dbg", at=sighting(b"/d/app.debug"), kinds=(Kind.DEBUGINFO,)))
    store.remove([_digest(store)])
    assert store.index.primary_path(1) is None
    assert store.paths.child(0, b"a") is None
    assert store.index.kinds(1) == 1 << Kind.DEBUGINFO
    assert [each.origin.path for each in store.index.origins(1)] == [b"/d/app.debug"]
    assert list(store.check()) == []


def test_what_is_unknown_is_passed_over(store: Store) -> None:
    commit(store, capture(store, b"app"))
    assert store.remove([Digest(bytes(32))]) == removal.RemovalResult()
    assert store.remove([]) == removal.RemovalResult()
    assert list(store.check()) == []


def test_an_open_file_is_read_to_its_end(store: Store) -> None:
    content = os.urandom(3 << 20)
    commit(store, capture(store, content))
    with store.open_blob(_digest(store)) as blob:
        assert blob.pread(1, 0) == content[:1]
        store.remove([_digest(store)])
        assert blob.pread(blob.size, 1) == content[1:]


def test_quarantine_keeps_the_bytes(store: Store) -> None:
    commit(store, capture(store, b"suspicious"))
    digest = _digest(store)
    for _ in range(2):
        assert store.set_aside([digest]).blobs == 1
        kept = Path(os.fsdecode(store.path), "quarantine", digest.hex())
        assert kept.read_bytes() == b"suspicious"
        assert list(store.check()) == []
        commit(store, capture(store, b"suspicious"))


def test_a_missing_file_does_not_hinder(store: Store) -> None:
    commit(store, capture(store, b"app"))
    os.unlink(store.blobs.path(_digest(store)))
    assert store.remove([_digest(store)]).ids == 1
    assert list(store.check()) == []


def test_more_than_one_batch(store: Store) -> None:
    empty = _rows(store)
    count = 600
    captures = [
        capture(store, b"%d" % n, b"%08d" % n, at=sighting(b"/opt/%d/%d" % (n % 7, n)))
        for n in range(count)
    ]
    store.commit(captures)
    digests = [_digest(store, b"%08d" % n) for n in range(count)]
    assert store.remove(iter(digests)).ids == count
    assert _rows(store) == empty


def test_a_capture_of_bytes_that_were_removed_says_so(store: Store) -> None:
    commit(store, capture(store, b"app"))
    digest = _digest(store)
    store.remove([digest])
    gone = capture(store, digest)
    result = store.commit([gone, capture(store, b"other", OTHER)])
    assert result.outcomes == (
        Outcome(0, gone=True),
        Outcome(2, new_id=True, new_variant=True, new_blob=True),
    )
    assert store.index.ordinal(ID) is None
    assert list(store.check()) == []


def test_the_memo_does_not_know_removed_bytes(store: Store) -> None:
    at = sighting(b"/opt/app")
    commit(store, capture(store, b"app", at=at))
    assert store.index.recall(at.origin.identity) is not None
    store.remove([_digest(store)])
    assert store.index.recall(at.origin.identity) is None
    assert store.touch([at]) == [at]


def test_the_memo_does_not_grow_by_what_is_removed(store: Store) -> None:
    kept = 100
    for number in range(0, 1500, kept):
        held = [held.digest for held in map(store.held, store.blobs.names()) if held is not None]
        names = [number + extra for extra in range(kept)]
        commit(
            store,
            *(
                capture(store, b"%d" % each, each.to_bytes(20), at=sighting(ino=each))
                for each in names
            ),
        )
        store.remove(held)
        assert all(store.index.recall(sighting(ino=each).origin.identity) for each in names)
    assert store.stats().remembered < 3 * kept, "of 15"


def test_a_read_only_store_is_not_changed(store: Store, tmp_path: Path) -> None:
    commit(store, capture(store, b"app"))
    digest = _digest(store)
    store.close()
    with Store.open(tmp_path / "store", read_only=True) as reader:
        with pytest.raises(StoreError, match="reading only"):
            reader.remove([digest])
        assert read_blob(reader, digest) == b"app"


# --- listeners, and the time in between ----------------------------------------------------------


def test_listeners_hear_while_places_are_still_known(store: Store) -> None:
    commit(store, capture(store, b"app", at=sighting(b"/opt/app")))
    heard = []
    with contextlib.closing(store.listen()) as listener:

        def listen() -> None:
            select.select([listener], [], [], 10)
            heard.append(listener.receive())
            heard.append([each.origin.path for each in store.index.origins(1)])
            heard.append((store.index.is_going(1), store.index.kinds(1), _names(store)))
            listener.acknowledge()

        thread = threading.Thread(target=listen)
        thread.start()
        store.remove([_digest(store)])
        thread.join()
    assert heard == [[1], [b"/opt/app"], (True, 0, [])]
    assert not store.index.is_going(1)
    assert store.index.origins(1) == []


def test_what_was_cut_off_is_cleared_later(store: Store) -> None:
    empty = _rows(store)
    commit(store, capture(store, b"app", at=sighting(b"/opt/app")))
    with contextlib.closing(store.listen()):  # and never answers: the second step is not taken
        store.remove([_digest(store)])
    assert _rows(store)["gone"] == 1
    assert list(store.check()) == []
    commit(store, capture(store, b"app", at=sighting(b"/opt/app")))
    env = environment.acquire(store.path, read_only=False)
    assert removal.clear(env, [1]) == []
    environment.release(env)
    assert list(store.check()) == []
    assert store.paths.spelled(store.index.primary_path(2) or 0) == b"/opt/app"
    store.remove([_digest(store)])
    assert _rows(store) == empty


def test_paths_of_forgotten_places_are_left_to_a_sweep(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_ORIGINS", 4)
    for n in range(8):
        at = sighting(b"/opt/%d" % n, seen_ns=NOW + n * SECOND, ino=n)
        commit(store, capture(store, b"app", at=at))
    store.remove([_digest(store)])
    assert store.index.is_going(1), "some of its paths have no origin that names them"
    assert list(store.check()) == []


# --- churn ---------------------------------------------------------------------------------------


def _pages_in_use(store: Store) -> int:
    env = environment.acquire(store.path, read_only=False)
    try:
        with env.read() as txn:
            names = ["ids", *(name for name in env.tables if name != "ids")]
            stats = [txn.stat(env.tables[name]) for name in names]
    finally:
        environment.release(env)
    return sum(each["branch_pages"] + each["leaf_pages"] for each in stats)


def _captures(store: Store, numbers: range) -> list[NewCapture]:
    return [
        capture(
            store,
            os.urandom(16),
            os.urandom(20),
            at=sighting(b"/srv/%d/bin/%d" % (n % 50, n), ino=n, scope=None),
            quality=Quality.SYMTAB,
        )
        for n in numbers
    ]


@pytest.fixture
def store_in_memory() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,  # thousands of fsyncs less
        Store.create(Path(directory, "store")) as made,
    ):
        yield made


def test_the_index_does_not_grow_when_what_is_captured_is_removed(store_in_memory: Store) -> None:
    store = store_in_memory
    kept: list[Digest] = []

    def turn(start: int) -> None:
        captures = _captures(store, range(start, start + 500))
        held = [each.content for each in captures]
        result = store.commit(captures)
        assert len(result.changed) == 500
        kept.extend(content.digest for content in held if not isinstance(content, Digest))
        store.remove(kept[:-100])
        del kept[:-100]

    for start in range(0, 1500, 500):
        turn(start)
    rows, pages = _rows(store), _pages_in_use(store)
    size = os.stat(os.path.join(store.path, b"index", b"data.mdb")).st_size
    for start in range(1500, 6000, 500):
        turn(start)
    assert store.stats().blobs == 100
    after = _rows(store)
    # How many directories a hundred paths have in common is chance.
    assert {name: after[name] for name in after if name not in ("names", "paths")} == {
        name: rows[name] for name in rows if name not in ("names", "paths")
    }
    assert after["paths"] <= rows["paths"] + 100
    assert _pages_in_use(store) <= pages * 1.1 + 10
    assert os.stat(os.path.join(store.path, b"index", b"data.mdb")).st_size <= 1.1 * size
    assert list(store.check()) == []
