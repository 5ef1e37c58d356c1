# SPDX-License-Identifier: Apache-2.0
"""Run watch and mount in the background: ``buildidfs up``, ``down`` and ``status``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import (
    counted,
    evicted_fields,
    evicted_line,
    eviction,
    json_line,
    limits,
    limits_fields,
    moment,
    path_fields,
    printable,
    report_scan,
    size,
)
from buildidfs.cli.table import ago
from buildidfs.cli.watch import MODES, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.app.service.status import Running, Status, Verdict
    from buildidfs.store.retention.eviction import Policy
    from buildidfs.store.retention.tally import Evictions


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
    perf record --buildid-mmap -a -- sleep 10
    perf --buildid-dir {0}/perf report"""
_COLOURS = {"healthy": "green", "degraded": "yellow", "losing": "red", "down": "red"}
_LOST = 5  # evicted blobs that are named
_UNREADABLE = 3  # files and processes that are named
_INDENT = 9


@click.command(
    "up",
    short_help="Capture programs that run or start, and mount the store.",
    epilog=exit_status(
        ["buildidfs up", "buildidfs up /srv/buildid", "buildidfs up --foreground --no-mount"],
        {
            2: "this store is up already, with another mount point",
            3: "up, but not all starting programs are followed; the reason is named",
            12: "another process is starting it",
            40: "cannot mount: busy, not empty, no /dev/fuse, no fusermount3",
        },
    ),
)
@click.argument("mountpoint", metavar="[MOUNTPOINT]", type=AnyPath(), required=False)
@click.option("--foreground", is_flag=True, help="Stay attached; log to standard error.")
@click.option("--no-mount", is_flag=True, help="Capture only; do not mount.")
@click.option("--no-watch", is_flag=True, help="Mount only; do not capture.")
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
    restarted after a failure. The default MOUNTPOINT is that of buildidfs.toml(5), or /buildid; the
    command creates the directory if it is missing.
    """
    from buildidfs.app.service import up as daemon_up

    _check_options(mountpoint, foreground, no_mount, no_watch, log)
    if not session.verbosity:
        session.start_logging()
    path = session.store_path
    place = mountpoint or session.settings.up.mountpoint or "/buildid"
    point = None if no_mount else os.fsencode(os.path.abspath(os.path.expanduser(place)))
    there = daemon_up.running(path)
    if there is not None:
        daemon_up.refuse_second(there, point)
        daemon_up.hurry(path, _PATIENCE_S)
        return _report_up(session, is_new=False)
    programs = daemon_up.programs(
        session.arguments(),
        point,
        watch=not no_watch,
        serve=bool(session.settings.serve.listen),
        push=bool(session.settings.remote.url) and session.settings.remote.push,
        metrics=_metrics(metrics, no_watch),
    )
    if foreground:
        from buildidfs.linux.sdnotify import Notifier

        ready = Notifier(os.environ).ready
        daemon_up.start(path, programs, environ=os.environ, mountpoint=point, ready=ready)
        return 0
    if not session.is_quiet and sys.stderr.isatty():
        click.echo("Starting; the first time, all running programs are copied.", err=True)
    log = log and os.path.abspath(log)
    daemon_up.start(path, programs, environ=os.environ, mountpoint=point, log_file=log)
    return _report_up(session, is_new=True)


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
    from buildidfs.app.live import metrics as exported

    exported.require_library()
    return exported.target(metrics).path or metrics


def _report_up(session: Session, *, is_new: bool) -> int:
    """Print which programs run on which store; return the exit status."""
    from buildidfs.app.service import up as daemon_up

    path = session.store_path
    report = daemon_up.report(path, _FIRST_SCAN_S if is_new else 0)
    parts, point = report.parts, printable(report.mountpoint)
    degraded = report.watch.get("degraded")
    for text in degraded if isinstance(degraded, list) else []:
        terminal.complain(_shown(str(text)))
    for name, says in (
        (daemon_up.WATCH, "following what starts to run"),
        (daemon_up.MOUNT, f"mounted at {point}"),
        (daemon_up.SERVE, "serving over HTTP"),
        (daemon_up.PUSH, "pushing"),
    ):
        if name in parts and not report.runs(name):
            terminal.complain(f"not {says}: {parts[name].reason or f'it is {parts[name].state}'}")
            if name == daemon_up.WATCH:
                _scan_instead(session)
    if not session.is_quiet:
        with session.open_store() as store:
            held = store.stats()
        click.echo(
            f"{'Up.' if is_new else 'Already up.'} {counted(held.ids, 'build ID')} captured"
            f" ({size(held.blob_bytes)}) in {path}."
        )
        if report.runs(daemon_up.WATCH):
            mode = _WATCHING.get(str(report.watch.get("mode")), "Watching what starts to run")
            waiting = int(report.watch.get("waiting") or 0)
            left = f"; still being copied: {counted(waiting, 'file')}" if waiting else ""
            click.echo(f"{mode} (pid {parts[daemon_up.WATCH].pid}){left}.")
        if report.runs(daemon_up.MOUNT):
            click.echo(f"Mounted at {point} (pid {parts[daemon_up.MOUNT].pid}).")
            click.echo(_TRY.format(point))
        if report.runs(daemon_up.SERVE):
            where = session.settings.serve.listen
            click.echo(f"Serving at {where} (pid {parts[daemon_up.SERVE].pid}).")
    return 0 if report.is_complete else _PARTLY


def _scan_instead(session: Session) -> None:
    """Capture at least the running programs, if the watch cannot follow events."""
    from buildidfs.app import capture
    from buildidfs.cli import output
    from buildidfs.errors import BuildIdFsError

    try:
        with session.capturing("Scanning") as (store, show):
            result = capture.scan_processes(store, session.settings, progress=show)
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
    from buildidfs.app.service import up
    from buildidfs.errors import CapabilityError

    path = session.store_path
    supervisor = up.running(path)
    if supervisor is None:
        if os.path.lexists(path) and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise CapabilityError(
                f"store {path} may not be looked at by this user:"
                " run as its owner to end what runs on it"
            )
        if not session.is_quiet:
            shown = printable(os.fsencode(path))
            others = up.elsewhere(path)
            hint = "." if others else "; --store names another store."
            terminal.say(f"Nothing runs that buildidfs up has started for {shown}{hint}")
            _name_others(others)
        return
    running = [part for part in up.parts(supervisor) if part.pid]
    ended = [f"{part.name} (pid {part.pid})" for part in running]
    up.end(supervisor, timeout)
    if session.is_quiet:
        return
    click.echo(f"Ended {' and '.join(ended) or 'what was left'}.")
    kept = f"the store in {printable(os.fsencode(os.path.abspath(path)))} is kept"
    if (point := supervisor.path("mountpoint")) and any(part.name == up.MOUNT for part in running):
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
            11: "no store at that place; 13 unknown format",
        },
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(session: Session, json_: bool) -> int:
    """Show the long-running processes of the store, and a verdict: healthy, degraded, losing or
    down.

    These are the processes that `buildidfs up` has started, and any other watch or mount. Each
    fault has its remedy. buildidfs(1) explains the verdicts.
    """
    from buildidfs.app import upkeep
    from buildidfs.app.service import status as daemon_status

    path = session.store_path
    found = daemon_status.take(path)
    policy = upkeep.policy(session.settings.retention, path)
    if json_:
        _print_status_json(path, found, policy)
    else:
        _print_status(session, found, policy)
    return found.verdict.exit_code


def _print_status(session: Session, found: Status, policy: Policy) -> None:
    click.echo(f"{_verdict(found.verdict)}{_doing(found)}")
    for finding in found.findings:
        _say(_verdict(finding.verdict), _shown(finding.reason))
        remedy = _shown(session.as_given(finding.remedy))
        terminal.say(remedy, label=f"{'':{_INDENT}}->", indent=_INDENT + 3)
    held = found.store
    taken = size(found.disk_bytes)
    _say(
        "store",
        f"{session.store_path}: {counted(held.ids, 'build ID')}, {size(held.blob_bytes)};"
        f" takes {taken}, free {size(held.free_bytes)}; keeps {limits(policy)};"
        f" {counted(held.pins, 'pin')}",
    )
    _print_evictions(found.evictions)
    for each in found.processes:
        _say(each.role, "; ".join(_sentences(each)))


def _say(label: str, text: str) -> None:
    terminal.say(text, label=label, indent=_INDENT)


def _verdict(verdict: Verdict) -> str:
    name = verdict.name.lower()
    return terminal.coloured(name, _COLOURS[name])


def _doing(found: Status) -> str:
    """Describe the running processes for the first line; empty if none runs."""
    done = []
    for each in found.processes:
        if each.present is None or each.state != "running":
            continue
        if each.role == "watch" and (mode := str(each.present.facts.get("mode", ""))):
            done.append(_shown(MODES.get(mode, mode)))
        elif each.role == "mount":
            done.append(f"mounted at {printable(each.present.path('mountpoint'))}")
        elif each.role == "serve" and isinstance(at := each.present.facts.get("listen"), list):
            done.append(f"serving at {_shown(', '.join(map(str, at)))}")
    return f": {', '.join(done)}" if done else ""


def _print_evictions(what: Evictions) -> None:
    """Print the files that were removed, or only noted, for lack of room, if there are any."""
    said = []
    if removed := eviction(what):
        said.append(f"removed to make room: {removed}")
    if what.noted:
        said.append(f"{counted(what.noted, 'file')} only noted, which can be captured again")
    if said:
        _say("room", "; ".join(said))
    for each in what.last[:_LOST]:
        _say(" ", f"{moment(each.when * 1_000_000_000)} lost {evicted_line(each)}")
    if what.losses > _LOST:
        _say(" ", f"and {what.losses - _LOST} before, see buildidfs journal")


def _sentences(each: Running) -> list[str]:
    """Return the parts of the line for one process."""
    part, present = each.part, each.present
    since = present.since if present is not None else part.since if part is not None else 0
    first = f"{each.state} since {moment(since)}"
    if sys.stdout.isatty():
        first = f"{each.state}, started {ago(since)}"
    elif each.state in ("stopped", "not answering"):
        first = f"{each.state}, started {moment(since)}"
    said = [f"{first}, pid {each.pid}" if each.pid else first]
    if part is not None and part.due:
        said.append(f"starts again at {moment(part.due)}")
    if part is not None and part.restarts:
        said.append(f"restarts: {part.restarts}")
    if part is not None and part.reason:
        said.append(f"last failure: {_shown(part.reason)}")
    if present is not None:
        if point := present.path("mountpoint"):
            said.append(f"at {printable(point)}")
        said += _facts(present.facts)
    return said


def _facts(facts: Mapping[str, object]) -> Iterator[str]:
    """Return the counters of a process in words."""
    if line := one_line(facts):
        yield _shown(line)
        yield from _unreadable(facts)
        return
    for name, value in facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name.replace('_', ' ')}: {value}"


def _unreadable(facts: Mapping[str, object]) -> Iterator[str]:
    """Yield lines with the last files and processes that a scan of the watch could not read."""
    rows = facts.get("unreadable_last")
    named = [each for each in rows if isinstance(each, dict)] if isinstance(rows, list) else []
    last = [f"{each.get('path')} ({each.get('reason')})" for each in named[-_UNREADABLE:]]
    if last:
        more = f", and {len(named) - len(last)} more" if len(named) > len(last) else ""
        yield _shown(f"not readable: {', '.join(last)}{more}")


def _shown(text: str) -> str:
    """Return text from other sources in printable characters."""
    return printable(text.encode(errors="replace"))


def _print_status_json(path: str, found: Status, policy: Policy) -> None:
    json_line(
        {
            "store": path,
            "build_ids": found.store.ids,
            "blob_bytes": found.store.blob_bytes,
            "stored_bytes": found.store.stored_bytes,
            "jit_bytes": found.jit_bytes,
            "index_bytes": found.store.index_bytes,
            "free_bytes": found.store.free_bytes,
            "pins": found.store.pins,
            "evicted": evicted_fields(found.evictions, found.evictions.last),
            "noted": found.evictions.noted,
            **limits_fields(policy),
            "verdict": found.verdict.name.lower(),
            "well": found.verdict == 0,
            "findings": [
                {"verdict": each.verdict.name.lower(), "reason": each.reason, "remedy": each.remedy}
                for each in found.findings
            ],
            "processes": [_fields(each) for each in found.processes],
        }
    )


def _fields(each: Running) -> dict[str, object]:
    part, present = each.part, each.present
    fields: dict[str, object] = {"role": each.role, "state": each.state}
    if present is not None:
        fields |= {"pid": present.pid, "since": present.since / 1e9, "version": present.version}
    if part is not None:
        fields |= {
            "pid": part.pid or None,
            "since": part.since / 1e9,
            "restarts": part.restarts,
            "reason": part.reason,
            "status": part.status,
            "due": part.due / 1e9 if part.due else None,
        }
    if present is not None:
        if point := present.path("mountpoint"):
            fields |= path_fields(point, "mountpoint")
        left_out = ("mountpoint", "mountpoint_b64", "children")
        fields["facts"] = {x: y for x, y in present.facts.items() if x not in left_out}
    return fields
