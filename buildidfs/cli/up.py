# SPDX-License-Identifier: Apache-2.0
"""``buildidfs up``: follow what starts to run and mount the store, in one go."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import AnyPath, Session, exit_status

if TYPE_CHECKING:
    from buildidfs.app.service.child import Part

_PARTLY = 3
_PATIENCE_S = 60
_FIRST_SCAN_S = 20
_WATCHING = "Watching what starts to run"

_TRY = """
Try:
    ls {0}
    gdb -iex 'set debug-file-directory {0}/debug' -c CORE
    perf --buildid-dir {0}/perf report      (record with --buildid-mmap)"""


@click.command(
    "up",
    short_help="Follow what starts to run, and mount the store.",
    epilog=exit_status(
        ["buildidfs up", "buildidfs up /srv/buildid", "buildidfs up --foreground --no-mount"],
        {
            2: "this store is up already, with another mount point",
            3: "up, but what starts to run is not followed, or not all of it; the reason is named",
            12: "somebody else is just starting it",
            40: "cannot mount: busy, not empty, no /dev/fuse, no fusermount3",
        },
    ),
)
@click.argument("mountpoint", metavar="[MOUNTPOINT]", type=AnyPath(), required=False)
@click.option("--foreground", is_flag=True, help="Stay attached; log to standard error.")
@click.option("--no-mount", is_flag=True, help="Only follow what starts to run.")
@click.option("--no-watch", is_flag=True, help="Only mount.")
@click.option(
    "--log",
    metavar="FILE",
    help="Where messages of the background go.  [default: syslog, if there is one]",
)
@click.pass_obj
def up(
    session: Session,
    mountpoint: str | None,
    foreground: bool,
    no_mount: bool,
    no_watch: bool,
    log: str | None,
) -> int:
    """Capture what runs, follow what starts to run, and mount the store at MOUNTPOINT.

    Returns when all of that is the case; it goes on in the background until `buildidfs down`, and
    what fails is started again. The default MOUNTPOINT is that of buildidfs.toml(5), or /buildid;
    it is made if there is none.
    """
    from buildidfs.app.service import up as daemon_up

    _check(mountpoint, foreground, no_mount, no_watch, log)
    if not session.verbosity:
        session.start_logging()
    path = session.store_path
    place = mountpoint or session.settings.up.mountpoint or "/buildid"
    point = None if no_mount else os.fsencode(os.path.abspath(os.path.expanduser(place)))
    there = daemon_up.running(path)
    if there is not None:
        daemon_up.refuse_second(there, point)
        daemon_up.hurry(path, _PATIENCE_S)
        return _report(session, is_new=False)
    programs = daemon_up.programs(session.arguments(), point, watch=not no_watch)
    if foreground:
        from buildidfs.linux.sdnotify import Notifier

        ready = Notifier(os.environ).ready
        daemon_up.start(path, programs, environ=os.environ, mountpoint=point, ready=ready)
        return 0
    if not session.is_quiet and sys.stderr.isatty():
        click.echo("Starting; the first time, all that runs is copied.", err=True)
    log = log and os.path.abspath(log)
    daemon_up.start(path, programs, environ=os.environ, mountpoint=point, log_file=log)
    return _report(session, is_new=True)


def _check(
    mountpoint: str | None,
    foreground: bool,
    no_mount: bool,
    no_watch: bool,
    log: str | None,
) -> None:
    """Refuse what contradicts itself."""
    for first, second, says in (
        (no_mount, no_watch, "--no-mount and --no-watch leave nothing to do"),
        (no_mount, mountpoint is not None, "--no-mount needs no MOUNTPOINT"),
        (foreground, log is not None, "--foreground logs to standard error, not to --log"),
    ):
        if first and second:
            raise click.UsageError(says)


def _report(session: Session, *, is_new: bool) -> int:
    """Say what runs where; the exit status."""
    from buildidfs.app.service import up as daemon_up
    from buildidfs.cli.output import printable, size

    path = session.store_path
    supervisor = daemon_up.running(path)
    if supervisor is None:
        from buildidfs.errors import MountError

        raise MountError("it has ended just after it was started")
    parts = {part.name: part for part in daemon_up.parts(supervisor)}
    point = printable(supervisor.path("mountpoint"))
    watch, mount = parts.get(daemon_up.WATCH), parts.get(daemon_up.MOUNT)
    complete = all(part.state == "running" for part in parts.values())
    if watch is not None and watch.state == "running":
        daemon_up.settle(path, _FIRST_SCAN_S if is_new else 0)
        complete = _say_what_is_amiss(path) and complete
    elif watch is not None:
        click.echo(f"buildidfs: not following what starts to run: {_why(watch)}", err=True)
        _scan_instead(session)
    if mount is not None and mount.state != "running":
        click.echo(f"buildidfs: not mounted at {point}: {_why(mount)}", err=True)
    if not session.is_quiet:
        with session.open_store() as store:
            held = store.stats()
        first = "Up." if is_new else "Already up."
        click.echo(f"{first} {held.ids} build IDs captured ({size(held.blob_bytes)}) in {path}.")
        if watch is not None and watch.state == "running":
            click.echo(f"{_doing(path)} (pid {watch.pid}){_left(path)}.")
        if mount is not None and mount.state == "running":
            click.echo(f"Mounted at {point} (pid {mount.pid}).")
            click.echo(_TRY.format(point))
    return 0 if complete else _PARTLY


def _say_what_is_amiss(path: str) -> bool:
    """Pass on what the watch says is less than it could be; False if it cannot follow all."""
    from buildidfs.app.live.state import PARTIAL
    from buildidfs.app.service import up as daemon_up
    from buildidfs.cli.output import printable

    watching = daemon_up.watching(path)
    facts = {} if watching is None else watching.facts
    degraded = facts.get("degraded")
    for text in degraded if isinstance(degraded, list) else []:
        click.echo(f"buildidfs: {printable(str(text).encode(errors='replace'))}", err=True)
    return facts.get("mode") not in PARTIAL


def _doing(path: str) -> str:
    """What the watch does, in words."""
    from buildidfs.app.service import up as daemon_up

    watching = daemon_up.watching(path)
    return {
        "confined": "Watching what starts to run in this PID namespace only",
        "polling": "Scanning every 2 s what runs",
    }.get("" if watching is None else str(watching.facts.get("mode")), _WATCHING)


def _left(path: str) -> str:
    from buildidfs.app.service import up as daemon_up

    watching = daemon_up.watching(path)
    left = 0 if watching is None else watching.facts.get("waiting")
    return f"; {left} files are still being copied" if left else ""


def _why(part: Part) -> str:
    return part.reason or f"it is {part.state}"


def _scan_instead(session: Session) -> None:
    """Without following, capture at least what runs now."""
    from buildidfs import app
    from buildidfs.cli import summary
    from buildidfs.cli.output import one_line
    from buildidfs.errors import BuildIdFsError

    try:
        with session.open_store(create=True) as store, session.progress("Scanning") as show:
            result = app.scan_processes(store, session.settings, progress=show)
    except BuildIdFsError as error:
        click.echo(f"buildidfs: {one_line(str(error))}", err=True)
    else:
        summary.report(result, quiet=session.is_quiet)
