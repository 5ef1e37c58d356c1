# SPDX-License-Identifier: Apache-2.0
"""``buildidfs watch``: catcher, scans and the live pipeline on one store.

The catcher follows events before the first scan begins, so that no file is missed in between. The
memo and the pending files recognise a file that catcher and scan both find. If the kernel refuses
events, the watch only scans again and again, and misses processes that start and end between two
scans.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.backoff import Attempts, Backoff
from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.capture.live.protocol import (
    Caught,
    Counts,
    Flooded,
    Generated,
    Lost,
    Missed,
    Refused,
    Silent,
)
from buildidfs.capture.origin import builder, container_names
from buildidfs.capture.process.jit_files import JitFinder, JitOwner
from buildidfs.capture.process.process import Ways
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.process.silent_processes import REMEDY, STUCK_S, ProcessGate, described
from buildidfs.capture.scan.kernel import KernelScanner
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import SlowMounts
from buildidfs.config import marks
from buildidfs.errors import BuildIdFsError, CapabilityError, IncompleteError
from buildidfs.ingest import StoreMemo, upkeep
from buildidfs.ingest.pending_files import PendingFiles
from buildidfs.linux import machine, procfs, threads
from buildidfs.linux.sdnotify import Notifier
from buildidfs.names import printable
from buildidfs.reports import Limits
from buildidfs.shares import HOST, FairQueue, Share
from buildidfs.store import run_files
from buildidfs.store.index.locations import share_at
from buildidfs.watch.catcher_client import LiveSightings, Watcher
from buildidfs.watch.history_writer import Minutes
from buildidfs.watch.jit import JitFollower
from buildidfs.watch.pipeline import ANSWER_S, DENIED, CaughtFiles, Live, ResultListener
from buildidfs.watch.state import (
    MOST_UNREADABLE,
    STOPPED,
    CaptureCounts,
    Event,
    Losses,
    WatchLimits,
    WatchOptions,
    WatchState,
    added,
    as_facts,
)
from buildidfs.wording import glob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.capture.base import Found
    from buildidfs.capture.live.protocol import Message
    from buildidfs.config import Settings
    from buildidfs.model import BuildId, Origin, Sighting
    from buildidfs.reports import WatchFacts
    from buildidfs.store import Store


POLL_S: Final = 2.0
"""Seconds between two scans if the kernel refuses events."""

_TURN_S: Final = 1.0
_IDLE_TURN_S: Final = 2.0  # a wake-up of an idle host costs more than the work that follows
_RESTARTING_S: Final = 0.25  # while the catcher has ended
_REPORT_S: Final = 2.0
_ALIVE_S: Final = 8.0  # between reports of an unchanged state; `watch/status` doubts older ones
_SWITCH_INTERVAL_S: Final = 0.0005
_NAMED_EACH_MINUTE: Final = 10
_DRAIN_S: Final = 10.0
END_S: Final = 14.0
"""Seconds after which a watch that was asked to end drops the files that are not committed."""
_NAMING_S: Final = 1.0
_MOST_FLOODING: Final = 256
_SEARCHES: Final = Backoff(2.0, 60.0)

_SCANNED: Final = Share("processes that a scan has found")

FLOOD: Final = "more new files than the share of its container"
"""Reason of losses of files that the catcher did not open; counts mappings, not files."""

UNFOLLOWED: Final = "more processes with generated code than the share of its container"
"""Reason of losses of processes whose names of generated code are not kept; counts processes."""

UNCOMMITTED: Final = "the watch ended before it was committed"
"""Reason of the losses at an end that a slow disk holds up."""

UNPINNED: Final = "too many files waited to be handed over, so only the build ID was kept"
"""Reason of the losses of files that the catcher could not keep open."""

_log = logging.getLogger(__name__)


class WatchObserver(Protocol):
    """Receives the events and the states of a watch. `event` is called in any thread, the other
    methods in the thread of `run`.
    """

    def event(self, event: Event) -> None:
        """Called when something was captured, or could not be captured."""

    def turn(self, facts: WatchFacts, now: float) -> None:
        """Called every second or two; ``now`` is monotonic time. An exception ends the watch."""

    def line(self, facts: WatchFacts) -> str:
        """Describe the state in one line."""

    def end(self, facts: WatchFacts) -> None:
        """Called at the end of the watch, with its last state."""


def run(
    opened: Callable[[], Store],
    settings: Settings,
    options: WatchOptions,
    metrics: str,
    observer: WatchObserver,
) -> WatchFacts:
    """Watch until SIGTERM or SIGINT, with the upkeep of the store that ``opened`` opens.

    ``metrics`` is a target of `metrics.target`, empty for none. Returns the state at the end.
    """
    stop, woken = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        stop.set()
        woken.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    notifier = Notifier(os.environ)
    with contextlib.ExitStack() as at_end, opened() as store:
        watch = Watch(store, options, on_event=observer.event, wake=woken.set)
        at_end.callback(_end_in_time(watch, stop).set)
        try:
            with (
                upkeep.Upkeep(store, compress_after=upkeep.compress_after(settings)),
                upkeep.Scrubbing(store, settings),
                Minutes(store, watch.state, WatchLimits()),
                run_files.Presence(
                    store.path,
                    "watch",
                    mode="starting",
                    limits=Limits.of(upkeep.policy(settings.retention, store.path)),
                    settings=marks(settings),
                ) as presence,
                _exporting(metrics, store, settings, watch),
            ):
                watch.start()
                notifier.ready(observer.line(as_facts(watch.state())))
                _follow(watch, stop, woken, observer, presence, notifier)
                notifier.stopping()
        finally:
            watch.close()
        facts = as_facts(watch.state())
        observer.end(facts)
    return facts


def _end_in_time(watch: Watch, stop: threading.Event) -> threading.Event:
    """End this process `END_S` seconds after ``stop`` was set, unless the returned event is set by
    then: a busy disk may take a minute for the commit of the last files. These are named first.

    The store has all of a commit or nothing of it, whenever its process ends.
    """
    ended = threading.Event()

    def wait() -> None:
        stop.wait()
        if ended.wait(END_S):
            return
        # The disk may hold up the list of lost files, too.
        naming = threading.Thread(target=watch.give_up, daemon=True)
        naming.start()
        naming.join(_NAMING_S)
        os._exit(IncompleteError.exit_code)

    threading.Thread(target=wait, name="buildidfs-end", daemon=True).start()
    return ended


def _exporting(
    metrics: str, store: Store, settings: Settings, watch: Watch
) -> contextlib.AbstractContextManager[object]:
    """Return the exporter of metrics, if there is to be one."""
    if not metrics:
        return contextlib.nullcontext()
    from buildidfs.watch.metrics import Exporter, target

    return Exporter(target(metrics), store, settings, watch.state)


def _follow(
    watch: Watch,
    stop: threading.Event,
    woken: threading.Event,
    observer: WatchObserver,
    presence: run_files.Presence,
    notifier: Notifier,
) -> None:
    """Report the state to the observer, the run file and systemd until ``stop`` is set; the next
    report is due at once if ``woken`` is set.
    """
    watchdog_s = notifier.watchdog_s or math.inf
    reported_at = alive = -math.inf
    reported: WatchFacts | None = None
    while True:
        watch.tend()
        now = time.monotonic()
        facts = as_facts(watch.state())
        observer.turn(facts, now)
        if now - reported_at >= (_ALIVE_S if facts == reported else _REPORT_S):
            reported_at, reported = now, facts
            presence.update(reported_at=now, **msgspec.to_builtins(facts))
            notifier.status(observer.line(facts))
        if notifier.watchdog_s is not None and now - alive >= notifier.watchdog_s:
            alive = now
            notifier.alive()
        turn_s = _IDLE_TURN_S if facts == reported else _TURN_S
        woken.wait(_RESTARTING_S if watch.is_interrupted else min(turn_s, watchdog_s))
        woken.clear()
        if stop.is_set():
            return


class Watch(ResultListener):
    """Captures the files that processes map into ``store``, from `start` to `close`.

    The caller must call `tend` every second or two, and when ``wake`` was called, in the thread
    that called `start`. ``on_event`` is called for each capture, in threads of this object. Raises
    `CapabilityError` if /proc does not show the processes of the events.
    """

    def __init__(
        self,
        store: Store,
        options: WatchOptions,
        *,
        on_event: Callable[[Event], None] = lambda event: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        if machine.view() == "foreign" and (spot := machine.blind_spot()) is not None:
            raise CapabilityError(f"cannot follow what is mapped: {spot.unseen}; {spot.remedy}")
        self._store = store
        self._on_event = on_event
        self._wake = wake
        self._options = options
        self._memo = StoreMemo(store)
        self._slow = SlowMounts()
        self._sightings = LiveSightings(options.container_namespaces, slow=self._slow)
        self._excluded = glob(*options.exclude) if options.exclude else None
        _prepare_process()
        self._pending = PendingFiles(options.pin_seconds, options.pin_bytes)
        self._helper = FileHelper(min(ANSWER_S, options.pin_seconds))
        limits = WatchLimits()
        self._live = Live(store, self._pending, self, limits, helper=self._helper)
        self._caught = CaughtFiles(
            store, self._live, self._pending, self, self._sightings, self._slow
        )
        self._gate = ProcessGate()
        self._finder = JitFinder(options.container_namespaces, self._slow, self._helper, self._gate)
        self._scans = Scans(self._look)
        self._jit = JitFollower(
            store,
            self._finder,
            limits,
            self._is_wanted_at,
            refused=self._not_followed,
            looked=self._scan_generated,
        )
        self._watcher = Watcher(self._heard, self._ended, options.cgroup)
        self._mode = "interrupted"
        self._degraded: tuple[str, ...] = ()
        self._every_mapping = ""
        self._counts = self._earlier = Counts()
        self._silent = Silent((), 0)
        self._searches = Attempts(_SEARCHES)
        self._losses = Losses(limits)
        self._sources = CaptureCounts(limits)
        self._unreadable: deque[Unreadable] = deque(maxlen=MOST_UNREADABLE)
        self._loss_log = run_files.LossLog(store.path)
        self._flooding: set[str] = set()
        self._restarts = 0
        self._why_ended = ""
        self.is_interrupted = False
        """True from the end of the catcher until `tend` starts it again."""
        self._named = 0
        self._named_since = 0.0

    def start(self) -> None:
        """Begin; return when the catcher follows events, or when it is clear that only scans are
        possible.

        Raises `BuildIdFsError` if the catcher cannot work for another reason than a privilege.
        """
        try:
            self._begin_to_follow()
        except CapabilityError as error:
            self._mode = "polling"
            self._less((f"{error}: scanning every {POLL_S:g} s instead", *_blind_spots()))
        self._jit.start()
        self._scans.start()
        if self._mode == "polling":
            self._scans.every(POLL_S)
        elif self._options.scan:
            self._scans.everything("start")

    def tend(self) -> None:
        """Restart the catcher if that is due. Raises the error that ended the work, if any."""
        self._live.check()
        self._log_losses()
        self._find_silent()
        if not self.is_interrupted or not self._watcher.is_due:
            return
        self.is_interrupted = False
        _log.warning("the catcher ended (%s): starting it again", self._why_ended)
        self._watcher.close()
        try:
            self._begin_to_follow()
        except BuildIdFsError as error:
            self._ended(str(error))
            return
        self._scans.everything("the catcher was started again")

    def _log_losses(self) -> None:
        """Write the files that were lost since the last call into the journal."""
        now, host = time.time_ns(), machine.host_name()
        self._loss_log.append(
            run_files.LostFiles(
                now,
                run_files.lost_text(each.path),
                each.reason,
                each.container,
                each.mnt_ns_id,
                host,
                "" if each.build_id is None else each.build_id.hex(),
                each.count,
            )
            for each in self._losses.take()
        )

    def state(self) -> WatchState:
        """Return the present state of the watch."""
        mode, degraded = self._mode, self._degraded
        if mode in ("following", "confined") and self._watcher.is_stopped:
            pid = self._watcher.pid
            mode = "interrupted"
            degraded += (f"{STOPPED}: kill -CONT {pid} lets it go on",)
        degraded += self._waits()
        return WatchState(
            mode,
            degraded,
            added(self._earlier, self._counts),
            self._live.counters,
            len(self._pending),
            self._pending.held_bytes,
            self._scans.count,
            self._restarts,
            self._scans.is_idle and not len(self._pending),
            self._losses.rows(),
            self._losses.recent_events(),
            self._store.tally,
            self._pending.lag_s(),
            self._sources.rows(),
            tuple({each.path: each for each in tuple(self._unreadable)}.values()),
            self._every_mapping,
        )

    def _waits(self) -> tuple[str, ...]:
        """Return a sentence for each call that a thread has waited in for a second."""
        seen = self._silent
        silent = (*seen.processes, *self._gate.silent.rows(STUCK_S))
        unasked = (*seen.unasked, *self._gate.silent.unasked())
        busy = (
            ("identifies a caught file", seen.identifier_s),
            ("receives caught files", self._watcher.busy_s),
        )
        sentences = [f"{named}: {REMEDY}"] if (named := described(silent, unasked)) else []
        sentences += [f"the thread that {what} waits" for what, s in busy if s > STUCK_S]
        return tuple(sentences)

    def close(self) -> None:
        """End the watch: copy the pending files for some seconds, and write the rest into the
        journal.

        Safe to call twice. Does not raise.
        """
        self.is_interrupted = False
        self._watcher.close()
        self._scans.close()
        self._jit.close()
        with contextlib.suppress(Exception):  # of a thread; `tend` has raised it already
            self._live.flush(_DRAIN_S)
        self._live.close()
        self._log_losses()
        self._caught.close()

    def give_up(self) -> None:
        """Name the files that are not committed as losses, because the process ends now."""
        for sighting, build_id in self._live.uncommitted():
            self.failed(sighting, UNCOMMITTED, build_id)
        count = sum(row.count for row in self._losses.rows() if row.reason == UNCOMMITTED)
        _log.warning(
            "ending without the commit of %d files, because the store took longer than %d s;"
            " buildidfs journal --lost names them", count, END_S,
        )  # fmt: skip
        self._log_losses()

    # --- the catcher -----------------------------------------------------------------------

    def _begin_to_follow(self) -> None:
        degraded = self._watcher.start()
        blind_spots = _blind_spots()
        self._mode = "confined" if blind_spots else "following"
        self._less((*blind_spots, *degraded))

    def _less(self, degraded: tuple[str, ...]) -> None:
        """Record all restrictions, and log each once."""
        if degraded != self._degraded:
            self._degraded = degraded
            for text in degraded:
                _log.warning("%s", text)

    def _ended(self, reason: str) -> None:
        """Handle the end of the catcher: `tend` starts it again when that is due."""
        self._mode, self._why_ended = "interrupted", reason
        self._earlier, self._counts = added(self._earlier, self._counts), Counts()
        self._silent = Silent((), 0)
        self._restarts += 1
        self.is_interrupted = True
        self._wake()

    def _heard(self, message: Message, fd: int) -> None:
        if isinstance(message, Caught):
            self._caught.take(message, fd)
        elif isinstance(message, Generated):
            self._jit.report(message.pid, message.share)
        elif isinstance(message, Counts):
            self._counts = message
        elif isinstance(message, Silent):
            if message.count > self._silent.count:
                _log.warning("%s", described(message.processes, message.unasked))
            self._silent = message
        elif isinstance(message, Refused):
            self._every_mapping = message.reason
            _log.info("each mapping wakes a thread: %s", message.reason)
        elif isinstance(message, Lost):
            self._losses.add_events(message.count)
            self._scans.everything(message.reason)
        elif isinstance(message, Flooded):
            self._flooded(message)
        elif isinstance(message, Missed):
            place = message.place
            shown = self._sightings.shown(place)
            share = self._sightings.share(place)
            self._losses.add(message.reason, shown, place.mnt_ns_id, path=message.path, share=share)
            _log.info("missed %s: %s", printable(message.path), message.reason)
            if message.errno in DENIED:
                with contextlib.suppress(OSError):  # the process is gone
                    self._scans.process(message.pid, self._finder.whose(message.pid).share)

    def _find_silent(self) -> None:
        """Scan all processes, less and less often, while some do not answer, because the others
        of their owners may not answer either.
        """
        is_silent = self._silent.count or len(self._gate.silent)
        if is_silent and self._searches.is_due:
            self._searches.failed()
            self._scans.everything("processes do not answer")

    def _flooded(self, message: Flooded) -> None:
        """Handle a container that maps more new files than its share: count them, and log it once
        for each owner.
        """
        place = message.place
        label = self._sightings.shown(place)
        path = message.paths[0] if message.paths else b""
        share = self._sightings.share(place)
        self._losses.add(FLOOD, label, place.mnt_ns_id, message.count, path=path, share=share)
        owner = share.owner
        if owner not in self._flooding and len(self._flooding) < _MOST_FLOODING:
            self._flooding.add(owner)
            where = label or "a user of the host"
            _log.warning(
                "%s maps new files faster than they can be taken (mount namespace %d, such as %s):"
                " some of its own are missed",
                where, place.namespaces.mnt, ", ".join(map(printable, message.paths[:2])),
            )  # fmt: skip

    # --- scans -----------------------------------------------------------------------------

    def _look(self, pids: Sequence[int] | None, ending: threading.Event) -> None:
        for item in self._found(pids):
            if ending.is_set():
                if isinstance(item, PinnedFile):
                    item.close()
                return
            if isinstance(item, Unreadable):
                # Around a catch the process is often gone.
                if pids is not None and item.errno not in DENIED:
                    continue
                _log.info("cannot read %s: %s", printable(item.path), item.reason)
            elif not self.is_wanted(item.sighting):
                if isinstance(item, PinnedFile):
                    item.close()
                continue
            self._live.take(item)

    def _found(self, pids: Sequence[int] | None) -> Iterator[Found]:
        namespaces, cgroup = self._options.container_namespaces, self._options.cgroup
        yield from ProcScanner(
            self._memo,
            pids=procfs.pids_in_cgroup(cgroup) if pids is None and cgroup else pids,
            may_have_ended=True,
            container_namespaces=namespaces,
            helper=self._helper,
            generated=self._found_generated,
            debug_directories=list(map(os.fsencode, self._options.debug_directories)),
            ways=Ways(gate=self._gate),
        )
        if pids is None and not self._options.containers and not cgroup:
            yield from KernelScanner(self._memo, container_namespaces=namespaces)

    def _found_generated(self, pid: int) -> None:
        """Report a process that a scan has found; these share, so they delay no new ones."""
        self._jit.report(pid, _SCANNED)

    def _scan_generated(self, pid: int, share: Share) -> None:
        """Scan a process with generated code now, since it may be an emulator or an unpacker: no
        event reports the files of such code, which are not mapped executable.
        """
        self._scans.process(pid, share, wait_s=0.0)

    def _not_followed(self, whose: JitOwner) -> None:
        self._losses.add(UNFOLLOWED, whose.container, whose.mnt_ns_id, share=whose.share)

    # --- files ------------------------------------------------------------------------------

    def is_wanted(self, sighting: Sighting) -> bool:
        return self._is_wanted_at(sighting.origin)

    def _is_wanted_at(self, origin: Origin) -> bool:
        if self._excluded is not None and self._excluded.match(origin.path):
            return False
        wanted = self._options.containers
        if not wanted:
            return True
        names = container_names.names_of(origin)
        return any(builder.fits(text, origin.container, names) for text in wanted)

    def captured(self, sighting: Sighting, build_id: BuildId) -> None:
        origin = sighting.origin
        self._sources.add(builder.reported(origin), origin.identity.size, share_at(origin))
        self._on_event(Event("captured", sighting, build_id))

    def failed(self, sighting: Sighting, reason: str, build_id: BuildId | None = None) -> None:
        origin = sighting.origin
        shown = builder.reported(origin)
        self._lose(sighting, reason, build_id)
        self._on_event(Event("not captured", sighting, build_id, reason))
        now = time.monotonic()
        if now - self._named_since > 60:
            self._named_since, self._named = now, 0
        self._named += 1
        level = logging.DEBUG if self._named > _NAMED_EACH_MINUTE else logging.WARNING
        where = f" in {shown}" if shown else ""
        _log.log(level, "not captured: %s%s: %s", printable(origin.path), where, reason)

    def unreadable(self, found: Unreadable) -> None:
        self._unreadable.append(found)

    def unpinned(self, sighting: Sighting, build_id: BuildId) -> None:
        self._lose(sighting, UNPINNED, build_id)

    def _lose(self, sighting: Sighting, reason: str, build_id: BuildId | None) -> None:
        at = sighting.origin
        self._losses.add(
            reason, builder.reported(at), at.mnt_ns_id,
            path=at.path, build_id=build_id, share=share_at(at),
        )  # fmt: skip

    def forget(self, key: bytes) -> None:
        self._watcher.forget((key,))

    def look_at(self, pid: int, share: Share) -> None:
        self._scans.process(pid, share)

    def recovered(self) -> None:
        self._scans.everything("the store can be written again")


def _blind_spots() -> tuple[str, ...]:
    """Return sentences that name the processes that cannot be followed from here, and
    the remedy.
    """
    spot = machine.blind_spot()
    return () if spot is None else (f"{spot.unseen}: {spot.remedy}",)


def _prepare_process() -> None:
    """Allow many open files, and let threads switch often."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    threads.allow_many_descriptors()


# Gaps come in series, because the cause of too many events continues.
_BETWEEN_S: Final = 1.0
# A process that is gone by then was caught, or cannot be found any more.
_SETTLED_S: Final = 0.5
_MOST_PIDS: Final = 1024
_HOSTS_PIDS: Final = 256  # reserved for root of the host
# A thread that waits for a hung filesystem is abandoned.
_END_S: Final = 2.0


class Scans:
    """Scans running processes in one thread: at the start, after a gap, and around a catch.

    ``look`` gets the processes to scan (None for all) and an event that ends the scan early. A
    request does not wait; two requests for the same processes cause one scan.
    """

    def __init__(self, look: Callable[[Sequence[int] | None, threading.Event], None]) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._queue: FairQueue[int] = FairQueue(_MOST_PIDS, _HOSTS_PIDS)
        self._pids: set[int] = set()  # those queued since the last scan
        self._pids_at = math.inf
        self._all_at = math.inf
        self._every = math.inf
        self._all_ended = -math.inf
        self._is_busy = True
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-scan")
        self.count = 0
        """Number of finished scans of all processes."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def everything(self, reason: str) -> None:
        """Schedule a scan of all processes; ``reason`` is for the log."""
        with self._changed:
            if self._all_at == math.inf:
                _log.info("looking at all processes: %s", reason)
                self._all_at = max(time.monotonic(), self._all_ended + _BETWEEN_S)
                self._changed.notify()

    def every(self, seconds: float) -> None:
        """Scan all processes repeatedly, with a pause of that many seconds."""
        with self._changed:
            self._every = seconds
            self._all_at = time.monotonic()
            self._changed.notify()

    def process(self, pid: int, share: Share = HOST, wait_s: float = _SETTLED_S) -> None:
        """Schedule a scan of one process in ``wait_s`` seconds, if the process lives that long.

        If too many wait, the ``share`` with the most of them loses one.
        """
        _log.debug("pid %d: to be scanned in %g s", pid, wait_s)
        with self._changed:
            if pid not in self._pids:
                self._pids.add(pid)
                self._queue.put(share, pid)
            at = time.monotonic() + wait_s
            if at < self._pids_at:
                self._pids_at = at
                self._changed.notify()

    @property
    def is_idle(self) -> bool:
        """True if no scan runs, and none is scheduled."""
        with self._changed:
            return not self._is_busy and self._all_at == math.inf and not self._pids

    def close(self) -> None:
        """End the thread, even in the middle of a scan; safe to call twice."""
        with self._changed:
            self._ending.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        self._is_busy = False
        while not self._ending.is_set():
            pids = self._next()
            if self._ending.is_set():
                return
            try:
                self._look(pids, self._ending)
            except Exception:
                # A fault of one scan must not end live capture.
                _log.exception("a look at running processes failed")
            with self._changed:
                self._is_busy = False
                if pids is None and not self._ending.is_set():
                    self.count += 1
                    self._all_ended = now = time.monotonic()
                    if self._all_at != math.inf:  # another scan was requested meanwhile
                        self._all_at = max(self._all_at, now + _BETWEEN_S)
                    self._all_at = min(self._all_at, now + self._every)

    def _take_pids(self) -> list[int]:
        """Return the processes to scan, of which the shares take turns."""
        self._pids.clear()
        return list(iter(self._queue.pop, None))

    def _next(self) -> list[int] | None:
        with self._changed:
            while not self._ending.is_set():
                now = time.monotonic()
                if self._all_at <= now:
                    self._is_busy = True
                    self._all_at = self._pids_at = math.inf
                    self._take_pids()
                    return None
                if self._pids_at <= now:
                    self._is_busy = True
                    pids = self._take_pids()
                    self._pids_at = math.inf
                    return pids
                due = min(self._all_at, self._pids_at)
                self._changed.wait(None if due == math.inf else due - now)
        return None
