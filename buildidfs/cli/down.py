# SPDX-License-Identifier: Apache-2.0
"""``buildidfs down``: end what ``buildidfs up`` has started."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import Session, exit_status


@click.command(
    "down",
    short_help="End what up has started.",
    epilog=exit_status(
        ["buildidfs down"],
        {
            40: "it has not ended in time",
            60: "it belongs to another user, or the store does",
        },
    ),
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=60,
    metavar="SECONDS",
    help="How long to wait until everything has ended.  [default: 60]",
)
@click.pass_obj
def down(session: Session, timeout: float) -> None:
    """End what `buildidfs up` runs on this store, and wait until it has ended.

    The store is kept.
    """
    from buildidfs.app.service import up
    from buildidfs.cli.output import printable
    from buildidfs.errors import CapabilityError

    path = session.store_path
    supervisor = up.running(path)
    if supervisor is None:
        if os.path.lexists(path) and not os.access(path, os.R_OK | os.X_OK, effective_ids=True):
            raise CapabilityError(
                f"store {path} may not be looked at by this user:"
                " run as its owner to end what runs on it"
            )
        if not session.is_quiet:
            click.echo(f"Nothing runs that buildidfs up has started for {path}.")
        return
    running = [part for part in up.parts(supervisor) if part.pid]
    ended = [f"{part.name} (pid {part.pid})" for part in running]
    up.end(supervisor, timeout)
    if session.is_quiet:
        return
    click.echo(f"Ended {' and '.join(ended) or 'what was left'}.")
    kept = f"the store in {printable(os.fsencode(os.path.abspath(path)))} is kept"
    if (point := supervisor.path("mountpoint")) and any(part.name == up.MOUNT for part in running):
        click.echo(f"Unmounted {printable(point)}; {kept}.")
    else:
        click.echo(f"{kept[0].upper()}{kept[1:]}.")
