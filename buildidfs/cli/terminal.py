# SPDX-License-Identifier: Apache-2.0
"""The terminal: its width, its characters, its colours, and text that fits its width."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from typing import TextIO

_WIDTH: Final = 80
_NARROWEST: Final = 20
# Python sets LC_CTYPE to this itself if the locale is C (PEP 538).
_COERCED: Final = ("C.UTF-8", "C.utf8", "UTF-8")


def width(stream: TextIO) -> int:
    """Return the number of columns of a terminal: ``$COLUMNS``, else the number that it reports,
    else 80.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and len(given) < 6 and int(given):
        return max(int(given), _NARROWEST)
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return _WIDTH
    return max(columns or _WIDTH, _NARROWEST)


def has_unicode() -> bool:
    """Return True if the locale of the user has characters beyond ASCII."""
    kind, language = os.environ.get("LC_CTYPE", ""), os.environ.get("LANG", "")
    if kind in _COERCED:
        kind = ""
    name = (os.environ.get("LC_ALL") or kind or language).lower()
    return "utf-8" in name or "utf8" in name


def has_colour(stream: TextIO) -> bool:
    """Return True if a stream is a terminal with colours, and the user wants them
    (``NO_COLOR``).
    """
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") in (None, "", "dumb"):
        return False
    return stream.isatty()


def coloured(text: str, colour: str | None) -> str:
    """Return a text for standard output: in a colour if standard output is a terminal with
    colours.
    """
    if colour is None or not has_colour(sys.stdout):
        return text
    import click

    return click.style(text, fg=colour)


def print_text(text: str, *, label: str = "", indent: int = 0, err: bool = False) -> None:
    """Print a paragraph. On a terminal its lines are broken between words.

    ``label`` is in the first ``indent`` columns; it may be coloured. All further lines begin with
    as many spaces. A word that is longer than a line, such as a path, stays whole.
    """
    import click

    lines = [text]
    stream = sys.stderr if err else sys.stdout
    if stream.isatty() and len(text) > (room := width(stream) - indent):
        import textwrap

        room = max(room, _NARROWEST)
        lines = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
    bare = click.unstyle(label) if label else ""
    gap = " " * (indent - len(bare)) if label else ""
    click.echo(f"{label}{gap}{lines[0]}", err=err)
    for line in lines[1:]:
        click.echo(" " * indent + line, err=err)


def complain(text: str, *, is_error: bool = True) -> None:
    """Print a message on standard error, after the name of the program."""
    log = sys.modules.get("buildidfs.log")  # a command that does not log has not imported it
    if log is not None and log.is_json():
        log.report(text, is_error=is_error)
        return
    print_text(f"buildidfs: {text}", err=True)


def cells(text: str) -> int:
    """Return the columns that a printable text takes."""
    if text.isascii():
        return len(text)
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def cut(text: str, columns: int) -> str:
    """Return a text cut to a number of columns, by removing its middle.

    More of the end is kept, because the name of a file is more important than its directories.
    """
    if cells(text) <= columns:
        return text
    mark = "\N{HORIZONTAL ELLIPSIS}" if has_unicode() else "..."
    room = columns - len(mark)
    if room <= 0:
        return mark[:columns]
    ahead = _prefix(text, room // 3)
    behind = _prefix(text[::-1], room - cells(ahead))[::-1]
    return f"{ahead}{mark}{behind}"


def _prefix(text: str, columns: int) -> str:
    """Return the longest beginning of a text that fits into a number of columns."""
    end = min(len(text), columns)
    while end and cells(text[:end]) > columns:
        end -= 1
    return text[:end]
