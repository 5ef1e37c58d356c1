# SPDX-License-Identifier: Apache-2.0
"""Rows that are not what was written: every question gets an answer, or is told of the damage."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import lmdb
import msgspec
import pytest

from buildidfs.errors import ArtifactMissing, IntegrityError, StoreError, UsageError
from buildidfs.model import BuildId, Digest, Kind, Trust
from buildidfs.store import NewSeen, Store, location_rows, schema
from buildidfs.store.index.queries import whole
from buildidfs.store.schema import HistoryRow
from tests.support.harness.captures import NOW, SECOND, capture, identity, sighting
from tests.support.harness.damages import changed_bytes

ROUNDS = 60
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
ID = BuildId(b"\xab\xcd\xef\x01")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with rows in every table."""
    path = tmp_path_factory.mktemp("rows") / "store"
    with Store.create(path) as store:
        for number in range(3):
            at = sighting(b"/usr/lib/.dwz/x%d" % number, container="docker:01", cgroup=b"/x")
            new = capture(store, b"bytes %d" % number, bytes(ID), at=at, kinds=BOTH)
            store.commit([new])
            store.note_seen([NewSeen(at, ID)])
        other = capture(store, b"other", b"\x01\x02", kinds=(Kind.VDSO,), trust=Trust.HOST)
        store.commit([other])
        for number in range(5):
            store.history.add(HistoryRow(NOW + number * 60 * SECOND, captured=number))
    return path


def damage(index: Path, chosen: random.Random) -> str:
    """Change one row, or a few; returns what was done."""
    done = []
    with lmdb.open(str(index), max_dbs=32, map_size=1 << 24) as environment:
        for _ in range(chosen.randint(1, 3)):
            name = chosen.choice(schema.TABLES)
            table = environment.open_db(name.encode(), create=False)
            with environment.begin(write=True) as txn:
                rows = list(txn.cursor(table))
                if not rows:
                    continue
                key, value = chosen.choice(rows)
                changed = changed_bytes(value, chosen)
                if chosen.random() < 0.2:
                    txn.delete(key, db=table)
                    key = changed_bytes(key, chosen)[:500] or b"\0"
                txn.put(key, changed, db=table)
                done.append(f"{name} {key.hex()}: {changed.hex()[:200]}")
    return "; ".join(done)


def questions(store: Store) -> Iterator[Callable[[], object]]:
    """All that a store can be asked."""
    yield store.stats
    yield lambda: list(store.check())
    yield lambda: list(islice(store.index.build_ids_from(), 100))
    yield lambda: list(islice(store.index.build_ids_with_prefix(b""), 100))
    yield lambda: list(islice(store.index.supplementaries(b"", None), 100))
    yield lambda: list(islice(store.journal.since(0), 100))
    yield lambda: list(store.history.since())
    yield lambda: store.index.match("ab")
    yield lambda: store.index.recall(identity())
    yield lambda: store.index.supplementary(b"x0")
    yield lambda: store.containers.number(b"docker:01")
    yield lambda: store.containers.get(1)
    yield lambda: list(islice(store.containers.every(), 100))
    yield lambda: store.containers.child(1, 0, b"usr")
    yield lambda: store.file_names.number(b"x0")
    yield lambda: list(islice(store.file_names.every(), 100))
    for number in (0, 1, 2, 3, 77):
        index, paths = store.index, store.paths
        for question in (index.build_id, index.kinds, index.origins, index.primary_path,
                         paths.spelled, paths.parent):  # fmt: skip
            yield lambda question=question, number=number: question(number)
        yield lambda number=number: list(islice(store.paths.children(number), 100))
        yield lambda number=number: list(islice(store.paths.ids(number), 100))
        yield lambda number=number: list(islice(store.file_names.ids(number), 100))
        yield lambda number=number: list(islice(store.containers.children(1, number), 100))
        for kind in Kind:
            yield lambda number=number, kind=kind: store.index.artifact(number, kind)
            yield lambda number=number, kind=kind: store.index.variants(number, kind)
            yield lambda number=number, kind=kind: store.index.artifact_variant(number, kind, 1)
    for number in range(3):
        digest = store.index.artifact(1, Kind.EXECUTABLE) if not number else None
        if digest is not None:
            yield lambda digest=digest.digest: store.held(digest)
            yield lambda digest=digest.digest: store.open_blob(digest).close()
    yield lambda: store.held(Digest(bytes(32)))


@pytest.mark.parametrize("seed", range(4))
def test_damaged_rows(sound: Path, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    told = answered = 0
    for number in range(ROUNDS):
        path = tmp_path / f"{number}"
        shutil.copytree(sound, path)
        what = damage(path / "index", chosen)
        try:
            with Store.open(path, read_only=True) as store:
                for question in questions(store):
                    answer: object = None
                    try:
                        answer = question()
                    except IntegrityError:
                        told += 1
                    except (UsageError, ArtifactMissing, StoreError):
                        pass  # of `Store.match`; and what LMDB says of a key that is none
                    else:
                        answered += 1
                    assert_sensible(answer, what)
        except (IntegrityError, StoreError):
            told += 1  # it cannot even be opened
        except AssertionError:
            raise
        except Exception as error:  # what no caller expects
            raise AssertionError(what) from error
        shutil.rmtree(path)
    assert told > 20
    assert answered > 20


def assert_sensible(answer: object, what: str) -> None:
    """What is told as a build ID is one, and so on: nobody need look again."""
    values = answer if isinstance(answer, list | tuple) else [answer]
    for value in values:
        for part in value if isinstance(value, tuple) else [value]:
            if isinstance(part, BuildId):
                assert BuildId.MIN_BYTES <= len(part) <= BuildId.MAX_BYTES, what


@pytest.mark.parametrize("trust", [-1, -4, 4, 1 << 40])
def test_trust_that_there_is_not(trust: int) -> None:
    """The last of the values is the one that is believed most."""
    row = location_rows.pack_origin(Digest(bytes(32)), 2, sighting(trust=Trust.HOST).origin, 1, 2)
    values = msgspec.msgpack.decode(row[location_rows.TIMES.size :])
    assert values.count(Trust.HOST.value) == 1
    values[values.index(Trust.HOST.value)] = trust
    with pytest.raises(IntegrityError):
        whole(location_rows.unpack_origin)(
            row[: location_rows.TIMES.size] + msgspec.msgpack.encode(values)
        )
