# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.fsck: a new index is sound, whatever happened to the rows of the old one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import lmdb
import msgspec
import pytest

from buildidfs.errors import StoreDamaged, StoreVersionError
from buildidfs.model import BuildId, Kind, Quality, Trust
from buildidfs.store import NewSeen, Store, schema
from buildidfs.store.fsck import rebuild
from buildidfs.store.index import environment
from tests.support.elf.elfwriter import DWARF, SYMTAB, TEXT, TEXT_SPLIT, Section, elf_file
from tests.support.harness.captures import capture, read_blob, sighting
from tests.support.harness.damages import changed_bytes, with_new_index

ID, OTHER = BuildId(b"\xab\xcd\xef\x01"), BuildId(b"\x01\x02\x03")
STRIPPED = elf_file([TEXT], build_id=ID)
DEBUG = elf_file([TEXT_SPLIT, SYMTAB, DWARF], build_id=ID)
BARE = elf_file([TEXT, Section(b".comment", b"without a build ID")])


def _fill(store: Store) -> None:
    """Rows in every table."""
    for number, (content, kinds, quality) in enumerate(
        [
            (STRIPPED, (Kind.EXECUTABLE,), Quality.NONE),
            (DEBUG, (Kind.DEBUGINFO,), Quality.DEBUGINFO),
            (BARE, (Kind.EXECUTABLE,), Quality.NONE),
        ]
    ):
        at = sighting(b"/usr/lib/.dwz/x%d" % number, container="docker:01", cgroup=b"/x")
        store.commit([capture(store, content, ID, at=at, kinds=kinds, quality=quality)])
        store.note_seen([NewSeen(at, ID)])
    store.commit([capture(store, b"symbols", OTHER, kinds=(Kind.KALLSYMS,), trust=Trust.HOST)])


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repair") / "store"
    with Store.create(path) as store:
        _fill(store)
        assert list(store.check(digests=True)) == []
    return path


def _damage(index: Path, chosen: random.Random) -> str:
    """Change some rows; returns what was done."""
    done = []
    with lmdb.open(str(index), max_dbs=32, map_size=1 << 24) as env:
        for _ in range(chosen.randint(1, 5)):
            name = chosen.choice(schema.TABLES)
            table = env.open_db(name.encode(), create=False)
            with env.begin(write=True) as txn:
                rows = list(txn.cursor(table))
                if not rows:
                    continue
                key, value = chosen.choice(rows)
                how = chosen.random()
                if how < 0.3:
                    txn.delete(key, db=table)
                if 0.1 < how < 0.3:
                    key = changed_bytes(key, chosen)[:500] or b"\0"
                if how > 0.1:
                    value = changed_bytes(value, chosen)
                    txn.put(key, value, db=table)
                done.append(f"{name} {key.hex()}: {value.hex()[:200]}")
    return "; ".join(done)


@pytest.mark.parametrize("seed", range(3))
def test_a_new_index_of_any_rows_is_sound(sound: Path, tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    mended = 0
    for number in range(15):
        path = tmp_path / f"{number}"
        shutil.copytree(sound, path)
        what = _damage(path / "index", chosen)
        try:
            with Store.open(path) as store:
                found = list(store.check(digests=True))
            rebuild.rebuild(path)
            with Store.open(path) as store:
                assert list(store.check(digests=True)) == [], what
                mended += bool(found)
                _fill(store)
                assert list(store.check(digests=True)) == [], what
                assert store.index.ordinal(ID) is not None
        except (StoreDamaged, StoreVersionError):
            rebuild.rebuild(path)  # of the row of meta
            Store.open(path).close()
        shutil.rmtree(path)
    assert mended > 5


def _poison(store: Store, table: str, key: bytes, value: bytes) -> None:
    env = environment.acquire(store.path, read_only=False)
    try:
        env.write(lambda txn: txn.put(key, value, db=env.tables[table]))
    finally:
        environment.release(env)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store.create(tmp_path / "store")
    _fill(made)
    return made


def test_a_build_id_that_the_bytes_do_not_have(store: Store) -> None:
    """Somebody wrote another build ID into the index: the bytes decide."""
    with store:
        value = schema.OrdinalRow(BuildId(b"\x66\x66"), 0b110, 1, 3, 1, [2, 1, 0, 0]).pack()
        _poison(store, "ordinals", schema.U64.pack(1), value)
        _poison(store, "ids", b"\x66\x66", schema.U64.pack(1))
        found = list(store.check(digests=True))
        assert (
            sum("is of build ID abcdef01, and the index says 6666" in line for line in found) == 2
        )
        store = with_new_index(store)
        assert list(store.check(digests=True)) == []
        ordinal = store.index.ordinal(ID)
        assert ordinal is not None
        debug = store.index.artifact(ordinal, Kind.DEBUGINFO)
        assert debug is not None
        assert read_blob(store, debug.digest) == DEBUG


@pytest.mark.parametrize("value", [b"\xc8", b"\0\1" + bytes(80)], ids=["cut", "zeros"])
def test_a_variant_beside_one_that_is_written_down(store: Store, value: bytes) -> None:
    """What the program headers of one say may have another served: if that can be told."""
    with store:
        key = schema.ORDINAL_KIND_VARIANT.pack(1, Kind.EXECUTABLE, 1)
        _poison(store, "variants", key, value)
        found = list(store.check(digests=True))
        assert any(f"row {key.hex()} of variants" in line for line in found)
        store = with_new_index(store)
        assert list(store.check(digests=True)) == []


def test_a_number_of_a_build_id_that_is_none(store: Store) -> None:
    """Too long a key, with a row that is right but for its counts."""
    with store:
        value = schema.OrdinalRow(BuildId(b"\x66\x66"), 0b110, 1, 3, 1, [2, 1, 0, 0]).pack()
        key = schema.U64.pack(2) * 2
        _poison(store, "ordinals", key, value)
        found = list(store.check())
        assert any(f"row {key.hex()} of ordinals" in line for line in found)
        store = with_new_index(store)
        assert list(store.check(digests=True)) == []


def test_attributes_that_the_bytes_do_not_have(store: Store) -> None:
    for field in ({"quality": Quality.NONE}, {"segments": 77}):
        ordinal = store.index.ordinal(ID) or 0
        artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
        assert artifact is not None
        poisoned = msgspec.structs.replace(artifact, **field)
        key = schema.ORDINAL_KIND.pack(ordinal, Kind.DEBUGINFO)
        _poison(store, "artifacts", key, schema.pack_artifact(poisoned))
        assert list(store.check()) == []
        assert len(list(store.check(digests=True))) == 1
        store = with_new_index(store)
        assert list(store.check(digests=True)) == []
        again = store.index.artifact(store.index.ordinal(ID) or 0, Kind.DEBUGINFO)
        assert again is not None
        assert (again.quality, again.segments) == (Quality.DEBUGINFO, artifact.segments)
    store.close()


def test_a_kind_that_the_bytes_are_not(store: Store) -> None:
    with store:
        executable = store.index.artifact(1, Kind.EXECUTABLE)
        assert executable is not None
        poisoned = msgspec.structs.replace(executable, kind=Kind.DEBUGINFO, variant=9)
        key = schema.ORDINAL_KIND_VARIANT.pack(1, Kind.DEBUGINFO, 9)
        _poison(store, "variants", key, schema.pack_artifact(poisoned))
        assert list(store.check(digests=True)) != []
        store = with_new_index(store)
        assert list(store.check(digests=True)) == []
        ordinal = store.index.ordinal(ID) or 0
        assert len(store.index.variants(ordinal, Kind.DEBUGINFO)) == 1
        assert len(store.index.variants(ordinal, Kind.EXECUTABLE)) == 2
