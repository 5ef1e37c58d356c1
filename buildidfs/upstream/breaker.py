# SPDX-License-Identifier: Apache-2.0
"""A circuit breaker for each server: a server that fails is not asked for a while.

Without it each of hundreds of missing files would wait for a hanging server.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from buildidfs.backoff import Attempts, Backoff

if TYPE_CHECKING:
    from buildidfs.upstream.server import Unavailable

FAILURES: Final = 3
"""The number of failures in a row after which a server is not asked any more. One is enough if the
server hangs or refuses us.
"""
_PAUSES: Final = Backoff(15.0, 600.0, jitter=0.2)
_REFUSED_S: Final = 300.0


class Breaker:
    """The state of one server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failures = 0
        self._probes = Attempts(_PAUSES)
        self._probing = False
        self.why = ""
        """The last failure as a text, while the server is not asked."""

    def admits(self) -> bool:
        """Return True if the server may be asked. The caller then reports the result to `succeeded`
        or `failed`.

        When the pause is over, one request tests the server. All others are refused until this
        request is done.
        """
        with self._lock:
            if not self._probes.failures:
                return True
            if self._probing or not self._probes.is_due:
                return False
            self._probing = True
            return True

    def succeeded(self) -> None:
        """Record that the server has answered, even if only that a file is absent."""
        with self._lock:
            self._failures = 0
            self._probes.succeeded()
            self._probing = False
            self.why = ""

    def failed(self, error: Unavailable) -> None:
        """Record that the server could not be asked."""
        with self._lock:
            self._failures += 1
            was_probe, self._probing = self._probing, False
            if not (error.hangs or error.lasting or was_probe or self._failures >= FAILURES):
                return
            if not was_probe and not self._probes.is_due:
                return  # of several requests that failed together, the first one counted
            least = _REFUSED_S if error.lasting else 0.0
            self._probes.failed(max(least, min(error.after, _PAUSES.most)))
            self.why = str(error)
