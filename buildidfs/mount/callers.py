# SPDX-License-Identifier: Apache-2.0
"""The names of the processes that ask, as far as they can be told."""

from __future__ import annotations

import os
import time

from buildidfs.linux import procfs

UNKNOWN = b"?"

_REMEMBERED_S = 1.0


class Callers:
    """Looks up who asks. Whoever asked last is remembered: they mostly ask for more."""

    def __init__(self) -> None:
        self._last = (0, UNKNOWN, 0.0)

    def name(self, pid: int) -> bytes:
        """The name of the thread ``pid``; `UNKNOWN` when it has gone, or is in a PID namespace that
        is none of ours (then it is 0).
        """
        known, name, until = self._last
        now = time.monotonic()
        if pid != known or now > until:
            name = _name(pid)
            self._last = (pid, name, now + _REMEMBERED_S)
        return name


def _name(pid: int) -> bytes:
    try:
        pid_fd = procfs.open_pid(pid)
        try:
            return procfs.comm(pid_fd) or UNKNOWN
        finally:
            os.close(pid_fd)
    except OSError:
        return UNKNOWN
