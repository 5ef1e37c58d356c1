# SPDX-License-Identifier: Apache-2.0
"""Keeping several programs running in one go: `Supervisor`, which is behind ``buildidfs up``.

One thread waits for all of them at once: for their ends (pidfd_open(2)), for what they print, for
what they tell (`linux.sdnotify`), and for signals to the supervisor. A program that fails is
started again, later each time; the others do not notice. None outlives the supervisor: each gets
SIGTERM from the kernel when that is killed (`linux.child`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from buildidfs import errors
from buildidfs.app.service.child import Backoff, Child, Part, Program

if TYPE_CHECKING:
    from buildidfs.store.run_files import Presence

log = logging.getLogger(__name__)

RETRY: Final = signal.SIGUSR1
"""Makes a supervisor start at once what does not run."""

BACKOFF: Final = Backoff()

_END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor:
    """Runs programs until it is told to end. For the main thread of a process without others.

    ``presence`` is told how they do: ``children``, a list of `Part`. They get ``environ``.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        presence: Presence,
        environ: Mapping[str, str],
        backoff: Backoff = BACKOFF,
    ) -> None:
        self._children = [Child(each, environ, backoff) for each in programs]
        self._presence = presence
        self._shown: list[Part] = []
        self._signals: list[int] = []
        self._wake = -1

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Run them until SIGTERM, SIGINT or SIGHUP comes, or all have ended by themselves.

        ``ready`` is called once each of them is running, or, if it is not needed, has failed once.
        They are ended in the order in which they were given. Raises what a needed one failed with
        at its first start, after ending the others.
        """
        announced = False
        with self._woken_by_signals():
            try:
                while not self._is_over():
                    self._start_what_is_due()
                    if not announced and all(map(_is_settled, self._children)):
                        announced = True
                        ready()
                    self._wait(self._next_start())
                    if not announced:
                        self._give_up_if_pointless()
            finally:
                self._end_all()

    def _is_over(self) -> bool:
        if any(number in _END for number in self._signals):
            return True
        if RETRY in self._signals:
            self._signals.clear()
            for child in self._children:
                child.hurry()
        return all(child.part.state == "ended" for child in self._children)

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.part.state == "waiting" and child.due <= now:
                child.start()
        self._show()

    def _next_start(self) -> float | None:
        due = [child.due for child in self._children if child.part.state == "waiting"]
        return min(due, default=None)

    def _give_up_if_pointless(self) -> None:
        for child in self._children:
            part, code = child.part, child.code
            if child.program.needed and part.state == "waiting" and code is not None:
                kind = _class_of(code)
                if kind is not None:
                    raise kind(part.reason)

    def _wait(self, until: float | None) -> None:
        """Until something happens or the time (time.monotonic()) has come; deal with it."""
        poll = select.poll()
        handlers = {self._wake: self._take_signals}
        for child in self._children:
            handlers |= child.descriptors()
        for fd in handlers:
            poll.register(fd, select.POLLIN)
        timeout = None if until is None else max(0, (until - time.monotonic()) * 1000 + 1)
        for fd, _ in poll.poll(timeout):
            handlers[fd]()
        self._show()

    def _show(self) -> None:
        parts = [child.part for child in self._children]
        if parts != self._shown:
            self._shown = parts
            self._presence.update(children=parts)

    # --- the end -----------------------------------------------------------------------------

    def _end_all(self) -> None:
        self._signals.clear()
        for child in self._children:
            child.not_again()
            self._end(child)
            child.program.cleanup()
        for child in self._children:
            child.close()

    def _end(self, child: Child) -> None:
        """Ask one to end, and make it after its grace, or when asked again."""
        child.send(signal.SIGTERM)
        deadline = time.monotonic() + child.program.grace
        while child.is_alive:
            if time.monotonic() >= deadline or self._signals:
                log.warning("%s does not end: killing it", child.program.name)
                child.send(signal.SIGKILL)
                deadline = time.monotonic() + child.program.grace
                self._signals.clear()
            self._wait(deadline)
            for each in self._children:
                each.not_again()

    # --- signals -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {}
        wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        try:
            for number in (*_END, RETRY):
                before[number] = signal.signal(number, lambda *_: None)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(self._wake)
            os.close(writing)

    def _take_signals(self) -> None:
        numbers = os.read(self._wake, 256)
        self._signals += [number for number in numbers if number in (*_END, RETRY)]


def _is_settled(child: Child) -> bool:
    """Whether there is nothing to wait for before saying how it went."""
    part = child.part
    if part.state in ("running", "ended"):
        return True
    return not child.program.needed and part.reason != ""


def _class_of(code: int) -> type[errors.BuildIdFsError] | None:
    """The error that a process of ours ended with; None for a fault, or a signal."""

    def classes(kind: type[errors.BuildIdFsError]) -> Iterator[type[errors.BuildIdFsError]]:
        for each in kind.__subclasses__():
            yield each
            yield from classes(each)

    return next((x for x in classes(errors.BuildIdFsError) if x.exit_code == code), None)
