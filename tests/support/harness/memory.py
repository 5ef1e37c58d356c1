# SPDX-License-Identifier: Apache-2.0
"""The most memory that processes took while a block ran, by VmHWM in /proc/PID/status."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_EVERY_S = 0.01


def peak(pid: int) -> int:
    """The greatest number of bytes that a process had in memory; 0 if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    return 0


@contextlib.contextmanager
def peaks(pids: Callable[[], Iterable[int]]) -> Iterator[dict[int, int]]:
    """Yield the peaks of processes, which are asked for all the time, by their numbers."""
    found: dict[int, int] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_EVERY_S):
            for pid in pids():
                found[pid] = max(found.get(pid, 0), peak(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
