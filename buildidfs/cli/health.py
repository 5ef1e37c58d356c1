# SPDX-License-Identifier: Apache-2.0
"""The health of store and host: ``buildidfs check`` and ``buildidfs doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status, json_option
from buildidfs.cli.output import json_line
from buildidfs.errors import CapabilityError, IncompleteError, IntegrityError, Interrupted
from buildidfs.wording import counted, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.cli.output import ProgressLine
    from buildidfs.doctor import ProbeFinding
    from buildidfs.ingest.store_check import Checked, CheckOptions, Result


@click.command(
    "check",
    short_help="Check the store, and repair it.",
    epilog=exit_status(
        [
            "buildidfs check",
            "buildidfs check --repair --verify-data",
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
@json_option("Print one JSON object per fault, and a summary.")
@click.pass_obj
def check(session: Session, verify_data: bool, from_start: bool, repair: bool, json_: bool) -> int:
    """Check the index against itself and against the blobs; the store may be in use.

    The command reads a blob only if its file is no longer the one that was written, or with
    --verify-data. A blob with other bytes is no longer served. --repair captures a damaged blob
    again from this host; if the host no longer has the file, the blob goes to quarantine. If a row
    has a fault, --repair makes a new index from the blobs, while nothing else uses the store.
    """
    from buildidfs.ingest import store_check as checking

    checked = checking.Checked()
    try:
        with session.progress("Checking", "") as line:
            options = checking.CheckOptions(verify_data, from_start, repair, _shown_by(line))
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
        json_line(checked)
    elif not session.is_quiet:
        _summary(checked, options)
    return 0 if checked.is_sound else IntegrityError.exit_code


def _shown_by(line: ProgressLine | None) -> Callable[[str, int, int], None]:
    """Return a function that shows the progress of a check on a line."""
    from buildidfs.ingest import store_check as checking

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
            "sha256": fault.digest,
            "build_id": fault.build_id,
        }
    )


def _summary(checked: Checked, options: CheckOptions) -> None:
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
            f"{checked.repaired} repaired, {checked.recaptured} captured again, {checked.lost} lost"
        )
    click.echo(", ".join(words), err=True)


_INDENT: Final = 10
_COLOURS: Final = {"ok": "green", "degraded": "yellow", "failed": "red"}


@click.command(
    "doctor",
    short_help="Check kernel, privileges, limits, FUSE and store.",
    epilog=exit_status(
        [
            "buildidfs doctor",
            "buildidfs doctor --json | jq 'select(.state == \"failed\")'",
        ],
        {
            3: "something failed: captures are missing, or nothing can be mounted",
            60: "a privilege is missing, which may have caused the other failures",
        },
    ),
)
@json_option("Print one JSON object for each finding.")
@click.pass_obj
def doctor(session: Session, json_: bool) -> int:
    """Check the kernel, privileges, limits, FUSE and the store; change nothing.

    Each finding is ok, degraded (it costs more, promises less, or may fail soon) or failed. A
    finding that is not ok has its remedy. With -q the command prints only these.
    """
    from buildidfs.doctor import PRIVILEGES, examine

    failed: set[str] = set()
    area = ""
    alike: list[ProbeFinding] = []
    for finding in _shown(examine(session.unchecked_store_path()), failed, session.is_quiet):
        if json_:
            json_line(finding)
            continue
        if alike and (finding.area != area or _general(finding) != _general(alike[0])):
            _print_remedy(alike)
            alike = []
        if finding.area != area:
            click.echo(f"{finding.area}:")
            area = finding.area
        state = terminal.coloured(finding.state, _COLOURS[finding.state])
        terminal.print_text(f"{finding.name}: {finding.found}", label=state, indent=_INDENT)
        alike.append(finding)
    _print_remedy(alike)
    if PRIVILEGES in failed:
        return CapabilityError.exit_code
    return IncompleteError.exit_code if failed else 0


def _general(finding: ProbeFinding) -> str:
    """Return the remedy for a finding without the name of the finding."""
    return finding.remedy.replace(finding.name, "")


def _print_remedy(alike: list[ProbeFinding]) -> None:
    """Print the remedy for one or more findings that are printed above it, and differ only in their
    names.
    """
    if alike and (remedy := alike[0].remedy):
        names = ", ".join(each.name for each in alike)
        text = remedy.replace(alike[0].name, names)
        terminal.print_text(text, label=f"{'':{_INDENT}}->", indent=_INDENT + 3)


def _shown(
    findings: Iterator[ProbeFinding], failed: set[str], quiet: bool
) -> Iterator[ProbeFinding]:
    """Yield the findings to be shown; add areas with a failure to ``failed``."""
    for finding in findings:
        if finding.state == "failed":
            failed.add(finding.area)
        if not quiet or finding.state != "ok":
            yield finding
