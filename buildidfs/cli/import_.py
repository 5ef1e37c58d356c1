# SPDX-License-Identifier: Apache-2.0
"""``buildidfs import``: what is in a bundle, into the store."""

from __future__ import annotations

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import evicted_fields, json_line, size
from buildidfs.cli.summary import report_evictions


@click.command(
    "import",
    short_help="Take what is in a bundle into the store.",
    epilog=exit_status(
        ["buildidfs import crash.tar.zst", "buildidfs import --trust package ours.tar.zst"],
        {
            2: "no such file",
            3: "finished, but some files could not be taken",
            14: "no room left",
            20: "not a bundle, cut off, or other bytes than it says: nothing of that is kept",
        },
    ),
)
@click.argument("file", metavar="FILE", type=AnyPath())
@click.option(
    "--trust",
    type=click.Choice(["unknown", "container", "package"]),
    default="container",
    show_default=True,
    help="How far it is believed at most, against other files with the same build IDs.",
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def import_(session: Session, file: str, trust: str, json_: bool) -> None:
    """Take the files of a bundle into the store, each verified first.

    What the store has already is not read, so it costs little to do again after it was cut off.
    """
    from buildidfs.app.bundle import create
    from buildidfs.errors import IncompleteError
    from buildidfs.model import Trust

    with session.open_store(create=True) as store, session.progress("import") as progress:
        manifest, summary = create.import_(
            store, file, trust=Trust[trust.upper()], progress=progress
        )
    if json_:
        json_line(
            {
                "artifacts": len(manifest.items),
                "captured": summary.captured,
                "copied_bytes": summary.copied_bytes,
                "new_build_ids": summary.new_ids,
                "unreadable": len(summary.unreadable),
                "evicted": evicted_fields(summary.removed, summary.removed.named),
            }
        )
    elif not session.is_quiet:
        click.echo(
            f"{len(manifest.items)} artifacts: {summary.captured} captured"
            f" ({size(summary.copied_bytes)}), {summary.new_ids} new build IDs"
        )
    report_evictions(summary.removed, quiet=json_ or session.is_quiet)
    if summary.unreadable:
        raise IncompleteError(
            f"{len(summary.unreadable)} files could not be taken, the first because:"
            f" {summary.unreadable[0].reason}"
        )
