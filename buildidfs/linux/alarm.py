# SPDX-License-Identifier: Apache-2.0
"""A timer that wakes one thread up, and that other threads set without a wake-up of their own.

Source: timerfd_create(2); Python has a function for it since 3.13.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from typing import Final

from buildidfs.linux import syscalls
from buildidfs.linux.file_ops import Fd

_CLOEXEC: Final = os.O_CLOEXEC
_NS: Final = 1_000_000_000


class Alarm(Fd):
    """Ends `wait` of one thread ``seconds`` after the first `set` since the last `wait`.

    The constructor raises OSError.
    """

    __slots__ = ("_is_set", "_time")

    def __init__(self, seconds: float) -> None:
        fd = syscalls.libc.timerfd_create(time.CLOCK_MONOTONIC, _CLOEXEC)
        if fd < 0:
            raise syscalls.last_error()
        super().__init__(fd)
        # struct itimerspec: no period; the time to the first expiration.
        whole, rest = divmod(round(seconds * _NS), _NS)
        self._time = ctypes.create_string_buffer(struct.pack("@4l", 0, 0, whole, rest))
        self._is_set = False

    def set(self) -> None:
        """Start the timer, unless it runs; costs two microseconds then, and next to nothing else.

        A thread that sets it after a change can rely on a `wait` that ends after the change.
        """
        if not self._is_set:
            self._is_set = True
            if syscalls.libc.timerfd_settime(self.fd, 0, self._time, None):
                raise syscalls.last_error()

    def wait(self) -> None:
        """Wait until the timer that a thread has set expires."""
        os.read(self.fd, 8)
        self._is_set = False
