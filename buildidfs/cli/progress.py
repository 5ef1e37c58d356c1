# SPDX-License-Identifier: Apache-2.0
"""One line on a terminal with the progress of a command.

    Capturing   42%  1204 files  1.3 GiB  310/s  0:07 left  /usr/lib/libexample.so.6

Unknown values are left out. The line fits the terminal, is plain ASCII unless the locale has more
characters, and disappears when the command prints its answer.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, Final

from buildidfs.cli import terminal
from buildidfs.cli.output import counted, printable, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_EVERY_S: Final = 0.1
_SETTLED_S: Final = 2.0  # before that, rate and remaining time are unreliable
_SETTLED: Final = 0.01
_LEAST_PATH: Final = 8  # columns; a path is left out if it would have fewer


class Line:
    """The line; it implements `capture.base.Progress`. ``noun`` is the singular of the items."""

    def __init__(
        self, description: str, noun: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._description = description
        self._noun = noun
        self._clock = clock
        self._began = clock()
        self._drawn_at = -_EVERY_S
        self._is_drawn = False

    def __call__(self, done: int, what: str, *, size: int = 0, share: float | None = None) -> None:
        """Draw the line again, unless it was drawn a moment ago."""
        now = self._clock()
        if now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        text = self.text(done, what, size, share, terminal.width(sys.stderr) - 1)
        if not terminal.has_unicode():
            text = text.encode("ascii", "backslashreplace").decode()[: terminal.width(sys.stderr)]
        self._write(f"\r{text}\x1b[K")
        self._is_drawn = True

    def restart(self) -> None:
        """Start another step of the command; rate and remaining time are those of the step."""
        self._began = self._clock()
        self._drawn_at = -_EVERY_S

    def clear(self) -> None:
        """Remove the line, so that other text can be printed; the next call draws it again."""
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False
            self._drawn_at = -_EVERY_S

    def text(self, done: int, what: str, bytes_: int, share: float | None, columns: int) -> str:
        """Return the line, cut to a number of columns."""
        elapsed = self._clock() - self._began
        parts = [self._description]
        if share is not None:
            share = min(max(share, 0.0), 1.0)
            parts.append(f"{int(100 * share):3}%")
        if self._noun:
            parts.append(counted(done, self._noun))
        if bytes_:
            parts.append(size(bytes_))
        if self._noun and elapsed >= _SETTLED_S:
            parts.append(f"{done / elapsed:.0f}/s")
        if share is not None and share >= _SETTLED and elapsed >= _SETTLED_S:
            parts.append(f"{_clock_time(elapsed * (1 - share) / share)} left")
        line = "  ".join(parts)[:columns]
        room = columns - len(line) - 2
        if what and room >= _LEAST_PATH:
            line += "  " + terminal.cut(printable(os.fsencode(what)), room)
        return line

    def _write(self, text: str) -> None:
        # the terminal is gone, which does not matter for the work
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def progress(description: str, noun: str = "file", *, quiet: bool = False) -> Iterator[Line | None]:
    """Yield a line while the block runs; None if standard error is not a terminal, or ``quiet``."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield None
        return
    line = Line(description, noun)
    try:
        yield line
    finally:
        line.clear()
