# SPDX-License-Identifier: Apache-2.0
"""`TieredView`: the view over a store and the buckets of a fleet.

If the store lacks a build ID, its names are looked up in the buckets. Listings have only the files
of the store, and make no request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.errors import RemoteUnavailable
from buildidfs.fleet.objects import FIRST_ORDINAL, MOST_VARIANTS, VARIANT
from buildidfs.fleet.tiered_store import TieredStore
from buildidfs.model import BuildId, Kind
from buildidfs.view import nodes
from buildidfs.view.attributes import NeedsRequest
from buildidfs.view.tree import Keep, View

if TYPE_CHECKING:
    from buildidfs.store import Store
    from buildidfs.view.layouts.id_dir import MayCome
    from buildidfs.view.tree import Served

_BOTH: Final = (Kind.EXECUTABLE, Kind.DEBUGINFO)

_PERF: Final = (Kind.EXECUTABLE,)

_OF_ALL: Final = dict.fromkeys((names.PATH, names.VARIANTS, names.SECTION), _BOTH)

Wanted = tuple[BuildId, tuple[Kind, ...]]
"""A build ID, and the requested kinds of files."""


def view_of(store: Store, *, zero_scripts: bool = True, may_come: MayCome | None = None) -> View:
    """Return the view over a store of either class; see `View`."""
    if isinstance(store, TieredStore):
        return TieredView(store, zero_scripts=zero_scripts, may_come=may_come)
    return View(store, zero_scripts=zero_scripts, may_come=may_come)


class TieredView(View):
    """The tree of names over a store and buckets; see `View`."""

    def __init__(
        self, store: TieredStore, *, zero_scripts: bool = True, may_come: MayCome | None = None
    ) -> None:
        super().__init__(store, zero_scripts=zero_scripts, may_come=may_come)
        self._remote = store.remote

    def child(self, node: int, name: bytes) -> int:
        """Return the node of an entry of a directory, 0 if there is none.

        Raises `NeedsRequest` if only a bucket has the answer, `RemoteUnavailable` if it does not
        answer.
        """
        found = super().child(node, name)
        if found and not nodes.leads_to_wanted(found):
            return found
        # Buckets are asked before servers from which the file may be fetched.
        wanted = self._wanted(node, name)
        if wanted is None or self._is_known(*wanted, found):
            return found
        if node < nodes.PERF_BUCKET + 256 and self._remote.is_likely(*wanted):
            return self._likely(node, *wanted)
        raise NeedsRequest

    def _is_known(self, build_id: BuildId, kinds: tuple[Kind, ...], found: int) -> bool:
        """Return True if it is known without a request which of these files exist.

        Raises `RemoteUnavailable` if no bucket can answer, unless the store has the file
        (``found``).
        """
        try:
            return self._remote.is_known(build_id, kinds)
        except RemoteUnavailable:
            if not found:
                raise
            return True

    def _likely(self, node: int, build_id: BuildId, kinds: tuple[Kind, ...]) -> int:
        """Return the node of an entry that a bucket probably has, in a directory that all readers
        share.

        The kernel looks up one name of a directory at a time, so nothing may wait here for a
        bucket. The entry leads to the directory of the build ID, whose own look-ups may wait.
        """
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            ordinal = self._remote.number(build_id)
        if node == nodes.ROOT:
            self._remote.ask_soon(build_id, kinds)  # so that a listing has its files
            return nodes.of_id(ordinal)
        if node == nodes.PERF:
            return nodes.of_perf_id(0, ordinal)
        if node >= nodes.PERF_BUCKET:
            return nodes.of_id(ordinal, nodes.SLOT_PERF_LINK)
        is_debug = kinds == (Kind.DEBUGINFO,)
        return nodes.of_id(
            ordinal, nodes.SLOT_DEBUGINFO_LINK if is_debug else nodes.SLOT_EXECUTABLE_LINK
        )

    def served(self, name: bytes, kind: Kind, *, wait: bool) -> Served | None:
        """Return the served file of a build ID or an alias; see `View.served`.

        Raises `RemoteUnavailable` if no bucket can answer for a file that the store lacks.
        """
        found = super().served(name, kind, wait=wait)
        build_id = names.parse(name)
        if found is not None or build_id is None or self._is_known(build_id, (kind,), 0):
            return found
        if not wait:
            raise NeedsRequest
        self._remote.ask(build_id, (kind,))
        return super().served(name, kind, wait=wait)

    def lookup_slowly(self, node: int, name: bytes) -> int:
        """Look up an entry in the buckets, or one for which a file has to be read.

        Raises `RemoteUnavailable`, OSError, `IntegrityError`.
        """
        wanted = self._wanted(node, name)
        if wanted is None:
            if nodes.slot_of(node) == nodes.SLOT_SECTIONS and nodes.any_ordinal_of(node):
                build_id = self._store.index.build_id(nodes.ordinal_of(node))
                if build_id is not None:
                    self._remote.ask(build_id, _BOTH)
            return super().lookup_slowly(node, name)
        look = super().child
        if node >> nodes.TAG_SHIFT >= nodes.TAG_PERF_ID:
            look = super().lookup_slowly  # the file may have to be read
        try:
            self._remote.ask(*wanted)
        except RemoteUnavailable:
            found = look(node, name)
            if not found:
                raise
            return found
        return look(node, name)

    def _keep(self, parent: int, name: bytes, node: int) -> Keep:
        keep = super()._keep(parent, name, node)
        if keep is not Keep.ANNOUNCED:
            return keep
        if node == nodes.ABSENT:  # another host may add the file at any time
            return keep if self._wanted(parent, name) is None else Keep.NEVER
        return Keep.BRIEFLY if _is_remote(node) else keep

    def _wanted(self, node: int, name: bytes) -> Wanted | None:
        """Return the files for a name; None for a name that no bucket can have."""
        if node in (nodes.ROOT, nodes.PERF):
            build_id = names.parse(name)
            return None if build_id is None else (build_id, _BOTH if node == nodes.ROOT else _PERF)
        if nodes.DEBUG_BUCKET <= node < nodes.PERF_BUCKET:
            parsed = names.parse_split(node - nodes.DEBUG_BUCKET, name)
            if parsed is None:
                return None
            return parsed[0], (Kind.DEBUGINFO if parsed[1] else Kind.EXECUTABLE,)
        if nodes.PERF_BUCKET <= node < nodes.PERF_BUCKET + 256:
            parsed = names.parse_split(node - nodes.PERF_BUCKET, name)
            return None if parsed is None or parsed[1] else (parsed[0], _PERF)
        if node >> nodes.TAG_SHIFT >= nodes.TAG_PERF_ID:
            kind = names.PERF_KIND_OF.get(name)
            found = None if kind is None else self._store.index.build_id(nodes.perf_id_of(node)[1])
            # The executable is needed, too: it decides which file fits.
            return None if kind is None or found is None else (found, (Kind.EXECUTABLE, kind))
        if node >> nodes.TAG_SHIFT == nodes.TAG_ID and not node & nodes.SLOT_BITS:
            kind = names.KIND_OF.get(name)
            kinds = _OF_ALL.get(name, ()) if kind is None else (kind,)
            found = self._store.index.build_id(nodes.ordinal_of(node)) if kinds else None
            return None if found is None else (found, kinds)
        return None


def _is_remote(node: int) -> bool:
    """Return True for a node that becomes invalid when the process ends, or when the store gets
    the file.
    """
    ordinal = nodes.any_ordinal_of(node)
    if ordinal >= FIRST_ORDINAL:
        return True
    if node >> nodes.TAG_SHIFT != nodes.TAG_ID or not nodes.slot_of(node) & nodes.KIND_MASK:
        return False
    return node & nodes.DETAIL_MASK & VARIANT >= VARIANT - MOST_VARIANTS
