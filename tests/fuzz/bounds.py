# SPDX-License-Identifier: Apache-2.0
"""Costs of the worst inputs of a target, measured in a process with limits.

``python -m tests.fuzz.bounds`` prints one line of JSON for each input of each target: its name,
processor seconds, bytes of memory above what the process had before, and what was raised. On a
machine that is slow, or has become so, they are the seconds of one that is not: see `_slowness`.
"""

from __future__ import annotations

import gc
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tests.fuzz.targets import TARGETS
from tests.support.clients.tools import run

if TYPE_CHECKING:
    from tests.fuzz.target import Target

_PATIENCE: Final = 600.0  # of all, on a machine that is busy
_ATTEMPTS: Final = 3  # a processor that is shared with another takes twice as long
_ROUNDS: Final = 500_000
_ROUNDS_S: Final = 0.015  # of so many rounds; measured on the 2-core VM of the bounds: 14 to 17 ms
_SLACK: Final = 64 << 20  # of addresses: threads and arenas take more than they touch


class Cost(NamedTuple):
    """Of one input, in seconds of a usual machine. ``fault`` is empty, or what should not have been
    raised.
    """

    seconds: float
    memory: int
    fault: str


def costs() -> dict[str, list[Cost]]:
    """Measure the worst inputs of all targets, in a process of its own."""
    argv = [sys.executable, "-m", "tests.fuzz.bounds"]
    result = run(argv, cwd=Path(__file__).resolve().parents[2], check=True, timeout=_PATIENCE)
    found: dict[str, list[Cost]] = {name: [] for name in TARGETS}
    for line in result.out.splitlines():
        name, *cost = json.loads(line)
        found[name].append(Cost(*cost))
    return found


def _measure(name: str, target: Target) -> None:
    for seed in target.seeds():
        target.check(seed)  # whatever it makes once, and imports when it is needed
    for data in target.worst():
        assert len(data) <= target.most, "an input that is larger than any that is given"
        gc.collect()
        print(json.dumps((name, *_cost(target, data))), flush=True)


def _cost(target: Target, data: bytes) -> Cost:
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = _kilobytes("VmRSS")
    addresses = (_kilobytes("VmSize") << 10) + target.bytes + _SLACK
    resource.setrlimit(resource.RLIMIT_AS, (addresses, resource.RLIM_INFINITY))
    attempt, fault = target.cost or target.check, ""
    seconds = target.seconds
    for _ in range(_ATTEMPTS):
        if seconds < target.seconds or fault:
            break
        started = time.process_time()
        try:
            attempt(data)
        except BaseException as error:  # whatever it is, it is what is asked for
            fault = f"{type(error).__name__}: {error}"[:500]
        seconds = time.process_time() - started
        if seconds >= target.seconds:
            seconds /= _slowness()
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return Cost(seconds, max(0, _kilobytes("VmHWM") - before) << 10, fault)


def _slowness() -> float:
    """How many times as long as on a usual machine work takes on this one at present; at least 1.

    It makes no difference to work whose time is the square of its input: that is over its bound a
    hundredfold.
    """
    started = time.process_time()
    left = _ROUNDS
    while left:
        left -= 1
    return max(1.0, (time.process_time() - started) / _ROUNDS_S)


def _kilobytes(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


if __name__ == "__main__":
    gc.freeze()  # so that collecting, before each input, does not go through all modules
    for each in sys.argv[1:] or TARGETS:
        _measure(each, TARGETS[each])
