# SPDX-License-Identifier: Apache-2.0
"""The environment of every benchmark: a work directory, one CPU, and the client that measures.

Client and server share one CPU. With two, the wake-up of an idle virtual CPU costs more than a
request and varies two- to fourfold between runs; on one CPU the spread is a few per cent, and
what is compared is the work each server does. Rounds of the things compared are interleaved, so
that a disturbance meets all of them, and the best round counts: a disturbance only ever adds.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from benchmarks.report import Row

Mode: TypeAlias = Literal["open", "stat", "missing"]
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent


class Unusable(Exception):
    """The machine lacks what a benchmark needs; the text names it."""


class Loop(msgspec.Struct, frozen=True):
    """Results of client.c. Times are in nanoseconds."""

    operations: int
    wall_ns: int
    p50_ns: int
    p99_ns: int
    max_ns: int
    errors: int
    sum: int

    @property
    def us(self) -> float:
        """Wall clock per operation, microseconds."""
        return self.wall_ns / self.operations / 1000


@dataclass
class Bench:
    """One run of the benchmarks: sizes, places, and how processes are started.

    ``workdir`` is emptied by the one who made it; benchmarks make subdirectories in it and may
    find what an earlier benchmark of the same run left there. ``cache`` outlives the run.
    """

    workdir: Path
    cache: Path
    cpu: int
    quick: bool = False
    verbose: bool = False
    rounds: int = 5
    _stack: ExitStack = field(default_factory=ExitStack)

    def say(self, text: str) -> None:
        """Tell a person what goes on, on standard error."""
        if self.verbose:
            print(f"  {text}", file=sys.stderr, flush=True)

    def size(self, full: int, quick: int) -> int:
        """A number that is smaller in a quick run."""
        return quick if self.quick else full

    def pinned(self, *command: str | Path) -> list[str]:
        """The command, confined to the CPU that is measured on."""
        return ["taskset", "-c", str(self.cpu), *(str(word) for word in command)]

    def directory(self, name: str) -> Path:
        """A directory of that name in the work directory; made if it is not there."""
        path = self.workdir / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @contextmanager
    def scratch(self, name: str) -> Iterator[Path]:
        """A directory that is empty now and gone afterwards."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.workdir))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    @cached_property
    def client(self) -> Path:
        """The compiled client.c."""
        return compile_c(HERE / "client.c", self.workdir / "client", ("-pthread",))

    def loop(self, mode: Mode, paths: Sequence[str], *, clients: int = 1, repeat: int = 1) -> Loop:
        """Run client.c over ``paths``; raises if any operation ended as it should not."""
        listing = self.workdir / "paths"
        listing.write_text("".join(f"{path}\n" for path in paths))
        result = self._client(mode, str(clients), str(repeat), str(listing))
        if result.errors:
            raise RuntimeError(
                f"{result.errors} of {result.operations} {mode} operations went wrong, "
                f"the first path is {paths[0]}"
            )
        return result

    def sequential(self, path: Path) -> Loop:
        """Read one file to its end; ``sum`` is its size."""
        return self._client("sequential", str(path))

    def faults(self, path: Path, count: int) -> Loop:
        """Touch ``count`` random pages of one file; ``sum`` adds up the bytes found."""
        return self._client("faults", str(path), str(count))

    def _client(self, *arguments: str) -> Loop:
        output = run(self.pinned(self.client, *arguments))
        return msgspec.json.decode(output, type=Loop)


Benchmark: TypeAlias = Callable[[Bench], Iterator[Row]]


def run(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    ok: Sequence[int] = (0,),
    cwd: Path | None = None,
) -> bytes:
    """Standard output of a command; RuntimeError with its standard error if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env=None if env is None else {**os.environ, **env},
        cwd=cwd,
    )
    if done.returncode not in ok:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise RuntimeError(f"{' '.join(map(str, command))}: exit {done.returncode}: {last}")
    return done.stdout


def timed(action: Callable[[], object]) -> float:
    """Seconds of wall clock that ``action`` takes."""
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    """Poll until ``condition`` holds; TimeoutError naming ``what`` if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(0.005)


def compile_c(source: Path, target: Path, flags: Sequence[str] = ()) -> Path:
    """Compile one C file with -O2 unless it was; returns the program."""
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        require("gcc", "gcc")
        run(["gcc", "-O2", "-w", "-o", target, source, *flags])
    return target


def require(program: str, package: str) -> str:
    """The path of a program; `Unusable` naming the Debian package if it is not installed."""
    path = shutil.which(program)
    if path is None:
        raise Unusable(f"{program} is not installed (Debian package {package})")
    return path


def raise_descriptor_limit() -> None:
    """Let this process and its children open as many files as the system allows.

    passthrough_ll keeps a descriptor for each name it was asked for.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def ahead_of_others() -> Iterator[None]:
    """Let this process and its children run before whatever else the machine does.

    Where sessions are scheduled as groups, nice(2) only counts within a session, and the whole
    session is raised instead, for as long as the block lasts.
    """
    group = Path("/proc/self/autogroup")
    before = ""
    with suppress(OSError, IndexError):
        os.nice(-20)
        before = group.read_text().split()[-1]
        group.write_text("-20")
    try:
        yield
    finally:
        with suppress(OSError):
            if before:
                group.write_text(before)
