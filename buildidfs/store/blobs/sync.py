# SPDX-License-Identifier: Apache-2.0
"""Many files made durable at once, which takes hardly longer than one."""

from __future__ import annotations

import contextlib
import os
from typing import Final

_DIRECTORIES_AT_ONCE: Final = 32  # a descriptor each, beside those of the staged files


def sync(fds: list[int]) -> None:
    """fsync them all, at once: the journal of most filesystems commits them in groups."""
    if len(fds) < 4:
        for fd in fds:
            os.fsync(fd)
        return
    from concurrent.futures import ThreadPoolExecutor  # readers have no use for it

    with ThreadPoolExecutor(min(16, len(fds))) as pool:
        for _ in pool.map(os.fsync, fds):
            pass


def sync_directories(parent: int, names: set[str]) -> None:
    """fsync an open directory, and those of its directories."""
    ordered = sorted(names)
    for start in range(0, len(ordered), _DIRECTORIES_AT_ONCE):
        with contextlib.ExitStack() as stack:
            fds = [] if start else [parent]
            for name in ordered[start : start + _DIRECTORIES_AT_ONCE]:
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                fds.append(os.open(name, flags, dir_fd=parent))
                stack.callback(os.close, fds[-1])
            sync(fds)
