# SPDX-License-Identifier: Apache-2.0
"""One program that the supervisor keeps running: how it is started, heard, ended, started again.

Nothing here waits; `supervise` does, for the descriptors of all children at once.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from buildidfs.errors import IncompleteError
from buildidfs.linux import child
from buildidfs.linux.sdnotify import Inbox

log = logging.getLogger(__name__)

_MOST_OF_A_LINE = 4096
_CHUNK = 65536
_END_S = 5.0

# A watch that could not follow everything says so when it was told to end.
_ENDED_WELL = frozenset((0, IncompleteError.exit_code))

# What `log.setup` puts before a message, and sd-daemon(3) before that.
_LINE = re.compile(r"(?:<\d>)?(?:buildidfs: )?(?:(debug|info|warning|error|critical): )?(.*)")


class Backoff(msgspec.Struct, frozen=True):
    """How long a program that failed has to wait, in seconds.

    ``first`` at first, twice as long each time, ``most`` at most; after it ran for ``good`` it is
    at the beginning again.
    """

    first: float = 0.5
    most: float = 60
    good: float = 60


class Program(msgspec.Struct, frozen=True):
    """What is to be kept running.

    ``needed``: without it nothing makes sense, so an error of ours at its first start ends all.
    After SIGTERM it has ``grace`` seconds. ``cleanup`` is called when it will not be started again.
    """

    name: str
    argv: tuple[str | bytes, ...]
    needed: bool = False
    grace: float = 15
    cleanup: Callable[[], object] = lambda: None


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a program does, for people and for programs. Times are Unix time in nanoseconds.

    ``starting`` until it says that it is ready, then ``running``; ``waiting`` until ``due`` after
    it has failed, for the ``reason`` given; ``ended`` when it was asked to end, by whomever.
    """

    name: str
    state: Literal["starting", "running", "waiting", "ended"]
    pid: int = 0
    since: int = 0
    restarts: int = 0
    reason: str = ""
    status: str = ""
    due: int = 0


class Child:
    """A `Program` and the process that runs it now, if one does."""

    def __init__(self, program: Program, environ: Mapping[str, str], backoff: Backoff) -> None:
        self.program = program
        self.part = Part(program.name, "waiting")
        self.code: int | None = None
        """How the last process ended: an exit status, or minus the number of a signal."""
        self.due = 0.0
        """When to start it (time.monotonic())."""
        self._backoff = backoff
        self._delay = backoff.first
        self._started = 0.0
        self._inbox = Inbox()
        self._environ = {**environ, "NOTIFY_SOCKET": self._inbox.name}
        self._process: child.Child | None = None
        self._output = -1
        self._line = b""
        self._last_line = ""

    # --- start and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Run it now."""
        log.info("%s: starting", self.program.name)
        self._started = time.monotonic()
        self._line, self._last_line, self.code = b"", "", None
        self._output, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writing, True)
        try:
            process = child.start(
                self.program.argv,
                stdout=writing,
                stderr=writing,
                env=self._environ,
                new_session=True,  # the terminal's ^C is for the supervisor
                end_with_us=signal.SIGTERM,
            )
            try:
                process.fileno()
            except OSError:
                process.end(_END_S)
                raise
        except OSError as error:
            self._close_output()
            self._failed(str(error))
        else:
            self._process = process
            again = self.part.restarts + (self.part.since > 0)
            self._change(
                state="starting", pid=process.pid, since=time.time_ns(), restarts=again, due=0
            )
        finally:
            os.close(writing)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; SIGKILL also to what it has started and not left to itself."""
        if self._process is not None:
            self._process.send(number, group=number == signal.SIGKILL)

    def not_again(self) -> None:
        """Do not start it any more; what runs goes on."""
        if self._process is None:
            self._change(state="ended", due=0)

    def hurry(self) -> None:
        """If it does not run, start it as soon as possible."""
        if self._process is None:
            self.due, self._delay = time.monotonic(), self._backoff.first
            self._change(state="waiting", due=time.time_ns())

    @property
    def is_alive(self) -> bool:
        """Whether a process runs, or has ended but not been looked at."""
        return self._process is not None

    def close(self) -> None:
        """Hear no more of it."""
        self._inbox.close()

    # --- what happens to it ------------------------------------------------------------------

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """What to wait for, and what to call when it is readable. Changes with each call."""
        found: dict[int, Callable[[], None]] = {self._inbox.fileno(): self._told}
        if self._process is not None:
            found[self._process.fileno()] = self._ended
            if self._output >= 0:
                found[self._output] = self._said
        return found

    def _told(self) -> None:
        while (told := self._inbox.receive()) is not None:
            if self._process is None:
                continue  # the last words of one that has ended
            if told.get("READY") == "1" and self.part.state == "starting":
                log.info("%s: ready (pid %d)", self.program.name, self._process.pid)
                self._change(state="running")
            if "STATUS" in told:
                self._change(status=told["STATUS"])

    def _said(self) -> None:
        """Pass on what it printed, line by line."""
        if self._output < 0:
            return  # it ended just now, and everything was read
        try:
            text = os.read(self._output, _CHUNK)
        except BlockingIOError:
            return
        if not text:
            self._close_output()
        *lines, self._line = (self._line + text).split(b"\n")
        if not text or len(self._line) > _MOST_OF_A_LINE:
            lines.append(self._line)
            self._line = b""
        for line in lines:
            self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        found = _LINE.match(line[:_MOST_OF_A_LINE].decode("utf-8", "backslashreplace").strip())
        if found is None or not found[2]:
            return
        text = found[2] if found[2].isprintable() else repr(found[2])[1:-1]
        level = logging.getLevelName((found[1] or "info").upper())
        log.log(level, "%s: %s", self.program.name, text)
        self._last_line = text

    def _ended(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send(signal.SIGKILL, group=True)  # what it leaves in its group ends with it
        self.code = process.wait()
        assert self.code is not None
        self._told()
        self._said()  # all of it: a pipe holds no more than one read takes
        self._pass_on(self._line)
        self._close_output()
        if self.code in _ENDED_WELL:
            log.info("%s: ended", self.program.name)
            self._change(state="ended", pid=0, since=time.time_ns(), status="")
        elif self.code < 0:
            self._failed(f"killed by {_signal_name(-self.code)}")
        else:
            self._failed(self._last_line or f"ended with exit status {self.code}")

    def _failed(self, reason: str) -> None:
        if time.monotonic() - self._started >= self._backoff.good:
            self._delay = self._backoff.first
        log.warning("%s: %s; again in %g s", self.program.name, reason, self._delay)
        self.due = time.monotonic() + self._delay
        self._change(
            state="waiting", pid=0, since=time.time_ns(), reason=reason, status="",
            due=time.time_ns() + int(self._delay * 1e9),
        )  # fmt: skip
        self._delay = min(self._delay * 2, self._backoff.most)

    def _change(self, **values: object) -> None:
        self.part = msgspec.structs.replace(self.part, **values)

    def _close_output(self) -> None:
        if self._output >= 0:
            os.close(self._output)
            self._output = -1


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
