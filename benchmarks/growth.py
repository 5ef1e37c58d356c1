# SPDX-License-Identifier: Apache-2.0
"""Growth of a store: many build IDs, churn, and too little room.

The churn is a million captures, nine tenths of them removed again, while a mount and a watch run on
the store all the time; the mount is read from, and told of every change.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.bench import Bench, timed
from benchmarks.data import build_ids
from benchmarks.mounts import product
from benchmarks.report import Row
from benchmarks.stores import captured, opened_ids, synthetic
from benchmarks.watch import watched
from buildidfs.store import Store
from buildidfs.store.retention.eviction import Policy
from tests.support.containers.crowding import Crowd
from tests.support.filesystems.smallfs import Lowest, odd_files, small_filesystem

if TYPE_CHECKING:
    from benchmarks.bench import Benchmark
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
    """Ask as clients do: for files just captured, and for unknown build IDs."""
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


def _besides(pid: int, field: str = "Pss:") -> int:
    """Bytes of memory of a process and those it has started, without the mapped index."""
    total = 0
    for each in (pid, *_children(pid)):
        counted = True
        for line in Path(f"/proc/{each}/smaps").read_text().splitlines():
            word, _, rest = line.partition(" ")
            if "-" in word and not word.endswith(":"):
                counted = not rest.endswith(_INDEX)
            elif word == field and counted:
                total += int(rest.split()[0]) * 1024
    return total


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(each) for each in (task / "children").read_text().split()]
    return found


_MIB = 1 << 20
_COPIES_MIB = 4
"""The room for files that are being copied at one time."""
_TREES = ("/usr/lib", "/usr/bin", "/usr/sbin", "/usr/libexec")
_FILESYSTEMS = (("ext4", 40), ("ext4", 300), ("xfs", 300), ("ext4", 1200), ("xfs", 1200))


def crowd(bench: Bench) -> Iterator[Row]:
    """Row for what is lost of programs that are gone, beside a host that has more than fits."""
    runs = bench.size(20, 2)
    unsound, lost, made, displaced = 0, 0, 0, 0
    told = []
    for seed in range(runs):
        with bench.scratch("crowd") as place:
            found = _crowded(bench, place, seed)
        unsound += found.lost if not found.is_sound else 0
        lost += found.lost
        made += found.made
        displaced += found.displaced
        told.append(f"{found.lost}/{found.recapturable}")
        bench.say(f"run {seed}: {found}")
    yield Row(
        f"programs that are gone lost while the store has what can be had again, {runs} runs", "=",
        0, unsound, detail=f"{lost} of {made} lost, {displaced} of them displaced while they were"
        f" there; lost/recapturable: {' '.join(told)}",
    )  # fmt: skip


def _crowded(bench: Bench, place: Path, seed: int) -> Any:
    probe = Crowd(place, seed, 1)
    sizes = probe.sizes(bench.size(200, 40), 1 << 10, bench.size(20, 4) * _MIB)
    # From half of what they take to twice as much.
    crowd = Crowd(place, seed, int(sum(sizes) * probe.dice.uniform(0.5, 2)))
    trees = crowd.dice.sample(_TREES, 2)
    debs = sorted(map(str, Path("/var/cache/apt/archives").glob("*.deb")))
    chosen = crowd.dice.sample(debs, min(30, len(debs)))
    mount = place / "mount"
    mount.mkdir()
    subprocess.run([*crowd.command, "up", "--log", place / "up.log", mount], check=True,
                   stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        commands = [["scan", "tree", tree] for tree in trees]
        if chosen:
            commands.append(["scan", "package", "--again", *chosen])
        early = len(sizes) // 3
        with crowd.observed():
            crowd.run_and_delete(sizes[:early])
            with crowd.scanning(*commands):
                crowd.run_and_delete(sizes[early:])
    finally:
        subprocess.run([*crowd.command, "down"], check=True, stdout=subprocess.DEVNULL)
    return crowd.verdict()


def filesystems(bench: Bench) -> Iterator[Row]:
    """Rows for what stays free of small filesystems while more is scanned than fits."""
    for kind, size in _FILESYSTEMS[: bench.size(len(_FILESYSTEMS), 1)]:
        with bench.scratch("small") as place, small_filesystem(place, kind, size * _MIB) as point:
            odd_files(place / "odd", bench.size(12_000, 400), bench.size(40, 4))
            yield from _filled(bench, f"{kind}, {size} MB", point, place / "odd")


def _filled(bench: Bench, name: str, point: Path, odd: Path) -> Iterator[Row]:
    runs = []
    with Lowest(point) as lowest:
        for _ in range(2):
            runs.append(_scan(point / "store", "/usr", str(odd)))
            bench.say(f"{name}: {lowest.text} {runs[-1]}")
    yield Row(f"{name}: lowest free beyond the limit, while files are copied", ">=", -_COPIES_MIB,
              lowest.bytes_beyond / _MIB, "MiB", lowest.text)  # fmt: skip
    yield Row(f"{name}: lowest free inodes beyond the limit", ">=", -64,
              lowest.inodes_beyond, detail=lowest.text)  # fmt: skip
    yield Row(f"{name}: captured or removed by a second scan", "=", 0,
              runs[1]["captured"] + runs[1]["removed"])  # fmt: skip
    yield Row(f"{name}: exit status of both", "<=", 3, max(each["rc"] for each in runs))


def _scan(store: Path, *paths: str) -> dict[str, int]:
    from tests.support.harness.mounts import COMMAND

    done = subprocess.run(
        [*COMMAND, "--store", store, "scan", "tree", "--json", *paths],
        check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    summary = json.loads(done.stdout or b"{}")
    removed = summary["evicted"]["recapturable"] + summary["evicted"]["lost"]
    return {"rc": done.returncode, "captured": summary["captured"], "held": summary["held"],
            "omitted": summary["omitted"], "removed": removed}  # fmt: skip


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
        f"ls of {few} IDs, time against native", "<=", 2.0, min(ours) / min(native),
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
                    memory.append(_besides(mounted.pid, "Rss:"))
    yield Row(
        f"cold open, p50 at {many} IDs against {few}", "<=", 1.15, best[many] / best[few],
        detail=f"{best[many]:.1f} us, {best[few]:.1f} us",
    )  # fmt: skip
    yield Row(
        f"daemon memory besides the index map, {many} IDs, after ls", "<=", _MAX_MEMORY_MIB,
        max(memory) / (1 << 20), unit="MiB",
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {
    "churn": churn,
    "crowd": crowd,
    "filesystems": filesystems,
    "listing": listing,
    "million": million,
}
