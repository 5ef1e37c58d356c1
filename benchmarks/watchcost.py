# SPDX-License-Identifier: Apache-2.0
"""What ``buildidfs watch`` costs the host it watches: its programs' time, and its own memory.

With and without it are measured in turns, the watch started and stopped in between: one that is
merely stopped would still have the kernel write its records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec

from benchmarks.bench import HERE, Bench, Benchmark, compile_c, require, run, timed
from benchmarks.capture import watched
from benchmarks.report import Row

_MIB = 1 << 20


def perf_record(bench: Bench) -> Iterator[Row]:
    """Rows for a plain recording beside the watch, which has the same counters open."""
    perf = require("perf", "linux-perf")
    rounds = bench.size(20, 5)
    with bench.scratch("beside") as place, watched(bench, place / "store"):
        ended = 0
        for _ in range(rounds):
            record: list[str | Path] = [
                perf,
                "record",
                "-e",
                "cpu-clock",
                "-o",
                place / "data",
                "/bin/true",
            ]
            ended += _ends_well(record, place)
    yield Row(
        f"watch: perf record -e cpu-clock /bin/true beside it ends with 0, of {rounds}", "=",
        rounds, ended,
    )  # fmt: skip


def _ends_well(command: list[str | Path], home: Path) -> bool:
    try:
        run(command, env={"HOME": str(home)})
    except RuntimeError:
        return False
    return True


def spawn(bench: Bench) -> Iterator[Row]:
    """Rows for the time it takes to run a small program to its end."""
    execs = compile_c(HERE / "execs.c", bench.workdir / "execs")
    count = bench.size(2000, 500)

    def action() -> float:
        output = run([execs, str(count), "/usr/bin/true"])
        return msgspec.json.decode(output, type=dict[str, int])["p50_ns"] / 1e3

    yield from _in_turns(bench, "posix_spawn of true", action, 1.25, "us")


def compile_small(bench: Bench) -> Iterator[Row]:
    """Rows for 120 runs of a compiler, one after the other."""
    gcc = require("gcc", "gcc")
    with bench.scratch("compile") as place:
        names = [f"unit{number}.c" for number in range(bench.size(120, 30))]
        for number, name in enumerate(names):
            (place / name).write_text(
                f"#include <stdio.h>\nint unit{number}(void) {{ return puts(__FILE__); }}\n"
            )
        (place / "names").write_text("".join(f"{name}\n" for name in names))
        command = ["xargs", "-a", "names", "-n", "1", gcc, "-O1", "-c"]

        def action() -> float:
            return timed(lambda: run(command, cwd=place)) * 1e3

        yield from _in_turns(bench, f"{len(names)} runs of gcc -c", action, 1.10, "ms")


def _in_turns(
    bench: Bench, what: str, action: Callable[[], float], limit: float, unit: str
) -> Iterator[Row]:
    """A row that compares ``action`` with a watch and without; the best of all rounds counts."""
    without: list[float] = []
    with_it: list[float] = []
    with bench.scratch("turns") as place:
        for number in range(bench.size(9, 3)):
            bench.say(f"{what}: round {number + 1}")
            for taken, context in (
                (without, nullcontext()),
                (with_it, watched(bench, place / "store")),
            ):
                with context:
                    if number == 0:
                        action()
                    taken.append(action())
    yield Row(
        f"watch: {what}, time against without", "<=", limit, min(with_it) / min(without),
        detail=f"{min(with_it):.0f} {unit}, without {min(without):.0f} {unit}; medians "
        f"{_median(with_it):.0f}, {_median(without):.0f}",
    )  # fmt: skip


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def memory(bench: Bench) -> Iterator[Row]:
    """Rows for what the watch has in memory after many programs."""
    execs = compile_c(HERE / "execs.c", bench.workdir / "execs")
    few, many = 1000, bench.size(100_000, 20_000)
    with bench.scratch("storm") as place:
        source, program = place / "nothing.c", place / "nothing"
        source.write_text("int main(void) { return 0; }\n")
        run(["gcc", "-O1", "-static", "-o", program, source])
        bench.say(f"watch: {many} programs")
        with watched(bench, place / "store") as watcher:
            run([execs, str(few), program])
            time.sleep(2)
            before = watcher.memory()
            run([execs, str(many - few), program])
            time.sleep(2)
            after = watcher.memory()
    detail = (
        f"Pss {after.pss / _MIB:.1f} MiB, after {few} {before.pss / _MIB:.1f}; "
        f"RSS {after.rss / _MIB:.1f}, after {few} {before.rss / _MIB:.1f}"
    )
    yield Row(
        f"watch: memory after {many} programs against after {few}", "<=", 1.2,
        after.pss / before.pss, detail=detail,
    )  # fmt: skip
    yield Row(
        f"watch: memory after {many} programs", "<", 80, after.pss / 1e6, "MB",
        detail=f"RSS of its processes added up: {after.rss / 1e6:.0f} MB",
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {
    "watch-perf": perf_record,
    "watch-spawn": spawn,
    "watch-compile": compile_small,
    "watch-memory": memory,
}
