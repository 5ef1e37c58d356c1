# SPDX-License-Identifier: Apache-2.0
"""Run watch and mount in the background: ``buildidfs up`` and ``down``; ``status`` and ``top``
show their work.
"""

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
from buildidfs.cli.common import NO_STORE, AnyPath, Session, exit_status, json_option
from buildidfs.cli.output import evicted_line, eviction, json_line, limits, printable, report_scan
from buildidfs.cli.table import Cell, Column
from buildidfs.cli.watch import MODES, one_line
from buildidfs.config import marks
from buildidfs.errors import Interrupted, needs_extra
from buildidfs.linux import confinement, machine
from buildidfs.wording import ago, counted, moment, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from buildidfs.answers import Process, Status, Verdict
    from buildidfs.watch.status import ActivityRow, StoreActivity


_PARTLY = 3
_PATIENCE_S = 60
_FIRST_SCAN_S = 20
_WATCHING = {
    "confined": "Watching what starts to run in this PID namespace only",
    "polling": "Scanning every 2 s what runs",
}

_TRY = """
Try:
    ls {0}
    gdb -iex 'set debug-file-directory {0}/debug' -c CORE
    {1} -a -- sleep 10
    perf --buildid-dir {0}/perf report"""
_COLOURS: Final = {"healthy": "green", "degraded": "yellow", "losing": "red", "down": "red"}
_LOST = 5  # evicted blobs that are named
_UNREADABLE = 3  # files and processes that are named
_INDENT = 9


@click.command(
    "up",
    short_help="Capture programs that run or start, and mount the store.",
    epilog=exit_status(
        ["buildidfs up", "buildidfs up /srv/buildid"],
        {
            2: "this store is up already, with another mount point or other options",
            3: "up, but not all starting programs are followed; the reason is named",
            12: "another process is starting it",
            40: "cannot mount: busy, not empty, no /dev/fuse, no fusermount3",
        },
    ),
)
@click.argument("mountpoint", metavar="[MOUNTPOINT]", type=AnyPath(), required=False)
@click.option("--foreground", is_flag=True, help="Stay attached; log to standard error.")
@click.option("--no-mount", is_flag=True, help="Capture only; do not mount.")
@click.option("--no-watch", is_flag=True, help="Mount only; do not watch.")
@click.option("--metrics", metavar="ADDRESS|FILE.prom", help="Metrics for Prometheus, see watch.")
@click.option(
    "--log",
    metavar="FILE",
    help="Write messages of the background processes to FILE.  [default: syslog, if there is one]",
)
@click.pass_obj
def up(
    session: Session,
    mountpoint: str | None,
    foreground: bool,
    no_mount: bool,
    no_watch: bool,
    metrics: str | None,
    log: str | None,
) -> int:
    """Capture running programs and all that start, and mount the store at MOUNTPOINT.

    Returns when both work. They continue in the background until `buildidfs down`, and are
    restarted after a failure. Before the command returns, Ctrl-C ends all that it has started. The
    default MOUNTPOINT is that of buildidfs.toml(5), or /buildid; the command creates the directory
    if it is missing.
    """
    from buildidfs.watch import up as daemon_up

    _check_options(mountpoint, foreground, no_mount, no_watch, log)
    if not session.verbosity:
        session.start_logging()
    path = session.store_path
    place = mountpoint or session.settings.up.mountpoint or "/buildid"
    point = None if no_mount else os.fsencode(os.path.abspath(os.path.expanduser(place)))
    metrics, log = _metrics(metrics, no_watch), log and os.path.abspath(log)
    options = {"--metrics": metrics, "--log": log or ""}
    options = {name: value for name, value in options.items() if value}
    options |= {"--no-watch": ""} if no_watch else {}
    options |= {"--foreground": ""} if foreground else {}
    there = daemon_up.running(path)
    if there is not None:
        daemon_up.refuse_second(there, point, options)
        with _ctrl_c("what was up before goes on"):
            daemon_up.hurry(path, _PATIENCE_S)
            return _report_up(session, is_new=False)
    if point is not None:
        with needs_extra("mount"):  # else the mount would be started over and over
            from buildidfs.mount import session as _  # noqa: F401
    programs = daemon_up.programs(
        session.arguments(),
        point,
        watch=not no_watch,
        serve=bool(session.settings.serve.listen),
        push=bool(session.settings.remote.url) and session.settings.remote.push,
        metrics=metrics,
    )
    start = partial(
        daemon_up.start,
        path,
        programs,
        environ=os.environ,
        mountpoint=point,
        options=options,
        settings=marks(session.settings),
    )
    if foreground:
        from buildidfs.linux.sdnotify import Notifier

        start(ready=Notifier(os.environ).ready)
        return 0
    if not session.is_quiet and sys.stderr.isatty():
        click.echo(
            "Starting; the first time, all running programs are copied. Ctrl-C ends it again.",
            err=True,
        )
    with _ctrl_c("what it has started is ended again", lambda: daemon_up.end_all(path)):
        start(log_file=log)
        return _report_up(session, is_new=True)


@contextmanager
def _ctrl_c(means: str, act: Callable[[], None] = lambda: None) -> Iterator[None]:
    """If the user interrupts the block, call ``act`` and raise `Interrupted` with its meaning."""
    try:
        yield
    except KeyboardInterrupt as error:
        act()
        raise Interrupted(means) from error


def _check_options(
    mountpoint: str | None, foreground: bool, no_mount: bool, no_watch: bool, log: str | None
) -> None:
    """Refuse contradictory options."""
    for first, second, says in (
        (no_mount, no_watch, "--no-mount and --no-watch leave nothing to do"),
        (no_mount, mountpoint is not None, "--no-mount needs no MOUNTPOINT"),
        (foreground, log is not None, "--foreground logs to standard error, not to --log"),
    ):
        if first and second:
            raise click.UsageError(says)


def _metrics(metrics: str | None, no_watch: bool) -> str:
    """Return the option for the metrics of watch, with an absolute path.

    The watch has another working directory. Raises `UsageError`.
    """
    if metrics is None:
        return ""
    if no_watch:
        raise click.UsageError("--metrics are those of the watch, which --no-watch leaves out")
    from buildidfs.watch import metrics as exported

    exported.require_library()
    return exported.target(metrics).path or metrics


def _report_up(session: Session, *, is_new: bool) -> int:
    """Print which programs run on which store; return the exit status."""
    from buildidfs.watch import up as daemon_up
    from buildidfs.watch.status import MOUNT, PUSH, SERVE, WATCH

    path = session.store_path
    report = daemon_up.report(path, _FIRST_SCAN_S if is_new else 0)
    programs, point = report.parts, printable(report.mountpoint)
    for text in report.watch.degraded:
        terminal.complain(_shown(text))
    for name, says in (
        (WATCH, "following what starts to run"),
        (MOUNT, f"mounted at {point}"),
        (SERVE, "serving over HTTP"),
        (PUSH, "pushing"),
    ):
        if name in programs and not report.runs(name):
            terminal.complain(
                f"not {says}: {programs[name].reason or f'it is {programs[name].state}'}"
            )
            if name == WATCH:
                _scan_instead(session)
    if not session.is_quiet:
        with session.open_store() as store:
            held = store.stats()
        click.echo(
            f"{'Up.' if is_new else 'Already up.'} {counted(held.ids, 'build ID')} captured"
            f" ({size(held.blob_bytes)}) in {path}."
        )
        if report.runs(WATCH):
            mode = _WATCHING.get(report.watch.mode, "Watching what starts to run")
            waiting = report.watch.waiting
            left = f"; still being copied: {counted(waiting, 'file')}" if waiting else ""
            click.echo(f"{mode} (pid {programs[WATCH].pid}){left}.")
        if report.runs(MOUNT):
            click.echo(f"Mounted at {point} (pid {programs[MOUNT].pid}).")
            click.echo(_TRY.format(point, machine.perf_record()))
        if report.runs(SERVE):
            where = session.settings.serve.listen
            click.echo(f"Serving at {where} (pid {programs[SERVE].pid}).")
    return 0 if report.is_complete else _PARTLY


def _scan_instead(session: Session) -> None:
    """Capture at least the running programs, if the watch cannot follow events."""
    from buildidfs.cli import output
    from buildidfs.errors import BuildIdFsError
    from buildidfs.ingest import scans

    try:
        with session.capturing("Scanning") as (store, show):
            result = scans.scan_processes(store, session.settings, progress=show)
    except BuildIdFsError as error:
        terminal.complain(output.one_line(str(error)))
    else:
        report_scan(result, quiet=session.is_quiet)


@click.command(
    "down",
    short_help="End the processes that up has started.",
    epilog=exit_status(
        ["buildidfs down"],
        {
            40: "a process has not ended in time",
            60: "a process, or the store, belongs to another user",
        },
    ),
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60,
    metavar="SECONDS",
    help="Seconds to wait for the end of all processes.  [default: 60]",
)
@click.pass_obj
def down(session: Session, timeout: float) -> None:
    """End the processes that `buildidfs up` has started on this store, and wait for their end.

    The store stays.
    """
    from buildidfs.errors import CapabilityError
    from buildidfs.watch import up
    from buildidfs.watch.status import MOUNT, parts

    path = session.store_path
    supervisor = up.running(path)
    if supervisor is None:
        if os.path.lexists(path) and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise CapabilityError(
                f"store {path} may not be looked at by this user:"
                " run as its owner to end what runs on it"
            )
        if not session.is_quiet:
            shown = printable(path)
            others = up.elsewhere(path)
            hint = "." if others else "; --store names another store."
            terminal.print_text(f"Nothing runs that buildidfs up has started for {shown}{hint}")
            _name_others(others)
        return
    running = [part for part in parts(supervisor) if part.pid]
    ended = [f"{part.name} (pid {part.pid})" for part in running]
    up.end(supervisor, timeout)
    if session.is_quiet:
        return
    click.echo(f"Ended {' and '.join(ended) or 'what was left'}.")
    kept = f"the store in {printable(os.path.abspath(path))} is kept"
    if (point := supervisor.path("mountpoint")) and any(part.name == MOUNT for part in running):
        click.echo(f"Unmounted {printable(point)}; {kept}.")
    else:
        click.echo(f"{kept[0].upper()}{kept[1:]}.")
    _name_others(up.elsewhere(path))


def _name_others(stores: list[bytes]) -> None:
    """Print the other stores with a running supervisor, each with the command that ends it."""
    import shlex

    for each in stores:
        word = shlex.quote(printable(each))
        click.echo(f"Another store is still up: buildidfs --store {word} down")


@click.command(
    "status",
    short_help="Show the running parts and their health.",
    epilog=exit_status(
        ["buildidfs status", "buildidfs status --json | jq .processes"],
        {
            3: "down: no process runs, or one that should run does not run or answer",
            4: "degraded: all parts work, but some starting programs may be missed",
            5: "losing: files were lost in the last ten minutes, or no program is followed",
            **NO_STORE,
        },
    ),
)
@json_option()
@click.pass_obj
def status(session: Session, json_: bool) -> int:
    """Show the long-running processes of the store, and a verdict: healthy, degraded, losing or
    down.

    These are the processes that `buildidfs up` has started, and any other watch or mount. Each
    fault has its remedy. buildidfs-lookup(1) explains them.
    """
    from buildidfs.watch import status as daemon_status

    found = daemon_status.take(session.store_path, session.settings.retention, session.settings)
    if json_:
        json_line(found)
    else:
        _print_status(session, found)
    return found.exit_code


def _print_status(session: Session, found: Status) -> None:
    click.echo(f"{_verdict(found.verdict)}{_doing(found)}")
    for finding in found.findings:
        _print_line(_verdict(finding.verdict), _shown(finding.reason))
        remedy = _shown(session.as_given(finding.remedy))
        terminal.print_text(remedy, label=f"{'':{_INDENT}}->", indent=_INDENT + 3)
    taken = size(found.disk_bytes)
    _print_line(
        "store",
        f"{session.store_path}: {counted(found.build_ids, 'build ID')}, {size(found.blob_bytes)};"
        f" takes {taken}, free {size(found.free_bytes)}; keeps {limits(found)};"
        f" {counted(found.pins, 'pin')}",
    )
    if found.configured is not None:
        _print_line(
            " ",
            f"the settings say {limits(found.configured)}: takes effect after"
            f" {session.as_given('buildidfs down && buildidfs up')}",
        )
    for changed in found.changed:
        _print_line(
            " ",
            f"the settings [{changed.section}] have changed: takes effect after"
            f" {session.as_given(changed.after)}",
        )
    _print_evictions(found)
    for each in found.processes:
        _print_line(each.role, "; ".join(_sentences(each)))


def _print_line(label: str, text: str) -> None:
    terminal.print_text(text, label=label, indent=_INDENT)


def _verdict(verdict: Verdict) -> str:
    return terminal.coloured(verdict.value, _COLOURS[verdict.value])


def _doing(found: Status) -> str:
    """Describe the running processes for the first line; empty if none runs."""
    done = []
    for each in found.processes:
        facts = each.own_facts
        if not facts or each.state != "running":
            continue
        if (watched := each.watched) is not None:
            done.append(_shown(MODES.get(watched.mode, watched.mode)))
        elif each.role == "mount":
            done.append(f"mounted at {printable(each.raw_mountpoint)}")
        elif each.role == "serve" and isinstance(at := facts.get("listen"), list):
            done.append(f"serving at {_shown(', '.join(map(str, at)))}")
    return f": {', '.join(done)}" if done else ""


def _print_evictions(found: Status) -> None:
    """Print the files that were removed, or omitted, for lack of room, if there are any."""
    clauses = []
    if removed := eviction(found.evicted):
        clauses.append(f"removed to make room: {removed}")
    if found.omitted:
        clauses.append(f"{counted(found.omitted, 'file')} omitted, which can be captured again")
    if clauses:
        _print_line("room", "; ".join(clauses))
    for each in found.evicted.named[:_LOST]:
        _print_line(" ", f"{moment(each.time)} lost {evicted_line(each)}")
    if found.evicted.lost > _LOST:
        _print_line(" ", f"and {found.evicted.lost - _LOST} before, see buildidfs journal")


def _sentences(each: Process) -> list[str]:
    """Return the parts of the line for one process."""
    first = f"{each.state} since {moment(each.since)}"
    if sys.stdout.isatty():
        first = f"{each.state}, started {ago(each.since)}"
    elif each.state in ("stopped", "not answering"):
        first = f"{each.state}, started {moment(each.since)}"
    clauses = [f"{first}, pid {each.pid}" if each.pid else first]
    if each.due:
        clauses.append(f"starts again at {moment(each.due)}")
    if each.restarts:
        clauses.append(f"restarts: {each.restarts}")
    if each.reason:
        clauses.append(f"last failure: {_shown(each.reason)}")
    if point := each.raw_mountpoint:
        clauses.append(f"at {printable(point)}")
    if each.role == "serve" and not confinement.landlock_version():
        clauses.append("symbolizers are confined less, because the kernel has no Landlock")
    return [*clauses, *_facts(each)]


def _facts(process: Process) -> Iterator[str]:
    """Return the counters of a process in words."""
    facts = process.watched
    if facts is not None:
        yield _shown(one_line(facts))
        last = [f"{each.path} ({each.reason})" for each in facts.unreadable_last[-_UNREADABLE:]]
        if last:
            others = len(facts.unreadable_last) - len(last)
            more = f", and {others} more" if others else ""
            yield _shown(f"not readable: {', '.join(last)}{more}")
        if facts.every_mapping:
            yield _shown(
                f"known programs cost it as much as unknown ones, because {facts.every_mapping}"
            )
        return
    for name, value in process.own_facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name.replace('_', ' ')}: {value}"


def _shown(text: str) -> str:
    """Return text from other sources in printable characters."""
    return printable(text.encode(errors="replace"))


_FINDINGS: Final = 3
_LABEL: Final = 10  # columns
_LEAST_WIDTH: Final = 20
_RATE: Final = Cell(lambda rate: f"{rate:.1f}", lambda rate: f"{rate:.3f}", right=True)
_RED_IF_ANY: Final = Cell(str, str, right=True, colour=lambda count: "red" if count else None)
_COLUMNS: Final[tuple[Column[ActivityRow], ...]] = (
    Column("container", "CONTAINER", table.LABEL),
    Column("captured", "CAPTURED", table.COUNT),
    Column("rate", "PER SECOND", _RATE),
    Column("bytes", "SIZE", table.SIZE),
    Column("last", "LAST", table.AGE, value=lambda row: row.last or None),
    Column("lost", "LOST", _RED_IF_ANY),
    Column("recent", "IN 10 MIN", _RED_IF_ANY, 100),
)


@click.command(
    "top",
    short_help="Show captures, losses and growth as they happen.",
    epilog=exit_status(
        [
            "buildidfs top",
            "buildidfs top --sort -captured --limit 10",
        ],
        NO_STORE,
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
def top(session: Session, once: bool, interval: float, layout: table.TableOptions) -> None:
    """Show captures by container, their rate, waiting files, losses, and the growth of the store.

    The values are those of `buildidfs status`. q or Ctrl-C ends the command. In a pipe or in the
    background it prints the present state once, without rates: lines with a name and a value, then
    a table.
    """
    from buildidfs.catalog.containers import Names
    from buildidfs.store import Store
    from buildidfs.watch import status
    from buildidfs.watch.status import Activity

    activity = Activity()

    def look() -> StoreActivity:
        now = status.take(session.store_path, session.settings.retention)
        with Store.open(session.store_path, read_only=True) as store:
            return activity.add(now, Names(store), time.monotonic())

    if once or not _has_terminal():
        _print(look(), layout)
    else:
        _live(look, interval, layout)


def _has_terminal() -> bool:
    """Return True if this process may read keys. A background job may not: it would be stopped."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        return False
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except OSError:  # the terminal belongs to another session
        return False


def _print(view: StoreActivity, layout: table.TableOptions) -> None:
    for name, value in _head(view):
        gap = " " * max(_LABEL - len(name), 1) if sys.stdout.isatty() else "\t"
        click.echo(f"{name}{gap}{value}")
    layout.print(_COLUMNS, view.rows)


def _live(look: Callable[[], StoreActivity], interval: float, layout: table.TableOptions) -> None:
    """Redraw the screen until the user ends the command."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    with _keyboard() as key, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            lines = _screen(look(), layout)
            text = Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")
            live.update(text, refresh=True)
            if key(interval) in ("q", "Q"):
                return


def _screen(view: StoreActivity, layout: table.TableOptions) -> list[str]:
    """Return the lines of the screen, wrapped or cut to its width."""
    width = max(terminal.width(sys.stdout) - _LABEL, _LEAST_WIDTH)
    lines = []
    for name, value in _head(view):
        first, *others = textwrap.wrap(value, width)
        lines += [f"{name:{_LABEL}}{first}", *(" " * _LABEL + each for each in others)]
    state, rest = lines[0][_LABEL:], view.status.verdict.value
    lines[0] = f"{'state':{_LABEL}}{terminal.coloured(rest, _COLOURS[rest])}{state[len(rest) :]}"
    lines += ["", *layout.lines(_COLUMNS, view.rows), "", "q ends"]
    if not terminal.has_unicode():
        lines = [line.encode("ascii", "backslashreplace").decode() for line in lines]
    return lines


def _head(view: StoreActivity) -> Iterator[tuple[str, str]]:
    """Yield names and values about the watch, the store and its mounts, the state first."""
    found, facts = view.status, view.facts
    mode = "" if facts is None else f", {_shown(MODES.get(facts.mode, facts.mode))}"
    yield "state", f"{found.verdict.value}{mode}, at {time.strftime('%H:%M:%S')}"
    for finding in found.findings[:_FINDINGS]:
        reason = _shown(finding.reason)
        remedy = _shown(finding.remedy)
        yield finding.verdict.value, f"{reason} -> {remedy}"
    if facts is not None:
        yield (
            "captured",
            f"{counted(facts.captured, 'file')}, {size(facts.copied_bytes)}{_a_second(view.rate)};"
            f" {facts.held} already held",
        )
        yield (
            "waiting",
            f"{counted(facts.waiting, 'file')}, {size(facts.waiting_bytes)}; lag {facts.lag:.1f} s",
        )
        lost = sum(row.lost for row in view.rows)
        recent = sum(row.recent for row in view.rows)
        yield (
            "lost",
            f"{counted(lost, 'file')}, {recent} in the last 10 minutes;"
            f" {counted(facts.records_lost, 'event')} of the kernel,"
            f" {counted(facts.restarts, 'gap')}",
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
    stopped, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def end(number: int, frame: FrameType | None) -> None:
        os.write(wake, b"q")

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        tty.setcbreak(fd)
        yield partial(_key, fd, stopped)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(stopped)
        os.close(wake)


def _key(fd: int, stopped: int, seconds: float) -> str:
    ready, _, _ = select.select([fd, stopped], [], [], seconds)
    if not ready:
        return ""
    return os.read(ready[0], 64)[:1].decode("latin-1") or "q"  # the terminal is gone
