# SPDX-License-Identifier: Apache-2.0
"""The HTTP server against Debian's debuginfod, on the same files, with wrk as the client.

Both may use all processors, as they do in practice. Rounds alternate, and the median of the ratios
of two that follow each other counts: other programs disturb both alike.
"""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks import stores
from benchmarks.bench import Bench, Unusable
from benchmarks.report import Row
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness.mounts import COMMAND
from tests.support.servers.serving import Server, free_port, serving

if TYPE_CHECKING:
    from benchmarks.bench import Benchmark

_SMALL, _MEDIUM, _LARGE, _UNKNOWN = (bytes([n]) * 20 for n in range(0xD1, 0xD5))
_SIZES: Final = {_SMALL: 2 << 10, _MEDIUM: 1 << 20, _LARGE: 100 << 20}
_DOWNLOADS: Final = 200
_REQUESTS: Final = re.compile(r"Requests/sec:\s+([\d.]+)")
_MEGABYTES: Final = re.compile(r"Transfer/sec:\s+([\d.]+)([KMG]?)B")
_UNITS: Final = {"": 1e-6, "K": 1.024e-3, "M": 1.048576, "G": 1073.741824}


def serving_rows(bench: Bench) -> Iterator[Row]:
    """Rows for requests, throughput and memory."""
    with tempfile.TemporaryDirectory(dir=bench.workdir) as name:
        home = Path(name)
        for directory in (bench.workdir, home):
            directory.chmod(0o711)  # only what all users can read is served
        files = home / "files"
        files.mkdir()
        for build_id, size in _SIZES.items():
            plain = elf_file([TEXT], build_id=build_id)
            pad = Section(b".pad", os.urandom(max(size - len(plain) - 64, 0)))
            (files / build_id.hex()).write_bytes(elf_file([TEXT, pad], build_id=build_id))
            (files / build_id.hex()).chmod(0o755)
        store = home / "store"
        run([*COMMAND, "--store", store, "scan", "tree", files], check=True)
        with debuginfod(files, home) as theirs:
            for workers in (1, 2):
                with serving(
                    store, "--workers", str(workers), config="[serve]\nrate = 0\n"
                ) as server:
                    yield from _compared(bench, workers, server.url, theirs)
                    if workers == 1:
                        yield _memory(server.url, server.workers()[0])


def _compared(bench: Bench, workers: int, ours: str, theirs: str) -> Iterator[Row]:
    plural = "s" if workers > 1 else ""
    for what, unit, build_id, clients, rounds, bar in (
        ("2 KB file", "requests", _SMALL, 32, 5, 1.0),
        ("404", "requests", _UNKNOWN, 32, 5, 1.0),
        ("1 MB file", "MB", _MEDIUM, 16, 5, 1.0),
        ("100 MB file", "MB", _LARGE, 2, 9, 1.0),
    ):
        target = f"/buildid/{build_id.hex()}/executable"
        expected = 404 if build_id == _UNKNOWN else 200
        if {_status(f"{url}{target}") for url in (ours, theirs)} != {expected}:
            raise Unusable(f"not both servers answer {expected} to {target}")
        pairs = [
            [_rate(f"{url}{target}", clients, unit) for url in (ours, theirs)]
            for _ in range(bench.size(rounds, 1))
        ]
        middle = [statistics.median(rates) for rates in zip(*pairs, strict=True)]
        yield Row(
            f"serve, {what}, {unit}/s against debuginfod, {workers} worker{plural}",
            ">=",
            bar,
            statistics.median(rates[0] / rates[1] for rates in pairs),
            detail=f"{middle[0]:.0f} and {middle[1]:.0f} a second",
        )


def _rate(url: str, clients: int, unit: str) -> float:
    """Requests or MB a second; the MB include those of downloads that the end of the time cuts."""
    result = run([tool("wrk"), "-t1", f"-c{clients}", "-d3s", url], check=True)
    found = (_REQUESTS if unit == "requests" else _MEGABYTES).search(result.out)
    if found is None:
        raise Unusable(f"wrk said no rate: {result.out}")
    return float(found[1]) * (1 if unit == "requests" else _UNITS[found[2]])


def _memory(url: str, worker: int) -> Row:
    """Row for the memory of a worker while many clients load the large file."""

    def download() -> None:
        with urllib.request.urlopen(f"{url}/buildid/{_LARGE.hex()}/executable") as reply:
            while reply.read(1 << 20):
                pass

    threads = [threading.Thread(target=download) for _ in range(_DOWNLOADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    status = Path(f"/proc/{worker}/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
    return Row(f"serve, memory at {_DOWNLOADS} downloads of 100 MB", "<", 100, peak, "MiB")


@contextlib.contextmanager
def debuginfod(files: Path, home: Path) -> Iterator[str]:
    """Run debuginfod of elfutils on a directory; yields its URL once it has the large file."""
    port = free_port()
    argv = [tool("debuginfod"), "-d", str(home / "index.sqlite"), "-p", str(port), "-F", "-t", "0"]
    with (home / "debuginfod.log").open("wb") as log:
        process = subprocess.Popen([*argv, str(files)], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not _has(url):
            if time.monotonic() > deadline:
                raise Unusable(f"debuginfod: {(home / 'debuginfod.log').read_text()[-500:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _has(url: str) -> bool:
    return _status(f"{url}/buildid/{_LARGE.hex()}/executable") == 200


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def page_rows(bench: Bench) -> Iterator[Row]:
    """Rows for the time of pages over a store of 100,000 build IDs, one request after another."""
    count = bench.size(100_000, 10_000)
    store = stores.synthetic(bench, count)
    ids = stores.opened_ids(count)
    with serving(store, config="[serve]\nrate = 0\n") as server:
        deadline = time.monotonic() + 120
        while b'"counted":null' in server.ask("/api/overview").body:
            if time.monotonic() > deadline:
                raise Unusable("the server does not count its build IDs")
            time.sleep(0.5)
        for name, targets, pause in (
            # The overview is kept for two seconds: only what is made anew counts.
            ("overview", ["/"] * 9, 2.1),
            ("page of a build ID", [f"/id/{each}" for each in ids[:200]], 0.0),
            ("search by ID", [f"/search?q={each[:12]}" for each in ids[:200]], 0.0),
            ("search by name", [f"/search?q=lib{n}.so" for n in range(200)], 0.0),
            ("search by part of a name", [f"/search?q={n}.so" for n in range(200)], 0.0),
        ):
            times = [_milliseconds(server, target, pause) for target in targets]
            title = f"page, {count} build IDs, {name}, median"
            yield Row(title, "<=", 50, statistics.median(times), "ms")


def _milliseconds(server: Server, target: str, pause: float) -> float:
    time.sleep(pause)
    begin = time.perf_counter()
    reply = server.ask(target, Accept="text/html")
    if reply.status != 200:
        raise Unusable(f"the server answers {reply.status} to {target}")
    return (time.perf_counter() - begin) * 1000


ROWS: dict[str, Benchmark] = {"serving": serving_rows, "page": page_rows}
