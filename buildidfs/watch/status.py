# SPDX-License-Identifier: Apache-2.0
"""Examine the processes that run on a store: their state, faults and remedies.

`take` is the only function that judges them. `status`, `top`, `report`, the page, its API and the
metrics show its result; `health` is the part of it that every user may know. `Activity` has the
rates of captures, growth, requests and losses from successive results.
"""

from __future__ import annotations

import os
import shlex
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET

from buildidfs.answers import (
    NOT_RUNNING,
    ChangedSettings,
    Fault,
    Health,
    Loss,
    Process,
    Removed,
    Stats,
    Status,
    Verdict,
)
from buildidfs.capture.process.silent_processes import REMEDY
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.catalog import remedies
from buildidfs.catalog.containers import Names
from buildidfs.config import marks
from buildidfs.ingest import upkeep
from buildidfs.linux import machine, procfs
from buildidfs.located import base64_of, utf8
from buildidfs.names import printable
from buildidfs.reports import Limits, LossFacts, SourceFacts, WatchFacts
from buildidfs.store import Store, run_files
from buildidfs.watch.state import RECENT_S, STOPPED
from buildidfs.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildidfs.capture.base import Progress
    from buildidfs.config import RetentionSettings, Settings
    from buildidfs.store.run_files import LostFiles, Present


UP: Final = "up"
WATCH: Final = "watch"
MOUNT: Final = "mount"
SERVE: Final = "serve"
PUSH: Final = "push"
"""The roles of the processes of a store; `UP` supervises the others."""

RESTART: Final = "buildidfs down && buildidfs up"

_PROBE_S: Final = 2.0
_SILENT_S: Final = 20.0  # a watch updates its state every eight seconds
_STARTING_S: Final = 120.0
_CAUSES: Final = 3
_MOST_LOSSES: Final = 10
_MOST_DEGRADED: Final = 10
_NOT_FACTS: Final = ("mountpoint", "mountpoint_b64", "children", "options", "settings")
_SECTIONS: Final = {
    UP: ("up",),
    WATCH: ("watch", "container", "trust", "remote"),
    MOUNT: ("mount", "remote", "upstream"),
    SERVE: ("serve", "remote", "upstream"),
}
"""The sections of the settings that a process reads when it starts; `Status.configured` has those
of ``[retention]``.
"""
_NOT_WRITTEN: Final = "the store cannot be written"


class PartState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a program according to its supervisor. Times are Unix time in nanoseconds.

    The state is ``starting`` until the program reports that it is ready, then ``running``. After a
    failure it is ``waiting`` until ``due``, with the ``reason`` of the failure. It is ``ended`` if
    the program was asked to end.
    """

    name: str
    state: Literal["starting", "running", "waiting", "ended"]
    pid: int = 0
    since: int = 0
    restarts: int = 0
    reason: str = ""
    status: str = ""
    due: int = 0


def take(
    store_path: str | bytes | os.PathLike[str],
    retention: RetentionSettings,
    settings: Settings | None = None,
) -> Status:
    """Return the present status; takes some milliseconds, or two seconds if a mount does not
    answer. With the ``settings``, the status names those that have changed.

    Raises `StoreMissing`, `StoreVersionError`.
    """
    with Store.open(store_path, read_only=True) as store:
        found = of_store(store, retention)
    if settings is None:
        return found
    return msgspec.structs.replace(found, changed=_changed(found.store.encode(), settings))


def _changed(store_path: bytes, settings: Settings) -> tuple[ChangedSettings, ...]:
    """Return the sections of the settings that running processes have read before a change."""
    now = marks(settings)
    alive = run_files.present(store_path)
    is_supervised = any(each.role == UP for each in alive)
    found: dict[str, ChangedSettings] = {}
    for each in alive:
        then = each.facts.get("settings")
        if not isinstance(then, dict):
            continue  # a process of another version
        for section in _SECTIONS.get(each.role, ()):
            if then.get(section, now[section]) != now[section]:
                after = RESTART if is_supervised else f"a restart of buildidfs {each.role}"
                found.setdefault(section, ChangedSettings(section, each.role, after))
    return tuple(found.values())


def of_store(store: Store, retention: RetentionSettings, *, public: bool = False) -> Status:
    """Return the present status of an open store, see `take`.

    If ``public``, no finding names a container, or an error that may name a private file.
    """
    processes = _processes(store.path)
    found = _findings(
        processes, None if public else Names(store), lambda: _named_losses(store.lost_since)
    )
    findings = sorted(
        [*found, *_of_dead_mounts(store.path, processes)],
        key=lambda each: each.verdict.rank,
        reverse=True,
    )
    verdict = findings[0].verdict if findings else Verdict.HEALTHY
    held, evictions = store.stats(), store.evictions()
    configured = Limits.of(upkeep.policy(retention, store.path))
    limits = _limits_of_watch(processes) or configured
    return Status(
        store=utf8(store.path),
        build_ids=held.ids,
        blob_bytes=held.blob_bytes,
        stored_bytes=held.stored_bytes,
        jit_bytes=store.jit_maps.totals()[1],
        index_bytes=held.index_bytes,
        free_bytes=held.free_bytes,
        pins=held.pins,
        evicted=Removed.of(evictions, evictions.last),
        omitted=evictions.omitted,
        **msgspec.structs.asdict(limits),
        configured=None if configured == limits else configured,
        verdict=verdict,
        well=verdict is Verdict.HEALTHY,
        findings=findings,
        processes=processes,
    )


def _named_losses(lost_since: Callable[[int], Iterator[LostFiles]]) -> int:
    """Return the number of lost files that the journal names, of the last ten minutes."""
    return sum(bool(row.path) for row in lost_since(time.time_ns() - RECENT_S * 1_000_000_000))


def stats(store: Store, retention: RetentionSettings, progress: Progress | None) -> Stats:
    """Count the files of a store, and those of them whose code running processes have mapped.

    Takes seconds on a host with many processes.
    """
    from buildidfs.watch import running

    held, (jit_maps, jit_bytes) = store.stats(), store.jit_maps.totals()
    watches = [_process(WATCH, None, each) for each in run_files.present(store.path, WATCH)]
    limits = _limits_of_watch(watches) or Limits.of(upkeep.policy(retention, store.path))
    host = running.ids_in_use(progress)
    covered = sum(store.index.ordinal(build_id) is not None for build_id in host.build_ids)
    return Stats(
        store=utf8(store.path),
        build_ids=held.ids,
        artifacts={kind.name.lower(): count for kind, count in held.artifacts.items()},
        adopted=held.adopted,
        ambiguous=held.ambiguous,
        blobs=held.blobs,
        blob_bytes=held.blob_bytes,
        stored_bytes=held.stored_bytes,
        index_bytes=held.index_bytes,
        origins=held.origins,
        free_bytes=held.free_bytes,
        pins=held.pins,
        jit_maps=jit_maps,
        jit_bytes=jit_bytes,
        **msgspec.structs.asdict(limits),
        host_processes=host.processes,
        host_unseen=host.unseen,
        host_silent=host.silent,
        host_build_ids=len(host.build_ids),
        host_build_ids_held=covered,
        coverage=covered / len(host.build_ids) if host.build_ids else 1.0,
    )


def _limits_of_watch(processes: list[Process]) -> Limits | None:
    """Return the limits of a running watch; None if none runs or tells them."""
    reports = filter(None, (each.watched for each in processes))
    return next((each.limits for each in reports if each.limits is not UNSET), None)


def health(status: Status) -> Health:
    """Return the health in a ``public`` status: no names of containers and files."""
    found = Health(status.verdict, status.findings, NOT_RUNNING)
    watch = status.watch
    if watch is None:
        return found
    found.mode = mode_of(watch)
    facts = watch.watched
    if facts is None:
        return found
    losses: dict[str, Loss] = {}
    for row in facts.losses:
        reason = row.reason[:200]
        loss = losses.setdefault(reason, Loss(reason, remedies.of_loss(reason), 0, 0))
        loss.count += row.count
        loss.recent += row.recent
    found.since = watch.since
    found.captured = facts.captured
    found.lost = sum(each.count for each in losses.values())
    found.waiting = facts.waiting
    found.lag = facts.lag
    found.events_lost = facts.events_lost
    found.losses = sorted(losses.values(), key=lambda each: -each.count)[:_MOST_LOSSES]
    found.degraded = [each[:1000] for each in facts.degraded[:_MOST_DEGRADED]]
    found.store_error = _NOT_WRITTEN if facts.store_error else ""
    return found


def mode_of(watch: Process) -> str:
    """Return the mode of a watch that works, or the state of one that does not."""
    return (watch.watched or WatchFacts()).mode[:40] if _works(watch) else watch.state


def parts(supervisor: Present) -> list[PartState]:
    """Return the states of the programs that a supervisor reports."""
    try:
        return msgspec.convert(supervisor.facts.get("children", []), list[PartState])
    except msgspec.ValidationError:
        return []  # a supervisor of another version


def _processes(store_path: bytes) -> list[Process]:
    """Return the processes of a store, each supervisor before those that it runs."""
    alive = run_files.present(store_path)
    found = []
    shown = []
    for supervisor in [each for each in alive if each.role == UP]:
        found.append(_process(UP, None, supervisor))
        shown.append(supervisor)
        for part in parts(supervisor):
            own = next((x for x in alive if x.pid == part.pid and x.role == part.name), None)
            found.append(_process(part.name, part, own))
            shown += [own] if own is not None else []
    return found + [_process(each.role, None, each) for each in alive if each not in shown]


# --- the health of a process ----------------------------------------------------------------------


def _process(role: str, part: PartState | None, present: Present | None) -> Process:
    """Describe a process by the report of its supervisor and its own; one may be None."""
    state: str = "running" if part is None else part.state
    if present is not None and state == "running":
        state = _trouble(present) or state
    elif present is None and part is not None and part.pid and procfs.is_stopped(part.pid):
        state = "stopped"
    found = Process(role, state, None, 0.0)
    if present is not None:
        point = present.path("mountpoint")
        found = msgspec.structs.replace(
            found,
            pid=present.pid,
            since=present.since / 1e9,
            version=present.version,
            mountpoint=utf8(point) if point else UNSET,
            mountpoint_b64=base64_of(point),
            facts={key: each for key, each in present.facts.items() if key not in _NOT_FACTS},
        )
    if part is not None:
        found = msgspec.structs.replace(
            found,
            pid=part.pid or None,
            since=found.since or part.since / 1e9,
            restarts=part.restarts,
            reason=part.reason,
            status=part.status,
            due=part.due / 1e9 if part.due else None,
        )
    return found


def _works(process: Process) -> bool:
    return process.state == "running"


def _trouble(present: Present) -> str | None:
    """Return one or two words on why a live process does not work; None if it works."""
    if present.is_here and procfs.is_stopped(present.pid):
        return "stopped"
    if present.role == WATCH:
        return "not answering" if _is_silent(present) else None
    if present.role == MOUNT and not _answers(present.path("mountpoint")):
        return "not answering"
    return None


def _is_silent(watch: Present) -> bool:
    """Return True if the last update of a watch's state is older than it can be in a
    working watch.
    """
    reported_at = watch.facts.get("reported_at")
    if isinstance(reported_at, int | float) and watch.is_here:
        return time.monotonic() - reported_at > _SILENT_S
    is_starting = watch.facts.get("mode", "starting") == "starting"
    # A report that cannot be read has no start.
    return is_starting and watch.since > 0 and _age_s(watch.since) > _STARTING_S


def _answers(mountpoint: bytes) -> bool:
    """Return False if the server of a mount does not answer in time, or is gone.

    A mount that is not visible in this mount namespace cannot be asked.
    """
    from buildidfs.mount import mountpoint as mount_mountpoint

    if not mount_mountpoint.is_ours(mountpoint):
        return True
    try:
        Patience(_PROBE_S).ask((0, 0), lambda: os.statvfs(mountpoint), lambda answer: None)
    except PermissionError:
        return True  # the mount of another user
    except OSError:
        return False
    return True


# --- findings -------------------------------------------------------------------------------------


def _findings(
    processes: list[Process], names: Names | None, named: Callable[[], int]
) -> Iterator[Fault]:
    """Yield the faults; without ``names`` those that every user may know.

    ``named`` returns the number of files that the journal names of those lost just now.
    """
    if not processes:
        yield Fault(Verdict.DOWN, "nothing runs", "buildidfs up starts it")
    for each in processes:
        if not _works(each):
            yield _of_trouble(each, is_public=names is None)
        elif each.role == WATCH and each.facts is not UNSET:
            yield from _of_watch(each.watched or WatchFacts(), names, named)


def _of_trouble(process: Process, *, is_public: bool) -> Fault:
    """Return the finding about a process that does not run, or does not do its work."""
    role, failure = process.role, process.reason or ""
    restart = "buildidfs down && buildidfs up starts it anew"
    if process.state == "stopped":
        return Fault(
            Verdict.DOWN,
            f"{role} (pid {process.pid}) is stopped by a signal, and does nothing",
            f"kill -CONT {process.pid} lets it go on",
        )
    if process.state == "not answering":
        if not process.has_supervisor:
            restart = f"end it (kill -KILL {process.pid}) and start it anew"
        return Fault(Verdict.DOWN, f"{role} (pid {process.pid}) does not answer", restart)
    if process.state == "starting" and not failure:
        return Fault(Verdict.DEGRADED, f"{role} is being started", "look again in a moment")
    if process.state == "ended":
        return Fault(Verdict.DOWN, f"{role} was ended", "buildidfs up starts it again")
    reason = "it has failed" if is_public or not failure else failure
    return Fault(
        Verdict.DOWN,
        f"{role} does not run: {reason}",
        "buildidfs up starts it at once, else it is tried again later each time",
    )


def _of_dead_mounts(store_path: bytes, processes: list[Process]) -> Iterator[Fault]:
    """Yield the faults about mounts that no process serves any more."""
    served = {each.raw_mountpoint for each in processes}
    for point in run_files.abandoned_mounts(store_path):
        if point not in served and not _answers(point):
            where = printable(point)
            yield Fault(
                Verdict.DOWN,
                f"the mount at {where} is dead: the process that served it was killed",
                f"buildidfs unmount {shlex.quote(where)} takes it away, mount and up replace it",
            )


def _of_watch(facts: WatchFacts, names: Names | None, named: Callable[[], int]) -> Iterator[Fault]:
    """Yield the faults that a watch reports."""
    lost = [row for row in facts.losses if row.recent]
    if lost:
        total = sum(row.recent for row in lost)
        causes = "; ".join(_cause(row, names) for row in lost[:_CAUSES])
        rest = len(lost) - _CAUSES
        more = f"; and {counted(rest, 'other reason')}" if rest > 0 else ""
        known = min(named(), total)
        which = "them" if known == total else f"{known} of them"
        yield Fault(
            Verdict.LOSING,
            f"{counted(total, 'file')} lost in the last {RECENT_S // 60} minutes: {causes}{more}",
            f"{remedies.of_loss(lost[0].reason)}; buildidfs journal --lost --since"
            f" {RECENT_S // 60}m names {which}",
        )
    if events := facts.events_lost:
        yield Fault(
            Verdict.LOSING,
            f"{counted(events, 'event')} of the kernel lost in the last"
            f" {RECENT_S // 60} minutes: what was mapped for a moment only may be missing",
            "less load, or more CPUs; buildidfs doctor says if watch may run before all else",
        )
    if error := facts.store_error:
        yield Fault(
            Verdict.LOSING,
            _NOT_WRITTEN if names is None else f"{_NOT_WRITTEN}: {error}",
            "make room on its filesystem, or set [retention] max-size: buildidfs prune --dry-run"
            " says what would go",
        )
    yield from _of_mode(facts)


def _of_mode(facts: WatchFacts) -> Iterator[Fault]:
    """Yield findings about the restrictions of a watch, temporary or permanent."""
    sentences = facts.degraded
    if facts.mode == "starting":
        yield Fault(Verdict.DEGRADED, "watch is being started", "look again in a moment")
    elif facts.mode == "interrupted" and not any(each.startswith(STOPPED) for each in sentences):
        yield Fault(
            Verdict.LOSING,
            "nothing is followed just now: the process that opens files has ended",
            "it is started again by itself; the log of watch says why it ended",
        )
    for text in sentences:
        if text.startswith(STOPPED):
            reason, _, remedy = text.partition(": ")
            yield Fault(Verdict.LOSING, f"nothing is followed just now: {reason}", remedy)
            continue
        reason, remedy = machine.reason_and_remedy(text)
        if text.endswith(f": {REMEDY}"):
            reason, remedy = text.removesuffix(f": {REMEDY}"), REMEDY
        yield Fault(
            Verdict.DEGRADED, reason, remedy or "buildidfs doctor says what this machine lacks"
        )


def _cause(row: LossFacts, names: Names | None) -> str:
    where = "on the host"
    if row.container:
        where = "in a container" if names is None else f"in {names.short(row.container)}"
    return f"{row.recent} {where} ({row.reason})"


def _age_s(since_ns: int) -> float:
    return time.time() - since_ns / 1e9


_WINDOW_S: Final = 30.0


class ActivityRow(NamedTuple):
    """The activity of a container, by its name or label.

    ``rate`` is captures per second, None after a single read; ``last`` is the time of the last
    capture (Unix time; 0 for none). ``lost`` files were lost since the start, ``recent`` of them in
    the last ten minutes.
    """

    container: str
    captured: int
    bytes: int
    rate: float | None
    last: float
    lost: int
    recent: int


class MountActivity(NamedTuple):
    """A mount, by its path, with its requests since the start and per second, if known."""

    path: bytes
    requests: int | None
    rate: float | None


class StoreActivity(NamedTuple):
    """The activity of a store at one moment.

    ``facts`` is the report of its watch, None if none runs. ``rate`` is captures per second,
    ``growth`` is the growth of the store in bytes per second; both are None after a single read.
    ``rows`` begin with the last captures.
    """

    status: Status
    facts: WatchFacts | None
    rate: float | None
    growth: float | None
    mounts: list[MountActivity]
    rows: list[ActivityRow]


class _Sample(NamedTuple):
    at: float
    stored: int
    captured: Counter[str]
    requests: Counter[int]


class Activity:
    """Remembers the status of the last half minute. Counts that were reset are not compared."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque()
        self._watch: tuple[int | None, float] | None = None

    def add(self, status: Status, names: Names, now_s: float) -> StoreActivity:
        """Add a status read at ``now_s`` (seconds of a monotonic clock), and return the activity
        since the oldest remembered one.
        """
        watch = status.watch
        facts = None if watch is None else watch.watched
        which = None if watch is None else (watch.pid, watch.since)
        if which != self._watch:
            self._watch = which
            self._samples.clear()
        sources = [] if facts is None else facts.sources
        mounts = [each for each in status.processes if each.role == MOUNT and each.own_facts]
        now = _Sample(
            now_s,
            status.disk_bytes,
            Counter({each.container: each.captured for each in sources}),
            Counter({each.pid or 0: int(each.own_facts.get("requests", 0)) for each in mounts}),
        )
        now.captured["\0all"] = 0 if facts is None else facts.captured
        self._samples.append(now)
        while self._samples[0].at < now.at - _WINDOW_S:
            self._samples.popleft()
        first = self._samples[0]
        seconds = now.at - first.at

        def rate(later: int, earlier: int) -> float | None:
            return max(later - earlier, 0) / seconds if seconds else None

        return StoreActivity(
            status,
            facts,
            rate(now.captured["\0all"], first.captured["\0all"]),
            (now.stored - first.stored) / seconds if seconds else None,
            [
                MountActivity(
                    each.raw_mountpoint,
                    now.requests[each.pid or 0] if "requests" in each.own_facts else None,
                    rate(now.requests[each.pid or 0], first.requests[each.pid or 0]),
                )
                for each in mounts
            ],
            _rows(
                facts or WatchFacts(),
                names,
                {key: rate(now.captured[key], first.captured[key]) for key in now.captured},
            ),
        )


def _rows(facts: WatchFacts, names: Names, rates: Mapping[str, float | None]) -> list[ActivityRow]:
    """Return the containers with captures or losses, the one with the last capture first."""
    lost: Counter[str] = Counter()
    recent: Counter[str] = Counter()
    for loss in facts.losses:
        lost[loss.container] += loss.count
        recent[loss.container] += loss.recent
    by_label = {each.container: each for each in facts.sources}
    rows = [
        ActivityRow(
            names.short(label) or "the host",
            each.captured,
            each.bytes,
            rates.get(label),
            each.last,
            lost[label],
            recent[label],
        )
        for label, each in ({x: SourceFacts(x) for x in lost} | by_label).items()
    ]
    return sorted(rows, key=lambda row: (-row.last, -row.lost, row.container))
