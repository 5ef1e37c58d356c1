# SPDX-License-Identifier: Apache-2.0
"""One thread that commits what others stage, soon, and many at once when there are many.

A capture on its own is committed at once, since somebody may be waiting for its name. When more is
coming it is worth waiting a little: the disk takes as long for one transaction as for a hundred.

While the store cannot be written its captures are handed back, and what was seen waits in memory.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from buildidfs.capture.elf_file import memory_file
from buildidfs.errors import BuildIdFsError, IntegrityError, StoreError
from buildidfs.ingest.batch import BATCH_FILES, BATCH_ROWS, Batch, discard
from buildidfs.ingest.sightings import Sightings
from buildidfs.ingest.store_health import Trouble

if TYPE_CHECKING:
    from buildidfs.ingest.counters import Counters
    from buildidfs.model import BuildId, Sighting
    from buildidfs.store import NewAbsence, NewCapture, NewSeen, Outcome, Store

FAILURES: Final = (StoreError, IntegrityError)
"""What the store says when it cannot do what it is asked for."""

# The longest that anything waits for more to come.
_LATEST_S: Final = 0.25
# What a store must have room for to be taken for one that can be written.
_PROBE_BYTES: Final = 1 << 20

_log = logging.getLogger(__name__)

Job = TypeVar("Job")
_Job = TypeVar("_Job", contravariant=True)


class Owner(Protocol[_Job]):
    """What the thread asks of whom it commits for; none of it may take long."""

    def is_idle(self) -> bool:
        """Whether nothing is coming at the moment."""

    def entries(self, capture: NewCapture, job: _Job) -> list[NewSeen]:
        """What the journal is to say of a capture."""

    def committed(self, capture: NewCapture, job: _Job, outcome: Outcome) -> None:
        """A capture is durable and visible."""

    def refused(self, jobs: Sequence[_Job], error: BuildIdFsError) -> None:
        """These could not be committed; what was staged for them is gone."""

    def forgotten(self, sighting: Sighting) -> None:
        """A file that was taken for known is not known to the store any more."""

    def recovered(self) -> None:
        """The store can be written again, after something was lost."""


class Committer(Generic[Job]):
    """Takes captures from any thread; `close` ends it when everything is written."""

    def __init__(self, store: Store, counters: Counters, owner: Owner[Job]) -> None:
        self._store = store
        self._counters = counters
        self._owner = owner
        lock = threading.Lock()
        self._changed = threading.Condition(lock)  # for the thread
        self._room = threading.Condition(lock)  # for those who wait for it
        self._batch: Batch[Job] = Batch(store.most_staged)
        self._batch_since = 0.0
        self._limit = BATCH_FILES
        self._rows = Sightings()
        self._rows_since = 0.0
        self._trouble = Trouble(counters)
        self._writing = False
        self._flushing = 0
        self._ending = False
        self._gave_up = False
        self.ended = False

    # --- for the threads that stage ----------------------------------------------------------

    def add(self, capture: NewCapture, job: Job) -> None:
        """Commit a capture soon."""
        with self._changed:
            if not self.ended:
                self._begun()
                self._batch.add(capture, job)
                if self._batch.is_full():
                    self._changed.notify()
                return
        discard(capture)
        self._owner.refused([job], StoreError("nothing is written any more"))

    def absent(self, new: NewAbsence) -> None:
        """Remember soon that a file has no build ID."""
        with self._changed:
            self._begun()
            self._batch.absent.append(new)

    def see(
        self, sighting: Sighting, build_id: BuildId, *, held: bool = False, noted: bool = False
    ) -> None:
        """Put into the journal soon, for as long as that takes, that a file was seen.

        ``held`` says that the store has its bytes, and takes this for one more place of them,
        ``noted`` that there is no room for them, and that they can be had where it was seen.
        """
        with self._changed:
            if not self._rows:
                self._rows_since = time.monotonic()
                self._changed.notify()
            self._rows.add(sighting, build_id, held=held, noted=noted)
            if len(self._rows) == BATCH_ROWS:
                self._changed.notify()

    def wait_for_room(self) -> None:
        """Wait until what is staged is not more than is worth a transaction."""
        with self._room:
            while not self.ended and (
                self._batch.is_full() or (len(self._rows) >= 2 * BATCH_ROWS and not self._trouble)
            ):
                self._room.wait()

    def poke(self) -> None:
        """The owner is idle now."""
        with self._changed:
            if self._batch:
                self._changed.notify()

    def failed(self, error: BuildIdFsError) -> None:
        """Staging failed because of the store."""
        with self._changed:
            self._trouble.failed(error)
            self._changed.notify()

    def lost(self) -> None:
        """Something was let go because of the store, which may still be there later."""
        with self._changed:
            self._trouble.lost()

    def flush(self, until: float) -> bool:
        """Whether everything was written by that time of ``time.monotonic()``."""
        with self._changed:
            self._flushing += 1
            self._changed.notify()
            try:
                while self._batch or self._rows or self._writing:
                    left = until - time.monotonic()
                    if left <= 0 or self.ended:
                        return False
                    self._room.wait(left)
                return True
            finally:
                self._flushing -= 1

    def end(self) -> None:
        """Write what there is, once, and end `run`."""
        with self._changed:
            self._ending = True
            self._changed.notify()

    def abandon(self) -> None:
        """Nothing is written any more, because of a fault: let nobody wait."""
        with self._changed:
            self.ended = self._ending = True
            for capture, _ in self._batch.captures:
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
        """Commit until the `end`."""
        while (work := self._next()) is not None:
            batch, rows = work
            if rows and (self._trouble or not batch):
                self._write_rows(rows)
                rows = Sightings()
            if batch:
                self._write_batch(batch, rows)
            self._look_after_trouble()
        with self._changed:
            self.ended = True
            self._counters.unjournaled += len(self._rows)
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
        """When there is something to do; ``now`` or before is at once."""
        trouble = self._trouble
        due = min(self._rows_due(now), trouble.recover_at, trouble.probe_at)
        if self._ending:
            due = self._rows_due(now)
        if self._batch:
            hurry = self._ending or self._flushing or self._batch.is_full()
            if hurry or self._limit < len(self._batch.captures) or self._owner.is_idle():
                return now
            due = min(due, self._batch_since + _LATEST_S)
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
        """Write what was seen, and nothing else."""
        try:
            unknown = self._store.touch(rows.touched())
            entries = rows.entries()
            self._store.note_seen(entries)
        except FAILURES as error:
            self._keep(rows, error)
            return
        with self._changed:
            self._trouble.passed(rows=True)
            self._counters.journaled += len(entries)
        for sighting in unknown:
            self._owner.forgotten(sighting)

    def _keep(self, rows: Sightings, error: BuildIdFsError | None = None) -> None:
        """What was seen could not be written: try again later."""
        with self._changed:
            if error is not None:
                self._trouble.failed(error, rows=True)
            before = self._rows.dropped
            self._rows.merge(rows)
            self._counters.unjournaled += self._rows.dropped - before
            self._rows_since = time.monotonic()
            self._gave_up = self._ending

    def _write_batch(self, batch: Batch[Job], rows: Sightings) -> None:
        captures = batch.contents()
        seen = [
            entry for capture, job in batch.captures for entry in self._owner.entries(capture, job)
        ]
        entries = rows.entries()
        try:
            unknown = self._store.touch(rows.touched())
            result = self._store.commit(captures, batch.absent, entries + seen)
        except FAILURES as error:
            for capture in captures:
                discard(capture)
            for entry in seen:
                rows.add(entry.sighting, entry.build_id)
            self._keep(rows)
            self._refuse(batch, error)
            return
        counters = self._counters
        with self._changed:
            counters.journaled += len(entries) + len(seen)
            counters.copied_bytes += result.bytes_added
            self._limit = min(self._limit * 2, BATCH_FILES)
            if result.bytes_added:
                self._trouble.passed()
            self._trouble.passed(rows=True)
        outcomes = result.outcomes[: len(batch.captures)]
        for (capture, job), outcome in zip(batch.captures, outcomes, strict=True):
            self._owner.committed(capture, job, outcome)
        for sighting in unknown:
            self._owner.forgotten(sighting)

    def _refuse(self, batch: Batch[Job], error: BuildIdFsError) -> None:
        """One that cannot be committed must not take the others with it again: do them singly."""
        with self._changed:
            self._limit = 1
            self._trouble.failed(error)
        if batch.captures:
            self._owner.refused([job for _, job in batch.captures], error)

    def _look_after_trouble(self) -> None:
        trouble, now = self._trouble, time.monotonic()
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
            self._owner.recovered()

    def _probed(self) -> BuildIdFsError | None:
        """Whether bytes can be written, when no capture comes by to tell."""
        fd = memory_file(b"probe", os.urandom(_PROBE_BYTES))
        try:
            self._store.stage(fd).close()
        except FAILURES as error:
            return error
        finally:
            os.close(fd)
        return None
