# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG without style attributes, text or script, which a strict policy allows.

They stretch to the available width, so labels are text of the page around them. Colours are classes
of the style sheet, which has a light and a dark scheme.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final, NamedTuple

from markupsafe import Markup

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH: Final = 720
HEIGHT: Final = 160
COLOURS: Final = 8
_GAP_FACTOR: Final = 4.0


class Series(NamedTuple):
    """A line of a plot: pairs of x and y, in order of x; y is None if it is unknown."""

    name: str
    points: Sequence[tuple[float, float | None]]
    colour: int = 0


class Box(NamedTuple):
    """A rectangle of a treemap."""

    name: str
    value: int
    x: float
    y: float
    width: float
    height: float
    colour: int


def bar(share: float, colour: int = 0) -> Markup:
    """Return a bar that is filled to a share, 0 to 1. The page shows the number beside it."""
    width = round(100 * min(max(share, 0.0), 1.0), 1)
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="track" width="100" height="8"/>'
        '<rect class="f{}" width="{}" height="8"/></svg>'
    ).format(colour, width)


def lines(
    series: Sequence[Series],
    label: str,
    *,
    begin: float,
    end: float,
    top: float,
    limit: float | None = None,
    small: bool = False,
) -> Markup:
    """Return a plot of lines from ``begin`` to ``end``, from 0 to ``top``; ``limit`` is a dashed
    line.

    ``label`` is the description for screen readers.
    """
    height = 40 if small else HEIGHT
    drawn = [] if small else [_grid(height)]
    if limit is not None and 0 < limit <= top:
        drawn.append(
            Markup('<path class="limit" d="M0 {y}H{x}"/>').format(y=_y(limit, top, height), x=WIDTH)
        )
    for each in series:
        path = _path(each.points, begin, end, top, height)
        if path:
            drawn.append(Markup('<path class="line s{}" d="{}"/>').format(each.colour, path))
    return Markup(
        '<svg class="{}" viewBox="0 -2 {} {}" preserveAspectRatio="none" role="img"'
        ' aria-label="{}">{}</svg>'
    ).format("spark" if small else "plot", WIDTH, height + 4, label, Markup("").join(drawn))


def _grid(height: int) -> Markup:
    paths = [f"M0 {height * part // 4}H{WIDTH}" for part in range(5)]
    return Markup('<path class="grid" d="{}"/>').format("".join(paths))


def _y(value: float, top: float, height: int) -> float:
    return round(height - height * min(max(value / top if top else 0.0, 0.0), 1.0), 1)


def _path(
    points: Sequence[tuple[float, float | None]], begin: float, end: float, top: float, height: int
) -> str:
    """Return the path through the points, interrupted at long gaps."""
    known = [(x, y) for x, y in points if y is not None and begin <= x <= end]
    if not known:
        return ""
    span = max(end - begin, 1.0)
    steps = sorted(b[0] - a[0] for a, b in itertools.pairwise(known))
    gap = max(_GAP_FACTOR * steps[len(steps) // 2], span / 60) if steps else span
    parts = []
    before = None
    for x, y in known:
        command = "L" if before is not None and x - before <= gap else "M"
        at = f"{round((x - begin) / span * WIDTH, 1):g} {_y(y, top, height):g}"
        # A single point is drawn as a dot, by a line of no length.
        parts.append(f"{command}{at}" + (f"L{at}" if command == "M" else ""))
        before = x
    return "".join(parts)


def treemap(values: Sequence[tuple[str, int]]) -> tuple[Markup, list[Box]]:
    """Return a treemap of sections and sizes, the largest first, and its boxes for a legend."""
    boxes = _boxes([each for each in values if each[1] > 0])
    drawn = [
        Markup(
            '<rect class="f{}" x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}">'
            "<title>{}</title></rect>"
        ).format(box.colour, box.x, box.y, box.width, box.height, box.name)
        for box in boxes
    ]
    return (
        Markup(
            '<svg class="treemap" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img"'
            ' aria-label="Sections by size, as listed below">{}</svg>'
        ).format(WIDTH, HEIGHT, Markup("").join(drawn)),
        boxes,
    )


def _boxes(values: Sequence[tuple[str, int]]) -> list[Box]:
    """Divide the area along its longer side into two parts of about equal size, again and again."""
    boxes: list[Box] = []
    order = {name: number for number, (name, _) in enumerate(values)}

    def divide(part: Sequence[tuple[str, int]], x: float, y: float, w: float, h: float) -> None:
        if len(part) == 1:
            name, value = part[0]
            boxes.append(Box(name, value, x, y, w, h, min(order[name], COLOURS - 1)))
            return
        whole = sum(value for _, value in part)
        half, count = part[0][1], 1
        while count < len(part) - 1 and 2 * (half + part[count][1]) <= whole:
            half += part[count][1]
            count += 1
        share = half / whole
        if w >= h:
            divide(part[:count], x, y, w * share, h)
            divide(part[count:], x + w * share, y, w * (1 - share), h)
        else:
            divide(part[:count], x, y, w, h * share)
            divide(part[count:], x, y + h * share, w, h * (1 - share))

    if values:
        divide(values, 0.0, 0.0, float(WIDTH), float(HEIGHT))
    return sorted(boxes, key=lambda box: -box.value)
