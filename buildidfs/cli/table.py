# SPDX-License-Identifier: Apache-2.0
"""Tables in the common form of all commands.

A command describes its columns once (`Column`), takes the options of tables (`options`) and gives
the rows to `TableOptions.print`. On a terminal a table has a header, ages, rounded sizes and the
first digits of build IDs, and fits the width. In a pipe or a file it has one line for each row
without a header: the cells in full with a TAB between them, times in ISO 8601, sizes in bytes.
Each row is the struct that ``--json`` prints.
"""

from __future__ import annotations

import functools
import re
import sys
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import click

from buildidfs.cli import terminal
from buildidfs.cli.output import json_line, one_line, printable
from buildidfs.wording import ago, moment, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.located import InContainer, Located
    from buildidfs.model import Kind

Row = TypeVar("Row")
RowIn = TypeVar("RowIn", contravariant=True)

SHORT_ID: Final = 12
"""The digits of a build ID that a table on a terminal shows."""

_MEASURED: Final = 200  # the first rows tell how wide the columns are
_GAP: Final = "  "
_NARROWEST: Final = 8  # the least width of a column that is cut
_NONE: Final = "-"
_SHORT_KINDS: Final = {"executable": "exe", "debuginfo": "debug"}


class Cell(NamedTuple):
    """The two forms of a value: for a person on a terminal, and in full for other output.

    ``right`` aligns the value to the right, for numbers. With ``cut`` the column is shortened if
    the terminal is too narrow; with ``late`` only after all other columns. ``colour`` returns a
    colour for a terminal, or None.
    """

    person: Callable[[Any], str]
    full: Callable[[Any], str]
    right: bool = False
    cut: bool = False
    colour: Callable[[Any], str | None] | None = None
    late: bool = False


class Column(NamedTuple, Generic[RowIn]):
    """A column: the name of its field, its header, and the form of its value in a row.

    A terminal of less than ``least`` columns does not show the column, unless the table is sorted
    by it. ``value`` returns the value of a row if it is not the attribute ``field``. The value None
    is an empty cell.
    """

    field: str
    header: str
    cell: Cell
    least: int = 0
    value: Callable[[RowIn], Any] | None = None

    def of(self, row: RowIn) -> Any:
        """Return the value of a row."""
        return getattr(row, self.field) if self.value is None else self.value(row)


def _label(text: str) -> str:
    return printable(text)


def _kinds(kinds: Iterable[Kind]) -> str:
    names = (kind.name.lower() for kind in kinds)
    return "+".join(_SHORT_KINDS.get(name, name) for name in names)


TEXT: Final = Cell(_label, _label)
LABEL: Final = Cell(_label, _label, cut=True)
ANSWER: Final = LABEL._replace(late=True)
"""A column with an answer, such as a version or a reason. It is cut last, because its end
matters.
"""
BYTES: Final = Cell(printable, printable)
PATH: Final = Cell(printable, printable, cut=True)
COUNT: Final = Cell(str, str, right=True)
SIZE: Final = Cell(size, str, right=True)
AGE: Final = Cell(ago, moment)
KINDS: Final = Cell(_kinds, _kinds)
BUILD_ID: Final = Cell(lambda text: _label(str(text))[:SHORT_ID], lambda text: _label(str(text)))
SHARE: Final = Cell(lambda share: f"{share:.1%}", lambda share: f"{share:.6g}", right=True)


CONTAINER: Final[Column[InContainer]] = Column(
    "container", "CONTAINER", LABEL, value=lambda row: row.container_called
)
LOCATION: Final[Column[Located]] = Column("path", "PATH", PATH, value=lambda row: row.raw_path)
"""The columns of the container and of the path that most tables have."""


_FIELD: Final = re.compile(r"\{(\w+)\}")


class TableOptions(NamedTuple):
    """The options of a table: ``--sort``, ``--limit``, ``--format``, ``--no-trunc``, ``--json``."""

    sort: str | None = None
    limit: int | None = None
    uncut: bool = False
    is_json: bool = False
    form: str | None = None

    def choose(self, columns: Sequence[Column[Row]], rows: Iterable[Row]) -> Iterable[Row]:
        """Return the rows in the requested order, up to the limit."""
        if self.sort is not None:
            value = _column(columns, self.sort.removeprefix("-"), "--sort").of
            rows = sorted(rows, key=lambda row: _key(value(row)), reverse=self.sort.startswith("-"))
        return islice(rows, self.limit) if self.limit else rows

    def print(
        self,
        columns: Sequence[Column[Row]],
        rows: Iterable[Row],
        objects: Callable[[Row], Iterable[object]] = lambda row: (row,),
        *,
        most: int = 0,
    ) -> int:
        """Print a table on standard output, and return the number of its rows.

        With ``--json`` the ``objects`` of each row are printed, which is the row itself unless
        given. On a terminal and without ``--limit`` only the first ``most`` rows are printed, 0 for
        all.
        """
        counted = 0

        def counting(rows: Iterable[Row]) -> Iterator[Row]:
            nonlocal counted
            for counted, row in enumerate(rows, 1):  # noqa: B007
                yield row

        rows = counting(self.choose(columns, rows))
        lines: Iterable[str] = ()
        if self.is_json:
            for row in rows:
                for each in objects(row):
                    json_line(each)
        elif self.form is not None:
            form = self.form
            lines = (_filled(form, columns, row) for row in rows)
        elif sys.stdout.isatty():
            lines = self._aligned(columns, rows, 0 if self.limit else most)
        else:
            lines = ("\t".join(_full(each, row) or _NONE for each in columns) for row in rows)
        for line in lines:
            sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        return counted

    def lines(self, columns: Sequence[Column[Row]], rows: Iterable[Row]) -> list[str]:
        """Return the lines of a table for a terminal, the header first."""
        return list(self._aligned(columns, iter(self.choose(columns, rows)), 0))

    def _aligned(
        self, columns: Sequence[Column[Row]], rows: Iterator[Row], most: int
    ) -> Iterator[str]:
        """Yield the lines for a terminal, the header first; no lines if there is no row."""
        limit = None if self.uncut else terminal.width(sys.stdout)
        make = _full if self.uncut else _short
        first = list(islice(rows, most or _MEASURED))
        if not first:
            return
        shown = columns if limit is None else self._shown(columns, first, limit)
        headers = [each.header for each in shown]
        cells = [[make(each, row) or _NONE for each in shown] for row in first]
        widths = [max(map(terminal.cells, column)) for column in zip(headers, *cells, strict=True)]
        if limit is not None:
            _shrink(shown, widths, limit)
        coloured = terminal.has_colour(sys.stdout)
        header = _line(shown, widths, headers, cut=limit is not None)
        yield click.style(header, bold=True) if coloured else header
        for row in first if most else chain(first, rows):
            texts = [make(each, row) or _NONE for each in shown]
            row_or_none = row if coloured else None
            yield _line(shown, widths, texts, cut=limit is not None, colours_of=row_or_none)
        if others := sum(1 for _ in rows):
            yield f"and {others} more, see --limit"

    def _shown(
        self, columns: Sequence[Column[Row]], rows: Sequence[Row], limit: int
    ) -> list[Column[Row]]:
        """Return the columns for which a terminal has room.

        If ``rows`` are all rows of the table, a narrow terminal does not show an empty column of
        names.
        """
        empty = [
            each
            for each in columns
            if each.cell.cut
            and len(rows) < _MEASURED
            and any(limit < other.least for other in columns)
            and not any(_short(each, row) for row in rows)
        ]
        room = limit + sum(len(each.header) + len(_GAP) for each in empty)
        sorted_by = (self.sort or "").removeprefix("-")
        return [
            each
            for each in columns
            if each not in empty and (room >= each.least or each.field == sorted_by)
        ]


def options(
    *tables: Sequence[Column[Any]], json: str = "Print one JSON object per line."
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of tables; it gets them as one argument ``layout``.

    `TableOptions` refuses fields that the printed table lacks. ``json`` is the help for ``--json``;
    empty for a command without that option.
    """
    columns = list({each.field: each for columns in tables for each in columns}.values())
    fields = ", ".join(each.field for each in columns)
    first, *_, last = tables[0]
    example = f"'{{{first.field}}} {{{last.field}}}'"
    added = (
        click.option(
            "--sort",
            metavar="FIELD",
            shell_complete=lambda ctx, param, word: [
                f"{sign}{each.field}"
                for sign in ("", "-")
                for each in columns
                if f"{sign}{each.field}".startswith(word)
            ],
            help=f"Sort by a field, or by -FIELD in descending order: {fields}.",
        ),
        click.option(
            "--limit",
            metavar="N",
            type=click.IntRange(min=1),
            default=None,
            help="Print at most N rows.",
        ),
        click.option(
            "--format",
            "form",
            metavar="TEXT",
            help=f"Print TEXT for each row, with fields in braces: {example}.",
        ),
        click.option(
            "--no-trunc",
            "uncut",
            is_flag=True,
            help="Print all columns on a terminal, and cut nothing.",
        ),
        *((click.option("--json", "is_json", is_flag=True, help=json),) if json else ()),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_layout(
            *args: Any,
            sort: str | None,
            limit: int | None,
            uncut: bool,
            form: str | None,
            is_json: bool = False,
            **rest: Any,
        ) -> Any:
            if sort is not None:
                _column(columns, sort.removeprefix("-"), "--sort")
            if form is not None and is_json:
                raise click.UsageError("--format and --json contradict each other")
            for field in _FIELD.findall(form or ""):
                _column(columns, field, "--format")
            layout = TableOptions(sort, limit, uncut, is_json, form)
            return command(*args, layout=layout, **rest)

        for option in reversed(added):
            option(with_layout)
        return with_layout

    return decorate


def _filled(form: str, columns: Sequence[Column[Row]], row: Row) -> str:
    """Return a text with the values of a row in place of the fields in braces."""
    return _FIELD.sub(lambda found: _full(_column(columns, found[1], "--format"), row), form)


def _column(columns: Sequence[Column[Row]], field: str, option: str) -> Column[Row]:
    """Return the column of a field that an option names. Raises `click.UsageError`."""
    for each in columns:
        if each.field == field:
            return each
    known = ", ".join(each.field for each in columns)
    raise click.UsageError(f"{option}: no field {one_line(field)!r}; there are {known}")


def _key(value: Any) -> tuple[bool, Any]:
    return value is not None, value


def _short(column: Column[Row], row: Row) -> str:
    value = column.of(row)
    return "" if value is None else column.cell.person(value)


def _full(column: Column[Row], row: Row) -> str:
    value = column.of(row)
    return "" if value is None else column.cell.full(value)


def _shrink(columns: Sequence[Column[Row]], widths: list[int], limit: int) -> None:
    """Shorten the columns that may be cut until the line fits, the widest first."""
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - limit
    loose = [number for number, each in enumerate(columns) if each.cell.cut]
    while over > 0 and (wide := [n for n in loose if widths[n] > _NARROWEST]):
        widest = max(wide, key=lambda number: (not columns[number].cell.late, widths[number]))
        widths[widest] -= 1
        over -= 1


def _line(
    columns: Sequence[Column[Row]],
    widths: Sequence[int],
    cells: Sequence[str],
    *,
    cut: bool,
    colours_of: Row | None = None,
) -> str:
    """Return a line of a table, in the colours of the row."""
    parts = []
    for number, (column, width, cell) in enumerate(zip(columns, widths, cells, strict=True), 1):
        text = terminal.cut(cell, width) if cut and column.cell.cut else cell
        room = " " * (width - terminal.cells(text))
        if colours_of is not None and column.cell.colour is not None:
            text = terminal.coloured(text, column.cell.colour(column.of(colours_of)))
        last = number == len(columns)
        parts.append(room + text if column.cell.right else text if last else text + room)
    return _GAP.join(parts)
