# SPDX-License-Identifier: Apache-2.0
"""Exchange files with the bucket of a fleet and with upstream servers: ``buildidfs fleet``,
``push`` and ``fetch``.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

import click
import msgspec

from buildidfs.cli import table, terminal
from buildidfs.cli.common import AnyPath, BuildIdArgument, Session, exit_status, json_option
from buildidfs.cli.group import LazyGroup
from buildidfs.cli.output import json_line, one_line, printable
from buildidfs.cli.table import Column
from buildidfs.errors import ArtifactMissing, IncompleteError, StoreError, UpstreamError, UsageError
from buildidfs.wording import counted, moment, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.fleet.push import Pusher, PushSummary
    from buildidfs.fleet.questions import Host, HostLocation
    from buildidfs.model import BuildId
    from buildidfs.store import Store
    from buildidfs.upstream.fetcher import Fetched


_CODES: Final = {
    2: "no bucket is configured, or the extra buildidfs[remote] is not installed",
    50: "the bucket is missing, refuses the request, or does not answer",
}
_HOSTS: Final[tuple[Column[Host], ...]] = (
    Column("host", "HOST", table.TEXT),
    Column("files", "FILES", table.COUNT),
    Column("size", "SIZE", table.SIZE, value=lambda row: row.bytes),
    Column("private", "PRIVATE", table.COUNT),
    Column("manifests", "MANIFESTS", table.COUNT, 100),
    Column("last_push", "PUSHED", table.AGE),
)
_LOCATIONS: Final[tuple[Column[HostLocation], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID),
    Column("kind", "KIND", table.TEXT),
    Column("host", "HOST", table.TEXT),
    Column("container", "CONTAINER", table.LABEL),
    Column("last_seen", "SEEN", table.AGE),
    Column("state", "STATE", table.TEXT, 120),
    Column("path", "PATH", table.LABEL),
)


@click.group(
    cls=LazyGroup,
    short_help="Ask about all hosts that push to one bucket.",
    epilog=exit_status(["buildidfs fleet status", "buildidfs fleet where 5d8f"], _CODES),
)
def fleet() -> None:
    """Ask about all hosts that push to the bucket of [remote]. No store is needed."""


@fleet.command(
    "status",
    short_help="List the hosts, and what they have pushed.",
    epilog=exit_status(["buildidfs fleet status", "buildidfs fleet status --json"], _CODES),
)
@table.options(_HOSTS)
@click.pass_obj
def status(session: Session, layout: table.TableOptions) -> None:
    """List the hosts that have pushed, the one that pushed last first."""
    from buildidfs.fleet import questions

    rows = questions.status(questions.bucket_of(session.settings.remote))
    if not layout.print(_HOSTS, rows):
        session.explain_empty("no host has pushed to the bucket yet: buildidfs push --all")


@fleet.command(
    "which",
    short_help="Show the build IDs at a path, on all hosts.",
    epilog=exit_status(["buildidfs fleet which '*/libssl.so.3'"], _CODES),
)
@click.argument("path", metavar="PATH")
@table.options(_LOCATIONS)
@click.pass_obj
def which(session: Session, path: str, layout: table.TableOptions) -> None:
    """Show the build IDs that hosts have seen at PATH, a path or a pattern with * and ?."""
    from buildidfs.fleet import questions

    rows = questions.which(questions.bucket_of(session.settings.remote), path)
    if not layout.print(_LOCATIONS, rows):
        session.explain_empty(f"no manifest of a host lists a file at {one_line(path)}")


@fleet.command(
    "where",
    short_help="Show the hosts that have seen a build ID.",
    epilog=exit_status(
        ["buildidfs fleet where 5d8f"], {**_CODES, 30: "no host has reported that build ID"}
    ),
)
@click.argument("id_", metavar="ID")
@table.options(_LOCATIONS)
@click.pass_obj
def where(session: Session, id_: str, layout: table.TableOptions) -> None:
    """Show the hosts, containers and paths where a build ID was seen. A unique beginning of ID is
    enough.
    """
    from buildidfs.fleet import questions

    rows = questions.where(questions.bucket_of(session.settings.remote), id_)
    layout.print(_LOCATIONS, rows)


@fleet.command(
    "why",
    short_help="Say why the bucket has a build ID, or lacks it.",
    epilog=exit_status(
        ["buildidfs fleet why 8e9f"],
        {
            **_CODES,
            2: "a beginning that several build IDs share, or no bucket is configured",
            30: "the bucket has no file of that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID")
@json_option("Print one JSON object per line.")
@click.pass_obj
def why(session: Session, id_: str, json_: bool) -> int:
    """Say if the bucket has the executable and the debuginfo of ID, or why it lacks them.

    The command names the host that pushed each file. The beginning of a build ID is enough.
    """
    from buildidfs.fleet import questions

    reasons = questions.why(questions.bucket_of(session.settings.remote), id_)
    for reason in reasons:
        if json_:
            json_line(reason)
            continue
        terminal.print_text(f"{reason.kind}: {one_line(reason.text)}", indent=2)
        if reason.remedy:
            terminal.print_text(reason.remedy, label="  ", indent=2)
    return 0 if any(each.state == "present" for each in reasons) else 30


@fleet.command(
    "filter",
    short_help="Show the filter of the bucket, or make a new one.",
    epilog=exit_status(["buildidfs fleet filter", "buildidfs fleet filter --rebuild"], _CODES),
)
@click.option("--rebuild", is_flag=True, help="Make a new filter from a listing of the bucket.")
@json_option("Print a JSON object.")
@click.pass_obj
def filter_(session: Session, rebuild: bool, json_: bool) -> None:
    """Show how many files the filter has, and how old it is.

    Pushes keep the filter up to date. If other programs write to the bucket, use --rebuild, which
    takes a request for each thousand objects.
    """
    from buildidfs.fleet import questions

    state = questions.filter_state(questions.bucket_of(session.settings.remote), rebuild=rebuild)
    if json_:
        json_line(state)
    elif not state.generation:
        click.echo("The bucket has no filter: buildidfs fleet filter --rebuild makes one.")
    else:
        click.echo(
            f"{counted(state.files, 'file')} in {counted(state.runs, 'run')} of"
            f" {size(state.bytes)}, generation {state.generation},"
            f" made {moment(state.made)}"
        )


@click.command(
    "push",
    short_help="Upload captured files to a bucket.",
    epilog=exit_status(
        [
            "buildidfs push --all",
            "buildidfs push --watch --rate 10MiB",
        ],
        {
            2: "no bucket is configured, or the extra for it is not installed",
            3: "some files could not be pushed; a line for each is on standard error",
            30: "nothing known under a build ID",
            50: "the bucket is missing, refuses the request, or does not answer",
        },
    ),
)
@click.argument("ids", metavar="ID...", nargs=-1, type=BuildIdArgument())
@click.option("--all", "all_", is_flag=True, help="Push all files of the store.")
@click.option("--watch", is_flag=True, help="Push all files, then new captures, until stopped.")
@click.option(
    "--rate", metavar="SIZE", help="Send at most this many bytes per second.  [default: no limit]"
)
@click.option("--verify", is_flag=True, help="Compare all files again.")
@json_option("Print the counts as a JSON object.")
@click.pass_obj
def push(
    session: Session,
    ids: tuple[str, ...],
    all_: bool,
    watch: bool,
    rate: str | None,
    verify: bool,
    json_: bool,
) -> int:
    """Push the files of build IDs, or all, to the bucket in [remote] url.

    The push sends the files that the bucket lacks, and overwrites nothing: if the bucket has other
    bytes for a build ID, the file goes below variant/. Files that not every user could read go to
    the bucket in [remote] private, or stay here. A push continues one that was interrupted.
    """
    if sum((bool(ids), all_, watch)) != 1:
        raise UsageError("push takes build IDs, or one of --all and --watch")
    from buildidfs.fleet.push import PATIENCE_S, Pusher, settings_of

    if watch and not session.verbosity:
        session.start_logging()
    patience = None if watch else PATIENCE_S
    options = settings_of(session.settings.remote, rate=rate, verify=verify, patience_s=patience)
    with (
        session.open_store() as store,
        Pusher(store, session.settings.remote, options) as pusher,
    ):
        if watch:
            _watch(pusher)
            return 0
        chosen = [_found(store, text) for text in ids] if ids else None
        with session.progress("Pushing") as line:
            summary = pusher.run(chosen, line)
    return _report_push(session, summary, json_=json_)


def _watch(pusher: Pusher) -> None:
    from buildidfs.linux.sdnotify import Notifier

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: pusher.stop())
    pusher.follow(Notifier(os.environ).ready)


def _found(store: Store, text: str) -> tuple[int, BuildId]:
    build_id = store.match(text)
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    return ordinal, build_id


def _report_push(session: Session, summary: PushSummary, *, json_: bool) -> int:
    for failure in summary.failed:
        terminal.complain(f"cannot push {one_line(failure)}")
    if json_:
        json_line({**msgspec.structs.asdict(summary), "failed": len(summary.failed)})
    elif not session.is_quiet:
        left_out = (
            (summary.private, "private and not pushed"),
            (summary.leased, "being pushed by other hosts"),
        )
        terminal.print_text(
            f"{counted(summary.pushed, 'file')} pushed ({size(summary.bytes)}),"
            f" {counted(summary.variants, 'variant')}, {summary.present} in the bucket before"
            + "".join(f", {count} {what}" for count, what in left_out if count)
        )
    return 3 if summary.failed else 0


_SHOWN: Final = 10


@click.command(
    "fetch",
    short_help="Fetch missing files from upstream servers.",
    epilog=exit_status(
        [
            "buildidfs fetch --for perf.data",
            "DEBUGINFOD_URLS=https://debuginfod.debian.net buildidfs fetch --for core",
        ],
        {
            2: "wrong usage: no upstream is configured, or FILE is no profile and no core file",
            3: "finished, but some files could not be fetched",
            10: "store error; 14 disk full",
            30: "no server has any of the files",
            50: "no file was fetched, because servers could not be asked",
        },
    ),
)
@click.argument("ids", metavar="ID...", nargs=-1, type=BuildIdArgument())
@click.option(
    "--for",
    "files",
    metavar="FILE",
    multiple=True,
    type=AnyPath(),
    help="Fetch the files of a perf.data or core file that the store lacks.",
)
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo"]),
    help="Only files of this kind.  [default: both]",
)
@click.option(
    "--again",
    "retry_absent",
    is_flag=True,
    help="Also ask for files that no server had at the last request.",
)
@click.option(
    "--offline", is_flag=True, help="Ask only servers that are directories of this machine."
)
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def fetch(
    session: Session,
    ids: tuple[str, ...],
    files: tuple[str, ...],
    kind: str | None,
    retry_absent: bool,
    offline: bool,
    json_: bool,
) -> int:
    """Fetch executables and debuginfo that the store lacks, and keep them.

    The command asks the servers in [upstream] urls of buildidfs.toml(5), then those in
    DEBUGINFOD_URLS, in this order. It keeps a file only if the file has the requested build ID.
    """
    from buildidfs.model import Kind
    from buildidfs.profile import fetch as fetching
    from buildidfs.upstream.options import of_settings

    if not ids and not files:
        raise UsageError("nothing is named: give build IDs, or --for FILE")
    options = of_settings(session.settings.upstream, os.environ)
    if not options.urls:
        raise UsageError(fetching.NO_UPSTREAM)
    options = msgspec.structs.replace(options, offline=options.offline or offline)
    kinds = fetching.KINDS if kind is None else (Kind[kind.upper()],)
    with session.capturing("Fetching") as (store, show):
        wanted = fetching.wanted_of(store, ids, files, kinds)
        done = fetching.fetch(store, options, wanted, retry_absent=retry_absent, progress=show)
    return _report_fetch(session, done, json_=json_)


def _report_fetch(session: Session, done: list[Fetched], *, json_: bool) -> int:
    """Print the results; return the exit status."""
    from buildidfs.upstream.options import FetchState

    counts = Counter(each.state for each in done)
    total = sum(each.size for each in done)
    if json_:
        json_line(
            {
                **{str(state): counts[state] for state in FetchState},
                "bytes": total,
                "files": done,
            }
        )
    else:
        if not done:
            session.explain_empty("the store has all that could be fetched")
        elif not session.is_quiet:
            click.echo(
                f"{counted(counts[FetchState.FETCHED], 'file')} fetched ({size(total)}),"
                f" {counts[FetchState.HELD]} already held"
            )
        _complain([each for each in done if each.why])
    missing = len(done) - counts[FetchState.FETCHED] - counts[FetchState.HELD]
    if not missing:
        return 0
    if missing < len(done):
        return IncompleteError.exit_code
    if counts[FetchState.FAILED]:
        return StoreError.exit_code
    if counts[FetchState.UNAVAILABLE]:
        return UpstreamError.exit_code
    return ArtifactMissing.exit_code


def _complain(lacking: Sequence[Fetched]) -> None:
    """Name the files that were not fetched, up to a limit."""
    kinds: dict[tuple[BuildId, str], list[str]] = {}
    for each in lacking:
        kinds.setdefault((each.build_id, each.why), []).append(each.kind.name.lower())
    for (build_id, why), named in islice(kinds.items(), _SHOWN):
        terminal.complain(f"no {' or '.join(named)} of {build_id}: {printable(why)}")
    if (more := len(kinds) - _SHOWN) > 0:
        terminal.complain(f"nor of {counted(more, 'more build ID')}, see --json")
