# SPDX-License-Identifier: Apache-2.0
"""``buildidfs coverage``: how much of a profile, a core file, or what runs, the store can name."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.coverage_output import show


@click.command(
    "coverage",
    short_help="Say how much of a profile, a core, or what runs, can be read.",
    epilog=exit_status(
        [
            "buildidfs coverage perf.data",
            "buildidfs coverage --live",
            "buildidfs coverage --fail-under 95 --json perf.data | jq .percent",
        ],
        {
            2: "neither a perf.data nor a core file",
            3: "some of the file, or some processes, could not be read",
            11: "no store at that place; 13 unknown format",
            30: "less than --fail-under per cent have symbols",
        },
    ),
)
@click.argument("file", metavar="[FILE]", required=False, type=AnyPath())
@click.option("--live", is_flag=True, help="What running processes have mapped now.")
@click.option(
    "--fail-under",
    metavar="PCT",
    type=click.FloatRange(0, 100),
    help="Exit with 30 if less than so many per cent have symbols.",
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def coverage(
    session: Session, file: str | None, live: bool, fail_under: float | None, json_: bool
) -> int:
    """Say for what share of the samples in FILE the store has executable, symbols, debuginfo.

    FILE is a perf.data file. By container and binary, what is missing first, and why it is. Of a
    core file the binaries in it are counted. With --live the executable mappings of all processes
    are counted instead.
    """
    from buildidfs.app.profile import covered

    if live == (file is not None):
        raise click.UsageError("name a FILE, or use --live")
    with session.open_store() as store, session.progress("Reading") as progress:
        if file is None:
            found = covered.of_processes(store, session.settings, progress=progress)
        else:
            found = covered.of_file(store, os.fsencode(file), progress=progress)
    return show(found, json_=json_, fail_under=fail_under, quiet=session.is_quiet)
