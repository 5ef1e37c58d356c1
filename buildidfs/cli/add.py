# SPDX-License-Identifier: Apache-2.0
"""``buildidfs add``: capture single files."""

from __future__ import annotations

import os

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError, UsageError


@click.command(
    "add",
    short_help="Capture single files.",
    epilog=exit_status(
        [
            "buildidfs add ./a.out",
            "buildidfs add --build-id 8e9fd827446c2406 firmware.elf",
            "buildidfs add --kallsyms --build-id 8e9fd827446c2406 kallsyms.txt",
        ],
        {
            2: "wrong usage: a build ID for several files",
            3: "finished, but some files could not be captured",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--build-id", "text", metavar="HEX", help="The build ID of a file that has none.")
@click.option("--kallsyms", is_flag=True, help="FILE is a copy of a kernel's /proc/kallsyms.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def add(
    session: Session, files: tuple[str, ...], text: str | None, kallsyms: bool, json_: bool
) -> int:
    """Capture single files: executables, debug files, modules, kernels.

    With each binary go the debug files that belong to it, looked for where debuggers look.
    """
    from buildidfs.app import ingesting
    from buildidfs.model import BuildId

    build_id = None if text is None else BuildId.from_hex(text)
    if build_id is not None and len(files) > 1:
        raise UsageError("--build-id is for one file; several cannot have the same")
    if kallsyms and build_id is None:
        raise UsageError("--kallsyms needs --build-id: symbols do not say of which kernel they are")
    wanted = [os.fsencode(path) for path in files]
    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        summary = ingesting.add(
            store,
            session.settings,
            wanted,
            build_id=build_id,
            kallsyms=kallsyms,
            progress=show,
        )
    if json_:
        as_json(summary)
    else:
        report(summary, quiet=session.is_quiet)
    return IncompleteError.exit_code if summary.unreadable else 0
