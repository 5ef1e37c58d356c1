# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.index.paths: the tree of original paths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.store import schema
from buildidfs.store.index import environment
from buildidfs.store.index.paths import components
from tests.support.captures import capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.store import Store


def _walk(store: Store, path: bytes) -> int | None:
    number: int | None = 0
    for name in path.split(b"/")[1:]:
        assert number is not None
        number = store.paths.child(number, name)
        if number is None:
            return None
    return number


def test_paths_are_found_by_walking(store: Store) -> None:
    path = b"/usr/lib/x86_64/libc.so.6"
    commit(store, capture(store, b"libc", at=sighting(path)))
    number = _walk(store, path)
    assert number is not None
    assert number == store.index.primary_path(1)
    assert store.paths.spelled(number) == path
    assert list(store.paths.ids(number)) == [1]
    assert store.paths.has(number, 1)
    assert not store.paths.has(number, 2)
    parent = _walk(store, b"/usr/lib/x86_64")
    assert parent is not None
    assert store.paths.parent(number) == (parent, b"libc.so.6")
    assert list(store.paths.ids(parent)) == []
    assert store.paths.parent(0) is None
    assert store.paths.spelled(0) == b"/"


def test_names_that_are_not_there(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(b"/usr/bin/x")))
    for name in (b"us", b"usr2", b"", b"x" * 255, b"x" * 256, b"x" * 5000, b"usr\0"):
        assert store.paths.child(0, name) is None
    assert list(store.paths.children(999)) == []
    assert list(store.paths.ids(999)) == []
    assert store.paths.parent(999) is None


def test_children_resume_behind_a_name(store: Store) -> None:
    names = [*sorted(b"%d" % number for number in range(150)), b"\xff\xfe", b"\xff" * 255]
    commit(
        store,
        *(
            capture(store, b"same", number.to_bytes(2, "big"), at=sighting(b"/opt/" + name))
            for number, name in enumerate(names)
        ),
    )
    parent = store.paths.child(0, b"opt")
    assert parent is not None
    listed = list(store.paths.children(parent))
    assert [name for name, _ in listed] == names
    assert all(store.paths.child(parent, name) == number for name, number in listed)
    for index in (0, 70, len(names) - 1):
        assert list(store.paths.children(parent, names[index])) == listed[index + 1 :]
    assert [name for name, _ in store.paths.children(0)] == [b"opt"]


def test_ids_at_a_path_resume_behind_an_ordinal(store: Store) -> None:
    new = [capture(store, b"%d" % i, i.to_bytes(2, "big"), at=sighting(b"/x")) for i in range(100)]
    commit(store, *new)
    number = store.index.primary_path(1)
    assert number is not None
    assert list(store.paths.ids(number)) == list(range(1, 101))
    assert list(store.paths.ids(number, 90)) == list(range(91, 101))


def test_the_first_path_is_the_primary_one(store: Store) -> None:
    for path in (b"/z", b"/a"):
        commit(store, capture(store, b"x", at=sighting(path)))
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == b"/z"


@pytest.mark.parametrize(
    "path",
    [b"", b"/", b"/a/../b", b"/./x", b"..", b"/a\0b", b"/" + b"n" * 256, b"/x" * 5000],
)
def test_paths_that_no_tree_can_hold(store: Store, path: bytes) -> None:
    assert components(path) is None
    commit(store, capture(store, b"x", at=sighting(path)))
    assert store.index.primary_path(1) is None
    assert store.stats().paths == 0
    (record,) = store.index.origins(1)
    assert record.origin.path == path, "the origin keeps it"


def test_any_other_bytes_are_names(store: Store) -> None:
    path = b"/w\xff\n /...//" + b"n" * 255
    assert components(path) == [b"w\xff\n ", b"...", b"n" * 255]
    commit(store, capture(store, b"x", at=sighting(path)))
    number = store.index.primary_path(1)
    assert number is not None
    assert store.paths.spelled(number) == path.replace(b"//", b"/")


def test_a_loop_in_a_damaged_table_ends(store: Store) -> None:
    env = environment.acquire(store.path, read_only=False)
    row = schema.U32.pack(7)
    env.write(lambda txn: txn.put(row, row + b"x", db=env.tables["paths"]))
    for number in (7, 8):
        with pytest.raises(IntegrityError, match=f"path {number} .* does not lead to the root"):
            store.paths.spelled(number)
    environment.release(env)


@pytest.mark.parametrize("unusable", [b"/.build-id/ab/cdef", b"/" + b"long/" * 800 + b"x"])
def test_a_path_nobody_can_follow_does_not_become_the_primary_one(
    store: Store, unusable: bytes
) -> None:
    commit(store, capture(store, b"libc", at=sighting(unusable)))
    assert store.index.primary_path(1) is None
    commit(store, capture(store, b"libc", at=sighting(b"/usr/lib/libc.so.6")))
    assert store.index.primary_path(1) == _walk(store, b"/usr/lib/libc.so.6")


def test_a_damaged_key_is_an_error(store: Store) -> None:
    commit(store, capture(store, b"x", at=sighting(b"/usr/bin/x")))
    number = store.index.primary_path(1)
    assert number is not None
    env = environment.acquire(store.path, read_only=False)
    key = schema.PATH_ORDINAL.pack(number, 1) + b"x"
    env.write(lambda txn: txn.put(key, b"", db=env.tables["pathids"]))
    with pytest.raises(IntegrityError, match="damaged"):
        list(store.paths.ids(number))
    environment.release(env)
