# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan tree``: capture the ELF files below directories."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError


@click.command(
    "tree",
    epilog=exit_status(
        [
            "buildidfs scan tree /usr/lib/debug /opt",
            "buildidfs scan tree --dry-run --json ./a.out",
        ],
        {
            3: "finished, but some files could not be read",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=AnyPath())
@click.option("--dry-run", is_flag=True, help="Say what would be captured; change nothing.")
@click.option("--json", "json_", is_flag=True, help="JSON: the summary, or a file a line.")
@click.pass_obj
def scan_tree(session: Session, paths: tuple[str, ...], dry_run: bool, json_: bool) -> int:
    """Capture the ELF files below directories, recursively, or single files.

    Symbolic links below a PATH are not followed; devices, FIFOs and sockets are not opened.
    With --dry-run the build ID and path of each file are printed.
    """
    from buildidfs import app

    wanted = [os.fsencode(path) for path in paths]
    if dry_run:
        return _identify(session, wanted, json_)
    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        summary = app.scan_tree(store, session.settings, wanted, progress=show)
    if json_:
        as_json(summary)
    else:
        report(summary, quiet=session.is_quiet)
    return IncompleteError.exit_code if summary.unreadable else 0


def _identify(session: Session, paths: list[bytes], json_: bool) -> int:
    """Print build ID and path of every file that a scan would take in; count the rest."""
    import sys
    from collections import Counter

    from buildidfs import app
    from buildidfs.capture.base import Unreadable
    from buildidfs.cli.output import json_line, path_fields, printable
    from buildidfs.model import Absence, BuildId

    absent: Counter[Absence] = Counter()
    unreadable = found = 0
    verbose = session.verbosity > 0
    write = sys.stdout.write
    for path, answer in app.identify_tree(paths):
        if isinstance(answer, BuildId):
            found += 1
            if json_:
                json_line({"build_id": answer.hex(), **path_fields(path)})
            else:
                write(f"{answer.hex()} {printable(path)}\n")
        elif isinstance(answer, Unreadable):
            unreadable += 1
            click.echo(f"buildidfs: {printable(path)}: {answer.reason}", err=True)
        else:
            absent[answer] += 1
            if verbose and answer not in (Absence.NOT_ELF, Absence.EMPTY):
                click.echo(f"buildidfs: {printable(path)}: {answer}", err=True)
    sys.stdout.flush()
    for reason, count in absent.most_common():
        click.echo(f"{count} without a build ID: {reason}", err=True)
    if not found and not unreadable and not absent:
        session.say_why_empty("there is no regular file below what was given")
    return IncompleteError.exit_code if unreadable else 0
