# SPDX-License-Identifier: Apache-2.0
"""Places that users have together, so divided that none of them can take all."""

from __future__ import annotations


class Quota:
    """Lets each user have half of the places that all others leave, of ``most`` in all.

    What is kept is one number for each user who has a place.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[int, int] = {}
        self._total = 0

    def take(self, uid: int) -> bool:
        """Take a place for a user; False if that would be too many."""
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
