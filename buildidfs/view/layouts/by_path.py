# SPDX-License-Identifier: Apache-2.0
"""``by-path/…`` and ``by-name/…``: everything that was ever seen at a path, or under a file name.

by-path/usr/lib/libc.so.6/<id> -> ../../../../<id>
by-name/libc.so.6/<id> -> ../../<id>
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import BuildId, Kind
from buildidfs.view import nodes
from buildidfs.view.paths import ROOT, Paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import Store

_ANY_KIND = sum(1 << kind for kind in Kind)

# Offsets in a listing of a path: sub-directories by path number, then build IDs by ordinal.
_OFFSET_IDS = 1 << 32
_NAME_DEPTH = 2
_UP = b"../"
_TARGET_MAX = 4096 - 2 * BuildId.MAX_BYTES


class ByPath:
    """The directories for paths."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._paths = Paths(store, _ANY_KIND)

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry, `nodes.ABSENT` if there is none."""
        path = nodes.number_of(node)
        ordinal = self._paths.seen_at(path, name)
        if ordinal is not None:
            return _link(ordinal, self._paths.depth(path) + 1)
        child = self._store.path_child(path, name)
        return nodes.of_browsing(nodes.FORM_PATH, within=child) if child else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries whose offset is beyond ``after``: name, node, offset."""
        path = nodes.number_of(node)
        if after < _OFFSET_IDS:
            for name, number in self._paths.directories(path, after):
                yield name, nodes.of_browsing(nodes.FORM_PATH, within=number), number
        depth = self._paths.depth(path) + 1
        for ordinal, build_id in self._paths.ids(path, max(0, after - _OFFSET_IDS)):
            yield names.spell(build_id), _link(ordinal, depth), _OFFSET_IDS + ordinal

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Whether everybody may know of an entry."""
        ordinal = nodes.any_ordinal_of(child)
        return self._paths.is_public(nodes.number_of(node), name, ordinal)

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """See `Paths.places`."""
        return self._paths.places(nodes.number_of(node), name, nodes.any_ordinal_of(child))


class ByName:
    """The directories for file names."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry, `nodes.ABSENT` if there is none."""
        number = nodes.number_of(node)
        if number == ROOT:
            found = self._store.file_name(name)
            return nodes.of_browsing(nodes.FORM_NAME, within=found) if found else nodes.ABSENT
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.ordinal(build_id)
        if ordinal is None or not self._store.file_name_has(number, ordinal):
            return nodes.ABSENT
        return _link(ordinal, _NAME_DEPTH) if self._store.kinds(ordinal) else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries whose offset is beyond ``after``: name, node, offset."""
        number = nodes.number_of(node)
        if number == ROOT:
            # Whoever asks for more has made up the number.
            known = self._store.file_names(after) if after <= nodes.NUMBER_MASK else ()
            for name, found in known:
                yield name, nodes.of_browsing(nodes.FORM_NAME, within=found), found
            return
        for ordinal in self._store.file_name_ids(number, after):
            build_id = self._store.build_id(ordinal)
            if build_id is not None and self._store.kinds(ordinal):
                yield names.spell(build_id), _link(ordinal, _NAME_DEPTH), ordinal

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Whether everybody may know of an entry."""
        number = nodes.number_of(node)
        if number == ROOT:
            return self._store.file_name_is_public(name)
        return self._store.file_name_has_publicly(number, nodes.ordinal_of(child))

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """What tells places that an entry stands for, and the build IDs that may have one."""
        number = nodes.number_of(node)
        if number == ROOT:
            ordinals: Iterable[int] = self._store.file_name_ids(nodes.number_of(child))
        else:
            found = self._store.path_parent(number)
            name = b"" if found is None else found[1]
            ordinals = (nodes.ordinal_of(child),)
        return lambda path: os.path.basename(path.rstrip(b"/")) == name, ordinals


def target(store: Store, node: int) -> bytes:
    """Where a link to a directory of a build ID leads; empty if that is gone."""
    build_id = store.build_id(nodes.ordinal_of(node))
    depth = node & nodes.DETAIL_MASK
    if build_id is None or depth * len(_UP) >= _TARGET_MAX:  # one that was made up
        return b""
    return _UP * depth + names.spell(build_id)


def _link(ordinal: int, depth: int) -> int:
    return nodes.of_id(ordinal, nodes.SLOT_BROWSE_LINK, depth)
