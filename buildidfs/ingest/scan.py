# SPDX-License-Identifier: Apache-2.0
"""One scan into the store, with the work spread over threads and bounded at every place.

Three threads of control: the caller's runs the scanner, a few workers hash and copy (both release
the interpreter lock), and one writer commits while the next batch is being staged. Nothing is
started before there is a file to read, because the usual scan finds only what is known.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from buildidfs.capture.base import Known, PinnedFile, Unreadable
from buildidfs.errors import StoreError, StoreFull
from buildidfs.ingest import staging
from buildidfs.ingest.batch import BATCH_ROWS, Batch, at_another_place
from buildidfs.model import Absence, FileIdentity, Sighting
from buildidfs.store import CommitResult, NewAbsence, NewCapture, NewSeen, Outcome, Store
from buildidfs.store.errors import show
from buildidfs.store.retention.eviction import Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future, ThreadPoolExecutor

    from buildidfs.capture.base import Found
    from buildidfs.ingest.staging import Outcome as Staging

Progress = Callable[[int, str], None]
"""Called now and then with the number of items done and the path at hand."""

REMOVED: Final = "the store has removed its bytes meanwhile: the next scan reads it"
"""Why a file was not captured that the store knew when the scan came to it."""

_WAITING_PER_WORKER: Final = 8
_PROGRESS_S: Final = 0.1
# A worker that comes back from the kernel waits this long for the scanner, which is all Python;
# with the usual 5 ms a scan of /usr/lib takes a third longer.
_SWITCH_INTERVAL_S: Final = 0.0005


class Summary(msgspec.Struct):
    """What a scan came to.

    ``files`` counts everything found; each is ``captured`` (bytes new to the store), ``held``
    (bytes it had), ``absent`` (by reason), ``noted`` (there is no room, and the host has it still)
    or ``unreadable``. ``new_ids`` counts build IDs that the store did not know, ``copied_bytes``
    what was written to it, ``noted_bytes`` what was not. ``removed`` is what made room for it.
    """

    files: int = 0
    captured: int = 0
    held: int = 0
    copied_bytes: int = 0
    new_ids: int = 0
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    unreadable: list[Unreadable] = msgspec.field(default_factory=list)
    noted: int = 0
    noted_bytes: int = 0
    removed: Tally = msgspec.field(default_factory=Tally)


class StoreMemo:
    """The store's memory of files, as scanners ask for it."""

    def __init__(self, store: Store) -> None:
        self._recall = store.index.recall
        self.knows_place = store.index.knows_place

    def recall(self, identity: FileIdentity) -> Known | None:
        """What is known of an unchanged file, or None when it has to be read."""
        remembered = self._recall(identity)
        if remembered is None:
            return None
        return Known(remembered.build_id, remembered.absence)


class Ingest:
    """Takes what scanners find into ``store``, with so many ``workers`` hashing and copying."""

    def __init__(self, store: Store, *, workers: int | None = None) -> None:
        self._store = store
        self._workers = workers or min(4, os.cpu_count() or 1)

    def run(self, found: Iterable[Found], progress: Progress | None = None) -> Summary:
        """Take everything in; returns when it is durable and visible.

        What the store's policy does not keep is removed then. What fails for one file is in the
        summary, also that there is no room for it. Raises `StoreError` (`StoreFull`) when the store
        fails, and whatever ``found`` raises, after what was staged by then is committed.
        """
        run = _Run(self._store, self._workers)
        shown = 0.0
        items = iter(found)
        try:
            for item in items:
                run.take(item)
                if progress is not None and (now := time.monotonic()) - shown >= _PROGRESS_S:
                    shown = now
                    progress(run.summary.files, os.fsdecode(_path(item)))
            run.finish()
            self._store.enforce()
        except BaseException:
            run.salvage()
            raise
        finally:
            run.close()
            if isinstance(items, Generator):
                items.close()
        run.summary.removed = self._store.take_tally()
        return run.summary


def _path(item: Found) -> bytes:
    return item.path if isinstance(item, Unreadable) else item.sighting.origin.path


class _Job:
    """A pinned file being staged, and other sightings of the same file that came meanwhile."""

    __slots__ = ("future", "more", "pinned", "sighting")

    def __init__(self, pinned: PinnedFile, future: Future[Staging]) -> None:
        self.pinned = pinned
        self.sighting = pinned.sighting
        self.future = future
        self.more: list[Sighting] = []


class _Run:
    """One run of `Ingest`; belongs to the thread that called it."""

    def __init__(self, store: Store, workers: int) -> None:
        self._store = store
        self._workers = workers
        self.summary = Summary()
        self._switch_interval = sys.getswitchinterval()
        self._pool: ThreadPoolExecutor | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._jobs: deque[_Job] = deque()
        self._pending: dict[FileIdentity, _Job] = {}
        self._most_staged: int | None = None
        self._batch: Batch[_Job | None] = Batch()
        self._short: list[_Job] = []
        self._committing: tuple[Batch[_Job | None], Future[CommitResult]] | None = None
        self._touched: list[Sighting] = []

    def take(self, item: Found) -> None:
        """Begin with one item. Raises `StoreError` because of those before it."""
        summary = self.summary
        summary.files += 1
        if isinstance(item, PinnedFile):
            self._take_pinned(item)
        elif isinstance(item, Unreadable):
            summary.unreadable.append(item)
        elif item.known.build_id is not None:
            if (same := self._pending.get(item.sighting.origin.identity)) is not None:
                same.more.append(item.sighting)  # by another name, and not committed yet
                return
            summary.held += 1
            self._touched.append(item.sighting)
            if len(self._touched) >= BATCH_ROWS:
                self._touch()
        elif item.known.absence is not None:
            self._count_absent(item.known.absence, item.sighting)

    def finish(self) -> None:
        """Wait until everything is recorded. Raises `StoreError`."""
        while self._jobs:
            self._advance()
        self._try_again()
        self._flush()
        self._touch()

    def salvage(self) -> None:
        """After an error: record what is staged, and let go of everything else."""
        for job in self._jobs:
            if job.future.cancel():
                job.pinned.close()
        self._jobs = deque(job for job in self._jobs if not job.future.cancelled())
        while self._jobs:
            with suppress(StoreError):
                self._collect()
        for job in self._short:
            job.pinned.close()
        while self._batch or self._committing:
            with suppress(StoreError):
                self._commit(last=True)
        with suppress(StoreError):
            self._touch()

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, self._writer):
            if pool is not None:
                pool.shutdown()
        sys.setswitchinterval(self._switch_interval)

    def _take_pinned(self, pinned: PinnedFile) -> None:
        identity = pinned.sighting.origin.identity
        if identity.scope is not None and (same := self._pending.get(identity)):
            pinned.close()
            same.more.append(pinned.sighting)
            return
        if self._pool is None:
            self._pool = _threads(self._workers, "buildidfs-stage")
            self._most_staged = self._batch.most = self._store.most_staged
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        job = _Job(pinned, self._pool.submit(self._stage, pinned))
        self._jobs.append(job)
        self._pending[identity] = job
        waiting = self._workers * _WAITING_PER_WORKER
        while self._jobs and (self._jobs[0].future.done() or len(self._jobs) > waiting):
            self._advance()
        self._try_again()

    def _advance(self) -> None:
        """Take what became of the oldest job, and commit when that is worth it."""
        self._collect()
        if self._batch.is_full():
            self._commit()

    def _stage(self, pinned: PinnedFile) -> Staging:
        """Do one file, and close it unless it has to wait for room. Raises `StoreError`."""
        stays = False
        try:
            return staging.take(self._store, pinned)
        except StoreFull:
            stays = self._most_staged is not None
            raise
        finally:
            if not stays:
                pinned.close()

    def _collect(self) -> None:
        """Take what became of the oldest job, when it is done. Raises `StoreError`."""
        job = self._jobs.popleft()
        try:
            outcome = job.future.result()
        except StoreFull:
            if self._most_staged is None:
                self._forget(job)
                raise
            self._short.append(job)
            return
        except BaseException:
            self._forget(job)
            raise
        self._take_outcome(job, outcome)

    def _try_again(self) -> None:
        """Those there was no room for. Raises `StoreError`.

        What waits to be committed takes room that nobody can make, so it is committed before.
        """
        while self._short:
            while self._jobs:
                self._advance()
            self._flush()
            job = self._short.pop()
            try:
                outcome = staging.capture(self._store, job.pinned)
            except StoreFull as error:
                outcome = Unreadable(job.sighting.origin.path, str(error), errno.ENOSPC)
            except BaseException:
                self._forget(job)
                raise
            self._take_outcome(job, outcome)

    def _flush(self) -> None:
        """Commit what is staged. Raises `StoreError`."""
        while self._batch or self._committing:
            self._commit(last=True)

    def _take_outcome(self, job: _Job, outcome: Staging) -> None:
        if isinstance(outcome, NewCapture):
            self._batch.add(outcome, job)
            return
        self._forget(job)
        if isinstance(outcome, NewAbsence):
            self._batch.absent.append(outcome)
            for sighting in (job.sighting, *job.more):
                self._count_absent(outcome.absence, sighting)
        elif isinstance(outcome, NewSeen):
            self._note([outcome, *(replace(outcome, sighting=each) for each in job.more)])
        else:
            self.summary.unreadable.append(outcome)
            self.summary.unreadable += [
                replace(outcome, path=sighting.origin.path) for sighting in job.more
            ]

    def _count_absent(self, absence: Absence, sighting: Sighting) -> None:
        self.summary.absent[absence] += 1
        if absence not in (Absence.NOT_ELF, Absence.EMPTY):
            import logging  # few get here, and a scan that finds only what is known does not

            path = show(sighting.origin.path)
            logging.getLogger(__name__).info("passed over %s: %s", path, absence)

    def _note(self, entries: Sequence[NewSeen]) -> None:
        """Have the journal say of a file that it was only noted."""
        self._batch.seen += entries
        self._count_noted(entries[0].sighting, len(entries))

    def _count_noted(self, sighting: Sighting, places: int) -> None:
        self.summary.noted += places
        self.summary.noted_bytes += sighting.origin.identity.size

    def _forget(self, job: _Job) -> None:
        if self._pending.get(job.sighting.origin.identity) is job:
            del self._pending[job.sighting.origin.identity]

    def _commit(self, *, last: bool = False) -> None:
        """Begin to commit the batch, after the one before; wait for it if it is the ``last``.

        Raises `StoreError` because of either.
        """
        self._join()
        batch, self._batch = self._batch, Batch(self._most_staged)
        if not batch:
            return
        captures = batch.contents()
        if last:
            self._record(batch, lambda: self._store.commit(captures, batch.absent, batch.seen))
            return
        if self._writer is None:
            self._writer = _threads(1, "buildidfs-commit")
        self._committing = (
            batch,
            self._writer.submit(self._store.commit, captures, batch.absent, batch.seen),
        )

    def _join(self) -> None:
        """Wait for the commit in progress. Raises `StoreError`."""
        if self._committing is not None:
            (batch, future), self._committing = self._committing, None
            self._record(batch, future.result)

    def _record(self, batch: Batch[_Job | None], commit: Callable[[], CommitResult]) -> None:
        """Count what a commit did, and go on with what waited for it. Raises `StoreError`."""
        try:
            result = commit()
        except StoreFull as error:
            if self._most_staged is None:
                raise
            result = self._no_room(batch, error)
        finally:
            for _, job in batch.captures:
                if job is not None:
                    self._forget(job)
        import logging  # which the threads have imported by now

        log = logging.getLogger(__name__)
        verbose = log.isEnabledFor(logging.INFO)
        self.summary.copied_bytes += result.bytes_added
        outcomes = result.outcomes[: len(batch.captures)]
        for (capture, job), outcome in zip(batch.captures, outcomes, strict=True):
            path = capture.sighting.origin.path
            is_elsewhere = outcome.gone and self._store.can_be_had(capture.sighting.origin)
            if outcome.noted or is_elsewhere:
                self._count_noted(capture.sighting, 1)
                if is_elsewhere:
                    seen = NewSeen(capture.sighting, capture.build_id, noted=True)
                    self._batch.seen.append(seen)
                if job is not None and job.more:
                    more = [NewSeen(each, capture.build_id, noted=True) for each in job.more]
                    self._batch.seen += more
                    self.summary.noted += len(more)
                continue
            if outcome.refused or outcome.gone:
                self.summary.unreadable.append(Unreadable(path, outcome.refused or REMOVED))
            elif outcome.new_blob:
                self.summary.captured += 1
                if verbose:
                    log.info("captured %s (%s)", show(path), capture.build_id)
            else:
                self.summary.held += 1
            self.summary.new_ids += outcome.new_id
            if job is not None:
                self._batch.captures += [
                    (at_another_place(capture, sighting), None) for sighting in job.more
                ]

    def _no_room(self, batch: Batch[_Job | None], error: StoreFull) -> CommitResult:
        """Nothing of a batch could be written. Raises `StoreFull` if there is not even a file."""
        if not batch.captures:
            raise error
        return CommitResult(tuple(Outcome(0, refused=str(error)) for _ in batch.captures))

    def _touch(self) -> None:
        """Record the sightings of known files. Raises `StoreError`."""
        self._join()
        touched, self._touched = self._touched, []
        forgotten = self._store.touch(touched)
        self.summary.held -= len(forgotten)
        for sighting in forgotten:
            if self._store.can_be_had(sighting.origin):
                self._count_noted(sighting, 1)  # it made way for others, as the journal says
            else:
                self.summary.unreadable.append(Unreadable(sighting.origin.path, REMOVED))


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    # Imported when needed: a scan that finds only what is known would spend a tenth on it.
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(count, name)
