# SPDX-License-Identifier: Apache-2.0
"""``buildidfs get``: the bytes of an artifact."""

from __future__ import annotations

import sys

import click

from buildidfs.cli.common import BuildIdArgument, Session, exit_status


@click.command(
    "get",
    epilog=exit_status(
        [
            "buildidfs get 8e9f -o libc.so.6",
            "buildidfs get --kind debuginfo 8e9fd827446c24067541ac5390e6f527fb5947bb > libc.debug",
        ],
        {
            2: "a prefix that several build IDs share",
            20: "the bytes do not match their digest; nothing is written",
            30: "nothing is kept under that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID", type=BuildIdArgument())
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo", "vdso", "kallsyms"]),
    help="Which file.  [default: the executable, else what there is]",
)
@click.option(
    "-o", "--output", metavar="FILE", type=click.Path(path_type=str), help="Write to FILE."
)
@click.pass_obj
def get(session: Session, id_: str, kind: str | None, output: str | None) -> None:
    """Write the bytes kept under build ID (a unique prefix is enough), verified first.

    FILE appears whole or not at all. Writing to a terminal is refused.
    """
    from buildidfs import daemon
    from buildidfs.errors import UsageError

    if output is None and sys.stdout.isatty():
        raise UsageError("not writing a binary to the terminal; use -o FILE")
    with session.open_store() as store:
        daemon.write_artifact(store, id_, kind, output)
