# SPDX-License-Identifier: Apache-2.0
"""What a store keeps when there is too little room: of what is gone, and of its filesystem."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import Row
from tests.support.crowding import Crowd
from tests.support.smallfs import Lowest, odd_files, small_filesystem

if TYPE_CHECKING:
    from benchmarks.bench import Bench, Benchmark

_MIB = 1 << 20
_COPIES_MIB = 4
"""What the files may take that are being copied at one time."""
_TREES = ("/usr/lib", "/usr/bin", "/usr/sbin", "/usr/libexec")
_FILESYSTEMS = (("ext4", 40), ("ext4", 300), ("xfs", 300), ("ext4", 1200), ("xfs", 1200))


def crowd(bench: Bench) -> Iterator[Row]:
    """Row for what is lost of programs that are gone, beside a host that has more than fits."""
    runs = bench.size(20, 2)
    unsound, lost, made = 0, 0, 0
    told = []
    for seed in range(runs):
        with bench.scratch("crowd") as place:
            found = _crowded(bench, place, seed)
        unsound += found.lost if not found.is_sound else 0
        lost += found.lost
        made += found.made
        told.append(f"{found.lost}/{found.recapturable}")
        bench.say(f"run {seed}: {found}")
    yield Row(
        f"programs that are gone lost while the store has what can be had again, {runs} runs", "=",
        0, unsound, detail=f"{lost} of {made} lost; lost/recapturable: {' '.join(told)}",
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
    from tests.support.mounts import COMMAND

    done = subprocess.run(
        [*COMMAND, "--store", store, "scan", "tree", "--json", *paths],
        check=False, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    summary = json.loads(done.stdout or b"{}")
    removed = summary["evicted"]["recapturable"] + summary["evicted"]["lost"]
    return {"rc": done.returncode, "captured": summary["captured"], "held": summary["held"],
            "noted": summary["noted"], "removed": removed}  # fmt: skip


ROWS: dict[str, Benchmark] = {"crowd": crowd, "filesystems": filesystems}
