# SPDX-License-Identifier: Apache-2.0
"""Options, events, losses and state of a watch."""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Final

import msgspec

from buildidfs.capture.base import Unreadable
from buildidfs.capture.live.protocol import Counts
from buildidfs.config import DEBUG_DIRECTORIES
from buildidfs.ingest.committer import WatchCounters
from buildidfs.model import BuildId, Sighting
from buildidfs.reports import LossFacts, SourceFacts, UnreadableFact, WatchFacts
from buildidfs.shares import HOST, FairTable, Share, fair
from buildidfs.store.values import Tally

PARTIAL: Final = frozenset(("confined", "polling"))
"""The modes in which a watch cannot follow every process that starts on the machine."""


STOPPED: Final = "the process that opens files is stopped by a signal"
"""An entry of `WatchState.degraded` while this state lasts; a colon and the remedy follow."""


class WatchOptions(msgspec.Struct, frozen=True):
    """Options of a watch. ``containers`` are labels or beginnings of IDs, ``exclude`` globs of
    paths.

    ``cgroup`` is the directory of the only control group to follow, with those below it.
    ``pin_seconds`` and ``pin_bytes`` limit the files that are open and not copied yet. If ``scan``
    is False, processes that run already are not scanned.
    """

    pin_seconds: float = 30.0
    pin_bytes: int = 2 << 30
    containers: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scan: bool = True
    container_namespaces: tuple[str, ...] = ("mnt",)
    debug_directories: tuple[str, ...] = DEBUG_DIRECTORIES
    cgroup: str = ""


class WatchLimits(msgspec.Struct, frozen=True):
    """The bounds of a watch: rows of ``losses`` and of captures by container (``sources``), the
    ``jit_processes`` that are followed at once, the ``workers`` that copy files, and the seconds
    between two rows of the history (``row_s``) and before the first count (``first_row_s``).
    """

    losses: int = 256
    sources: int = 256
    jit_processes: int = 1024
    workers: int = 2
    row_s: float = 60.0
    first_row_s: float = 5.0


class Event(msgspec.Struct, frozen=True):
    """An event of a file: it was ``captured``, or ``not captured`` for a ``reason``."""

    name: str
    sighting: Sighting
    build_id: BuildId | None = None
    reason: str = ""


class LossCount(msgspec.Struct, frozen=True):
    """``count`` files of one container that were seen and not captured, all for one ``reason``.

    ``container`` is the label, empty for the host, or `OTHERS` for containers beyond the limit of
    `Losses`. ``mnt_ns_id`` is the number of the mount namespace of the last file (0: unknown), and
    ``last_ns`` its time (Unix, ns). ``reason`` is a text without varying numbers. ``recent`` of the
    files were lost in the last `RECENT_S` seconds, to the minute. The row takes room of ``share``.
    """

    reason: str
    container: str
    mnt_ns_id: int
    count: int
    last_ns: int
    recent: int = 0
    share: Share = HOST


OTHERS: Final = "(others)"
"""Stands for all containers without a row of their own."""

RECENT_S: Final = 600
"""Seconds for which a loss counts as recent."""

MOST_UNREADABLE: Final = 16
"""The number of files and processes that a watch names because its scans could not read them."""

_ROWS: Final = 32  # of each kind, in the facts of a watch
_MINUTE_S: Final = 60
# Limits between two calls of `Losses.take`: of one container, and of all together.
_MOST_NAMED: Final = 256
_MOST_FRESH: Final = 4096
_EVENTS: Final = ("", OTHERS)

_Key = tuple[str, str]  # reason and container of a row


class LostFile(msgspec.Struct, frozen=True):
    """``count`` files that were lost for one reason; ``path`` is that of the first, or empty."""

    reason: str
    container: str
    mnt_ns_id: int
    count: int
    path: bytes
    build_id: BuildId | None


class Losses:
    """Counts losses by reason and container since the start, in bounded memory. Thread-safe.

    Losses on the host always have rows, and come first, so no container hides them. The other
    shares divide the rows; what has no row any more counts for `OTHERS`. Lost events of the
    kernel are counted separately, because their processes are unknown. `take` returns the rows for
    the journal.
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._most = limits.losses
        self._lock = threading.Lock()
        self._rows: FairTable[_Key, LossCount] = FairTable(limits.losses)
        self._kept: dict[_Key, LossCount] = {}  # of the host, and of `OTHERS`
        self._minutes: dict[int, Counter[_Key]] = {}
        self._fresh: dict[tuple[str, str, bytes], LostFile] = {}
        self._named: Counter[str] = Counter()

    def add(
        self,
        reason: str,
        container: str,
        mnt_ns_id: int,
        count: int = 1,
        *,
        path: bytes = b"",
        build_id: BuildId | None = None,
        share: Share | None = None,
    ) -> None:
        """Count files that were lost just now; ``path`` is that of the first one. They count for
        ``share``, by default one of the container alone.
        """
        share = Share(container) if share is None else share
        with self._lock:
            self._name(LostFile(reason, container, mnt_ns_id, count, path, build_id), share.owner)
            key, now = (reason, container), time.time_ns()
            if container:
                old = self._rows.get(key)
                total = count if old is None else old.count + count
                row = LossCount(reason, container, mnt_ns_id, total, now, share=share)
                self._now()[key] += count
                if not self._rows.renew(key, row):
                    self._merge(self._rows.put(key, share, row))
            else:
                self._now()[self._keep(LossCount(reason, container, mnt_ns_id, count, now))] += (
                    count
                )

    def _merge(self, gone: LossCount | None) -> None:
        """Count a row that has lost its room for `OTHERS`."""
        if gone is None:
            return
        key = gone.reason, gone.container
        other = self._keep(msgspec.structs.replace(gone, container=OTHERS, share=HOST))
        for counts in self._minutes.values():
            if count := counts.pop(key, 0):
                counts[other] += count

    def _keep(self, row: LossCount) -> _Key:
        """Add a row to those that keep their room; return its key."""
        key = row.reason, row.container
        its = sum(container == row.container for _, container in self._kept)
        if key not in self._kept and its >= self._most:
            key = OTHERS, row.container
        old = self._kept.get(key)
        total = row.count if old is None else old.count + row.count
        self._kept[key] = msgspec.structs.replace(row, reason=key[0], count=total)
        return key

    def take(self) -> list[LostFile]:
        """Return the files lost since the last call; for each container a limited
        number is named.
        """
        with self._lock:
            fresh, self._fresh = self._fresh, {}
            self._named.clear()
        return list(fresh.values())

    def _name(self, lost: LostFile, owner: str) -> None:
        """Name a lost file; files beyond the limit of its owner are only counted."""
        key = lost.reason, lost.container, lost.path
        if key not in self._fresh:
            full = self._named[owner] >= _MOST_NAMED or len(self._fresh) >= _MOST_FRESH
            if full:
                others = OTHERS if len(self._fresh) >= 2 * _MOST_FRESH else lost.container
                key = lost.reason, others, b""
                lost = msgspec.structs.replace(lost, container=others, path=b"", build_id=None)
            self._named[owner] += 1
        if (old := self._fresh.get(key)) is not None:
            lost = msgspec.structs.replace(lost, count=old.count + lost.count)
        self._fresh[key] = lost

    def add_events(self, count: int) -> None:
        """Count events of the kernel that were lost just now."""
        with self._lock:
            self._now()[_EVENTS] += count

    def rows(self) -> tuple[LossCount, ...]:
        """Return all losses, the recent ones first, of these those on the host, then the most
        frequent.
        """
        with self._lock:
            recent = self._recent()
            rows = [
                msgspec.structs.replace(row, recent=recent[row.reason, row.container])
                for row in (*self._kept.values(), *self._rows.values())
            ]
        return tuple(sorted(rows, key=_weight, reverse=True))

    def recent_events(self) -> int:
        """Return the events of the kernel that were lost in the last `RECENT_S` seconds."""
        with self._lock:
            return self._recent()[_EVENTS]

    def _now(self) -> Counter[tuple[str, str]]:
        """Return the counts of this minute; drop counts that are not recent any more."""
        minute = int(time.monotonic() // _MINUTE_S)
        if minute not in self._minutes:
            oldest = minute - RECENT_S // _MINUTE_S
            self._minutes = {each: n for each, n in self._minutes.items() if each > oldest}
            self._minutes[minute] = Counter()
        return self._minutes[minute]

    def _recent(self) -> Counter[tuple[str, str]]:
        self._now()
        total: Counter[tuple[str, str]] = Counter()
        for counts in self._minutes.values():
            total.update(counts)
        return total


def _weight(row: LossCount) -> tuple[bool, bool, int, int]:
    return row.recent > 0, not row.container, row.recent, row.count


class ContainerCounts(msgspec.Struct, frozen=True):
    """Counts of one container: ``captured`` files with ``bytes`` since the start, the last one at
    ``last_ns`` (Unix time, ns). ``container`` is its label, empty for the host, or `OTHERS`. The
    row counts for ``share``.
    """

    container: str
    captured: int
    bytes: int
    last_ns: int
    share: Share = HOST


class CaptureCounts:
    """Counts captured files by container. Thread-safe, and bounded: the shares divide the rows,
    and what a container without recent captures has lost its row for counts for `OTHERS`.
    """

    def __init__(self, limits: WatchLimits) -> None:
        self._lock = threading.Lock()
        # In the order of the last captures.
        self._rows: FairTable[str, ContainerCounts] = FairTable(limits.sources)
        self._kept: dict[str, ContainerCounts] = {}  # the host, and `OTHERS`

    def add(self, container: str, size: int, share: Share | None = None) -> None:
        """Count a file of ``size`` bytes that was captured just now; ``share`` as in
        `Losses.add`.
        """
        share = Share(container) if share is None else share
        with self._lock:
            new = ContainerCounts(container, 1, size, time.time_ns(), share)
            if not container:
                self._keep(new)
                return
            row = _sum(self._rows.get(container), new)
            if not self._rows.renew(container, row):
                gone = self._rows.put(container, share, row)
                if gone is not None:
                    self._keep(msgspec.structs.replace(gone, container=OTHERS, share=HOST))

    def rows(self) -> tuple[ContainerCounts, ...]:
        """Return all rows, the one with the last capture first."""
        with self._lock:
            rows = [*self._kept.values(), *self._rows.values()]
        return tuple(sorted(rows, key=lambda row: row.last_ns, reverse=True))

    def _keep(self, new: ContainerCounts) -> None:
        self._kept[new.container] = _sum(self._kept.get(new.container), new)


def _sum(old: ContainerCounts | None, new: ContainerCounts) -> ContainerCounts:
    if old is None:
        return new
    return msgspec.structs.replace(
        new,
        captured=old.captured + new.captured,
        bytes=old.bytes + new.bytes,
        last_ns=max(old.last_ns, new.last_ns),
    )


class WatchState(msgspec.Struct):
    """The state of a watch.

    ``mode`` is ``following``; ``confined`` if only the processes of its own PID namespace can be
    followed; ``polling`` if the kernel refuses events; ``interrupted`` while there is no catcher.
    ``degraded`` has a sentence for each restriction. ``catcher`` and ``ingest`` are counts since
    the start; ``waiting`` files of ``waiting_bytes`` are open and not copied yet. ``losses`` has
    the lost files by container and reason, the most recent first; ``events_lost`` counts the
    kernel's events that were lost in the last `RECENT_S` seconds. ``removed`` counts the blobs that
    were removed to make room. The file that has waited longest to be copied was opened ``lag_s``
    seconds ago. ``sources`` counts the captured files by container, the last one first.
    ``unreadable`` are the last files and processes that a scan could not read. ``every_mapping`` is
    the reason why known programs cost as much as unknown ones, else "".
    """

    mode: str
    degraded: tuple[str, ...]
    catcher: Counts
    ingest: WatchCounters
    waiting: int
    waiting_bytes: int
    scans: int
    restarts: int
    idle: bool
    losses: tuple[LossCount, ...] = ()
    events_lost: int = 0
    removed: Tally = msgspec.field(default_factory=Tally)
    lag_s: float = 0.0
    sources: tuple[ContainerCounts, ...] = ()
    unreadable: tuple[Unreadable, ...] = ()
    every_mapping: str = ""


def as_facts(state: WatchState) -> WatchFacts:
    """Return the state of a watch as its run file and ``--json`` have it."""
    ingest, catcher = state.ingest, state.catcher
    return WatchFacts(
        mode=state.mode,
        degraded=list(state.degraded),
        every_mapping=state.every_mapping,
        captured=ingest.captured,
        copied_bytes=ingest.copied_bytes,
        new_build_ids=ingest.new_ids,
        held=ingest.held,
        absent=ingest.absent,
        unreadable=ingest.unreadable,
        unreadable_last=[
            UnreadableFact(each.path.decode("utf-8", "replace"), each.reason)
            for each in state.unreadable
        ],
        waiting=state.waiting,
        waiting_bytes=state.waiting_bytes,
        let_go=ingest.let_go,
        omitted=ingest.omitted,
        evicted=state.removed.recapturable,
        evicted_for_good=state.removed.losses,
        unpinned=catcher.unpinned,
        retried=ingest.retried,
        journaled=ingest.journaled,
        unjournaled=ingest.unjournaled,
        store_error=ingest.store_error,
        records=catcher.records,
        records_lost=catcher.lost,
        caught=catcher.caught,
        missed=catcher.missed,
        dropped=catcher.dropped,
        scans=state.scans,
        restarts=state.restarts,
        idle=state.idle,
        lag=round(state.lag_s, 3),
        sources=[
            SourceFacts(each.container, each.captured, each.bytes, each.last_ns / 1e9)
            for each in fair(state.sources, _ROWS, lambda row: row.share)
        ],
        losses=[
            LossFacts(each.reason, each.container, each.count, each.recent, each.last_ns / 1e9)
            for each in fair(state.losses, _ROWS, lambda row: row.share)
        ],
        events_lost=state.events_lost,
    )


def added(one: Counts, other: Counts) -> Counts:
    """Return the sums of both counts."""
    return Counts(
        *(
            a + b
            for a, b in zip(
                msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True
            )
        )
    )
