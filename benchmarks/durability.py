# SPDX-License-Identifier: Apache-2.0
"""Crashes that a store survives, and the costs of its checks: of all of it, an open, a scans."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, Benchmark, run, timed
from benchmarks.mounts import buildidfs
from benchmarks.report import Row
from benchmarks.stores import whole
from buildidfs import config
from buildidfs.ingest import scans
from buildidfs.store import Store
from buildidfs.store.blobs import files
from tests.support.filesystems.powercuts import PowerCuts
from tests.support.harness.crashing import OPERATIONS, Crashes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.bench import Bench, Benchmark
    from buildidfs.model import Digest

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


_OPENED = 2000


def checking(bench: Bench) -> Iterator[Row]:
    """Rows for ``buildidfs check`` of a large store in which nothing is wrong."""
    count = bench.size(100_000, 10_000)
    store = whole(bench, count)
    run(buildidfs(store, "check"))  # so that the files are known to the kernel
    best = float("inf")
    for number in range(min(bench.rounds, 3)):
        bench.say(f"checking: round {number + 1}")
        best = min(best, timed(lambda: run(buildidfs(store, "check"))))
    yield Row(f"check of {count} build IDs", "<", 10, best, "s")


def opening(bench: Bench) -> Iterator[Row]:
    """A row for what it costs to compare a blob's file with its row before it is given out."""
    store = whole(bench, bench.size(100_000, 10_000))
    with Store.open(store, read_only=True) as opened:
        digests = random.Random(1).sample(sorted(opened.blobs.names()), _OPENED)
        plain = compared = float("inf")
        for _ in range(bench.rounds * 4):
            plain = min(plain, _each(digests, opened.blobs.files.open))
            compared = min(compared, _each(digests, lambda d: _opened(opened, d)))
    yield Row(
        "to see that a blob is what was captured, each open", "<", 3, compared - plain, "us",
        detail=f"{compared:.2f} us, without {plain:.2f} us",
    )  # fmt: skip


def _opened(store: Store, digest: Digest) -> int:
    found = store.blobs.open_now(digest)
    if found is None:
        raise RuntimeError(f"{digest} is not what was written")
    return found.fd


def _each(digests: list[Digest], open_: Callable[[Digest], int]) -> float:
    """Microseconds for one."""
    begin = time.perf_counter()
    for digest in digests:
        os.close(open_(digest))
    return (time.perf_counter() - begin) / len(digests) * 1e6


def capturing(bench: Bench) -> Iterator[Row]:
    """A row for what it costs to keep beside each blob where it comes from."""
    tree = Path("/usr/lib")
    with_it: list[float] = []
    without: list[float] = []
    real = files.attach_origin
    for number in range(bench.rounds):
        bench.say(f"capturing: round {number + 1} of {bench.rounds}")
        with_it.append(_captured(bench, tree))
        files.attach_origin = lambda fd, data: True
        try:
            without.append(_captured(bench, tree))
        finally:
            files.attach_origin = real
    yield Row(
        "scan tree, keeping beside blobs where they come from", "<=", 1.05,
        min(with_it) / min(without), detail=f"{min(with_it):.2f} s, {min(without):.2f} s",
    )  # fmt: skip


def _captured(bench: Bench, tree: Path) -> float:
    with bench.scratch("kept") as directory, Store.create(directory / "store") as store:
        return timed(lambda: scans.scan_tree(store, config.Settings(), [os.fsencode(tree)]))


ROWS: dict[str, Benchmark] = {
    "crashes": kills,
    "power-cuts": power,
    "check": checking,
    "verified-open": opening,
    "kept-beside": capturing,
}
