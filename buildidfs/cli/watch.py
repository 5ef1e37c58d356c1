# SPDX-License-Identifier: Apache-2.0
"""Capture what processes map from now on: ``buildidfs watch``, and the ``jit`` names it keeps."""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import click
import msgspec

from buildidfs.cli import table, terminal
from buildidfs.cli.common import NO_STORE, Session, container_option, exit_status, json_option
from buildidfs.cli.output import json_line, path_fields
from buildidfs.cli.table import Column
from buildidfs.located import InContainer
from buildidfs.wording import counted, size

if TYPE_CHECKING:
    from buildidfs.catalog.containers import Names
    from buildidfs.reports import WatchFacts
    from buildidfs.store.jit_maps import JitMap
    from buildidfs.watch.state import Event


_LIVE_S = 1.0
_MINUTE_S = 60.0
MODES = {
    "confined": "following this PID namespace only",
    "polling": "scanning every 2 s instead of following",
}
"""The modes of a watch whose description needs more than one word."""
_LOST = (
    ("let_go", "let go uncopied"),
    ("unpinned", "not opened"),
    ("missed", "missed"),
    ("dropped", "dropped"),
    ("unreadable", "unreadable"),
    ("records_lost", "events lost"),
    ("restarts", "restarts"),
    ("omitted", "omitted for lack of room"),
    ("evicted", "removed that can be captured again"),
    ("evicted_for_good", "removed that cannot be captured again"),
)
"""Counters of losses, and their descriptions in the line of counts; see buildidfs-json(5)."""


@click.command(
    "watch",
    short_help="Capture each binary when it is mapped.",
    epilog=exit_status(
        [
            "buildidfs watch",
            "buildidfs watch --metrics 127.0.0.1:9481",
        ],
        {
            3: "not all programs could be followed: the kernel refused events, or hides processes;"
            " or a slow disk held up the end, and files that were not committed are lost",
            10: "store error",
            60: "/proc is that of another PID namespace",
        },
    ),
)
@click.option("--no-scan", is_flag=True, help="Do not scan the programs that run already.")
@container_option(
    "Only this container: its name, pod, label, or the beginning of its ID.", multiple=True
)
@click.option(
    "--cgroup",
    metavar="DIRECTORY",
    type=click.Path(exists=True, file_okay=False, resolve_path=True),
    help="Only the processes of this control group and of those below it.",
)
@click.option(
    "--exclude",
    metavar="GLOB",
    multiple=True,
    help="Leave out files with this path in their container.",
)
@click.option(
    "--pin-seconds",
    metavar="N",
    type=click.FloatRange(0.1, 3600),
    help="Seconds to keep a file open until it is copied.  [default: 30]",
)
@click.option(
    "--pin-bytes",
    metavar="SIZE",
    help="The most bytes of files that are kept open.  [default: 2GiB]",
)
@click.option(
    "--metrics",
    metavar="ADDRESS|FILE.prom",
    help="Metrics for Prometheus at an address, such as 127.0.0.1:9481, or in a file.",
)
@json_option("Print each event as a JSON object.")
@click.pass_obj
def watch(
    session: Session,
    no_scan: bool,
    containers: tuple[str, ...],
    cgroup: str | None,
    exclude: tuple[str, ...],
    pin_seconds: float | None,
    pin_bytes: str | None,
    metrics: str | None,
    json_: bool,
) -> int:
    """Capture each binary when a process maps it, in all mount namespaces.

    A container may be gone a millisecond later. The command starts to follow mappings, then scans
    the running processes, and continues until SIGTERM or SIGINT. It prints a line of counts each
    minute.
    """
    from buildidfs import config
    from buildidfs.errors import IncompleteError, UsageError
    from buildidfs.watch.daemon import run
    from buildidfs.watch.state import PARTIAL, WatchOptions

    if session.verbosity == 0:
        session.start_logging()
    if cgroup is not None and not os.path.exists(os.path.join(cgroup, "cgroup.procs")):
        raise UsageError(
            f"{cgroup} is not a control group: give a directory such as"
            " /sys/fs/cgroup/system.slice/NAME.service"
        )
    defaults = session.settings.watch
    options = WatchOptions(
        pin_seconds=defaults.pin_seconds if pin_seconds is None else pin_seconds,
        pin_bytes=config.size(defaults.pin_bytes if pin_bytes is None else pin_bytes),
        containers=containers,
        exclude=(*defaults.exclude, *exclude),
        scan=not no_scan,
        container_namespaces=session.settings.container.namespaces,
        debug_directories=session.settings.container.debug_directories,
        cgroup=cgroup or "",
    )
    presenter = Presenter(json_=json_, quiet=session.is_quiet)
    opened = partial(session.open_store, create=True)
    facts = run(opened, session.settings, options, metrics or defaults.metrics, presenter)
    return IncompleteError.exit_code if facts.mode in PARTIAL else 0


def one_line(facts: WatchFacts) -> str:
    """Return one line about the state of a watch."""
    parts = [
        MODES.get(facts.mode, facts.mode),
        f"{facts.captured} captured ({size(facts.copied_bytes)},"
        f" {counted(facts.new_build_ids, 'new build ID')})",
        f"{facts.held} already held",
        f"{facts.waiting} waiting ({size(facts.waiting_bytes)})",
    ]
    losses = ((getattr(facts, name), words) for name, words in _LOST)
    parts += [f"{count} {words}" for count, words in losses if count]
    return ", ".join(filter(None, [*parts, facts.store_error]))


class Presenter:
    """Prints the progress of one watch.

    `event` may be called from any thread, and does not raise: an error of the output must not
    disturb captures. `turn` raises such an error later.
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
        """Report that a file was captured, or could not be captured."""
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
        except Exception as error:  # `turn` raises it: captures go on without the output
            self._failure = error

    def turn(self, facts: WatchFacts, now: float) -> None:
        """Print the state if the time for it has come. Raises errors of the output."""
        if self._failure is not None:
            raise self._failure
        if self._live and now - self._shown_at >= _LIVE_S:
            self._shown_at = now
            # A longer line would stay on the screen each time, above the next one.
            line = terminal.cut(self.line(facts), terminal.width(sys.stdout) - 1)
            click.echo(f"\r\x1b[K{line}", nl=False)
            self._is_open = True
        elif now >= self._minute_at:
            self._minute_at = now + _MINUTE_S
            self._counts("counts", facts)

    def line(self, facts: WatchFacts) -> str:
        """Describe the state in one line."""
        return one_line(facts)

    def end(self, facts: WatchFacts) -> None:
        """Print the last counts."""
        if self._is_open:
            click.echo()
        self._counts("stopped", facts)

    def _counts(self, name: str, facts: WatchFacts) -> None:
        if self._json:
            values = msgspec.to_builtins(facts)
            self._print_json({"event": name, "time": time.time(), **values})
        elif not self._quiet:
            click.echo(self.line(facts))
            sys.stdout.flush()

    def _print_json(self, values: dict[str, object]) -> None:
        with self._lock:
            json_line(values)
            sys.stdout.flush()


class _KeptMap(InContainer, frozen=True, kw_only=True):
    """A process whose names of generated code are kept in ``file``; times are Unix time."""

    pid: int
    ns_pid: int
    comm: str
    mnt_ns_id: int
    host: str
    uid: int
    started: float
    last_seen: float
    size: int
    file: str


_COLUMNS: Final[tuple[Column[_KeptMap], ...]] = (
    Column("pid", "PID", table.COUNT),
    Column("comm", "COMMAND", table.TEXT),
    Column("started", "STARTED", table.AGE),
    Column("last_seen", "SEEN", table.AGE),
    Column("size", "SIZE", table.SIZE),
    table.CONTAINER,
    table.LOCATION,
)


@click.command(
    "jit",
    short_help="List the processes whose JIT code can be named.",
    epilog=exit_status(
        ["buildidfs jit", "buildidfs jit --container shop/cart-7d9f --json"],
        NO_STORE,
    ),
)
@container_option("Only processes of this container: its name, pod, label, or start of its ID.")
@table.options(_COLUMNS)
@click.pass_obj
def jit(session: Session, container: str | None, layout: table.TableOptions) -> None:
    """List the processes whose names of generated code are kept, the one that began last first.

    JIT compilers write these names for perf, if an option tells them to: into /tmp/perf-PID.map or
    jit-PID.dump. `buildidfs repair` uses them.
    """
    from buildidfs.catalog import containers

    with session.open_store() as store:
        names = containers.Names(store)
        is_meant = None if container is None else containers.meant(store, container)
        rows = sorted(
            (each for each in store.jit_maps.all() if is_meant is None or is_meant(_label(each))),
            key=lambda each: -each.process.start_ns,
        )
        if not layout.print(_COLUMNS, (_kept_map(names, row) for row in rows)):
            session.explain_empty(
                "no process wrote a map for perf (node --perf-basic-prof, python -X perf) while a"
                " watch or a scan saw it"
                + ("" if container is None else f" in container {container}")
            )


def _label(row: JitMap) -> str:
    """Return the label for reports of the container of a process."""
    from buildidfs.capture.origin import builder

    origin = row.process.origin
    return builder.shown(origin.container, origin.cgroup, row.process.owner)


def _kept_map(names: Names, row: JitMap) -> _KeptMap:
    process, origin = row.process, row.process.origin
    return _KeptMap(
        pid=process.pid,
        ns_pid=process.ns_pid,
        comm=process.comm,
        **names.fields(_label(row), origin.cgroup),
        mnt_ns_id=origin.mnt_ns_id,
        host=origin.host,
        uid=origin.identity.uid,
        started=process.start_ns / 1e9,
        last_seen=row.last_ns / 1e9,
        size=row.size,
        **path_fields(origin.path),
        file=os.fsdecode(row.path),
    )
