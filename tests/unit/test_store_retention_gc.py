# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.retention.removal: leftovers of killed processes go, and nothing else does."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import BuildId, Digest, Kind
from buildidfs.store import schema
from buildidfs.store.index import environment
from buildidfs.store.retention import removal
from buildidfs.store.retention.removal import Collected
from tests.support.harness.captures import NOW, SECOND, capture, commit, read_blob, sighting, stage

if TYPE_CHECKING:
    from buildidfs.store import Store

ID = BuildId(b"\xab\xcd\xef\x01")


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    """A store that is sound at the end."""
    yield store
    assert list(store.check(digests=True)) == []


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too young."""
    monkeypatch.setattr(removal, "GRACE_S", -10)


def _stray(store: Store, content: bytes) -> bytes:
    """A blob that no row speaks of, as a crash leaves it."""
    from buildidfs.store.blobs.verify import BlobState

    staged = stage(store, content)
    store.blobs.files.seal([staged], lambda digest: BlobState.MISSING)
    staged.close()
    return store.blobs.path(staged.digest)


def _gone(store: Store) -> int:
    return environment_entries(store)["gone"]


def environment_entries(store: Store) -> dict[str, int]:
    """Rows of each table."""
    env = environment.acquire(store.path, read_only=False)
    try:
        return env.entries()
    finally:
        environment.release(env)


def test_a_clean_store_stays_as_it_is(store: Store, at_once: None) -> None:
    commit(store, capture(store, b"app", ID, at=sighting(b"/usr/lib/.dwz/app")))
    before = environment_entries(store)
    assert store.collect() == Collected()
    assert environment_entries(store) == before
    assert store.index.supplementary(b"app") == 1


def test_blobs_without_a_row(store: Store, at_once: None) -> None:
    commit(store, capture(store, b"app", ID))
    strays = [_stray(store, b"%d" % number * 1000) for number in range(5)]
    foreign = os.path.join(os.path.dirname(strays[0]), b"README")
    Path(os.fsdecode(foreign)).write_text("of somebody else")
    found = store.collect()
    assert (found.blobs, found.bytes) == (5, 5000)
    assert not any(map(os.path.exists, strays))
    assert os.path.exists(foreign)
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact is not None
    assert read_blob(store, artifact.digest) == b"app"


def test_what_is_young_is_left_alone(store: Store) -> None:
    path = _stray(store, b"a capture that is about to be committed")
    os.utime(path, (0, 0))  # its times may be those of the original
    assert store.collect() == Collected()
    assert os.path.exists(path)


def test_a_blob_that_is_being_captured_stays(store: Store, at_once: None) -> None:
    """Between its name and its row nothing speaks of it."""
    named, proceed = threading.Event(), threading.Event()
    seal = store.blobs.files.seal

    def slowly(*args: object) -> set[Digest]:
        added = seal(*args)  # type: ignore[arg-type]
        named.set()
        proceed.wait(10)
        return added

    store.blobs.files.seal = slowly  # type: ignore[method-assign, assignment]
    new = capture(store, b"app", ID)
    threads = [
        threading.Thread(target=store.commit, args=([new],)),
        threading.Thread(target=store.collect),
    ]
    threads[0].start()
    assert named.wait(10)
    threads[1].start()
    time.sleep(0.1)
    proceed.set()
    for thread in threads:
        thread.join()
    assert store.index.ordinal(ID) == 1


def test_removals_that_were_cut_off(
    store: Store, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = environment_entries(store)
    monkeypatch.setattr(schema, "MAX_ORIGINS", 4)
    for number in range(8):  # half of its paths have no place any more that names them
        at = sighting(b"/opt/%d" % number, seen_ns=NOW + number * SECOND, ino=number)
        commit(store, capture(store, b"app", ID, at=at))
    commit(store, capture(store, b"other", b"\x12\x34", at=sighting(b"/opt/1", ino=99)))
    with contextlib.closing(store.listen()):  # and never answers
        store.remove([artifact.digest for artifact in store.index.variants(1, Kind.EXECUTABLE)])
    assert _gone(store) == 1
    assert store.collect().ids == 1
    assert _gone(store) == 0
    assert store.paths.child(store.paths.child(0, b"opt") or 0, b"7") is None
    assert list(store.check()) == []
    store.remove([artifact.digest for artifact in store.index.variants(2, Kind.EXECUTABLE)])
    rows = environment_entries(store)
    assert {name: rows[name] for name in rows if name != "seen"} == {
        name: empty[name] for name in empty if name != "seen"
    }


def test_names_of_dwz_files_that_are_gone(
    store: Store, at_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_ORIGINS", 3)
    for number in range(4):
        at = sighting(b"/lib/.dwz/%d" % number, seen_ns=NOW + number * SECOND, ino=number)
        store.commit([capture(store, b"dwz", ID, at=at, kinds=[Kind.DEBUGINFO])])
    for number in range(4, 9):
        at = sighting(b"/other/%d" % number, seen_ns=NOW + number * SECOND, ino=number)
        store.commit([capture(store, b"dwz", ID, at=at, kinds=[Kind.DEBUGINFO])])
    assert len(list(store.index.supplementaries())) >= 2
    store.remove([artifact.digest for artifact in store.index.variants(1, Kind.DEBUGINFO)])
    left = len(list(store.index.supplementaries()))
    assert left > 0, "nothing tells any more that it had those names"
    assert store.collect().names == left
    assert list(store.index.supplementaries()) == []


def test_drafts_and_uses(store: Store, at_once: None) -> None:
    root = Path(os.fsdecode(store.path))
    drafts = [root / ".format.1.2", root / "run" / "uses-1-2.draft"]
    (root / "run").mkdir(exist_ok=True)
    for path in drafts:
        path.write_bytes(b"half")
    (root / "format.old").write_bytes(b"not ours")
    assert store.collect().drafts == 2
    assert not any(path.exists() for path in drafts)
    assert (root / "format.old").exists()
    assert (root / "format").exists()


def test_the_quarantine_is_kept(store: Store, at_once: None) -> None:
    commit(store, capture(store, b"app", ID))
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact is not None
    store.set_aside([artifact.digest])
    found = store.collect()
    assert (found.quarantined, found.quarantine_bytes) == (1, 3)
    assert store.collect().quarantined == 1
