# SPDX-License-Identifier: Apache-2.0
"""The build IDs that a path had, and the places of a build ID: origins and journal merged.

Origins are places of bytes that the store holds or held; the journal also has files that could not
be captured.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import msgspec

from buildidfs import names, wording
from buildidfs.answers import Sighted
from buildidfs.capture.origin import builder
from buildidfs.catalog import containers
from buildidfs.formats.container import cgroup
from buildidfs.located import InContainer, path_fields, utf8
from buildidfs.model import BuildId
from buildidfs.store.location_rows import Removal
from buildidfs.store.run_files import LostFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import Origin
    from buildidfs.store import JournalRecord, OriginRecord, Store

    JournalRow: TypeAlias = JournalRecord | LostFiles

_ROOT: Final = 0
# Files of packages and images were never in a namespace: their label names the package or image.
_PACKED: Final = ("package", "image")


class SightedPath(msgspec.Struct):
    """A build ID at a path, in a container (its label; empty: the host) of the machine ``host``.

    Times are in nanoseconds of Unix time. ``held`` is True if the store has bytes of the build ID.
    ``cgroup`` is the control group of one of the sightings. ``removed`` is the removal of the bytes
    by a limit, if the store has none.
    """

    build_id: BuildId
    path: bytes
    container: str
    host: str
    first_seen_ns: int
    last_seen_ns: int
    held: bool
    cgroup: bytes = b""
    removed: Removal | None = None


class SeenPlace(InContainer, frozen=True, kw_only=True):
    """A build ID at a path of the machine ``host``; a row of ``which`` and ``where``.

    ``held`` is True if the store has bytes of it; ``removed`` is the time at which a limit removed
    them. Times are Unix time in seconds.
    """

    build_id: BuildId
    host: str
    held: bool
    removed: int | None
    first_seen: float
    last_seen: float

    @property
    def state(self) -> str:
        """Return ``held``, ``removed`` or ``missing``."""
        return "held" if self.held else "missing" if self.removed is None else "removed"


class JournalSighting(Sighted, frozen=True, kw_only=True):
    """A file that a watch saw; a row of ``journal``.

    ``omitted`` identifies a file for which the store had no room. The other fields are those of
    `SeenPlace`.
    """

    build_id: BuildId
    held: bool
    removed: int | None
    omitted: dict[str, int] | None
    lost: None = None
    boot_id: str

    @property
    def state(self) -> str:
        """Return ``held``, ``removed``, ``omitted`` or ``missing``."""
        if self.held:
            return "held"
        if self.removed is not None:
            return "removed"
        return "missing" if self.omitted is None else "omitted"


class JournalLoss(InContainer, frozen=True, kw_only=True):
    """Files that a watch saw and lost, for the reason ``lost``; a row of ``journal``."""

    build_id: str | None
    held: bool = False
    lost: str
    count: int
    mnt_ns_id: int
    host: str
    last_seen: float

    @property
    def state(self) -> str:
        """Return ``lost``."""
        return "lost"


JournalEntry: TypeAlias = JournalSighting | JournalLoss


def seen_places(store: Store, found: Iterable[SightedPath]) -> list[SeenPlace]:
    """Return places with the names of their containers."""
    called = containers.Names(store)
    return [
        SeenPlace(
            **path_fields(each.path),
            **called.fields(each.container, each.cgroup),
            build_id=each.build_id,
            host=each.host,
            held=each.held,
            removed=None if each.removed is None else each.removed.time,
            first_seen=each.first_seen_ns / 1e9,
            last_seen=each.last_seen_ns / 1e9,
        )
        for each in found
    ]


def at_path(
    store: Store, path: bytes, label: str | None = None, *, others: Iterable[bytes] = ()
) -> list[SightedPath]:
    """Return every build ID that was seen at that path or one of the ``others``, the last seen
    first.

    ``label`` is a container as a user names it, see `containers.meant`. The function reads the rows
    of that path only, and of its other name if /usr is merged (`names.merged`). Artifacts that the
    store holds are found whatever their kind.
    """
    found = _Places(store, label)
    spellings = (name for one in (path, *others) for name in (one, *names.merged(one)))
    for each in dict.fromkeys(spellings):
        if number := store.paths.number(filter(None, each.split(b"/"))):
            found.held(number, each)
        found.journal(store.journal.at(None, each))
    return found.last_first()


def at_paths(store: Store, glob: str, label: str | None = None) -> list[SightedPath]:
    """Return the same as `at_path`, for all paths that match a pattern, in which ``*`` matches
    slashes, too.

    Reads every path.
    """

    fits = wording.glob(glob).match
    found = _Places(store, label)
    for number, path in _paths(store):
        if fits(path):
            found.held(number, path)
    found.journal(record for record in store.journal.since() if fits(record.path))
    return found.last_first()


def of_build_id(store: Store, build_id: BuildId) -> list[SightedPath]:
    """Return every place at which a build ID was seen, the last one first."""
    found = _Places(store, None)
    found.origins(build_id, store.index.origins(store.index.ordinal(build_id) or 0))
    found.journal(store.journal.of(build_id))
    return found.last_first()


class _Places:
    """Merges the rows of the same place; only those of one container if ``label`` is given."""

    def __init__(self, store: Store, label: str | None) -> None:
        self._store = store
        self._is_meant = None if label is None else containers.meant(store, label)
        self._found: dict[tuple[bytes, bytes, str, str, bytes], SightedPath] = {}
        self._held: dict[bytes, bool] = {}
        self._removals: dict[BuildId, Removal] | None = None

    def held(self, number: int, path: bytes) -> None:
        """Add the build IDs of a path in the store's tree."""
        name = path.lstrip(b"/")
        for ordinal in self._store.paths.ids(number):
            build_id = self._store.index.build_id(ordinal)
            if build_id is not None:
                records = self._store.index.origins(ordinal)
                here = (each for each in records if each.origin.path.lstrip(b"/") == name)
                self.origins(build_id, here)

    def origins(self, build_id: BuildId, records: Iterable[OriginRecord]) -> None:
        """Add the origins of a build ID."""
        for record in records:
            origin = record.origin
            self._add(build_id, origin, record)

    def journal(self, records: Iterable[JournalRecord]) -> None:
        """Add rows of the journal."""
        for record in records:
            self._add(record.build_id, record, record)

    def last_first(self) -> list[SightedPath]:
        """Return all places, the last seen first."""
        return sorted(
            self._found.values(),
            key=lambda place: (-place.last_seen_ns, place.container, place.path, place.build_id),
        )

    def _add(
        self, build_id: BuildId, at: Origin | JournalRecord, record: OriginRecord | JournalRecord
    ) -> None:
        label, group = containers.reported_at(at), at.cgroup
        if self._is_meant is not None and not self._is_meant(label):
            return
        first, last = record.first_seen_ns, record.last_seen_ns
        # Two containers with one label are two places.
        where = cgroup.place(group) if cgroup.container_id(group) else b""
        key = build_id, at.path, label, at.host, where
        place = self._found.get(key)
        if place is None:
            held = self._is_held(build_id)
            removed = None if held else self._removed(build_id)
            place = SightedPath(
                build_id, at.path, label, at.host, first, last, held, group, removed
            )
            self._found[key] = place
        place.first_seen_ns = min(place.first_seen_ns, first)
        place.last_seen_ns = max(place.last_seen_ns, last)

    def _removed(self, build_id: BuildId) -> Removal | None:
        if self._removals is None:
            self._removals = self._store.journal.removals()
        return self._removals.get(build_id)

    def _is_held(self, build_id: BuildId) -> bool:
        held = self._held.get(build_id)
        if held is None:
            held = self._held[build_id] = containers.is_held(self._store, build_id)
        return held


def _paths(store: Store) -> Iterator[tuple[int, bytes]]:
    """Yield number and spelling of every path in the store's tree."""
    waiting: list[tuple[int, bytes]] = [(_ROOT, b"")]
    while waiting:
        parent, path = waiting.pop()
        for name, number in store.paths.children(parent):
            # A name without a slash, such as [vdso], has no place in the filesystem.
            is_name = parent == _ROOT and name.startswith(b"[")
            child = name if is_name else path + b"/" + name
            yield number, child
            waiting.append((number, child))


def container_of(seen: Origin | JournalRecord, names: tuple[str, ...] | None) -> str:
    """Return the label for reports of the container of a sighting; empty for the host.

    ``names`` are the namespaces that define a container; None uses the label at the time of the
    sighting.
    """
    if names is None or seen.scanner in _PACKED:
        return containers.reported_at(seen)
    return builder.label_by(seen.cgroup, seen.namespaces, seen.apart, names)


def sighted_fields(
    seen: Origin | JournalRecord,
    record: OriginRecord | JournalRecord,
    names: tuple[str, ...] | None,
    called: containers.Names,
) -> dict[str, Any]:
    """Return the fields of `answers.Sighted` for a sighting with the times of ``record``."""
    return {
        **path_fields(seen.path),
        **called.fields(container_of(seen, names), seen.cgroup),
        "cgroup": utf8(seen.cgroup),
        "cgroup_id": seen.cgroup_id,
        "mnt_ns_id": seen.mnt_ns_id,
        "namespaces": {
            name: getattr(seen.namespaces, name) for name in seen.namespaces.__struct_fields__
        },
        "apart": builder.apart_names(seen.apart),
        "host": seen.host,
        "scanner": seen.scanner,
        "first_seen": record.first_seen_ns / 1e9,
        "last_seen": record.last_seen_ns / 1e9,
    }


def journal_filter(
    store: Store, globs: tuple[str, ...], label: str | None, names: tuple[str, ...] | None
) -> Callable[[JournalRow], bool]:
    """Return the test that a row has to pass."""
    if not globs and label is None:
        return lambda row: True
    import os

    # A path may contain wildcard characters, and still be given literally.
    exact = {os.fsencode(glob) for glob in globs}
    patterns = [wording.glob(glob) for glob in globs]

    is_meant = None if label is None else containers.meant(store, label)

    def wanted(row: JournalRow) -> bool:
        if is_meant is not None and not is_meant(row_container(row, names)):
            return False
        path = _path(row)
        return not patterns or path in exact or any(pattern.match(path) for pattern in patterns)

    return wanted


def row_container(row: JournalRow, names: tuple[str, ...] | None) -> str:
    """Return the label of the container of a row, see `container_of`."""
    return row.container if isinstance(row, LostFiles) else container_of(row, names)


def journal_entry(
    store: Store, row: JournalRow, names: tuple[str, ...] | None, called: containers.Names
) -> JournalEntry:
    """Return the answer for a row; see `sighted_fields` for ``names`` and ``called``."""
    if isinstance(row, LostFiles):
        return JournalLoss(
            **path_fields(row.raw_path),
            **called.fields(row.container),
            build_id=row.build_id or None,
            lost=row.reason,
            count=row.count,
            mnt_ns_id=row.mnt_ns_id,
            host=row.host,
            last_seen=row.time_ns / 1e9,
        )
    identity = ("dev", "ino", "size", "mtime_ns", "ctime_ns")
    return JournalSighting(
        **sighted_fields(row, row, names, called),
        build_id=row.build_id,
        held=containers.is_held(store, row.build_id),
        removed=None if row.removed is None else row.removed.time,
        omitted=None if row.omitted is None else {x: getattr(row.omitted, x) for x in identity},
        boot_id=row.boot.hex(),
    )


def _path(row: JournalRow) -> bytes:
    return row.raw_path if isinstance(row, LostFiles) else row.path


def _time(row: JournalRow) -> int:
    return row.time_ns if isinstance(row, LostFiles) else row.last_seen_ns


def journal_rows(store: Store, since: int, lost: bool) -> Iterator[JournalRow]:
    """Yield sightings and losses in the order of time."""
    seen: Iterable[JournalRow] = () if lost else store.journal.since(since)
    gone: Iterable[JournalRow] = store.lost_since(since)
    return heapq.merge(seen, gone, key=_time)


def last_in_journal(store: Store, *, lost: bool) -> int:
    """Return the time of the last loss in the journal of a watch; unless ``lost``, also consider
    sightings.

    In nanoseconds of Unix time; 0 for never.
    """
    seen = None if lost else store.journal.last()
    gone = max((row.time_ns for row in store.lost_since()), default=0)
    return max(0 if seen is None else seen.last_seen_ns, gone)
