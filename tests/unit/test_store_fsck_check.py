# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.fsck.check: every kind of damage is found and named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.errors import IntegrityError
from buildidfs.model import Artifact, BuildId, Digest, Kind, Quality, Standing, Trust
from buildidfs.store import NewSeen, Store, location_rows, schema
from buildidfs.store.index import environment
from buildidfs.store.index.environment import Environment
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.damages import with_new_index


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
    artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
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
    os.unlink(store.blobs.path(digest))
    assert list(store.check()) == [f"blob {digest} is missing"]


def test_blob_of_another_size(store: Store) -> None:
    path = store.blobs.path(_best(store).digest)
    os.chmod(path, 0o600)
    os.truncate(path, 1)
    assert list(store.check()) == [f"blob {_best(store).digest} has 1 bytes instead of 4"]


def test_blob_with_other_bytes(store: Store) -> None:
    path = store.blobs.path(_best(store).digest)
    os.chmod(path, 0o600)
    Path(os.fsdecode(path)).write_bytes(b"evil")
    # It was touched, so it is read in any case.
    for digests in (False, True):
        assert list(store.check(digests=digests)) == [f"blob {_best(store).digest} has other bytes"]


def test_blob_without_rows_is_no_problem(store: Store) -> None:
    fd = os.memfd_create("orphan")
    os.write(fd, b"orphan")
    with store.stage(fd) as staged:
        store.blobs.files.seal([staged], store.blobs.standing)
    os.close(fd)
    assert list(store.check(digests=True)) == []


Damage = Callable[[Store, Environment], None]

_ORDINAL = schema.U64.pack(1)
_ARTIFACT = schema.ORDINAL_KIND.pack(1, Kind.EXECUTABLE)
_VARIANT = schema.ORDINAL_KIND_VARIANT.pack(1, Kind.EXECUTABLE, 1)


def _swap(store: Store, env: Environment) -> None:
    best, other = store.index.variants(1, Kind.EXECUTABLE)
    worse = msgspec.structs.replace(best, variant=1, digest=other.digest)
    better = msgspec.structs.replace(other, variant=0, digest=best.digest)
    _put(env, "artifacts", _ARTIFACT, schema.pack_artifact(better))
    _put(env, "variants", _VARIANT, schema.pack_artifact(worse))


def _without_ref(store: Store, env: Environment) -> None:
    _put(env, "digests", _best(store).digest, schema.DigestRow(4).pack())


def _miscount(store: Store, env: Environment) -> None:
    _put(env, "meta", schema.COUNTERS_KEY, schema.StoreCounters().pack())


def _other_ordinal(store: Store, env: Environment) -> None:
    _put(env, "ids", b"\x01\x01", schema.U64.pack(2))


def _miscounted_origins(store: Store, env: Environment) -> None:
    value = env.get(env.tables["ordinals"], _ORDINAL)
    assert value is not None
    row = schema.OrdinalRow.unpack(value)
    row.origins += 1
    _put(env, "ordinals", _ORDINAL, row.pack())


def _change_named(**fields: object) -> Damage:
    def change(store: Store, env: Environment) -> None:
        value = env.get(env.tables["ordinals"], _ORDINAL)
        assert value is not None
        row = msgspec.structs.replace(schema.OrdinalRow.unpack(value), **fields)
        _put(env, "ordinals", _ORDINAL, row.pack())

    return change


def _change_digest(**fields: object) -> Damage:
    def change(store: Store, env: Environment) -> None:
        digest = _best(store).digest
        value = env.get(env.tables["digests"], digest)
        assert value is not None
        row = msgspec.structs.replace(schema.DigestRow.unpack(value), **fields)
        _put(env, "digests", digest, row.pack())

    return change


def _change_artifact(**fields: object) -> Damage:
    def change(store: Store, env: Environment) -> None:
        artifact = msgspec.structs.replace(_best(store), **fields)
        _put(env, "artifacts", _ARTIFACT, schema.pack_artifact(artifact))

    return change


def _an_origin(env: Environment) -> tuple[bytes, bytes]:
    with env.read() as txn, txn.cursor(env.tables["origins"]) as cursor:
        assert cursor.first()
        return cursor.item()


def _move_origin(store: Store, env: Environment) -> None:
    key, value = _an_origin(env)
    _delete(env, "origins", key)
    _put(env, "origins", key[:8] + bytes(16), value)


def _origin_of_another(store: Store, env: Environment) -> None:
    _, _, origin, first, last = location_rows.unpack_origin(_an_origin(env)[1])
    row = location_rows.pack_origin(Digest(b"?" * 32), 2, origin, first, last)
    _put(env, "origins", location_rows.origin_key(1, Digest(b"?" * 32), origin), row)


def _second_ordinal(store: Store, env: Environment) -> None:
    """Another number has the same build ID, and artifacts of its own."""
    _put(env, "ordinals", schema.U64.pack(2), schema.OrdinalRow(BuildId(b"\x01\x01"), 2).pack())
    _delete(env, "ids", b"\x02\x02")


def _poisoned_use(store: Store, env: Environment) -> None:
    _put(env, "uses", schema.USE.pack(0, 7, _best(store).digest), b"")


def _without_use(store: Store, env: Environment) -> None:
    value = env.get(env.tables["digests"], _best(store).digest)
    assert value is not None
    row = schema.DigestRow.unpack(value)
    _delete(env, "uses", schema.USE.pack(row.rank, row.used, _best(store).digest))


_DAMAGE: dict[str, tuple[Damage, str]] = {
    "id without ordinal": (_other_ordinal, "build ID 0101 has no ordinal that knows of it"),
    "id lost": (
        lambda _, env: _delete(env, "ids", b"\x02\x02"),
        "build ID 0202 does not lead to its number 2",
    ),
    "ordinal lost": (
        lambda _, env: _delete(env, "ordinals", _ORDINAL),
        "build ID 0101 has no ordinal that knows of it",
    ),
    "two ordinals": (_second_ordinal, "build ID 0101 does not lead to its number 2"),
    "kinds": (_change_named(kinds=0b110), "the kinds of 0101 are not those that there are"),
    "next variant": (
        _change_named(next_variant=[0, 0, 0, 0]),
        "the next variant of 1/1 would be one that there is",
    ),
    "counters": (_miscount, "the next ordinal would be 1, but 2 is used"),
    "counted paths": (_miscount, "the next path would be 1, but 4 is used"),
    "counted artifacts": (_miscount, "2 artifacts of kind 1 are counted as 0"),
    "counted blobs": (_miscount, "3 blobs are counted as 0"),
    "counted bytes": (_miscount, "14 bytes of blobs are counted as 0"),
    "counted files": (_miscount, " bytes of files of blobs are counted as 0"),
    "unknown artifact": (
        lambda store, env: _put(
            env,
            "artifacts",
            schema.ORDINAL_KIND.pack(7, 2),
            schema.pack_artifact(
                msgspec.structs.replace(_best(store), ordinal=7, kind=Kind.DEBUGINFO)
            ),
        ),
        "artifact 7/2/0 is not known to its build ID",
    ),
    "artifact of another kind": (
        lambda store, env: _put(
            env,
            "artifacts",
            _ARTIFACT[:-1] + b"\x02",
            schema.pack_artifact(msgspec.structs.replace(_best(store), kind=Kind.DEBUGINFO)),
        ),
        "artifact 1/2/0 has no blob",
    ),
    "size": (_change_artifact(size=99), "artifact 1/1/0 has 99 bytes, and its blob 4"),
    "best not served": (_swap, "variant 1 of 1/1 should be served"),
    "none served": (
        lambda _, env: _delete(env, "artifacts", _ARTIFACT),
        "there are variants of 1/1 of which none is served",
    ),
    "served twice": (
        lambda store, env: _put(
            env, "variants", _ARTIFACT + bytes(2), schema.pack_artifact(_best(store))
        ),
        "variant 0 of 1/1 is there twice",
    ),
    "variant that is another": (
        lambda store, env: _put(
            env, "variants", _ARTIFACT + b"\0\7", schema.pack_artifact(_best(store))
        ),
        "variant 1/1/7 says that it is another",
    ),
    "artifact without blob": (_without_ref, "artifact 1/1/0 has no blob"),
    "blob without artifacts": (_without_ref, "has no artifact"),
    "row of a blob lost": (
        lambda store, env: _delete(env, "digests", _best(store).digest),
        "artifact 1/1/0 has no blob",
    ),
    "blob without artifact": (
        lambda _, env: _delete(env, "variants", _VARIANT),
        "has no artifact 1/1/1",
    ),
    "artifact twice": (
        _change_digest(refs=[(1, 1, 0), (1, 1, 0)]),
        "has an artifact twice",
    ),
    "form": (_change_digest(form=77), "has a form that there is not: 77"),
    "class": (_change_digest(rank=9), "has a class that there is not: 9"),
    "no use": (_without_use, "has no place in the order of uses"),
    "used otherwise": (_change_digest(used=1), "has no place in the order of uses"),
    "use of another": (_poisoned_use, "that is not its own"),
    "going": (
        lambda _, env: _put(env, "gone", schema.U64.pack(5), b""),
        "build ID number 5 is going, and was never there",
    ),
    "pin": (
        lambda _, env: _put(env, "pins", b"\x02\x01\x01name", b"late"),
        "of pins cannot be read",
    ),
    "counted origins": (_change_named(origins=7), "origins of 0101 are counted wrongly"),
    "paths of a build ID": (_change_named(paths=7), "paths of 0101 are counted wrongly"),
    "primary path": (_change_named(primary_path=99), "the first path of 0101 does not exist"),
    "origin of nothing": (
        lambda _, env: _put(env, "origins", schema.U64.pack(9) + bytes(16), _an_origin(env)[1]),
        "is of an unknown build ID",
    ),
    "origin elsewhere": (_move_origin, "is not where it should be"),
    "origin of another blob": (_origin_of_another, "of a blob that its build ID does not have"),
    "path lost": (
        lambda _, env: _delete(env, "paths", schema.U32.pack(3)),
        "path 3 does not exist, and build ID number 1 hangs from it",
    ),
    "path of nothing": (
        lambda _, env: _put(env, "pathids", schema.PATH_ORDINAL.pack(3, 99), b""),
        "an unknown build ID number 99 hangs from path 3",
    ),
    "path without parent": (
        lambda _, env: _put(env, "paths", schema.U32.pack(3), schema.U32.pack(77) + b"x"),
        "path 3 has no parent",
    ),
    "path in a loop": (
        lambda _, env: _put(env, "paths", schema.U32.pack(1), schema.U32.pack(3) + b"x"),
        "path 1 has no parent",
    ),
    "name lost": (
        lambda _, env: _delete(env, "names", schema.U32.pack(1) + b"bin"),
        "path 2 is not in its parent",
    ),
    "name of another": (
        lambda _, env: _put(env, "names", schema.U32.pack(1) + b"other", schema.U32.pack(3)),
        "leads to a path that has another",
    ),
    "dwz": (
        lambda _, env: _put(
            env, "dwz", b"name", schema.DwzRow(99, Trust.HOST, Standing.GIVEN).pack(b"name")
        ),
        "is of an unknown build ID",
    ),
    "memo": (
        lambda _, env: _put(env, "seen", bytes(16), schema.SEEN.pack(1, 0)),
        "of seen cannot be read",
    ),
    "garbage": (
        lambda store, env: _put(env, "digests", _best(store).digest, b"x"),
        "of digests cannot be read",
    ),
    "garbage for an artifact": (
        lambda _, env: _put(env, "artifacts", _ARTIFACT, b"\0\0x"),
        "of artifacts cannot be read",
    ),
    "garbage for a variant": (
        lambda _, env: _put(env, "variants", _VARIANT, b"\0\1x"),
        "of variants cannot be read",
    ),
    "garbage for a build ID": (
        lambda _, env: _put(env, "ordinals", _ORDINAL, b"?"),
        "of ordinals cannot be read",
    ),
}


def _healed(store: Store) -> Store:
    """All is well again, and nothing that was right is lost."""
    again = with_new_index(store)
    assert list(again.check(digests=True)) == []
    commit(again, capture(again, b"later", b"\x01\x01", at=sighting(b"/later")))
    return again


@pytest.mark.parametrize("name", list(_DAMAGE))
def test_damage_to_the_index(store: Store, env: Environment, name: str) -> None:
    damage, line = _DAMAGE[name]
    damage(store, env)
    _finds(store, line)
    store = _healed(store)
    if name != "two ordinals":
        assert store.index.ordinal(b"\x02\x02") is not None
    assert store.index.ordinal(b"\x01\x01") is not None


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
        (_without_row, "that is not its own"),
        (_ordered_twice, "that is not its own"),
        (_turned_times, "was last seen before it was first seen"),
        (_garbled, "of journal cannot be read"),
    ],
)
def test_damage_to_the_journal(store: Store, env: Environment, damage: Damage, line: str) -> None:
    store.note_seen([NewSeen(sighting(), BuildId(b"\x01\x01"))])
    assert list(store.check()) == []
    damage(store, env)
    _finds(store, line)
    if damage in (_without_row, _garbled):
        with pytest.raises(IntegrityError):
            list(store.journal.since())
    store = _healed(store)
    assert len(list(store.journal.since())) == (
        damage not in (_without_row, _garbled, _turned_times)
    )
