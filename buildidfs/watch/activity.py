# SPDX-License-Identifier: Apache-2.0
"""Rates of captures, growth, requests and losses, from successive reads of the status of
a store.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from buildidfs.watch.state import fact_number, fact_rows
from buildidfs.watch.status import MOUNT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildidfs.answers import Status
    from buildidfs.catalog.containers import Names

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

    ``facts`` are those of its watch, empty if none runs. ``rate`` is captures per second,
    ``growth`` is the growth of the store in bytes per second; both are None after a single read.
    ``rows`` begin with the last captures.
    """

    status: Status
    facts: Mapping[str, Any]
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
        facts: Mapping[str, Any] = {} if watch is None else watch.own_facts
        which = None if watch is None else (watch.pid, watch.since)
        if which != self._watch:
            self._watch = which
            self._samples.clear()
        sources = fact_rows(facts, "sources")
        mounts = [each for each in status.processes if each.role == MOUNT and each.own_facts]
        now = _Sample(
            now_s,
            status.disk_bytes,
            Counter({_text(each, "container"): fact_number(each, "captured") for each in sources}),
            Counter({each.pid or 0: fact_number(each.own_facts, "requests") for each in mounts}),
        )
        now.captured["\0all"] = fact_number(facts, "captured")
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
                facts,
                sources,
                names,
                {key: rate(now.captured[key], first.captured[key]) for key in now.captured},
            ),
        )


def _rows(
    facts: Mapping[str, Any],
    sources: list[dict[str, Any]],
    names: Names,
    rates: Mapping[str, float | None],
) -> list[ActivityRow]:
    """Return the containers with captures or losses, the one with the last capture first."""
    lost: Counter[str] = Counter()
    recent: Counter[str] = Counter()
    for loss in fact_rows(facts, "losses"):
        lost[_text(loss, "container")] += fact_number(loss, "count")
        recent[_text(loss, "container")] += fact_number(loss, "recent")
    by_label = {_text(each, "container"): each for each in sources}
    rows = [
        ActivityRow(
            names.short(label) or "the host",
            fact_number(each, "captured"),
            fact_number(each, "bytes"),
            rates.get(label),
            float(each.get("last", 0)),
            lost[label],
            recent[label],
        )
        for label, each in (by_label | {x: {} for x in lost if x not in by_label}).items()
    ]
    return sorted(rows, key=lambda row: (-row.last, -row.lost, row.container))


def _text(row: Mapping[str, Any], name: str) -> str:
    return str(row.get(name, ""))
