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
    from buildidfs.daemon.watchstate import Event, WatchState

_LIVE_S = 1.0
_MINUTE_S = 60.0
_LOSSES = 32


MODES = {
    "confined": "following this PID namespace only",
    "polling": "scanning every 2 s instead of following",
}
"""The modes of a watch that need more than one word."""


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
        "unpinned": catcher.unpinned,
        "retried": ingest.retried,
        "journaled": ingest.journaled,
        "unjournaled": ingest.unjournaled,
        "store_error": ingest.store_error,
        "records": catcher.records,
        "records_lost": catcher.lost,
        "caught": catcher.caught,
        "missed": catcher.missed,
        "scans": state.scans,
        "restarts": state.restarts,
        "idle": state.idle,
        "losses": [
            {"reason": loss.reason, "container": loss.container, "count": loss.count}
            for loss in state.losses[:_LOSSES]
        ],
    }


def one_line(state: WatchState) -> str:
    """How a watch is doing, for people."""
    ingest, catcher = state.ingest, state.catcher
    parts = [
        MODES.get(state.mode, state.mode),
        f"{ingest.captured} captured ({size(ingest.copied_bytes)}, {ingest.new_ids} new build IDs)",
        f"{ingest.held} already held",
        f"{state.waiting} waiting ({size(state.waiting_bytes)})",
    ]
    for count, what in (
        (ingest.let_go, "let go"),
        (catcher.missed, "missed"),
        (ingest.unreadable, "unreadable"),
        (catcher.lost, "events lost"),
        (state.restarts, "restarts"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if ingest.store_error:
        parts.append(ingest.store_error)
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
            click.echo(f"\r\x1b[K{one_line(state)}", nl=False)
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
            click.echo(one_line(state))
            sys.stdout.flush()

    def _print_json(self, values: dict[str, object]) -> None:
        with self._lock:
            json_line(values)
            sys.stdout.flush()
