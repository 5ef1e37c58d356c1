# SPDX-License-Identifier: Apache-2.0
"""Logging for people, for journald and for programs: one line per message, on standard error.

Modules log through ``logging.getLogger(__name__)`` and never configure logging. The command line
calls `setup` once. The programs of this package that a process starts log with the same settings
(`adopt`), to the same stream.

An argument of a message may be a path as bytes, or a build ID: it is made printable when the
message is formatted, so that a message that is not logged costs little.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from buildidfs.model import BuildId
from buildidfs.names import one_line, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TEXT: Final = "text"
JSON: Final = "json"
_JOURNALD: Final = "journald"

_SYSLOG_LEVELS = {
    logging.DEBUG: 7,
    logging.INFO: 6,
    logging.WARNING: 4,
    logging.ERROR: 3,
    logging.CRITICAL: 2,
}
_ROOT: Final = "buildidfs"
# The settings for the programs that this process starts: level, format, journald.
_VARIABLE: Final = "BUILDIDFS_LOG"
_MOST_WAITING: Final = 1 << 14
_IDLE_S: Final = 0.2
_UNNAMED: Final = re.compile(r"Thread-(\d+) \((\w+)\)")
_LINE: Final = re.compile(
    r"(?:<\d>)?(?P<text>"
    r"(?:\d{4}-\d\d-\d\dT\S+ (?P<full>debug|info|warning|error|critical) [^ ]+\[\d+\] \S+ \S+: )?"
    r"(?:buildidfs: )?(?:(?P<short>debug|info|warning|error|critical): )?"
    r"(?P<message>.*))"
)


class _Formatter(logging.Formatter):
    """Formats messages.

    ``buildidfs: warning: text``; with the <N> prefix of sd-daemon(3) under journald. If everything
    is logged, each line has time, level, process, thread and module. In JSON each line is an
    object.
    """

    def __init__(self, *, form: str, journald: bool, full: bool) -> None:
        super().__init__()
        self._is_json = form == JSON
        self._journald = journald
        self._full = full

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.msg, LogLine):
            text, level = record.msg.complete, record.msg.level
            return prefixed(text, level) if self._journald and not self._is_json else text
        text = _message(record)
        if self._is_json:
            return self._object(record, text)
        if record.exc_info:
            text = f"{text}\n{self.formatException(record.exc_info)}"
        if self._full:
            ahead = (
                f"{_time(record)} {record.levelname.lower()} {_process}[{record.process}]"
                f" {_thread(record)} {_module(record)}: "
            )
            text = "\n".join(ahead + line for line in text.splitlines())
        if self._journald:
            return prefixed(text, record.levelno)
        if self._full:
            return text
        if record.levelno >= logging.WARNING:
            return f"buildidfs: {record.levelname.lower()}: {text}"
        return f"buildidfs: {text}"

    def _object(self, record: logging.LogRecord, text: str) -> str:
        row: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "process": _process,
            "pid": record.process,
            "thread": _thread(record),
            "module": _module(record),
            "message": text,
        }
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)


def prefixed(text: str, level: int) -> str:
    """Return lines with the priority of a level, see sd-daemon(3)."""
    return "\n".join(f"<{_SYSLOG_LEVELS.get(level, 6)}>{line}" for line in text.splitlines())


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record. Paths in it cannot begin another line."""
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    return record.getMessage()


def _shown(value: object) -> object:
    if isinstance(value, bytes) and not isinstance(value, BuildId):
        return printable(value)
    return one_line(value) if isinstance(value, str) else value


def _time(record: logging.LogRecord) -> str:
    seconds = time.gmtime(record.created)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', seconds)}.{int(record.created % 1 * 1e6):06d}Z"


def _thread(record: logging.LogRecord) -> str:
    name = record.threadName or "-"
    found = _UNNAMED.fullmatch(name)
    if found is not None:
        name = f"{found[2]}-{found[1]}"
    return name.removeprefix("buildidfs-").replace(" ", "_")


def _module(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{_ROOT}.")


class _Settings(NamedTuple):
    verbosity: int
    form: str
    journald: bool

    @classmethod
    def inherited(cls) -> _Settings | None:
        """Return the settings of the process that has started this one, if it has some."""
        words = os.environ.get(_VARIABLE, "").split(",")
        if len(words) != 3 or not words[0].lstrip("-").isdecimal() or words[1] not in (TEXT, JSON):
            return None
        return cls(int(words[0]), words[1], words[2] == _JOURNALD)

    def hand_on(self) -> None:
        """Let the programs that this process starts inherit the settings."""
        if self.verbosity or self.form != TEXT:
            words = (str(self.verbosity), self.form, _JOURNALD if self.journald else "")
            os.environ[_VARIABLE] = ",".join(words)
        else:
            os.environ.pop(_VARIABLE, None)


_current: _Settings | None = None
_process = _ROOT


def setup(level: int, *, journald: bool = False, form: str | None = None) -> None:
    """Send log lines to standard error, also those of the programs that this process will start.

    ``level`` is the number of -v minus that of -q: 0 shows warnings, 1 also the steps of the work,
    2 everything, below 0 errors only. ``journald`` prefixes each line with its priority
    (sd-daemon(3)). ``form`` is `TEXT` or `JSON`; the default is the present form, or that of the
    process that has started this one.
    """
    global _current
    if form is None:
        before = _current or _Settings.inherited()
        form = before.form if before is not None else TEXT
    _current = _Settings(level, form, journald)
    _current.hand_on()
    least = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO}.get(
        max(level, -1), logging.DEBUG
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(form=form, journald=journald, full=least == logging.DEBUG))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(least)
    root.propagate = False
    if form == JSON:
        threading.excepthook = _log_thread


def adopt(module: str) -> None:
    """Log as the process that has started this program, whose ``main`` is that of ``module``.

    Without settings of that process, nothing changes.
    """
    rename(module.rpartition(".")[2])
    settings = _Settings.inherited()
    if settings is not None:
        setup(settings.verbosity, journald=settings.journald, form=settings.form)


def rename(process: str) -> None:
    """Set the name of this process in its lines."""
    global _process
    _process = process


def verbosity() -> int:
    """Return the present verbosity, see `setup`."""
    return 0 if _current is None else _current.verbosity


def is_set_up() -> bool:
    """Return True if this process logs with the settings of a command line."""
    return _current is not None


def is_json() -> bool:
    """Return True if each line on standard error is to be a JSON object."""
    return _current is not None and _current.form == JSON


def is_debug() -> bool:
    """Return True if everything is logged.

    A module whose code is called for each mapping asks once, when it is imported.
    """
    return logging.getLogger(_ROOT).isEnabledFor(logging.DEBUG)


@functools.lru_cache(maxsize=1024)
def log_once(logger: logging.Logger, level: int, text: str) -> None:
    """Log a message unless it is one of the last 1024 different ones of this function."""
    logger.log(level, "%s", text)


class MessageRate:
    """Limits messages to one in ``seconds`` for each key. Not thread-safe."""

    def __init__(self, seconds: float = 60.0, most: int = 1024) -> None:
        """Above ``most`` keys, all are forgotten."""
        self._seconds = seconds
        self._most = most
        self._due: dict[str, float] = {}

    def take(self, key: str) -> bool:
        """Return True if a message of ``key`` is to be logged now, and count it."""
        now = time.monotonic()
        if now < self._due.get(key, 0.0):
            return False
        if len(self._due) > self._most:
            self._due.clear()
        self._due[key] = now + self._seconds
        return True


def report(text: str, *, is_error: bool = True) -> None:
    """Write a message of the command line, at any verbosity."""
    level = logging.ERROR if is_error else logging.INFO
    if text.startswith("warning: "):
        level = logging.WARNING
    record = logging.LogRecord(_ROOT, level, "", 0, "%s", (text.removeprefix("warning: "),), None)
    for handler in logging.getLogger(_ROOT).handlers:
        handler.handle(record)


def _log_thread(args: threading.ExceptHookArgs) -> None:
    logging.getLogger(_ROOT).error(
        "a thread ended by a fault of this program",
        exc_info=args.exc_value,
    )


# --- lines of other processes --------------------------------------------------------------------


class LogLine(NamedTuple):
    """A line of another process: its level, its message, and the line if it has everything."""

    level: int
    message: str
    complete: str


def parsed(line: str) -> LogLine:
    """Return a line that a process of this program has written to standard error."""
    if line.startswith("{"):
        try:
            row = json.loads(line)
            return LogLine(_level(row["level"]), str(row["message"]), line)
        except (ValueError, KeyError, TypeError):
            pass
    found = _LINE.match(line)
    assert found is not None
    level = _level(found["full"] or found["short"])
    return LogLine(level, found["message"], found["text"] if found["full"] else "")


def _level(name: str | None) -> int:
    return logging.getLevelNamesMapping().get((name or "info").upper(), logging.INFO)


def relay(line: LogLine) -> None:
    """Write a complete line of another process as it is."""
    logging.getLogger(_ROOT).log(line.level, line)


# --- threads that must not wait ------------------------------------------------------------------


class BackgroundHandler(logging.Handler):
    """Formats and writes lines in a thread of its own, so that no other thread waits for standard
    error. Beyond `_MOST_WAITING` waiting lines, further ones are dropped, and counted.
    """

    def __init__(self, targets: Sequence[logging.Handler]) -> None:
        self._lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
        super().__init__()
        self._targets = targets
        self._dropped = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_all, name="buildidfs-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, unless too many wait. The thread formats it."""
        if self._lines.qsize() >= _MOST_WAITING:
            self._dropped += 1
        else:
            self._lines.put(record)

    def finish(self, seconds: float) -> None:
        """Write the waiting lines, for some seconds at most."""
        self._ended.set()
        self._thread.join(seconds)

    def _write_all(self) -> None:
        for record in self._records():
            for handler in self._targets:
                handler.handle(record)
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                logging.getLogger(__name__).warning("%d lines of the log were dropped", dropped)

    def _records(self) -> Iterator[logging.LogRecord]:
        while True:
            try:
                yield self._lines.get(timeout=_IDLE_S)
            except Empty:
                if self._ended.is_set():
                    return


def write_in_background() -> None:
    """Let no thread of this process wait for standard error, if everything is logged."""
    root = logging.getLogger(_ROOT)
    if is_debug():
        root.handlers[:] = [BackgroundHandler(list(root.handlers))]


def finish(seconds: float) -> None:
    """Write the lines that wait for the thread of `write_in_background`."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, BackgroundHandler):
            handler.finish(seconds)
