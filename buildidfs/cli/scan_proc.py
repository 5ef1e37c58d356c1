# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan proc``: capture what running processes have mapped."""

from __future__ import annotations

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError


@click.command(
    "proc",
    epilog=exit_status(
        [
            "buildidfs scan proc",
            "buildidfs scan proc --pid 4711",
            "buildidfs scan proc --container docker:0f5c3e8d1b2a",
        ],
        {
            3: "finished, but some processes or files could not be read",
            10: "store error; 14 disk full",
        },
    ),
)
@click.option("--pid", "pids", metavar="PID", type=int, multiple=True, help="Only this process.")
@click.option(
    "--container",
    "containers",
    metavar="LABEL",
    multiple=True,
    help="Only this container: its label, or the beginning of its ID.",
)
@click.option("--containers-only", is_flag=True, help="Leave out the processes of the host.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def scan_proc(
    session: Session,
    pids: tuple[int, ...],
    containers: tuple[str, ...],
    containers_only: bool,
    json_: bool,
) -> int:
    """Capture every binary that a running process has mapped, in whatever mount namespace.

    With each binary goes the debuginfo found beside it in its own root. What was captured before
    is recognised without being read. Without root only one's own processes can be seen.
    """
    from buildidfs import app

    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        summary = app.scan_processes(
            store,
            session.settings,
            pids=pids or None,
            containers=containers or None,
            containers_only=containers_only,
            progress=show,
        )
    if json_:
        as_json(summary)
    else:
        report(summary, quiet=session.is_quiet)
    return IncompleteError.exit_code if summary.unreadable else 0
