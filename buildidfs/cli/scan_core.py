# SPDX-License-Identifier: Apache-2.0
"""``buildidfs scan core``: capture the binaries that core files are about."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import path_fields, printable
from buildidfs.cli.summary import as_json, report
from buildidfs.errors import IncompleteError

if TYPE_CHECKING:
    from buildidfs.app.cores import Binary, CoreScan, Dump


@click.command(
    "core",
    short_help="Capture the binaries that core files are about.",
    epilog=exit_status(
        [
            "buildidfs scan core core.4711",
            "buildidfs scan core --json core.4711 | jq '.cores[].binaries[]'",
        ],
        {
            3: "finished, but some files could not be read, or not to their end",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def scan_core(session: Session, paths: tuple[str, ...], json_: bool) -> int:
    """Capture the program and the libraries that were mapped when a core file was made.

    Which ones is told by the memory in it, also if none of them is left. They are looked for in
    running processes, at their paths on this host, and at those in the mount namespaces of running
    processes. The vDSO is taken from the core itself. What is missing is listed, with the reason.
    """
    from buildidfs.app import cores

    with session.open_store(create=True) as store, session.progress("Capturing") as show:
        scan = cores.scan_cores(
            store, session.settings, [os.fsencode(path) for path in paths], progress=show
        )
    if json_:
        as_json(scan.summary, cores=[_fields(dump) for dump in scan.dumps])
    else:
        _text(scan, quiet=session.is_quiet)
    return IncompleteError.exit_code if scan.summary.unreadable else 0


def _fields(dump: Dump) -> dict[str, object]:
    return {
        **path_fields(dump.path),
        "pid": dump.pid,
        "name": dump.name.decode("utf-8", "replace"),
        "arguments": dump.arguments.decode("utf-8", "replace"),
        "signal": dump.signal,
        "containers": dump.containers,
        "cut_off": dump.cut_off,
        "binaries": [_binary_fields(each) for each in dump.binaries],
    }


def _binary_fields(each: Binary) -> dict[str, object]:
    return {
        **path_fields(each.path),
        "build_id": None if each.build_id is None else each.build_id.hex(),
        "main": each.main,
        "deleted": each.deleted,
        "state": each.state,
        "why": each.why,
    }


def _text(scan: CoreScan, *, quiet: bool) -> None:
    report(scan.summary, quiet=quiet)
    if quiet:
        return
    for dump in scan.dumps:
        missing = [each for each in dump.binaries if each.why]
        click.echo(
            f"{printable(dump.path)}: {_whose(dump)}: {len(dump.binaries)} binaries,"
            f" {len(missing)} missing"
        )
        for each in missing:
            name = each.build_id.hex() if each.build_id is not None else "-"
            click.echo(f"    {name:40}  {printable(each.path) or '-'}: {each.why}")


def _whose(dump: Dump) -> str:
    """The process that a core is of, in words."""
    if not dump.name and not dump.pid:
        return "of an unknown process"  # its notes were cut off
    words = f"{printable(dump.name)} (pid {dump.pid}"
    if dump.signal:
        try:
            words += f", {signal.Signals(dump.signal).name}"
        except ValueError:
            words += f", signal {dump.signal}"
    words += ")"
    names = [printable(label.encode("utf-8", "surrogateescape")) for label in dump.containers]
    if any(names):
        words += f" of {', '.join(name or 'the host' for name in names)}"
    return words
