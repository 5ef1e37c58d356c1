# SPDX-License-Identifier: Apache-2.0
"""Division of a limited number of places (open files, for example) among users."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class Quota:
    """Divides ``most`` places: each user gets at most half of those that the other users leave."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, int] = {}
        self._total = 0

    def take(self, user: Hashable, count: int = 1) -> bool:
        """Take places for a user; return False if the user would have too many."""
        if not self.has(user, count):
            return False
        self._held[user] = self._held.get(user, 0) + count
        self._total += count
        return True

    def has(self, user: Hashable, count: int = 1) -> bool:
        """Return True if `take` would give the user that many places."""
        held = self._held.get(user, 0)
        return 2 * (held + count) <= self._most - self._total + held

    def give_back(self, user: Hashable, count: int = 1) -> None:
        """Give back places of a user."""
        held = self._held.get(user, 0)
        if not held:
            return
        count = min(count, held)
        self._total -= count
        if held > count:
            self._held[user] = held - count
        else:
            del self._held[user]
