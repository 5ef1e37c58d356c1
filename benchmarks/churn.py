# SPDX-License-Identifier: Apache-2.0
"""Whether what a day brings leaves a trace: a million captures, nine tenths of them removed again.

A mount and a watch run on the store all the time; the mount is read from, and told of every change.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.capture import watched
from benchmarks.mounts import product
from benchmarks.report import Row
from benchmarks.stores import captured
from buildidfs.store import Store
from buildidfs.store.retention.policy import Policy

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Benchmark
    from buildidfs.store import NewCapture

_BATCH = 500
_LOOKED_AT = 20
_REMEMBERED = 40_000
"""More absent names than a mount remembers. It is asked for as many before it is measured: what is
bounded is full then, and what grows from there would grow for ever."""
_INDEX = "index/data.mdb"


def churn(bench: Bench) -> Iterator[Row]:
    """Rows for the memory of mount and watch, and the size of the index."""
    total = bench.size(1_000_000, 20_000)
    first, settled = total // 10, total // 4  # minutes, in which what is done now and then was done
    dice = random.Random(1)
    with (
        # Where syncing costs nothing: a day is to be over in minutes.
        tempfile.TemporaryDirectory(dir="/dev/shm") as directory,
        Store.create(Path(directory) / "store") as store,
        product(bench, Path(directory) / "store", pinned=False) as mount,
        watched(bench, Path(directory) / "store") as watch,
    ):
        made: list[str] = []
        for begin in range(0, total, _BATCH):
            _capture(store, Path(directory), made, begin, dice)
            _look(mount.root, made, dice)
            if begin + _BATCH == first:
                stats = store.stats()
                store.retain(Policy(max_size=stats.stored_bytes + stats.index_bytes))
            if begin + _BATCH == settled:
                _ask(mount.root, dice)
                before = (_besides(mount.pid), _besides(watch.pid))
            if begin % (total // 20) == 0:
                bench.say(f"{begin} captured, {store.stats().ids} kept")
        after = (_besides(mount.pid), _besides(watch.pid))
        index, left = store.stats().index_bytes, store.stats().ids
        problems = sum(1 for _ in store.check())
    what = f"after {total} captures, {100 * (total - left) // total} % removed, against after"
    for name, one, other in zip(("mount", "watch"), before, after, strict=False):
        yield Row(
            f"memory of {name} {what} {settled}", "<=", 1.1, other / one,
            detail=f"{one >> 20} and {other >> 20} MiB besides the index",
        )  # fmt: skip
    yield Row(
        f"size of the index {what} {first}", "<=", 1.25, index / stats.index_bytes,
        detail=f"{stats.index_bytes >> 20} and {index >> 20} MiB",
    )  # fmt: skip
    yield Row("problems that check finds then", "=", 0, problems)


def _capture(store: Store, place: Path, made: list[str], begin: int, dice: random.Random) -> None:
    batch: list[NewCapture] = []
    for number in range(begin, begin + _BATCH):
        made.append(dice.randbytes(20).hex())
        batch.append(captured(store, place / "staged", made[-1], number))
    store.commit(batch)
    del made[: -_BATCH * 4]


def _look(root: Path, made: list[str], dice: random.Random) -> None:
    """As clients do: of what was just captured, and of what nobody ever saw."""
    for _ in range(_LOOKED_AT):
        # It may have been removed by now.
        with (
            contextlib.suppress(FileNotFoundError),
            open(root / dice.choice(made) / "elf", "rb") as file,
        ):
            file.read(4096)
        assert not os.path.exists(root / dice.randbytes(20).hex())


def _ask(root: Path, dice: random.Random) -> None:
    for _ in range(_REMEMBERED):
        assert not os.path.exists(root / dice.randbytes(20).hex())


def _besides(pid: int) -> int:
    """Bytes of memory of a process and those it has started, without the mapped index."""
    total = 0
    for each in (pid, *_children(pid)):
        counted = True
        for line in Path(f"/proc/{each}/smaps").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if "-" in word and not word.endswith(":"):
                counted = not rest.endswith(_INDEX)
            elif word == "Pss:" and counted:
                total += int(rest.split()[0]) * 1024
    return total


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


ROWS: dict[str, Benchmark] = {"churn": churn}
