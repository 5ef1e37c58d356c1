# SPDX-License-Identifier: Apache-2.0
"""``<id>/variants/<sha256>``: every file that was ever seen with a build ID, served or not.

A variant that is served is the same node as ``<id>/elf`` or ``<id>/debug``. A file that is of two
kinds is listed once, as the first of them.
"""

from __future__ import annotations

from binascii import hexlify
from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import Kind
from buildidfs.view import nodes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import Artifact
    from buildidfs.store import OriginRecord, Store

# Offsets in a listing: the kind, then one more than the number of the variant.
_KIND_SHIFT = 17
_VARIANT_MASK = (1 << _KIND_SHIFT) - 1


class Variants:
    """The directories ``variants``."""

    def __init__(self, store: Store, node_of: Callable[[Artifact], int]) -> None:
        """``node_of`` says which node a file is, wherever it is listed."""
        self._store = store
        self._node_of = node_of

    def lookup(self, node: int, name: bytes) -> int:
        """The node of an entry, `nodes.ABSENT` if there is none."""
        digest = names.parse_digest(name)
        if digest is None:
            return nodes.ABSENT
        ordinal = nodes.ordinal_of(node)
        refs = self._store.variants_with(digest, ordinal)
        if not refs:
            return nodes.ABSENT
        artifact = self._store.artifact_variant(ordinal, *min(refs))
        if artifact is None or artifact.digest != digest:
            return nodes.ABSENT
        return self._node_of(artifact)

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Entries whose offset is beyond ``after``: name, node, offset."""
        ordinal = nodes.ordinal_of(node)
        first, last = after >> _KIND_SHIFT, (after & _VARIANT_MASK) - 1
        for kind in Kind:
            if kind < first:
                continue
            behind = min(last, nodes.VARIANT_MAX) if kind == first else -1
            for artifact in self._store.variants_after(ordinal, kind, behind):
                if kind == min(self._store.variants_with(artifact.digest, ordinal))[0]:
                    offset = kind << _KIND_SHIFT | artifact.variant + 1
                    yield hexlify(artifact.digest), self._node_of(artifact), offset

    def spellings(
        self, ordinal: int, origins: Iterable[OriginRecord]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """(directory, name, whether it may have led elsewhere): also of what was just removed, as
        far as its origins tell.
        """
        directory = nodes.of_id(ordinal, nodes.SLOT_VARIANTS)
        digests = {record.digest for record in origins}
        for kind in Kind:
            digests |= {each.digest for each in self._store.variants_after(ordinal, kind, -1)}
        for digest in digests:
            yield directory, hexlify(digest), True
