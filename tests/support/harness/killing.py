# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed with -9 just before some call of C: each system call is one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType


def is_killed(work: Callable[[], None]) -> bool:
    """Run ``work`` in a child process; whether it died of a signal. It must not fail otherwise."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as error:  # pytest's own handling must not run in the child
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


def kill_at_call(number: int) -> None:
    """Kill this process with -9 just before the Nth call of anything written in C."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "c_call":
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(count)
    sys.setprofile(count)


def calls_of(work: Callable[[], None]) -> int:
    """How many calls of C some work makes."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    work()
    sys.setprofile(None)
    return calls
