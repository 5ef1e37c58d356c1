# SPDX-License-Identifier: Apache-2.0
"""What it costs that a store stays what it was: a check of it, an open, a capture."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, Benchmark, run, timed
from benchmarks.mounts import buildidfs
from benchmarks.report import Row
from benchmarks.stores import whole
from buildidfs import app, config
from buildidfs.store import Store
from buildidfs.store.write import sidecar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Digest

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
    real = sidecar.attach
    for number in range(bench.rounds):
        bench.say(f"capturing: round {number + 1} of {bench.rounds}")
        with_it.append(_captured(bench, tree))
        sidecar.attach = lambda fd, data: True
        try:
            without.append(_captured(bench, tree))
        finally:
            sidecar.attach = real
    yield Row(
        "scan tree, keeping beside blobs where they come from", "<=", 1.05,
        min(with_it) / min(without), detail=f"{min(with_it):.2f} s, {min(without):.2f} s",
    )  # fmt: skip


def _captured(bench: Bench, tree: Path) -> float:
    with bench.scratch("kept") as directory, Store.create(directory / "store") as store:
        return timed(lambda: app.scan_tree(store, config.Settings(), [os.fsencode(tree)]))


ROWS: dict[str, Benchmark] = {
    "check": checking,
    "verified-open": opening,
    "kept-beside": capturing,
}
