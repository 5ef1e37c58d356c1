# SPDX-License-Identifier: Apache-2.0
"""``buildidfs watch``: what it captures of programs that are gone at once, and what it costs.

Each item is a new executable and shared object, alone on a filesystem in a mount namespace, all of
which is destroyed when the program ends after a millisecond
(tests/support/containers/shortlife.py). Bytes are compared. Costs to the host are measured with and
without a watch in turns; the watch is started and ended in between, because the kernel would still
write records for one that is merely stopped.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.bench import HERE, Bench, Benchmark, compile_c, require, run, timed
from benchmarks.mounts import buildidfs
from benchmarks.report import Row
from tests.support.containers.flooding import beside, flooding
from tests.support.containers.knownprogram import KnownProgram
from tests.support.containers.shortlife import (
    CONFIGS,
    Expected,
    Result,
    ShortLife,
    compare,
    compare_perf_cache,
)
from tests.support.harness.watching import Watcher, watching

_LOADED = ("host", "tmpfs", "overlay", "crun")
_LARGE = 20_000_000
_MIB = 1 << 20


class Workload(NamedTuple):
    """Items of one kind: where, how many at a time, and how many seconds each lives."""

    config: str
    concurrency: int
    life: float

    def __str__(self) -> str:
        return f"{self.config}, {self.concurrency} at a time, {self.life * 1000:g} ms"


_WORKLOADS = [
    *(Workload(config, concurrency, 0.001) for config in CONFIGS for concurrency in (1, 8)),
    *(Workload(config, concurrency, 0) for config in CONFIGS[:3] for concurrency in (1, 8)),
]


@contextmanager
def watched(bench: Bench, store: Path) -> Iterator[Watcher]:
    """``watch`` on a store, without a scan at the start: what is there already is not measured."""
    command = buildidfs(store)[:1]
    with watching(store, "--no-scan", command=command) as watcher:
        yield watcher
    bench.say(f"watch said: {watcher.log.strip()[-300:]}")


@contextmanager
def items(bench: Bench, padding: int = 0) -> Iterator[ShortLife]:
    """The maker and runner of items."""
    require("gcc", "gcc")
    require("crun", "crun")
    require("mksquashfs", "squashfs-tools")
    require("mkfs.ext4", "e2fsprogs")
    with bench.scratch("shortlife") as place, ShortLife(place / "items", padding) as made:
        yield made


def capture(bench: Bench) -> Iterator[Row]:
    """Rows for every configuration, on a machine with nothing to do."""
    yield from _captured(bench, _WORKLOADS)


def capture_busy(bench: Bench) -> Iterator[Row]:
    """The same for some of them, while every CPU has two other processes that never wait, and with
    32 items at a time while every CPU has eight of them.
    """
    cpus = os.cpu_count() or 1
    loads = [load for load in _WORKLOADS if load.config in _LOADED and load.life]
    crowds = [Workload(config, 32, 0.001) for config in _LOADED]
    for hogs, some, limit in ((2 * cpus, loads, 99.5), (8 * cpus, crowds, 95.0)):
        yield from _captured(bench, some, hogs, limit)


@contextmanager
def _busy_loops(count: int) -> Iterator[None]:
    """Keep the CPUs busy with ``count`` processes."""
    argv = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    loops = [subprocess.Popen(argv) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def _captured(
    bench: Bench, loads: Sequence[Workload], hogs: int = 0, limit: float = 99.5
) -> Iterator[Row]:
    """Rows for each workload. The watch is up before the busy loops start. It copies files that the
    catcher holds at the usual priority, so beside busy loops it has more time.
    """
    what = f", {hogs} busy loops" if hogs else ""
    count = bench.size(300, 40)
    wrong = 0
    with items(bench) as made, bench.scratch("watched") as place:
        store = place / "store"
        ran = []
        with watched(bench, store) as watcher, _busy_loops(hogs):
            for load in loads:
                before = watcher.cpu_seconds()
                expected = made.run(load.config, count, load.concurrency, load.life)
                result = watcher.captured(expected, 60.0 if hogs else 10.0)
                ran.append((load, expected, (watcher.cpu_seconds() - before) / count))
                bench.say(f"watch{what}: {load}: {result}, {expected.seconds:.1f} s")
        for load, expected, cpu in ran:
            result = compare(store, expected)
            wrong += result.wrong_bytes
            yield _row(f"watch{what}: {load}", limit, result, cpu)
    yield Row(f"watch{what}: files with other bytes than those that ran", "=", 0, wrong)


def known_program(bench: Bench) -> Iterator[Row]:
    """Rows for new libraries that a known program loads from a filesystem that is gone at once."""
    count = bench.size(300, 40)
    for life in (0.0, 0.001):
        with items(bench) as made, bench.scratch("known") as place:
            program, store = KnownProgram(made, place / "known", count), place / "store"
            with watched(bench, store) as watcher:
                watcher.captured(program.run(life))
            result = compare(store, program.expected)
        yield Row(
            f"watch: libraries of a known program, gone after {life * 1000:g} ms; captured",
            ">=", 99.5, result.so_percent, "%", detail=f"{result}, of libraries only",
        )  # fmt: skip


def _row(what: str, limit: float, result: Result, cpu: float) -> Row:
    return Row(
        f"{what}; captured", ">=", limit, min(result.exe_percent, result.so_percent), "%",
        detail=f"exe {result.exe_percent:.1f} %, so {result.so_percent:.1f} %, "
        f"wrong {result.wrong_bytes}, {cpu * 1000:.1f} ms of CPU an item",
    )  # fmt: skip


def peer(bench: Bench) -> Iterator[Row]:
    """Rows for the share of the same files that perf's own cache has after a recording."""
    perf = require("perf", "linux-perf")
    count = bench.size(100, 20)
    for options in ((), ("--buildid-all",)):
        sums = [0, 0]
        details = []
        with items(bench) as made:
            for config in CONFIGS:
                name = " ".join(["perf record -a", *options])
                bench.say(f"{name}: {config}")
                with bench.scratch("perf") as place:
                    cache, data = place / "cache", place / "perf.data"
                    recording = [
                        perf, "--buildid-dir", cache, "record", "-q", "-a", *options,
                        "-e", "cpu-clock", "-o", data, "--",
                    ]  # fmt: skip
                    expected = made.run(config, count, 8, under=recording)
                    result = compare_perf_cache(cache, expected)
                sums[0] += result.exe_captured
                sums[1] += result.so_captured
                details.append(f"{config} {result.exe_captured}+{result.so_captured}")
        value = 100 * max(sums) / (count * len(CONFIGS))
        yield Row(
            f"the peer, {name}, the same items, 8 at a time: in its cache", "<", 99.5, value, "%",
            detail=f"exe+so of {count}: {', '.join(details)}",
        )  # fmt: skip


def writers(bench: Bench) -> Iterator[Row]:
    """Rows for 20 MB files that are still being written when they are mapped, or just were."""
    for what, use in (
        ("mapped while they are written", _map_while_written),
        ("executed when their last byte is written", _execute_when_written),
    ):
        count = bench.size(20, 5)
        bench.say(f"watch: {count} files {what}")
        with items(bench, _LARGE) as made, bench.scratch("writers") as place:
            store = place / "store"
            expected = Expected()
            with watched(bench, store) as watcher:
                for number in range(count):
                    expected.add(use(made, place / f"{number}"))
                watcher.captured(expected)
            # Also what came while it ended.
            result = compare(store, expected)
        yield Row(
            f"watch: {count} files of 20 MB {what}: stored truncated", "=", 0,
            result.wrong_bytes, detail=f"{len(expected.files) - len(result.lost)} of "
            f"{len(expected.files)} files stored",
        )  # fmt: skip


def _map_while_written(made: ShortLife, place: Path) -> Expected:
    """A process maps the library when a tenth of it is there, and ends with its last byte."""
    place.mkdir()
    ready, target = place / "libready.so", place / "libitem.so"
    expected = made.write(place / "exe", ready)
    mapper = None
    try:
        with target.open("wb", buffering=0) as file:
            for chunk in _chunks(ready):
                file.write(chunk)
                if mapper is None:
                    mapper = _mapping(target)
                time.sleep(0.01)
    finally:
        if mapper is not None:
            mapper.kill()
            mapper.wait()
    target.unlink()
    return Expected(shared_objects=expected.shared_objects)


def _mapping(path: Path) -> subprocess.Popen[bytes]:
    """A process that has mapped a file as code."""
    program = (
        "import mmap, os, sys\n"
        "file = os.open(sys.argv[1], os.O_RDONLY)\n"
        "held = mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)\n"
        "os.close(file)\n"
        "print('mapped', flush=True)\n"
        "os.read(0, 1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout
    process.stdout.readline()
    return process


def _execute_when_written(made: ShortLife, place: Path) -> Expected:
    """A slow copy of the executable is run when it is complete, and deleted when that ends."""
    place.mkdir()
    ready, target = place / "ready", place / "exe"
    expected = made.write(ready, place / "libitem.so")
    with target.open("wb", buffering=0) as file:
        target.chmod(0o755)
        for chunk in _chunks(ready):
            file.write(chunk)
            time.sleep(0.01)
    subprocess.run([target, "1000"], check=True)
    target.unlink()
    (place / "libitem.so").unlink()
    return expected


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(_LARGE // 10):
            yield chunk


def flood(bench: Bench) -> Iterator[Row]:
    """Rows for programs of the host and of a container beside another one that maps new files."""
    count = bench.size(300, 40)
    with items(bench) as made:
        for rate in (500, 1000, 5000, 20_000):
            with (
                bench.scratch("flooded") as place,
                watched(bench, place / "store") as watcher,
                flooding(place / "flood", rate, 2) as running,
            ):
                # Until more waits than can be copied in the time that a file may wait.
                time.sleep(bench.size(20, 5))
                ran = beside(made, count)
                found = [watcher.captured(each, 30) for each in ran]
                memory = watcher.memory().pss / _MIB
                facts = watcher.facts
            bench.say(f"{rate} a second: {found}, {facts}")
            lost = sum(loss["count"] for loss in facts["losses"])
            detail = (
                f"{running.rate:.0f} a second were mapped, {running.count} in all, {lost} of them"
                f" missed; {memory:.0f} MiB"
            )
            what = f"1000-byte files from a container, {rate} a second asked for"
            for whose, each in zip(("the host", "another container"), found, strict=True):
                yield Row(
                    f"{what}; captured of {count} programs of {whose}", ">=", 100,
                    min(each.exe_percent, each.so_percent), "%", detail=detail,
                )  # fmt: skip
            yield Row(f"{what}; memory of watch", "<", 150, memory, "MiB", detail=detail)


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

    yield from _in_turns(bench, "posix_spawn of true", action, 1.05, "us")
    with bench.scratch("spawns") as place, watched(bench, place / "store") as watcher:
        action()  # the program becomes known
        time.sleep(10)
        begin, before = time.monotonic(), watcher.cpu_seconds()
        time.sleep(10)
        idle = (watcher.cpu_seconds() - before) / (time.monotonic() - begin)
        costs = []
        for _ in range(3):
            before = watcher.cpu_seconds()
            action()
            time.sleep(1.5)  # until all its records are read
            costs.append((watcher.cpu_seconds() - before) / count * 1e6)
    yield Row(
        "watch: processor time for a spawn of a known program", "<=", 30, min(costs), "us",
        detail=f"{', '.join(f'{cost:.1f}' for cost in costs)} us",
    )  # fmt: skip
    yield Row("watch: processor time while nothing runs", "<", 0.1, idle * 100, "%")


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

        yield from _in_turns(bench, f"{len(names)} runs of gcc -c", action, 1.02, "ms")


def system_calls(bench: Bench) -> Iterator[Row]:
    """The row for system calls of other processes, of which the watch is to see nothing."""
    perf = require("perf", "linux-perf")
    count = bench.size(10_000_000, 3_000_000)
    command = [perf, "bench", "-f", "simple", "syscall", "basic", "-l", str(count)]

    def action() -> float:
        return float(run(command)) / count * 1e9

    yield from _in_turns(bench, f"{count} getppid", action, 1.01, "ns")


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
    "capture": capture,
    "capture-busy": capture_busy,
    "capture-known": known_program,
    "capture-peer": peer,
    "capture-writers": writers,
    "capture-flood": flood,
    "watch-perf": perf_record,
    "watch-spawn": spawn,
    "watch-compile": compile_small,
    "watch-syscalls": system_calls,
    "watch-memory": memory,
}
