# SPDX-License-Identifier: Apache-2.0
"""Examine the processes that run on a store: their state, faults and remedies."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from buildidfs import errors
from buildidfs.app import remedies
from buildidfs.app.containers import Names
from buildidfs.app.live.state import RECENT_S, STOPPED, fact_number, fact_rows
from buildidfs.app.service import up
from buildidfs.app.service.supervise import Part
from buildidfs.capture.process.gate import REMEDY
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.linux import machine, procfs
from buildidfs.store import Store, StoreStats, run_files
from buildidfs.store.retention.tally import Evictions
from buildidfs.store.run_files import Present

_PROBE_S: Final = 2.0
_SILENT_S: Final = 20.0  # a watch updates its state every two seconds
_STARTING_S: Final = 120.0
_CAUSES: Final = 3


class Verdict(enum.IntEnum):
    """The health of the processes of a store; the worst is the largest."""

    HEALTHY = 0
    DEGRADED = 1
    """The processes work, but with restrictions: some of the starting programs may be missed."""
    LOSING = 2
    """Files were lost in the last ten minutes, or no events are followed just now."""
    DOWN = 3
    """No process runs, or a process that should run does not run or does not answer."""

    @property
    def exit_code(self) -> int:
        """Return the exit status for the verdict."""
        return _EXIT_CODES[self]


_EXIT_CODES: Final = {
    Verdict.HEALTHY: 0,
    Verdict.DEGRADED: errors.DEGRADED,
    Verdict.LOSING: errors.LOSING,
    Verdict.DOWN: errors.IncompleteError.exit_code,
}


class Finding(msgspec.Struct, frozen=True):
    """A fault and its remedy; both are clauses for a person."""

    verdict: Verdict
    reason: str
    remedy: str


class Running(msgspec.Struct, frozen=True):
    """A long-running process, or one that should run.

    ``part`` is its state according to its supervisor, None if it has none; ``present`` is its own
    report, None if there is none. ``state`` is that of ``part``, or ``running``; it is ``stopped``
    for a process stopped by a signal, and ``not answering`` for one that does not do its work.
    """

    role: str
    state: str
    part: Part | None
    present: Present | None

    @property
    def pid(self) -> int:
        """Return its process ID, 0 if it does not run."""
        return self.present.pid if self.present is not None else self.part.pid if self.part else 0


class Status(msgspec.Struct, frozen=True):
    """A store and its processes, the supervisor first, then those that it runs.

    ``evictions`` counts the blobs removed for lack of room; ``findings`` has the faults, the worst
    first. ``jit_bytes`` is the size of the names of generated code.
    """

    store: StoreStats
    processes: list[Running]
    findings: list[Finding]
    evictions: Evictions
    jit_bytes: int = 0

    @property
    def disk_bytes(self) -> int:
        """Return the bytes that blobs, index and names of generated code take on disk."""
        return self.store.stored_bytes + self.store.index_bytes + self.jit_bytes

    @property
    def verdict(self) -> Verdict:
        """The verdict of the worst finding."""
        return self.findings[0].verdict if self.findings else Verdict.HEALTHY


def take(store_path: str | bytes | os.PathLike[str]) -> Status:
    """Return the present status; takes some milliseconds, or two seconds if a mount does not
    answer.

    Raises `StoreMissing`, `StoreVersionError`.
    """
    with Store.open(store_path, read_only=True) as store:
        stats, evictions = store.stats(), store.evictions()
        _, jit_bytes = store.jit_maps.totals()
        found = _processes(store_path)
        findings = sorted(
            _findings(found, Names(store)), key=lambda each: each.verdict, reverse=True
        )
    return Status(stats, found, findings, evictions, jit_bytes)


def _processes(store_path: str | bytes | os.PathLike[str]) -> list[Running]:
    """Return the processes of a store, each supervisor before those that it runs."""
    alive = run_files.present(store_path)
    found = []
    for supervisor in [each for each in alive if each.role == up.ROLE]:
        found.append(_running(up.ROLE, None, supervisor))
        for part in up.parts(supervisor):
            own = next((x for x in alive if x.pid == part.pid and x.role == part.name), None)
            found.append(_running(part.name, part, own))
    shown = [each.present for each in found]
    return found + [_running(each.role, None, each) for each in alive if each not in shown]


# --- the health of a process ----------------------------------------------------------------------


def _running(role: str, part: Part | None, present: Present | None) -> Running:
    state: str = "running" if part is None else part.state
    if present is not None and state == "running":
        state = _trouble(present) or state
    elif present is None and part is not None and part.pid and procfs.is_stopped(part.pid):
        state = "stopped"
    return Running(role, state, part, present)


def _trouble(present: Present) -> str:
    """Return one or two words on why a live process does not work; empty if it works."""
    if present.is_here and procfs.is_stopped(present.pid):
        return "stopped"
    if present.role == up.WATCH:
        return "not answering" if _is_silent(present) else ""
    if present.role == up.MOUNT and not _answers(present.path("mountpoint")):
        return "not answering"
    return ""


def _is_silent(watch: Present) -> bool:
    """Return True if the last update of a watch's state is older than it can be in a
    working watch.
    """
    told = watch.facts.get("told")
    if isinstance(told, int | float) and watch.is_here:
        return time.monotonic() - told > _SILENT_S
    return watch.facts.get("mode") == "starting" and _age_s(watch.since) > _STARTING_S


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


def _findings(processes: list[Running], names: Names) -> Iterator[Finding]:
    if not processes:
        yield Finding(Verdict.DOWN, "nothing runs", "buildidfs up starts it")
    for each in processes:
        if each.state == "running":
            if each.present is not None and each.role == up.WATCH:
                yield from _of_watch(each.present.facts, names)
        else:
            yield _of_trouble(each)


def _of_trouble(process: Running) -> Finding:
    """Return the finding about a process that does not run, or does not do its work."""
    role, part = process.role, process.part
    again = "buildidfs down && buildidfs up starts it anew"
    if process.state == "stopped":
        return Finding(
            Verdict.DOWN,
            f"{role} (pid {process.pid}) is stopped by a signal, and does nothing",
            f"kill -CONT {process.pid} lets it go on",
        )
    if process.state == "not answering":
        if part is None:
            again = f"end it (kill -KILL {process.pid}) and start it anew"
        return Finding(Verdict.DOWN, f"{role} (pid {process.pid}) does not answer", again)
    if process.state == "starting" and (part is None or not part.reason):
        return Finding(Verdict.DEGRADED, f"{role} is being started", "look again in a moment")
    if process.state == "ended":
        return Finding(Verdict.DOWN, f"{role} was ended", "buildidfs up starts it again")
    reason = part.reason if part is not None else ""
    return Finding(
        Verdict.DOWN,
        f"{role} does not run: {reason or 'it has failed'}",
        "buildidfs up starts it at once, else it is tried again later each time",
    )


def _of_watch(facts: dict[str, Any], names: Names) -> Iterator[Finding]:
    """Yield the faults that a watch reports."""
    names_them = "buildidfs journal --lost --since 10m names them"
    lost = [row for row in fact_rows(facts, "losses") if fact_number(row, "recent")]
    if lost:
        total = sum(fact_number(row, "recent") for row in lost)
        causes = "; ".join(_cause(row, names) for row in lost[:_CAUSES])
        rest = len(lost) - _CAUSES
        more = f"; and {rest} other reason{'s' * (rest > 1)}" if rest > 0 else ""
        yield Finding(
            Verdict.LOSING,
            f"{total} file{'s' * (total != 1)} lost in the last {RECENT_S // 60} minutes:"
            f" {causes}{more}",
            f"{remedies.of_loss(str(lost[0].get('reason', '')))}; {names_them}",
        )
    if events := fact_number(facts, "events_lost"):
        yield Finding(
            Verdict.LOSING,
            f"{events} event{'s' * (events != 1)} of the kernel lost in the last"
            f" {RECENT_S // 60} minutes: what was mapped for a moment only may be missing",
            "less load, or more CPUs; CAP_SYS_NICE lets watch run before everything else",
        )
    if error := facts.get("store_error"):
        yield Finding(
            Verdict.LOSING,
            f"the store cannot be written: {error}",
            "make room on its filesystem, or set [retention] max-size: buildidfs prune --dry-run"
            " says what would go",
        )
    yield from _of_mode(facts)


def _of_mode(facts: dict[str, Any]) -> Iterator[Finding]:
    """Yield findings about the restrictions of a watch, temporary or permanent."""
    mode, degraded = facts.get("mode"), facts.get("degraded")
    sentences = [str(each) for each in degraded] if isinstance(degraded, list) else []
    if mode == "starting":
        yield Finding(Verdict.DEGRADED, "watch is being started", "look again in a moment")
    elif mode == "interrupted" and not any(each.startswith(STOPPED) for each in sentences):
        yield Finding(
            Verdict.LOSING,
            "nothing is followed just now: the process that opens files has ended",
            "it is started again by itself; the log of watch says why it ended",
        )
    for text in sentences:
        if text.startswith(STOPPED):
            reason, _, remedy = text.partition(": ")
            yield Finding(Verdict.LOSING, f"nothing is followed just now: {reason}", remedy)
            continue
        reason, remedy = machine.reason_and_remedy(text)
        if text.endswith(f": {REMEDY}"):
            reason, remedy = text.removesuffix(f": {REMEDY}"), REMEDY
        yield Finding(
            Verdict.DEGRADED, reason, remedy or "buildidfs doctor says what this machine lacks"
        )


def _cause(row: dict[str, Any], names: Names) -> str:
    container = row.get("container")
    where = f"in {names.short(str(container))}" if container else "on the host"
    return f"{fact_number(row, 'recent')} {where} ({row.get('reason', '')})"


def _age_s(since_ns: int) -> float:
    return time.time() - since_ns / 1e9
