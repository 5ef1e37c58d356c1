# SPDX-License-Identifier: Apache-2.0
"""Costs of reading: a large file from end to end, pages at random, and beside a slow file."""

from __future__ import annotations

import random
import subprocess
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, Benchmark, wait_until
from benchmarks.data import build_ids, native_tree
from benchmarks.mounts import Mounted, bound, passthrough, product, slow
from benchmarks.report import Row
from benchmarks.stores import blob_of, scanned

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_AHEAD_KB = 1024
_DELAY = 0.020


def sequential(bench: Bench) -> Iterator[Row]:
    """Rows for reading 1 GB, the first time and again."""
    size = bench.size(1 << 30, 1 << 28)
    tree = native_tree(bench, "large", build_ids(1, seed=11), size)
    store = scanned(bench, "large-store", tree)
    native: list[float] = []
    c: list[float] = []
    cold: list[float] = []
    warm: list[float] = []

    def speed(root: Path) -> float:
        result = bench.sequential(root / build_ids(1, seed=11)[0] / "elf")
        if result.sum != size:
            raise RuntimeError(f"read {result.sum} bytes of {size} below {root}")
        return result.sum / result.wall_ns * 1000  # MB/s

    for number in range(bench.rounds):
        bench.say(f"sequential: round {number + 1} of {bench.rounds}")
        native.append(speed(tree))
        with passthrough(bench, tree, read_ahead_kb=_READ_AHEAD_KB) as mounted:
            c.append(speed(mounted.root))
        with product(bench, store) as mounted:
            wait_until(partial(_has_read_ahead, mounted), "the product's read-ahead")
            cold.append(speed(mounted.root))
            warm.append(speed(mounted.root))
    ours, theirs, plain, again = max(cold), max(c), max(native), max(warm)
    name = f"{size >> 20} MiB"
    yield Row(
        f"cold {name} read, speed against C", ">=", 2.0, ours / theirs,
        detail=f"{ours:.0f} MB/s, C {theirs:.0f} MB/s",
    )  # fmt: skip
    yield Row(
        f"cold {name} read, speed against native", ">=", 0.25, ours / plain,
        detail=f"native {plain:.0f} MB/s",
    )  # fmt: skip
    yield Row(
        f"warm {name} read, speed against native", ">=", 0.5, again / plain,
        detail=f"{again:.0f} MB/s",
    )  # fmt: skip


def _has_read_ahead(mounted: Mounted) -> bool:
    return mounted.read_ahead.read_text().strip() == str(_READ_AHEAD_KB)


def faults(bench: Bench) -> Iterator[Row]:
    """The row for 3000 page faults at random in a mapping of 200 MB."""
    count, size = 3000, 200 << 20
    build_id = build_ids(1, seed=12)[0]
    tree = native_tree(bench, "mapped", [build_id], size)
    store = scanned(bench, "mapped-store", tree)
    times: dict[str, list[float]] = {"C": [], "C at 1024": [], "ours": []}
    sums = {bench.faults(tree / build_id / "elf", count).sum}

    def fault(name: str, root: Path) -> None:
        result = bench.faults(root / build_id / "elf", count)
        sums.add(result.sum)
        times[name].append(result.wall_ns / 1e6)

    for number in range(bench.rounds):
        bench.say(f"faults: round {number + 1} of {bench.rounds}")
        with passthrough(bench, tree) as mounted:
            fault("C", mounted.root)
        with passthrough(bench, tree, read_ahead_kb=_READ_AHEAD_KB) as mounted:
            fault("C at 1024", mounted.root)
        with product(bench, store) as mounted:
            fault("ours", mounted.root)
    if len(sums) != 1:
        raise RuntimeError("the mappings do not hold the same bytes")
    best = {name: min(values) for name, values in times.items()}
    yield Row(
        f"{count} random page faults in 200 MB, time against C", "<=", 1.0,
        best["ours"] / best["C"],
        detail=f"{best['ours']:.1f} ms, C {best['C']:.1f} ms, "
        f"C with the same read-ahead {best['C at 1024']:.1f} ms",
    )  # fmt: skip


def blocked(bench: Bench) -> Iterator[Row]:
    """The row for opening files while another client waits for a slow one."""
    ids = build_ids(300, seed=13)
    slow_id = build_ids(1, seed=14)[0]
    tree = native_tree(bench, "quick-files", ids, 32768)
    slow_tree = native_tree(bench, "slow-file", [slow_id], 64 << 20)
    store = scanned(bench, "blocked-store", tree, slow_tree)
    random.Random(2).shuffle(ids)
    alone: list[float] = []
    beside: list[float] = []
    blob = blob_of(store, slow_id)
    with slow(bench, slow_tree / slow_id, _DELAY) as slow_mount:
        for number in range(bench.rounds):
            bench.say(f"blocked: round {number + 1} of {bench.rounds}")
            with product(bench, store) as mounted:
                paths = [f"{mounted.root}/{build_id}/elf" for build_id in ids]
                alone.append(bench.loop("open", paths).p50_ns / 1000)
            with bound(slow_mount.root / "elf", blob), product(bench, store) as mounted:
                paths = [f"{mounted.root}/{build_id}/elf" for build_id in ids]
                beside.append(_beside_slow_reader(bench, mounted.root / slow_id / "elf", paths))
    yield Row(
        "cold open while another client reads a blob that blocks 20 ms a read, p50 against alone",
        "<=", 4.0, min(beside) / min(alone),
        detail=f"{min(beside):.0f} us, alone {min(alone):.0f} us",
    )  # fmt: skip


def _beside_slow_reader(bench: Bench, slow_file: Path, paths: list[str]) -> float:
    """Median microseconds of an open while ``slow_file`` is being read all the time."""
    reader = subprocess.Popen(
        bench.pinned(bench.client, "sequential", slow_file), stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: _read_so_far(reader.pid) > 0, "the slow reader's first bytes")
        opened = bench.loop("open", paths)
        # If the reader was done first, the opens waited for it: then the mean tells how long.
        us = opened.p50_ns / 1000
        return us if reader.poll() is None else max(us, opened.us)
    finally:
        reader.kill()
        reader.wait()


def _read_so_far(pid: int) -> int:
    """How many read calls of a process have returned, not counting those of its start."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1]) // (256 << 10)
    return 0


ROWS: dict[str, Benchmark] = {
    "sequential": sequential,
    "faults": faults,
    "blocked": blocked,
}
