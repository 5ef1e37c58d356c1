# SPDX-License-Identifier: Apache-2.0
"""``buildidfs coverage``: show how much of a profile, a core file or the running programs can be
read.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Final

import click
from msgspec import structs

from buildidfs.answers import CoverageAnswer, CoverageRow, CoverageShares
from buildidfs.catalog import remedies
from buildidfs.catalog.containers import Names, meant
from buildidfs.cli import table, terminal
from buildidfs.cli.common import AnyPath, Session, container_option, exit_status
from buildidfs.cli.output import json_line, one_line, path_fields
from buildidfs.cli.table import Cell, Column
from buildidfs.errors import ArtifactMissing, IncompleteError

if TYPE_CHECKING:
    from buildidfs.catalog.coverage import Coverage

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
        Column("share", "SHARE", lambda row: row.weight / whole if whole else 0.0, table.SHARE),
        Column("held", "HELD", _held, _HELD),
        Column("build_id", "BUILD ID", lambda row: row.build_id, table.HEX),
        Column("container", "CONTAINER", lambda row: row.container, table.LABEL),
        Column("path", "PATH", lambda row: row.raw_path, table.PATH),
        Column("why", "WHY", lambda row: row.why or None, table.LABEL, 120),
    )


@click.command(
    "coverage",
    short_help="Show the share of a profile or core file that has names.",
    epilog=exit_status(
        [
            "buildidfs coverage perf.data",
            "buildidfs coverage perf.data --container shop/cart-7d9f",
            "buildidfs coverage --live",
            "buildidfs coverage --fail-under 95 --json perf.data | jq .coverage",
        ],
        {
            2: "neither a perf.data nor a core file",
            3: "some of the file, or some processes, could not be read",
            11: "no store at that place; 13 unknown format",
            30: "less than --fail-under per cent have symbols",
        },
    ),
)
@click.argument("file", metavar="[FILE]", required=False, type=AnyPath())
@click.option("--live", is_flag=True, help="Count the files that running processes map now.")
@container_option("Count only this container: its name, pod, label, or the beginning of its ID.")
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
    live: bool,
    container: str | None,
    fail_under: float | None,
    layout: table.Layout,
) -> int:
    """Print for which share of the samples in FILE the store has executable, symbols and debuginfo.

    FILE is a perf.data file. The table lists containers and binaries, those without symbols first,
    with the reason. For a core file the command counts the binaries that it names. With --live it
    counts the files that all processes have mapped executable.
    """
    from buildidfs.profile import inputs

    if live == (file is not None):
        raise click.UsageError("name a FILE, or use --live")
    noun = "file" if file is None else "record"
    with session.open_store() as store, session.progress("Reading", noun) as progress:
        if file is None:
            found = inputs.coverage_of_processes(store, session.settings, progress=progress)
        else:
            found = inputs.coverage_of_file(store, os.fsencode(file), progress=progress)
        if container is not None:
            is_meant = meant(store, container)
            found.rows = [row for row in found.rows if is_meant(row.container)]
        names = Names(store)
        for row in found.rows:
            names.of(row.container)  # while the store is open
    share = found.unrepaired()
    is_text = not (layout.is_for_programs or session.is_quiet)
    if file is not None and share is not None and is_text:
        terminal.say(session.as_given(remedies.unrepaired(share, os.fsencode(file))))
    return show(found, names, layout, fail_under=fail_under, quiet=session.is_quiet)


def show(
    coverage: Coverage,
    names: Names,
    layout: table.Layout,
    *,
    fail_under: float | None = None,
    quiet: bool = False,
) -> int:
    """Print the rows with names and those without; return the exit code.

    The exit code is 30 if less than ``fail_under`` per cent have symbols, or if there is nothing to
    name; 3 if part of the input could not be read; else 0.
    """
    answer = _answer(coverage, names)
    columns = table.named(_columns(coverage.weight), names.short)
    if layout.is_json:
        json_line(structs.replace(answer, rows=list(layout.choose(columns, answer.rows))))
    elif not quiet:
        layout.print(columns, answer.rows, most=_SHOWN)
        if not layout.is_for_programs:
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
        terminal.say(why, label=f"{weight / coverage.weight:6.1%}", indent=8)
    terminal.say(_shares(coverage) if coverage.weight else f"0 {coverage.unit}")
    for note in coverage.notes:
        terminal.say(note)


def _shares(coverage: Coverage) -> str:
    return (
        f"{coverage.weight} {coverage.unit}: executable {coverage.executable():.2%},"
        f" symbols {coverage.symbols():.2%}"
        f" (with dynamic ones {coverage.dynamic_symbols():.2%}),"
        f" debuginfo {coverage.debuginfo():.2%}"
    )
