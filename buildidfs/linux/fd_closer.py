# SPDX-License-Identifier: Apache-2.0
"""Close files in a thread of its own.

A descriptor may be the last thing that keeps a filesystem or a mount namespace alive. Closing it
then tears that down, which was measured to take 0.4 to 4 ms: as long as some programs live that
the thread of events has to catch. The server of a FUSE filesystem is asked first, and may never
answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.linux import scheduling

if TYPE_CHECKING:
    from collections.abc import Iterable

# Batches that may wait for the delay.
_MOST_DELAYED: Final = 4096


class Closer:
    """Closes descriptors in the order given, ``delay`` seconds later. To be made after the last
    fork.

    A delay leaves it to another process to close its copy first; it does not hold when thousands
    wait. ``urgent`` is for a process whose thread of events runs before all others: a thread that
    has the interpreter lock, be it for a moment, must not wait for a CPU then.
    """

    def __init__(self, *, urgent: bool = False, delay: float = 0.0) -> None:
        self._urgent = urgent
        self._delay = delay
        self._finishing = threading.Event()
        self._queue: queue.SimpleQueue[tuple[float, tuple[int, ...]] | None] = queue.SimpleQueue()
        # It is not waited for at exit: closing a file of a server that is gone may take for ever.
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-close")
        self._thread.start()

    def close(self, fds: Iterable[int]) -> None:
        """Take over these descriptors; -1 is none. Many at a time wake the thread once."""
        batch = tuple(fd for fd in fds if fd >= 0)
        if batch:
            self._queue.put((time.monotonic() + self._delay, batch))

    def finish(self, seconds: float = 1.0) -> bool:
        """Take no more; return True if all are closed within that time, without the delay."""
        self._finishing.set()
        self._queue.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._urgent:
            scheduling.hurry()
        while (item := self._queue.get()) is not None:
            due, batch = item
            if self._delay and self._queue.qsize() < _MOST_DELAYED:
                self._finishing.wait(max(due - time.monotonic(), 0.0))
            for fd in batch:
                # A network filesystem may report a failed write on close; nothing was written here.
                with contextlib.suppress(OSError):
                    os.close(fd)
