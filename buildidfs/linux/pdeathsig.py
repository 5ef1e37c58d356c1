# SPDX-License-Identifier: Apache-2.0
"""Not outliving the process that started this one. Source: PR_SET_PDEATHSIG(2const)."""

from __future__ import annotations

import os
import signal

from buildidfs.linux.syscalls import last_error, libc

_PR_SET_PDEATHSIG = 1


def end_with(parent: int, number: signal.Signals) -> None:
    """Get ``number`` when the thread that started us ends, which is the process ``parent``.

    Call it in the child, before or after exec, which keeps it (unless the program has more
    privileges than its caller). If the parent is gone already the signal comes at once. Raises
    OSError.
    """
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise last_error()
    # 0 is a parent outside our PID namespace; the heir of one that is gone is inside.
    if os.getppid() not in (parent, 0):
        os.kill(os.getpid(), number)
