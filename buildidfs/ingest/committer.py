# SPDX-License-Identifier: Apache-2.0
"""Commit the files that a pipeline has staged, in batches.

A transaction of one row takes a disk as long as one of a hundred rows, so a scan commits full
batches. A file that was caught live is committed at once, because a user may wait for its name, or
a moment later if more files are coming. While the store of a watch cannot be written, captures are
returned, and sightings wait in memory.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Generic

from buildidfs.backoff import Attempts, Backoff
from buildidfs.capture.elf_file import memory_file
from buildidfs.errors import BuildIdFsError, IntegrityError, StoreError, StoreFull
from buildidfs.ingest.batch import BATCH_FILES, BATCH_ROWS, Batch, Job, Sightings, discard
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Sighting
from buildidfs.store import CommitResult

if TYPE_CHECKING:
    from buildidfs.ingest.batch import Results, WatchCounters
    from buildidfs.model import BuildId
    from buildidfs.store import NewAbsence, NewCapture, NewSeen, Store


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
        self, sighting: Sighting, build_id: BuildId, *, held: bool = False, noted: bool = False
    ) -> None:
        """Queue a sighting for the journal; it is written when the store can be written.

        ``held`` is True if the store has the bytes, and records one more place for them; ``noted``
        if there is no room for the bytes of a recapturable file.
        """
        with self._changed:
            if not self._rows:
                self._rows_since = time.monotonic()
                self._changed.notify()
            self._rows.add(sighting, build_id, held=held, noted=noted)
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
_REPORT_EVERY_S: Final = 60.0

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
        self._reported_at: dict[type, float] = {}
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
        if now - self._reported_at.get(type(error), -math.inf) > _REPORT_EVERY_S:
            self._reported_at[type(error)] = now
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
