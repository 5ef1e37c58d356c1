# SPDX-License-Identifier: Apache-2.0
"""A name that was missing a moment ago: how soon after its capture it is there."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from benchmarks.data import build_ids
from benchmarks.mounts import product
from benchmarks.report import Row
from benchmarks.stores import captured
from buildidfs.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.bench import Bench, Benchmark


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


ROWS: dict[str, Benchmark] = {"publish": publish}
