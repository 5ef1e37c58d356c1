# SPDX-License-Identifier: Apache-2.0
"""What a watch sees, into the store, for as long as it runs: the counterpart of `Ingest`.

Workers take pins, smallest first, and stage them; one thread commits. What is on a filesystem that
may not answer has a worker of its own, so that it delays nobody else, and so have the files of
scans, which belong to processes that live: they can wait, and whoever hands them over waits, too.

Nothing ends a `Follow` but `close`. What cannot be taken now for a reason that may pass (the store
is full, somebody is writing to the file) is tried again until its time in `Pins` is over; then it
is told of, and what it was is in the journal.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import Found, PinnedFile, Unreadable
from buildidfs.capture.live.pending_files import LetGo, Pin, Pins
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.ingest import staging
from buildidfs.ingest.jobs import Captured, Failed, Forget, Job, Jobs
from buildidfs.ingest.reluctant import Reluctant

if TYPE_CHECKING:
    from buildidfs.ingest.counters import Counters
    from buildidfs.ingest.staging import Outcome
    from buildidfs.model import BuildId, Sighting
    from buildidfs.store import NewAbsence, Store

ANSWER_S: Final = 10.0
"""How long, in seconds, a filesystem may take for an answer."""

# Files of scans that wait, open, to be staged.
_SCANNED_AT_ONCE: Final = 16
# A thread for scans ends when none has come for so long; so does a wait for room, to look around.
_LOOK_S: Final = 0.2
_POLL_S: Final = 0.01
# The one whose filesystem may not answer is left behind.
_SLOW_END_S: Final = 1.0


def _ignore_failed(what: Pin | Sighting, reason: str) -> None:
    """The default: nobody wants to know."""


def _ignore_captured(sighting: Sighting, build_id: BuildId) -> None:
    """Likewise."""


def _ignore_forget(pin: Pin) -> None:
    """Likewise."""


def _ignore_recovered() -> None:
    """Likewise."""


class Follow:
    """Takes into ``store`` what waits in ``pins``, with so many ``workers``, from now on.

    ``failed`` is told of each sighting that was not captured: whoever caught it should forget that
    it did. ``captured`` is told of each file whose bytes are new, ``forget`` of each pin whose file
    may change without a trace and has to be caught again. ``recovered`` is told when the
    store can be written again after something was lost that a scan may find. All are called in
    threads of this object and must be quick.

    ``helper`` copies what is on filesystems that may not answer, and is closed with this.

    Methods may be called from any thread. They raise what ended a thread, should that happen: then
    nothing goes into the store any more.
    """

    def __init__(
        self,
        store: Store,
        pins: Pins,
        *,
        workers: int = 2,
        failed: Failed = _ignore_failed,
        captured: Captured = _ignore_captured,
        forget: Forget = _ignore_forget,
        recovered: Callable[[], None] = _ignore_recovered,
        helper: FileHelper | None = None,
    ) -> None:
        self._store = store
        self._pins = pins
        self._workers = workers
        self._jobs = Jobs(
            store,
            pins,
            is_idle=self._is_idle,
            failed=failed,
            captured=captured,
            forget=forget,
            recovered=recovered,
        )
        self._committer = self._jobs.committer
        self._helper = helper or FileHelper(min(ANSWER_S, pins.seconds))
        self._reluctant = Reluctant(store, self._helper)
        self._lock = threading.Lock()
        self._scans: queue.Queue[PinnedFile] = queue.Queue(_SCANNED_AT_ONCE)
        self._scanners: list[threading.Thread] = []
        self._closing = False
        self._fault: BaseException | None = None
        self._commits = self._started(self._committer.run, "commit")
        self._threads = [self._started(self._work, "capture") for _ in range(workers)]
        self._threads.append(self._started(self._watch_time, "expire"))
        self._slow = self._started(self._work_slowly, "capture-slow")

    @property
    def counters(self) -> Counters:
        """What it has come to so far; changes under the eyes of who reads it."""
        return self._jobs.counters

    def check(self) -> None:
        """Raise what ended a thread, if anything did."""
        if self._fault is not None:
            raise self._fault

    # --- what is seen ------------------------------------------------------------------------

    def take(self, item: Found) -> None:
        """Take what a scan found; waits while too much of it is waiting."""
        self.check()
        if isinstance(item, PinnedFile):
            self._take_pinned(item)
        elif isinstance(item, Unreadable):
            self._jobs.count(unreadable=1)
        elif item.known.build_id is not None:
            self._jobs.count(held=1)
            self._committer.wait_for_room()
            self._committer.see(item.sighting, item.known.build_id, held=True)
        elif item.known.absence is not None:
            self._jobs.count(absent=1)

    def seen(self, sighting: Sighting, build_id: BuildId) -> None:
        """A file that the store holds, under that build ID, was seen."""
        self.check()
        self._committer.see(sighting, build_id, held=True)

    def note(self, sighting: Sighting, build_id: BuildId) -> None:
        """A file was seen whose bytes are not to be had: into the journal only."""
        self.check()
        self._committer.see(sighting, build_id)

    def absent(self, new: NewAbsence) -> None:
        """A file without a build ID was seen, and is to be remembered."""
        self.check()
        self._jobs.count(absent=1)
        self._committer.absent(new)

    def let_go(self, gone: Iterable[LetGo]) -> None:
        """These were let go (`Pins.put`): count them, keep what they were, tell ``failed``."""
        self._jobs.let_go(gone)

    def flush(self, timeout: float) -> bool:
        """Wait until all that can be captured now is durable and visible.

        False if it is not within ``timeout`` seconds. What waits for the end of a writer, or for
        room in the store, is not waited for.
        """
        until = time.monotonic() + timeout
        self._pins.look_again()
        while self._jobs.scanned or not self._pins.at_rest:
            self.check()
            if time.monotonic() >= until:
                return False
            self._committer.flush(min(until, time.monotonic() + _POLL_S))
            time.sleep(_POLL_S)  # rare, and then short: nobody else needs to be told for it
        return self._committer.flush(until)

    def close(self) -> None:
        """Commit what is staged and what was seen, let go of the rest, and end all threads.

        Closes the pins. Does not raise; safe to call twice.
        """
        with self._lock:
            self._closing = True
        waiting = self._pins.close()
        for thread in (*self._threads, *self._scanners):
            thread.join()
        self._helper.close()
        self._slow.join(_SLOW_END_S)
        while not self._scans.empty():
            self._scans.get().close()
        self._jobs.let_go(waiting)
        self._committer.end()
        self._commits.join()
        self._pins.close()

    # --- threads -----------------------------------------------------------------------------

    def _started(self, work: Callable[[], None], name: str) -> threading.Thread:
        thread = threading.Thread(
            target=self._guarded, args=(work,), name=f"buildidfs-{name}", daemon=True
        )
        thread.start()
        return thread

    def _guarded(self, work: Callable[[], None]) -> None:
        """The top of each thread: a fault in one ends all, and is raised where it is seen."""
        try:
            work()
        except BaseException as fault:
            self._fault = self._fault or fault
            self._committer.abandon()
            self._pins.close()

    def _is_idle(self) -> bool:
        return self._pins.idle and self._scans.empty()

    def _work(self) -> None:
        while (pin := self._pins.take()) is not None:
            try:
                wait, reason = staging.premature(pin.fd)
            except OSError:
                wait, reason = 0.0, ""  # the attempt will tell
            if wait:
                self._jobs.put_off(pin, wait, reason)
            else:
                self._jobs.stage(Job(pin), self._capture)

    def _work_slowly(self) -> None:
        while (pin := self._pins.take(slow=True)) is not None:
            self._jobs.stage(Job(pin), self._capture)

    def _watch_time(self) -> None:
        while not self._pins.closed:
            self._jobs.let_go(self._pins.expire(None))

    def _capture(self, job: Job) -> Outcome:
        """Stage a file, whose descriptor stays open for another try. Raises `StoreError`."""
        item = job.item
        if isinstance(item, Pin) and item.slow:
            return self._reluctant.capture(item)
        kind, build_id = (None, None) if isinstance(item, Pin) else (item.kind, item.build_id)
        try:
            fd = os.dup(item.fd)
        except OSError as error:
            return Unreadable(
                item.sighting.origin.path, error.strerror or str(error), error.errno or 0
            )
        return staging.capture(self._store, PinnedFile(item.sighting, fd, kind, build_id))

    # --- scans -------------------------------------------------------------------------------

    def _take_pinned(self, pinned: PinnedFile) -> None:
        self._jobs.scan_begun()
        while not self._closing:
            try:
                self._scans.put(pinned, timeout=_LOOK_S)
            except queue.Full:
                self.check()
                continue
            with self._lock:
                self._scanners = [thread for thread in self._scanners if thread.is_alive()]
                if len(self._scanners) < self._workers and not self._closing:
                    self._scanners.append(self._started(self._work_for_scans, "capture-scan"))
            return
        pinned.close()

    def _work_for_scans(self) -> None:
        while not self._closing:
            try:
                pinned = self._scans.get(timeout=_LOOK_S)
            except queue.Empty:
                with self._lock:
                    if self._scans.empty():
                        self._scanners.remove(threading.current_thread())
                        return
                continue
            self._jobs.stage(Job(pinned), self._capture)
