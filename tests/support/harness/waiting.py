# SPDX-License-Identifier: Apache-2.0
"""Waiting for what other processes do: always for a condition, always with a deadline."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from typing import IO, TypeVar

T = TypeVar("T")

_LEAST_PAUSE_S = 0.005
_MOST_PAUSE_S = 0.2


def until(condition: Callable[[], T], what: str, seconds: float = 60) -> T:
    """Return the first true result of ``condition``; `TimeoutError` says ``what`` never came.

    A condition that takes long, such as a command, is asked less often: to ask takes the processor
    from those who are waited for.
    """
    deadline = time.monotonic() + seconds
    asked = time.monotonic()
    while not (result := condition()):
        answered = time.monotonic()
        if answered > deadline:
            raise TimeoutError(f"not within {seconds} s: {what}")
        time.sleep(min(max(2 * (answered - asked), _LEAST_PAUSE_S), _MOST_PAUSE_S))
        asked = time.monotonic()
    return result


def lines(stream: IO[bytes], enough: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
    """Read whole lines from an unbuffered pipe until ``enough`` of them are there.

    At the end of the stream, or after ``seconds``, `EOFError` or `TimeoutError` shows what came.
    """
    deadline = time.monotonic() + seconds
    text = b""
    while not enough(found := text.decode(errors="replace").split("\n")[:-1]):
        ready, _, _ = select.select([stream], [], [], max(0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"not within {seconds} s, only: {text!r}")
        more = os.read(stream.fileno(), 65536)
        if not more:
            raise EOFError(f"ended after: {text.decode(errors='replace')}")
        text += more
    return found
