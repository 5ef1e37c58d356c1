# SPDX-License-Identifier: Apache-2.0
"""A budget for the work that bytes of strangers may cause, charged before the work.

A limit of each number in a format does not bound their product: a thousand headers of the largest
size, or a long name that all files share. A decoder charges each of them to one budget for its
input, whose size follows from the size of that input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STEP_BYTES: Final = 256
"""Bytes that are copied, hashed or decompressed in the time of one step."""


class Spent(Exception):
    """A budget has too few steps left; for callers who need no other error."""


class Budget:
    """The remaining steps of one input. A step is the work for one small record, about 0.5 µs."""

    __slots__ = ("_error", "_left")

    def __init__(self, steps: int, error: Callable[[], Exception] = Spent) -> None:
        self._left = steps
        self._error = error

    def charge(self, steps: int) -> None:
        """Take some steps. Raises the error of the budget if fewer are left."""
        self._left -= steps
        if self._left < 0:
            raise self._error()
