# SPDX-License-Identifier: Apache-2.0
"""What a store has by place, for tests: containers and their files, file names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from buildidfs.model import Digest, Kind
from buildidfs.store import Staged
from tests.support.harness.captures import NOW, SECOND, capture, commit, sighting

if TYPE_CHECKING:
    from buildidfs.model import Sighting
    from buildidfs.store import CapturedContainer, Store
    from buildidfs.store.index.environment import Environment


def seen_in(label: str, path: bytes = b"/usr/bin/app", *, at: int = 0, **changes: Any) -> Sighting:
    """A sighting in a container, ``at`` seconds after `NOW`."""
    return sighting(path, container=label, seen_ns=NOW + at * SECOND, **changes)


def see(store: Store, content: bytes, at: Sighting, *kinds: Kind, build_id: bytes = b"") -> Digest:
    """Commit one file, an executable unless ``kinds`` say more; its build ID is made of the bytes
    unless it is given.
    """
    named, what = build_id or b"id:" + content, kinds or (Kind.EXECUTABLE,)
    new = capture(store, content, named, at=at, kinds=what)
    assert isinstance(new.content, Staged)
    digest = new.content.digest
    commit(store, new)
    return digest


def ordinal_of(store: Store, build_id: bytes) -> int:
    """The number of a build ID that there is."""
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    return ordinal


def container_names(store: Store) -> list[bytes]:
    """The names of all containers, in order of numbers."""
    return [each.name for each in store.containers.every()]


def container(store: Store, name: bytes) -> CapturedContainer:
    """A container that there is."""
    number = store.containers.number(name)
    assert number is not None, container_names(store)
    found = store.containers.get(number)
    assert found is not None
    return found


def files_of(
    store: Store, name: bytes, directory: int = 0, above: bytes = b""
) -> dict[bytes, bytes]:
    """Paths in a container, and the build ID at each; of what is gone nothing."""
    found: dict[bytes, bytes] = {}
    number = container(store, name).number
    for entry in store.containers.children(number, directory):
        path = above + b"/" + entry.name
        assert store.containers.child(number, directory, entry.name) == entry
        if entry.directory:
            found |= files_of(store, name, entry.directory, path)
        elif store.index.artifact_variant(entry.ordinal, entry.kind, entry.variant):
            build_id = store.index.build_id(entry.ordinal)
            assert build_id is not None
            found[path] = bytes(build_id)
    return found


def by_name(store: Store) -> dict[bytes, set[int]]:
    """File names, and the ordinals that have each."""
    return {name: set(store.file_names.ids(number)) for name, number in store.file_names.every()}


def put_row(env: Environment, table: str, key: bytes, value: bytes) -> None:
    """Write a row of the index past all that looks after it."""
    env.write(lambda txn: txn.put(key, value, db=env.tables[table]))


def row_of(env: Environment, table: str, key: bytes) -> bytes:
    """A row of the index that there is."""
    value = env.get(env.tables[table], key)
    assert value is not None
    return value
