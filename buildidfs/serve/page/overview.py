# SPDX-License-Identifier: Apache-2.0
"""The overview: coverage, missing files, growth and health; and the page of one container.

The overview can also be made without a server: it is then counted at once, and returned as values
or as one HTML file.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import __version__, answers
from buildidfs.catalog import containers, remedies
from buildidfs.catalog.coverage import CoverageLookup
from buildidfs.catalog.survey import STEP, image_of, severity, why_lacking
from buildidfs.catalog.survey import take as take_survey
from buildidfs.located import text as text
from buildidfs.model import Kind
from buildidfs.serve.counters import most_frequent
from buildidfs.store.permissions import is_public
from buildidfs.watch import status
from buildidfs.watch.history_writer import group_name, row_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.answers import Overview
    from buildidfs.capture.base import Progress
    from buildidfs.catalog.containers import ContainerFiles
    from buildidfs.catalog.coverage import BinaryCoverage
    from buildidfs.catalog.survey import Survey
    from buildidfs.config import RetentionSettings, Settings
    from buildidfs.reports import Limits
    from buildidfs.serve.counters import MissedId
    from buildidfs.store import ContainerEntry, Store
    from buildidfs.store.schema import HistoryRow

MOST_ASKED: Final = 50
MOST_FILES: Final = 200
"""The number of files that the page of a container names."""
SPAN_S: Final = 30 * 86_400
_STEPS: Final = 360
_TREND_STEPS: Final = 60
_REREAD_S: Final = 3600.0
_NS: Final = 1_000_000_000
_NO_TRENDS: Final[Mapping[tuple[int, str], list[answers.Trend]]] = {}


def overview(
    store: Store,
    survey: Survey | None,
    *,
    retention: RetentionSettings,
    misses: Iterable[MissedId] = (),
    history: Iterable[HistoryRow] = (),
) -> answers.Overview:
    """Return the contents of the first page. Raises `StoreError`, `IntegrityError`."""
    history = list(history)
    present = status.of_store(store, retention, public=True)
    known = _trends(history)
    return answers.Overview(
        version=__version__,
        time=time.time(),
        counted=None if survey is None else survey.time,
        store=_holdings(store, present),
        coverage=answers.IdShares() if survey is None else survey.all.shares,
        host=answers.IdShares() if survey is None else survey.host.shares,
        containers=[container(each, known) for each in (survey.containers if survey else ())],
        images=[
            answers.Image(text(name), each.shares, _trend_of(known, 1, name))
            for name, each in (survey.images if survey else {}).items()
        ],
        left_out=0 if survey is None else survey.left_out,
        namespaces_left_out=0 if survey is None else survey.namespaces_left_out,
        missing=_missing(store, survey, misses),
        history=_points(history),
        going=survey.going if survey else [],
        health=status.health(present),
    )


def _holdings(store: Store, limits: Limits) -> answers.Holdings:
    held = store.stats()
    return answers.Holdings(
        build_ids=held.ids,
        executables=held.artifacts[Kind.EXECUTABLE],
        debuginfo=held.artifacts[Kind.DEBUGINFO],
        blobs=held.blobs,
        bytes=held.blob_bytes,
        stored_bytes=held.stored_bytes,
        index_bytes=held.index_bytes,
        free_bytes=held.free_bytes,
        pins=held.pins,
        limit_bytes=limits.max_size,
        keep_free_bytes=limits.keep_free,
    )


def container(
    row: ContainerFiles, known: Mapping[tuple[int, str], list[answers.Trend]] = _NO_TRENDS
) -> answers.Container:
    """Return a container with its shares, with the fields of ``buildidfs containers``."""
    its = row.container
    label = containers.reported(its)
    called = group_name(its)
    unnamed = containers.is_bare(its)
    return answers.Container(
        name=text(containers.shown_label(its) if unnamed else called),
        label=text(label),
        mount_name=text(its.name),
        image=text(image_of(its)),
        first_seen=its.first_seen_ns / 1e9,
        last_seen=its.last_seen_ns / 1e9,
        bytes=row.size,
        removed=row.removed,
        coverage=msgspec.structs.replace(row.shares, build_ids=row.build_ids),
        trend=_trend_of(known, 0, called),
        unnamed=unnamed,
        last_removed=row.last_removed,
    )


def _finding(why: str) -> answers.Finding:
    """Return a reason of `remedies` that is about no particular file."""
    remedy = remedies.of_reason(why)
    command = remedy.command.format(
        file="FILE", scan="perf-data", path="PATH", id="ID", wanted="ID"
    )
    return answers.Finding(remedy.code, why, remedy.text, command or None)


def _missing(store: Store, survey: Survey | None, misses: Iterable[MissedId]) -> answers.Missing:
    found = answers.Missing()
    if survey is not None:
        found.reasons = [
            answers.Reason(count, _finding(why)) for why, count in survey.reasons.most_common()
        ]
        found.build_ids = survey.lacking
    asked = most_frequent((miss for miss in misses if not _has_come(store, miss)), MOST_ASKED)
    found.asked = [_asked(store, miss) for miss in asked]
    return found


def _has_come(store: Store, miss: MissedId) -> bool:
    """Return True if every user may now read the file that was requested.

    A private file must look the same as one that does not exist.
    """
    ordinal = store.index.ordinal(miss.build_id)
    if ordinal is None:
        return False
    wanted = [kind for kind in Kind if miss.wanted & 1 << kind]
    return all(is_public(store.index.artifact(ordinal, kind)) for kind in wanted)


def _asked(store: Store, miss: MissedId) -> answers.Asked:
    kinds = [kind for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO) if miss.wanted & 1 << kind]
    why = remedies.NOT_SERVED
    if is_served(store, store.index.ordinal(miss.build_id)):
        why = remedies.NO_DEBUGINFO if kinds == [Kind.DEBUGINFO] else remedies.NO_EXECUTABLE
    return answers.Asked(
        miss.build_id.hex(),
        [kind.name.lower() for kind in kinds],
        miss.count,
        miss.first,
        miss.last,
        remedies.of_reason(why).code,
    )


def is_served(store: Store, ordinal: int | None) -> bool:
    """Return True if every user may read a file that is served for a build ID."""
    if ordinal is None:
        return False
    return any(is_public(store.index.artifact(ordinal, kind)) for kind in Kind)


# --- the history -------------------------------------------------------------------------------


class Trends:
    """Reads the rows of the history: new rows with each call, the others again after an hour,
    because rows are merged. Not thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._rows: deque[HistoryRow] = deque()
        self._read_at = -_REREAD_S

    def rows(self) -> Iterable[HistoryRow]:
        """Yield the rows of the last 30 days, in order of time. Raises `StoreError`."""
        begin = time.time_ns() - SPAN_S * _NS
        if time.monotonic() - self._read_at > _REREAD_S:  # older rows were merged
            self._rows.clear()
            self._read_at = time.monotonic()
        while self._rows and self._rows[0].time_ns < begin:
            self._rows.popleft()
        self._rows += self._store.history.since(self._rows[-1].time_ns + 1 if self._rows else begin)
        return self._rows


def _points(rows: Iterable[HistoryRow]) -> list[answers.Point]:
    """Return the rows as points; rows within two hours are merged."""
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


def _trends(rows: Iterable[HistoryRow]) -> dict[tuple[int, str], list[answers.Trend]]:
    """Return the shares with symbols of containers (0) and images (1) by name, one per half day."""
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


def _trend_of(
    known: Mapping[tuple[int, str], list[answers.Trend]], kind: int, name: str
) -> list[answers.Trend]:
    """Return the trend of a container or image."""
    return known.get((kind, row_name(name)), [])


# --- without a server --------------------------------------------------------------------------


def take(store: Store, settings: Settings, progress: Progress | None) -> Overview:
    """Count, and return the contents of the first page. Raises `StoreError`, `IntegrityError`."""
    steps = itertools.count(0, STEP)

    def go_on() -> None:
        if progress is not None:
            progress(next(steps), "")

    return overview(
        store,
        take_survey(store, go_on),
        retention=settings.retention,
        history=Trends(store).rows(),
    )


def as_html(taken: Overview) -> bytes:
    """Return the report as one file: the file includes its style sheet, and its content policy
    allows no resources from elsewhere.
    """
    from buildidfs.serve.page import html

    return html.render(
        "overview.html",
        o=taken,
        style=html.style().decode(),
        style_hash=html.style_hash(),
        refresh=False,
        drops=False,
    )


# --- a container -------------------------------------------------------------------------------


def container_page(store: Store, name: bytes) -> answers.Contents | None:
    """Return the container with a name in the mount, or the one seen last that a user means by the
    name; None if no public one is known.

    Raises `StoreError`, `IntegrityError`.
    """
    number = store.containers.number(name)
    if number is not None:
        named = store.containers.get(number)
        meant = [named] if named is not None else []
    else:
        is_meant = containers.meant(store, name.decode("utf-8", "surrogateescape"))
        meant = [each for each in store.containers.every() if is_meant(containers.reported(each))]
    found = max(
        (each for each in meant if each.public), key=lambda each: each.last_seen_ns, default=None
    )
    if found is None:
        return None
    worst: list[tuple[int, bytes, BinaryCoverage, str]] = []
    total = 0

    def each(entry: ContainerEntry, path: bytes, row: BinaryCoverage) -> None:
        nonlocal total
        if not entry.public:
            return
        total += 1
        why = why_lacking(row.executable, row.symbols, row.debuginfo, row.why)
        worst.append((severity(why), path, row, why))

    removals = containers.Removals(store)
    contents = containers.contents(store, found, CoverageLookup(store), removals, each)
    shown = heapq.nsmallest(MOST_FILES, worst, key=lambda file: (-file[0], file[1]))
    its = container(contents)
    return answers.Contents(
        its,
        [
            answers.Lacking(
                "" if row.build_id is None else row.build_id.hex(),
                text(path),
                its.name,
                1,
                its.last_seen,
                remedies.of_reason(why).code if why else "",
            )
            for _, path, row, why in shown
        ],
        total,
    )
