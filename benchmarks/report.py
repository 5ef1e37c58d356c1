# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: rows of `what | bar | measured | ok`, as a table or as JSON."""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_COMPARE: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "<": operator.lt,
    "=": operator.eq,
}


@dataclass(frozen=True)
class Row:
    """One measured value against one bar.

    ``value`` and ``limit`` are in ``unit`` (a ratio when that is empty). ``detail`` holds the
    numbers behind a ratio, for people.
    """

    what: str
    sign: str
    limit: float
    value: float
    unit: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """True if the bar is met; a value that is not a number never meets one."""
        return _COMPARE[self.sign](self.value, self.limit)

    @property
    def bar(self) -> str:
        """The bar as text."""
        return f"{self.sign} {_number(self.limit)}{self._suffix}"

    @property
    def measured(self) -> str:
        """The value as text."""
        return f"{_number(self.value)}{self._suffix}"

    @property
    def _suffix(self) -> str:
        return f" {self.unit}" if self.unit else ""


@dataclass(frozen=True)
class Failure:
    """A benchmark that ended without a result."""

    what: str
    reason: str


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e9:
        return str(int(value))
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


def table(rows: Sequence[Row], failures: Sequence[Failure] = ()) -> str:
    """The rows in aligned columns, the numbers behind each on the right."""
    cells = [("what", "bar", "measured", "ok", "")]
    cells += [(r.what, r.bar, r.measured, "yes" if r.ok else "NO", r.detail) for r in rows]
    cells += [(f.what, "", "failed", "NO", " ".join(f.reason.split())[:200]) for f in failures]
    widths = [max(len(row[column]) for row in cells) for column in range(4)]
    lines = []
    for row in cells:
        left = " | ".join(text.ljust(width) for text, width in zip(row[:4], widths, strict=True))
        lines.append(f"{left} | {row[4]}".rstrip())
    lines.insert(1, "-+-".join("-" * width for width in widths) + "-+-")
    return "\n".join(lines)


def json_lines(rows: Sequence[Row], failures: Sequence[Failure] = ()) -> str:
    """One JSON object a line, rows first."""
    objects = [
        {**asdict(row), "bar": row.bar, "measured": row.measured, "ok": row.ok} for row in rows
    ]
    objects += [{**asdict(failure), "ok": False} for failure in failures]
    return "\n".join(json.dumps(item) for item in objects)
