# SPDX-License-Identifier: Apache-2.0
"""``buildidfs compress``: let what nobody uses take less room."""

from __future__ import annotations

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line, size

_DEFAULT = "30d"


@click.command(
    "compress",
    short_help="Compress what was not used for long.",
    epilog=exit_status(
        ["buildidfs compress", "buildidfs compress --unused-for 7d"],
        {10: "the Python package zstandard is missing", 11: "no store at that place"},
    ),
)
@click.option(
    "--unused-for", metavar="AGE", help="For so long, e.g. 30d.  [default: as set, or 30d]"
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def compress(session: Session, unused_for: str | None, json_: bool) -> None:
    """Compress what was not used for long. It is read as before, from any place.

    A watch does the same once a day, if [retention] compress-after is set.
    """
    from buildidfs import config
    from buildidfs.app.upkeep import daily

    after = daily.compress_after(session.settings)
    if unused_for is not None or after is None:
        after = config.seconds(unused_for or _DEFAULT)
    with session.open_store() as store:
        blobs, before, now = daily.compress(store, after)
    if json_:
        json_line({"blobs": blobs, "before": before, "after": now})
    elif not session.is_quiet:
        click.echo(f"compressed {blobs} blobs, from {size(before)} to {size(now)}")
