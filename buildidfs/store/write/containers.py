# SPDX-License-Identifier: Apache-2.0
"""Writes and removals of the files of containers in one transaction. See `location_rows`."""

from __future__ import annotations

import heapq
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from buildidfs.formats.container import cgroup
from buildidfs.model import NO_NAMES, Kind
from buildidfs.store import schema
from buildidfs.store.index.locations import (
    CONTAINER_ROOT,
    MAX_CONTAINERS,
    MAX_CONTENTS,
    MAX_ENTRIES,
    as_bytes,
    components,
    image_of,
    label_of,
    link_key,
    names_of,
    share_at,
    sighting_time,
    token_of,
)
from buildidfs.store.index.queries import DAMAGE, IndexRows, has_any, prefixed
from buildidfs.store.location_rows import (
    KEY,
    PUBLIC_BIT,
    TIMES,
    VALUE,
    ContainerRow,
    journal_prefix,
    offset_of,
    pack_container,
    pack_entry,
    removal_in,
    unpack_container,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.model import ContainerNames, Origin, Sighting
    from buildidfs.store.index.environment import Environment, Txn

NOTHING_CALLED: Final[Mapping[tuple[bytes, str], ContainerNames]] = MappingProxyType({})

_NO_CONTAINERS: Final = ("image:", "package:", "host:")
_EVICTED_AT_ONCE: Final = 2048
_EXTRA: Final = 128  # one part in so many of a limit is freed beyond the excess
_STAMP_SLACK_S: Final = schema.LAST_SEEN_SLACK_NS // 1_000_000_000

_Value = tuple[int, int, int, int, int]


class _ContainerTables:
    """The tables of containers, for one write transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        tables = environment.tables
        self._containers = tables["containers"]
        self._labels = tables["labels"]
        self._contents = tables["contents"]

    def _remove(self, key: bytes, row: ContainerRow | None) -> None:
        """Remove the row of an empty container, and its name."""
        if row is not None and self._txn.get(row.name, db=self._labels) == key:
            self._txn.delete(row.name, db=self._labels)
        link = link_key(row.names) if row is not None else b""
        if link and self._txn.get(link, db=self._labels) == key:
            self._txn.delete(link, db=self._labels)
        self._txn.delete(key, db=self._containers)

    def _count_down(self, key: bytes, value: bytes, row: ContainerRow, entries: int) -> None:
        """Subtract the number of removed entries in the row of a container; ``value`` is the
        present row.
        """
        row.entries = max(row.entries - entries, 0)
        first, last = TIMES.unpack_from(value)
        self._txn.put(key, pack_container(first, last, row), db=self._containers)


class _Owner:
    """An owner of containers: ``counts`` are the numbers of all containers and their rows,
    ``others`` are the (last sighting, key) of those without a row in this transaction, the last
    ones first.

    Why not `shares.Shares`? It has one number for each owner, and an eviction lowers both of these.
    """

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.counts = [0, 0]
        self.others: list[tuple[bytes, bytes]] = []

    def place_in_heap(self, unit: int) -> tuple[int, bytes, bytes, _Owner]:
        """Return an item that sorts first for the owner with the most, or else with the container
        last seen longest ago.
        """
        return -self.counts[unit], self.others[-1][0], self.name, self


class ContainerWriter(_ContainerTables):
    """Writes to the tables within one transaction; call `finish` last.

    ``called`` has the known names of containers by control group and label.
    """

    def __init__(
        self,
        environment: Environment,
        txn: Txn,
        counters: schema.StoreCounters,
        called: Mapping[tuple[bytes, str], ContainerNames] = NOTHING_CALLED,
    ) -> None:
        super().__init__(environment, txn)
        self._counters = counters
        self._called = called
        self._rows: dict[int, tuple[int, int, ContainerRow]] = {}
        self._numbers: dict[tuple[str, str, str, int, bytes], int] = {}
        self._directories: dict[tuple[int, int, bytes], tuple[int, bool]] = {}
        self._added = 0
        self._new_containers = 0

    def see(self, sighting: Sighting, artifact: tuple[int, int, int], *, public: bool) -> bool:
        """Record a sighting of an artifact (ordinal, kind, variant) in a container.

        ``public`` is True if all users could read the file. Returns True if the container got
        names.
        """
        origin = sighting.origin
        if artifact[1] > Kind.DEBUGINFO or not label_of(origin):
            return False
        names = components(origin.path)
        if names is None or not origin.path.startswith(b"/"):
            return False
        container = self._number(origin)
        if not container:
            return False
        first, last, row = self._rows[container]
        is_named = not (row.image and row.called) and self._add_names(row, origin)
        seen = sighting_time(sighting.seen_ns)
        if not first <= seen < last + schema.LAST_SEEN_SLACK_NS:
            self._rows[container] = (min(first, seen), max(last, seen), row)
        row.public = row.public or public
        directory = CONTAINER_ROOT
        for name in names[:-1]:
            directory = self._enter(container, row, directory, name, public=public)
            if not directory:
                return is_named
        ordinal, kind, variant = artifact
        shown = ordinal, kind | (PUBLIC_BIT if public else 0), variant
        self._put_file(container, row, directory, names[-1], shown, schema.stamp_of(seen))
        return is_named

    def finish(self) -> None:
        """Write the rows of containers, and make room if there are too many."""
        for number, (first, last, row) in self._rows.items():
            value = pack_container(first, last, row)
            key = schema.U32.pack(number)
            if self._txn.get(key, db=self._containers) != value:
                self._txn.put(key, value, db=self._containers)
                self._link(key, row, last)
        if self._added or self._new_containers:
            self._make_room()

    def _link(self, key: bytes, row: ContainerRow, last: int) -> None:
        """Link a user-given name to its container, unless a later container has the same name."""
        link = link_key(row.names)
        if not link:
            return
        other = self._txn.get(link, db=self._labels)
        if other is not None and other != key:
            raw = self._txn.get(other, db=self._containers, default=b"")
            if _row_in(raw) is not None and TIMES.unpack_from(raw)[1] > last:
                return
        self._txn.put(link, key, db=self._labels)

    # --- containers ------------------------------------------------------------------------

    def _number(self, origin: Origin) -> int:
        """Return the number of a container. If it has none, it gets one; 0 if all numbers are
        taken.
        """
        key = (
            label_of(origin), origin.scanner, origin.host, origin.mnt_ns_id, origin.cgroup,
        )  # fmt: skip
        known = self._numbers.get(key)
        if known is None:
            known = self._numbers[key] = self._find(origin)
        return known

    def _find(self, origin: Origin) -> int:
        token = token_of(origin)
        free = b""
        for candidate in names_of(origin, token):
            number = self._named(candidate)
            if not number:
                # The container may have the name with a suffix although the plain name is free
                # again.
                free = free or candidate
            elif not token or self._rows[number][2].token in (token, b""):
                self._rows[number][2].token = self._rows[number][2].token or token
                return number
        return self._new(free or candidate, origin)

    def _named(self, name: bytes) -> int:
        """Return the number of the container with a name, and load its row; 0 if there is none."""
        value = self._txn.get(name, db=self._labels)
        number = 0 if value is None else int.from_bytes(value, "big")
        if value is None or number in self._rows:
            return number
        raw = self._txn.get(value, db=self._containers, default=b"")
        row = _row_in(raw)
        if row is None:
            return 0
        first, last = TIMES.unpack_from(raw)
        self._rows[number] = first, last, row
        return number

    def _new(self, name: bytes, origin: Origin) -> int:
        number = self._counters.next_container
        if number > schema.MAX_CONTAINER:
            return 0
        self._counters.next_container += 1
        key = schema.U32.pack(number)
        label, image = label_of(origin), image_of(origin)
        row = ContainerRow(
            name,
            as_bytes(label),
            as_bytes(cgroup.container_id(origin.cgroup) or _id_in(label)),
            as_bytes(image),
            b"" if image else as_bytes(origin.host),
            token_of(origin),
            owner=as_bytes(share_at(origin).owner),
        )
        self._txn.put(name, key, db=self._labels)
        self._rows[number] = (2**63 - 1, 0, row)
        self._new_containers += 1
        return number

    def _add_names(self, row: ContainerRow, origin: Origin) -> bool:
        """Add newly known names of a container; return True if there are any."""
        names = self._called.get((origin.cgroup, origin.container), NO_NAMES)
        # Two containers may differ only in a part of the ID that is not in the label. A bundle has
        # no control groups, so it has the names by label.
        is_its = not origin.cgroup or row.id == as_bytes(cgroup.container_id(origin.cgroup))
        if names == NO_NAMES or not is_its:
            return False
        before = row.names
        row.image = row.image or as_bytes(names.image)
        row.called = row.called or as_bytes(names.name)
        row.pod = row.pod or as_bytes(names.pod)
        row.namespace = row.namespace or as_bytes(names.namespace)
        return row.names != before

    # --- contents --------------------------------------------------------------------------

    def _enter(
        self, container: int, row: ContainerRow, directory: int, name: bytes, *, public: bool
    ) -> int:
        """Return the number of a subdirectory, which is added if it is missing; 0 if there is no
        room for it.
        """
        known = self._directories.get((container, directory, name))
        if known is not None and (known[1] or not public):
            return known[0]
        key = KEY.pack(container, directory, offset_of(name))
        value = self._txn.get(key, db=self._contents)
        found, _, mark, *_ = _unpacked(value)
        marked = bool(found and mark & PUBLIC_BIT)
        is_new = not found
        if is_new:
            # The path of a file may have become a directory.
            if value is None and not self._count_up(row):
                return 0
            found = row.next_directory
            row.next_directory += 1
        if is_new or (public and not marked):
            mark = PUBLIC_BIT if public else 0
            value = pack_entry(key, name, found, (0, mark, 0), 0)
            self._txn.put(key, value, db=self._contents)
        self._directories[container, directory, name] = found, marked or public
        return found

    def _put_file(
        self,
        container: int,
        row: ContainerRow,
        directory: int,
        name: bytes,
        artifact: tuple[int, int, int],
        stamp: int,
    ) -> None:
        key = KEY.pack(container, directory, offset_of(name))
        old = self._txn.get(key, db=self._contents)
        if old is None:
            if not self._count_up(row):
                return
        else:
            is_directory, *was, then = _unpacked(old)
            if is_directory or then > stamp:
                return
            ordinal, kind, variant = artifact
            if was == [ordinal, kind | PUBLIC_BIT, variant]:
                artifact = ordinal, kind | PUBLIC_BIT, variant  # all users could read it before
            if tuple(was) == artifact and stamp < then + _STAMP_SLACK_S:
                return
        self._txn.put(key, pack_entry(key, name, 0, artifact, stamp), db=self._contents)

    def _count_up(self, row: ContainerRow) -> bool:
        if row.entries >= MAX_ENTRIES or row.next_directory >= schema.MAX_CONTAINER:
            return False
        row.entries += 1
        self._added += 1
        return True

    # --- room ------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Evict the containers last seen longest ago of the owner with the most. More rows are
        removed than this transaction added.

        All containers are read, so some room is made for later ones.
        """
        containers = self._txn.stat(self._containers)["entries"] - MAX_CONTAINERS
        rows = self._txn.stat(self._contents)["entries"] - MAX_CONTENTS
        if containers <= 0 and rows <= 0:
            return
        lack = [
            excess + most // _EXTRA if excess > 0 else 0
            for excess, most in ((containers, MAX_CONTAINERS), (rows, MAX_CONTENTS))
        ]
        budget = max(_EVICTED_AT_ONCE, 2 * (self._added + self._new_containers))
        owners = self._owners()
        for unit in range(len(lack)):
            heap = [owner.place_in_heap(unit) for owner in owners if owner.others]
            heapq.heapify(heap)
            while heap and lack[unit] > 0 and budget > 0:
                owner = heapq.heappop(heap)[-1]
                _, key = owner.others.pop()
                gone = self._evict(key, budget)
                budget -= gone + 1
                for each, count in enumerate((1, gone)):
                    lack[each] -= count
                    owner.counts[each] -= count
                if owner.others:
                    heapq.heappush(heap, owner.place_in_heap(unit))

    def _owners(self) -> list[_Owner]:
        """Return all owners with their containers."""
        owners: dict[bytes, _Owner] = {}
        for key, value in prefixed(self._txn, self._containers, b""):
            row = _row_in(value)
            name = b"" if row is None else row.owner or row.label
            owner = owners.setdefault(name, _Owner(name))
            owner.counts[0] += 1
            owner.counts[1] += 0 if row is None else row.entries
            if int.from_bytes(key, "big") not in self._rows:
                owner.others.append((value[8:16], key))
        for owner in owners.values():
            owner.others.sort(reverse=True)
        return list(owners.values())

    def _evict(self, key: bytes, most: int) -> int:
        """Remove a container, or ``most`` of its rows; return the number of removed rows.

        Directories with high numbers are removed first, so that no directory remains without its
        parent.
        """
        going = list(islice(self._contents_backwards(key), most))
        for found in going:
            self._txn.delete(found, db=self._contents)
        value = self._txn.get(key, db=self._containers, default=b"")
        row = _row_in(value)
        if len(going) < most:
            self._remove(key, row)
        elif row is not None:
            self._count_down(key, value, row, len(going))
        return len(going)

    def _contents_backwards(self, key: bytes) -> Iterator[bytes]:
        with self._txn.cursor(self._contents) as cursor:
            behind = key + b"\xff" * KEY.size
            found = cursor.prev() if cursor.set_range(behind) else cursor.last()
            while found and cursor.key().startswith(key):
                yield cursor.key()
                found = cursor.prev()


def row_of(environment: Environment, txn: Txn, origin: Origin) -> ContainerRow | None:
    """Return the row of the container of a place; None if there is none."""
    token, tables = token_of(origin), environment.tables
    for name in names_of(origin, token):
        number = txn.get(name, db=tables["labels"])
        row = None if number is None else _row_in(txn.get(number, b"", db=tables["containers"]))
        if row is not None and (not token or row.token in (token, b"")):
            return row
    return None


def _id_in(label: str) -> str:
    """Return the ID of a container in a label; empty if the label has none."""
    return "" if label.startswith(_NO_CONTAINERS) else label.partition(":")[2]


def _row_in(value: bytes) -> ContainerRow | None:
    """Return the row of a container; None if there is none, or it does not decode.

    Damaged rows are left for `check`, so that captures and removals can continue.
    """
    try:
        return unpack_container(0, value)[1]
    except DAMAGE:
        return None


def _unpacked(value: bytes | None) -> _Value:
    """Return the numbers in a row of *contents*; zeros if it is missing or does not decode."""
    if value is None or len(value) < VALUE.size:
        return 0, 0, 0, 0, 0
    directory, ordinal, kind, variant, stamp = VALUE.unpack_from(value)
    return directory, ordinal, kind, variant, stamp


class ContainerPruner(_ContainerTables):
    """Removes files from the trees of containers, within one transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        super().__init__(environment, txn)
        self._rows = IndexRows(environment, txn)
        self._journal = environment.tables["journal"]

    def drop(self, origin: Origin, ordinal: int) -> None:
        """Remove a build ID from a place, with directories and containers that become empty.

        A container whose last file a limit has removed keeps its row, because the journal names
        the container.
        """
        names = components(origin.path) if label_of(origin) else None
        if names is None:
            return
        for name in names_of(origin, token_of(origin)):
            number = self._txn.get(name, db=self._labels)
            if number is not None:
                self._drop(number, names, ordinal, origin)

    def _drop(self, container: bytes, names: list[bytes], ordinal: int, origin: Origin) -> None:
        number = int.from_bytes(container, "big")
        keys: list[bytes] = []
        directory = of = kind = variant = 0
        for name in names:
            if keys and not directory:
                return  # it was replaced by a file
            keys.append(KEY.pack(number, directory, offset_of(name)))
            value = self._txn.get(keys[-1], db=self._contents)
            if value is None:
                return
            directory, of, kind, variant, _ = _unpacked(value)
        if (
            directory
            or of != ordinal
            or self._rows.raw_variant(of, kind & ~PUBLIC_BIT, variant) is not None
        ):
            return
        dropped = 0
        for key in reversed(keys):
            dropped += self._txn.delete(key, db=self._contents)
            if has_any(self._txn, self._contents, key[:8]):
                break
        raw = self._txn.get(container, db=self._containers, default=b"")
        row = _row_in(raw)
        if row is None:
            return
        if has_any(self._txn, self._contents, container) or self._is_in_journal(origin):
            self._count_down(container, raw, row, dropped)
        else:
            self._remove(container, row)

    def _is_in_journal(self, origin: Origin) -> bool:
        """Return True if the journal says that a limit has removed a file at a place."""
        prefix = journal_prefix(origin.path, origin.mnt_ns_id)
        rows = prefixed(self._txn, self._journal, prefix)
        return any(removal_in(row) is not None for _, row in rows)
