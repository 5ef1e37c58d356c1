# SPDX-License-Identifier: Apache-2.0
"""Capture single files and write them out: ``buildidfs add`` and ``buildidfs get``."""

from __future__ import annotations

import os
import sys

import click

from buildidfs.cli.common import AnyPath, BuildIdArgument, Session, container_option, exit_status
from buildidfs.cli.output import report_scan
from buildidfs.errors import UsageError


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
@click.option("--build-id", "text", metavar="HEX", help="Give a file without a build ID this one.")
@click.option("--kallsyms", is_flag=True, help="FILE is a copy of a kernel's /proc/kallsyms.")
@click.option("--json", "json_", is_flag=True, help="Print the summary as one JSON object.")
@click.pass_obj
def add(
    session: Session, files: tuple[str, ...], text: str | None, kallsyms: bool, json_: bool
) -> int:
    """Capture single files: executables, debug files, modules, kernels.

    The debug files of each binary are captured as well. They are looked for where debuggers look.
    """
    from buildidfs.ingest import scans
    from buildidfs.model import BuildId

    build_id = None if text is None else BuildId.from_hex(text)
    if build_id is not None and len(files) > 1:
        raise UsageError("--build-id is for one file; several cannot have the same")
    if kallsyms and build_id is None:
        raise UsageError("--kallsyms needs --build-id: symbols do not say of which kernel they are")
    wanted = [os.fsencode(path) for path in files]
    with session.capturing() as (store, show):
        summary = scans.add(
            store, session.settings, wanted, build_id=build_id, kallsyms=kallsyms, progress=show
        )
    return report_scan(summary, json_=json_, quiet=session.is_quiet)


@click.command(
    "get",
    short_help="Write the bytes of a build ID to a file.",
    epilog=exit_status(
        [
            "buildidfs get 8e9f -o libc.so.6",
            "buildidfs get /app/server --container web -o server",
            "buildidfs get --kind debuginfo 8e9fd827446c24067541ac5390e6f527fb5947bb > libc.debug",
        ],
        {
            2: "a prefix that several build IDs share",
            20: "the bytes do not match their digest; nothing is written",
            30: "nothing is kept under that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID|PATH", type=BuildIdArgument())
@container_option("PATH means the file that was seen there in this container.")
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo", "vdso", "kallsyms"]),
    help="Write the file of this kind.  [default: the executable, else any other]",
)
@click.option("-o", "--output", metavar="FILE", type=AnyPath(), help="Write to FILE.")
@click.pass_obj
def get(
    session: Session, id_: str, container: str | None, kind: str | None, output: str | None
) -> None:
    """Write the bytes of a build ID (a unique prefix is enough), or of the file at PATH, verified
    first.

    FILE appears whole or not at all. The command refuses to write to a terminal.
    """
    from buildidfs.catalog import requested_id
    from buildidfs.errors import UsageError
    from buildidfs.store import export

    if output is None and sys.stdout.isatty():
        raise UsageError("not writing a binary to the terminal; use -o FILE")
    with session.open_store() as store:
        build_id = requested_id.build_id(store, id_, container)
        artifact = requested_id.artifact(store, build_id, id_, kind)
        if output is None:
            export.to_stream(store, artifact, sys.stdout.buffer)
        else:
            export.to_file(store, artifact, output)
