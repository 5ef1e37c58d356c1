# SPDX-License-Identifier: Apache-2.0
"""``by-path/…`` and ``by-name/…``: all build IDs seen at a path, or under a file name.

    by-path/usr/lib/libc.so.6/<id> -> ../../../../<id>
    by-name/libc.so.6/<id> -> ../../<id>

`Paths` is the store's tree of paths with the build IDs seen at each; `perf` shows it, too. If a
component of a path is spelled like a build ID seen at its parent, the name means the build ID.
"""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import BuildId, Kind
from buildidfs.view import nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import Store

ROOT = 0

_DEPTH_MAX = 4096
"""No path has more names, unless a damaged index has a cycle."""

_MOST_BELOW = 256


class Paths:
    """The store's tree of paths, with build IDs that have an artifact of certain kinds."""

    def __init__(self, store: Store, kinds: int) -> None:
        """``kinds`` are bits (1<<kind). Only build IDs with an artifact of one of these kinds are
        shown.
        """
        self._store = store
        self._kinds = kinds

    def seen_at(self, path: int, name: bytes) -> int | None:
        """Return the ordinal of the build ID in ``name``, if it was seen at a path."""
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.index.ordinal(build_id)
        if ordinal is None or not self._store.paths.has(path, ordinal):
            return None
        return ordinal if self._is_shown(ordinal) else None

    def ids(self, path: int, after: int) -> Iterator[tuple[int, BuildId]]:
        """Yield (ordinal, build ID) of the files seen at a path, beyond the ordinal ``after``."""
        for ordinal in self._store.paths.ids(path, after):
            build_id = self._store.index.build_id(ordinal)
            if build_id is not None and self._is_shown(ordinal):
                yield ordinal, build_id

    def _is_shown(self, ordinal: int) -> bool:
        """Return True if a build ID has a file of these kinds, or unrelated programs share the
        build ID.
        """
        kinds = self._store.index.kinds(ordinal)
        return bool(kinds & self._kinds or (kinds and self._store.aliases.is_ambiguous(ordinal)))

    def directories(self, path: int, after: int) -> Iterator[tuple[bytes, int]]:
        """Yield (name, number) of the paths directly below a path, beyond the path with number
        ``after``.
        """
        last = None
        if after > 0:
            found = self._store.paths.parent(after)
            if found is None:
                return
            last = found[1]
        for name, number in self._store.paths.children(path, last):
            if self.seen_at(path, name) is None:
                yield name, number

    def is_public(self, path: int, name: bytes, ordinal: int) -> bool:
        """Return True if all users may know of an entry: a build ID, or a path if
        ``ordinal`` is 0.
        """
        if ordinal:
            return self._store.paths.has_publicly(path, ordinal)
        return self._store.paths.is_public(path, name)

    def places(
        self, path: int, name: bytes, ordinal: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """Return the data that decide if a viewer may know of an entry: a test for paths, and build
        IDs.

        The viewer may know of the entry if they could have read a file with one of these build IDs
        at a path that passes the test.
        """
        full = self._store.paths.spelled(path).rstrip(b"/")
        if ordinal:
            return lambda seen: _normal(seen) == full, (ordinal,)
        child = self._store.paths.child(path, name)
        below = full + b"/" + name + b"/"
        ordinals = self.below(child) if child else ()
        return lambda seen: (_normal(seen) + b"/").startswith(below), ordinals

    def depth(self, path: int) -> int:
        """Return the number of names in a path."""
        depth = 0
        while path != ROOT and depth < _DEPTH_MAX:
            found = self._store.paths.parent(path)
            if found is None:
                return depth
            path, depth = found[0], depth + 1
        return depth

    def below(self, path: int) -> Iterator[int]:
        """Yield the ordinals seen at or below a path, until `_MOST_BELOW` names were examined."""
        most = _MOST_BELOW
        levels = [iter((path,))]
        while levels:
            number = next(levels[-1], None)
            if number is None:
                levels.pop()
                continue
            for ordinal in (0, *itertools.islice(self._store.paths.ids(number), most)):
                most -= 1
                if most < 0:
                    return
                if ordinal:
                    yield ordinal
            levels.append(child for _, child in self._store.paths.children(number))


def _normal(path: bytes) -> bytes:
    return b"/" + b"/".join(filter(None, path.split(b"/")))


_ANY_KIND = sum(1 << kind for kind in Kind)

# Offsets in a listing of a path: sub-directories by path number, then build IDs by ordinal.
_OFFSET_IDS = 1 << 32
_NAME_DEPTH = 2
_UP = b"../"
_TARGET_MAX = 4096 - 2 * BuildId.MAX_BYTES


class ByPath:
    """The directories of ``by-path``."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paths = Paths(store, _ANY_KIND)

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        path = nodes.number_of(node)
        ordinal = self._paths.seen_at(path, name)
        if ordinal is not None:
            return _link(ordinal, self._paths.depth(path) + 1)
        child = self._store.paths.child(path, name)
        return nodes.of_browsing(nodes.FORM_PATH, within=child) if child else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset."""
        path = nodes.number_of(node)
        if after < _OFFSET_IDS:
            for name, number in self._paths.directories(path, after):
                yield name, nodes.of_browsing(nodes.FORM_PATH, within=number), number
        depth = self._paths.depth(path) + 1
        for ordinal, build_id in self._paths.ids(path, max(0, after - _OFFSET_IDS)):
            yield names.spell(build_id), _link(ordinal, depth), _OFFSET_IDS + ordinal

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Return True if all users may know of an entry."""
        ordinal = nodes.any_ordinal_of(child)
        return self._paths.is_public(nodes.number_of(node), name, ordinal)

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """See `Paths.places`."""
        return self._paths.places(nodes.number_of(node), name, nodes.any_ordinal_of(child))


class ByName:
    """The directories of ``by-name``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        number = nodes.number_of(node)
        if number == ROOT:
            found = self._store.file_names.number(name)
            return nodes.of_browsing(nodes.FORM_NAME, within=found) if found else nodes.ABSENT
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.index.ordinal(build_id)
        if ordinal is None or not self._store.file_names.has(number, ordinal):
            return nodes.ABSENT
        return _link(ordinal, _NAME_DEPTH) if self._store.index.kinds(ordinal) else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset."""
        number = nodes.number_of(node)
        if number == ROOT:
            # A larger number is invalid.
            known = self._store.file_names.every(after) if after <= nodes.NUMBER_MASK else ()
            for name, found in known:
                yield name, nodes.of_browsing(nodes.FORM_NAME, within=found), found
            return
        for ordinal in self._store.file_names.ids(number, after):
            build_id = self._store.index.build_id(ordinal)
            if build_id is not None and self._store.index.kinds(ordinal):
                yield names.spell(build_id), _link(ordinal, _NAME_DEPTH), ordinal

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Return True if all users may know of an entry."""
        number = nodes.number_of(node)
        if number == ROOT:
            return self._store.file_names.is_public(name)
        return self._store.file_names.has_publicly(number, nodes.ordinal_of(child))

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """Return a test for paths, and build IDs; see `Paths.places`."""
        number = nodes.number_of(node)
        if number == ROOT:
            ordinals: Iterable[int] = self._store.file_names.ids(nodes.number_of(child))
        else:
            found = self._store.paths.parent(number)
            name = b"" if found is None else found[1]
            ordinals = (nodes.ordinal_of(child),)
        return lambda path: os.path.basename(path.rstrip(b"/")) == name, ordinals


def target(store: Store, node: int) -> bytes:
    """Return the target of a link to the directory of a build ID; empty if the build ID is gone."""
    build_id = store.index.build_id(nodes.ordinal_of(node))
    depth = node & nodes.DETAIL_MASK
    if build_id is None or depth * len(_UP) >= _TARGET_MAX:  # an invalid number
        return b""
    return _UP * depth + names.spell(build_id)


def _link(ordinal: int, depth: int) -> int:
    return nodes.of_id(ordinal, nodes.SLOT_BROWSE_LINK, depth)
