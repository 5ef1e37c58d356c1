# SPDX-License-Identifier: Apache-2.0
"""The pipeline of files into the store: found, staged by workers, committed in batches, counted.

    source -> queue -> workers (`staging`) -> `committer` -> results

`Pipeline` is the common part of a scan and a watch. `scan.Scan` ends: its source is a scanner, a
failure of the store ends it, and its result is a summary. `live.Live` continues until it is closed:
caught files wait beside the queue, open and with a deadline, and a store that failed is tried
again.

All of these have limits: the files in the queue, the files in a batch, and the staged bytes.
Threads start when the first file has to be read, because a usual scan finds only known files.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import Unreadable
from buildidfs.errors import BuildIdFsError
from buildidfs.ingest import stability, staging
from buildidfs.ingest.batch import at_another_place
from buildidfs.ingest.committer import FAILURES, Committer
from buildidfs.linux.file_ops import on_error
from buildidfs.names import printable
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Store

if TYPE_CHECKING:
    from buildidfs.capture.base import PinnedFile
    from buildidfs.ingest.batch import Batch, ScanSummary, WatchCounters
    from buildidfs.ingest.committer import Trouble
    from buildidfs.ingest.pending_files import PendingFile
    from buildidfs.ingest.staging import Outcome as Staging
    from buildidfs.model import BuildId, FileIdentity, Sighting
    from buildidfs.store import CommitResult, Outcome

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
            if same is job:  # it was too early before
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
        pause = stability.limits.pause
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
            self._noted(jobs, outcome.build_id)
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
        if outcome.gone or outcome.noted or outcome.refused:
            result = outcome.refused or "no bytes"
        path, build_id = job.sighting.origin.path, capture.build_id
        _log.debug("%s: committed, build ID %s, %s", path, build_id, result)
        if outcome.gone:
            self._gone(job, capture.build_id)
            return
        jobs = self._finished(job)
        if outcome.noted:
            self._noted(jobs, capture.build_id, is_recorded=True)
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
        is_over = time.monotonic() >= job.since + stability.limits.patience
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
    def _noted(self, jobs: list[Job], build_id: BuildId, *, is_recorded: bool = False) -> None:
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
        """The store could not record these captures (none: only rows); their staged
        bytes are gone.
        """

    @abstractmethod
    def _forgotten(self, sighting: Sighting) -> None:
        """A file that the store seemed to know is not known to the store any more."""
