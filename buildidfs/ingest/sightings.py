# SPDX-License-Identifier: Apache-2.0
"""Sightings that are to be written: the last thing that may be lost while the store is full.

A build ID and where it was seen are all that is left of a file whose bytes could not be kept. So
they wait in memory, each place once, until they are written, and their number is bounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import BuildId, Sighting
from buildidfs.store import NewSeen

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import NamespaceSet

# About 1 KiB each.
MOST_SIGHTINGS: Final = 50_000

_Place = tuple[bytes, bytes, int, "NamespaceSet", bytes, str, str]


class _Row(msgspec.Struct):
    """When a build ID was seen at a place, first and last; ``held``: the store has its bytes;
    ``noted``: it has no room for them.
    """

    first: Sighting
    last: Sighting
    build_id: BuildId
    held: bool
    noted: bool


class Sightings:
    """What was seen, by place and build ID; belongs to one thread at a time.

    ``dropped`` counts what had to be forgotten unwritten.
    """

    def __init__(self, most: int = MOST_SIGHTINGS) -> None:
        self._most = most
        self._rows: dict[_Place, _Row] = {}
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self, sighting: Sighting, build_id: BuildId, *, held: bool = False, noted: bool = False
    ) -> None:
        """A file with ``build_id`` was seen; ``held`` says that its bytes were known then, and
        ``noted`` that there was no room for them.
        """
        self._add(_Row(sighting, sighting, build_id, held, noted))
        if len(self._rows) > self._most:
            self._shrink()

    def merge(self, others: Sightings) -> None:
        """Take in what others have that could not be written."""
        newer, self._rows = self._rows, others._rows
        for row in newer.values():
            self._add(row)
        if len(self._rows) > self._most:
            self._shrink()

    def entries(self) -> list[NewSeen]:
        """For the journal: each place, with two entries if it was seen at two times."""
        entries = []
        for row in self._rows.values():
            entries.append(NewSeen(row.first, row.build_id, noted=row.noted))
            if row.last is not row.first:
                entries.append(NewSeen(row.last, row.build_id, noted=row.noted))
        return entries

    def touched(self) -> list[Sighting]:
        """Of files whose bytes the store has, where they were seen last."""
        return [row.last for row in self._rows.values() if row.held]

    def _add(self, row: _Row) -> None:
        origin = row.first.origin
        place = (
            row.build_id,
            origin.path,
            origin.mnt_ns_id,
            origin.namespaces,
            origin.cgroup,
            origin.container,
            origin.host,
        )
        old = self._rows.setdefault(place, row)
        if old is not row:
            old.first = min(old.first, row.first, key=_time)
            old.last = max(old.last, row.last, key=_time)
            old.held |= row.held
            old.noted |= row.noted

    def _shrink(self) -> None:
        """Make room: what a path was for one container may stand for its namespaces.

        So of the places that differ only in them the one seen last is kept. If that is not enough
        a quarter goes, what was seen longest ago.
        """
        kept: dict[tuple[bytes, bytes, str], _Place] = {}
        for place, row in self._rows.items():
            alike = (row.build_id, place[1], place[5])
            other = kept.get(alike)
            if other is None or _time(self._rows[other].last) <= _time(row.last):
                kept[alike] = place
        if len(kept) > self._most * 3 // 4:
            self._forget(self._by_age(kept.values())[: len(kept) - self._most * 3 // 4])
            kept = {alike: place for alike, place in kept.items() if place in self._rows}
        self._rows = {place: self._rows[place] for place in kept.values()}

    def _by_age(self, places: Iterable[_Place]) -> list[_Place]:
        return sorted(places, key=lambda place: _time(self._rows[place].last))

    def _forget(self, places: list[_Place]) -> None:
        self.dropped += len(places)
        for place in places:
            del self._rows[place]


def _time(sighting: Sighting) -> int:
    return sighting.seen_ns
