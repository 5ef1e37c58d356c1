# SPDX-License-Identifier: Apache-2.0
"""``buildidfs gc``: remove what processes that were killed have left in the store."""

from __future__ import annotations

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line, size


@click.command(
    "gc",
    short_help="Remove what killed processes have left.",
    epilog=exit_status(
        ["buildidfs gc", "buildidfs gc --json"],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def gc(session: Session, json_: bool) -> None:
    """Remove what nothing in the store speaks of: blobs of captures that were cut off, the rest of
    removals that were, and drafts.

    What is younger than an hour is left alone. Captures and readers go on meanwhile. A watch does
    the same once a day. The quarantine is counted, and kept for somebody to look at.
    """
    with session.open_store() as store:
        found = store.collect()
    if json_:
        json_line(
            {
                "blobs": found.blobs,
                "bytes": found.bytes,
                "build_ids": found.ids,
                "names": found.names,
                "drafts": found.drafts,
                "quarantined": found.quarantined,
                "quarantine_bytes": found.quarantine_bytes,
            }
        )
        return
    if not session.is_quiet:
        click.echo(
            f"removed {found.blobs} blobs that nothing spoke of ({size(found.bytes)}),"
            f" what was left of {found.ids} build IDs, {found.drafts} drafts"
        )
    if found.quarantined:
        click.echo(f"kept {found.quarantined} files in quarantine ({size(found.quarantine_bytes)})")
