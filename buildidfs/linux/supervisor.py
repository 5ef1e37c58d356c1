# SPDX-License-Identifier: Apache-2.0
"""`SupervisorLoop`: the main loop of a process that keeps other processes running.

One poll(2) waits for signals, for the descriptors of all processes, and for the next start.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.backoff import Attempts

END_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The signals that ask a supervisor to end."""


class KeptProcess(Protocol):
    """A process that a supervisor starts again after it has ended."""

    starts: Attempts

    @property
    def is_waiting(self) -> bool:
        """True if no process runs, and one is to be started when that is due."""

    def start(self) -> None:
        """Start the process. A failure is recorded in `starts`."""

    def descriptors(self) -> dict[int, Callable[[], None]]:
        """Return the descriptors to wait for, each with the function to call when it is
        readable.
        """


class SupervisorLoop:
    """Waits for signals and processes. Needs the main thread of a process without other threads.

    `signals` has the numbers of the ``handled`` signals that came. The caller clears it.
    """

    def __init__(
        self,
        processes: Sequence[KeptProcess],
        handled: Sequence[signal.Signals] = END_SIGNALS,
    ) -> None:
        self._processes = processes
        self._handled = handled
        self.signals: list[int] = []
        self._wake = self._woken = -1

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors that a forked child must close."""
        return self._wake, self._woken

    @contextlib.contextmanager
    def receiving(self) -> Iterator[None]:
        """Receive signals while the block runs."""
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        before = {}
        wakeup = signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        try:
            for number in self._handled:
                before[number] = signal.signal(number, lambda *_: None)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(wakeup)
            os.close(self._wake)
            os.close(self._woken)

    def start_due(self) -> None:
        """Start the processes whose time has come."""
        for each in self._processes:
            if each.is_waiting and each.starts.is_due:
                each.start()

    def wait(self, until: float | None = None) -> None:
        """Wait for an event, for the next start or until a time (time.monotonic()), and handle
        events.
        """
        due = [each.starts.due for each in self._processes if each.is_waiting]
        if until is not None:
            due.append(until)
        handlers = {self._wake: self._take_signals}
        for each in self._processes:
            handlers |= each.descriptors()
        poll = select.poll()
        for fd in handlers:
            poll.register(fd, select.POLLIN)
        timeout = max(0.0, (min(due) - time.monotonic()) * 1000 + 1) if due else None
        for fd, _ in poll.poll(timeout):
            handlers[fd]()

    def _take_signals(self) -> None:
        numbers = os.read(self._wake, 256)
        self.signals += [number for number in numbers if number in self._handled]
