# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.check: every kind of damage is found and named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.errors import IntegrityError
from buildidfs.model import Artifact, BuildId, Digest, Kind, Quality
from buildidfs.store import NewSeen, Store, environment, schema
from buildidfs.store.environment import Environment
from tests.support.captures import capture, sighting


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two build IDs, one of them with two variants."""
    with Store.create(tmp_path / "store") as made:
        made.commit(
            [
                capture(made, b"best", b"\x01\x01", quality=Quality.SYMTAB),
                capture(made, b"other", b"\x01\x01"),
                capture(made, b"third", b"\x02\x02", at=sighting(b"/third")),
            ]
        )
        assert list(made.check(digests=True)) == []
        yield made


@pytest.fixture
def env(store: Store) -> Iterator[Environment]:
    """The index of the store, to do damage in."""
    acquired = environment.acquire(store.path, read_only=False)
    yield acquired
    environment.release(acquired)


def _best(store: Store, ordinal: int = 1) -> Artifact:
    artifact = store.artifact(ordinal, Kind.EXECUTABLE)
    assert artifact is not None
    return artifact


def _put(env: Environment, table: str, key: bytes, value: bytes) -> None:
    env.write(lambda txn: txn.put(key, value, db=env.tables[table]))


def _delete(env: Environment, table: str, key: bytes) -> None:
    assert env.write(lambda txn: txn.delete(key, db=env.tables[table]))


def _finds(store: Store, *lines: str, digests: bool = False) -> None:
    found = list(store.check(digests=digests))
    for line in lines:
        assert any(line in each for each in found), found
    assert found


def test_missing_blob(store: Store) -> None:
    digest = _best(store).digest
    os.unlink(store.blob_path(digest))
    assert list(store.check()) == [f"blob {digest} is missing"]


def test_blob_of_another_size(store: Store) -> None:
    path = store.blob_path(_best(store).digest)
    os.chmod(path, 0o600)
    os.truncate(path, 1)
    assert list(store.check()) == [f"blob {_best(store).digest} has 1 bytes instead of 4"]


def test_blob_with_other_bytes_is_found_when_bytes_are_read(store: Store) -> None:
    path = store.blob_path(_best(store).digest)
    os.chmod(path, 0o600)
    Path(os.fsdecode(path)).write_bytes(b"evil")
    assert list(store.check()) == []
    assert list(store.check(digests=True)) == [f"blob {_best(store).digest} has other bytes"]


def test_blob_without_rows_is_no_problem(store: Store) -> None:
    fd = os.memfd_create("orphan")
    os.write(fd, b"orphan")
    with store.stage(fd) as staged:
        store._blobs.seal([staged], lambda digest: False)
    os.close(fd)
    assert list(store.check(digests=True)) == []


Damage = Callable[[Store, Environment], None]

_ORDINAL = schema.U64.pack(1)
_ARTIFACT = schema.ORDINAL_KIND.pack(1, Kind.EXECUTABLE)
_VARIANT = schema.ORDINAL_KIND_VARIANT.pack(1, Kind.EXECUTABLE, 1)


def _swap(store: Store, env: Environment) -> None:
    best, other = store.variants(1, Kind.EXECUTABLE)
    worse = msgspec.structs.replace(best, variant=1, digest=other.digest)
    better = msgspec.structs.replace(other, variant=0, digest=best.digest)
    _put(env, "artifacts", _ARTIFACT, schema.pack_artifact(better))
    _put(env, "variants", _VARIANT, schema.pack_artifact(worse))


def _without_ref(store: Store, env: Environment) -> None:
    _put(env, "digests", _best(store).digest, schema.DigestRow(4).pack())


def _miscount(store: Store, env: Environment) -> None:
    _put(env, "meta", schema.COUNTERS_KEY, schema.Counters().pack())


def _other_ordinal(store: Store, env: Environment) -> None:
    _put(env, "ids", b"\x01\x01", schema.U64.pack(2))


def _miscounted_origins(store: Store, env: Environment) -> None:
    value = env.get(env.tables["ordinals"], _ORDINAL)
    assert value is not None
    row = schema.OrdinalRow.unpack(value)
    row.origins += 1
    _put(env, "ordinals", _ORDINAL, row.pack())


_DAMAGE: dict[str, tuple[Damage, str]] = {
    "id without ordinal": (_other_ordinal, "build ID 0101 has no ordinal that knows of it"),
    "id lost": (lambda _, env: _delete(env, "ids", b"\x02\x02"), "1 build IDs have 2 ordinals"),
    "counters": (_miscount, "the next ordinal would be 1, but 2 is used"),
    "counted artifacts": (_miscount, "2 artifacts of kind 1 are counted as 0"),
    "counted blobs": (_miscount, "3 blobs are counted as 0"),
    "unknown artifact": (
        lambda store, env: _put(
            env, "artifacts", _ARTIFACT[:-1] + b"\x02", schema.pack_artifact(_best(store))
        ),
        "artifact 1/2 is not known to its build ID",
    ),
    "best not served": (_swap, "variant 1 of 1/1 should be served"),
    "none served": (
        lambda _, env: _delete(env, "artifacts", _ARTIFACT),
        "there are variants of which none is served",
    ),
    "artifact without blob": (_without_ref, "artifact 1/1/0 has no blob"),
    "blob without artifact": (
        lambda _, env: _delete(env, "variants", _VARIANT),
        "has no artifact 1/1/1",
    ),
    "counted origins": (_miscounted_origins, "origins or paths of 0101 are counted wrongly"),
    "origin of nothing": (
        lambda _, env: _put(env, "origins", schema.U64.pack(9) + bytes(16), b""),
        "there are origins or paths of unknown build IDs",
    ),
    "path lost": (
        lambda _, env: _delete(env, "paths", schema.U32.pack(3)),
        "path 00000003 does not exist",
    ),
    "name lost": (
        lambda _, env: _delete(env, "names", schema.U32.pack(1) + b"bin"),
        "path 00000002 is not in its parent",
    ),
    "garbage": (
        lambda store, env: _put(env, "digests", _best(store).digest, b"x"),
        "rows that cannot be read",
    ),
}


@pytest.mark.parametrize("name", list(_DAMAGE))
def test_damage_to_the_index(store: Store, env: Environment, name: str) -> None:
    damage, line = _DAMAGE[name]
    damage(store, env)
    _finds(store, line)


def test_primary_path_that_does_not_exist(store: Store, env: Environment) -> None:
    value = env.get(env.tables["ordinals"], _ORDINAL)
    assert value is not None
    row = schema.OrdinalRow.unpack(value)
    row.primary_path = 999
    _put(env, "ordinals", _ORDINAL, row.pack())
    _finds(store, "the first path of 0101 does not exist")


def test_nothing_is_wrong_with_an_empty_store(tmp_path: Path) -> None:
    with Store.create(tmp_path / "empty") as store:
        assert list(store.check(digests=True)) == []
        assert store.held(Digest(bytes(32))) is None


def _journal_row(env: Environment) -> tuple[bytes, bytes]:
    with env.read() as txn, txn.cursor(env.tables["journal"]) as cursor:
        assert cursor.first()
        return cursor.item()


def _without_order(store: Store, env: Environment) -> None:
    key, value = _journal_row(env)
    _delete(env, "recent", value[8:16] + key)


def _without_row(store: Store, env: Environment) -> None:
    _delete(env, "journal", _journal_row(env)[0])


def _ordered_twice(store: Store, env: Environment) -> None:
    _put(env, "recent", bytes(8) + _journal_row(env)[0], b"")


def _turned_times(store: Store, env: Environment) -> None:
    key, value = _journal_row(env)
    _put(env, "journal", key, b"\xff" * 8 + value[8:])


def _garbled(store: Store, env: Environment) -> None:
    key, value = _journal_row(env)
    _put(env, "journal", key, value[:16] + b"\xc1")


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (_without_order, "has no place in the order of time"),
        (_without_order, "1 journal rows are ordered as 0"),
        (_without_row, "that is not there"),
        (_ordered_twice, "1 journal rows are ordered as 2"),
        (_turned_times, "was last seen before it was first seen"),
        (_garbled, "rows that cannot be read"),
    ],
)
def test_damage_to_the_journal(store: Store, env: Environment, damage: Damage, line: str) -> None:
    store.journal([NewSeen(sighting(), BuildId(b"\x01\x01"))])
    assert list(store.check()) == []
    damage(store, env)
    _finds(store, line)
    if damage in (_without_row, _garbled):
        with pytest.raises(IntegrityError):
            list(store.journal_since())
