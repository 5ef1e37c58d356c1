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
from benchmarks.capture import MODES, watched
from benchmarks.report import Row

_MIB = 1 << 20


def perf_record(bench: Bench) -> Iterator[Row]:
    """Rows for a plain recording beside the watch, which has the same counters open."""
    perf = require("perf", "linux-perf")
    rounds = bench.size(20, 5)
    for mode, options in MODES.items():
        with bench.scratch("beside") as place, watched(bench, place / "store", *options):
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
            f"{mode}: perf record -e cpu-clock /bin/true beside it ends with 0, of {rounds}", "=",
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

    yield from _in_turns(
        bench, "posix_spawn of true", action, {"watch": 1.25, "watch --strict": 1.7}, "us"
    )


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

        yield from _in_turns(
            bench, f"{len(names)} runs of gcc -c", action, dict.fromkeys(MODES, 1.10), "ms"
        )


def _in_turns(
    bench: Bench, what: str, action: Callable[[], float], limits: dict[str, float], unit: str
) -> Iterator[Row]:
    """Rows that compare ``action`` with each mode and without; the best of all rounds counts."""
    times: dict[str, list[float]] = {"": [], **{mode: [] for mode in MODES}}
    with bench.scratch("turns") as place:
        for number in range(bench.size(9, 3)):
            bench.say(f"{what}: round {number + 1}")
            for mode, taken in times.items():
                # A store for each mode: what a round captures, the next one knows.
                store = place / f"store{len(mode)}"
                with watched(bench, store, *MODES[mode]) if mode else nullcontext():
                    if number == 0:
                        action()
                    taken.append(action())
    base = times.pop("")
    for mode, taken in times.items():
        yield Row(
            f"{mode}: {what}, time against without", "<=", limits[mode], min(taken) / min(base),
            detail=f"{min(taken):.0f} {unit}, without {min(base):.0f} {unit}; medians "
            f"{_median(taken):.0f}, {_median(base):.0f}",
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
        for mode, options in MODES.items():
            bench.say(f"{mode}: {many} programs")
            with watched(bench, place / f"store{len(mode)}", *options) as watcher:
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
                f"{mode}: memory after {many} programs against after {few}", "<=", 1.2,
                after.pss / before.pss, detail=detail,
            )  # fmt: skip
            yield Row(
                f"{mode}: memory after {many} programs", "<", 80, after.pss / 1e6, "MB",
                detail=f"RSS of its processes added up: {after.rss / 1e6:.0f} MB",
            )  # fmt: skip


ROWS: dict[str, Benchmark] = {
    "watch-perf": perf_record,
    "watch-spawn": spawn,
    "watch-compile": compile_small,
    "watch-memory": memory,
}
