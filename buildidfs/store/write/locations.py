# SPDX-License-Identifier: Apache-2.0
"""Writes and removals of places in one transaction: origins, paths, entries of the journal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.errors import StoreError
from buildidfs.formats.container import cgroup
from buildidfs.linux import inodes
from buildidfs.model import Kind, Sighting, Trust, fingerprint
from buildidfs.shares import HOST, Share, Shares
from buildidfs.store import location_rows, schema
from buildidfs.store.index.locations import (
    IN_USE,
    NAMES,
    PATH_KINDS,
    ROOT,
    UNKNOWN,
    components,
    share_at,
    share_in,
    sighting_time,
)
from buildidfs.store.index.queries import DAMAGE, has_any, prefixed
from buildidfs.store.index.ranking import believed
from buildidfs.store.write.containers import NOTHING_CALLED, ContainerWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from buildidfs.model import BuildId, ContainerNames, Digest, Origin
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.values import NewSeen

_MARK: Final = 8  # bytes in *recent* for an owner
_JOURNAL_PARTS: Final = 32  # of the rows make room at a time


class PlaceWriter:
    """Writes origins, and the rows found by place: paths, names below /.dwz/, containers.

    ``changed`` collects the ordinals with new names. ``called`` is for `ContainerWriter`.
    ``naming`` collects the blobs whose sightings gave a container its names. Call `finish` last.
    """

    def __init__(
        self,
        environment: Environment,
        txn: Txn,
        counters: schema.StoreCounters,
        changed: set[int],
        called: Mapping[tuple[bytes, str], ContainerNames] = NOTHING_CALLED,
    ) -> None:
        self._txn = txn
        self._changed = changed
        self._origins = environment.tables["origins"]
        self._dwz = environment.tables["dwz"]
        self._paths = PathWriter(environment, txn, counters)
        self._pruner = PathPruner(environment, txn)
        self._containers = ContainerWriter(environment, txn, counters, called)
        self.naming: set[Digest] = set()

    def see(
        self,
        digest: Digest,
        refs: Sequence[tuple[int, int, int]],
        named: schema.OrdinalRow,
        sighting: Sighting,
        *,
        recognised: bool,
    ) -> None:
        """Record a sighting of bytes.

        ``refs`` are the artifacts of one build ID with these bytes. Adds to the counts in
        ``named``, the row of the build ID. ``recognised`` is True if the access to the file was not
        determined, because only its identity was compared.
        """
        origin, ordinal = sighting.origin, refs[0][0]
        kinds = schema.mask_of(tuple(Kind(kind) for _, kind, _ in refs))
        key = location_rows.origin_key(ordinal, digest, origin)
        old = self._txn.get(key, db=self._origins)
        if recognised and not origin.reach and old is not None:
            origin = msgspec.structs.replace(origin, reach=location_rows.reach_in(old))
        if named.next_variant[Kind.EXECUTABLE - 1] > 1:
            origin = self._as_mapped(ordinal, old, origin)
        public = origin.is_public
        at = Sighting(origin, sighting.seen_ns)
        has_room = self._put_origin(key, old, digest, kinds, named, at)
        most = named.paths + 1 if has_room else _most_paths(origin)
        primary = bool(kinds & PATH_KINDS)
        if self._paths.add(named, ordinal, origin.path, most, primary=primary, public=public):
            self._changed.add(ordinal)
        self._add_dwz(ordinal, named, origin, old is None)
        if self._containers.see(sighting, min(refs), public=public):
            self.naming.add(digest)

    def _as_mapped(self, ordinal: int, old: bytes | None, origin: Origin) -> Origin:
        """Return the new row of a place where one of several executables of a build ID was.

        The place of a mapped file stays one, because `placement` chooses among them by that.
        """
        before = "" if old is None else location_rows.unpack_origin(old)[2].scanner
        if origin.scanner in IN_USE and before not in IN_USE:
            self._changed.add(ordinal)
        elif before in IN_USE and origin.scanner not in IN_USE:
            return msgspec.structs.replace(origin, scanner=before)
        return origin

    def refer(self, ordinal: int, path: bytes, supplement: BuildId, origin: Origin) -> None:
        """Record the path of a dwz file that debuginfo seen at ``origin`` refers to.

        A name under which a dwz file was seen takes precedence. References in private files are not
        recorded, because the name is public.
        """
        name = location_rows.dwz_name(path)
        if not name or not origin.is_public:
            return
        old = self._txn.get(name, db=self._dwz)
        before = None if old is None else _dwz_row(name, old)
        place = origin.trust, origin.standing
        if before is not None and (not before.referred or believed(before.place) > believed(place)):
            return
        value = schema.DwzRow(ordinal, *place, True, supplement).pack(name)
        if value != old:
            self._txn.put(name, value, db=self._dwz)

    def finish(self) -> None:
        """Write the rows of containers."""
        self._containers.finish()

    def _put_origin(
        self,
        key: bytes,
        old: bytes | None,
        digest: Digest,
        kinds: int,
        named: schema.OrdinalRow,
        sighting: Sighting,
    ) -> bool:
        """Write a place; return True if another one has made room for its path."""
        has_room = False
        first = last = sighting.seen_ns
        if old is not None:
            times = location_rows.TIMES.unpack_from(old)
            first, last = min(first, times[0]), max(last, times[1])
        elif named.origins >= schema.MAX_ORIGINS:
            has_room = self._replace_origin(key[:8], named, sighting.origin)
        else:
            named.origins += 1
        value = location_rows.pack_origin(digest, kinds, sighting.origin, first, last)
        self._txn.put(key, value, db=self._origins)
        return has_room

    def _replace_origin(self, ordinal: bytes, named: schema.OrdinalRow, new: Origin) -> bool:
        """Drop the place last seen longest ago of the owner with the most, for a ``new`` one.

        The first place is kept, and root of the host has a reserve. If there is no room for the
        path of the new place, that of the dropped one goes, too; returns True then.
        """
        places = self._places_of(ordinal)
        counts = Counter(each.share.owner for each in places)
        counts[share_at(new).owner] += 1
        counts[HOST.owner] = max(counts[HOST.owner] - _reserve(schema.MAX_ORIGINS), 0)
        places.remove(min(places, key=lambda each: (each.first, each.last)))
        gone = max(places, key=lambda each: (counts[each.share.owner], -each.last))
        self._txn.delete(gone.key, db=self._origins)
        is_its = all(
            each.path != gone.path or each.share.owner == gone.share.owner for each in places
        )
        if named.paths < _most_paths(new) or not is_its:
            return False
        return self._drop_path(int.from_bytes(ordinal, "big"), named, gone.path, new.path)

    def fills(self, ordinal: int, origin: Origin) -> bool:
        """Return True if no owner but root of the host has more places of a build ID than the one
        of ``origin``.
        """
        counts = Counter(each.share.owner for each in self._places_of(schema.U64.pack(ordinal)))
        counts.pop(HOST.owner, None)
        return 0 < counts[share_at(origin).owner] == max(counts.values())

    def _places_of(self, ordinal: bytes) -> list[_Place]:
        return [_place(*row) for row in prefixed(self._txn, self._origins, ordinal)]

    def _drop_path(
        self, ordinal: int, named: schema.OrdinalRow, path: bytes, new_path: bytes
    ) -> bool:
        """Remove a path of a build ID to make room for a new one, unless it is the primary one;
        return True if it was removed.
        """
        find, has = self._pruner.find, self._pruner.has
        if components(new_path) is None or has(find(new_path), ordinal):
            return False
        number = find(path)
        if number in (ROOT, named.primary_path) or not has(number, ordinal):
            return False
        self._pruner.drop(named, ordinal, number)
        self._paths.forget_numbers()
        self._changed.add(ordinal)
        return True

    def _add_dwz(
        self, ordinal: int, named: schema.OrdinalRow, origin: Origin, new_origin: bool
    ) -> None:
        name = location_rows.dwz_name(origin.path)
        if not name:
            return
        old = self._txn.get(name, db=self._dwz)
        place, public = (origin.trust, origin.standing), origin.is_public
        is_believed = origin.trust >= Trust.PACKAGE
        if old is None and named.origins >= schema.MAX_ORIGINS and not is_believed:
            return  # a container can make any number of links to a file
        before = None if old is None else _dwz_row(name, old)
        if before is not None:
            is_later = new_origin or bool(before.referred)
            if before.ordinal == ordinal and not before.referred:
                place = max(place, before.place, key=believed)
                public = public or before.public
            elif believed(place) < believed(before.place) or (
                place == before.place and not is_later
            ):
                return
        value = schema.DwzRow(ordinal, *place, public).pack(name)
        if value != old:
            self._txn.put(name, value, db=self._dwz)
            self._changed.add(ordinal)


class _Place(NamedTuple):
    """A row of *origins*."""

    key: bytes
    first: int
    last: int
    share: Share
    path: bytes


def _place(key: bytes, value: bytes) -> _Place:
    first, last = location_rows.TIMES.unpack_from(value)
    try:
        row = location_rows.origin_row(value)
    except DAMAGE:  # `check` reports it
        return _Place(key, first, last, UNKNOWN, b"")
    return _Place(key, first, last, share_in(row), row.path)


def _reserve(most: int) -> int:
    """Return the number of places or paths of a build ID that only root of the host can take."""
    return most * 3 // 4


def _most_paths(origin: Origin) -> int:
    """Return the number of paths that a build ID may have after a new path at that place."""
    most = schema.MAX_PATHS
    return most if share_at(origin) == HOST else most - most // 4


def _dwz_row(name: bytes, value: bytes) -> schema.DwzRow | None:
    """Return a row of *dwz*; None if it is damaged, which `check` reports."""
    try:
        return schema.DwzRow.unpack(name, value)
    except DAMAGE:
        return None


class _PathTables:
    """The tables of paths, for one write transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        tables = environment.tables
        self._names = tables["names"]
        self._paths = tables["paths"]
        self._pathids = tables["pathids"]
        self._nameids = tables["nameids"]


class PathWriter(_PathTables):
    """Adds paths within one write transaction."""

    def __init__(self, environment: Environment, txn: Txn, counters: schema.StoreCounters) -> None:
        super().__init__(environment, txn)
        self._counters = counters
        self._cache: dict[tuple[int, bytes], tuple[int, bool]] = {}

    def add(
        self,
        row: schema.OrdinalRow,
        ordinal: int,
        path: bytes,
        most: int,
        *,
        primary: bool,
        public: bool,
    ) -> bool:
        """Add a build ID to a path; return True if it is new there. Adds to the counts of ``row``.

        If the build ID has ``most`` paths, only a primary one is added.

        With ``primary``, the path becomes the primary one if there is none yet. It also replaces a
        primary path at which not all users could read the file, if they could read it here
        (``public``).
        """
        names = components(path)
        if names is None:
            return False
        primary = primary and (
            row.primary_path == ROOT or (public and not self._is_public(row.primary_path, ordinal))
        )
        if row.paths >= most and not primary:
            return False  # before names are written that would not be used
        number = ROOT
        for name in names:
            number = self._intern(number, name, public=public)
        if primary:
            row.primary_path = number
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        mark = schema.PUBLIC if public else b""
        added: bool = self._txn.put(key, mark, overwrite=False, db=self._pathids)
        if added:
            row.paths += 1
            self.add_name(ordinal, names[-1], public=public)
        elif public and not self._txn.get(key, db=self._pathids):
            self._txn.put(key, mark, db=self._pathids)
            self.add_name(ordinal, names[-1], public=True, count=0)
        return added

    def forget_numbers(self) -> None:
        """Read all numbers of paths from the table again, after a removal of paths."""
        self._cache.clear()

    def add_name(self, ordinal: int, name: bytes, *, public: bool, count: int = 1) -> None:
        """Add ``count`` to the number of paths of a build ID with that last name."""
        key = schema.PATH_ORDINAL.pack(self._intern(NAMES, name, public=public), ordinal)
        value = self._txn.get(key, bytes(schema.U16.size), db=self._nameids)
        before = int.from_bytes(value[: schema.U16.size], "big")
        mark = schema.PUBLIC if public else value[schema.U16.size :]
        self._txn.put(key, schema.U16.pack(before + count) + mark, db=self._nameids)

    def _is_public(self, number: int, ordinal: int) -> bool:
        return bool(self._txn.get(schema.PATH_ORDINAL.pack(number, ordinal), db=self._pathids))

    def _intern(self, parent: int, name: bytes, *, public: bool) -> int:
        known = self._cache.get((parent, name))
        if known is not None and (known[1] or not public):
            return known[0]
        key = schema.U32.pack(parent) + name
        value = self._txn.get(key, db=self._names)
        if value is None:
            number, marked = self._new(parent, name, key), False
        else:
            number, marked = schema.number_in(value), len(value) > schema.U32.size
        if public and not marked:
            self._txn.put(key, schema.U32.pack(number) + schema.PUBLIC, db=self._names)
        self._cache[parent, name] = number, marked or public
        return number

    def _new(self, parent: int, name: bytes, key: bytes) -> int:
        number = self._counters.next_path
        if number > schema.MAX_NUMBER:
            raise StoreError(f"the store holds as many paths as it can number ({number - 1})")
        self._counters.next_path += 1
        self._txn.put(key, schema.U32.pack(number), db=self._names)
        self._txn.put(schema.U32.pack(number), schema.U32.pack(parent) + name, db=self._paths)
        return number


class PathPruner(_PathTables):
    """Removes paths within one write transaction."""

    def find(self, path: bytes) -> int:
        """Return the number of a path; `ROOT` if it has none."""
        number = ROOT
        for name in components(path) or ():
            value = self._txn.get(schema.U32.pack(number) + name, db=self._names)
            if value is None:
                return ROOT
            number = schema.number_in(value)
        return number

    def has(self, number: int, ordinal: int) -> bool:
        """Return True if a path has a build ID."""
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        return self._txn.get(key, db=self._pathids) is not None

    def drop(self, row: schema.OrdinalRow, ordinal: int, number: int) -> None:
        """Remove a build ID from a path; remove the path if it becomes empty.

        Subtracts from the counts of ``row``.
        """
        if self._txn.delete(schema.PATH_ORDINAL.pack(number, ordinal), db=self._pathids):
            row.paths -= 1
            self._drop_name(number, ordinal)
            self._prune(number)

    def _drop_name(self, number: int, ordinal: int) -> None:
        """Subtract one from the number of paths of a build ID with the last name of that path."""
        path = self._txn.get(schema.U32.pack(number), db=self._paths)
        named = path and self._txn.get(schema.U32.pack(NAMES) + path[4:], db=self._names)
        if not named:
            return
        key = named[: schema.U32.size] + schema.U64.pack(ordinal)
        value = self._txn.get(key, bytes(schema.U16.size), db=self._nameids)
        count = int.from_bytes(value[: schema.U16.size], "big")
        if count > 1:
            rest = value[schema.U16.size :]
            self._txn.put(key, schema.U16.pack(count - 1) + rest, db=self._nameids)
        elif self._txn.delete(key, db=self._nameids):
            self._prune(schema.number_in(named))

    def _prune(self, number: int) -> None:
        tables = (self._pathids, self._nameids, self._names)
        while number not in (ROOT, NAMES):
            key = schema.U32.pack(number)
            if any(has_any(self._txn, table, key) for table in tables):
                return
            value = self._txn.get(key, db=self._paths)
            if value is None:
                return
            self._txn.delete(value, db=self._names)
            self._txn.delete(key, db=self._paths)
            number = int.from_bytes(value[:4], "big")


class JournalWriter:
    """Writes entries of the journal in one transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._rows = environment.tables["journal"]
        self._recent = environment.tables["recent"]
        self._boot = inodes.boot_id()
        self._count: int = txn.stat(self._rows)["entries"]
        self._labels: dict[bytes, str | None] = {}
        self.omitted = 0
        """Number of new entries for files for which the store had no room."""

    def add(self, entries: Iterable[NewSeen]) -> None:
        """Write the entries that are new, or whose row is older than a minute."""
        for new in entries:
            self._add(new)

    def _add(self, new: NewSeen) -> None:
        origin, seen = new.sighting.origin, sighting_time(new.sighting.seen_ns)
        boot = self._boot if new.boot is None else new.boot
        key = location_rows.journal_key(origin, new.build_id, boot, self._label(origin))
        old = self._txn.get(key, db=self._rows)
        if old is None:
            row = location_rows.pack_journal(
                origin, new.build_id, seen, seen, omitted=new.omitted, removed=new.removed
            )
            self._put(key, row, seen, origin)
            self._count += 1
            self.omitted += new.omitted
            if self._count > schema.MAX_JOURNAL:
                self._make_room()
            return
        if new.removed is not None:
            omitted = origin.identity if new.omitted else None
            self.omitted += new.omitted and not location_rows.is_omitted(old)
            row = location_rows.mark_removed(old, new.removed, omitted)
            self._txn.put(key, row, db=self._rows)
            return
        removed = location_rows.removal_in(old)
        first, last = location_rows.TIMES.unpack_from(old)
        newly = new.omitted and not location_rows.is_omitted(old)
        self.omitted += newly
        if seen < first:
            # The first of the sightings within a minute describes the row. They are not committed
            # in their order: a scan of a process may overtake the catch that caused it.
            row = location_rows.TIMES.pack(seen, last) + old[location_rows.TIMES.size :]
            is_soon = last < seen + schema.LAST_SEEN_SLACK_NS
            if newly or (is_soon and new.omitted == location_rows.is_omitted(old)):
                row = location_rows.pack_journal(
                    origin, new.build_id, seen, last, omitted=new.omitted, removed=removed
                )
            self._txn.put(key, row, db=self._rows)
        elif seen >= last + schema.LAST_SEEN_SLACK_NS or newly:
            self._txn.delete(schema.U64.pack(last) + key, db=self._recent)
            seen = max(seen, last)
            row = location_rows.pack_journal(
                origin, new.build_id, first, seen, omitted=new.omitted, removed=removed
            )
            self._put(key, row, seen, origin)

    def _label(self, origin: Origin) -> str | None:
        """Return the container label in the control group, for any definition of containers."""
        if not origin.apart:
            return None
        try:
            return self._labels[origin.cgroup]
        except KeyError:
            label = self._labels[origin.cgroup] = cgroup.container_label(origin.cgroup)
            return label

    def _put(self, key: bytes, row: bytes, last: int, origin: Origin) -> None:
        self._txn.put(key, row, db=self._rows)
        owner = share_at(origin).owner
        mark = fingerprint(owner.encode("utf-8", "surrogateescape"), _MARK) if owner else b""
        self._txn.put(schema.U64.pack(last) + key, mark, db=self._recent)

    def _make_room(self) -> None:
        """Remove a few rows of the owners with the most, those last seen longest ago.

        The owners of all rows have to be counted for it, so this makes room for many new rows.
        """
        shares = Shares()
        with self._txn.cursor(self._recent) as cursor:
            for mark, count in Counter(cursor.iternext(keys=False)).items():
                shares.add(Share(mark.hex()), count)
        gone: Counter[str] = Counter()
        for _ in range(self._count - schema.MAX_JOURNAL + schema.MAX_JOURNAL // _JOURNAL_PARTS):
            if (largest := shares.largest()) is not None:
                shares.add(largest, -1)
                gone[largest.owner] += 1
        orders = []
        with self._txn.cursor(self._recent) as cursor:
            rows = cursor.iternext()
            while gone and (row := next(rows, None)) is not None:
                if gone[owner := row[1].hex()]:
                    orders.append(row[0])
                    gone[owner] -= 1
                gone += Counter()
        for order in orders:
            self._txn.delete(order, db=self._recent)
            self._txn.delete(order[8:], db=self._rows)
        self._count -= len(orders)
