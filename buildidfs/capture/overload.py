# SPDX-License-Identifier: Apache-2.0
"""Whether there is more to do than can be done, for longer than a moment."""

from __future__ import annotations


class Overload:
    """More than ``most`` things a second in each of ``seconds`` seconds one after the other."""

    def __init__(self, most: int = 4000, seconds: int = 3) -> None:
        self._most = most
        self._seconds = seconds
        self._second = -1
        self._count = 0
        self._in_a_row = 0

    def add(self, count: int, now: float) -> bool:
        """So many more at ``now`` (time.monotonic()); whether it has been too much."""
        second = int(now)
        if second != self._second:
            busy = self._count > self._most and second == self._second + 1
            self._in_a_row = self._in_a_row + 1 if busy else 0
            self._second, self._count = second, 0
        self._count += count
        return self._in_a_row + (self._count > self._most) >= self._seconds
