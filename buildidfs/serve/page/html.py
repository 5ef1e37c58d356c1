# SPDX-License-Identifier: Apache-2.0
"""Answers as HTML: templates with everything escaped, and the formats of values."""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import os
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from buildidfs import wording
from buildidfs.serve.page import charts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs import answers

_HERE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
_MOST_TEXT: Final = 300
MONTH_S: Final = 30 * 86_400.0

STYLE: Final = "style.css"


def shown(value: str, most: int = _MOST_TEXT) -> str:
    """Return text of a stranger for display: visible characters, on one line, at most ``most``
    long.
    """
    if len(value) > most:
        value = value[: most // 2] + "…" + value[-(most // 2) :]
    if value.isprintable():
        return value
    return "".join(
        each
        if each.isprintable()
        else each.encode("unicode_escape", "replace").decode()
        if each.isascii() or ord(each) < 0xD800 or ord(each) > 0xDFFF
        else f"\\u{ord(each):04x}"
        for each in value
    )


def per_cent(share: float | None) -> str:
    """Return a share as a percentage; it reads 100 % only if nothing is missing."""
    if share is None:
        return "–"
    value = 100 * share
    if 99.9 <= value < 100:
        return "99.9 %"
    return f"{value:.0f} %" if value in (0, 100) else f"{value:.1f} %"


def number(count: int) -> str:
    """Return a number with separated thousands."""
    return f"{count:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def sentence(clause: str) -> str:
    """Return a clause that begins with a capital."""
    return clause[:1].upper() + clause[1:]


def moment(seconds: float | None) -> str:
    """Return a Unix time as text, in UTC."""
    if not seconds:
        return "never"
    when = datetime.datetime.fromtimestamp(min(max(seconds, 0), 253_402_300_799), datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M")


def ago(seconds: float | None) -> str:
    """Return a Unix time as an age."""
    return wording.ago(seconds) if seconds else "never"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun, in singular or plural."""
    return f"{number(count)} {wording.inflected(count, noun, plural)}"


def coverage_plot(history: Sequence[answers.Point], now: float) -> Markup:
    """Plot the shares of executables, symbols and debuginfo over 30 days."""
    names = ("executable", "symbols", "debuginfo")
    series = [
        charts.Series(name, [(each.time, getattr(each, name)) for each in history], colour)
        for colour, name in enumerate(names)
    ]
    known = [each.symbols for each in history if each.symbols is not None]
    label = "Coverage over 30 days."
    if known:
        label += f" Symbols went from {per_cent(known[0])} to {per_cent(known[-1])}."
    return charts.lines(series, label, begin=now - MONTH_S, end=now, top=1.0)


def spark(trend: Sequence[answers.Trend], now: float) -> Markup:
    """Plot the share with symbols of a container or image over 30 days; empty if none is known."""
    if not trend:
        return Markup("")
    first, last = per_cent(trend[0].symbols), per_cent(trend[-1].symbols)
    label = f"Symbols over 30 days, from {first} to {last}"
    series = [charts.Series("symbols", [(each.time, each.symbols) for each in trend], 1)]
    return charts.lines(series, label, begin=now - MONTH_S, end=now, top=1.0, small=True)


def growth_top(history: Sequence[answers.Point], held: answers.Holdings) -> float:
    """Return the top of the plot of sizes: the next round number of units."""
    most = max([held.stored_bytes, *(each.stored_bytes for each in history)], default=0)
    if held.limit_bytes is not None and held.limit_bytes < 4 * most:
        most = max(most, held.limit_bytes)
    unit = 1024.0
    while unit * 1024 <= most:
        unit *= 1024
    for factor in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        if factor * unit >= most:
            return factor * unit
    return unit * 1024


def growth_plot(history: Sequence[answers.Point], held: answers.Holdings, now: float) -> Markup:
    """Plot the bytes that the store takes over 30 days, and its limit."""
    points = [(each.time, float(each.stored_bytes)) for each in history]
    label = f"Room that the store takes over 30 days, now {wording.size(held.stored_bytes)}."
    limit = None if held.limit_bytes is None else float(held.limit_bytes)
    top = growth_top(history, held)
    series = [charts.Series("stored", points, 1)]
    return charts.lines(series, label, begin=now - MONTH_S, end=now, top=top, limit=limit)


def capture_plot(history: Sequence[answers.Point], now: float) -> Markup:
    """Plot the captured and lost files of each point over 30 days."""
    top = capture_top(history)
    series = [
        charts.Series("captured", [(each.time, float(each.captured)) for each in history], 1),
        charts.Series("lost", [(each.time, float(each.lost)) for each in history], 3),
    ]
    lost = sum(each.lost for each in history)
    label = f"Captured and lost files over 30 days; {counted(lost, 'file')} lost."
    return charts.lines(series, label, begin=now - MONTH_S, end=now, top=top)


def capture_top(history: Sequence[answers.Point]) -> float:
    """Return the top of the plot of captures."""
    most = max((max(each.captured, each.lost) for each in history), default=0)
    top = 10
    while top < most:
        top *= 10
    return float(next(top // part for part in (5, 2, 1) if top // part >= most))


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        shown=shown,
        size=lambda count: wording.size(int(count)),
        per_cent=per_cent,
        number=number,
        moment=moment,
        ago=ago,
        sentence=sentence,
    )
    environment.globals.update(
        bar=charts.bar,
        capture_plot=capture_plot,
        capture_top=capture_top,
        counted=counted,
        coverage_plot=coverage_plot,
        growth_plot=growth_plot,
        growth_top=growth_top,
        month=MONTH_S,
        quote=lambda value: quote(value, safe=""),
        spark=spark,
        treemap=lambda sections: charts.treemap(
            [(shown(each.name, 60) or "(no name)", each.size) for each in sections]
        ),
    )
    return environment


def render(name: str, **values: Any) -> bytes:
    """Render a page from a template."""
    return _environment().get_template(name).render(values).encode("utf-8", "replace")


@functools.cache
def style() -> bytes:
    """Return the style sheet."""
    with open(os.path.join(_HERE, STYLE), "rb") as file:
        return file.read()


@functools.cache
def style_hash() -> str:
    """Return the source expression with which a policy allows the style sheet within a page."""
    return "sha256-" + base64.b64encode(hashlib.sha256(style()).digest()).decode()


@functools.cache
def style_version() -> str:
    """Return a text for the URL of the style sheet, which changes with the style sheet."""
    return hashlib.sha256(style()).hexdigest()[:12]
