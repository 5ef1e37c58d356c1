# SPDX-License-Identifier: Apache-2.0
"""Profiles and core files: ``buildidfs coverage``, ``why`` and ``repair``."""

from __future__ import annotations

import os
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

import click
from msgspec import structs

from buildidfs.answers import CoverageAnswer, CoverageRow, CoverageShares
from buildidfs.catalog import remedies
from buildidfs.catalog.containers import Names
from buildidfs.cli import table, terminal
from buildidfs.cli.common import (
    NO_STORE,
    AnyPath,
    BuildIdArgument,
    Session,
    container_option,
    exit_status,
    json_option,
)
from buildidfs.cli.output import json_line, one_line, path_fields, printable
from buildidfs.cli.table import Cell, Column
from buildidfs.errors import ArtifactMissing, IncompleteError
from buildidfs.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.answers import Explained
    from buildidfs.catalog.coverage import Coverage
    from buildidfs.model import BuildId
    from buildidfs.profile.repair import Repaired
    from buildidfs.profile.why import Explainer, UnnamedFiles
    from buildidfs.store import Store


_comm_option: Final = click.option(
    "--comm", metavar="NAME", help="Only samples of threads with this name, as perf prints it."
)
_SHOWN: Final = 40  # rows on a terminal
_REASONS: Final = 10
_COLOURS: Final = {"debuginfo": "green", "symbols": "green", "missing": "red"}
_HELD: Final = Cell(str, str, colour=lambda held: _COLOURS.get(held, "yellow"))


def _held(row: CoverageRow) -> str:
    """Return the best file that the store has of a binary, as one word."""
    if row.debuginfo:
        return "debuginfo"
    if row.symbols != "none":
        return "dynsym" if row.symbols == "dynsym" else "symbols"
    return "executable" if row.executable else "missing"


def _columns(whole: int) -> tuple[Column[CoverageRow], ...]:
    """Return the columns; the shares in them refer to the weight ``whole``."""
    return (
        Column("share", "SHARE", table.SHARE, value=lambda x: x.weight / whole if whole else 0.0),
        Column("held", "HELD", _HELD, value=_held),
        Column("build_id", "BUILD ID", table.BUILD_ID),
        table.CONTAINER,
        table.LOCATION,
        Column("why", "WHY", table.LABEL, 120),
    )


@click.command(
    "coverage",
    short_help="Show the share of a profile or core file that has names.",
    epilog=exit_status(
        [
            "buildidfs coverage perf.data",
            "buildidfs coverage --live",
        ],
        {
            2: "neither a perf.data nor a core file",
            3: "some of the file, or some processes, could not be read",
            **NO_STORE,
            30: "less than --fail-under per cent have symbols, or no sample is there",
        },
    ),
)
@click.argument("file", metavar="[FILE]", required=False, type=AnyPath())
@click.argument("frame", metavar="[FRAME]", required=False)
@click.option("--live", is_flag=True, help="Count the files that running processes map now.")
@container_option("Count only this container: its name, pod, label, or the beginning of its ID.")
@_comm_option
@click.option(
    "--fail-under",
    metavar="PCT",
    type=click.FloatRange(0, 100),
    help="Exit with 30 if less than this percentage has symbols.",
)
@table.options(_columns(0), json="Print one JSON object.")
@click.pass_obj
def coverage(
    session: Session,
    file: str | None,
    frame: str | None,
    live: bool,
    container: str | None,
    comm: str | None,
    fail_under: float | None,
    layout: table.TableOptions,
) -> int:
    """Print for which share of the samples in FILE the store has executable, symbols and debuginfo.

    FILE is a perf.data file. The table lists containers and binaries, those without symbols first,
    with the reason. For a core file the command counts the binaries that it names. With --live it
    counts the files that all processes have mapped executable. With FRAME it counts only the
    samples there; a FRAME is the same as for buildidfs why.
    """
    from buildidfs.profile import inputs
    from buildidfs.profile.selection import Selection

    if live == (file is not None):
        raise click.UsageError("name a FILE, or use --live")
    selection = Selection.of(frame, comm)
    noun = "file" if file is None else "record"
    with session.open_store() as store, session.progress("Reading", noun) as progress:
        if file is None:
            found = inputs.coverage_of_processes(
                store, session.settings, comm=comm, container=container, progress=progress
            )
        else:
            path = os.fsencode(file)
            found = inputs.coverage_of_file(
                store, path, selection=selection, container=container, progress=progress
            )
            found.rows = inputs.at_frame(found.rows, path, selection)
        names = Names(store)
        for row in found.rows:
            names.of(row.container)  # while the store is open
    gain = found.gain_of_repair()
    is_text = not (layout.is_json or session.is_quiet)
    if file is not None and gain is not None and is_text:
        terminal.print_text(session.as_given(remedies.unrepaired(gain, os.fsencode(file))))
    return show(found, names, layout, fail_under=fail_under, quiet=session.is_quiet)


def show(
    coverage: Coverage,
    names: Names,
    layout: table.TableOptions,
    *,
    fail_under: float | None = None,
    quiet: bool = False,
) -> int:
    """Print the rows with names and those without; return the exit code.

    The exit code is 30 if less than ``fail_under`` per cent have symbols, or if there is nothing to
    name; 3 if part of the input could not be read; else 0.
    """
    answer = _answer(coverage, names)
    columns = _columns(coverage.weight)
    if layout.is_json:
        json_line(structs.replace(answer, rows=list(layout.choose(columns, answer.rows))))
    elif not quiet:
        layout.print(columns, answer.rows, most=_SHOWN)
        _print_totals(coverage)
    if coverage.incomplete:
        terminal.complain(one_line(coverage.incomplete))
    if fail_under and not coverage.weight:
        terminal.complain(f"there are no {coverage.unit}, but --fail-under needs symbols for some")
        return ArtifactMissing.exit_code
    if fail_under is not None and 100 * coverage.symbols() < fail_under:
        terminal.complain(
            f"symbols for {coverage.symbols():.2%} of the {coverage.unit}, wanted {fail_under:g}%"
        )
        return ArtifactMissing.exit_code
    return IncompleteError.exit_code if coverage.incomplete else 0


def _answer(coverage: Coverage, names: Names) -> CoverageAnswer:
    """Return the answer that both text and JSON show, the rows without symbols first."""
    unrepaired = coverage.unrepaired()
    return CoverageAnswer(
        coverage.unit,
        coverage.weight,
        CoverageShares(
            round(coverage.executable(), 6),
            round(coverage.dynamic_symbols(), 6),
            round(coverage.symbols(), 6),
            round(coverage.debuginfo(), 6),
            round(coverage.symbols() if unrepaired is None else unrepaired, 6),
        ),
        coverage.notes,
        coverage.incomplete,
        [
            CoverageRow(
                **names.fields(row.container),
                **path_fields(row.path),
                build_id=None if row.build_id is None else row.build_id.hex(),
                weight=row.weight,
                executable=row.executable,
                symbols=row.symbols.name.lower(),
                debuginfo=row.debuginfo,
                why=row.why,
            )
            for row in coverage.worst_first()
        ],
    )


def _print_totals(coverage: Coverage) -> None:
    reasons: Counter[str] = Counter()
    for row in coverage.rows:
        reasons[remedies.without_time(row.why)] += row.weight
    del reasons[""]
    for why, weight in reasons.most_common(_REASONS):
        terminal.print_text(why, label=f"{weight / coverage.weight:6.1%}", indent=8)
    terminal.print_text(_shares(coverage) if coverage.weight else f"0 {coverage.unit}")
    for note in coverage.notes:
        terminal.print_text(note)


def _shares(coverage: Coverage) -> str:
    return (
        f"{coverage.weight} {coverage.unit}: executable {coverage.executable():.2%},"
        f" symbols {coverage.symbols():.2%}"
        f" (with dynamic ones {coverage.dynamic_symbols():.2%}),"
        f" debuginfo {coverage.debuginfo():.2%}"
    )


_GROUPS: Final = 10
_FILES: Final = 5
_SINGULAR: Final = {"binaries": "binary"}


@click.command(
    "why",
    short_help="Explain why a frame or a file has no name.",
    epilog=exit_status(
        [
            "buildidfs why perf.data",
            "buildidfs why perf.data /usr/lib/x86_64-linux-gnu/libc.so.6+0x26d90",
        ],
        {
            2: "neither a profile, nor a core file, nor a build ID",
            3: "some of the file could not be read",
            **NO_STORE,
            30: "nothing is known of that path or build ID, or no sample is there",
        },
    ),
)
@click.argument("what", metavar="FILE|ID|PATH", type=BuildIdArgument())
@click.argument("frame", metavar="[FRAME]", required=False)
@container_option("Only files of this container; PATH means the file seen there in it.")
@_comm_option
@click.option(
    "--all", "all_", is_flag=True, help="Print all reasons and files, not only the first."
)
@json_option("Print one JSON object for each file.")
@click.pass_obj
def why(
    session: Session,
    what: str,
    frame: str | None,
    container: str | None,
    comm: str | None,
    all_: bool,
    json_: bool,
) -> int:
    """Say why names are missing, and the remedy: a package, an option, a command.

    FILE is a perf.data file or a core file. The command explains all its files without symbols, or
    only those at FRAME, as perf prints it: an address, an offset in the file (0x1139, or
    libc.so.6+0x26d90), a path, the end of a path, or a pattern. For a build ID, or the file at
    PATH, it explains each file that a debugger would miss.
    """
    from buildidfs.catalog import requested_id
    from buildidfs.profile import inputs
    from buildidfs.profile.why import Explainer

    path = os.fsencode(what)
    is_file = requested_id.is_path(what) and inputs.is_profile_or_core(path)
    if (frame is not None or comm is not None) and not is_file:
        raise click.UsageError("FRAME and --comm belong to a profile or a core file")
    with session.open_store() as store:
        explainer = Explainer(store)
        if not is_file:
            try:
                build_id = requested_id.future_build_id(store, what, container)
            except ArtifactMissing:
                if container is None and requested_id.is_path(what):
                    inputs.refuse_other_file(path)
                raise
            each = explainer.build_id(build_id)
            json_line(each) if json_ else _print_one(session, each)
            return 0
        with session.progress("Reading", "record") as progress:
            answer = explainer.file(path, frame, container=container, comm=comm, progress=progress)
        if json_:
            for each in answer.files:
                json_line(each)
        else:
            if answer.gain is not None:
                terminal.print_text(session.as_given(remedies.unrepaired(answer.gain, path)))
            _print_groups(session, explainer, answer, bounded=not all_)
        sys.stdout.flush()
    return _end(session, path, answer)


def _end(session: Session, path: bytes, answer: UnnamedFiles) -> int:
    """Say why nothing, or not everything, is explained; return the exit status."""
    if answer.incomplete:
        terminal.complain(one_line(answer.incomplete))
    if not answer.weight:
        terminal.complain(f"{printable(path)} has no {answer.unit}: there is nothing to explain")
    elif not answer.files:
        session.explain_empty(f"all of {printable(path)} has symbols in the store")
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


def _print_groups(
    session: Session, explainer: Explainer, answer: UnnamedFiles, *, bounded: bool
) -> None:
    """Print the files in groups by reason; the group with the most weight comes first."""
    groups: dict[tuple[str, str, str | None], list[Explained]] = {}
    unit = answer.unit
    for each in answer.files:
        finding = each.findings[0]
        # One command installs all packages, so their files are one group.
        step = finding.package.manager if finding.package else finding.command
        reason = remedies.without_time(finding.why)
        groups.setdefault((reason, finding.remedy, step), []).append(each)
    order = sorted(groups.items(), key=lambda item: -_weight(item[1]))
    for (reason, remedy, _), members in order[: _GROUPS if bounded else None]:
        reasons = {each.findings[0].why for each in members}
        reason = reasons.pop() if len(reasons) == 1 else reason
        weight = _weight(members)
        share = sum(each.share or 0.0 for each in members)
        count = counted(weight, _SINGULAR.get(unit, unit.removesuffix("s")), unit)
        terminal.print_text(f"{count}: {one_line(reason)}", label=f"{share:6.1%}", indent=8)
        for each in members[: _FILES if bounded else None]:
            known = f"  {each.build_id[:12]}" if each.build_id is not None else ""
            place = f"{printable(each.raw_path)} in {one_line(each.where)}{known}"
            terminal.print_text(place, label=f"        {each.share or 0.0:6.1%}", indent=16)
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
    command, unknown = explainer.install(packages) if packages else ("", [])
    return command or findings[0].command, unknown


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
    terminal.print_text(one_line(text), label=name, indent=8)


_MOST_UNRESOLVED: Final = 20  # files that are named one by one


@click.command(
    "repair",
    short_help="Give a profile the build IDs that it lacks.",
    epilog=exit_status(
        [
            "buildidfs repair perf.data -o repaired.data",
            "perf --buildid-dir /buildid/perf report -i repaired.data",
        ],
        {
            2: "not a perf.data file, OUT cannot be written, or --assign does not fit FILE",
            3: "written, but some files have no build ID, or FILE is not whole",
            **NO_STORE,
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
@json_option()
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
        json_line(done)
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


def _text(done: Repaired, *, quiet: bool) -> None:
    if not quiet:
        click.echo(f"{counted(done.resolved, 'file')} resolved, {done.known} had a build ID before")
        for name in sorted(each.path for each in done.renamed):
            click.echo(f"renamed: {printable(name)}")
        for generated in done.generated:
            whose = f" in {generated.container}" if generated.container else ""
            click.echo(
                f"{printable(generated.name)}: generated code of"
                f" {printable(generated.comm)}{printable(whose)},"
                f" {counted(generated.functions, 'function')}"
            )
        for note in done.notes:
            terminal.print_text(note)
    if done.incomplete:
        terminal.complain(one_line(done.incomplete))
    if not done.unresolved:
        return
    terminal.complain(f"{counted(len(done.unresolved), 'file')} without a build ID")
    for each in done.unresolved[:_MOST_UNRESOLVED]:
        samples = counted(each.samples or 0, "sample")
        click.echo(f"    {samples}  {printable(each.path)}: {each.why}", err=True)
        for other in each.namesakes:
            at = f"{other.build_id} at {printable(other.path)}"
            hint = f"the store has a file of that name: {at}"
            click.echo(f"        {hint}; if it is this one: --assign", err=True)
    if len(done.unresolved) > _MOST_UNRESOLVED:
        click.echo(f"    and {len(done.unresolved) - _MOST_UNRESOLVED} more, see --json", err=True)
