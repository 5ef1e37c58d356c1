# SPDX-License-Identifier: Apache-2.0
"""Dumps of JIT compilers, and programs whose code is generated."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import signal
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from buildidfs.model import FileIdentity, JitProcess, NamespaceSet, Origin
from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.harness.waiting import until


def dump(order: str, *records: bytes) -> bytes:
    """A dump with these records, in the byte order ``order`` of struct."""
    head = struct.pack(f"{order}IIIIIIQQ", 0x4A695444, 1, 40, 62, 0, 1, 0, 0)
    return head + b"".join(records)


def load(order: str, address: int, name: bytes, code: bytes, index: int) -> bytes:
    """The record of a function that was compiled."""
    body = (
        struct.pack(f"{order}IIQQQQ", 1, 1, address, address, len(code) or 16, index)
        + name
        + b"\0"
        + code
    )
    return _record(order, 0, body)


def move(order: str, old: int, new: int, size: int, index: int) -> bytes:
    """The record of a function that was moved."""
    return _record(order, 1, struct.pack(f"{order}IIQQQQQ", 1, 1, new, old, new, size, index))


def other(order: str, kind: int, body: bytes) -> bytes:
    """A record of another kind."""
    return _record(order, kind, body)


def _record(order: str, kind: int, body: bytes) -> bytes:
    return struct.pack(f"{order}IIQ", kind, 16 + len(body), 5) + body


def jit_process(pid: int, *, container: str = "docker:abc", ticks: int = 100) -> JitProcess:
    """A process of a container that has written a map."""
    identity = FileIdentity(1, pid, 10, 2, 3, 0o100644, 1000, 1000, b"scope")
    origin = Origin(
        b"/tmp/perf-%d.map" % pid, identity, namespaces=NamespaceSet(mnt=5), container=container
    )
    return JitProcess(pid, pid, ticks, ticks * 10**7, "b00t", "node", 62, origin)


# --- programs ------------------------------------------------------------------------------------

_NODE = """
function inner(n) { let s = 0; for (let i = 0; i < n; i++) s = (s * 31 + i) % 1000003; return s; }
function outer(n) { let t = 0; for (let i = 0; i < 200; i++) t += inner(n); return t; }
const { existsSync } = require('fs');
while (process.cpuUsage().user < 1e6 * process.argv[2] && !existsSync('end')) outer(2000);
"""

_LONG_S = 60  # of a program that is told when to end

# Each call goes from C through the trampoline that perf is told of.
_PYTHON = """
import os, sys, time
def inner(number):
    return number
def outer():
    for _ in range(100):
        list(map(inner, range(100)))
while time.process_time() < float(sys.argv[1]) and not os.path.exists("end"):
    outer()
"""


class Jit(NamedTuple):
    """A program in ``source`` for the interpreter ``argv``, and functions that use most time.

    It takes ``seconds`` of processor time for enough samples of these.
    """

    argv: tuple[str, ...]
    source: str
    functions: tuple[str, ...]
    seconds: float


def node(*options: str) -> Jit:
    """Node with options such as ``--perf-basic-prof``."""
    return Jit((str(tool("node")), *options), _NODE, ("inner", "outer"), 0.5)


def pythons() -> list[Jit]:
    """Python that tells perf of its functions, which needs 3.12; empty where there is none."""
    names = [*glob.glob("/root/.pyenv/versions/3.1[2-9].*/bin/python3"), "/usr/bin/python3"]
    for name in names:
        version = [name, "-c", "import sys; print(sys.version_info >= (3, 12))"]
        if os.access(name, os.X_OK) and run(version).out == "True\n":
            return [Jit((name, "-X", "perf"), _PYTHON, ("py::inner", "py::outer"), 2.0)]
    return []


@contextlib.contextmanager
def container(program: Jit, seconds: float | None = None) -> Iterator[int]:
    """A program in a mount and PID namespace with a /tmp of its own, for so much processor time.

    Without ``seconds`` it is told to end at the end of the block. Yields the number of its process
    here. At the end of the block all of it is gone.
    """
    script = """
        set -e
        mount -t tmpfs none /tmp
        cd /tmp
        cat > program
        exec "$@" ./program %s
        """
    argv = [
        tool("unshare"), "-m", "-p", "-f", "--mount-proc", "--kill-child",
        "sh", "-c", script % (seconds or _LONG_S), "sh", *program.argv,
    ]  # fmt: skip
    process = subprocess.Popen(argv, stdin=subprocess.PIPE)
    try:
        assert process.stdin is not None
        process.stdin.write(program.source.encode())
        process.stdin.close()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        until(lambda: children.read_text().split(), "the program")
        pid = int(children.read_text().split()[0])
        yield pid
        if seconds is None:
            Path(f"/proc/{pid}/root/tmp/end").touch()
            os.kill(pid, signal.SIGCONT)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


class Named(NamedTuple):
    """Samples of one process in generated code: how many, and those with each name."""

    total: int
    names: Counter[str]

    @property
    def share(self) -> float:
        """Per cent of those that have a name."""
        return 100 * (1 - self.names["[unknown]"] / self.total)

    def of(self, *functions: str) -> int:
        """How many fell into functions whose names have one of these in them."""
        return sum(n for name, n in self.names.items() if any(each in name for each in functions))


def jit_samples(mount: Path, data: Path, pids: Sequence[int]) -> dict[int, Named]:
    """What perf calls the places in generated code that samples of each process fell into."""
    fields = ["-F", "pid,ip,sym,dso", "-G"]
    text = tools.perf(mount, "script", *fields, f"--pid={','.join(map(str, pids))}", "-i", data).out
    names: dict[int, Counter[str]] = {pid: Counter() for pid in pids}
    for line in text.splitlines():
        match = re.match(r"\s*(\d+)\s+[0-9a-f]+ (.*) \((.*)\)$", line)
        if match and re.match(r"\[jit:|//anon|/memfd:|\[anon|/tmp/perf-|\[unknown\]", match[3]):
            names[int(match[1])][match[2]] += 1
    return {pid: Named(found.total(), found) for pid, found in names.items()}


def spend(pid: int, seconds: float) -> None:
    """Let a stopped process use so much more processor time, and stop it."""

    def used() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    end = used() + seconds
    os.kill(pid, signal.SIGCONT)
    until(lambda: used() >= end, "the processor time")
    os.kill(pid, signal.SIGSTOP)
