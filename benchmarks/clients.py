# SPDX-License-Identifier: Apache-2.0
"""Real clients: gdb loads a large debug file, perf names the functions of a profile.

The native side is a copy of the mount itself: the same names, links and bytes on the disk.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.bench import Bench, Benchmark, require, run
from benchmarks.data import Program, debug_program
from benchmarks.mounts import product
from benchmarks.report import Row
from benchmarks.stores import build_id_of, scanned

_Client = Callable[[Path], tuple[float, bytes]]


def gdb(bench: Bench) -> Iterator[Row]:
    """The row for gdb reading symbols, lines, types and sources' names."""
    require("gdb", "gdb")
    program = debug_program(bench)
    last = program.functions - 1
    questions = [
        f"info line {program.function(77)}",
        f"info scope {program.function(last // 2)}",
        f"ptype struct {program.function(last)}_state",
        f"info types {program.function(12)}_state",
        f"info functions function{last % 5000}_",
        f"break {program.function(last)}",
    ]

    def client(tree: Path) -> tuple[float, bytes]:
        command = ["gdb", "-nx", "-batch", "-iex", "set auto-load no"]
        command += ["-iex", f"set debug-file-directory {tree}/debug"]
        command += ["-iex", "set debuginfod enabled off"]
        for question in (f"file {program.stripped}", *questions):
            command += ["-ex", question]
        seconds, output = _timed_run(bench, command)
        if b'of "unit0.c" starts at address' not in output:
            raise RuntimeError(f"gdb found no debug information below {tree}: {output[:300]!r}")
        return seconds, output

    size = program.debug.stat().st_size / 1e6
    yield _compare(bench, f"gdb with a debug file of {size:.0f} MB", program, client)


def perf(bench: Bench) -> Iterator[Row]:
    """The row for perf report."""
    require("perf", "linux-perf")
    program = debug_program(bench)
    recording = bench.workdir / "perf.data"
    # Recorded from a copy that is gone when perf reports, as a container's file would be.
    copy = bench.directory("recorded") / "program"
    copy.write_bytes(program.stripped.read_bytes())
    copy.chmod(0o755)
    events = ["-e", "cpu-clock", "-g", "--buildid-mmap"]
    run(["perf", "record", "-q", *events, "-o", recording, copy])
    copy.unlink()

    def client(tree: Path) -> tuple[float, bytes]:
        command = ["perf", "--buildid-dir", f"{tree}/perf", "report", "-i", str(recording)]
        command += ["--stdio", "--sort", "dso,symbol"]
        seconds, output = _timed_run(bench, command)
        # The last line is a tip chosen at random.
        output = re.sub(rb"(?m)^# \(Tip:.*$|^\(Tip:.*$", b"", output)
        if b"unit0_function7_" not in output:
            raise RuntimeError(f"perf found no symbols below {tree}: {output[:300]!r}")
        return seconds, output

    yield _compare(bench, "perf report", program, client)


def _timed_run(bench: Bench, command: Sequence[str]) -> tuple[float, bytes]:
    home = bench.directory("home")
    begin = time.perf_counter()
    output = run(bench.pinned(*command), env={"HOME": str(home), "DEBUGINFOD_URLS": ""})
    return time.perf_counter() - begin, output


def _compare(bench: Bench, what: str, program: Program, client: _Client) -> Row:
    store = scanned(bench, "program-store", program.directory)
    native = _copy_of_mount(bench, store, program)
    native_times: list[float] = []
    times: list[float] = []
    outputs: set[bytes] = set()
    for number in range(bench.rounds):
        bench.say(f"{what}: round {number + 1} of {bench.rounds}")
        seconds, output = client(native)
        native_times.append(seconds)
        outputs.add(output.replace(os.fsencode(native), b"TREE"))
        with product(bench, store) as mounted:
            seconds, output = client(mounted.root)
            times.append(seconds)
            outputs.add(output.replace(os.fsencode(mounted.root), b"TREE"))
    if len(outputs) != 1:
        raise RuntimeError(f"{what}: the output differs from the native tree's")
    ours, theirs = min(times), min(native_times)
    return Row(
        f"{what}, time against native, same output", "<=", 1.10, ours / theirs,
        detail=f"{ours:.2f} s, native {theirs:.2f} s",
    )  # fmt: skip


def _copy_of_mount(bench: Bench, store: Path, program: Program) -> Path:
    native = bench.workdir / "program-native"
    if not native.exists():
        with product(bench, store) as mounted:
            run(["cp", "-a", "--no-preserve=ownership", f"{mounted.root}/.", native])
    held = native / build_id_of(program.stripped) / "debug"
    if held.read_bytes() != program.debug.read_bytes():
        raise RuntimeError(f"{held} is not the debug file that was captured")
    return native


ROWS: dict[str, Benchmark] = {"gdb": gdb, "perf": perf}
