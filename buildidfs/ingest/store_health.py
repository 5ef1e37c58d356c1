# SPDX-License-Identifier: Apache-2.0
"""Health of the store of a watch: told once when it cannot be written, and once when it can."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Final

from buildidfs.errors import StoreFull

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.errors import BuildIdFsError
    from buildidfs.ingest.results import Counters

FIRST_DELAY_S: Final = 1.0
LAST_DELAY_S: Final = 10.0

# What is asked for after a recovery costs as much as a scan. A store that is full for one huge file
# and not for the others recovers all the time.
_FIRST_PAUSE_S: Final = 10.0
_LAST_PAUSE_S: Final = 600.0
_TELL_EVERY_S: Final = 60.0

_log = logging.getLogger(__name__)


def delay(tries: int) -> float:
    """Return the seconds until the next attempt, after so many that failed: 1, 2, 4, 8, 10..."""
    return min(FIRST_DELAY_S * 2.0 ** min(tries, 16), LAST_DELAY_S)


class Trouble:
    """True while the store cannot be written. Belongs to one lock, and tells in ``counters``.

    Bytes and rows fail apart: an index has free pages when its filesystem has none. ``recover_at``
    is the time of ``time.monotonic()`` at which to `announce` that what was lost meanwhile can be
    looked for.
    """

    def __init__(self, counters: Counters, announce: Callable[[], None]) -> None:
        self.announce = announce
        self._counters = counters
        self._told: dict[type, float] = {}
        self._tell_end = False
        self._bytes = self._rows = False
        self._row_tries = 0
        self._lost = False
        self._pause = _FIRST_PAUSE_S
        self._quiet_since = -math.inf
        self.probe_at = math.inf
        self.rows_at = 0.0
        self.recover_at = math.inf

    def __bool__(self) -> bool:
        return self._bytes or self._rows

    def failed(self, error: BuildIdFsError, *, rows: bool = False) -> None:
        """Bytes could not be written, or ``rows``."""
        now = time.monotonic()
        if rows:
            self._rows = True
            self.rows_at = now + delay(self._row_tries)
            self._row_tries += 1
        else:
            self._bytes = True
            self.probe_at = now + LAST_DELAY_S
        counters = self._counters
        counters.store_error = str(error)
        if isinstance(error, StoreFull) and not counters.store_full_since:
            counters.store_full_since = time.time()
        if now - self._told.get(type(error), -math.inf) > _TELL_EVERY_S:
            self._told[type(error)] = now
            self._tell_end = True
            _log.warning("%s; trying again until it can be written", error)

    def passed(self, *, rows: bool = False) -> None:
        """Bytes could be written, or ``rows``."""
        if not self:
            return
        if rows:
            self._rows, self.rows_at, self._row_tries = False, 0.0, 0
        else:
            self._bytes, self.probe_at = False, math.inf
        if not self:
            self._over()

    def lost(self) -> None:
        """Something was let go for it that may still be there later."""
        self._lost = True

    def recovered(self) -> None:
        """A scan looks now for what was lost."""
        self._lost, self.recover_at = False, math.inf
        self._quiet_since = time.monotonic()

    def _over(self) -> None:
        counters = self._counters
        counters.store_error, counters.store_full_since = "", 0.0
        if self._tell_end:
            self._tell_end = False
            _log.warning("the store can be written again")
        if not self._lost:
            return
        now = time.monotonic()
        if now - self._quiet_since > _LAST_PAUSE_S:
            self._pause = _FIRST_PAUSE_S
            self.recover_at = now
        else:
            self.recover_at = self._quiet_since + self._pause
            self._pause = min(self._pause * 2, _LAST_PAUSE_S)
