# SPDX-License-Identifier: Apache-2.0
"""Who opens what must not be opened: inotify(7) tells of every open of a file but O_PATH."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from buildidfs.linux import syscalls

_IN_OPEN = 0x20
_EVENTS = 1 << 16


class Opens:
    """Counts the opens of some files, wherever these are moved to."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def any(self) -> bool:
        """Whether there were any since the last call."""
        try:
            return bool(os.read(self._fd, _EVENTS))
        except BlockingIOError:
            return False


@contextlib.contextmanager
def watched(*paths: Path) -> Iterator[Opens]:
    """Watch these files until the end of the block."""
    fd = syscalls.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        raise syscalls.last_error()
    try:
        for path in paths:
            if (
                syscalls.libc.inotify_add_watch(fd, ctypes.c_char_p(os.fsencode(path)), _IN_OPEN)
                < 0
            ):
                raise syscalls.last_error()
        yield Opens(fd)
    finally:
        os.close(fd)
