# SPDX-License-Identifier: Apache-2.0
"""``buildidfs check``: find and repair faults of the store."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import counted, json_line, size
from buildidfs.errors import IntegrityError, Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.cli.progress import Line
    from buildidfs.ingest.check import Checked, Options, Result


@click.command(
    "check",
    short_help="Check the store, and repair it.",
    epilog=exit_status(
        [
            "buildidfs check",
            "buildidfs check --verify-data",
            "buildidfs check --repair --verify-data",
            "buildidfs check --json | jq -r 'select(.state == \"lost\").sha256'",
        ],
        {
            12: "--repair needs a new index, but the store is in use (run buildidfs down)",
            20: "a fault was found, or a blob is lost; standard output has a line for each",
        },
    ),
)
@click.option(
    "--verify-data", is_flag=True, help="Also read all blobs; continue an interrupted run."
)
@click.option(
    "--from-start",
    is_flag=True,
    help="Do not continue an interrupted run; begin at the first blob.",
)
@click.option("--repair", is_flag=True, help="Repair the faults.")
@click.option(
    "--json", "json_", is_flag=True, help="Print one JSON object per fault, and a summary."
)
@click.pass_obj
def check(session: Session, verify_data: bool, from_start: bool, repair: bool, json_: bool) -> int:
    """Check the index against itself and against the blobs; the store may be in use.

    The command reads a blob only if its file is no longer the one that was written, or with
    --verify-data. A blob with other bytes is no longer served. --repair captures a damaged blob
    again from this host; if the host no longer has the file, the blob goes to quarantine. If a row
    has a fault, --repair makes a new index from the blobs, while nothing else uses the store.
    """
    from buildidfs.ingest import check as checking

    checked = checking.Checked()
    try:
        with session.progress("Checking", "") as line:
            options = checking.Options(verify_data, from_start, repair, _shown_by(line))
            for result in checking.check(session.store_path, session.settings, options, checked):
                if line is not None:
                    line.clear()
                (_as_json if json_ else _as_text)(result)
    except KeyboardInterrupt as error:
        if not checked.read_bytes:
            raise
        read = size(checked.read_bytes)
        raise Interrupted(f"{read} read; --verify-data goes on there") from error
    if json_:
        json_line(msgspec.structs.asdict(checked))
    elif not session.is_quiet:
        _summary(checked, options)
    return 0 if checked.is_sound else IntegrityError.exit_code


def _shown_by(line: Line | None) -> Callable[[str, int, int], None]:
    """Return a function that shows the progress of a check on a line."""
    from buildidfs.ingest import check as checking

    step = ""

    def show(what: str, done: int, of: int) -> None:
        nonlocal step
        if line is None:
            return
        if what != step:
            step = what
            line.restart()
        is_size = what == checking.READING
        line(done, what, size=done if is_size else 0, share=done / of if of else None)

    return show


def _as_text(result: Result) -> None:
    state = "" if result.state in ("found", "lost", "captured again") else f" ({result.state})"
    click.echo(f"{result.fault.text}{state}")


def _as_json(result: Result) -> None:
    fault = result.fault
    json_line(
        {
            "fault": fault.text,
            "state": result.state,
            "sha256": None if fault.digest is None else str(fault.digest),
            "build_id": None if fault.build_id is None else str(fault.build_id),
        }
    )


def _summary(checked: Checked, options: Options) -> None:
    words = [counted(checked.blobs, "blob")]
    if checked.read_bytes:
        words.append(f"{size(checked.read_bytes)} read")
    if checked.unreferenced:
        words.append(f"{checked.unreferenced} without a row")
    if checked.unknown:
        words.append(f"{checked.unknown} not identified")
    if checked.named:
        words.append(f"{checked.named} got the aliases that earlier versions did not write")
    words.append(counted(checked.faults, "fault") if checked.faults else "nothing is wrong")
    if options.repair and checked.faults:
        words.append(
            f"{checked.repaired} repaired, {checked.captured_again} captured again,"
            f" {checked.lost} lost"
        )
    click.echo(", ".join(words), err=True)
