# SPDX-License-Identifier: Apache-2.0
"""Costs of one request: opening, asking for attributes, asking for names that are not there.

One cold operation is open, read of the first 4 KiB, close of ``<id>/elf``: five requests. There are
500 build IDs, because the C example looks for an inode in a linked list, whose length would count.
"""

from __future__ import annotations

import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks.data import build_ids, native_tree
from benchmarks.mounts import Mounted, passthrough, product
from benchmarks.report import Row
from benchmarks.stores import captured, scanned
from buildidfs.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from benchmarks.bench import Bench, Benchmark

_IDS = 500
_SIZE = 32768
_REPEAT = 20


@dataclass
class _Times:
    """Microseconds per operation by what was done, one number a round."""

    rounds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    requests: list[int] = field(default_factory=list)

    def add(self, what: str, us: float) -> None:
        self.rounds[what].append(us)

    def best(self, what: str) -> float:
        return min(self.rounds[what])


def requests(bench: Bench) -> Iterator[Row]:
    """Rows for cold and warm opens, warm stat, and missing names."""
    tree = native_tree(bench, "requests", build_ids(_IDS), _SIZE)
    store = scanned(bench, "requests-store", tree)
    ids = build_ids(_IDS)
    random.Random(2).shuffle(ids)
    absent = build_ids(_IDS, seed=3)
    native, c, ours = _Times(), _Times(), _Times()
    for number in range(bench.rounds + 1):
        bench.say(f"requests: round {number + 1} of {bench.rounds + 1}")
        # The first round fills the page cache and is not counted.
        counted = number > 0
        _native(bench, tree, ids, absent, native if counted else _Times())
        for clients in (1, 8):
            with passthrough(bench, tree) as mounted:
                _served(bench, mounted, ids, absent, c if counted else _Times(), clients)
            with product(bench, store) as mounted:
                _served(bench, mounted, ids, absent, ours if counted else _Times(), clients)
    yield from _rows(native, c, ours)


def _paths(root: Path, ids: list[str]) -> list[str]:
    return [f"{root}/{build_id}/elf" for build_id in ids]


def _native(bench: Bench, tree: Path, ids: list[str], absent: list[str], times: _Times) -> None:
    paths, missing = _paths(tree, ids), _paths(tree, absent)
    times.add("open", bench.loop("open", paths).us)
    times.add("stat", bench.loop("stat", paths, repeat=_REPEAT).us)
    bench.loop("missing", missing)
    times.add("missing", bench.loop("missing", missing, repeat=_REPEAT).us)


def _served(
    bench: Bench,
    mounted: Mounted,
    ids: list[str],
    absent: list[str],
    times: _Times,
    clients: int,
) -> None:
    paths, missing = _paths(mounted.root, ids), _paths(mounted.root, absent)
    times.add(f"cold {clients}", bench.loop("open", paths, clients=clients).us)
    times.add(f"warm {clients}", bench.loop("open", paths, clients=clients, repeat=4).us)
    if clients > 1:
        return
    bench.loop("stat", paths)
    before = mounted.reads()
    times.add("stat", bench.loop("stat", paths, repeat=_REPEAT).us)
    times.requests.append(mounted.reads() - before)
    times.add("missing first", bench.loop("missing", missing).us)
    times.add("missing", bench.loop("missing", missing, repeat=_REPEAT).us)


def _rows(native: _Times, c: _Times, ours: _Times) -> Iterator[Row]:
    def row(what: str, limit: float, other: _Times, name: str, key: str, their_key: str) -> Row:
        theirs, mine = other.best(their_key), ours.best(key)
        return Row(
            what, ">=", limit, theirs / mine, detail=f"{mine:.1f} us, {name} {theirs:.1f} us"
        )

    opened = "open+read 4K+close, ops/s against C"
    yield row(f"cold {opened}, 1 client", 0.65, c, "C", "cold 1", "cold 1")
    yield row(f"cold {opened}, 8 clients", 0.70, c, "C", "cold 8", "cold 8")
    yield row(f"warm {opened}, 1 client", 1.0, c, "C", "warm 1", "warm 1")
    yield row(f"warm {opened}, 8 clients", 1.0, c, "C", "warm 8", "warm 8")
    yield row("warm stat, ops/s against native", 0.75, native, "native", "stat", "stat")
    yield Row(
        "warm stat, requests reaching the daemon", "=", 0, min(ours.requests),
        detail=f"of {_IDS * _REPEAT} operations",
    )  # fmt: skip
    yield row(
        "first negative lookup, ops/s against C", 0.70, c, "C", "missing first", "missing first"
    )
    yield row(
        "cached negative lookup, ops/s against native", 0.70, native, "native", "missing", "missing"
    )


def publish(bench: Bench) -> Iterator[Row]:
    """The row for names asked for in vain, then captured by another process, then asked again."""
    ids = build_ids(bench.size(50, 20), seed=16)
    found = 0
    slowest = 0.0
    with bench.scratch("publish") as directory:
        path = directory / "store"
        with Store.create(path) as store, product(bench, path) as mounted:
            for number, build_id in enumerate(ids):
                name = f"{mounted.root}/{build_id}/elf"
                link = f"{mounted.root}/debug/.build-id/{build_id[:2]}/{build_id[2:]}"
                if any(os.path.exists(wanted) for wanted in (name, link, name)):
                    raise RuntimeError(f"{name} is there before it was captured")
                new = captured(store, directory / "staged", build_id, number)
                begin = time.perf_counter()
                store.commit([new])
                slowest = max(slowest, time.perf_counter() - begin)
                found += os.path.exists(name) and os.path.exists(link)
    yield Row(
        "missing names found by the next lookup after their capture commits", "=", len(ids), found,
        detail=f"slowest commit {slowest * 1000:.1f} ms",
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {
    "requests": requests,
    "publish": publish,
}
