# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan perf-data``: capture the binaries that profiles speak of."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import path_fields, printable
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError

if TYPE_CHECKING:
    from buildidfs.app.profile.scan import Binary, ProfileScan

_SHOWN: Final = 20  # missing binaries that are named one by one


@click.command(
    "perf-data",
    short_help="Capture the binaries that profiles speak of.",
    epilog=exit_status(
        [
            "buildidfs scan perf-data perf.data",
            "buildidfs scan perf-data --json perf.data | jq '.binaries[] | select(.why)'",
        ],
        {
            3: "finished, but some files could not be read",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--all", "all_", is_flag=True, help="Also what was mapped but never sampled.")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def scan_perf_data(session: Session, paths: tuple[str, ...], all_: bool, json_: bool) -> int:
    """Capture the binaries that samples in perf.data files fell into, callers included.

    They are looked for in running processes, at their paths on this host, and at those in the mount
    namespaces where they were seen. What is missing afterwards is listed, with the reason.
    """
    from buildidfs.app.profile import scan as profile_scan

    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        scan = profile_scan.scan_perf_data(
            store,
            session.settings,
            [os.fsencode(path) for path in paths],
            everything=all_,
            progress=show,
        )
    if json_:
        as_json(scan.summary, binaries=[_fields(each) for each in scan.binaries])
    else:
        _text(scan, quiet=session.is_quiet)
    return IncompleteError.exit_code if scan.summary.unreadable else 0


def _fields(each: Binary) -> dict[str, object]:
    return {
        **path_fields(each.path),
        "container": each.container,
        "build_id": None if each.build_id is None else each.build_id.hex(),
        "samples": each.samples,
        "state": each.state,
        "why": each.why,
    }


def _text(scan: ProfileScan, *, quiet: bool) -> None:
    report(scan.summary, quiet=quiet)
    if quiet:
        return
    missing = [each for each in scan.binaries if each.why]
    click.echo(f"{len(scan.binaries)} binaries named, {len(missing)} missing")
    for each in missing[:_SHOWN]:
        name = each.build_id.hex() if each.build_id is not None else "-"
        click.echo(f"    {name:40}  {printable(each.path)}: {each.why}")
    if len(missing) > _SHOWN:
        click.echo(f"    and {len(missing) - _SHOWN} more, see --json")
