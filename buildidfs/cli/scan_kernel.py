# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan kernel``: capture kernels and their modules."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError


@click.command(
    "kernel",
    epilog=exit_status(
        [
            "buildidfs scan kernel",
            "buildidfs scan kernel --all",
            "buildidfs scan kernel --root /mnt/image",
        ],
        {
            3: "finished, but some files could not be read",
            10: "store error; 14 disk full",
        },
    ),
)
@click.option(
    "--all", "all_", is_flag=True, help="All kernels and modules that are installed, too."
)
@click.option("--root", metavar="DIR", type=AnyPath(), help="Those installed below DIR, only.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def scan_kernel(session: Session, all_: bool, root: str | None, json_: bool) -> int:
    """Capture the running kernel: its symbols, the files it is in, the modules it has loaded.

    With them go debug files as distributions install them. Modules are captured as they are when
    decompressed, the vmlinux as it is inside the vmlinuz. Symbols take root to be read.
    """
    from buildidfs.app import ingesting

    where = None if root is None else os.fsencode(root)
    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        summary = ingesting.scan_kernel(
            store, session.settings, everything=all_, root=where, progress=show
        )
    if json_:
        as_json(summary)
    else:
        report(summary, quiet=session.is_quiet)
    return IncompleteError.exit_code if summary.unreadable else 0
