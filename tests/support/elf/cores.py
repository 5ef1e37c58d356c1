# SPDX-License-Identifier: Apache-2.0
"""Core files of real processes, made by the kernel and by gcore(1).

``hot stuck`` of `programs.RunningSymbolizer` is what to dump: a library with frames of its own
between two of the program, all with names and lines; see `programs.line_of`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.tools import run, tool
from tests.support.harness.waiting import lines, until

_PATTERN = Path("/proc/sys/kernel/core_pattern")


def gcore(pid: int, directory: Path) -> Path:
    """The core of a process that goes on, by gdb: all that is mapped is in it."""
    run([tool("gcore", "gdb"), "-o", directory / "gcore", str(pid)], check=True)
    return directory / f"gcore.{pid}"


def crash(pid: int, directory: Path, *, size: int = resource.RLIM_INFINITY) -> Path:
    """The core of a process that ends of it, by the kernel, of at most ``size`` bytes.

    ``directory`` is the working directory of the process. Skips the test where the kernel gives
    cores to a program, or puts them elsewhere: that is a setting of the whole machine.
    """
    pattern = _PATTERN.read_text().strip()
    if pattern.startswith("|") or "/" in pattern:
        pytest.skip(f"core dumps of this machine go to {pattern}")
    before = set(directory.iterdir())
    resource.prlimit(pid, resource.RLIMIT_CORE, (size, size))
    os.kill(pid, signal.SIGSEGV)
    until(lambda: _has_ended(pid), "the end of the process")
    (core,) = set(directory.iterdir()) - before
    return core.rename(directory / f"crashed.{pid}")


def _has_ended(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


@contextlib.contextmanager
def stuck(executable: Path, directory: Path) -> Iterator[int]:
    """``hot stuck`` on the host, in a working directory: its process ID."""
    with subprocess.Popen([executable, "stuck"], stdout=subprocess.PIPE, cwd=directory) as process:
        try:
            assert process.stdout is not None
            lines(process.stdout, lambda got: got == ["up"])
            yield process.pid
        finally:
            process.kill()


def unstripped(core: Path) -> dict[str, str]:
    """Start address to build ID of each module, by eu-unstrip: not by the code under test."""
    listed = run([tool("eu-unstrip"), "-n", f"--core={core}"], check=True).out.splitlines()
    found = {}
    for line in listed:
        place, build_id = line.split()[:2]
        found[place.partition("+")[0]] = build_id.partition("@")[0]
    return found
