# SPDX-License-Identifier: Apache-2.0
"""``buildidfs why``: the reasons why a frame or a file has no name, and the remedies."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

import click

from buildidfs.catalog import remedies
from buildidfs.cli import terminal
from buildidfs.cli.common import BuildIdArgument, Session, container_option, exit_status
from buildidfs.cli.output import counted, json_line, one_line, printable
from buildidfs.errors import ArtifactMissing, IncompleteError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.answers import Explained
    from buildidfs.profile.why import Answer, Explainer

_GROUPS: Final = 10
_FILES: Final = 5
_SINGULAR: Final = {"binaries": "binary"}


@click.command(
    "why",
    short_help="Explain why a frame or a file has no name.",
    epilog=exit_status(
        [
            "buildidfs why perf.data",
            "buildidfs why perf.data 0x7f3c5a1e2f40",
            "buildidfs why perf.data '*/libcrypto.so*'",
            "buildidfs why 8e9f",
            "buildidfs why /usr/lib/x86_64-linux-gnu/libc.so.6 --json | jq .findings",
        ],
        {
            2: "neither a profile, nor a core file, nor a build ID",
            3: "some of the file could not be read",
            11: "no store at that place; 13 unknown format",
            30: "nothing is known of that path or build ID, or no sample is there",
        },
    ),
)
@click.argument("what", metavar="FILE|ID|PATH", type=BuildIdArgument())
@click.argument("frame", metavar="[FRAME]", required=False)
@container_option("Only files of this container; PATH means the file seen there in it.")
@click.option(
    "--all", "all_", is_flag=True, help="Print all reasons and files, not only the first."
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object for each file.")
@click.pass_obj
def why(
    session: Session, what: str, frame: str | None, container: str | None, all_: bool, json_: bool
) -> int:
    """Say why names are missing, and the remedy: a package, an option, a command.

    FILE is a perf.data file or a core file. The command explains all its files without symbols, or
    only those at FRAME: an address, a path, the end of a path, or a pattern, as perf script prints
    them. For a build ID, or the file at PATH, it explains each file that a debugger would miss.
    """
    from buildidfs.catalog import requested_id
    from buildidfs.profile import inputs
    from buildidfs.profile.why import Explainer

    path = os.fsencode(what)
    is_file = requested_id.is_path(what) and inputs.is_profile_or_core(path)
    if frame is not None and not is_file:
        raise click.UsageError("FRAME belongs to a profile or a core file")
    with session.open_store() as store:
        explainer = Explainer(store)
        if not is_file:
            each = explainer.build_id(requested_id.future_build_id(store, what, container))
            json_line(each) if json_ else _print_one(session, each)
            return 0
        with session.progress("Reading", "record") as progress:
            answer = explainer.file(path, frame, container=container, progress=progress)
        if json_:
            for each in answer.files:
                json_line(each)
        else:
            if answer.unrepaired is not None:
                terminal.say(session.as_given(remedies.unrepaired(answer.unrepaired, path)))
            _print_groups(session, explainer, answer, bounded=not all_)
        sys.stdout.flush()
    return _end(session, path, answer)


def _end(session: Session, path: bytes, answer: Answer) -> int:
    """Say why nothing, or not everything, is explained; return the exit status."""
    if answer.incomplete:
        terminal.complain(one_line(answer.incomplete))
    if not answer.weight:
        terminal.complain(f"{printable(path)} has no {answer.unit}: there is nothing to explain")
    elif not answer.files:
        session.say_why_empty(f"all of {printable(path)} has symbols in the store")
    if answer.incomplete:
        return IncompleteError.exit_code
    return 0 if answer.weight else ArtifactMissing.exit_code


def _print_one(session: Session, each: Explained) -> None:
    click.echo(f"{each.build_id}")
    if each.path:
        _print_clause("file", f"{printable(each.raw_path)} in {one_line(each.where)}")
    for finding in each.findings:
        _print_clause("why", finding.why)
        _print_remedy(session, finding.remedy, finding.command, (finding.unknown or "").split())


def _print_groups(session: Session, explainer: Explainer, answer: Answer, *, bounded: bool) -> None:
    """Print the files in groups by reason; the group with the most weight comes first."""
    groups: dict[tuple[str, str, str | None], list[Explained]] = {}
    unit = answer.unit
    for each in answer.files:
        finding = each.findings[0]
        step = (
            finding.package.manager if finding.package else finding.command
        )  # packages are installed together
        reason = remedies.without_time(finding.why)
        groups.setdefault((reason, finding.remedy, step), []).append(each)
    order = sorted(groups.items(), key=lambda item: -_weight(item[1]))
    for (reason, remedy, _), members in order[: _GROUPS if bounded else None]:
        reasons = {each.findings[0].why for each in members}
        reason = reasons.pop() if len(reasons) == 1 else reason
        weight = _weight(members)
        share = sum(each.share or 0.0 for each in members)
        count = counted(weight, _SINGULAR.get(unit, unit.removesuffix("s")), unit)
        terminal.say(f"{count}: {one_line(reason)}", label=f"{share:6.1%}", indent=8)
        for each in members[: _FILES if bounded else None]:
            known = f"  {each.build_id[:12]}" if each.build_id is not None else ""
            place = f"{printable(each.raw_path)} in {one_line(each.where)}{known}"
            terminal.say(place, label=f"        {each.share or 0.0:6.1%}", indent=16)
        if bounded and len(members) > _FILES:
            click.echo(f"        and {counted(len(members) - _FILES, 'more file')}, see --all")
        command, unknown = _command(explainer, members)
        _print_remedy(session, remedy, command, unknown)
    if bounded and len(order) > _GROUPS:
        click.echo(f"and {counted(len(order) - _GROUPS, 'more reason')}, see --all")


def _weight(files: list[Explained]) -> int:
    return sum(each.weight or 0 for each in files)


def _command(explainer: Explainer, files: list[Explained]) -> tuple[str | None, list[str]]:
    """Return the first step of the remedy for files with the same reason, and the debug packages
    that apt does not know.
    """
    findings = [each.findings[0] for each in files]
    packages = [each.package for each in findings if each.package is not None]
    return explainer.install(packages) if packages else (findings[0].command, [])


def _print_remedy(
    session: Session, remedy: str, command: str | None, unknown: Iterable[str]
) -> None:
    _print_clause("remedy", remedy)
    if command:  # for copying: it stays on one line
        click.echo(f"{'run':8}{one_line(session.as_given(command))}")
    if names := " ".join(unknown):
        _print_clause("unknown", f"apt does not know {one_line(names)}")


def _print_clause(name: str, text: str) -> None:
    """Print a name, and after it a clause about it."""
    terminal.say(one_line(text), label=name, indent=8)
