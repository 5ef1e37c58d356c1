# SPDX-License-Identifier: Apache-2.0
"""Places that users have together, so divided that none of them can take all."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection


class Quota:
    """Lets each user have half of the places that all others leave, of ``most`` in all.

    The ``free`` users are not counted. What is kept is one number for each user who has a place.
    """

    def __init__(self, most: int, free: Collection[int] = ()) -> None:
        self._most = most
        self._free = frozenset(free)
        self._held: dict[int, int] = {}
        self._total = 0

    def take(self, uid: int) -> bool:
        """Take a place for a user; False if that would be too many."""
        if uid in self._free:
            return True
        held = self._held.get(uid, 0)
        if 2 * (held + 1) > self._most - self._total + held:
            return False
        self._held[uid] = held + 1
        self._total += 1
        return True

    def give_back(self, uid: int) -> None:
        """A user has one place less."""
        held = self._held.get(uid, 0)
        if not held:
            return
        self._total -= 1
        if held > 1:
            self._held[uid] = held - 1
        else:
            del self._held[uid]
