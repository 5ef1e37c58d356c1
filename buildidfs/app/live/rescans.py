# SPDX-License-Identifier: Apache-2.0
"""The looks at running processes that watching takes: at the start, after a gap, around a catch.

One thread, one look at a time. Who asks does not wait, and what is asked for twice is done once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# A gap is followed by others: what made events come too fast goes on.
_BETWEEN_S: Final = 1.0
# A process that is gone by then was caught, or cannot be found any more.
_SETTLED_S: Final = 0.5
_MOST_PIDS: Final = 1024
_MOST_OF_A_SHARE: Final = 256
# A thread that waits for a silent filesystem is left behind.
_END_S: Final = 2.0

_log = logging.getLogger(__name__)


class Scans:
    """Calls ``look`` with the processes to look at, None for all; and with what ends it early."""

    def __init__(self, look: Callable[[Sequence[int] | None, threading.Event], None]) -> None:
        self._look = look
        self._changed = threading.Condition()
        self._pids: dict[int, None] = {}
        self._shares: Counter[str] = Counter()
        self._pids_at = math.inf
        self._all_at = math.inf
        self._every = math.inf
        self._all_ended = -math.inf
        self._is_busy = True
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-scan")
        self.count = 0
        """Finished looks at all processes."""

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def everything(self, reason: str) -> None:
        """Look at all processes soon; ``reason`` is for the log."""
        with self._changed:
            if self._all_at == math.inf:
                _log.info("looking at all processes: %s", reason)
                self._all_at = max(time.monotonic(), self._all_ended + _BETWEEN_S)
                self._changed.notify()

    def every(self, seconds: float) -> None:
        """Look at all processes again and again, so many seconds after the last time."""
        with self._changed:
            self._every = seconds
            self._all_at = time.monotonic()
            self._changed.notify()

    def process(self, pid: int, share: str = "") -> None:
        """Look at one process, if it stays for a moment.

        Each ``share`` but the host's (empty) has a part of the processes that can wait.
        """
        with self._changed:
            waiting = self._shares[share]
            if len(self._pids) < _MOST_PIDS and (not share or waiting < _MOST_OF_A_SHARE):
                if pid not in self._pids:
                    self._shares[share] += 1
                self._pids[pid] = None
            if self._pids_at == math.inf:
                self._pids_at = time.monotonic() + _SETTLED_S
                self._changed.notify()

    @property
    def is_idle(self) -> bool:
        """True if no scan runs, and none is scheduled."""
        with self._changed:
            return not self._is_busy and self._all_at == math.inf and not self._pids

    def close(self) -> None:
        """End, in the middle of a look if there is one; safe to call twice."""
        with self._changed:
            self._ending.set()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def _run(self) -> None:
        self._is_busy = False
        while not self._ending.is_set():
            pids = self._next()
            if self._ending.is_set():
                return
            try:
                self._look(pids, self._ending)
            except Exception:
                # Whatever is wrong with one look, what is caught live does not depend on it.
                _log.exception("a look at running processes failed")
            with self._changed:
                self._is_busy = False
                if pids is None and not self._ending.is_set():
                    self.count += 1
                    self._all_ended = now = time.monotonic()
                    if self._all_at != math.inf:  # asked for meanwhile
                        self._all_at = max(self._all_at, now + _BETWEEN_S)
                    self._all_at = min(self._all_at, now + self._every)

    def _next(self) -> list[int] | None:
        with self._changed:
            while not self._ending.is_set():
                now = time.monotonic()
                if self._all_at <= now:
                    self._is_busy = True
                    self._all_at = self._pids_at = math.inf
                    self._pids = {}
                    self._shares.clear()
                    return None
                if self._pids_at <= now:
                    self._is_busy = True
                    pids, self._pids = list(self._pids), {}
                    self._shares.clear()
                    self._pids_at = math.inf
                    return pids
                due = min(self._all_at, self._pids_at)
                self._changed.wait(None if due == math.inf else due - now)
        return None
