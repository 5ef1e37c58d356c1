# SPDX-License-Identifier: Apache-2.0
"""A scan into the store: a pipeline that ends with its scanner, or when the store fails."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from buildidfs.capture.base import Known, PinnedFile, Unreadable
from buildidfs.errors import Interrupted, StoreFull
from buildidfs.formats.elf.other_ids import link_of
from buildidfs.ingest import staging
from buildidfs.ingest.batch import BATCH_ROWS, ScanSummary
from buildidfs.ingest.pipeline import Job, Pipeline, TooEarly
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Absence, AliasType, BuildId, FileIdentity, Kind, Sighting
from buildidfs.names import printable
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Outcome, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.capture.base import Found, Progress
    from buildidfs.errors import BuildIdFsError
    from buildidfs.formats.elf.identify import DebugLink
    from buildidfs.ingest.staging import Outcome as Staging

REMOVED: Final = "the store has removed its bytes meanwhile: the next scan reads it"
"""The reason for a file that was not captured because the store held it, and has removed its bytes
meanwhile.
"""

_LINK: Final = AliasType.LINK
_WAITING_PER_WORKER: Final = 8
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
        super().__init__(
            store, self.summary, workers=workers, most_queued=workers * _WAITING_PER_WORKER
        )
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
        self._try_again()
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
        self._try_again()

    def _touch(self) -> None:
        """Record the sightings of known files. Raises `StoreError`."""
        if self._commits is not None:
            self._committer.wait_for_room()
        self._committer.add_rows(touched=self._touched)
        self._touched = []
        if self._commits is None:
            self._committer.flush()
        self.check()

    def _try_again(self) -> None:
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
                self._noted([each], build_id)
            else:
                self._removed(each.sighting)

    def _noted(self, jobs: list[Job], build_id: BuildId, *, is_recorded: bool = False) -> None:
        self._committer.add_rows(
            seen=[NewSeen(each.sighting, build_id, noted=True) for each in jobs[is_recorded:]]
        )
        self._count(noted=len(jobs), noted_bytes=jobs[0].sighting.origin.identity.size)

    def _absent(self, jobs: list[Job], outcome: NewAbsence) -> None:
        for job in jobs:
            self._count_absent(outcome.absence, job.sighting)

    def _count_absent(self, absence: Absence, sighting: Sighting) -> None:
        with self._lock:
            self.summary.absent[absence] += 1
        if absence not in (Absence.NOT_ELF, Absence.EMPTY):
            import logging  # rarely needed, and not by a scan that finds only known files

            path = printable(sighting.origin.path)
            logging.getLogger(__name__).info("passed over %s: %s", path, absence)

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
        # it was removed to make room, according to the journal
        if self._store.recapturable_place(sighting.origin):
            self._count(noted=1, noted_bytes=sighting.origin.identity.size)
        else:
            self._removed(sighting)

    def _removed(self, sighting: Sighting) -> None:
        self.summary.unreadable.append(Unreadable(sighting.origin.path, REMOVED))


def _close(job: Job) -> None:
    if job.file is not None:
        job.file.close()
