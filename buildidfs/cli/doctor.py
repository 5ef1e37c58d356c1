# SPDX-License-Identifier: Apache-2.0
"""``buildidfs doctor``: check if this machine is fit for capturing, and print the remedies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
import msgspec

from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line
from buildidfs.errors import CapabilityError, IncompleteError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.doctor import Finding

_INDENT: Final = 10
_COLOURS: Final = {"ok": "green", "degraded": "yellow", "failed": "red"}


@click.command(
    "doctor",
    short_help="Check kernel, privileges, limits, FUSE, clock and store.",
    epilog=exit_status(
        [
            "buildidfs doctor",
            "buildidfs -q doctor",
            "buildidfs doctor --json | jq 'select(.state == \"failed\")'",
        ],
        {
            3: "something failed: captures are missing, or nothing can be mounted",
            60: "a privilege is missing, which may have caused the other failures",
        },
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object for each finding.")
@click.pass_obj
def doctor(session: Session, json_: bool) -> int:
    """Check the kernel, privileges, limits, FUSE, the clock and the store; change nothing.

    Each finding is ok, degraded (it costs more, promises less, or may fail soon) or failed. A
    finding that is not ok has its remedy. With -q the command prints only these.
    """
    from buildidfs.doctor import PRIVILEGES, examine

    failed: set[str] = set()
    area = ""
    alike: list[Finding] = []
    for finding in _shown(examine(session.unchecked_store_path()), failed, session.is_quiet):
        if json_:
            json_line(msgspec.structs.asdict(finding))
            continue
        if alike and (finding.area != area or _general(finding) != _general(alike[0])):
            _say_remedy(alike)
            alike = []
        if finding.area != area:
            click.echo(f"{finding.area}:")
            area = finding.area
        state = terminal.coloured(finding.state, _COLOURS[finding.state])
        terminal.say(f"{finding.name}: {finding.found}", label=state, indent=_INDENT)
        alike.append(finding)
    _say_remedy(alike)
    if PRIVILEGES in failed:
        return CapabilityError.exit_code
    return IncompleteError.exit_code if failed else 0


def _general(finding: Finding) -> str:
    """Return the remedy for a finding without the name of the finding."""
    return finding.remedy.replace(finding.name, "")


def _say_remedy(alike: list[Finding]) -> None:
    """Print the remedy for one or more findings that are printed above it, and differ only in their
    names.
    """
    if alike and (remedy := alike[0].remedy):
        names = ", ".join(each.name for each in alike)
        text = remedy.replace(alike[0].name, names)
        terminal.say(text, label=f"{'':{_INDENT}}->", indent=_INDENT + 3)


def _shown(findings: Iterator[Finding], failed: set[str], quiet: bool) -> Iterator[Finding]:
    """Yield the findings to be shown; add areas with a failure to ``failed``."""
    for finding in findings:
        if finding.state == "failed":
            failed.add(finding.area)
        if not quiet or finding.state != "ok":
            yield finding
