# SPDX-License-Identifier: Apache-2.0
"""Closing files in a thread of its own.

A descriptor may be the last thing that keeps a filesystem or a mount namespace alive. Closing it
then tears that down, which was measured to take 0.4 to 4 ms: as long as some programs live that
the thread of events has to catch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import TYPE_CHECKING

from buildidfs.linux import scheduling

if TYPE_CHECKING:
    from collections.abc import Iterable


class Closer:
    """Closes what it is given, soon, in the order given. To be made after the last fork.

    ``urgent`` is for where the thread of events runs before all others: whoever has the interpreter
    lock, be it for a moment, must not wait for a CPU then.
    """

    def __init__(self, *, urgent: bool = False) -> None:
        self._urgent = urgent
        self._queue: queue.SimpleQueue[tuple[int, ...] | None] = queue.SimpleQueue()
        # It is not waited for at exit: closing a file of a server that is gone may take for ever.
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-close")
        self._thread.start()

    def close(self, fds: Iterable[int]) -> None:
        """Take over these descriptors. Many at a time wake the thread once."""
        batch = tuple(fds)
        if batch:
            self._queue.put(batch)

    def finish(self, seconds: float = 1.0) -> bool:
        """Take no more; whether all are closed within that time."""
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._urgent:
            scheduling.hurry()
        while (batch := self._queue.get()) is not None:
            for fd in batch:
                # What the last write of a network filesystem failed with: nothing was written.
                with contextlib.suppress(OSError):
                    os.close(fd)
