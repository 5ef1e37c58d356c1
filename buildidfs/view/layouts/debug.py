# SPDX-License-Identifier: Apache-2.0
"""``debug/``: links into ``<id>/`` under the names by which gdb and other tools find debug files.

    debug/.build-id/ab/cdef…[.debug]
    debug/.dwz/…

All links lead out of ``debug``, for safety: gdb trusts the scripts in files whose real path is
below its debug-file-directory.

gdb, elfutils and drgn take the part after ``/.dwz/`` of a name in .gnu_debugaltlink, and look it up
in ``.dwz``. On Debian this part contains a directory, on Fedora it does not. A dwz file appears
under the name at which it was seen, and under that by which debuginfo refers to it. A front door
should not cache these names for long, because commits do not announce them.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import Kind
from buildidfs.view import nodes
from buildidfs.view.attributes import stale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import Store

_REMEMBERED = 4096
_LOOKED_AT = 64


class DwzTree:
    """Directories and links for the names that the store keeps."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # Only a shortcut for `_name`: other names are found by iterating over all names.
        self._names: dict[int, bytes] = {nodes.DWZ: b""}
        self._places: dict[tuple[int, int], bytes] = {}

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        return self._entry(_join(self._name(node), name))

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset.

        The offset is the index in the sorted names. They are few, unless a container made many: so
        the position at the end of a partial listing is cached, and the next call need not start
        again.
        """
        prefix = _join(self._name(node), b"")
        offset, previous = after, self._places.get((node, after), b"")
        if not previous:
            offset = 0
        for full, _ in self._store.index.supplementaries(prefix, prefix + previous or None):
            name, slash, _ = full[len(prefix) :].partition(b"/")
            if name == previous or not _is_component(name):
                continue
            # "a" sorts before "a-b", which sorts before "a/c": the first "a" stands for all
            if slash and self._store.index.supplementary(prefix + name) is not None:
                continue
            previous = name
            offset += 1
            if offset > after and (found := self._entry(prefix + name)):
                if len(self._places) >= _REMEMBERED:
                    self._places.clear()
                self._places[node, offset] = name
                yield name, found, offset

    def is_public(self, node: int, name: bytes) -> bool:
        """Return True if all users may know of an entry. Examines a few of the names below it."""
        full = _join(self._name(node), name)
        if self._store.index.is_public_supplementary(full):
            return True
        below = itertools.islice(self._store.index.supplementaries(full + b"/"), _LOOKED_AT)
        return any(self._store.index.is_public_supplementary(each) for each, _ in below)

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """Return a test for paths, and build IDs; see `by_path.Paths.places`."""
        full = _join(self._name(node), name)
        ordinal = self._store.index.supplementary(full)
        if child >> nodes.TAG_SHIFT == nodes.TAG_ID and ordinal is not None:
            return lambda path: path.rpartition(names.DWZ_MARK)[2] == full, (ordinal,)
        below = full + b"/"
        ordinals = (each for _, each in self._store.index.supplementaries(below))
        return lambda path: path.rpartition(names.DWZ_MARK)[2].startswith(below), ordinals

    def target(self, node: int) -> bytes:
        """Return the target of a link made by `lookup`."""
        build_id = self._store.index.build_id(nodes.ordinal_of(node))
        if build_id is None:
            return b""
        depth = node & nodes.DETAIL_MASK
        return b"../" * (2 + depth) + names.spell(build_id) + b"/debug"

    def _entry(self, full: bytes) -> int:
        ordinal = self._store.index.supplementary(full)
        if ordinal is not None and self._store.index.kinds(ordinal) & DEBUGINFO_BIT:
            return nodes.of_id(ordinal, nodes.SLOT_DWZ_LINK, full.count(b"/"))
        if next(self._store.index.supplementaries(full + b"/", None), None) is None:
            return nodes.ABSENT
        node = nodes.of_dwz(full)
        self._remember(node, full)
        return node

    def _name(self, node: int) -> bytes:
        name = self._names.get(node)
        if name is not None:
            return name
        for full, _ in self._store.index.supplementaries(b"", None):
            end = full.find(b"/")
            while end >= 0:
                if nodes.of_dwz(full[:end]) == node:
                    self._remember(node, full[:end])
                    return full[:end]
                end = full.find(b"/", end + 1)
        raise stale()

    def _remember(self, node: int, name: bytes) -> None:
        if len(self._names) >= _REMEMBERED:
            self._names.clear()
            self._names[nodes.DWZ] = b""
        self._names[node] = name


def _join(parent: bytes, name: bytes) -> bytes:
    return parent + b"/" + name if parent else name


def _is_component(name: bytes) -> bool:
    return 0 < len(name) <= names.MAX_NAME and name not in (b".", b"..")


# --- .build-id -----------------------------------------------------------------------------------

EXECUTABLE_BIT = 1 << Kind.EXECUTABLE
DEBUGINFO_BIT = 1 << Kind.DEBUGINFO

_DEPTH = 3
_DEPTH_MAX = 16  # a deeper one is an invalid number


def populated_buckets(store: Store, base: int, after: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the entries of a ``.build-id`` directory: of the 256 possible ones, those with which a
    build ID starts.

    Lookups find the others, too, as empty directories. So if a client looks up an unknown build ID,
    the name of its bucket need not be invalidated later.
    """
    for first in range(after, 256):
        if next(store.index.build_ids_with_prefix(bytes([first]), None), None) is not None:
            yield b"%02x" % first, base + first, first + 1


def lookup_bucket(base: int, name: bytes) -> int:
    """Return the node of an entry of a ``.build-id`` directory."""
    first = names.bucket(name)
    return nodes.ABSENT if first is None else base + first


class DebugLinks:
    """The 256 directories ``debug/.build-id/ab``."""

    def __init__(self, store: Store, is_wanted: Callable[[int, Kind], bool]) -> None:
        """``is_wanted`` returns True if a missing file may be fetched when it is opened."""
        self._store = store
        self._is_wanted = is_wanted

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        parsed = names.parse_split(node - nodes.DEBUG_BUCKET, name)
        if parsed is None:
            return nodes.ABSENT
        build_id, debug = parsed
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            return nodes.ABSENT
        if not self._store.index.kinds(ordinal) & (DEBUGINFO_BIT if debug else EXECUTABLE_BIT):
            if debug and self._is_wanted(ordinal, Kind.DEBUGINFO):
                return nodes.of_id(ordinal, nodes.SLOT_WANTED_LINK)
            return nodes.ABSENT
        slot = nodes.SLOT_DEBUGINFO_LINK if debug else nodes.SLOT_EXECUTABLE_LINK
        return nodes.of_id(ordinal, slot)

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset.

        Entries are in the order of build IDs. Offsets are made from ordinals: a listing resumes
        beyond the build ID with the ordinal in ``after``.
        """
        first = bytes([node - nodes.DEBUG_BUCKET])
        last = None
        if after:
            ordinal, second = divmod(after, 2)
            last = self._store.index.build_id(ordinal)
            if last is None or last[:1] != first:
                return  # removed, or an offset of another directory
            if not second:
                yield from self._links(last, ordinal, after)
        for build_id, ordinal in self._store.index.build_ids_with_prefix(first, last):
            yield from self._links(build_id, ordinal, 0)

    def target(self, node: int) -> bytes:
        """Return the target of a link made by `lookup`; its detail is the number of directories to
        go up.
        """
        build_id = self._store.index.build_id(nodes.ordinal_of(node))
        depth = node & nodes.DETAIL_MASK or _DEPTH
        if build_id is None or depth > _DEPTH_MAX:
            return b""
        debug = nodes.slot_of(node) != nodes.SLOT_EXECUTABLE_LINK
        return b"../" * depth + names.spell(build_id) + (b"/debug" if debug else b"/elf")

    def _links(self, build_id: bytes, ordinal: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        kinds = self._store.index.kinds(ordinal)
        rest = names.split(build_id)[1]
        if kinds & EXECUTABLE_BIT and 2 * ordinal > after:
            yield rest, nodes.of_id(ordinal, nodes.SLOT_EXECUTABLE_LINK), 2 * ordinal
        if kinds & DEBUGINFO_BIT:
            link = nodes.of_id(ordinal, nodes.SLOT_DEBUGINFO_LINK)
            yield rest + names.DEBUG_SUFFIX, link, 2 * ordinal + 1
