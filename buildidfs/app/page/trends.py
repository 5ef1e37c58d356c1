# SPDX-License-Identifier: Apache-2.0
"""The history of a store as the page plots it: 30 days, in as many points as a plot can show."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from buildidfs.app.live.minutes import group_name
from buildidfs.app.page import answers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from buildidfs.store import Store
    from buildidfs.store.schema import HistoryRow

SPAN_S: Final = 30 * 86_400
_STEPS: Final = 360
_TREND_STEPS: Final = 60
_AGAIN_S: Final = 3600.0
_NS: Final = 1_000_000_000


class Trends:
    """Reads the history, each row once an hour. Not for several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: deque[HistoryRow] = deque()
        self._read_at = -_AGAIN_S

    def rows(self) -> Iterable[HistoryRow]:
        """The rows of the last 30 days, in order of time. Raises `StoreError`."""
        begin = time.time_ns() - SPAN_S * _NS
        if time.monotonic() - self._read_at > _AGAIN_S:  # older ones were put together
            self._rows.clear()
            self._read_at = time.monotonic()
        while self._rows and self._rows[0].time_ns < begin:
            self._rows.popleft()
        self._rows += self._store.history.since(self._rows[-1].time_ns + 1 if self._rows else begin)
        return self._rows


def points(rows: Iterable[HistoryRow]) -> list[answers.Point]:
    """The rows as points, those within two hours put together."""
    found: list[answers.Point] = []
    slot = -1
    for row in rows:
        point = _point(row)
        if row.time_ns // (SPAN_S * _NS // _STEPS) == slot:
            before = found.pop()
            point.captured += before.captured
            point.lost += before.lost
            point.lag = max(point.lag, before.lag)
        slot = row.time_ns // (SPAN_S * _NS // _STEPS)
        found.append(point)
    return found


def _point(row: HistoryRow) -> answers.Point:
    parts = (row.executable, row.symbols, row.debuginfo)
    shares = [round(part / row.counted, 4) if row.counted else None for part in parts]
    return answers.Point(
        row.time_ns / _NS,
        row.build_ids,
        row.stored_bytes,
        row.free_bytes,
        shares[0],
        shares[1],
        shares[2],
        captured=row.captured,
        lost=row.lost,
        lag=row.lag_ms / 1000,
    )


def trends(rows: Iterable[HistoryRow]) -> dict[tuple[int, str], list[answers.Trend]]:
    """The symbols' shares of containers (0) and images (1) by name, one for half a day."""
    found: dict[tuple[int, str], list[answers.Trend]] = {}
    slots: dict[tuple[int, str], int] = {}
    for row in rows:
        slot = row.time_ns // (SPAN_S * _NS // _TREND_STEPS)
        for group in row.groups:
            key = group.kind, group.name
            trend = answers.Trend(
                row.time_ns / _NS, round(group.symbols / (group.build_ids or 1), 4)
            )
            known = found.setdefault(key, [])
            if slots.get(key) == slot:
                known[-1] = trend
            else:
                known.append(trend)
            slots[key] = slot
    return found


def of_name(
    known: Mapping[tuple[int, str], list[answers.Trend]], kind: int, name: str
) -> list[answers.Trend]:
    """The trend of a container or image."""
    return known.get((kind, group_name(name)), [])
