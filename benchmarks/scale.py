# SPDX-License-Identifier: Apache-2.0
"""What numbers do to it: listing 100,000 and a million build IDs, opening among them, memory."""

from __future__ import annotations

import random
import subprocess
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, Benchmark, timed
from benchmarks.data import build_ids
from benchmarks.mounts import product
from benchmarks.report import Row
from benchmarks.stores import opened_ids, synthetic

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MAX_MEMORY_MIB = 64


def listing(bench: Bench) -> Iterator[Row]:
    """Rows for ``ls`` of the mount: against native, and how the cost of an entry grows."""
    few, many = bench.size(100_000, 10_000), bench.size(1_000_000, 100_000)
    store, large = synthetic(bench, few), synthetic(bench, many)
    native_tree = bench.workdir / f"directories-{few}"
    if not native_tree.exists():
        native_tree.mkdir()
        for build_id in build_ids(few):
            (native_tree / build_id).mkdir()
    native: list[float] = []
    ours: list[float] = []
    ours_large: list[float] = []
    _ls(bench, native_tree, few)
    for number in range(bench.rounds):
        bench.say(f"listing: round {number + 1} of {bench.rounds}")
        native.append(_ls(bench, native_tree, few))
        with product(bench, store) as mounted:
            ours.append(_ls(bench, mounted.root, few))
        if number < 3:
            with product(bench, large) as mounted:
                ours_large.append(_ls(bench, mounted.root, many))
    yield Row(
        f"ls of {few} IDs, time against native", "<=", 2.2, min(ours) / min(native),
        detail=f"{min(ours) * 1000:.0f} ms, native {min(native) * 1000:.0f} ms",
    )  # fmt: skip
    each, each_large = min(ours) / few * 1e6, min(ours_large) / many * 1e6
    yield Row(
        f"ls, time for an entry at {many} IDs against {few}", "<=", 1.4, each_large / each,
        detail=f"{each_large:.2f} us, {each:.2f} us",
    )  # fmt: skip


def _ls(bench: Bench, root: Path, count: int) -> float:
    """Seconds that ls takes, sorting as bytes; checks that it listed every name."""
    output = bench.workdir / "listed"
    with output.open("wb") as file:

        def action() -> None:
            command = bench.pinned("env", "LC_ALL=C", "ls", root)
            subprocess.run(command, stdout=file, check=True)

        seconds = timed(action)
    listed = output.read_bytes().count(b"\n")
    # The mount has a few names of its own beside the build IDs.
    if not count <= listed <= count + 20:
        raise RuntimeError(f"ls {root}: {listed} names, expected {count}")
    return seconds


def million(bench: Bench) -> Iterator[Row]:
    """Rows for a cold open, and for memory, when the store is large."""
    few, many = 1000, bench.size(1_000_000, 100_000)
    small, large = synthetic(bench, few), synthetic(bench, many)
    best: dict[int, float] = {}
    memory: list[int] = []
    for number in range(bench.rounds):
        bench.say(f"million: round {number + 1} of {bench.rounds}")
        for count, store in ((few, small), (many, large)):
            with product(bench, store) as mounted:
                paths = [f"{mounted.root}/{build_id}/elf" for build_id in opened_ids(count)]
                random.Random(2).shuffle(paths)
                us = bench.loop("open", paths).p50_ns / 1000
                best[count] = min(us, best.get(count, us))
                if count == many and number == 0:
                    _ls(bench, mounted.root, many)
                    memory.append(mounted.besides("/index/data.mdb"))
    yield Row(
        f"cold open, p50 at {many} IDs against {few}", "<=", 1.15, best[many] / best[few],
        detail=f"{best[many]:.1f} us, {best[few]:.1f} us",
    )  # fmt: skip
    yield Row(
        f"daemon memory besides the index map, {many} IDs, after ls", "<=", _MAX_MEMORY_MIB,
        max(memory) / (1 << 20), unit="MiB",
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {"listing": listing, "million": million}
