# SPDX-License-Identifier: Apache-2.0
"""The rate at which new files are opened, divided among containers and users."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from buildidfs.shares import Share

if TYPE_CHECKING:
    from buildidfs.capture.live.process_table import Home

PER_SECOND: Final = 600.0
"""New files of all shares together that are opened per second.

This is less than two processors can process during a flood: a new file costs 2 ms of them, and 0.4
ms of the thread that receives it.
"""

BURST: Final = 1024
"""New files of one owner that are opened without a limit of the rate: more than a container maps at
its start. The number is divided by the number of active owners.
"""

_LEAST_BURST: Final = 128
_MOST_OWNERS: Final = 1024
_MOST_PLACES: Final = 8  # of an owner; all further ones are one place
_REST: Final = "(others)"
_REFILL_S: Final = 0.02
_PATH_BYTES: Final = 4096  # of the paths in one message


class DroppedMappings:
    """Mappings of one share that were not opened: their count, home and a few paths."""

    __slots__ = ("_room", "count", "home", "paths")

    def __init__(self, home: Home) -> None:
        self.home = home
        self.count = 0
        self.paths: list[bytes] = []
        self._room = _PATH_BYTES

    def add(self, path: bytes) -> None:
        """Count one more mapping."""
        self.count += 1
        if len(path) <= self._room:
            self._room -= len(path)
            self.paths.append(path)


class FairShare:
    """Admits new files of each owner at a bounded rate, so that none of them starves others.

    Each new file that a container maps costs the catcher ten system calls, and the watch a copy.
    Mappings beyond a share are counted and not opened. The places of an owner divide what it has.
    Files that root owns on the host have no limit, see `Lookout`. Thread-safe, in bounded memory.
    ``now`` is a time of ``time.monotonic()``, in seconds.
    """

    def __init__(self, per_second: float = PER_SECOND, burst: int = BURST) -> None:
        self._per_second = per_second
        self._burst = burst
        self._lock = threading.Lock()
        self._left: dict[Share, float] = {}
        self._places: Counter[str] = Counter()  # in `_left`, by owner
        self._dropped: dict[Share, DroppedMappings] = {}
        self._refilled = 0.0

    @property
    def is_pressed(self) -> bool:
        """Return True while a share is in use."""
        return bool(self._left)

    def is_exhausted(self, share: Share) -> bool:
        """Return True if no more files of this share may be opened now."""
        return self._left.get(share, 1.0) < 1.0

    def admit(self, share: Share, *, is_copy: bool = False) -> bool:
        """Take one new file from a share; return False if the share is used up.

        A file that was seen at another place before (``is_copy``) takes nothing of the second half
        of a share. So the libraries of a container runtime, which starts in each new mount
        namespace, leave room for the files of the containers.
        """
        with self._lock:
            left = self._left.get(share)
            if left is None:
                share, left = self._begun(share)
            if left - (self._full_of(share) / 2 if is_copy else 0.0) < 1.0:
                return False
            self._left[share] = left - 1.0
            return True

    def drop(self, share: Share, home: Home, path: bytes) -> None:
        """Count a mapping whose file was not opened."""
        with self._lock:
            if share not in self._dropped and len(self._dropped) >= _MOST_OWNERS:
                share = Share(share.owner, _REST)
                if share not in self._dropped and len(self._dropped) >= 2 * _MOST_OWNERS:
                    share = Share(_REST)
            dropped = self._dropped.get(share)
            if dropped is None:
                dropped = self._dropped[share] = DroppedMappings(home)
            dropped.add(path)

    def take_dropped(self) -> list[DroppedMappings]:
        """Return the mappings dropped since the last call, by share."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, {}
        return list(dropped.values())

    def refill(self, now: float) -> None:
        """Divide the allowance of the time since the last call among the shares in use."""
        passed = now - self._refilled
        if passed < _REFILL_S:
            return
        with self._lock:
            self._refilled = now
            if not self._left:
                return
            owners, places = len(self._places), self._places
            more = min(passed, 1.0) * self._per_second / owners
            self._left = {
                share: left + more / places[share.owner]
                for share, left in self._left.items()
                if left + more / places[share.owner] < self._full_of(share)
            }
            self._places = Counter(share.owner for share in self._left)

    def _begun(self, share: Share) -> tuple[Share, float]:
        """Return the row for a share without one, and what is left of it."""
        if share.owner not in self._places and len(self._places) >= _MOST_OWNERS:
            share = Share(_REST)
        elif self._places[share.owner] >= _MOST_PLACES:
            share = Share(share.owner, _REST)
        left = self._left.get(share)
        if left is None:
            full = self._full(max(len(self._places), 1))
            self._places[share.owner] += 1
            left = self._left[share] = full / self._places[share.owner]
        return share, left

    def _full_of(self, share: Share) -> float:
        return self._full(len(self._places)) / self._places[share.owner]

    def _full(self, owners: int) -> float:
        return max(self._burst / owners, _LEAST_BURST)
