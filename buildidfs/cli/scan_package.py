# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan package``: capture the ELF files in packages."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError


@click.command(
    "package",
    epilog=exit_status(
        [
            "buildidfs scan package libc6_2.36-9_amd64.deb libc6-dbg_2.36-9_amd64.deb",
            "buildidfs scan package /srv/mirror",
        ],
        {
            3: "finished, but some packages could not be read",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--again", is_flag=True, help="Read packages that were read before, too.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def scan_package(session: Session, files: tuple[str, ...], again: bool, json_: bool) -> int:
    """Capture every ELF file in packages of Debian, rpm, Alpine and Arch, without installing them.

    A FILE may be a directory: all packages below it are read. What is a package is told by its
    content, not by its name. One that was read before and has not changed is passed over.
    """
    from buildidfs.app import archives

    wanted = [os.fsencode(path) for path in files]
    with session.open_store(create=True) as store, session.progress("Unpacking") as show:
        scan = archives.scan_packages(store, wanted, again=again, progress=show)
    if json_:
        as_json(scan.summary, packages=scan.packages, unchanged=scan.unchanged)
    else:
        if not session.is_quiet:
            known = f", {scan.unchanged} of them unchanged" if scan.unchanged else ""
            click.echo(f"{scan.packages} packages{known}")
        report(scan.summary, quiet=session.is_quiet)
    return IncompleteError.exit_code if scan.summary.unreadable else 0
