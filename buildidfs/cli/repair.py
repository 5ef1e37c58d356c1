# SPDX-License-Identifier: Apache-2.0
"""``buildidfs repair``: add to a profile the build IDs that it lacks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import counted, json_line, one_line, path_fields, printable
from buildidfs.errors import IncompleteError

if TYPE_CHECKING:
    from buildidfs.model import BuildId
    from buildidfs.profile.repair import Repaired
    from buildidfs.store import Store

_SHOWN: Final = 20  # files that are named one by one


@click.command(
    "repair",
    short_help="Give a profile the build IDs that it lacks.",
    epilog=exit_status(
        [
            "buildidfs repair perf.data -o repaired.data",
            "buildidfs repair --assign /app/run=8e9f perf.data -o repaired.data",
            "perf --buildid-dir /buildid/perf report -i repaired.data",
        ],
        {
            2: "not a perf.data file, OUT cannot be written, or --assign does not fit FILE",
            3: "written, but some files have no build ID, or FILE is not whole",
            11: "no store at that place; 13 unknown format",
        },
    ),
)
@click.argument("file", metavar="FILE", type=AnyPath())
@click.option(
    "-o",
    "--output",
    "out",
    metavar="OUT",
    required=True,
    type=AnyPath(),
    help="Write the new profile to OUT.",
)
@click.option(
    "--assign",
    "assigned",
    metavar="PATH=ID",
    multiple=True,
    help="Give build ID ID to mappings of PATH that have none.",
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def repair(session: Session, file: str, out: str, assigned: tuple[str, ...], json_: bool) -> int:
    """Write a copy of the perf.data file FILE to OUT, and add the missing build IDs.

    This is for profiles of containers that are gone, which perf recorded without build IDs. The
    captures and the journal tell which file was at a path at a time. A mapping stays unchanged if
    its build ID is not certain, and is listed if it has samples.
    """
    from buildidfs.profile import repair as repairs

    with session.open_store() as store, session.progress("Repairing", "record") as progress:
        done = repairs.repair(
            store,
            os.fsencode(file),
            os.fsencode(out),
            assigned=dict(_assignment(store, each) for each in assigned),
            progress=progress,
        )
    if json_:
        _json(done)
    else:
        _text(done, quiet=session.is_quiet)
    return IncompleteError.exit_code if done.unresolved or done.incomplete else 0


def _assignment(store: Store, text: str) -> tuple[bytes, BuildId]:
    """Return the path and the build ID in ``PATH=ID``; a unique prefix of a known ID is enough.

    Raises `UsageError`.
    """
    from buildidfs.catalog import requested_id

    path, _, build_id = text.rpartition("=")
    if not path.startswith("/"):
        raise click.UsageError(f"--assign wants PATH=ID with an absolute path, not {text!r}")
    return os.fsencode(path), requested_id.future_build_id(store, build_id)


def _json(done: Repaired) -> None:
    json_line(
        {
            "known": done.known,
            "resolved": done.resolved,
            "renamed": [
                {**path_fields(name), "build_id": build_id.hex()}
                for name, build_id in done.renamed.items()
            ],
            "unresolved": [
                {
                    **path_fields(each.path),
                    "container": each.container,
                    "samples": each.samples,
                    "why": each.why,
                    "namesakes": [
                        {"build_id": build_id.hex(), **path_fields(path)}
                        for build_id, path in each.namesakes
                    ],
                }
                for each in done.unresolved
            ],
            "generated": [
                {
                    "pid": each.pid,
                    "comm": each.comm,
                    "container": each.container,
                    "name": each.name.decode(),
                    "build_id": each.build_id.hex(),
                    "functions": each.functions,
                }
                for each in done.generated
            ],
            "notes": done.notes,
            "incomplete": done.incomplete,
        }
    )


def _text(done: Repaired, *, quiet: bool) -> None:
    if not quiet:
        click.echo(f"{counted(done.resolved, 'file')} resolved, {done.known} had a build ID before")
        for name in sorted(done.renamed):
            click.echo(f"renamed: {printable(name)}")
        for generated in done.generated:
            whose = f" in {generated.container}" if generated.container else ""
            click.echo(
                f"{printable(generated.name)}: generated code of"
                f" {printable(generated.comm.encode())}{printable(whose.encode())},"
                f" {counted(generated.functions, 'function')}"
            )
        for note in done.notes:
            terminal.say(note)
    if done.incomplete:
        terminal.complain(one_line(done.incomplete))
    if not done.unresolved:
        return
    terminal.complain(f"{counted(len(done.unresolved), 'file')} without a build ID")
    for each in done.unresolved[:_SHOWN]:
        click.echo(
            f"    {counted(each.samples, 'sample')}  {printable(each.path)}: {each.why}", err=True
        )
        for build_id, path in each.namesakes:
            hint = f"the store has a file of that name: {build_id} at {printable(path)}"
            click.echo(f"        {hint}; if it is this one: --assign", err=True)
    if len(done.unresolved) > _SHOWN:
        click.echo(f"    and {len(done.unresolved) - _SHOWN} more, see --json", err=True)
