# SPDX-License-Identifier: Apache-2.0
"""What is found by place, when blobs go, rows are damaged, and stores are made anew."""

from __future__ import annotations

import contextlib
import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import EVERYBODY, OWNER, BuildId, Kind
from buildidfs.store import Store, schema
from buildidfs.store.fsck import rebuild
from buildidfs.store.index import environment
from buildidfs.store.index.locations import NAMES
from buildidfs.store.location_rows import (
    VALUE,
    ContainerRow,
    pack_container,
    pack_entry,
    unpack_container,
)
from buildidfs.store.retention import removal
from buildidfs.store.retention.eviction import Policy
from buildidfs.store.write import containers as write_containers
from buildidfs.view import PUBLIC, View, Viewer, nodes
from tests.support.harness.browsed import (
    by_name,
    container,
    container_names,
    files_of,
    ordinal_of,
    put_row,
    row_of,
    see,
    seen_in,
)
from tests.support.harness.captures import capture, commit, sighting
from tests.support.harness.damages import with_new_index

if TYPE_CHECKING:
    from buildidfs.model import Sighting
    from buildidfs.store.index.environment import Environment

DIGESTS = tuple(f"sha256:{digit * 64}" for digit in "abc")
BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)


@pytest.fixture
def env(store: Store) -> Iterator[Environment]:
    found = environment.acquire(store.path, read_only=False)
    yield found
    environment.release(found)


def _delete(env: Environment, table: str, key: bytes) -> None:
    assert env.write(lambda txn: txn.delete(key, db=env.tables[table]))


def _limit(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(write_containers, name, value)


# --- who may know of places ----------------------------------------------------------------------


def _public(store: Store, ordinal: int = 1) -> dict[str, bool]:
    """Of everything that tells of /a/.dwz/app, in a container or not, whether everybody may know
    of it.
    """
    number = store.paths.child(0, b"a")
    dwz = None if number is None else store.paths.child(number, b".dwz")
    app = None if dwz is None else store.paths.child(dwz, b"app")
    name = store.file_names.number(b"app")
    assert number is not None
    assert dwz is not None
    assert app is not None
    assert name is not None
    top = store.containers.child(1, 0, b"a")
    assert top is not None
    below = store.containers.child(1, top.directory, b".dwz")
    assert below is not None
    file = store.containers.child(1, below.directory, b"app")
    assert file is not None
    assert file.kind == Kind.EXECUTABLE
    return {
        "path": store.paths.is_public(0, b"a") and store.paths.is_public(number, b".dwz"),
        "last of path": store.paths.is_public(dwz, b"app"),
        "build ID at path": store.paths.has_publicly(app, ordinal),
        "name": store.file_names.is_public(b"app"),
        "build ID by name": store.file_names.has_publicly(name, ordinal),
        "container": container(store, b"box").public,
        "directory": top.public and below.public,
        "file": file.public,
        "dwz": store.index.is_public_supplementary(b"app"),
    }


def _app(**changes: Any) -> Sighting:
    return seen_in("box", b"/a/.dwz/app", **changes)


@pytest.mark.parametrize(
    "private", [{"mode": 0o100700}, {"reach": OWNER}, {"reach": 0}], ids=["mode", "reach", "none"]
)
def test_places_are_public_when_everybody_could_read_there(
    store: Store, private: dict[str, int]
) -> None:
    see(store, b"1", _app(**private), build_id=b"\x01\x01")
    assert set(_public(store).values()) == {False}
    see(store, b"1", seen_in("box", b"/a/other"), build_id=b"\x01\x01")
    assert {what for what, is_so in _public(store).items() if is_so} == {"container"}
    see(store, b"1", _app(at=90), build_id=b"\x01\x01")
    assert set(_public(store).values()) == {True}
    see(store, b"1", _app(at=180, **private), build_id=b"\x01\x01")
    assert set(_public(store).values()) == {True}, "what everybody could know once"
    assert list(store.check()) == []


def test_a_place_is_asked_for_again_when_it_is_recognised(store: Store) -> None:
    """A scan that recognises a file may know who could get at it, or not."""
    see(store, b"1", _app(reach=OWNER), build_id=b"\x01\x01")
    assert store.touch([_app(reach=0, at=90)]) == []
    assert set(_public(store).values()) == {False}
    assert store.touch([_app(at=91)]) == [], "within a minute of the last"
    assert set(_public(store).values()) == {True}
    assert store.touch([_app(reach=0, at=200)]) == []
    assert [record.origin.reach for record in store.index.origins(1)] == [EVERYBODY]


def test_a_place_is_known_with_its_reach_alone(store: Store) -> None:
    known, unasked = _app(), _app(reach=0)
    assert not store.index.knows_place(known.origin)
    see(store, b"1", unasked, build_id=b"\x01\x01")
    assert not store.index.knows_place(known.origin)
    see(store, b"1", known, build_id=b"\x01\x01")
    assert store.index.knows_place(unasked.origin)
    assert not store.index.knows_place(seen_in("box", b"/a/other").origin)
    assert not store.index.knows_place(_app(ino=99).origin), "another file"


def test_places_are_as_public_in_a_new_index(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        see(store, b"1", _app(reach=OWNER), build_id=b"\x01\x01")
        see(store, b"2", _app(at=1), build_id=b"\x02\x02")
        see(store, b"2", seen_in("box", b"/b", reach=OWNER), build_id=b"\x02\x02")
        before = _public(store, ordinal_of(store, b"\x02\x02"))
        assert not store.paths.has_publicly(_path(store, b"a", b".dwz", b"app"), 1)
    (tmp_path / "store/index/data.mdb").unlink()
    rebuild.rebuild(tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        private, public = (ordinal_of(store, build_id) for build_id in (b"\x01\x01", b"\x02\x02"))
        app = _path(store, b"a", b".dwz", b"app")
        assert not store.paths.has_publicly(app, private)
        assert store.paths.has_publicly(app, public)
        assert before["file"]
        assert list(store.check()) == []


def _path(store: Store, *names: bytes) -> int:
    number = 0
    for name in names:
        number = store.paths.child(number, name) or 0
    return number


def test_primary_path_is_a_public_one_if_there_is_one(store: Store) -> None:
    see(store, b"1", sighting(b"/private/app", reach=OWNER), build_id=b"\x01\x01")
    first = store.index.primary_path(1)
    see(store, b"1", sighting(b"/public/app"), build_id=b"\x01\x01")
    chosen = store.index.primary_path(1)
    see(store, b"1", sighting(b"/later/app"), build_id=b"\x01\x01")
    assert [store.paths.spelled(number or 0) for number in (first, chosen)] == [
        b"/private/app", b"/public/app",
    ]  # fmt: skip
    assert store.index.primary_path(1) == chosen


# --- removal -------------------------------------------------------------------------------------


def test_what_is_removed_is_in_no_container(store: Store) -> None:
    one = see(store, b"1", seen_in("box", b"/a/b/c"))
    see(store, b"2", seen_in("box", b"/a/d"))
    store.remove([one])
    assert files_of(store, b"box") == {b"/a/d": b"id:2"}
    directory = store.containers.child(1, 0, b"a")
    assert directory is not None
    names = [entry.name for entry in store.containers.children(1, directory.directory)]
    assert names == [b"d"], "a directory that is empty goes"
    assert by_name(store).keys() == {b"d"}
    assert list(store.check()) == []


def test_the_last_file_takes_the_container_along(store: Store, env: Environment) -> None:
    digest = see(store, b"1", seen_in("box", b"/a/b/c"))
    see(store, b"2", seen_in("other"))
    store.remove([digest])
    assert container_names(store) == [b"other"]
    assert store.containers.number(b"box") is None
    assert env.entries()["contents"] == 3
    assert list(store.check()) == []
    see(store, b"3", seen_in("box"))
    assert container(store, b"box").number == 3, "numbers are not used again"


def test_what_took_the_place_of_what_is_removed(store: Store) -> None:
    one = see(store, b"1", seen_in("box"))
    see(store, b"2", seen_in("box", at=1))
    store.remove([one])
    assert files_of(store, b"box") == {b"/usr/bin/app": b"id:2"}


def test_one_variant_of_several(store: Store) -> None:
    one = see(store, b"1", seen_in("one"), build_id=b"\x01\x01")
    see(store, b"2", seen_in("two"), build_id=b"\x01\x01")
    store.remove([one])
    assert container_names(store) == [b"two"]
    assert files_of(store, b"two") == {b"/usr/bin/app": b"\x01\x01"}
    assert by_name(store) == {b"app": {1}}


def test_retention_and_gc_leave_nothing(store: Store, env: Environment) -> None:
    for number in range(5):
        see(store, b"%d" % number, seen_in(f"box{number}", b"/d/%d" % number))
    removal.collect(env)
    assert len(container_names(store)) == 5
    plan = store.plan(Policy(max_size=0), lambda digest: None)
    removed = store.remove([choice.candidate.digest for choice in plan])
    assert removed.blobs == 5
    removal.collect(env)
    assert container_names(store) == []
    for table in ("contents", "labels", "containers", "nameids", "pathids", "paths", "names"):
        assert env.entries()[table] == 0, table


def test_a_removal_that_was_cut_off_is_finished(
    store: Store, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = see(store, b"1", seen_in("box"))
    with monkeypatch.context() as patch:
        patch.setattr("buildidfs.store.coordination.announce", lambda *args: False)
        store.remove([digest])
    assert container_names(store) == [b"box"], "until the mounts were told"
    assert files_of(store, b"box") == {}
    removal.collect(env)
    assert container_names(store) == []
    assert list(store.check()) == []


def test_places_that_were_forgotten(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 places at most is remembered what they had; the rest is not shown any more."""
    monkeypatch.setattr(schema, "MAX_ORIGINS", 3)
    for number in range(8):
        digest = see(store, b"x", seen_in(f"box{number}", b"/d/%d" % number, at=number * 100))
    assert len(store.index.origins(1)) == 3
    store.remove([digest])
    removal.collect(store.checker().env)
    assert all(files_of(store, name) == {} for name in container_names(store))
    assert list(store.check()) == []
    assert by_name(store) == {}


# --- by name -------------------------------------------------------------------------------------


def test_two_paths_with_the_same_name(store: Store) -> None:
    both = [b"/usr/bin/app", b"/opt/bin/app"]
    one = see(store, b"1", sighting(both[0]), build_id=b"\x01\x01")
    two = see(store, b"2", sighting(both[1]), build_id=b"\x01\x01")
    see(store, b"3", sighting(both[1]), build_id=b"\x01\x02")
    assert by_name(store) == {b"app": {1, 2}}
    store.remove([one])
    assert by_name(store) == {b"app": {1, 2}}, "it still has the other path"
    assert list(store.check()) == []
    store.remove([two])
    assert by_name(store) == {b"app": {2}}
    assert list(store.check()) == []


def test_file_names_resume_behind_a_number(store: Store) -> None:
    names = [*sorted(b"%d" % number for number in range(150)), b"\xff\xfe", b"\xff" * 255]
    commit(store, *(
        capture(store, b"x", b"\x01%03d" % n, at=sighting(b"/d/" + name))
        for n, name in enumerate(names)
    ))  # fmt: skip
    whole = list(store.file_names.every())
    assert [name for name, _ in whole] == names
    for index in (0, 63, 64, len(names) - 1):
        assert list(store.file_names.every(whole[index][1])) == whole[index + 1 :]
    assert list(store.file_names.every(2**31 - 1)) == []
    assert all(store.file_names.number(name) == number for name, number in whole)
    for name in (b"", b"d", b"x" * 256, b"0\0"):
        assert store.file_names.number(name) is None


def test_ids_with_a_name_resume_behind_an_ordinal(store: Store) -> None:
    commit(store, *(
        capture(store, b"x", b"\x01%03d" % n, at=sighting(b"/d%d/app" % n)) for n in range(100)
    ))  # fmt: skip
    number = store.file_names.number(b"app")
    assert number is not None
    assert list(store.file_names.ids(number)) == list(range(1, 101))
    assert list(store.file_names.ids(number, 90)) == list(range(91, 101))
    assert store.file_names.has(number, 1)
    assert not store.file_names.has(number, 101)


def test_debuginfo_has_paths_that_are_not_primary(store: Store) -> None:
    executable = see(store, b"1", sighting(b"/usr/bin/app"), build_id=b"\x01\x01")
    see(store, b"2", sighting(b"/usr/lib/debug/app.debug"), Kind.DEBUGINFO, build_id=b"\x01\x01")
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == b"/usr/bin/app"
    assert by_name(store) == {b"app": {1}, b"app.debug": {1}}
    store.remove([executable])
    assert store.index.primary_path(1) is None
    assert by_name(store) == {b"app.debug": {1}}
    assert store.paths.child(0, b"usr") is not None
    assert list(store.check()) == []
    see(store, b"3", sighting(b"/opt/app"), build_id=b"\x01\x01")
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == b"/opt/app"


def test_debuginfo_alone_has_no_primary_path(store: Store) -> None:
    digest = see(store, b"1", sighting(b"/d/app.debug"), Kind.DEBUGINFO)
    assert store.index.primary_path(1) is None
    assert store.paths.child(0, b"d") is not None
    store.remove([digest])
    assert store.paths.child(0, b"d") is None
    assert list(store.check()) == []


def test_debuginfo_at_the_path_of_its_executable(store: Store) -> None:
    """An executable that was stripped in place later."""
    executable = see(store, b"1", sighting(b"/usr/bin/app"), build_id=b"\x01\x01")
    see(store, b"2", sighting(b"/usr/bin/app"), Kind.DEBUGINFO, build_id=b"\x01\x01")
    store.remove([executable])
    assert store.index.primary_path(1) is None
    assert by_name(store) == {b"app": {1}}
    assert list(store.check()) == []


# --- damage --------------------------------------------------------------------------------------


def _container_row(env: Environment, number: int) -> tuple[int, int, ContainerRow]:
    value = row_of(env, "containers", schema.U32.pack(number))
    found, row = unpack_container(number, value)
    return found.first_seen_ns, found.last_seen_ns, row


def _change(number: int = 1, **fields: object) -> Callable[[Environment], None]:
    def change(env: Environment) -> None:
        first, last, row = _container_row(env, number)
        value = pack_container(first, last, msgspec.structs.replace(row, **fields))
        put_row(env, "containers", schema.U32.pack(number), value)

    return change


def _entry_key(env: Environment, name: bytes) -> bytes:
    """The key of the row of *contents* with that name, in the first container."""
    with env.read() as txn, txn.cursor(env.tables["contents"]) as cursor:
        return next(
            key for key, value in cursor
            if value[VALUE.size :].partition(b"\0")[0] == name and key[:4] == b"\0\0\0\1"
        )  # fmt: skip


def _moved(env: Environment, name: bytes, to: Callable[[bytes], bytes]) -> bytes:
    """Write a row of *contents* under another key, as if it belonged there; its own key."""
    key = _entry_key(env, name)
    directory, *artifact, stamp = VALUE.unpack_from(row_of(env, "contents", key))
    there = to(key)
    put_row(env, "contents", there, pack_entry(there, name, directory, tuple(artifact), stamp))
    return key


def _wrong_entry(name: bytes, value: bytes) -> Callable[[Environment], None]:
    def damage(env: Environment) -> None:
        key = _entry_key(env, name)
        directory, *artifact, stamp = VALUE.unpack(value)
        ordinal, kind, variant = artifact
        row = pack_entry(key, name, directory, (ordinal, kind, variant), stamp)
        put_row(env, "contents", key, row)

    return damage


def _other_place(env: Environment) -> None:
    key = _moved(env, b"app", lambda key: key[:8] + schema.U64.pack(77))
    _delete(env, "contents", key)


def _times(env: Environment) -> None:
    _, last, row = _container_row(env, 1)
    put_row(env, "containers", schema.U32.pack(1), pack_container(last + 5, last, row))


def _name_key(env: Environment, name: bytes, ordinal: int = 1) -> bytes:
    return row_of(env, "names", schema.U32.pack(NAMES) + name)[:4] + schema.U64.pack(ordinal)


DAMAGES: dict[str, tuple[Callable[[Environment], None], str]] = {
    "label-gone": (lambda env: _delete(env, "labels", b"box"), "is not found under its name"),
    "label-of-nothing": (
        lambda env: put_row(env, "labels", b"box", schema.U32.pack(99)),
        "container 1 is not found under its name",
    ),
    "label-of-another": (
        lambda env: put_row(env, "labels", b"box", schema.U32.pack(2)), "not found under its name",
    ),
    "label-too-many": (
        lambda env: put_row(env, "labels", b"alias", schema.U32.pack(1)), "or has another",
    ),
    "label-short": (
        lambda env: put_row(env, "labels", b"box", b"\1"), "is not found under its name",
    ),
    "two-of-a-name": (
        lambda env: put_row(env, "containers", schema.U32.pack(3),
                         row_of(env, "containers", schema.U32.pack(1))),
        "container 3 has the name of another",
    ),
    "container-garbage": (
        lambda env: put_row(env, "containers", schema.U32.pack(1), b"x" * 20),
        "row 00000001 of containers cannot be read",
    ),
    "container-gone": (
        lambda env: _delete(env, "containers", schema.U32.pack(1)),
        "leads to a container that there is not",
    ),
    "container-without-name": (_change(name=b""), "no number, or no name"),
    "container-beyond": (
        lambda env: put_row(env, "containers", schema.U32.pack(2**31), b""),
        "row 80000000 of containers",
    ),
    "seen-last-before-first": (_times, "was last seen before it was first seen"),
    "too-many-rows-counted": (_change(entries=60_000), "rows of container 1 are counted wrongly"),
    "too-few-rows-counted": (_change(entries=0), "rows of container 1 are counted wrongly"),
    "directory-number-again": (_change(next_directory=1), "the next directory of container"),
    "entry-short": (
        lambda env: put_row(env, "contents", _entry_key(env, b"app"), b"\0"), "of contents",
    ),
    "entry-of-another-name": (_other_place, "not where its name belongs"),
    "entry-of-no-container": (
        lambda env: _moved(env, b"app", lambda key: b"\0\0\0\x63" + key[4:]),
        "is of no container",
    ),
    "directory-in-itself": (
        _wrong_entry(b"bin", schema.U32.pack(1) + bytes(15)), "not where its name belongs",
    ),
    "directory-of-a-huge-number": (
        _wrong_entry(b"bin", b"\xff" * 4 + bytes(15)), "not where its name belongs",
    ),
    "name-gone": (
        lambda env: _delete(env, "nameids", _name_key(env, b"app")), "file names of paths",
    ),
    "name-counted-twice": (
        lambda env: put_row(env, "nameids", _name_key(env, b"app"), schema.U16.pack(7)),
        "file names of paths are counted wrongly",
    ),
    "name-of-nobody": (
        lambda env: put_row(env, "nameids", _name_key(env, b"app", 77), schema.U16.pack(1)),
        "an unknown build ID number 77 hangs from path",
    ),
    "name-of-a-path": (
        lambda env: put_row(env, "nameids", schema.PATH_ORDINAL.pack(1, 1), schema.U16.pack(1)),
        "which is the number of a path",
    ),
    "name-of-no-path": (
        lambda env: put_row(env, "nameids", schema.PATH_ORDINAL.pack(999, 1), schema.U16.pack(1)),
        "path 999 does not exist",
    ),
    "name-short": (
        lambda env: put_row(env, "nameids", _name_key(env, b"app"), b""),
        "of nameids cannot be read",
    ),
    "names-all-gone": (
        lambda env: env.write(lambda txn: txn.drop(env.tables["nameids"], delete=False)),
        "file names of paths are counted wrongly",
    ),
}  # fmt: skip


def _ids_by_name(store: Store) -> dict[bytes, set[BuildId | None]]:
    """File names, and the build IDs that have each."""
    return {name: set(map(store.index.build_id, ids)) for name, ids in by_name(store).items()}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_mended(store: Store, env: Environment, kind: str) -> None:
    see(store, b"1", seen_in("box", b"/usr/bin/app"), build_id=b"\x01\x01")
    see(store, b"2", seen_in("box", b"/opt/app"), build_id=b"\x01\x01")
    see(store, b"3", seen_in("other", b"/usr/bin/tool"), build_id=b"\x01\x02")
    before, names = files_of(store, b"box"), _ids_by_name(store)
    do, text = DAMAGES[kind]
    do(env)
    found = list(store.check())
    assert any(text in line for line in found), found
    store = with_new_index(store)
    assert list(store.check()) == []
    assert _ids_by_name(store) == names
    assert files_of(store, b"other") == {b"/usr/bin/tool": b"\x01\x02"}
    assert files_of(store, b"box") == before
    store.close()


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_keeps_nobody_from_writing(store: Store, env: Environment, kind: str) -> None:
    """What is there for people must not be in the way of what is captured, or removed."""
    one = see(store, b"1", seen_in("box", b"/usr/bin/app"), build_id=b"\x01\x01")
    see(store, b"3", seen_in("other", b"/usr/bin/tool"), build_id=b"\x01\x02")
    DAMAGES[kind][0](env) if kind != "directory-number-again" else _change(next_directory=1)(env)
    store.commit([
        capture(store, b"2", b"\x01\x01", at=seen_in("box", b"/opt/app")),
        capture(store, b"4", b"\x01\x04", at=seen_in("box", b"/usr/bin/app", at=9)),
    ])  # fmt: skip
    assert store.index.ordinal(b"\x01\x04") is not None
    store.remove([one])
    with with_new_index(store) as again:
        assert list(again.check()) == []


def test_reading_damaged_rows_says_so(store: Store, env: Environment) -> None:
    see(store, b"1", seen_in("box", b"/app"))
    put_row(env, "contents", _entry_key(env, b"app"), b"\0app")
    with pytest.raises(IntegrityError, match="a row of the index is damaged"):
        list(store.containers.children(1, 0))
    put_row(env, "containers", schema.U32.pack(1), b"x" * 20)
    for question in (lambda: list(store.containers.every()), lambda: store.containers.get(1)):
        with pytest.raises(IntegrityError, match="a row of the index is damaged"):
            question()


def test_an_old_container_that_is_damaged_is_evicted(
    store: Store, env: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(store, b"1", seen_in("box", b"/app"))
    put_row(env, "containers", schema.U32.pack(1), bytes(20))
    _limit(monkeypatch, MAX_CONTAINERS=1)
    store.commit([capture(store, b"2", b"\x01\x02", at=seen_in("other"))])
    assert container_names(store) == [b"other"]
    with with_new_index(store) as again:
        assert list(again.check()) == []


# --- whatever happens ----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_commits_and_removals(
    store: Store, env: Environment, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chosen = random.Random(seed)
    _limit(monkeypatch, MAX_ENTRIES=12, MAX_CONTAINERS=4, MAX_CONTENTS=40, _EVICTED_AT_ONCE=5)
    if seed % 2:
        monkeypatch.setattr(schema, "MAX_ORIGINS", 4)
    paths = [b"/a", b"/a/b", b"/a/b/c", b"/usr/bin/app", b"/usr/app", b"/opt/app", b"/usr/\xff"]
    labels = ["", "box", "mnt:5", "mnt:6", "image:x", "docker:01", "very/odd~%"]
    for turn in range(120):
        if chosen.random() < 0.75:
            new = []
            for _ in range(chosen.randint(1, 5)):
                at = seen_in(
                    chosen.choice(labels), chosen.choice(paths), at=chosen.randrange(10_000),
                    mnt_ns_id=chosen.randrange(3), ino=chosen.randrange(3),
                    host=chosen.choice(["", f"{chosen.choice(DIGESTS)}/l"]),
                )  # fmt: skip
                kinds = chosen.choice([BOTH, BOTH[:1], BOTH[1:], (Kind.VDSO,)])
                content = b"%d" % chosen.randrange(12)
                new.append(
                    capture(store, content, b"\1%d" % chosen.randrange(5), at=at, kinds=kinds)
                )
            store.commit(new)
        else:
            known = sorted(store.blobs.names())
            store.remove(chosen.sample(known, min(len(known), chosen.randint(1, 3))))
        if chosen.random() < 0.1:
            removal.collect(env)
        assert list(store.check()) == [], turn
        for name in container_names(store):
            assert len(files_of(store, name)) <= 12
    _expect_names(store)
    store.remove(list(store.blobs.names()))
    removal.collect(env)
    assert list(store.check()) == []
    for table in ("nameids", "pathids", "paths", "names"):
        assert env.entries()[table] == 0, table
    assert all(files_of(store, name) == {} for name in container_names(store))


def _expect_names(store: Store) -> None:
    """by-name is what the last names of paths say."""
    found: dict[bytes, set[int]] = {}
    waiting = [(0, b"")]
    while waiting:
        number, name = waiting.pop()
        if ordinals := set(store.paths.ids(number)):
            found.setdefault(name, set()).update(ordinals)
        waiting += [(child, below) for below, child in store.paths.children(number)]
    assert by_name(store) == found


# --- lost indices --------------------------------------------------------------------------------


def test_an_index_that_is_made_again(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        for number in range(3):
            # Only what is kept beside a blob says which build ID it has: these are no ELF files.
            at = seen_in("box", b"/d/%d" % number, at=number, host=f"{DIGESTS[0]}/l")
            see(store, b"%d" % number, at, Kind.VDSO if number == 2 else Kind.EXECUTABLE)
        before = files_of(store, b"box"), by_name(store)
    result = rebuild.rebuild(tmp_path / "store")
    with Store.open(tmp_path / "store") as store:
        assert result.blobs == len(set(store.blobs.names())) == 3
        assert (files_of(store, b"box"), set(by_name(store))) == (
            before[0], set(before[1]),
        )  # fmt: skip
        assert container(store, b"box").called.image == DIGESTS[0]
        assert container(store, b"box").last_seen_ns <= time.time_ns()
        assert list(store.check(digests=True)) == []


# --- rows that hold anything ---------------------------------------------------------------------

TABLES = ("containers", "labels", "contents", "nameids", "names", "paths", "pathids")


def _spoil(env: Environment, chosen: random.Random) -> None:
    """Change, move or drop a row of one of the tables."""
    table = chosen.choice(TABLES)
    with env.read() as txn, txn.cursor(env.tables[table]) as cursor:
        rows = list(cursor)
    if not rows:
        return
    key, value = chosen.choice(rows)
    how = chosen.randrange(4)
    data = bytearray(value)
    if how == 0 and data:
        data[chosen.randrange(len(data))] = chosen.choice((0, 1, 0x7F, 0x80, 0xFF))
    elif how == 1:
        data = data[: chosen.randrange(len(data) + 1)]
    elif how == 2:
        other = bytearray(key)
        other[chosen.randrange(len(other))] = chosen.randrange(256)
        key = bytes(other)
    else:
        _delete(env, table, key)
        return
    put_row(env, table, key, bytes(data))


def _walk(view: View, reader: Viewer | None) -> int:
    """Go everywhere in the trees for people; returns how many names there were."""
    waiting = [nodes.BY_PATH, nodes.BY_NAME, nodes.CONTAINERS]
    count = 0
    while waiting and count < 3000:
        try:
            for _, node, _ in view.children(waiting.pop(), 0, reader):
                count += 1
                if view.file_type(node) == stat.S_IFDIR:
                    waiting.append(node)
                view.attributes(node)
                view.extended(node)
        except (OSError, IntegrityError):
            continue
    return count


@pytest.mark.parametrize("seed", range(2))
def test_rows_with_anything_in_them(store: Store, env: Environment, seed: int) -> None:
    chosen = random.Random(seed)
    for number in range(12):
        path = b"/" + b"/".join(chosen.choices((b"a", b"b", b"usr"), k=chosen.randint(1, 4)))
        see(
            store,
            b"%d" % number,
            seen_in(f"box{number % 3}", path),
            build_id=b"\1%d" % (number % 5),
        )
    names = 0
    for turn in range(40):
        for _ in range(chosen.randint(1, 4)):
            _spoil(env, chosen)
        names += _walk(View(store), None) + _walk(View(store), PUBLIC)
        label, path = f"box{turn % 4}", b"/a/%d" % (turn % 9)
        with contextlib.suppress(StoreError):
            store.commit([capture(store, b"%d" % turn, b"\1%d" % turn, at=seen_in(label, path))])
        with contextlib.suppress(StoreError):
            store.remove([chosen.choice(sorted(store.blobs.names()))])
        store = with_new_index(store)
        env = store.checker().env
        assert list(store.check()) == [], turn
    assert names > 1000
