# SPDX-License-Identifier: Apache-2.0
"""Packages of split DWARF, in the directory of their owner."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs import names
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from buildidfs.view import View, nodes
from tests.support.harness.captures import capture, sighting

OWNER = BuildId(bytes.fromhex("abcdef0123"))
NAMES = {b"elf.dwp", b"executable.dwp", b"debug.dwp", b"debuginfo.dwp", b"hot.dwp"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a binary, seen as hot."""
    with Store.create(tmp_path / "store") as made:
        made.commit([capture(made, b"binary", OWNER, at=sighting(b"/app/bin/hot"))])
        yield made


def package(store: Store, content: bytes = b"package", owner: BuildId = OWNER) -> int:
    """Commit the package of a binary."""
    kept_under = names.package_id(owner)
    assert kept_under is not None
    at = sighting(b"/app/bin/hot.dwp")
    store.commit([capture(store, content, kept_under, at=at, kinds=[Kind.DEBUGINFO])])
    return store.index.ordinal(kept_under) or 0


def directory(store: Store) -> int:
    return nodes.of_id(store.index.ordinal(OWNER) or 0)


def test_without_a_package_there_are_no_names(store: Store) -> None:
    view = View(store)
    assert [view.child(directory(store), name) for name in NAMES] == [nodes.ABSENT] * 5
    assert not [name for name, _, _ in view.children(directory(store)) if b"dwp" in name]


def test_names(store: Store) -> None:
    ordinal = package(store)
    view = View(store)
    own = view.child(nodes.of_id(ordinal), b"debug")
    assert own
    assert {view.child(directory(store), name) for name in NAMES} == {own}
    for other in (b"other.dwp", b".dwp", b"hot", b"bin/hot.dwp"):
        assert view.child(directory(store), other) == nodes.ABSENT
    listed = {name: node for name, node, _ in view.children(directory(store)) if b"dwp" in name}
    assert listed == {b"elf.dwp": own, b"debug.dwp": own}


def test_names_that_a_commit_brings(store: Store) -> None:
    view = View(store)
    before = {(parent, name) for parent, name, _ in view.spellings(store.index.ordinal(OWNER) or 0)}
    assert not [name for _, name in before if name.endswith(b".dwp")]
    ordinal = package(store)
    brought = {(parent, name) for parent, name, _ in view.spellings(ordinal)}
    assert brought >= {(directory(store), name) for name in NAMES}
    # seen at one more place, the binary has one more name
    other = capture(store, b"binary", OWNER, at=sighting(b"/app/bin/cold"))
    store.commit([other])
    brought = {
        (parent, name) for parent, name, _ in view.spellings(store.index.ordinal(OWNER) or 0)
    }
    assert (directory(store), b"cold.dwp") in brought
    assert view.child(directory(store), b"cold.dwp")


def test_a_better_package_is_another_node(store: Store) -> None:
    package(store)
    view = View(store)
    first = view.child(directory(store), b"elf.dwp")
    better = capture(
        store,
        b"better",
        names.package_id(OWNER) or b"",
        kinds=[Kind.DEBUGINFO],
        trust=Trust.HOST,
    )
    store.commit([better])
    assert view.child(directory(store), b"elf.dwp") not in (first, nodes.ABSENT)


def test_package_whose_owner_was_never_seen(store: Store) -> None:
    stranger = BuildId(b"\x77" * 20)
    ordinal = package(store, owner=stranger)
    spelled = View(store).spellings(ordinal)
    assert not [
        name
        for parent, name, _ in spelled
        if parent >> nodes.TAG_SHIFT == nodes.TAG_ID and name.endswith(b".dwp")
    ]


def test_a_build_id_too_long_for_a_package(tmp_path: Path) -> None:
    long_one = BuildId(bytes(range(120)))
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"binary", long_one)])
        node = nodes.of_id(store.index.ordinal(long_one) or 0)
        assert View(store).child(node, b"elf.dwp") == nodes.ABSENT
