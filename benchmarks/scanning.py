# SPDX-License-Identifier: Apache-2.0
"""Costs of capturing: finding build IDs, scanning files and processes, starting a command."""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.bench import Bench, Benchmark, require, run, timed, wait_until
from benchmarks.data import build_ids, native_tree
from benchmarks.mounts import buildidfs
from benchmarks.report import Row
from benchmarks.stores import scanned

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TREE = Path("/usr/lib")
_HEAD = 4096


def _elf_files(root: Path) -> list[bytes]:
    found = []
    for directory, _, names in os.walk(os.fsencode(root)):
        for name in names:
            path = os.path.join(directory, name)
            if os.path.islink(path) or not os.path.isfile(path):
                continue
            with open(path, "rb", buffering=0) as file:
                if file.read(4) == b"\x7fELF":
                    found.append(path)
    return found


def extraction(bench: Bench) -> Iterator[Row]:
    """Rows for reading the build ID of every ELF file of /usr/lib."""
    require("readelf", "binutils")
    paths = _elf_files(_TREE)
    bench.say(f"{len(paths)} ELF files below {_TREE}")
    listing = bench.workdir / "elf-files"
    listing.write_bytes(b"\n".join(paths))
    seconds: dict[str, float] = {}
    found: dict[str, str] = {}
    for name in ("ours", "pyelftools"):
        best = []
        for _ in range(bench.rounds if name == "ours" else 2):
            output = run(
                bench.pinned(sys.executable, "-m", "benchmarks.extract", name, listing),
                cwd=Path(__file__).resolve().parent.parent,
            )
            taken, ids = output.decode().split("\n", 1)
            best.append(float(taken))
        seconds[name] = min(best)
        if name == "ours":
            found = dict(line.split(" ", 1)[::-1] for line in ids.splitlines())
    readelf = []
    for _ in range(3):
        output = b""

        def action() -> None:
            nonlocal output
            # readelf complains about some files with exit code 1 and goes on.
            output = run(bench.pinned("readelf", "-nW", *map(os.fsdecode, paths)), ok=(0, 1))

        readelf.append(timed(action))
    seconds["readelf"] = min(readelf)
    _same_ids(found, _readelf_ids(output))
    for other, limit, name in (("pyelftools", 50, "pyelftools"), ("readelf", 2, "readelf -n")):
        yield Row(
            f"build-ID extraction of {len(paths)} ELF files, speed against {name}", ">=", limit,
            seconds[other] / seconds["ours"],
            detail=f"{seconds['ours'] * 1000:.1f} ms, {name} {seconds[other] * 1000:.0f} ms",
        )  # fmt: skip


def _readelf_ids(output: bytes) -> dict[str, str]:
    found: dict[str, str] = {}
    path = ""
    for line in os.fsdecode(output).splitlines():
        if line.startswith("File: "):
            path = line[len("File: ") :]
        elif match := re.search(r"Build ID: ([0-9a-f]+)$", line):
            found.setdefault(path, match[1])
    return found


def _same_ids(ours: dict[str, str], theirs: dict[str, str]) -> None:
    if ours != theirs:
        differing = sorted(
            path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)
        )
        raise RuntimeError(
            f"{len(differing)} build IDs differ from those of readelf -n, first: {differing[0]}: "
            f"{ours.get(differing[0])} and {theirs.get(differing[0])}"
        )


def tree(bench: Bench) -> Iterator[Row]:
    """Rows for scanning /usr/lib against debuginfod indexing it. All on every CPU there is."""
    require("debuginfod", "debuginfod")
    identify: list[float] = []
    capture: list[float] = []
    theirs: list[float] = []
    run(["grep", "-c", "", "-r", _TREE], ok=(0, 1, 2))  # into the page cache
    for number in range(bench.size(3, 1)):
        bench.say(f"tree: round {number + 1}")
        theirs.append(debuginfod(bench, "-F", "-c", "2", _TREE))
        with bench.scratch("tree-store") as directory:
            command = buildidfs(directory / "store", "scan", "tree")
            identify.append(timed(partial(run, [*command, "--dry-run", _TREE])))
            os.sync()
            capture.append(timed(partial(run, [*command, _TREE])))
    for what, limit, ours in (("identified", 6, identify), ("captured", 1.2, capture)):
        yield Row(
            f"scan tree {_TREE}, every ELF {what}, speed against debuginfod -F -c 2", ">=", limit,
            min(theirs) / min(ours),
            detail=f"{min(ours):.2f} s, debuginfod {min(theirs):.2f} s",
        )  # fmt: skip


def debuginfod(
    bench: Bench, *arguments: str | Path, look: Callable[[Path], object] = lambda _: None
) -> float:
    """Seconds from its start until debuginfod has scanned all; ``look`` is given its index."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"

    def scanned_all() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                metrics = response.read().decode()
        except OSError:
            return False
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines())
        return (
            values.get('thread_work_total{role="traverse"}') == "1"
            and values.get('thread_work_pending{role="scan"}') == "0"
            and values.get('thread_busy{role="scan"}') == "0"
        )

    with bench.scratch("debuginfod") as directory:
        index = directory / "db"
        command = ["debuginfod", "-d", index, "-p", str(port), *arguments]
        environment = {**os.environ, "DEBUGINFOD_URLS": "", "HOME": str(directory)}

        def action() -> None:
            wait_until(scanned_all, "debuginfod's scan", 600)

        with (directory / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                seconds = timed(action)
                look(index)
                return seconds
            finally:
                server.kill()
                server.wait()


def processes(bench: Bench) -> Iterator[Row]:
    """The row for scanning all processes again when nothing has changed."""
    with _busy_host(bench) as count:
        first: list[float] = []
        second: list[float] = []
        for number in range(bench.size(3, 1)):
            bench.say(f"processes: round {number + 1}")
            with bench.scratch("proc-store") as store:
                # 3: some process ended while it was looked at.
                scan = partial(run, buildidfs(store / "store", "scan", "proc"), ok=(0, 3))
                first.append(timed(scan))
                second += [timed(scan) for _ in range(3)]
    yield Row(
        "scan proc of an unchanged host, speed against the first time", ">=", 12,
        min(first) / min(second),
        detail=f"{min(second):.2f} s, first {min(first):.2f} s, {count} processes added",
    )  # fmt: skip


@contextmanager
def _busy_host(bench: Bench) -> Iterator[int]:
    """Processes that have mapped what a host with some services has: 400 files in 40 processes."""
    paths = _elf_files(_TREE)
    # Evenly out of all, so that small and large ones are there as they are on the system.
    paths = paths[:: max(1, len(paths) // bench.size(400, 100))]
    program = (
        "import mmap, os, sys\n"
        "kept = []\n"
        "for path in sys.argv[1:]:\n"
        "    with open(path, 'rb') as file:\n"
        "        kept.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, 5))\n"
        "print('ready', flush=True)\n"
        "os.read(0, 1)\n"
    )
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(bench.size(40, 10)):
            share = paths[number::10]
            running.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", program, *share],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        for process in running:
            assert process.stdout
            process.stdout.readline()
        yield len(running)
    finally:
        for process in running:
            process.kill()
            process.wait()


def command_start(bench: Bench) -> Iterator[Row]:
    """The row for how long a small command takes."""
    source = native_tree(bench, "ten", build_ids(10, seed=15), 8192)
    store = scanned(bench, "ten-store", source)
    imports = [sys.executable, "-c", "import lmdb, msgspec, click"]
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(bench.size(15, 7)):
        ours.append(timed(lambda: run(bench.pinned(*buildidfs(store, "list")))))
        theirs.append(timed(lambda: run(bench.pinned(*imports))))
    listed = run(buildidfs(store, "list")).count(b"\n")
    if listed < 10:
        raise RuntimeError(f"buildidfs list printed {listed} lines for ten build IDs")
    yield Row(
        "buildidfs list of ten items, time against the bare imports", "<", 1.35,
        statistics.median(ours) / statistics.median(theirs),
        detail=f"{min(ours) * 1000:.0f} ms, imports {min(theirs) * 1000:.0f} ms at best",
    )  # fmt: skip


ROWS: dict[str, Benchmark] = {
    "extraction": extraction,
    "tree": tree,
    "processes": processes,
    "start": command_start,
}
