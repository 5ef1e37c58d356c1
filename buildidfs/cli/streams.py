# SPDX-License-Identifier: Apache-2.0
"""Standard streams as they may be: closed, on a full disk, or with nobody at the other end.

What goes wrong there is told apart from what goes wrong in the program at the place where it
happens, below all buffers: later on an OSError does not say which file it is about.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_OUTPUT = 1
_LAST = 2


class ReaderGone(Exception):
    """Whoever read the output (head, less) has had enough. No OSError, which click would answer."""


class _Output(io.FileIO):
    """Standard output. Raises `UsageError` and `ReaderGone`, and is silent after that."""

    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            # Python would complain again when it flushes what is left.
            os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), _OUTPUT)
            if isinstance(error, BrokenPipeError):
                raise ReaderGone from error
            raise UsageError(f"cannot write the output: {error.strerror}") from error


def prepare() -> None:
    """Make the standard streams of this process safe to use."""
    if None in (sys.stdin, sys.stdout, sys.stderr):
        # The next files to be opened, those of the store, would become the streams.
        while (fd := os.open(os.devnull, os.O_RDONLY)) <= _LAST:
            pass
        os.close(fd)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # else somebody else takes the output
        terminal = os.isatty(_OUTPUT)
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Output(_OUTPUT, "wb", closefd=False)),
            encoding=sys.stdout.encoding if sys.stdout is not None else "utf-8",
            errors="backslashreplace",
            line_buffering=terminal,
        )
