# SPDX-License-Identifier: Apache-2.0
"""``buildidfs fetch``: get files that the store lacks from upstream servers."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import AnyPath, BuildIdArgument, Session, exit_status
from buildidfs.cli.output import counted, json_line, printable, size
from buildidfs.errors import ArtifactMissing, IncompleteError, StoreError, UpstreamError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.model import BuildId
    from buildidfs.upstream.fetcher import Fetched

_SHOWN: Final = 10


@click.command(
    "fetch",
    short_help="Fetch missing files from upstream servers.",
    epilog=exit_status(
        [
            "buildidfs fetch --for perf.data",
            "buildidfs fetch --for core",
            "buildidfs fetch 8e9fd827446c24067541ac5390e6f527fb5947bb",
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
    "--again", is_flag=True, help="Also ask for files that no server had at the last request."
)
@click.option(
    "--offline", is_flag=True, help="Ask only servers that are directories of this machine."
)
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def fetch(
    session: Session,
    ids: tuple[str, ...],
    files: tuple[str, ...],
    kind: str | None,
    again: bool,
    offline: bool,
    json_: bool,
) -> int:
    """Fetch executables and debuginfo that the store lacks, and keep them.

    The command asks the servers in [upstream] urls of buildidfs.toml(5), then those in
    DEBUGINFOD_URLS, in this order. It keeps a file only if the file has the requested build ID.
    """
    import msgspec

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
        done = fetching.fetch(store, options, wanted, again=again, progress=show)
    return _report(session, done, json_=json_)


def _report(session: Session, done: list[Fetched], *, json_: bool) -> int:
    """Print the results; return the exit status."""
    from buildidfs.upstream.fetcher import State

    counts = Counter(each.state for each in done)
    total = sum(each.size for each in done)
    if json_:
        json_line(
            {
                **{str(state): counts[state] for state in State},
                "bytes": total,
                "files": [_fields(each) for each in done],
            }
        )
    else:
        if not done:
            session.say_why_empty("the store has all that could be fetched")
        elif not session.is_quiet:
            click.echo(
                f"{counted(counts[State.FETCHED], 'file')} fetched ({size(total)}),"
                f" {counts[State.HELD]} already held"
            )
        _complain([each for each in done if each.why])
    missing = len(done) - counts[State.FETCHED] - counts[State.HELD]
    if not missing:
        return 0
    if missing < len(done):
        return IncompleteError.exit_code
    if counts[State.FAILED]:
        return StoreError.exit_code
    if counts[State.UNAVAILABLE]:
        return UpstreamError.exit_code
    return ArtifactMissing.exit_code


def _complain(lacking: Sequence[Fetched]) -> None:
    """Name the files that were not fetched, up to a limit."""
    kinds: dict[tuple[BuildId, str], list[str]] = {}
    for each in lacking:
        kinds.setdefault((each.build_id, each.why), []).append(each.kind.name.lower())
    for (build_id, why), named in islice(kinds.items(), _SHOWN):
        terminal.complain(f"no {' or '.join(named)} of {build_id}: {printable(os.fsencode(why))}")
    if (more := len(kinds) - _SHOWN) > 0:
        terminal.complain(f"nor of {counted(more, 'more build ID')}, see --json")


def _fields(each: Fetched) -> dict[str, object]:
    return {
        "build_id": str(each.build_id),
        "kind": each.kind.name.lower(),
        "state": str(each.state),
        "server": each.server,
        "size": each.size,
        "why": each.why,
    }
