# SPDX-License-Identifier: Apache-2.0
"""The overview: coverage, what is missing, growth and health, from what other modules count."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from buildidfs import __version__
from buildidfs.app import remedies
from buildidfs.app.page import answers, trends
from buildidfs.app.survey import image_of
from buildidfs.model import Kind
from buildidfs.names import kept_for
from buildidfs.store import run_files
from buildidfs.view.permissions import is_public

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.app.containers import Contents, Names
    from buildidfs.app.survey import Counted, Survey
    from buildidfs.serve.misses import Asked
    from buildidfs.store import Store
    from buildidfs.store.retention.policy import Policy
    from buildidfs.store.schema import HistoryRow

MOST_ASKED: Final = 50
_MOST_LOSSES: Final = 10
_MOST_DEGRADED: Final = 10
_NO_TRENDS: Final[Mapping[tuple[int, str], list[answers.Trend]]] = {}


def text(raw: bytes | str) -> str:
    """Bytes from a stranger, or text made of such, as text that can be encoded."""
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogateescape")
    return raw.decode("utf-8", "replace")


def overview(
    store: Store,
    survey: Survey | None,
    names: Names,
    *,
    policy: Policy | None,
    misses: Iterable[Asked] = (),
    history: Iterable[HistoryRow] = (),
) -> answers.Overview:
    """Put together what the first page shows. Raises `StoreError`, `IntegrityError`."""
    history = list(history)
    known = trends.trends(history)
    return answers.Overview(
        version=__version__,
        time=time.time(),
        counted=None if survey is None else survey.time,
        store=_holdings(store, policy),
        coverage=answers.Share() if survey is None else _share(survey.all),
        host=answers.Share() if survey is None else _share(survey.host),
        containers=[container(each, known) for each in (survey.containers if survey else ())],
        images=[
            answers.Image(text(name), _share(each), trends.of_name(known, 1, name))
            for name, each in (survey.images if survey else {}).items()
        ],
        left_out=0 if survey is None else survey.left_out,
        missing=_missing(store, survey, names, misses),
        history=trends.points(history),
        going=[
            answers.Going(
                kept_for(each.build_id).hex(), text(each.path), each.size, float(each.used)
            )
            for each in (survey.going if survey else ())
        ],
        health=_health(store),
    )


def _holdings(store: Store, policy: Policy | None) -> answers.Holdings:
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
        limit_bytes=None if policy is None else policy.max_size,
        keep_free_bytes=0 if policy is None else policy.keep_free,
    )


def _share(counted: Counted) -> answers.Share:
    whole = counted.build_ids
    if not whole:
        return answers.Share()
    parts = (counted.executable, counted.symbols, counted.debuginfo)
    return answers.Share(whole, *(round(part / whole, 6) for part in parts))


def container(
    row: Contents, known: Mapping[tuple[int, str], list[answers.Trend]] = _NO_TRENDS
) -> answers.Container:
    """A container with its shares, as ``buildidfs containers`` has them."""
    its = row.container
    called = its.called.shown or its.label
    return answers.Container(
        name=text(called),
        label=text(its.label),
        mount_name=text(its.name),
        image=text(image_of(its)),
        first_seen=its.first_seen_ns / 1e9,
        last_seen=its.last_seen_ns / 1e9,
        bytes=row.size,
        coverage=answers.Share(
            row.build_ids,
            *(round(part, 6) for part in (row.executable, row.symbols, row.debuginfo)),
        ),
        trend=trends.of_name(known, 0, called),
    )


def finding(why: str, build_id: str = "ID") -> answers.Finding:
    """A reason of `remedies` without a file that it is about."""
    remedy = remedies.of_reason(why)
    command = remedy.command.format(file="FILE", scan="perf-data", path="PATH", id=build_id)
    return answers.Finding(remedy.code, why, remedy.text, command or None)


def _missing(
    store: Store, survey: Survey | None, names: Names, misses: Iterable[Asked]
) -> answers.Missing:
    found = answers.Missing()
    if survey is not None:
        found.reasons = [
            answers.Reason(count, finding(why)) for why, count in survey.reasons.most_common()
        ]
        found.build_ids = [
            answers.Lacking(
                each.build_id.hex(),
                text(each.path),
                text(names.short(each.container)),
                each.containers,
                each.seen_ns / 1e9,
                remedies.of_reason(each.why).code,
            )
            for each in survey.lacking
        ]
    asked = sorted(
        (miss for miss in misses if not _has_come(store, miss)),
        key=lambda miss: (-miss.count, -miss.last),
    )
    found.asked = [_asked(store, miss) for miss in asked[:MOST_ASKED]]
    return found


def _has_come(store: Store, miss: Asked) -> bool:
    """Return True if every user may now read the file that was asked for.

    A file that not all users may read must not look different from one that is not there.
    """
    ordinal = store.index.ordinal(miss.build_id)
    if ordinal is None:
        return False
    wanted = [kind for kind in Kind if miss.wanted & 1 << kind]
    return all(is_public(store.index.artifact(ordinal, kind)) for kind in wanted)


def _asked(store: Store, miss: Asked) -> answers.Asked:
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


def _health(store: Store) -> answers.Health:
    """The facts of the watch that run on a store, without names of containers and files."""
    watch = next(iter(run_files.present(store.path, "watch", looks=1)), None)
    if watch is None:
        return answers.Health(answers.NOT_RUNNING)
    facts = watch.facts
    losses: dict[str, answers.Loss] = {}
    for row in _rows(facts, "losses"):
        reason = str(row.get("reason", ""))[:200]
        loss = losses.setdefault(reason, answers.Loss(reason, remedies.of_loss(reason), 0, 0))
        loss.count += _number(row, "count")
        loss.recent += _number(row, "recent")
    degraded = facts.get("degraded")
    return answers.Health(
        mode=str(facts.get("mode", "starting"))[:40],
        since=watch.since / 1e9,
        captured=_number(facts, "captured"),
        lost=sum(each.count for each in losses.values()),
        waiting=_number(facts, "waiting"),
        lag=_seconds(facts, "lag"),
        events_lost=_number(facts, "events_lost"),
        losses=sorted(losses.values(), key=lambda each: -each.count)[:_MOST_LOSSES],
        degraded=[str(each)[:300] for each in degraded[:_MOST_DEGRADED]]
        if isinstance(degraded, list)
        else [],
        store_error="the store cannot be written" if facts.get("store_error") else "",
    )


def _rows(facts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    rows = facts.get(name)
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _number(row: dict[str, Any], name: str) -> int:
    value = row.get(name)
    return value if isinstance(value, int) else 0


def _seconds(row: dict[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
