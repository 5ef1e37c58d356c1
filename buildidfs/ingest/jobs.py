# SPDX-License-Identifier: Apache-2.0
"""The files a watch has in work: what becomes of each, and of those that are the same file."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs.capture import elf_file
from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.capture.live.pending_files import LetGo, Pin, Pins
from buildidfs.errors import StoreError
from buildidfs.ingest.batch import at_another_place
from buildidfs.ingest.committer import FAILURES, Committer
from buildidfs.ingest.counters import Counters
from buildidfs.ingest.store_health import delay
from buildidfs.model import BuildId, FileIdentity, Sighting
from buildidfs.store import NewAbsence, NewCapture, NewSeen, Store
from buildidfs.store.errors import show
from buildidfs.store.retention.eviction import is_fresh

if TYPE_CHECKING:
    from buildidfs.errors import BuildIdFsError
    from buildidfs.ingest.staging import Outcome
    from buildidfs.store import Outcome as Committed

Failed = Callable[[Pin | Sighting, str], None]
"""Called for what was seen and could not be captured, with the reason in words for a person."""

Captured = Callable[[Sighting, BuildId], None]
"""Called for a file whose bytes were new to the store, once they are there for good."""

# Attempts at a file that somebody writes to are frequent at first: most writers are about to end.
_FIRST_DELAY_S: Final = 0.1
_LAST_DELAY_S: Final = 1.0
# Between two looks whether a file that was only noted is still there.
_NOTED_S: Final = 1.0
# Reasons for not being able to read a file that may pass.
_PASSING: Final = frozenset((errno.ETXTBSY, errno.EMFILE, errno.ENFILE, errno.ENOMEM))

Forget = Callable[[Pin], None]
"""Called for a pin whose file may change without a trace: it is to be caught again."""

_log = logging.getLogger(__name__)


class Job:
    """A file in work, and others that are the same file at other places."""

    __slots__ = ("item", "more")

    def __init__(self, item: Pin | PinnedFile) -> None:
        self.item = item
        self.more: list[Job] = []

    @property
    def sighting(self) -> Sighting:
        """Where it was seen."""
        return self.item.sighting


class Jobs:
    """Takes files through staging and commit, or back to where they wait. Thread-safe."""

    def __init__(
        self,
        store: Store,
        pins: Pins,
        *,
        is_idle: Callable[[], bool],
        failed: Failed,
        captured: Captured,
        forget: Forget,
        recovered: Callable[[], None],
    ) -> None:
        self.counters = Counters()
        self.committer: Committer[Job] = Committer(store, self.counters, self)
        self.scanned = 0  # files of scans that are not done with
        self.recovered = recovered
        self._store = store
        self._pins = pins
        self._is_idle = is_idle
        self._failed = failed
        self._captured = captured
        self._forget = forget
        self._lock = threading.Lock()
        self._pending: dict[FileIdentity, Job] = {}
        self._busy = 0

    def stage(self, job: Job, capture: Callable[[Job], Outcome]) -> None:
        """Do one file, with ``capture`` to stage it; returns when it waits to be committed."""
        self.committer.wait_for_room()
        identity = job.sighting.origin.identity
        with self._lock:
            if identity.scope is not None:
                if (same := self._pending.get(identity)) is not None:
                    same.more.append(job)
                    return
                self._pending[identity] = job
            self._busy += 1
        try:
            outcome = capture(job)
        except FAILURES as error:
            self.committer.failed(error)
            self.refused([job], error)
        else:
            self._settle(job, outcome)
        with self._lock:
            self._busy -= 1
        if not self._busy:
            self.committer.poke()

    def scan_begun(self) -> None:
        """A file of a scan is to be staged."""
        with self._lock:
            self.scanned += 1

    def let_go(self, gone: Iterable[LetGo]) -> None:
        """These pins were closed uncopied: count them, keep what they were, tell of them."""
        for item in gone:
            reason = item.reason
            if item.pin.noted:
                if self._store.can_be_had(item.pin.sighting.origin):
                    self.count(noted=1)
                    continue
                reason = "there was no room, and it was deleted before the next look"
            self.count(let_go=1)
            self._note(item.pin)
            if self.counters.store_error:
                self.committer.lost()
            self._failed(item.pin, reason)

    def put_off(self, pin: Pin, wait: float, reason: str) -> None:
        """It is too early for this one, for a ``reason`` that may not pass, or for none."""
        if reason:
            wait = min(_FIRST_DELAY_S * 2.0 ** min(pin.tries, 16), _LAST_DELAY_S)
            pin.tries += 1
            self.count(retried=1)
            self._note(pin)
        self._pins.give_back(pin, wait, reason)

    # --- for the committer -------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nothing is coming at the moment."""
        return not self._busy and self._is_idle()

    def entries(self, capture: NewCapture, job: Job) -> list[NewSeen]:
        """What the journal is to say of a capture, and of what was there before it."""
        entries = [NewSeen(capture.sighting, capture.build_id)]
        hint = job.item.build_id
        if isinstance(job.item, Pin) and hint is not None and hint != capture.build_id:
            entries.append(NewSeen(job.sighting, hint))
        return entries

    def committed(self, capture: NewCapture, job: Job, outcome: Committed) -> None:
        """A capture is durable and visible, or its bytes were removed before that."""
        if outcome.gone:
            self.refused([job], StoreError("the store has removed its bytes meanwhile"))
            return
        _, *more = self._finished(job)
        path = capture.sighting.origin.path
        if outcome.noted:
            self._only_noted([job, *more], capture.build_id)
            return
        if outcome.refused:
            self.count(unreadable=1)
            self._failed(_told(job), outcome.refused)
        elif outcome.new_blob:
            self.count(captured=1, new_ids=outcome.new_id)
            self._captured(capture.sighting, capture.build_id)
            if _log.isEnabledFor(logging.INFO):
                _log.info("captured %s (%s)", show(path), capture.build_id)
        else:
            self.count(held=1, new_ids=outcome.new_id)
        self._revisit([job], capture)
        self._release([job])
        for other in more:
            self.committer.add(at_another_place(capture, other.sighting), other)

    def refused(self, jobs: Sequence[Job], error: BuildIdFsError) -> None:
        """The store did not take these: pins wait for another try, scans find theirs again."""
        for job in [each for of in jobs for each in self._finished(of)]:
            pin = job.item
            self._note(pin)
            if isinstance(pin, Pin):
                wait, pin.tries = delay(pin.tries), pin.tries + 1
                self.count(retried=1)
                self._pins.give_back(pin, wait, str(error))
            else:
                self.committer.lost()
                self._failed(job.sighting, str(error))
                self._release([job])

    def forgotten(self, sighting: Sighting) -> None:
        """A file that was taken for known is not known to the store any more.

        Its bytes made way for others then, which is no loss while they can be had again.
        """
        if self._store.can_be_had(sighting.origin):
            self.count(noted=1)
            return
        self._failed(sighting, "the store has forgotten it")

    # --- what becomes of a file --------------------------------------------------------------

    def _settle(self, job: Job, outcome: Outcome) -> None:
        if isinstance(outcome, NewCapture):
            self.committer.add(outcome, job)
            return
        jobs = self._finished(job)
        if isinstance(outcome, NewSeen):
            self._only_noted(jobs, outcome.build_id)
        elif isinstance(outcome, NewAbsence):
            self.count(absent=len(jobs))
            self.committer.absent(outcome)
            for each in jobs:
                self._note(each.item)  # the bytes that had its build ID are gone
            self._revisit(jobs, outcome)
            self._release(jobs)
        elif outcome.errno in _PASSING:
            self._try_later(jobs, outcome.reason)
        else:
            self._give_up(jobs, outcome)

    def _revisit(self, jobs: list[Job], outcome: NewCapture | NewAbsence) -> None:
        """Have files that are not to be remembered caught again when they are mapped again."""
        for job in jobs:
            if not outcome.remember and isinstance(job.item, Pin):
                self._forget(job.item)

    def _only_noted(self, jobs: list[Job], build_id: BuildId) -> None:
        """Note files that are still there, and that there is no room for.

        One that was just made waits for as long as pins do: if it is deleted meanwhile, nobody can
        have it again, and room is made for it.
        """
        for job in jobs:
            item = job.item
            if not isinstance(item, Pin) or not item.noted:
                self.committer.see(job.sighting, build_id, noted=True)
            if isinstance(item, Pin) and is_fresh(job.sighting.origin):
                item.noted = True
                self._pins.give_back(item, _NOTED_S, "there is no room, and it is still there")
                continue
            self.count(noted=1)
            self._release([job])

    def _try_later(self, jobs: list[Job], reason: str) -> None:
        for job in jobs:
            item = job.item
            if isinstance(item, Pin):
                self.put_off(item, 0.0, reason)
                continue
            pin = Pin(item.sighting, item.fd, None, b"", time.monotonic(), tries=1)
            item.fd = -1
            self.count(retried=1)
            self.let_go(self._pins.put(pin))
            self._release([job])

    def _give_up(self, jobs: list[Job], why: Unreadable) -> None:
        self.count(unreadable=len(jobs))
        for job in jobs:
            self._note(job.item)
            self._failed(_told(job), why.reason)
        self._release(jobs)

    def _note(self, item: Pin | PinnedFile) -> None:
        """Keep what an uncaptured file was: that much of it is not to be lost."""
        build_id = item.build_id
        if build_id is None and isinstance(item, PinnedFile) and item.fd >= 0:
            with contextlib.suppress(OSError):
                found = elf_file.identify(item.fd)
                build_id = found if isinstance(found, BuildId) else None
        if build_id is not None:
            self.committer.see(item.sighting, build_id)

    def _finished(self, job: Job) -> list[Job]:
        """The job and those that waited for it; the next of its kind is staged again."""
        identity = job.sighting.origin.identity
        with self._lock:
            if self._pending.get(identity) is job:
                del self._pending[identity]
            more, job.more = job.more, []
        return [job, *more]

    def _release(self, jobs: list[Job]) -> None:
        self._pins.done(*(job.item for job in jobs if isinstance(job.item, Pin)))
        for job in jobs:
            if isinstance(job.item, PinnedFile):
                job.item.close()
                with self._lock:
                    self.scanned -= 1

    def count(self, **more: int) -> None:
        """Add to the counters of these names."""
        with self._lock:
            for name, number in more.items():
                setattr(self.counters, name, getattr(self.counters, name) + number)


def _told(job: Job) -> Pin | Sighting:
    return job.item if isinstance(job.item, Pin) else job.sighting
