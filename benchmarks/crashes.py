# SPDX-License-Identifier: Apache-2.0
"""How many crashes a store survives: kill -9 of each command that writes to it, and power cuts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.report import Row
from tests.support.crashing import OPERATIONS, Crashes
from tests.support.powercuts import PowerCuts

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Benchmark

_SEED = 1


def kills(bench: Bench) -> Iterator[Row]:
    """Row for kill -9 at random moments of every command that writes to a store."""
    wanted = bench.size(500, 35)
    problems: list[str] = []
    survived = Counter[str]()
    number = 0
    with bench.scratch("crashes") as place:
        crashes = Crashes(place, _SEED)
        while crashes.killed < wanted:
            operation = OPERATIONS[number % len(OPERATIONS)]
            before = crashes.killed
            found = crashes.crash(operation)
            if crashes.killed > before:
                survived[operation.name] += not found
            problems += found
            number += 1
            if found or number % 50 == 0:
                bench.say(f"{crashes.killed} killed, {len(problems)} problems {found}")
    yield Row(
        f"kill -9 at {wanted} random moments: check clean, nothing acknowledged lost", "=",
        wanted, survived.total(),
        detail=", ".join(f"{name} {count}" for name, count in survived.items())
        + "".join(f"; {line}" for line in problems[:3]),
    )  # fmt: skip


def power(bench: Bench) -> Iterator[Row]:
    """Row for power cuts of the disk that the store is on, during scans."""
    wanted = bench.size(100, 10)
    problems: list[str] = []
    with bench.scratch("power") as place, PowerCuts(place, _SEED) as disk:
        while disk.cuts < wanted:
            problems += disk.scan(60, 5)
        cuts = disk.cuts
        told = len(disk.ledger.told)
    yield Row(
        "power cuts at random moments of scans: check clean, nothing acknowledged lost", "=",
        cuts, cuts - len({line.partition(":")[0] for line in problems}),
        detail=f"{told} captures; " + "; ".join(problems[:3]),
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {"crashes": kills, "power-cuts": power}
