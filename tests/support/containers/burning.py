# SPDX-License-Identifier: Apache-2.0
"""Containers that burn a CPU in functions of known names, at one path, and are gone; and perf.

Each is a mount namespace in which a filesystem of its own is mounted over a directory that they all
share, so that different programs have had the same path. Nothing of them is left when they end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from tests.support.clients import tools
from tests.support.clients.tools import Argument, perf_tool, run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness import quiet
from tests.support.harness.waiting import lines

_LEAST_SHARE: Final = 0.1
"""Of the samples that perf takes of a program on an idle machine. Other work may take the rest:
a recording had 92 of about 200 samples once.
"""

_FREQUENCY: Final = 997

_SOURCE = """
#include <signal.h>
#include <time.h>
#include <unistd.h>
const char token[] = "%(token)s";
static volatile unsigned long sink;
static __attribute__((noinline)) void burn_%(name)s(void)
{
    for (unsigned long i = 0; i < 20000; i++)
        sink += i ^ token[0];
}
static void end(int number)
{
    _exit(number != SIGTERM);
}
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
int main(void)
{
    signal(SIGTERM, end);
    for (double end = now() + %(seconds)s; now() < end;)
        for (int i = 0; i < 100; i++)
            burn_%(name)s();
    return 0;
}
"""

_MOUNT = {
    "tmpfs": 'mount -t tmpfs none "$1"; cp "$2/app" "$1"',
    "overlay": """
        mount -t tmpfs none "$1"; mkdir "$1/lower" "$1/upper" "$1/work"; cp "$2/app" "$1/lower"
        cd "$1"; mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work none "$1"; cd /
        """,
}


@dataclasses.dataclass(frozen=True)
class Burner:
    """A program that spends its life in ``function``; ``directory`` holds it as ``app``.

    It uses ``seconds`` of processor time.
    """

    name: str
    directory: Path
    build_id: str
    seconds: float

    @property
    def function(self) -> str:
        """Where nearly all of its samples fall."""
        return f"burn_{self.name}"

    @property
    def least_samples(self) -> float:
        """The least number of its samples in a `recording` by which it was recorded all along."""
        return _LEAST_SHARE * self.seconds * _FREQUENCY


def burner(directory: Path, name: str, seconds: float = 0.5, *options: str) -> Burner:
    """Build a program that no machine has seen before, with its symbols in it.

    It uses ``seconds`` of processor time, unless it is terminated before. ``options`` are those of
    gcc; its build ID is empty if they leave it out.
    """
    directory.mkdir(parents=True)
    source = directory / "app.c"
    source.write_text(_SOURCE % {"name": name, "seconds": seconds, "token": uuid.uuid4().hex})
    run([tool("gcc"), "-O1", *options, "-o", directory / "app", source], check=True)
    is_nameless = "-Wl,--build-id=none" in options
    build_id = "" if is_nameless else build_id_of(directory / "app")
    return Burner(name, directory, build_id, seconds)


@contextlib.contextmanager
def container(kind: str, place: Path, program: Burner) -> Iterator[subprocess.Popen[bytes]]:
    """The program as ``place``/app, on a filesystem of its own, until it ends by itself."""
    place.mkdir(exist_ok=True)
    script = f'set -e; {_MOUNT[kind]}\nexec "$1/app"'
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", str(place), str(program.directory)]
    process = subprocess.Popen(argv)
    try:
        yield process
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)
    assert not any(place.iterdir()), "the filesystem is still there"


@contextlib.contextmanager
def recording(output: Path, *options: str) -> Iterator[None]:
    """``perf record`` on the CPU clock, from when it records until the end of the block.

    It records the host, or with ``-p`` a process and those that it starts. With the options
    ``-o -`` it writes to a pipe, whose end is ``output``. Records have build IDs only with
    ``--buildid-mmap``.
    """
    argv: list[Argument] = [
        perf_tool(), "--buildid-dir", output.parent / "perf-cache", "record",
        "-e", "cpu-clock", "-F", str(_FREQUENCY), *options,
    ]  # fmt: skip
    if "-p" not in options:
        argv.append("-a")
    if "--buildid-mmap" not in options:
        argv.append("--no-buildid-mmap")  # the default before perf 7
    if "-" not in options:
        argv += ["-o", output]
    argv.append("-N")  # to copy what ran to a cache takes longer than to record it
    with contextlib.ExitStack() as stack:
        stack.enter_context(quiet.recording_turn(options))
        log = stack.enter_context(output.with_suffix(".log").open("w+b"))
        out = stack.enter_context(output.open("wb")) if "-" in options else log
        control, commands = (stack.enter_context(file) for file in _pipe())
        answers, answer = (stack.enter_context(file) for file in _pipe())
        argv += ["--control", f"fd:{control.fileno()},{answer.fileno()}"]
        process = subprocess.Popen(
            [os.fspath(word) for word in argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
            pass_fds=(control.fileno(), answer.fileno()),
        )
        try:
            commands.write(b"ping\n")
            lines(answers, lambda got: bool(got))
            yield
            commands.write(b"stop\n")
            assert process.wait(60) == 0, output.with_suffix(".log").read_text()
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    """The two ends of a pipe, to read and to write, unbuffered."""
    ends = os.pipe()
    return os.fdopen(ends[0], "rb", 0), os.fdopen(ends[1], "wb", 0)


@dataclasses.dataclass(frozen=True)
class Named:
    """Samples of one program in user mode: of these, by name of function, and of all."""

    by_function: dict[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_function.values())

    @property
    def share(self) -> float:
        """Per cent of those that fell into a function with a name."""
        return 100 * (1 - self.by_function.get("[unknown]", 0) / self.total)


def user_samples(mount: Path, data: Path, *programs: subprocess.Popen[bytes]) -> Named:
    """What ``perf script`` calls the functions that samples of these processes fell into.

    Other tests may run programs of the same name.
    """
    pids = ",".join(str(each.pid) for each in programs)
    fields = ["-F", "comm,ip,sym,dso", f"--pid={pids}", "--comms", "app", "-G"]
    text = tools.perf(mount, "script", *fields, "-i", data).out
    found: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"\s*app\s+([0-9a-f]+) (\S+).* \((.*)\)$", line)
        if match and not match[3].startswith("[k") and int(match[1], 16) < 1 << 63:
            found[match[2]] = found.get(match[2], 0) + 1
    return Named(found)
