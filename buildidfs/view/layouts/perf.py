# SPDX-License-Identifier: Apache-2.0
"""``perf/…``: the store in the shape of a build ID cache of perf (``perf --buildid-dir``).

    perf/<origpath>/<id>/{elf,debug,vdso,kallsyms}      real directories, the files of <id>/
    perf/.build-id/ab/cdef… -> ../../<origpath>/<id>    perf wants a link to a directory here

perf crashes if it finds ``debug`` without ``elf`` (6.12, 7.2), so no directory has only ``debug``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs import names
from buildidfs.model import Kind
from buildidfs.store import placement
from buildidfs.view import nodes
from buildidfs.view.layouts.by_path import Paths
from buildidfs.view.layouts.debug import EXECUTABLE_BIT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import Artifact
    from buildidfs.store import Store
    from buildidfs.view.layouts.id_dir import IdDirectories

_SHOWN_KINDS = EXECUTABLE_BIT | 1 << Kind.VDSO | 1 << Kind.KALLSYMS
"""Bits of kinds. perf sees the directory of a build ID only if it has a file of one of
these kinds.
"""

_BUCKETS_NAME = b".build-id"
_STAMPED = (Kind.EXECUTABLE, Kind.DEBUGINFO)
_ENTRIES = tuple(names.PERF_KIND_OF.items())

# Offsets in a listing of a path: the fixed entry, then sub-directories by path number, then
# build IDs by ordinal.
_OFFSET_BUCKETS = 1
_OFFSET_PATHS = 1 << 32
_OFFSET_IDS = 1 << 33

_PATH_MAX = 4096


class PerfTree:
    """Directories for the paths at which executables were seen."""

    def __init__(self, store: Store, ids: IdDirectories) -> None:
        self._store = store
        self._ids = ids
        self._paths = Paths(store, _SHOWN_KINDS)

    # --- <origpath> ------------------------------------------------------------------------

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        path = nodes.path_of(node)
        if name == _BUCKETS_NAME and path == 0:
            return nodes.PERF_BUCKETS
        ordinal = self._paths.seen_at(path, name)
        if ordinal is not None:
            return nodes.of_perf_id(path, ordinal)
        if path == 0 and (ordinal := self._without_path(name)) is not None:
            return nodes.of_perf_id(path, ordinal)
        child = self._store.paths.child(path, name)
        return nodes.of_path(child) if child else nodes.ABSENT

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset."""
        path = nodes.path_of(node)
        if path == 0 and after < _OFFSET_BUCKETS:
            yield _BUCKETS_NAME, nodes.PERF_BUCKETS, _OFFSET_BUCKETS
        if after < _OFFSET_IDS:
            for name, number in self._paths.directories(path, after - _OFFSET_PATHS):
                if path or name != _BUCKETS_NAME:
                    yield name, nodes.of_path(number), _OFFSET_PATHS + number
        for ordinal, build_id in self._paths.ids(path, max(0, after - _OFFSET_IDS)):
            node = nodes.of_perf_id(path, ordinal)
            yield names.spell(build_id), node, _OFFSET_IDS + ordinal

    def is_public(self, node: int, name: bytes, child: int) -> bool:
        """Return True if all users may know of an entry."""
        path = nodes.path_of(node)
        ordinal = nodes.any_ordinal_of(child)
        if child == nodes.PERF_BUCKETS or (path == 0 and ordinal):
            return True  # the latter shows no path
        return self._paths.is_public(path, name, ordinal)

    def _without_path(self, name: bytes) -> int | None:
        """Return the ordinal of a build ID whose directory needs no path, and is not listed."""
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.index.ordinal(build_id)
        if ordinal is None:
            return None
        if (
            not self._is_chosen_from(ordinal)
            and self._store.index.primary_path(ordinal) is not None
        ):
            return None
        return ordinal if self._store.index.kinds(ordinal) & _SHOWN_KINDS else None

    def _is_chosen_from(self, ordinal: int) -> bool:
        """Return True if the files for perf may differ from those in the directory ``<id>``."""
        return self._store.aliases.is_adopted(ordinal) or placement.differs(self._store, ordinal)

    def places(
        self, node: int, name: bytes, child: int
    ) -> tuple[Callable[[bytes], bool], Iterable[int]]:
        """See `Paths.places`."""
        return self._paths.places(nodes.path_of(node), name, nodes.any_ordinal_of(child))

    # --- <origpath>/<id> -------------------------------------------------------------------

    def lookup_file(self, node: int, name: bytes, *, wait: bool = False) -> int:
        """Return the node of a file in the directory of a build ID.

        If programs share a build ID, the path selects one of them. If the files of a build ID have
        their code at other offsets, the one that was mapped is served (`store.placement`). perf
        expects the build ID of the directory in the file, even an adopted one. Raises
        `NeedsReading` if the file has to be read for that, and the call may not ``wait``.
        """
        kind = names.PERF_KIND_OF.get(name)
        if kind is None:
            return nodes.ABSENT
        path, ordinal = nodes.perf_id_of(node)
        if self._store.aliases.is_ambiguous(ordinal):
            found = self._last_seen(path, ordinal, kind)
            return nodes.ABSENT if found is None else self._ids.node_of(found)
        if kind is Kind.DEBUGINFO and not self._store.index.kinds(ordinal) & EXECUTABLE_BIT:
            return nodes.ABSENT
        if kind in _STAMPED and not self._store.aliases.is_adopted(ordinal):
            fits = placement.for_offsets(self._store, ordinal, kind)
            return nodes.ABSENT if fits is None else self._ids.node_of(fits)
        if kind in _STAMPED:
            executable = self._store.index.artifact(ordinal, Kind.EXECUTABLE)
            served = self._store.index.artifact(ordinal, kind)
            if executable is not None and executable.adopted and served is not None:
                return self._ids.stamped(served, wait=wait)
        return self._ids.file(ordinal, kind)

    def _last_seen(self, path: int, ordinal: int, kind: Kind) -> Artifact | None:
        """Return the file that was last seen at a path, of those with a build ID and kind."""
        spelled = self._store.paths.spelled(path)
        for record in self._store.index.origins(ordinal):  # newest first
            if record.origin.path != spelled:
                continue
            for of, variant in self._store.index.variants_with(record.digest, ordinal):
                if of == kind:
                    return self._store.index.artifact_variant(ordinal, kind, variant)
        return None

    def files(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of the directory of a build ID: name, node, offset."""
        for offset, (name, _) in enumerate(_ENTRIES[after:], after + 1):
            found = self.lookup_file(node, name, wait=True)
            if found:
                yield name, found, offset

    # --- .build-id/ab ----------------------------------------------------------------------

    def lookup_link(self, node: int, name: bytes) -> int:
        """Return the node of a link in ``.build-id/ab``."""
        parsed = names.parse_split(node - nodes.PERF_BUCKET, name)
        if parsed is None or parsed[1]:
            return nodes.ABSENT
        ordinal = self._store.index.ordinal(parsed[0])
        return self._link(ordinal) if ordinal is not None else nodes.ABSENT

    def links(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of ``.build-id/ab``: name, node, offset."""
        first = bytes([node - nodes.PERF_BUCKET])
        last = self._store.index.build_id(after) if after else None
        if after and last is None:
            return
        for build_id, ordinal in self._store.index.build_ids_with_prefix(first, last):
            link = self._link(ordinal)
            if link:
                yield names.split(build_id)[1], link, ordinal

    def target(self, node: int) -> bytes:
        """Return the target of a link made by `lookup_link`; empty if the link has no target.

        All viewers get the same target. So for a private place the target is the directory ``<id>``
        instead, which has the same files. For an adopted ID the target is a directory in the root
        of this tree, because perf needs files with a note; so it is if perf needs another variant,
        or if no path is known, because a file of a bucket may have variants.
        """
        ordinal = nodes.ordinal_of(node)
        build_id = self._store.index.build_id(ordinal)
        path = self._store.index.primary_path(ordinal)
        if build_id is None:
            return b""
        if path is None:  # none of its paths is in the tree, or the file is in a bucket
            return b"../../" + names.spell(build_id)
        if not self._store.paths.has_publicly(path, ordinal):
            if self._is_chosen_from(ordinal):
                return b"../../" + names.spell(build_id)
            return b"../../../" + names.spell(build_id)
        original = self._store.paths.spelled(path).lstrip(b"/")
        return b"../../%s/%s" % (original, names.spell(build_id))

    def _link(self, ordinal: int) -> int:
        if not self._store.index.kinds(ordinal) & _SHOWN_KINDS:
            return nodes.ABSENT
        link = nodes.of_id(ordinal, nodes.SLOT_PERF_LINK)
        return link if 0 < len(self.target(link)) < _PATH_MAX else nodes.ABSENT

    # --- names that exist because of a build ID ----------------------------------------------

    def spellings(self, ordinal: int, paths: list[bytes]) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the names that files seen at ``paths`` have: (directory, name, True if changed)."""
        build_id = self._store.index.build_id(ordinal)
        if build_id is None:
            return
        spelled = names.spell(build_id)
        yield nodes.PERF_BUCKET + build_id[0], spelled[2:], False
        if self._is_chosen_from(ordinal):
            yield nodes.of_path(0), spelled, False
            for name in names.PERF_KIND_OF:
                yield nodes.of_perf_id(0, ordinal), name, True
        for path in paths:
            number = 0
            for name in filter(None, path.split(b"/")):
                yield nodes.of_path(number), name, False
                child = self._store.paths.child(number, name)
                if child is None:
                    break
                number = child
            else:
                if self._store.paths.has(number, ordinal):
                    yield nodes.of_path(number), spelled, True
                    directory = nodes.of_perf_id(number, ordinal)
                    for name in names.PERF_KIND_OF:
                        yield directory, name, True
