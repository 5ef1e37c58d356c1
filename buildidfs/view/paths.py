# SPDX-License-Identifier: Apache-2.0
"""What is at a path and below it: for the trees in which build IDs hang from paths.

Where a path has a component that is a build ID seen at the path above it, the build ID has the
name.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from buildidfs import names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import BuildId
    from buildidfs.store import Store

ROOT = 0

_DEPTH_MAX = 4096
"""No path has more names; whoever finds more walks in a circle, in a damaged index."""


_MOST_BELOW = 256


class Paths:
    """The store's tree of paths, with build IDs that have an artifact of certain kinds."""

    def __init__(self, store: Store, kinds: int) -> None:
        """``kinds`` are bits (1<<kind) of which there has to be one."""
        self._store = store
        self._kinds = kinds

    def seen_at(self, path: int, name: bytes) -> int | None:
        """The ordinal of the build ID that ``name`` spells, if it was seen at a path."""
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.ordinal(build_id)
        if ordinal is None or not self._store.path_has(path, ordinal):
            return None
        return ordinal if self._store.kinds(ordinal) & self._kinds else None

    def ids(self, path: int, after: int) -> Iterator[tuple[int, BuildId]]:
        """(ordinal, build ID) of what was seen at a path, behind the ordinal ``after``."""
        for ordinal in self._store.path_ids(path, after):
            build_id = self._store.build_id(ordinal)
            if build_id is not None and self._store.kinds(ordinal) & self._kinds:
                yield ordinal, build_id

    def directories(self, path: int, after: int) -> Iterator[tuple[bytes, int]]:
        """(name, number) of the paths in a path, behind the one with the number ``after``."""
        last = None
        if after > 0:
            found = self._store.path_parent(after)
            if found is None:
                return
            last = found[1]
        for name, number in self._store.path_children(path, last):
            if self.seen_at(path, name) is None:
                yield name, number

    def is_public(self, path: int, name: bytes, ordinal: int) -> bool:
        """Whether everybody may know of an entry of a path: a build ID, if it is not 0."""
        if ordinal:
            return self._store.path_has_publicly(path, ordinal)
        return self._store.path_is_public(path, name)

    def places(
        self, path: int, name: bytes, ordinal: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """What tells places that such an entry stands for, and the build IDs that may have one."""
        full = self._store.path_bytes(path).rstrip(b"/")
        if ordinal:
            return lambda seen: _normal(seen) == full, (ordinal,)
        child = self._store.path_child(path, name)
        below = full + b"/" + name + b"/"
        ordinals = self.below(child) if child else ()
        return lambda seen: (_normal(seen) + b"/").startswith(below), ordinals

    def depth(self, path: int) -> int:
        """How many names lead to a path."""
        depth = 0
        while path != ROOT and depth < _DEPTH_MAX:
            found = self._store.path_parent(path)
            if found is None:
                return depth
            path, depth = found[0], depth + 1
        return depth

    def below(self, path: int, most: int = _MOST_BELOW) -> Iterator[int]:
        """Ordinals seen at a path or below it, until ``most`` names were looked at."""
        levels = [iter((path,))]
        while levels:
            number = next(levels[-1], None)
            if number is None:
                levels.pop()
                continue
            for ordinal in (0, *itertools.islice(self._store.path_ids(number), most)):
                most -= 1
                if most < 0:
                    return
                if ordinal:
                    yield ordinal
            levels.append(child for _, child in self._store.path_children(number))


def _normal(path: bytes) -> bytes:
    return b"/" + b"/".join(filter(None, path.split(b"/")))
