# SPDX-License-Identifier: Apache-2.0
"""What of a directory is listed for somebody who may not read everything.

Build IDs of which they may read no file are left out, and so are directories that lead to no other;
in ``variants`` files that they may not read. All entries of all trees go through here, and a node
says itself what it leads to, so that a new tree has nothing to do for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.errors import BuildIdFsError
from buildidfs.view import nodes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.view.browse import Browse
    from buildidfs.view.dwz import DwzTree
    from buildidfs.view.ids import IdDirectories
    from buildidfs.view.perf import PerfTree
    from buildidfs.view.readers import Reader

_MOST_LOOKED_AT = 256
"""Of the names below a directory. One in which nothing for the reader is found by then is left out,
too: what is not listed can still be looked up, and what was listed is known."""


class Listing:
    """Chooses among the entries of directories."""

    def __init__(self, ids: IdDirectories, perf: PerfTree, dwz: DwzTree, browse: Browse) -> None:
        self._ids = ids
        self._browse = browse
        self._perf = perf
        self._dwz = dwz

    def shown(
        self, node: int, entries: Iterator[tuple[bytes, int, int]], reader: Reader
    ) -> Iterator[tuple[bytes, int, int]]:
        """Those entries of a directory that ``reader`` may know of."""
        of_id = node >> nodes.TAG_SHIFT == nodes.TAG_ID
        if of_id and nodes.slot_of(node) == nodes.SLOT_VARIANTS:
            may_know = self._may_read
        elif nodes.any_ordinal_of(node):
            return entries  # whoever asks for these knows the build ID
        else:
            may_know = self._leads_to_any
        return (entry for entry in entries if may_know(entry[1], reader))

    def _may_read(self, node: int, reader: Reader) -> bool:
        try:
            shown = self._ids.attributes(node)
        except (OSError, BuildIdFsError):
            return False  # gone since it was listed, or damaged
        return reader.may_read(shown.mode, shown.uid, shown.gid)

    def _leads_to_any(self, node: int, reader: Reader) -> bool:
        def may_read_any(ordinal: int) -> bool:
            try:
                return self._ids.may_read_any(ordinal, reader)
            except BuildIdFsError:
                return False

        ordinal = nodes.any_ordinal_of(node)
        if ordinal:
            return may_read_any(ordinal)
        tag = node >> nodes.TAG_SHIFT
        if tag == nodes.TAG_PATH:
            below = self._perf.below(nodes.path_of(node), _MOST_LOOKED_AT)
        elif tag == nodes.TAG_DWZ:
            below = self._dwz.below(node, _MOST_LOOKED_AT)
        elif nodes.is_browsing(node) and (found := self._browse.below(node, _MOST_LOOKED_AT)):
            below = found
        else:
            return True  # it is always there
        return any(map(may_read_any, below))
