# SPDX-License-Identifier: Apache-2.0
"""Commit the files that a pipeline has staged, in batches, and count the results.

A transaction of one row takes a disk as long as one of a hundred rows, so a scan commits full
batches. A file that was caught live is committed at once, because a user may wait for its name, or
a moment later if more files are coming. While the store of a watch cannot be written, captures are
returned, and sightings wait in memory.

Why two, this and `store.commit`? The store commits one batch, all or nothing, for any caller, and
forgets it. This module decides for one process when a batch is due, and what becomes of it if the
store refuses it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from buildidfs.backoff import Attempts, Backoff
from buildidfs.capture.base import Unreadable, memory_file
from buildidfs.errors import BuildIdFsError, IntegrityError, StoreError, StoreFull
from buildidfs.linux.file_ops import closing_fd
from buildidfs.log import MessageRate
from buildidfs.model import Absence, BuildId, Sighting
from buildidfs.store import CommitResult, NewAbsence, NewCapture, NewSeen, Staged
from buildidfs.store.values import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import NamespaceSet
    from buildidfs.store import Store


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
    its bytes, ``omitted`` if it has no room for them.
    """

    first: Sighting
    last: Sighting
    build_id: BuildId
    held: bool
    omitted: bool


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
        self, sighting: Sighting, build_id: BuildId, *, held: bool = False, omitted: bool = False
    ) -> None:
        """Add the sighting of a file with ``build_id``; ``held`` is True if its bytes were known
        then, and ``omitted`` if there was no room for them.
        """
        self._add(_Row(sighting, sighting, build_id, held, omitted))
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
            entries.append(NewSeen(row.first, row.build_id, omitted=row.omitted))
            if row.last is not row.first:
                entries.append(NewSeen(row.last, row.build_id, omitted=row.omitted))
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
            old.omitted |= row.omitted

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
    files whose bytes it had, ``new_ids`` build IDs that were new, ``omitted`` recapturable files
    for which there is no room. ``journaled`` counts entries of the journal, and ``unjournaled``
    dropped entries.
    """

    captured: int = 0
    held: int = 0
    copied_bytes: int = 0
    new_ids: int = 0
    omitted: int = 0
    journaled: int = 0
    unjournaled: int = 0


class ScanSummary(Results):
    """Counts of one scan.

    ``files`` counts all files found. Each file is captured, held, ``absent`` (by reason), omitted
    or ``unreadable``. ``omitted_bytes`` were not written to the store. ``removed`` counts the blobs
    removed to make room.
    """

    files: int = 0
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    unreadable: list[Unreadable] = msgspec.field(default_factory=list)
    omitted_bytes: int = 0
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


FAILURES: Final = (StoreError, IntegrityError)
"""Errors of a store that cannot do a requested operation."""

Settled = Callable[[Batch[Job], CommitResult | BuildIdFsError, list[Sighting]], None]
"""Called with a batch, its result, and the sightings of files that the store knew before and does
not know any more. If nothing of the batch was written, the result is the error, and the staged
bytes are gone.
"""

# The longest wait for further rows.
_LATEST_S: Final = 0.25
# A store with room for this many bytes counts as writable.
_PROBE_BYTES: Final = 1 << 20


class Committer(Generic[Job]):
    """Takes captures and rows from any thread, and commits them in the thread that calls `run`.

    ``settled`` is called for each batch in that thread, and must be quick. ``is_idle`` returns True
    if no file is coming at the moment; without it only full batches are committed before a `flush`.
    ``trouble`` handles a store that cannot be written for a while.
    """

    def __init__(
        self,
        store: Store,
        results: Results,
        settled: Settled[Job],
        *,
        is_idle: Callable[[], bool] | None = None,
        trouble: Trouble | None = None,
    ) -> None:
        self._store = store
        self._results = results
        self._settled = settled
        self._is_idle = is_idle
        self._latest = math.inf if is_idle is None else _LATEST_S
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the thread
        self._room = threading.Condition(lock)  # for the waiting threads
        self._batch: Batch[Job] = Batch()
        self._batch_since = 0.0
        self._limit = BATCH_FILES
        self._rows = Sightings()
        self._rows_since = 0.0
        self._trouble = trouble
        self._runs = False
        self._writing = False
        self._flushing = 0
        self._ending = False
        self._gave_up = False
        self.ended = False

    # --- for the threads that stage ----------------------------------------------------------

    def add(self, capture: NewCapture, job: Job, entries: Sequence[NewSeen] = ()) -> None:
        """Queue a capture for a commit, with ``entries`` for the journal."""
        with self._changed:
            if not self.ended:
                self._begun()
                self._batch.add(capture, job, entries)
                if self._batch.is_full():
                    self._changed.notify()
                return
        discard(capture)
        unwritten: Batch[Job] = Batch()
        unwritten.captures.append((capture, job, entries))
        self._settled(unwritten, StoreError("nothing is written any more"), [])

    def add_rows(
        self,
        *,
        absent: Sequence[NewAbsence] = (),
        seen: Sequence[NewSeen] = (),
        touched: Sequence[Sighting] = (),
    ) -> None:
        """Queue rows: files without a build ID, sightings, and sightings of known files."""
        with self._changed:
            self._begun()
            self._batch.absent += absent
            self._batch.seen += seen
            self._batch.touched += touched
            if self._batch.is_full():
                self._changed.notify()

    def see(
        self, sighting: Sighting, build_id: BuildId, *, held: bool = False, omitted: bool = False
    ) -> None:
        """Queue a sighting for the journal; it is written when the store can be written.

        ``held`` is True if the store has the bytes; the commit then records one more place.
        ``omitted`` is True if there is no room for the bytes of a recapturable file.
        """
        with self._changed:
            if not self._rows:
                self._rows_since = time.monotonic()
                self._changed.notify()
            self._rows.add(sighting, build_id, held=held, omitted=omitted)
            if len(self._rows) == BATCH_ROWS:
                self._changed.notify()

    def wait_for_room(self) -> None:
        """Wait until the staged files fit into one transaction."""
        with self._room:
            while not self.ended and (
                self._batch.is_full() or (len(self._rows) >= 2 * BATCH_ROWS and not self._trouble)
            ):
                self._room.wait()

    def poke(self) -> None:
        """Wake the committing thread, because the result of ``is_idle`` has changed."""
        with self._changed:
            if self._batch:
                self._changed.notify()

    def failed(self, error: BuildIdFsError) -> None:
        """Record that staging failed because of the store."""
        with self._changed:
            self._note_failure(error)
            self._changed.notify()

    def lost(self) -> None:
        """Record that a file was dropped because of the store; a later scan may find the file."""
        with self._changed:
            if self._trouble is not None:
                self._trouble.lost()

    def flush(self, until: float = math.inf) -> bool:
        """Return True if everything was written by that time of ``time.monotonic()``.

        If no thread is in `run`, the calling thread commits.
        """
        if not self._runs:
            while self._batch:
                self._write_batch(self._batch.split(self._limit), Sightings())
            return True
        with self._changed:
            self._flushing += 1
            self._changed.notify()
            try:
                while self._batch or self._rows or self._writing:
                    left = until - time.monotonic()
                    if left <= 0 or self.ended:
                        return False
                    self._room.wait(None if left == math.inf else left)
                return True
            finally:
                self._flushing -= 1

    def prepare(self, most_staged: int | None) -> None:
        """Let a thread that calls `run` commit, in batches of at most that many bytes."""
        self._runs = True
        self._batch.most = most_staged

    def end(self) -> None:
        """Write the present batch, once, and end `run`."""
        if not self._runs:
            self.flush()
        with self._changed:
            self._ending = True
            self._changed.notify()

    def abandon(self) -> None:
        """Write nothing any more after a fault, and release all waiting threads."""
        with self._changed:
            self.ended = self._ending = True
            for capture, _, _ in self._batch.captures:
                discard(capture)
            self._batch = Batch()
            self._changed.notify_all()
            self._room.notify_all()

    def _begun(self) -> None:
        if not self._batch:
            self._batch_since = time.monotonic()
            self._changed.notify()

    # --- the thread --------------------------------------------------------------------------

    def run(self) -> None:
        """Commit until `end` is called."""
        while (work := self._next()) is not None:
            batch, rows = work
            if rows and (self._trouble or not batch):
                self._write_rows(rows)
                rows = Sightings()
            if batch:
                self._write_batch(batch, rows)
            if self._trouble is not None:
                self._look_after(self._trouble)
        with self._changed:
            self.ended = True
            self._results.unjournaled += len(self._rows)
            self._room.notify_all()

    def _next(self) -> tuple[Batch[Job], Sightings] | None:
        with self._changed:
            self._writing = False
            self._room.notify_all()
            while (due := self._due(now := time.monotonic())) > now:
                if self._ending and not self._batch:
                    return None
                self._changed.wait(None if due == math.inf else due - now)
            batch = self._batch.split(self._limit)
            rows = Sightings()
            if self._rows and (batch or self._rows_due(now) <= now):
                rows, self._rows = self._rows, rows
            self._writing = True
            self._room.notify_all()
            return batch, rows

    def _due(self, now: float) -> float:
        """Return the time of the next work; at or before ``now`` means at once."""
        due = self._rows_due(now)
        if self._trouble is not None and not self._ending:
            due = min(due, self._trouble.recover_at, self._trouble.probe_at)
        if self._batch:
            hurry = self._ending or self._flushing or self._batch.is_full()
            is_idle = self._is_idle is not None and self._is_idle()
            if hurry or self._limit < len(self._batch.captures) or is_idle:
                return now
            due = min(due, self._batch_since + self._latest)
        return due

    def _rows_due(self, now: float) -> float:
        if not self._rows:
            return math.inf
        if self._ending:
            return math.inf if self._gave_up else now
        due = self._rows_since + _LATEST_S
        if self._trouble:
            return max(due, self._trouble.rows_at)
        return now if self._flushing or len(self._rows) >= BATCH_ROWS else due

    def _write_rows(self, rows: Sightings) -> None:
        """Write sightings, and nothing else."""
        try:
            unknown = self._store.touch(rows.touched())
            entries = rows.entries()
            self._store.note_seen(entries)
        except FAILURES as error:
            self._keep(rows, error)
            return
        with self._changed:
            self._note_success(rows=True)
            self._results.journaled += len(entries)
        self._settled(Batch(), CommitResult(), unknown)

    def _keep(self, rows: Sightings, error: BuildIdFsError | None = None) -> None:
        """Keep the sightings that could not be written, for another attempt."""
        with self._changed:
            if error is not None:
                self._note_failure(error, rows=True)
            before = self._rows.dropped
            self._rows.merge(rows)
            self._results.unjournaled += self._rows.dropped - before
            self._rows_since = time.monotonic()
            self._gave_up = self._ending

    def _write_batch(self, batch: Batch[Job], rows: Sightings) -> None:
        captures = batch.contents()
        own = [entry for _, _, entries in batch.captures for entry in entries]
        entries = rows.entries() + own + batch.seen
        result = CommitResult()
        try:
            unknown = self._store.touch(rows.touched() + batch.touched)
            if captures or batch.absent or entries:
                result = self._store.commit(captures, batch.absent, entries)
        except FAILURES as error:
            _log.debug("%d files not committed: %s", len(captures), error)
            for capture in captures:
                discard(capture)
            for entry in own:
                rows.add(entry.sighting, entry.build_id)
            self._keep(rows)
            self._refuse(batch, error)
            return
        _log.debug("committed %d files and %d journal rows", len(captures), len(entries))
        with self._changed:
            self._results.journaled += len(entries)
            self._results.copied_bytes += result.bytes_added
            self._limit = min(self._limit * 2, BATCH_FILES)
            if result.bytes_added:
                self._note_success()
            self._note_success(rows=True)
        self._settled(batch, result, unknown)

    def _refuse(self, batch: Batch[Job], error: BuildIdFsError) -> None:
        """Give up a batch that could not be committed. From now on captures are committed one by
        one, so that a bad file does not affect the others.
        """
        with self._changed:
            self._limit = 1
            self._note_failure(error)
        self._settled(batch, error, [])

    # --- a store that cannot be written ------------------------------------------------------

    def _note_failure(self, error: BuildIdFsError, *, rows: bool = False) -> None:
        if self._trouble is not None:
            self._trouble.failed(error, rows=rows)

    def _note_success(self, *, rows: bool = False) -> None:
        if self._trouble is not None:
            self._trouble.passed(rows=rows)

    def _look_after(self, trouble: Trouble) -> None:
        now = time.monotonic()
        if trouble.probe_at <= now:
            error = self._probed()
            with self._changed:
                if error is None:
                    trouble.passed()
                else:
                    trouble.failed(error)
        with self._changed:
            announce = trouble.recover_at <= now
            if announce:
                trouble.recovered()
        if announce:
            trouble.announce()

    def _probed(self) -> BuildIdFsError | None:
        """Test if bytes can be written, because no capture shows it at the moment; return the
        error, if any.
        """
        with closing_fd(memory_file(b"probe", os.urandom(_PROBE_BYTES))) as fd:
            try:
                self._store.stage(fd).close()
            except FAILURES as error:
                return error
        return None


ROW_DELAYS: Final = Backoff(1.0, 10.0)
"""The delays between attempts to write rows."""

# The scan after a recovery is expensive, and a store that is full only for one huge file recovers
# again and again.
_SEARCHES: Final = Backoff(10.0, 600.0)

_log = logging.getLogger(__name__)


class Trouble:
    """True while the store cannot be written. Guarded by one lock; updates ``counters``.

    Bytes and rows fail separately: an index may have free pages when its filesystem is full.
    ``recover_at`` is the time of ``time.monotonic()`` at which to `announce` that lost files can be
    searched.
    """

    def __init__(self, counters: WatchCounters, announce: Callable[[], None]) -> None:
        self.announce = announce
        self._counters = counters
        self._reports = MessageRate()
        self._report_end = False
        self._bytes = self._rows = False
        self._row_attempts = Attempts(ROW_DELAYS)
        self._lost = False
        self._searches = Attempts(_SEARCHES)
        self.probe_at = math.inf
        self.recover_at = math.inf

    def __bool__(self) -> bool:
        return self._bytes or self._rows

    @property
    def rows_at(self) -> float:
        """The time of ``time.monotonic()`` at which to write rows."""
        return self._row_attempts.due

    def failed(self, error: BuildIdFsError, *, rows: bool = False) -> None:
        """Record that bytes, or ``rows``, could not be written."""
        now = time.monotonic()
        if rows:
            self._rows = True
            self._row_attempts.failed()
        else:
            self._bytes = True
            self.probe_at = now + ROW_DELAYS.most
        counters = self._counters
        counters.store_error = str(error)
        if isinstance(error, StoreFull) and not counters.store_full_since:
            counters.store_full_since = time.time()
        if self._reports.take(type(error).__name__):
            self._report_end = True
            _log.warning("%s; trying again until it can be written", error)

    def passed(self, *, rows: bool = False) -> None:
        """Record that bytes, or ``rows``, could be written."""
        if not self:
            return
        if rows:
            self._rows = False
            self._row_attempts.succeeded()
        else:
            self._bytes, self.probe_at = False, math.inf
        if not self:
            self._over()

    def lost(self) -> None:
        """Record that a file was dropped because of the trouble; a later scan may find the file."""
        self._lost = True

    def recovered(self) -> None:
        """Record that a scan now searches for the lost files."""
        self._lost, self.recover_at = False, math.inf
        self._searches.failed()  # the next search comes later, as after a failure

    def _over(self) -> None:
        counters = self._counters
        counters.store_error, counters.store_full_since = "", 0.0
        if self._report_end:
            self._report_end = False
            _log.warning("the store can be written again")
        if not self._lost:
            return
        self.recover_at = max(self._searches.due, time.monotonic())
