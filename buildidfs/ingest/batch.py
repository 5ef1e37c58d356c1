# SPDX-License-Identifier: Apache-2.0
"""Rows that are committed together, sightings that wait for a commit, and counts of a pipeline."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from buildidfs.capture.base import Unreadable
from buildidfs.model import Absence, BuildId, Sighting
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Staged
from buildidfs.store.retention.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from buildidfs.model import NamespaceSet


# Enough for one transaction: an fsync or two for each file, one for all rows.
BATCH_FILES: Final = 128
BATCH_BYTES: Final = 256 << 20
# A row without bytes costs next to nothing.
BATCH_ROWS: Final = 4096

# About 1 KiB each.
MOST_SIGHTINGS: Final = 50_000

_Place = tuple[bytes, bytes, int, "NamespaceSet", bytes, str, str]

Job = TypeVar("Job")


class WithMini(NewCapture, frozen=True, kw_only=True):
    """The captures of an executable and of the debuginfo in it (`minidebug`)."""

    mini: NewCapture


class Batch(Generic[Job]):
    """Rows to be committed together: captures, each with its job, files without a build ID,
    sightings of unknown files (``seen``) and of known ones (``touched``).
    """

    __slots__ = ("absent", "captures", "most", "seen", "size", "touched")

    def __init__(self) -> None:
        self.most: int | None = None
        """The limit of the bytes that are staged for the batch, if it is less than the default."""
        self.captures: list[tuple[NewCapture, Job, Sequence[NewSeen]]] = []
        self.absent: list[NewAbsence] = []
        self.seen: list[NewSeen] = []
        self.touched: list[Sighting] = []
        self.size = 0

    def __bool__(self) -> bool:
        return bool(self.captures or self.absent or self.seen or self.touched)

    def add(self, capture: NewCapture, job: Job, entries: Sequence[NewSeen] = ()) -> None:
        """Add a capture, and its ``entries`` for the journal; ``size`` counts staged bytes.

        The store may drop these bytes if it has no room, see `Staged.lend`.
        """
        self.captures.append((capture, job, entries))
        for each in _parts(capture):
            if isinstance(each.content, Staged):
                self.size += each.content.size
                each.content.lend()

    def contents(self) -> list[NewCapture]:
        """Return the captures in their order, and then the files derived from some of them."""
        captures = [capture for capture, _, _ in self.captures]
        return captures + [each.mini for each in captures if isinstance(each, WithMini)]

    def is_full(self) -> bool:
        """Return True if the batch is large enough for a transaction."""
        return (
            len(self.captures) >= BATCH_FILES
            or self.size >= min(BATCH_BYTES, self.most or BATCH_BYTES)
            or len(self.absent) + len(self.seen) + len(self.touched) >= BATCH_ROWS
        )

    def split(self, limit: int) -> Batch[Job]:
        """Take out the first captures, ``limit`` at most, and all rows without bytes."""
        first: Batch[Job] = Batch()
        taken, self.captures = self.captures[:limit], self.captures[limit:]
        for each in taken:
            first.add(*each)
        first.absent, self.absent = self.absent, []
        first.seen, self.seen = self.seen, []
        first.touched, self.touched = self.touched, []
        self.size -= first.size
        return first


def at_another_place(capture: NewCapture, sighting: Sighting) -> NewCapture:
    """Return a capture that records another place of a file, after the store has taken
    its bytes.
    """
    content = capture.content
    origin = replace(sighting.origin, identity=capture.sighting.origin.identity)
    fields = {name: getattr(capture, name) for name in NewCapture.__struct_fields__}
    fields["sighting"] = Sighting(origin, sighting.seen_ns)
    fields["content"] = content.digest if isinstance(content, Staged) else content
    return NewCapture(**fields)


def discard(capture: NewCapture) -> None:
    """Discard the staged bytes of a capture that is not committed."""
    for each in _parts(capture):
        if isinstance(each.content, Staged):
            each.content.close()


def _parts(capture: NewCapture) -> tuple[NewCapture, ...]:
    return (capture, capture.mini) if isinstance(capture, WithMini) else (capture,)


class _Row(msgspec.Struct):
    """The first and the last sighting of a build ID at a place. ``held`` is True if the store has
    its bytes, ``noted`` if it has no room for them.
    """

    first: Sighting
    last: Sighting
    build_id: BuildId
    held: bool
    noted: bool


class Sightings:
    """Sightings that wait to be written, by place and build ID, each place once.

    If the bytes of a file could not be kept, its build ID and place are all that is left of it, so
    these are the last data that a full store loses. ``dropped`` counts sightings that were dropped
    unwritten. Belongs to one thread at a time.
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
        """Add the sighting of a file with ``build_id``; ``held`` is True if its bytes were known
        then, and ``noted`` if there was no room for them.
        """
        self._add(_Row(sighting, sighting, build_id, held, noted))
        if len(self._rows) > self._most:
            self._shrink()

    def merge(self, others: Sightings) -> None:
        """Merge the entries of other batches that could not be written."""
        newer, self._rows = self._rows, others._rows
        for row in newer.values():
            self._add(row)
        if len(self._rows) > self._most:
            self._shrink()

    def entries(self) -> list[NewSeen]:
        """Return the entries for the journal: each place, twice if it was seen at two times."""
        entries = []
        for row in self._rows.values():
            entries.append(NewSeen(row.first, row.build_id, noted=row.noted))
            if row.last is not row.first:
                entries.append(NewSeen(row.last, row.build_id, noted=row.noted))
        return entries

    def touched(self) -> list[Sighting]:
        """Return the last sighting at each place of a file whose bytes the store has."""
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
        """Make room: merge the rows of a path for the namespaces of one container.

        Of places that differ only in the namespaces, the one seen last is kept. If that is not
        enough, the quarter of the entries that were seen longest ago is dropped.
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


class Results(msgspec.Struct):
    """Counts that every pipeline keeps; each may be read at any time.

    ``captured`` counts files whose bytes are new to the store (``copied_bytes`` of them), ``held``
    files whose bytes it had, ``new_ids`` build IDs that were new, ``noted`` recapturable files for
    which there is no room. ``journaled`` counts entries of the journal, and ``unjournaled`` dropped
    entries.
    """

    captured: int = 0
    held: int = 0
    copied_bytes: int = 0
    new_ids: int = 0
    noted: int = 0
    journaled: int = 0
    unjournaled: int = 0


class ScanSummary(Results):
    """Counts of one scan.

    ``files`` counts all files found. Each file is captured, held, ``absent`` (by reason), noted or
    ``unreadable``. ``noted_bytes`` were not written to the store. ``removed`` counts the blobs
    removed to make room.
    """

    files: int = 0
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    unreadable: list[Unreadable] = msgspec.field(default_factory=list)
    noted_bytes: int = 0
    removed: Tally = msgspec.field(default_factory=Tally)

    def add(self, part: ScanSummary) -> None:
        """Add the counts of another scan."""
        for field in msgspec.structs.fields(self):
            if field.type is int:
                total = getattr(self, field.name) + getattr(part, field.name)
                setattr(self, field.name, total)
        self.absent.update(part.absent)
        self.unreadable += part.unreadable
        self.removed.merge(part.removed)


class WatchCounters(Results):
    """Counts of a watch since its start.

    ``absent`` counts files without a build ID, ``unreadable`` files that could not be read,
    ``let_go`` pending files for which there was no time or room, ``retried`` delayed attempts.
    ``store_error`` is the reason why the store cannot be written, and empty if it can;
    ``store_full_since`` is Unix time in seconds, or 0.
    """

    absent: int = 0
    unreadable: int = 0
    let_go: int = 0
    retried: int = 0
    store_error: str = ""
    store_full_since: float = 0.0
