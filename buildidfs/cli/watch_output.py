# SPDX-License-Identifier: Apache-2.0
"""What ``buildidfs watch`` says: a line a minute, live counters on a terminal, or JSON events."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import click

from buildidfs.cli.output import json_line, path_fields, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildidfs.app.live.state import Event, WatchState

_LIVE_S = 1.0
_MINUTE_S = 60.0
_LOSSES = 32


MODES = {
    "confined": "following this PID namespace only",
    "polling": "scanning every 2 s instead of following",
}
"""The modes of a watch that need more than one word."""


_LOST = (
    ("let_go", "let go uncopied"),
    ("unpinned", "not opened"),
    ("missed", "missed"),
    ("dropped", "dropped"),
    ("unreadable", "unreadable"),
    ("records_lost", "events lost"),
    ("restarts", "restarts"),
    ("noted", "only noted for lack of room"),
    ("evicted", "removed that can be had again"),
    ("evicted_for_good", "removed that cannot be had again"),
)
"""What did not go well, and the words for it in the line of counts; buildidfs(1) explains them."""


def as_facts(state: WatchState) -> dict[str, Any]:
    """How a watch is doing, for programs: one flat object."""
    ingest, catcher = state.ingest, state.catcher
    return {
        "mode": state.mode,
        "degraded": list(state.degraded),
        "captured": ingest.captured,
        "copied_bytes": ingest.copied_bytes,
        "new_build_ids": ingest.new_ids,
        "held": ingest.held,
        "absent": ingest.absent,
        "unreadable": ingest.unreadable,
        "waiting": state.waiting,
        "waiting_bytes": state.waiting_bytes,
        "let_go": ingest.let_go,
        "noted": ingest.noted,
        "evicted": state.removed.again,
        "evicted_for_good": state.removed.losses,
        "unpinned": catcher.unpinned,
        "retried": ingest.retried,
        "journaled": ingest.journaled,
        "unjournaled": ingest.unjournaled,
        "store_error": ingest.store_error,
        "records": catcher.records,
        "records_lost": catcher.lost,
        "caught": catcher.caught,
        "missed": catcher.missed,
        "dropped": catcher.dropped,
        "scans": state.scans,
        "restarts": state.restarts,
        "idle": state.idle,
        "losses": [
            {
                "reason": loss.reason,
                "container": loss.container,
                "count": loss.count,
                "recent": loss.recent,
                "last": loss.last_ns / 1e9,
            }
            for loss in state.losses[:_LOSSES]
        ],
        "events_lost": state.events_lost,
    }


def one_line(facts: Mapping[str, Any]) -> str:
    """How a watch is doing, for people, out of its facts; empty for facts of no watch."""
    if not {"mode", "captured", "held", "waiting"} <= facts.keys():
        return ""
    parts = [
        MODES.get(str(facts["mode"]), str(facts["mode"])),
        f"{facts['captured']} captured ({size(facts.get('copied_bytes', 0))},"
        f" {facts.get('new_build_ids', 0)} new build IDs)",
        f"{facts['held']} already held",
        f"{facts['waiting']} waiting ({size(facts.get('waiting_bytes', 0))})",
    ]
    parts += [f"{facts[name]} {words}" for name, words in _LOST if facts.get(name)]
    if facts.get("store_error"):
        parts.append(str(facts["store_error"]))
    return ", ".join(parts)


class Presenter:
    """Tells of one watch. `event` may be called from any thread, and does not raise: that the
    output cannot be written is no matter of who captures, and ends `turn`.
    """

    def __init__(self, *, json_: bool, quiet: bool) -> None:
        self._json = json_
        self._quiet = quiet
        self._live = not json_ and not quiet and sys.stdout.isatty()
        self._lock = threading.Lock()
        self._shown_at = -_LIVE_S
        self._minute_at = time.monotonic() + _MINUTE_S
        self._is_open = False
        self._failure: Exception | None = None

    def event(self, event: Event) -> None:
        """Something was captured, or could not be."""
        if not self._json or self._failure is not None:
            return
        origin = event.sighting.origin
        values: dict[str, object] = {"event": event.name, "time": event.sighting.seen_ns / 1e9}
        if event.build_id is not None:
            values["build_id"] = str(event.build_id)
        values |= path_fields(origin.path)
        values |= {"container": origin.container, "mnt_ns_id": origin.mnt_ns_id}
        if event.reason:
            values["reason"] = event.reason
        try:
            self._print_json(values)
        except Exception as error:
            self._failure = error

    def turn(self, state: WatchState, now: float) -> None:
        """Show how it is doing, if it is time to. Raises what the output cannot be written for."""
        if self._failure is not None:
            raise self._failure
        if self._live and now - self._shown_at >= _LIVE_S:
            self._shown_at = now
            click.echo(f"\r\x1b[K{one_line(as_facts(state))}", nl=False)
            self._is_open = True
        elif now >= self._minute_at:
            self._minute_at = now + _MINUTE_S
            self._counts("counts", state)

    def end(self, state: WatchState) -> None:
        """The last counts."""
        if self._is_open:
            click.echo()
        self._counts("stopped", state)

    def _counts(self, name: str, state: WatchState) -> None:
        if self._json:
            self._print_json({"event": name, "time": time.time(), **as_facts(state)})
        elif not self._quiet:
            click.echo(one_line(as_facts(state)))
            sys.stdout.flush()

    def _print_json(self, values: dict[str, object]) -> None:
        with self._lock:
            json_line(values)
            sys.stdout.flush()
