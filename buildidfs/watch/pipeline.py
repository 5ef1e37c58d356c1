# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a watch: takes files into the store until it is closed.

Two workers take the pending files, smallest first. Pending files on filesystems that may not answer
have a worker of their own, so that they delay no others. The files of scans have one, too: these
files belong to living processes, so they can wait, and the scanner waits with them.

If a file cannot be taken now for a reason that may pass (the store is full, the file is being
written to), it is tried again until its time in `PendingFiles` is over. Then the file is reported
as lost, and its build ID is written to the journal.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs.backoff import Backoff
from buildidfs.capture import base
from buildidfs.capture.base import Found, PinnedFile, Unreadable, resighted
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.errors import StoreError
from buildidfs.ingest import staging
from buildidfs.ingest.committer import ROW_DELAYS, Trouble, WatchCounters
from buildidfs.ingest.pending_files import LetGo, PendingFile, PendingFiles
from buildidfs.ingest.pipeline import Job, Pipeline, StoreMemo
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_on_error
from buildidfs.linux.threads import Closer
from buildidfs.model import BuildId, FileIdentity, Sighting
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Outcome, Store
from buildidfs.store.index.locations import is_recent

if TYPE_CHECKING:
    from buildidfs.capture.live.protocol import Caught
    from buildidfs.capture.unresponsive.filesystems import SlowMounts
    from buildidfs.errors import BuildIdFsError
    from buildidfs.ingest.staging import Outcome as Staging
    from buildidfs.shares import Share
    from buildidfs.watch.catcher_client import LiveSightings
    from buildidfs.watch.state import WatchLimits


_log = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds that a filesystem may take for an answer."""

# Open files of scans that wait to be staged.
_SCANNED_AT_ONCE: Final = 16
_POLL_S: Final = 0.01
# The worker for filesystems that may not answer is abandoned.
_SLOW_END_S: Final = 1.0
# If a file is being written to, attempts are frequent at first, because most writers end soon.
_DELAYS: Final = Backoff(0.1, 1.0)
# Seconds between two checks if an omitted file still exists.
_OMITTED_CHECK_S: Final = 1.0
# Errors of reading a file that may pass.
_PASSING: Final = frozenset((errno.ETXTBSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM))


class ResultListener:
    """Receives the results for files, in threads of `Live`; each method must be quick."""

    def is_wanted(self, sighting: Sighting) -> bool:
        """Return True if a file that was seen there is to be captured."""
        return True

    def captured(self, sighting: Sighting, build_id: BuildId) -> None:
        """Called when the bytes of a file, new to the store, are durable."""

    def failed(self, sighting: Sighting, reason: str, build_id: BuildId | None = None) -> None:
        """Called for a file that was not captured, with the ``reason``."""

    def unreadable(self, found: Unreadable) -> None:
        """Called for a file or process that a scan could not read."""

    def unpinned(self, sighting: Sighting, build_id: BuildId) -> None:
        """Called for a file that the catcher could not keep open: only its build ID is known."""

    def forget(self, key: bytes) -> None:
        """Called to let the catcher send the file of this key again when it is mapped again."""

    def look_at(self, pid: int, share: Share) -> None:
        """Called to have a process scanned soon; the scan counts for ``share``."""

    def recovered(self) -> None:
        """Called when the store can be written again, after losses that a scan may find."""


class Live(Pipeline):
    """Takes the ``pending`` files into ``store`` with the workers of the limits, until `close`.

    ``listener`` gets the results. ``helper`` copies files on filesystems that may not answer, and
    is closed with this object.

    Methods may be called from any thread. If an error has ended a thread, they raise it, and no
    further file is taken.
    """

    def __init__(
        self,
        store: Store,
        pending: PendingFiles,
        listener: ResultListener,
        limits: WatchLimits,
        *,
        helper: FileHelper | None = None,
    ) -> None:
        self.counters = WatchCounters()
        super().__init__(
            store,
            self.counters,
            workers=limits.workers,
            most_queued=_SCANNED_AT_ONCE,
            is_idle=self._is_idle,
            trouble=Trouble(self.counters, listener.recovered),
        )
        self._pending = pending
        self._listener = listener
        self._helper = helper or FileHelper(min(ANSWER_S, pending.seconds))
        self._scanned = 0  # files of scans that are not finished
        self._start()
        self._threads += [
            self._started(self._work_on_pending, "capture") for _ in range(limits.workers)
        ]
        self._threads.append(self._started(self._watch_time, "expire"))
        self._slow = self._started(self._work_slowly, "capture-slow")

    # --- sightings ---------------------------------------------------------------------------

    def take(self, item: Found) -> None:
        """Take a file that a scan found. Blocks while too many files are waiting."""
        self.check()
        if isinstance(item, PinnedFile):
            self._take_pinned(item)
        elif isinstance(item, Unreadable):
            self._count(unreadable=1)
            self._listener.unreadable(item)
        elif item.known.build_id is not None:
            self._count(held=1)
            self._committer.wait_for_room()
            self._committer.see(item.sighting, item.known.build_id, held=True)
        elif item.known.absence is not None:
            self._count(absent=1)

    def seen(self, sighting: Sighting, build_id: BuildId) -> None:
        """Record the sighting of a file that the store holds under that build ID."""
        self.check()
        self._committer.see(sighting, build_id, held=True)

    def note(self, sighting: Sighting, build_id: BuildId) -> None:
        """Write a journal entry for a file whose bytes cannot be read."""
        self.check()
        self._committer.see(sighting, build_id)

    def absent(self, new: NewAbsence) -> None:
        """Remember that a file has no build ID."""
        self.check()
        self._count(absent=1)
        self._committer.add_rows(absent=[new])

    def let_go(self, gone: Iterable[LetGo]) -> None:
        """Count files that were closed without a copy (`PendingFiles.put`), and keep their build
        IDs.
        """
        for item in gone:
            pending, reason = item.pending, item.reason
            if pending.omitted:
                if self._store.recapturable_place(pending.sighting.origin):
                    self._count(omitted=1)
                    continue
                reason = "there was no room, and it was deleted before the next look"
            self._count(let_go=1)
            _log.debug("%s: let go: %s", pending.sighting.origin.path, reason)
            self._keep_id(pending.file, pending)
            if self.counters.store_error:
                self._committer.lost()
            self._report_failure(pending.sighting, pending, reason)

    def flush(self, timeout: float) -> bool:
        """Wait until all files that can be captured now are durable and visible.

        Returns False after ``timeout`` seconds. Files that wait for the end of a writer, or for
        room in the store, are not waited for.
        """
        until = time.monotonic() + timeout
        self._pending.recheck()
        while self._scanned or not self._pending.at_rest:
            self.check()
            if time.monotonic() >= until:
                return False
            self._committer.flush(min(until, time.monotonic() + _POLL_S))
            time.sleep(_POLL_S)  # rare and short, so it needs no notification of its own
        return self._committer.flush(until)

    def uncommitted(self) -> list[tuple[Sighting, BuildId | None]]:
        """Return the files that were taken and have no result yet, with their build IDs if
        known.
        """
        found = {id(each): (each.sighting, each.build_id) for each in self._pending.held()}
        with self._lock:
            for job in (*self._jobs.values(), *self._queue):
                of = job if job.pending is None else job.pending
                build_id = None if job.pending is None else job.pending.build_id
                found[id(of)] = (job.sighting, build_id)
        return list(found.values())

    def close(self) -> None:
        """Commit the staged files and the sightings, drop all others, and end all threads.

        Closes the pending files. Does not raise; safe to call twice.
        """
        self.let_go(self._pending.close())
        for job in self._end_threads():
            self._release([job])
        self._helper.close()
        self._slow.join(_SLOW_END_S)
        self._end_commits()
        self._pending.close()

    # --- threads -----------------------------------------------------------------------------

    def _fail(self, fault: BaseException) -> None:
        super()._fail(fault)
        self._committer.abandon()
        self._pending.close()

    def _is_idle(self) -> bool:
        return not self._busy and not self._queue and self._pending.idle

    def _work_on_pending(self) -> None:
        while (pending := self._pending.take()) is not None:
            try:
                wait, reason = staging.premature(pending.file)
            except OSError:
                wait, reason = 0.0, ""  # the attempt will show it
            if wait:
                self._put_off(pending, wait, reason)
            else:
                self._stage_pending(pending)

    def _work_slowly(self) -> None:
        while (pending := self._pending.take(slow=True)) is not None:
            self._stage_pending(pending)

    def _stage_pending(self, pending: PendingFile) -> None:
        with self._lock:
            self._busy += 1
        self._stage(Job(pending.sighting, pending.file, pending))
        self._rest()

    def _watch_time(self) -> None:
        while not self._pending.closed:
            self.let_go(self._pending.expire(None))

    def _take_pinned(self, pinned: PinnedFile) -> None:
        self._count_scanned(1)
        job = Job(pinned.sighting, pinned)
        if not self._put(job):
            self._release([job])

    def _count_scanned(self, more: int) -> None:
        with self._lock:
            self._scanned += more

    # --- one file ----------------------------------------------------------------------------

    def _stage(self, job: Job) -> None:
        if self._begin(job):
            super()._stage(job)

    def _capture(self, job: Job) -> Staging:
        if job.pending is None or not job.pending.slow:
            return super()._capture(job)
        # This process neither reads such a file nor gets its attributes (`file_helper`), and the
        # kernel's cached attributes at the catch may be old.
        origin = job.sighting.origin
        device = _device(origin.identity)
        path_fd, share = job.pending.file.fd, job.pending.share
        try:
            identity = self._helper.look(device, path_fd, share)
            identity, fd = self._helper.copy(device, path_fd, identity.size, share)
        except OSError as error:
            return Unreadable.of(origin.path, error)
        sighting = staging.sighting_of(job.sighting, identity)
        return staging.capture(self._store, PinnedFile(sighting, fd, is_copy=True))

    def _entries(self, capture: NewCapture, job: Job) -> Sequence[NewSeen]:
        """A watch journals each sighting, with the build ID at the time of the catch."""
        entries = [NewSeen(capture.sighting, capture.build_id)]
        caught = job.pending.build_id if job.pending is not None else None
        if caught is not None and caught != capture.build_id:
            entries.append(NewSeen(job.sighting, caught))
        return entries

    def _put_off(self, pending: PendingFile, wait: float, reason: str) -> None:
        """Delay a file: for ``wait`` seconds because it is too early, or with a ``reason``, which
        may last, for longer after each attempt.
        """
        if reason:
            wait = _DELAYS.delay(pending.tries)
            pending.tries += 1
            self._count(retried=1)
            self._keep_id(pending.file, pending)
        path = pending.sighting.origin.path
        _log.debug("%s: tried later, in %.3g s: %s", path, wait, reason or "it is too early")
        self._pending.give_back(pending, wait, reason)

    # --- results for a file -------------------------------------------------------------------

    def _captured(self, job: Job, capture: NewCapture, outcome: Outcome) -> None:
        if outcome.refused:
            self._count(unreadable=1)
            self._report_failure(job.sighting, job.pending, outcome.refused)
        else:
            self._count_captured(capture, outcome)
            if outcome.new_blob:
                self._listener.captured(capture.sighting, capture.build_id)
        self._revisit([job], capture)
        self._release([job])

    def _gone(self, job: Job, build_id: BuildId) -> None:
        self._not_committed([job], StoreError("the store has removed its bytes meanwhile"))

    def _omitted(self, jobs: list[Job], build_id: BuildId, *, is_recorded: bool = False) -> None:
        """Record only the sightings of files that still exist, because the store has no room for
        their bytes.

        A file that was just made waits as long as pending files do: if it is deleted meanwhile, it
        is not recapturable any more, and room is made for it.
        """
        for job in jobs:
            pending = job.pending
            _log.debug("%s: omitted for lack of room", job.sighting.origin.path)
            is_known = is_recorded and job is jobs[0]
            if not is_known and (pending is None or not pending.omitted):
                self._committer.see(job.sighting, build_id, omitted=True)
            if pending is not None and is_recent(job.sighting.origin):
                pending.omitted = True
                reason = "there is no room, and it is still there"
                self._pending.give_back(pending, _OMITTED_CHECK_S, reason)
                continue
            self._count(omitted=1)
            self._release([job])

    def _absent(self, jobs: list[Job], outcome: NewAbsence) -> None:
        self._count(absent=len(jobs))
        for each in jobs:
            self._keep_id(each.file, each.pending)  # the bytes with its build ID are gone
        self._revisit(jobs, outcome)
        self._release(jobs)

    def _unreadable(self, jobs: list[Job], why: Unreadable) -> None:
        for job in jobs:
            if why.errno in _PASSING:
                self._try_later(job, why.reason)
                continue
            self._count(unreadable=1)
            self._keep_id(job.file, job.pending)
            self._report_failure(job.sighting, job.pending, why.reason)
            self._release([job])

    def _try_later(self, job: Job, reason: str) -> None:
        if job.pending is not None:
            self._put_off(job.pending, 0.0, reason)
            return
        # A file of a scan waits like a caught one.
        assert job.file is not None
        self._count(retried=1)
        pending = PendingFile(job.file, None, b"", time.monotonic(), tries=1)
        self.let_go(self._pending.put(pending))
        self._count_scanned(-1)

    def _not_staged(self, job: Job, error: BuildIdFsError) -> None:
        self._committer.failed(error)
        self._not_committed([job], error)

    def _not_committed(self, jobs: list[Job], error: BuildIdFsError) -> None:
        """Let pending files wait for another attempt; a later scan finds the files of
        scans again.
        """
        for job in [each for of in jobs for each in self._finished(of)]:
            _log.debug("%s: not committed: %s", job.sighting.origin.path, error)
            self._keep_id(job.file, job.pending)
            pending = job.pending
            if pending is not None:
                wait, pending.tries = ROW_DELAYS.delay(pending.tries), pending.tries + 1
                self._count(retried=1)
                self._pending.give_back(pending, wait, str(error))
            else:
                self._committer.lost()
                self._listener.failed(job.sighting, str(error))
                self._release([job])

    def _forgotten(self, sighting: Sighting) -> None:
        """Count a file whose bytes were removed to make room: the file is not a loss while it is
        recapturable.
        """
        if self._store.recapturable_place(sighting.origin):
            self._count(omitted=1)
        else:
            self._listener.failed(sighting, "the store has forgotten it")

    def _revisit(self, jobs: list[Job], outcome: NewCapture | NewAbsence) -> None:
        """If the store must not remember a file, let the catcher send it again when it is mapped
        again.
        """
        for job in jobs:
            if not outcome.remember and job.pending is not None:
                self._listener.forget(job.pending.key)

    def _report_failure(self, sighting: Sighting, pending: PendingFile | None, reason: str) -> None:
        if pending is not None:
            self._listener.forget(pending.key)
        self._listener.failed(sighting, reason, pending.build_id if pending is not None else None)

    def _keep_id(self, file: PinnedFile | None, pending: PendingFile | None) -> None:
        """Put the build ID of an uncaptured file into the journal, so that at least the
        ID is kept.
        """
        if file is None:
            return
        build_id = pending.build_id if pending is not None else file.build_id
        if build_id is None and pending is None and file.fd >= 0:
            with contextlib.suppress(OSError):
                found = base.identify(file.fd)
                build_id = found if isinstance(found, BuildId) else None
        if build_id is not None:
            self._committer.see(file.sighting, build_id)

    def _release(self, jobs: list[Job]) -> None:
        """Close finished files."""
        self._pending.done(*(job.pending for job in jobs if job.pending is not None))
        for job in jobs:
            if job.pending is None and job.file is not None:
                job.file.close()
                self._count_scanned(-1)


def _device(identity: FileIdentity) -> tuple[int, int]:
    """Return the number of the mount, because device numbers are reused."""
    return identity.dev, int.from_bytes((identity.scope or b"")[-8:], "little")


DENIED: Final = frozenset((errno.EPERM, errno.EACCES))
"""Errors of a file that a scan of its process may open in another way."""

# For the first page of a file on a stacked filesystem.
_FIRST_LOOK_S: Final = 1.0
# The catcher closes its copies first, see `protocol.Outbox`.
_CLOSE_AFTER_S: Final = 0.5
_CLOSING_S: Final = 10.0


class CaughtFiles:
    """Passes caught files to ``pending``, for ``live``; ``listener`` gets the results.

    Belongs to one thread. ``sightings`` makes their sightings, ``slow`` knows the mounts that may
    not answer.
    """

    def __init__(
        self,
        store: Store,
        live: Live,
        pending: PendingFiles,
        listener: ResultListener,
        sightings: LiveSightings,
        slow: SlowMounts,
    ) -> None:
        self._memo = StoreMemo(store)
        self._live = live
        self._pending = pending
        self._listener = listener
        self._sightings = sightings
        self._slow = slow
        self._patience = Patience(_FIRST_LOOK_S)
        self._closer = Closer(delay=_CLOSE_AFTER_S)

    def take(self, caught: Caught, fd: int) -> None:
        """Take over one file, which is open at ``fd`` (O_PATH); -1 if only its data is known."""
        sighting = self._sightings.of(caught, fd)
        _log.debug("%s: received, pid %d", caught.path, caught.pid)
        if not self._listener.is_wanted(sighting):
            _log.debug("%s: dropped by --container or --exclude", caught.path)
            self._closer.close([fd])
        elif caught.build_id is not None:
            self._live.note(sighting, caught.build_id)
            self._listener.unpinned(sighting, caught.build_id)
            self._listener.forget(caught.key)
        elif fd < 0:
            # We had no free descriptor to receive it.
            self._not_opened(caught, sighting, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        elif not self._is_known(caught, sighting, fd):
            self._take_new(caught, self._sightings.reached(sighting, caught, fd), fd)

    def close(self) -> None:
        """Close the remaining descriptors; safe to call twice."""
        self._closer.finish(_CLOSING_S)
        self._sightings.close()

    def _is_known(self, caught: Caught, sighting: Sighting, fd: int) -> bool:
        """Record the sighting of a file that the store knows; return False if it does
        not know it.
        """
        known = self._memo.recall(caught.identity)
        if known is None:
            return False
        if known.build_id is not None:

            def at_new_place(each: Sighting) -> Sighting:
                # The process may have loaded it through a link of its container.
                if each.origin.container:
                    self._listener.look_at(caught.pid, self._sightings.share(caught.place))
                return self._sightings.reached(each, caught, fd)

            _log.debug("%s: known, build ID %s", caught.path, known.build_id)
            found = resighted(self._memo, sighting, known, at_new_place)
            self._live.seen(found.sighting, known.build_id)
        self._closer.close([fd])
        return True

    def _take_new(self, caught: Caught, sighting: Sighting, fd: int) -> None:
        place = caught.place
        build_id = None
        slow = self._slow.is_slow(fd, caught.identity, place.mnt_ns_id, place.namespaces.user)
        if not slow:
            try:
                readable, build_id = self._first_look(caught, fd)
            except TimeoutError:
                slow = True
            except OSError as error:
                self._closer.close([fd])
                self._not_opened(caught, sighting, error)
                return
            else:
                self._closer.close([fd])
                fd = readable
        share = self._sightings.share(caught.place)
        now = time.monotonic()
        file = PendingFile(
            PinnedFile(sighting, fd), build_id, caught.key, now, slow=slow, share=share
        )
        _log.debug("%s: waits for its copy, build ID %s", caught.path, build_id)
        self._live.let_go(self._pending.put(file))
        self._listener.look_at(caught.pid, share)

    def _first_look(self, caught: Caught, path_fd: int) -> tuple[int, BuildId | None]:
        """Return a descriptor that reads a file, and the build ID on its first page.

        Raises OSError: TimeoutError if a layer of its filesystem does not answer.
        """
        if not self._slow.is_stacked(path_fd):
            return _opened(path_fd)
        device = _device(caught.identity)
        return self._patience.ask_about(device, path_fd, _opened, lambda found: os.close(found[0]))

    def _not_opened(self, caught: Caught, sighting: Sighting, error: OSError) -> None:
        self._listener.forget(caught.key)
        _log.debug("%s: not opened: %s", caught.path, error.strerror)
        if error.errno in DENIED:
            # A scan has other ways.
            self._listener.look_at(caught.pid, self._sightings.share(caught.place))
        else:
            self._listener.failed(sighting, error.strerror or str(error))


def _opened(path_fd: int) -> tuple[int, BuildId | None]:
    with closing_on_error(inodes.reopen_regular(path_fd)) as fd:
        found = base.identify(fd)
    return fd, found if isinstance(found, BuildId) else None
