# SPDX-License-Identifier: Apache-2.0
"""Logging for people and for journald: one line per message, on standard error.

Modules log through ``logging.getLogger(__name__)`` and never configure logging; the command line
calls `setup` once.
"""

from __future__ import annotations

import logging
import sys

_SYSLOG_LEVELS = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}


class _Formatter(logging.Formatter):
    """``buildidfs: warning: text``; with the <N> prefix of sd-daemon(3) under journald."""

    def __init__(self, *, journald: bool) -> None:
        super().__init__()
        self._journald = journald

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if self._journald:
            prefix = f"<{_SYSLOG_LEVELS.get(record.levelno, 6)}>"
            return "\n".join(prefix + line for line in text.splitlines())
        if record.levelno >= logging.WARNING:
            return f"buildidfs: {record.levelname.lower()}: {text}"
        return f"buildidfs: {text}"


def setup(verbosity: int, *, journald: bool = False) -> None:
    """Send log lines to standard error.

    ``verbosity`` is the number of -v minus that of -q: 0 shows warnings, 1 also the steps of the
    work, 2 everything, below 0 errors only. ``journald`` prefixes each line with its priority
    (sd-daemon(3)).
    """
    level = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(
        max(verbosity, -1), logging.DEBUG
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(journald=journald))
    root = logging.getLogger("buildidfs")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
