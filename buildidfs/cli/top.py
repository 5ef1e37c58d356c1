# SPDX-License-Identifier: Apache-2.0
"""``buildidfs top``: a live view of the captures, by container."""

from __future__ import annotations

import os
import select
import signal
import sys
import textwrap
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import table, terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import counted, printable, size
from buildidfs.cli.table import Cell, Column
from buildidfs.cli.watch import MODES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

    from buildidfs.watch.activity import Row, View

_VERDICTS: Final = {"healthy": "green", "degraded": "yellow", "losing": "red", "down": "red"}
_FINDINGS: Final = 3
_LABEL: Final = 10  # columns
_LEAST_WIDTH: Final = 20
_RATE: Final = Cell(lambda rate: f"{rate:.1f}", lambda rate: f"{rate:.3f}", right=True)
_LOST: Final = Cell(str, str, right=True, colour=lambda count: "red" if count else None)
_COLUMNS: Final[tuple[Column[Row], ...]] = (
    Column("container", "CONTAINER", lambda row: row.container or "the host", table.LABEL),
    Column("captured", "CAPTURED", lambda row: row.captured, table.COUNT),
    Column("rate", "PER SECOND", lambda row: row.rate, _RATE),
    Column("bytes", "SIZE", lambda row: row.bytes, table.SIZE),
    Column("last", "LAST", lambda row: row.last_ns or None, table.AGE),
    Column("lost", "LOST", lambda row: row.lost, _LOST),
    Column("recent", "IN 10 MIN", lambda row: row.recent, _LOST, 100),
)


@click.command(
    "top",
    short_help="Show captures, losses and growth as they happen.",
    epilog=exit_status(
        [
            "buildidfs top",
            "buildidfs top --sort -captured --limit 10",
            "buildidfs top --once",
            "buildidfs top --once --format '{container} {captured} {lost}'",
        ],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--once", is_flag=True, help="Print the present state, and end.")
@click.option(
    "--interval",
    type=click.FloatRange(0.2, 3600),
    default=2,
    metavar="SECONDS",
    help="Seconds between two updates.  [default: 2]",
)
@table.options(_COLUMNS, json="")
@click.pass_obj
def top(session: Session, once: bool, interval: float, layout: table.Layout) -> None:
    """Show captures by container, their rate, waiting files, losses, and the growth of the store.

    The values are those of `buildidfs status`. q or Ctrl-C ends the command. In a pipe or in the
    background it prints the present state once, without rates: lines with a name and a value, then
    a table.
    """
    from buildidfs.watch import status
    from buildidfs.watch.activity import Activity

    activity = Activity()

    def look() -> View:
        return activity.add(status.take(session.store_path, session.settings.retention))

    if once or layout.is_for_programs or not _has_terminal():
        view = look()
        with _named(session.store_path) as columns:
            _print(view, columns, layout)
        return
    _live(look, interval, layout, session.store_path)


def _has_terminal() -> bool:
    """Return True if this process may read keys. A background job may not: it would be stopped."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal belongs to another session
        return False


def _print(view: View, columns: Sequence[Column[Row]], layout: table.Layout) -> None:
    if not layout.is_for_programs:
        for name, value in _head(view):
            gap = " " * max(_LABEL - len(name), 1) if sys.stdout.isatty() else "\t"
            click.echo(f"{name}{gap}{value}")
    layout.print(columns, view.rows)


@contextmanager
def _named(path: str) -> Iterator[Sequence[Column[Row]]]:
    """Yield columns that show the names of containers from a store instead of labels."""
    from buildidfs.catalog.containers import Names
    from buildidfs.store import Store

    with Store.open(path, read_only=True) as store:
        yield table.named(_COLUMNS, Names(store).short)


def _live(look: Callable[[], View], interval: float, layout: table.Layout, path: str) -> None:
    """Redraw the screen until the user ends the command."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    with _keyboard() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = look()
            with _named(path) as columns:
                lines = _screen(view, columns, layout)
            text = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")
            live.update(text, refresh=True)
            if key(interval) in ("q", "Q"):
                return


def _screen(view: View, columns: Sequence[Column[Row]], layout: table.Layout) -> list[str]:
    """Return the lines of the screen, wrapped or cut to its width."""
    width = max(terminal.width(sys.stdout) - _LABEL, _LEAST_WIDTH)
    lines = []
    for name, value in _head(view):
        first, *others = textwrap.wrap(value, width)
        lines += [f"{name:{_LABEL}}{first}", *(" " * _LABEL + each for each in others)]
    state, rest = lines[0][_LABEL:], view.status.verdict.value
    lines[0] = f"{'state':{_LABEL}}{terminal.coloured(rest, _VERDICTS[rest])}{state[len(rest) :]}"
    lines += ["", *layout.lines(columns, view.rows), "", "q ends"]
    if not terminal.has_unicode():
        lines = [line.encode("ascii", "backslashreplace").decode() for line in lines]
    return lines


def _head(view: View) -> Iterator[tuple[str, str]]:
    """Yield names and values about the watch, the store and its mounts, the state first."""
    found, facts = view.status, view.facts
    mode = printable(str(facts.get("mode", "")).encode(errors="replace"))
    mode = f", {MODES.get(mode, mode)}" if mode else ""
    yield "state", f"{found.verdict.value}{mode}, at {time.strftime('%H:%M:%S')}"
    for finding in found.findings[:_FINDINGS]:
        reason = printable(finding.reason.encode(errors="replace"))
        remedy = printable(finding.remedy.encode(errors="replace"))
        yield finding.verdict.value, f"{reason} -> {remedy}"
    if "captured" in facts:
        yield (
            "captured",
            f"{counted(facts['captured'], 'file')}, {size(facts.get('copied_bytes', 0))}"
            f"{_a_second(view.rate)}; {facts.get('held', 0)} already held",
        )
        yield (
            "waiting",
            f"{counted(facts.get('waiting', 0), 'file')}, {size(facts.get('waiting_bytes', 0))};"
            f" lag {facts.get('lag', 0):.1f} s",
        )
        lost = sum(row.lost for row in view.rows)
        recent = sum(row.recent for row in view.rows)
        yield (
            "lost",
            f"{counted(lost, 'file')}, {recent} in the last 10 minutes;"
            f" {counted(facts.get('records_lost', 0), 'event')} of the kernel,"
            f" {counted(facts.get('restarts', 0), 'gap')}",
        )
    growth = ""
    if view.growth is not None:
        sign = "-" if view.growth < 0 else "+"
        growth = f", {sign}{size(int(abs(view.growth)))} a second"
    yield (
        "store",
        f"{counted(found.build_ids, 'build ID')}, {size(found.disk_bytes)}"
        f"{growth}; {size(found.free_bytes)} free;"
        f" {found.evicted.recapturable + found.evicted.lost} removed for room",
    )
    for mount in view.mounts:
        done = ""
        if mount.requests is not None:
            done = f": {counted(mount.requests, 'request')}{_a_second(mount.rate)}"
        yield "mount", f"{printable(mount.path)}{done}"


def _a_second(rate: float | None) -> str:
    return "" if rate is None else f", {rate:.1f} a second"


@contextmanager
def _keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key, and returns the key or nothing.

    Ctrl-C and SIGTERM are returned as keys, too, so that the terminal is restored at the end.
    """
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def end(number: int, frame: FrameType | None) -> None:
        os.write(tell, b"q")

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        yield partial(_key, fd, told)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(told)
        os.close(tell)


def _key(fd: int, told: int, seconds: float) -> str:
    ready, _, _ = select.select([fd, told], [], [], seconds)
    if not ready:
        return ""
    return os.read(ready[0], 64)[:1].decode("latin-1") or "q"  # the terminal is gone
