# SPDX-License-Identifier: Apache-2.0
"""Sharing of a bounded number of places among the users of a front door."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable


class Quota:
    """Gives each user at most half of the places that all others leave, of ``most`` in all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[Hashable, int] = {}
        self._total = 0

    def take(self, user: Hashable) -> bool:
        """Take a place for a user; False if the user has too many."""
        held = self._held.get(user, 0)
        if 2 * (held + 1) > self._most - self._total + held:
            return False
        self._held[user] = held + 1
        self._total += 1
        return True

    def give_back(self, user: Hashable) -> None:
        """Give back a place of a user."""
        held = self._held.get(user, 0)
        if not held:
            return
        self._total -= 1
        if held > 1:
            self._held[user] = held - 1
        else:
            del self._held[user]
