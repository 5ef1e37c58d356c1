# SPDX-License-Identifier: Apache-2.0
"""``make bench``: measure everything that has a bar, side by side, and print one table.

    python -m benchmarks.run [--quick] [--json] [NAME...]

Exit status 0 if every bar is met, 1 if one is missed or could not be measured, 2 for a request
that makes no sense, 128+N when a signal ended it. Needs root, and a disk (not tmpfs) with 8 GB to
spare below TMPDIR.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import (
    clients,
    durability,
    growth,
    packages,
    reads,
    requests,
    scanning,
    serving,
    watch,
)
from benchmarks.bench import (
    Bench,
    Benchmark,
    Unusable,
    ahead_of_others,
    raise_descriptor_limit,
    run,
)
from benchmarks.report import Failure, Row, json_lines, table

if TYPE_CHECKING:
    from types import FrameType

_BENCHMARKS: dict[str, Benchmark] = {
    **requests.ROWS,
    **reads.ROWS,
    **clients.ROWS,
    **scanning.ROWS,
    **packages.ROWS,
    **watch.ROWS,
    **growth.ROWS,
    **durability.ROWS,
    **serving.ROWS,
}


def main() -> int:
    """Run what the command line names."""
    options = _options()
    if os.geteuid() != 0:
        print("benchmarks: needs root: it mounts filesystems and sets read-ahead", file=sys.stderr)
        return 2
    raise_descriptor_limit()
    for name in [name for name in os.environ if name.startswith("PYTHON")]:
        # Unbuffered output and no cached bytecode are not how the program is installed.
        del os.environ[name]
    # So that everything is unmounted and removed however the run ends.
    signal.signal(signal.SIGTERM, _interrupted)
    signal.signal(signal.SIGHUP, _interrupted)
    rows: list[Row] = []
    failures: list[Failure] = []
    with ExitStack() as stack:
        stack.enter_context(ahead_of_others())
        bench = Bench(
            workdir=_workdir(options.workdir, stack),
            cache=options.cache,
            cpu=options.cpu,
            quick=options.quick,
            verbose=not options.json,
            rounds=options.rounds or (3 if options.quick else 5),
        )
        if not options.json:
            print(_machine(bench), file=sys.stderr, flush=True)
        for name in options.names or _BENCHMARKS:
            _measure(bench, name, rows, failures)
    print((json_lines if options.json else table)(rows, failures))
    return 0 if not failures and all(row.ok for row in rows) else 1


def _measure(bench: Bench, name: str, rows: list[Row], failures: list[Failure]) -> None:
    """Run one benchmark; whatever goes wrong with it is a failure of that one."""
    begin = time.monotonic()
    try:
        rows += _BENCHMARKS[name](bench)
    except Unusable as error:
        failures.append(Failure(name, str(error)))
    except Exception as error:  # the others shall still be measured
        traceback.print_exc()
        failures.append(Failure(name, f"{type(error).__name__}: {error}"))
    bench.say(f"{name}: {time.monotonic() - begin:.0f} s")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks", description="Measure buildidfs against its bars."
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help=", ".join(_BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="smaller sizes, fewer rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    parser.add_argument("--rounds", type=int, help="rounds of each comparison")
    parser.add_argument("--cpu", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--workdir", type=Path, help="keep what is made, and use it again")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "buildidfs-bench"
    parser.add_argument("--cache", type=Path, default=cache, help="for what takes long to compile")
    options = parser.parse_args()
    unknown = set(options.names) - set(_BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    return options


def _workdir(given: Path | None, stack: ExitStack) -> Path:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        path = given.resolve()
    else:
        # A tmpfs is a different thing to read from and to sync to; many a /tmp is one.
        base = None if _filesystem(Path(tempfile.gettempdir())) != "tmpfs" else "/var/tmp"
        path = Path(tempfile.mkdtemp(prefix="buildidfs-bench-", dir=base))
        stack.callback(shutil.rmtree, path, ignore_errors=True)
    if _filesystem(path) == "tmpfs":
        print(f"benchmarks: {path} is on a tmpfs, not on a disk", file=sys.stderr)
        raise SystemExit(2)
    return path


def _filesystem(path: Path) -> str:
    return run(["stat", "-f", "-c", "%T", path]).decode().strip()


def _machine(bench: Bench) -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, {_filesystem(bench.workdir)}, pinned to CPU {bench.cpu}"
    )


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
