# SPDX-License-Identifier: Apache-2.0
"""``buildidfs unmount``: take a mount away."""

from __future__ import annotations

import click

from buildidfs.cli.common import AnyPath, exit_status


@click.command(
    "unmount",
    short_help="Take a mount away.",
    epilog=exit_status(
        ["buildidfs unmount /buildid"],
        {40: "not a mount of buildidfs, or it cannot be unmounted"},
    ),
)
@click.argument("mountpoint", metavar="MOUNTPOINT", type=AnyPath())
def unmount(mountpoint: str) -> None:
    """Unmount MOUNTPOINT. Files that are still open stay readable until they are closed."""
    from buildidfs import app

    app.unmount(mountpoint)
