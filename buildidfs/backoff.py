# SPDX-License-Identifier: Apache-2.0
"""Growing delays between attempts at work that fails."""

from __future__ import annotations

import os
import time
from typing import Final

import msgspec

_MOST_DOUBLED: Final = 32


class Backoff(msgspec.Struct, frozen=True):
    """The delays in seconds: ``first`` after one failure, twice as long after each further one, up
    to ``most``.

    Each delay is varied by up to the fraction ``jitter``, so that many clients of one server do not
    all return at the same moment.
    """

    first: float
    most: float
    jitter: float = 0.0

    def delay(self, earlier: int) -> float:
        """Return the delay after a failure that had a number of ``earlier`` ones in a row."""
        delay = min(self.first * 2.0 ** min(earlier, _MOST_DOUBLED), self.most)
        if self.jitter:
            delay *= 1 + self.jitter * (int.from_bytes(os.urandom(4)) / (1 << 31) - 1)
        return delay


class Attempts:
    """The attempts at one piece of work: the time of the next one. Not thread-safe.

    After a failure, the next attempt is due after the delay of ``backoff``. A success starts the
    delays from the first one; so does a time of ``backoff.most`` seconds without a failure after
    the last attempt was due.
    """

    def __init__(self, backoff: Backoff) -> None:
        self._backoff = backoff
        self.failures = 0
        """The number of failures in a row."""
        self.due = 0.0
        """The time of the next attempt, by the monotonic clock."""

    @property
    def is_due(self) -> bool:
        """True if the next attempt may begin."""
        return time.monotonic() >= self.due

    def failed(self, least: float = 0.0) -> float:
        """Record a failure; return the delay in seconds, ``least`` or more."""
        now = time.monotonic()
        if now - self.due >= self._backoff.most:
            self.failures = 0
        delay = max(self._backoff.delay(self.failures), least)
        self.failures += 1
        self.due = now + delay
        return delay

    def succeeded(self) -> None:
        """Record a success: the next attempt is due now."""
        self.failures, self.due = 0, 0.0
