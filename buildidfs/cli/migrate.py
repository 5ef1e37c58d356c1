# SPDX-License-Identifier: Apache-2.0
"""``buildidfs migrate``: bring the store to the format of this program."""

from __future__ import annotations

import click

from buildidfs.cli.common import Session, exit_status


@click.command(
    "migrate",
    short_help="Convert the store of an older version.",
    epilog=exit_status(
        ["buildidfs migrate"],
        {
            11: "no store at that place",
            12: "the store is in use: end what uses it first (buildidfs down)",
            13: "the store is of a newer version",
            14: "disk full; the store is as it was",
        },
    ),
)
@click.pass_obj
def migrate(session: Session) -> None:
    """Convert the store of an older version of buildidfs to the format of this one.

    Every command does the same when it meets an older store that it may write to; but mount,
    status and doctor, which change nothing, say that it is needed. Nobody may use the store
    meanwhile. There is no way back: older versions refuse the store from then on.
    """
    from buildidfs.store import migrate

    done = migrate.run(session.store_path)
    if session.is_quiet:
        return
    if done is None:
        click.echo("the store has the format of this version")
    else:
        click.echo(
            f"converted format {done.before} to {done.now}:"
            f" {done.ids} build IDs, {done.blobs} blobs"
        )
