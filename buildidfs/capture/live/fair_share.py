# SPDX-License-Identifier: Apache-2.0
"""Admit new files of each container at a bounded rate, so that one of them cannot starve others.

Each new file that a container maps costs the catcher ten system calls, and the recorder a copy.
Beyond the share of a container its mappings are counted and not looked at, which costs nothing but
the decoding of the event. What root owns on the host is not bounded, see `grabber`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from buildidfs.capture.live.process_table import Home, Share

PER_SECOND: Final = 300.0
"""New files that all shares together may have looked at in a second, for as long as they like.

Less than what two busy processors take in, which was about 400 a second during a flood.
"""

BURST: Final = 1024
"""New files of one share that are looked at whatever their rate: more than a container starts
with. Divided by the number of shares that are using theirs up."""

_LEAST_BURST: Final = 128
_MOST_SHARES: Final = 1024
_REST: Final = "(others)"
_REFILL_S: Final = 0.02
_PATH_BYTES: Final = 4096  # of those named in one message


class Dropped:
    """Mappings of one share that were not looked at: how many, where, and a few of their paths."""

    __slots__ = ("_room", "count", "home", "paths")

    def __init__(self, home: Home) -> None:
        self.home = home
        self.count = 0
        self.paths: list[bytes] = []
        self._room = _PATH_BYTES

    def add(self, path: bytes) -> None:
        """Count one more."""
        self.count += 1
        if len(path) <= self._room:
            self._room -= len(path)
            self.paths.append(path)


class FairShare:
    """Thread-safe, in bounded memory. ``now`` is a time of ``time.monotonic()``, in seconds."""

    def __init__(self, per_second: float = PER_SECOND, burst: int = BURST) -> None:
        self._per_second = per_second
        self._burst = burst
        self._lock = threading.Lock()
        self._left: dict[Share, float] = {}
        self._dropped: dict[Share, Dropped] = {}
        self._refilled = 0.0

    @property
    def is_pressed(self) -> bool:
        """Return True while some share is being used."""
        return bool(self._left)

    def is_exhausted(self, share: Share) -> bool:
        """Return True if nothing more of this share is to be looked at now."""
        return self._left.get(share, 1.0) < 1.0

    def admit(self, share: Share) -> bool:
        """Take one new file from a share; False if there is nothing left of it."""
        with self._lock:
            left = self._left.get(share)
            if left is None:
                if len(self._left) >= _MOST_SHARES:
                    share = _REST
                left = self._left.setdefault(share, self._full())
            if left < 1.0:
                return False
            self._left[share] = left - 1.0
            return True

    def drop(self, share: Share, home: Home, path: bytes) -> None:
        """Count a mapping that was not looked at."""
        with self._lock:
            if share not in self._dropped and len(self._dropped) >= _MOST_SHARES:
                share = _REST
            dropped = self._dropped.get(share)
            if dropped is None:
                dropped = self._dropped[share] = Dropped(home)
            dropped.add(path)

    def take_dropped(self) -> list[Dropped]:
        """Return what was dropped since the last call, by share."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, {}
        return list(dropped.values())

    def refill(self, now: float) -> None:
        """Divide what the time since the last call is worth among the shares that are in use."""
        passed = now - self._refilled
        if passed < _REFILL_S:
            return
        with self._lock:
            self._refilled = now
            if not self._left:
                return
            more = min(passed, 1.0) * self._per_second / len(self._left)
            full = self._full()
            self._left = {
                share: left + more for share, left in self._left.items() if left + more < full
            }

    def _full(self) -> float:
        return max(self._burst / max(len(self._left), 1), _LEAST_BURST)
