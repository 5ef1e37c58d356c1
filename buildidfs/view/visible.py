# SPDX-License-Identifier: Apache-2.0
"""The entries of directories that a viewer who may not see everything may know of.

Listings leave out build IDs without a file that the viewer may read, and in ``variants`` each file
that they may not read. A lookup still answers: a viewer who knows a build ID may use it. Where
entries tell of places (`nodes.is_place`) that is not enough, because any user can make a file with
the build ID of another user's file. There a viewer may know only of the places where they could
have read the file, and of directories that lead to one; other entries are neither listed nor found
by name.
"""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

from buildidfs.errors import BuildIdFsError
from buildidfs.names import DWP_SUFFIX
from buildidfs.view import nodes
from buildidfs.view.permissions import may_see

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store import OriginRecord, Store
    from buildidfs.view.layouts.browse import Browse
    from buildidfs.view.layouts.debug import DwzTree
    from buildidfs.view.layouts.id_dir import IdDirectories
    from buildidfs.view.layouts.perf import PerfTree
    from buildidfs.view.permissions import Viewer

_MOST_LOOKED_AT = 256
"""Names below a directory that are looked at. If none of them is for the viewer, the directory is
left out, unless everybody may know of a file in it."""

_MOST_ROWS = 4096
"""Places looked at for one entry."""


class Listing:
    """Chooses among the entries of directories."""

    def __init__(
        self, store: Store, ids: IdDirectories, perf: PerfTree, dwz: DwzTree, browse: Browse
    ) -> None:
        self._store = store
        self._ids = ids
        self._browse = browse
        self._perf = perf
        self._dwz = dwz

    def shown(
        self, node: int, entries: Iterator[tuple[bytes, int, int]], viewer: Viewer
    ) -> Iterator[tuple[bytes, int, int]]:
        """The entries of a directory that ``viewer`` may know of."""
        of_id = node >> nodes.TAG_SHIFT == nodes.TAG_ID
        if nodes.is_place(node):
            return (entry for entry in entries if self.may_know(node, entry[0], entry[1], viewer))
        if of_id and nodes.slot_of(node) == nodes.SLOT_VARIANTS:
            return (entry for entry in entries if self._may_read(entry[1], viewer))
        if nodes.any_ordinal_of(node):
            return entries  # the viewer knows the build ID
        return (entry for entry in entries if self._leads_to_any(entry[1], viewer))

    def is_public(self, parent: int, name: bytes, node: int) -> bool:
        """Return True if everybody may know of an entry. Takes no longer in a large directory."""
        if not nodes.is_place(parent):
            return not name.endswith(DWP_SUFFIX) or self._ids.is_public_package(parent, name)
        if nodes.is_browsing(parent):
            return self._browse.is_public(parent, name, node)
        if nodes.is_dwz(parent):
            return self._dwz.is_public(parent, name)
        return self._perf.is_public(parent, name, node)

    def may_know(self, parent: int, name: bytes, node: int, viewer: Viewer) -> bool:
        """Return True if a viewer may know of an entry of a directory.

        Takes longer the more names are below it, up to a limit.
        """
        try:
            return self.is_public(parent, name, node) or self._knows(parent, name, node, viewer)
        except BuildIdFsError:
            return False  # damaged

    def _knows(self, parent: int, name: bytes, node: int, viewer: Viewer) -> bool:
        if not nodes.is_place(parent):
            base = name.removesuffix(DWP_SUFFIX)
            return self._seen((nodes.ordinal_of(parent),), viewer, lambda path: _last(path) == base)
        if not nodes.is_browsing(parent):
            of_dwz = nodes.is_dwz(parent)
            fits, ordinals = (self._dwz if of_dwz else self._perf).places(parent, name, node)
        elif nodes.form_of(parent) == nodes.FORM_CONTENTS or parent == nodes.CONTAINERS:
            places = self._browse.in_container(parent, name, node, viewer)
            return any(islice(places, _MOST_LOOKED_AT))
        else:
            fits, ordinals = self._browse.places(parent, name, node)
        return self._seen(islice(ordinals, _MOST_LOOKED_AT), viewer, fits)

    def _seen(self, ordinals: Iterable[int], viewer: Viewer, fits: Callable[[bytes], bool]) -> bool:
        """Return True if a viewer could have read one of these build IDs at a path that fits."""
        left = _MOST_ROWS
        for ordinal in dict.fromkeys(ordinals):
            records: list[OriginRecord] = self._store.index.origins(ordinal)
            if any(may_see(viewer, each.origin) and fits(each.origin.path) for each in records):
                return True
            left -= len(records)
            if left < 0:
                return False
        return False

    def _may_read(self, node: int, viewer: Viewer) -> bool:
        try:
            shown = self._ids.attributes(node)
        except (OSError, BuildIdFsError):
            return False  # gone since it was listed, or damaged
        return viewer.may_read(shown.mode, shown.uid, shown.gid)

    def _leads_to_any(self, node: int, viewer: Viewer) -> bool:
        ordinal = nodes.any_ordinal_of(node)
        if not ordinal:
            return True  # it is always there
        try:
            return self._ids.may_read_any(ordinal, viewer)
        except BuildIdFsError:
            return False


def _last(path: bytes) -> bytes:
    return os.path.basename(path.rstrip(b"/"))
