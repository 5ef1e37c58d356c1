# SPDX-License-Identifier: Apache-2.0
"""The pipeline of files into the store: found, staged by workers, committed in batches, counted.

    source -> queue -> workers (`staging`) -> `committer` -> results

`Pipeline` is the common part of a scan and a watch. `Scan` ends: its source is a scanner, a failure
of the store ends it, and its result is a summary. `watch.pipeline.Live` continues until it is
closed: caught files wait beside the queue, open and with a deadline, and a store that failed is
tried again.

All of these have limits: the files in the queue, the files in a batch, and the staged bytes.
Threads start when the first file has to be read, because a usual scan finds only known files.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from buildidfs.capture.base import Known, PinnedFile, Unreadable
from buildidfs.errors import BuildIdFsError, Interrupted, StoreFull
from buildidfs.formats.elf.other_ids import link_of
from buildidfs.ingest import staging
from buildidfs.ingest.committer import (
    BATCH_ROWS,
    FAILURES,
    Committer,
    ScanSummary,
    at_another_place,
)
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Absence, AliasType, BuildId, FileIdentity, Kind, Sighting
from buildidfs.names import printable
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Outcome, Store

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.capture.base import Found, Progress
    from buildidfs.formats.elf.identify import DebugLink
    from buildidfs.ingest.committer import Batch, Trouble, WatchCounters
    from buildidfs.ingest.pending_files import PendingFile
    from buildidfs.ingest.staging import Outcome as Staging
    from buildidfs.store import CommitResult


_log = logging.getLogger(__name__)


_MOST_EARLY: Final = 8


class TooEarly(Exception):
    """A file changed a moment ago, or has a writer that may be writing."""


class Job:
    """A file in work, and further sightings of the same file at other places.

    ``file`` is None if the job only records a sighting of a known file. ``pending`` is the pending
    file that ``file`` comes from, if it was caught live. ``since`` is the time of the job's
    beginning, on the monotonic clock.
    """

    __slots__ = ("file", "more", "pending", "sighting", "since")

    def __init__(
        self, sighting: Sighting, file: PinnedFile | None, pending: PendingFile | None = None
    ) -> None:
        self.sighting = sighting
        self.file = file
        self.pending = pending
        self.more: list[Job] = []
        self.since = time.monotonic()


class Pipeline(ABC):
    """Takes files into ``store`` with ``workers`` threads; at most ``most_queued`` files wait.

    ``is_idle`` and ``trouble`` are those of `Committer`. Subclasses handle the results for a file,
    in methods that are called in any thread.
    """

    def __init__(
        self,
        store: Store,
        results: ScanSummary | WatchCounters,
        *,
        workers: int,
        most_queued: int,
        is_idle: Callable[[], bool] | None = None,
        trouble: Trouble | None = None,
    ) -> None:
        self._store = store
        self._results = results
        self._not_started = workers
        self._most_queued = most_queued
        self._committer: Committer[Job] = Committer(
            store, results, self._settled, is_idle=is_idle, trouble=trouble
        )
        self._commits: threading.Thread | None = None
        self._most_staged: int | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for workers
        self._room = threading.Condition(self._lock)  # for the waiting threads
        self._queue: deque[Job] = deque()
        self._early: deque[tuple[float, Job]] = deque()  # with the times when they are queued
        self._jobs: dict[FileIdentity, Job] = {}
        self._threads: list[threading.Thread] = []  # that stage what is queued
        self._waiting = 0  # threads without work
        self._busy = 0  # threads that stage a file
        self._closing = False
        self._fault: BaseException | None = None

    def check(self) -> None:
        """Raise the error that ended the work, if there was one."""
        if self._fault is not None:
            raise self._fault

    # --- threads -----------------------------------------------------------------------------

    def _start(self) -> None:
        """Start a thread that commits."""
        self._most_staged = self._store.most_staged
        self._committer.prepare(self._most_staged)
        self._commits = self._started(self._commit, "commit")

    def _started(self, work: Callable[[], None], name: str) -> threading.Thread:
        def guarded() -> None:
            try:
                work()
            # the top of the thread: the error is raised where it is handled
            except BaseException as fault:
                self._fail(fault)

        thread = threading.Thread(target=guarded, name=f"buildidfs-{name}", daemon=True)
        thread.start()
        return thread

    def _commit(self) -> None:
        with on_error(self._committer.abandon):
            self._committer.run()

    def _fail(self, fault: BaseException) -> None:
        """Stop all work because of a fault, and release all waiting threads."""
        with self._lock:
            self._fault = self._fault or fault
            self._changed.notify_all()
            self._room.notify_all()

    def _put(self, job: Job) -> bool:
        """Queue a file, after a wait while too many are queued; return False if none is taken any
        more.
        """
        with self._lock:
            while len(self._queue) >= self._most_queued and not self._is_over():
                self._room.wait()
            if self._is_over():
                return False
            self._queue.append(job)
            self._changed.notify()
            if self._waiting < len(self._queue) and self._not_started:
                self._not_started -= 1
                self._threads.append(self._started(self._work, "stage"))
        return True

    def _is_over(self) -> bool:
        return self._closing or self._fault is not None

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._stage(job)
            self._rest()

    def _next(self) -> Job | None:
        with self._lock:
            self._waiting += 1
            while not self._queue and not self._is_over():
                wait = self._early[0][0] - time.monotonic() if self._early else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                else:
                    self._queue.append(self._early.popleft()[1])
            self._waiting -= 1
            if self._is_over():
                return None
            self._busy += 1
            self._room.notify_all()
            return self._queue.popleft()

    def _rest(self) -> None:
        """Record that a thread has staged its file."""
        with self._lock:
            self._busy -= 1
            is_last = not self._busy
            if is_last:
                self._room.notify_all()
        if is_last:
            self._committer.poke()

    def _drain(self) -> None:
        """Wait until all queued files are staged. Raises the error that ended the work."""
        with self._lock:
            while (self._queue or self._busy or self._early) and self._fault is None:
                self._room.wait()
        self.check()

    def _end_threads(self) -> list[Job]:
        """End the threads that stage, and return the files that they have not begun."""
        with self._lock:
            self._closing = True
            left = list(self._queue)
            self._queue.clear()
            self._changed.notify_all()
            self._room.notify_all()
        for thread in self._threads:
            thread.join()
        return [*left, *self._queue, *(job for _, job in self._early)]

    def _end_commits(self) -> None:
        """Commit the staged files, and end the thread that commits."""
        self._committer.end()
        if self._commits is not None:
            self._commits.join()

    # --- one file ----------------------------------------------------------------------------

    def _begin(self, job: Job) -> bool:
        """If the same file is in work, add the job to it and return False; else return True."""
        identity = job.sighting.origin.identity
        with self._lock:
            same = self._jobs.get(identity)
            if same is job:  # its staging was put off, and now begins
                return True
            if same is not None and (job.file is None or identity.scope is not None):
                same.more.append(job)
                return False
            if job.file is None:
                return True
            self._jobs[identity] = job
            return True

    def _stage(self, job: Job) -> None:
        """Stage one file; return when it waits for its commit, or has a result."""
        self._committer.wait_for_room()
        try:
            outcome = self._capture(job)
        except TooEarly:
            self._stage_later(job)
        except FAILURES as error:
            self._not_staged(job, error)
        else:
            self._take(job, outcome)

    def _stage_later(self, job: Job) -> None:
        """Queue a file once more when the queue is empty, after a pause."""
        pause = staging.limits.pause
        with self._lock:
            is_full = len(self._early) >= _MOST_EARLY
            self._early.append((time.monotonic() + pause, job))
        if is_full:  # each of them is open
            time.sleep(pause)
            with self._lock:
                if self._early:
                    self._queue.append(self._early.popleft()[1])

    def _take(self, job: Job, outcome: Staging) -> None:
        """Continue with the result of staging a file."""
        path = job.sighting.origin.path
        if isinstance(outcome, NewCapture):
            _log.debug("%s: staged, build ID %s", path, outcome.build_id)
            self._committer.add(outcome, job, self._entries(outcome, job))
            return
        jobs = self._finished(job)
        if isinstance(outcome, NewSeen):
            _log.debug("%s: not staged, for want of room", path)
            self._omitted(jobs, outcome.build_id)
        elif isinstance(outcome, NewAbsence):
            _log.debug("%s: not staged, without a build ID", path)
            self._committer.add_rows(absent=[outcome])
            self._absent(jobs, outcome)
        else:
            _log.debug("%s: not staged: %s", path, outcome.reason)
            self._unreadable(jobs, outcome)

    def _settled(
        self, batch: Batch[Job], result: CommitResult | BuildIdFsError, unknown: list[Sighting]
    ) -> None:
        """Continue with a batch that was committed, or could not be."""
        if isinstance(result, BuildIdFsError):
            self._not_committed([job for _, job, _ in batch.captures], result)
            return
        outcomes = result.outcomes[: len(batch.captures)]
        for (capture, job, _), outcome in zip(batch.captures, outcomes, strict=True):
            self._committed(capture, job, outcome)
        for sighting in unknown:
            self._forgotten(sighting)

    def _committed(self, capture: NewCapture, job: Job, outcome: Outcome) -> None:
        result = "new bytes" if outcome.new_blob else "known bytes"
        if outcome.gone or outcome.omitted or outcome.refused:
            result = outcome.refused or "no bytes"
        path, build_id = job.sighting.origin.path, capture.build_id
        _log.debug("%s: committed, build ID %s, %s", path, build_id, result)
        if outcome.gone:
            self._gone(job, capture.build_id)
            return
        jobs = self._finished(job)
        if outcome.omitted:
            self._omitted(jobs, capture.build_id, is_recorded=True)
            return
        self._captured(job, capture, outcome)
        for other in jobs[1:]:
            there = at_another_place(capture, other.sighting)
            self._committer.add(there, other, self._entries(there, other))

    def _finished(self, job: Job) -> list[Job]:
        """Return a finished job and the jobs added to it. A later job for the same file is staged
        anew.
        """
        identity = job.sighting.origin.identity
        with self._lock:
            if self._jobs.get(identity) is job:
                del self._jobs[identity]
            more, job.more = job.more, []
        return [job, *more]

    def _count_captured(self, capture: NewCapture, outcome: Outcome) -> None:
        """Count a file whose bytes the store has now."""
        self._count(new_ids=outcome.new_id)
        if not outcome.new_blob:
            self._count(held=1)
            return
        self._count(captured=1)
        path = printable(capture.sighting.origin.path)
        _log.info("captured %s (%s)", path, capture.build_id)

    def _count(self, **more: int) -> None:
        """Add to the counts of these names."""
        with self._lock:
            for name, number in more.items():
                setattr(self._results, name, getattr(self._results, name) + number)

    # --- results for a file -------------------------------------------------------------------

    def _capture(self, job: Job) -> Staging:
        """Stage a file, whose descriptor stays open. Raises `StoreError`, `IntegrityError`, and
        `TooEarly`.
        """
        assert job.file is not None
        outcome = staging.take(self._store, job.file)
        is_early = isinstance(outcome, Unreadable) and outcome.errno == errno.ETXTBSY
        is_over = time.monotonic() >= job.since + staging.limits.patience
        if is_early and job.pending is None and not is_over:  # a pending file waits among others
            raise TooEarly
        return outcome

    def _entries(self, capture: NewCapture, job: Job) -> Sequence[NewSeen]:
        """Return the journal entries for a capture."""
        return ()

    @abstractmethod
    def _captured(self, job: Job, capture: NewCapture, outcome: Outcome) -> None:
        """The bytes of a file are durable and visible, or the store refused them because of their
        content.
        """

    @abstractmethod
    def _gone(self, job: Job, build_id: BuildId) -> None:
        """The store held the bytes of a file, and removed them before the sighting was recorded."""

    @abstractmethod
    def _omitted(self, jobs: list[Job], build_id: BuildId, *, is_recorded: bool = False) -> None:
        """There is no room for files that still exist; if ``is_recorded``, the journal has the
        first.
        """

    @abstractmethod
    def _absent(self, jobs: list[Job], outcome: NewAbsence) -> None:
        """A file has no build ID."""

    @abstractmethod
    def _unreadable(self, jobs: list[Job], why: Unreadable) -> None:
        """A file could not be read."""

    @abstractmethod
    def _not_staged(self, job: Job, error: BuildIdFsError) -> None:
        """The store could not take the bytes."""

    @abstractmethod
    def _not_committed(self, jobs: list[Job], error: BuildIdFsError) -> None:
        """Handle captures that the store could not record, and whose staged bytes are gone.

        ``jobs`` is empty if only rows could not be recorded.
        """

    @abstractmethod
    def _forgotten(self, sighting: Sighting) -> None:
        """Handle a sighting of a file that the store does not know any more."""


REMOVED: Final = "the store has removed its bytes meanwhile: the next scan reads it"
"""The reason for a file that was not captured because the store held it, and has removed its bytes
meanwhile.
"""

_LINK: Final = AliasType.LINK
_MOST_QUEUED: Final = 32  # each is open
_PROGRESS_S: Final = 0.1
# A worker that returns from the kernel waits this long for the scanner, which is pure Python; with
# the default of 5 ms a scan of /usr/lib takes a third longer.
_SWITCH_INTERVAL_S: Final = 0.0005


class StoreMemo:
    """The store's memory of files, with the interface for scanners."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._recall = store.index.recall
        self.knows_place = store.index.knows_place

    def recall(self, identity: FileIdentity) -> Known | None:
        """Return the remembered result for an unchanged file, or None if it has to be read."""
        remembered = self._recall(identity)
        if remembered is None:
            return None
        return Known(remembered.build_id, remembered.absence)

    def debug_link(self, build_id: BuildId) -> DebugLink | None:
        """Return the section .gnu_debuglink of the executable with a build ID, if it has one."""
        ordinal = self._store.index.ordinal(build_id) or 0
        executable = self._store.index.artifact(ordinal, Kind.EXECUTABLE)
        aliases = self._store.aliases.of(executable.digest) if executable is not None else ()
        return next(map(link_of, (each.value for each in aliases if each.type is _LINK)), None)


class Ingest:
    """Takes the files that scanners find into ``store``; ``workers`` threads hash and copy."""

    def __init__(self, store: Store, *, workers: int | None = None) -> None:
        self._store = store
        self._workers = workers or min(4, os.cpu_count() or 1)

    def run(
        self,
        found: Iterable[Found],
        progress: Progress | None = None,
        share: Callable[[], float | None] = lambda: None,
    ) -> ScanSummary:
        """Take all files into the store; return when they are durable and visible.

        ``share`` returns the progress of the scanner for ``progress``. On Ctrl-C the staged files
        are committed, and `Interrupted` is raised.

        At the end, blobs that the store's policy does not keep are removed. Failures of single
        files are in the summary, also a lack of room. Raises `StoreError` (`StoreFull`) if the
        store fails, and errors of ``found``, after the files staged by then are committed.
        """
        scan = Scan(self._store, self._workers)
        shown = 0.0
        items = iter(found)
        try:
            try:
                for item in items:
                    scan.take(item)
                    if progress is not None and (now := time.monotonic()) - shown >= _PROGRESS_S:
                        shown, summary = now, scan.summary
                        path = os.fsdecode(_path(item))
                        progress(summary.files, path, size=summary.copied_bytes, share=share())
                scan.finish()
                self._store.enforce()
            finally:
                scan.close()
                if isinstance(items, Generator):
                    items.close()
        except KeyboardInterrupt as error:
            raise interrupted(scan.summary.captured) from error
        scan.summary.removed = self._store.take_tally()
        return scan.summary


def interrupted(kept: int) -> Interrupted:
    """Return the error of a scan that Ctrl-C ended, with the number of captured files."""
    return Interrupted(f"{kept} file{'s' * (kept != 1)} kept; run it again", kept)


def _path(item: Found) -> bytes:
    return item.path if isinstance(item, Unreadable) else item.sighting.origin.path


class Scan(Pipeline):
    """One run of `Ingest`. A failure of the store ends it: `take` and `finish` raise `StoreError`.

    A file that a process writes to, or that changed a moment ago, is tried later. If the store's
    policy limits the staged bytes, a file for which there is no room waits until all others are
    committed, and is then tried once more.
    """

    def __init__(self, store: Store, workers: int) -> None:
        self.summary = ScanSummary()
        super().__init__(store, self.summary, workers=workers, most_queued=_MOST_QUEUED)
        self._switch_interval = sys.getswitchinterval()
        self._short: list[Job] = []
        self._touched: list[Sighting] = []

    def take(self, item: Found) -> None:
        """Put one item into the pipeline; wait while too many are queued. Raises `StoreError`."""
        self.summary.files += 1
        if isinstance(item, PinnedFile):
            self._take_pinned(item)
        elif isinstance(item, Unreadable):
            self.summary.unreadable.append(item)
        elif item.known.build_id is not None:
            # It is another name of a file that is not committed yet.
            if self._begin(Job(item.sighting, None)):
                self._count(held=1)
                self._touched.append(item.sighting)
                if len(self._touched) >= BATCH_ROWS:
                    self._touch()
        elif item.known.absence is not None:
            self._count_absent(item.known.absence, item.sighting)

    def finish(self) -> None:
        """Wait until everything is recorded. Raises `StoreError`."""
        self._drain()
        self._retry()
        self._touch()
        self._committer.flush()
        self.check()

    def close(self) -> None:
        """Record the staged files, drop all others, and end the threads."""
        for job in (*self._end_threads(), *self._short):
            _close(job)
        self._committer.add_rows(touched=self._touched)
        self._end_commits()
        sys.setswitchinterval(self._switch_interval)

    def _take_pinned(self, pinned: PinnedFile) -> None:
        job = Job(pinned.sighting, pinned)
        if not self._begin(job):
            pinned.close()
            return
        if self._commits is None:
            self._start()
            sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if not self._put(job):
            pinned.close()
        self.check()
        self._retry()

    def _touch(self) -> None:
        """Record the sightings of known files. Raises `StoreError`."""
        if self._commits is not None:
            self._committer.wait_for_room()
        self._committer.add_rows(touched=self._touched)
        self._touched = []
        if self._commits is None:
            self._committer.flush()
        self.check()

    def _retry(self) -> None:
        """Try the files again for which there was no room. Raises `StoreError`.

        Staged files that wait for a commit take room, so they are committed first.
        """
        while self._short:
            self._drain()
            self._committer.flush()
            self.check()
            job = self._short.pop()
            with on_error(partial(self._finished, job)):
                outcome = self._capture_at_last(job)
            self._take(job, outcome)

    def _capture_at_last(self, job: Job) -> Staging:
        assert job.file is not None
        try:
            return staging.capture(self._store, job.file)
        except StoreFull as error:
            return Unreadable(job.sighting.origin.path, str(error), errno.ENOSPC)

    # --- results for a file -------------------------------------------------------------------

    def _capture(self, job: Job) -> Staging:
        """Stage one file, and close it unless it has to wait for room or rest."""
        is_kept_open = False
        try:
            return super()._capture(job)
        except TooEarly:
            is_kept_open = True
            raise
        except StoreFull:
            is_kept_open = self._most_staged is not None
            raise
        finally:
            if not is_kept_open:
                _close(job)

    def _captured(self, job: Job, capture: NewCapture, outcome: Outcome) -> None:
        if outcome.refused:
            self.summary.unreadable.append(
                Unreadable(capture.sighting.origin.path, outcome.refused)
            )
        else:
            self._count_captured(capture, outcome)

    def _gone(self, job: Job, build_id: BuildId) -> None:
        for each in self._finished(job):
            if self._store.recapturable_place(each.sighting.origin):
                self._omitted([each], build_id)
            else:
                self._removed(each.sighting)

    def _omitted(self, jobs: list[Job], build_id: BuildId, *, is_recorded: bool = False) -> None:
        self._committer.add_rows(
            seen=[NewSeen(each.sighting, build_id, omitted=True) for each in jobs[is_recorded:]]
        )
        self._count(omitted=len(jobs), omitted_bytes=jobs[0].sighting.origin.identity.size)

    def _absent(self, jobs: list[Job], outcome: NewAbsence) -> None:
        for job in jobs:
            self._count_absent(outcome.absence, job.sighting)

    def _count_absent(self, absence: Absence, sighting: Sighting) -> None:
        with self._lock:
            self.summary.absent[absence] += 1
        if absence not in (Absence.NOT_ELF, Absence.EMPTY):
            path = printable(sighting.origin.path)
            _log.info("passed over %s: %s", path, absence)

    def _unreadable(self, jobs: list[Job], why: Unreadable) -> None:
        self.summary.unreadable += [
            replace(why, path=each.sighting.origin.path) if each is not jobs[0] else why
            for each in jobs
        ]

    def _not_staged(self, job: Job, error: BuildIdFsError) -> None:
        if isinstance(error, StoreFull) and self._most_staged is not None:
            self._short.append(job)
            return
        self._finished(job)
        self._fail(error)

    def _not_committed(self, jobs: list[Job], error: BuildIdFsError) -> None:
        every = [self._finished(job) for job in jobs]
        if not isinstance(error, StoreFull) or self._most_staged is None or not jobs:
            self._fail(error)
            return
        for same in every:
            self._unreadable(same, Unreadable(same[0].sighting.origin.path, str(error)))

    def _forgotten(self, sighting: Sighting) -> None:
        self._count(held=-1)
        # According to the journal, the blob was removed to make room.
        if self._store.recapturable_place(sighting.origin):
            self._count(omitted=1, omitted_bytes=sighting.origin.identity.size)
        else:
            self._removed(sighting)

    def _removed(self, sighting: Sighting) -> None:
        self.summary.unreadable.append(Unreadable(sighting.origin.path, REMOVED))


def _close(job: Job) -> None:
    if job.file is not None:
        job.file.close()
