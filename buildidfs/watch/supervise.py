# SPDX-License-Identifier: Apache-2.0
"""Supervise the programs of a store: start them, pass on their messages, restart them.

One loop waits for the descriptors of all programs at once.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import errors
from buildidfs import log as logs
from buildidfs.backoff import Attempts, Backoff
from buildidfs.errors import IncompleteError
from buildidfs.linux import child as processes
from buildidfs.linux.sdnotify import Inbox
from buildidfs.linux.supervisor import END_SIGNALS, SupervisorLoop
from buildidfs.watch.status import PartState

if TYPE_CHECKING:
    from buildidfs.store.run_files import Presence


log = logging.getLogger(__name__)

_MOST_OF_A_LINE = 4096
_CHUNK = 65536
_END_S = 5.0

# A watch with restrictions says so when it ends.
_ENDED_WELL = frozenset((0, IncompleteError.exit_code))

RETRY: Final = signal.SIGUSR1
"""The signal that makes a supervisor start at once all programs that do not run."""


class ProgramSpec(msgspec.Struct, frozen=True):
    """A program to be kept running.

    If a ``needed`` program fails with an error of ours at its first start, the supervisor ends.
    After SIGTERM it has ``grace`` seconds. ``cleanup`` is called when it will not be started again.
    """

    name: str
    argv: tuple[str | bytes, ...]
    needed: bool = False
    grace: float = 15
    cleanup: Callable[[], object] = lambda: None


class SupervisedProgram:
    """A `ProgramSpec` and the process that runs it now, if any."""

    def __init__(self, program: ProgramSpec, environ: Mapping[str, str], backoff: Backoff) -> None:
        self.program = program
        self.part = PartState(program.name, "waiting")
        self.code: int | None = None
        """The result of the last process: an exit status, or minus the number of a signal."""
        self.starts = Attempts(backoff)
        self._inbox = Inbox()
        self._environ = {**environ, "NOTIFY_SOCKET": self._inbox.name}
        self._process: processes.Child | None = None
        self._output = -1
        self._line = b""
        self._last_line = ""

    # --- start and end -----------------------------------------------------------------------

    def start(self) -> None:
        """Start the program now."""
        log.info("%s: starting", self.program.name)
        self._line, self._last_line, self.code = b"", "", None
        self._output, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writing, True)
        try:
            process = processes.start(
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
            restarts = self.part.restarts + (self.part.since > 0)
            self._change(
                state="starting",
                pid=process.pid,
                since=time.time_ns(),
                restarts=restarts,
                due=0,
            )
        finally:
            os.close(writing)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program. SIGKILL goes to its whole process group."""
        if self._process is not None:
            self._process.send(number, group=number == signal.SIGKILL)

    def disable_restart(self) -> None:
        """Do not start the program again; if it runs, it continues."""
        if self._process is None:
            self._change(state="ended", due=0)

    def hurry(self) -> None:
        """If the program does not run, start it as soon as possible."""
        if self._process is None:
            self.starts.succeeded()
            self._change(state="waiting", due=time.time_ns())

    @property
    def is_waiting(self) -> bool:
        """True if it is to be started when that is due."""
        return self.part.state == "waiting"

    @property
    def is_alive(self) -> bool:
        """True if a process runs, or has ended and was not reaped yet."""
        return self._process is not None

    def close(self) -> None:
        """Close the descriptors of its output."""
        self._inbox.close()

    # --- events ------------------------------------------------------------------------------

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """Return the descriptors to wait for, each with the function to call when it is
        readable.
        """
        found: dict[int, Callable[[], None]] = {self._inbox.fileno(): self._read_messages}
        if self._process is not None:
            found[self._process.fileno()] = self._ended
            if self._output >= 0:
                found[self._output] = self._relay_output
        return found

    def _read_messages(self) -> None:
        while (message := self._inbox.receive()) is not None:
            if self._process is None:
                continue  # the last output of an ended process
            if message.get("READY") == "1" and self.part.state == "starting":
                log.info("%s: ready (pid %d)", self.program.name, self._process.pid)
                self._change(state="running")
            if "STATUS" in message:
                self._change(status=message["STATUS"])

    def _relay_output(self) -> None:
        """Pass on the output of the program, line by line."""
        if self._output < 0:
            return  # it ended just now, and all its output was read
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
        text = line[:_MOST_OF_A_LINE].decode("utf-8", "backslashreplace").strip()
        text = text if text.isprintable() else repr(text)[1:-1]
        found = logs.parsed(text)
        if not found.message:
            return
        if found.complete:
            logs.relay(found)
        else:
            log.log(found.level, "%s: %s", self.program.name, found.message)
        self._last_line = found.message

    def _ended(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        process.send(signal.SIGKILL, group=True)  # processes left in its group end with it
        self.code = process.wait()
        assert self.code is not None
        self._read_messages()
        self._relay_output()  # all of it: one read takes the whole content of a pipe
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
        delay = self.starts.failed()
        log.warning("%s: %s; again in %g s", self.program.name, reason, delay)
        self._change(
            state="waiting", pid=0, since=time.time_ns(), reason=reason, status="",
            due=time.time_ns() + int(delay * 1e9),
        )  # fmt: skip

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


BACKOFF: Final = Backoff(0.5, 60.0)


class Supervisor:
    """Runs programs until it is asked to end. Needs the main thread of a process without other
    threads.

    ``presence`` gets their states: ``children``, a list of `PartState`. The programs get
    ``environ``.
    """

    def __init__(
        self,
        programs: Sequence[ProgramSpec],
        presence: Presence,
        environ: Mapping[str, str],
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._children = [SupervisedProgram(each, environ, backoff) for each in programs]
        self._presence = presence
        self._shown: list[PartState] = []
        self._loop = SupervisorLoop(self._children, (*END_SIGNALS, RETRY))

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run the programs until SIGTERM, SIGINT or SIGHUP, or until all have ended by themselves.

        ``ready`` is called when each of them runs, or, if it is not needed, has failed once. At the
        end they are ended in the order in which they were given. If a needed program fails at its
        first start, the others are ended and its error is raised.
        """
        announced = False
        with self._loop.receiving():
            try:
                while not self._is_over():
                    self._loop.start_due()
                    self._show()
                    if not announced and all(map(_is_settled, self._children)):
                        announced = True
                        ready()
                    self._wait()
                    if not announced:
                        self._give_up_if_pointless()
            finally:
                self._end_all()

    def _is_over(self) -> bool:
        if any(number in END_SIGNALS for number in self._loop.signals):
            return True
        if RETRY in self._loop.signals:
            self._loop.signals.clear()
            for child in self._children:
                child.hurry()
        return all(child.part.state == "ended" for child in self._children)

    def _give_up_if_pointless(self) -> None:
        for child in self._children:
            part, code = child.part, child.code
            if child.program.needed and part.state == "waiting" and code is not None:
                kind = _class_of(code)
                if kind is not None:
                    raise kind(part.reason)

    def _wait(self, until: float | None = None) -> None:
        self._loop.wait(until)
        self._show()

    def _show(self) -> None:
        parts = [child.part for child in self._children]
        if parts != self._shown:
            self._shown = parts
            self._presence.update(children=parts)

    # --- the end -----------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._loop.signals.clear()
        for child in self._children:
            child.disable_restart()
            self._end(child)
            child.program.cleanup()
        for child in self._children:
            child.close()

    def _end(self, child: SupervisedProgram) -> None:
        """Ask a program to end; kill it after its grace, or when asked again."""
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + child.program.grace
        while child.is_alive:
            if time.monotonic() >= deadline or self._loop.signals:
                log.warning("%s does not end: killing it", child.program.name)
                child.send(signal.SIGKILL)
                deadline = time.monotonic() + child.program.grace
                self._loop.signals.clear()
            self._wait(deadline)
            for each in self._children:
                each.disable_restart()


def _is_settled(child: SupervisedProgram) -> bool:
    """Return True if the supervisor need not wait for this program any longer before it calls
    ``ready``.
    """
    part = child.part
    if part.state in ("running", "ended"):
        return True
    return not child.program.needed and part.reason != ""


def _class_of(code: int) -> type[errors.BuildIdFsError] | None:
    """Return the error class with which a process of ours ended; None for a fault or a signal."""

    def classes(kind: type[errors.BuildIdFsError]) -> Iterator[type[errors.BuildIdFsError]]:
        for each in kind.__subclasses__():
            yield each
            yield from classes(each)

    return next((x for x in classes(errors.BuildIdFsError) if x.exit_code == code), None)
