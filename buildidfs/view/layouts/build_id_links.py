# SPDX-License-Identifier: Apache-2.0
"""``debug/.build-id/ab/cdef…`` for gdb and all who follow it: links into ``<id>/``, nothing else.

That there are only links which lead out of ``debug`` is for safety: gdb trusts the scripts in
files whose real path is below its debug-file-directory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import Kind
from buildidfs.view import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store

EXECUTABLE_BIT = 1 << Kind.EXECUTABLE
DEBUGINFO_BIT = 1 << Kind.DEBUGINFO

_DEPTH = 3
_DEPTH_MAX = 16  # deeper is a number that was made up


def populated_buckets(store: Store, base: int, after: int) -> Iterator[tuple[bytes, int, int]]:
    """Entries of a ``.build-id`` directory: those of 256 that build IDs start with.

    The others can be looked up too and are empty; that spares every client that asks for an
    unknown build ID a name that would have to be watched.
    """
    for first in range(after, 256):
        if next(store.build_ids_with_prefix(bytes([first]), None), None) is not None:
            yield b"%02x" % first, base + first, first + 1


def lookup_bucket(base: int, name: bytes) -> int:
    """The node of an entry of a ``.build-id`` directory."""
    first = names.bucket(name)
    return nodes.ABSENT if first is None else base + first


class DebugLinks:
    """The 256 directories ``debug/.build-id/ab``."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry, `nodes.ABSENT` if there is none."""
        parsed = names.parse_split(node - nodes.DEBUG_BUCKET, name)
        if parsed is None:
            return nodes.ABSENT
        build_id, debug = parsed
        ordinal = self._store.ordinal(build_id)
        if ordinal is None:
            return nodes.ABSENT
        if not self._store.kinds(ordinal) & (DEBUGINFO_BIT if debug else EXECUTABLE_BIT):
            return nodes.ABSENT
        slot = nodes.SLOT_DEBUGINFO_LINK if debug else nodes.SLOT_EXECUTABLE_LINK
        return nodes.of_id(ordinal, slot)

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries whose offset is beyond ``after``: name, node, offset.

        Offsets are made of ordinals though the order is that of build IDs: a listing goes on
        behind the build ID with that ordinal.
        """
        first = bytes([node - nodes.DEBUG_BUCKET])
        last = None
        if after:
            ordinal, second = divmod(after, 2)
            last = self._store.build_id(ordinal)
            if last is None or last[:1] != first:
                return  # gone, or an offset of another directory
            if not second:
                yield from self._links(last, ordinal, after)
        for build_id, ordinal in self._store.build_ids_with_prefix(first, last):
            yield from self._links(build_id, ordinal, 0)

    def target(self, node: int) -> bytes:
        """Where a link made by `lookup` leads; its detail is how far up, if it is elsewhere."""
        build_id = self._store.build_id(nodes.ordinal_of(node))
        depth = node & nodes.DETAIL_MASK or _DEPTH
        if build_id is None or depth > _DEPTH_MAX:
            return b""
        debug = nodes.slot_of(node) == nodes.SLOT_DEBUGINFO_LINK
        return b"../" * depth + names.spell(build_id) + (b"/debug" if debug else b"/elf")

    def _links(self, build_id: bytes, ordinal: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        kinds = self._store.kinds(ordinal)
        rest = names.split(build_id)[1]
        if kinds & EXECUTABLE_BIT and 2 * ordinal > after:
            yield rest, nodes.of_id(ordinal, nodes.SLOT_EXECUTABLE_LINK), 2 * ordinal
        if kinds & DEBUGINFO_BIT:
            link = nodes.of_id(ordinal, nodes.SLOT_DEBUGINFO_LINK)
            yield rest + names.DEBUG_SUFFIX, link, 2 * ordinal + 1
