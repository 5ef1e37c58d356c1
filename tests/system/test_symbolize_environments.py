# SPDX-License-Identifier: Apache-2.0
"""``symbolize`` gives its answers in every environment that a caller may be in."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import socket
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.environments import ENVIRONMENTS, USER, Environment, as_user, cgroup
from tests.support.clients.tools import nm, run, tool
from tests.support.elf.programs import build_id_of
from tests.support.harness.in_turn import Command, run_in_turn
from tests.support.harness.mounts import COMMAND, BuildIdFs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = [pytest.mark.client, pytest.mark.root, pytest.mark.slow]

READING = ("input", "perf script")
WAYS = (*READING, "argument")
USERS = ("root", "user")


class Subject(NamedTuple):
    """A program in the stores of both users, and an address in it."""

    directory: Path
    build_id: str
    request: str
    script: str

    def store(self, user: str) -> Path:
        """The store of a user."""
        return self.directory / user / "store"


@pytest.fixture(scope="module")
def subject(scratch: Path) -> Iterator[Subject]:
    directory = scratch / "environments"
    directory.mkdir(mode=0o711)
    source, binary = directory / "subject.c", directory / "subject"
    source.write_text("int main(int argc, char **argv) { return argv ? argc : 1; }\n")
    run([tool("gcc"), "-g", "-o", binary, source], check=True)
    symbols = nm(binary)
    (address,) = (line.split()[0] for line in symbols.splitlines() if line.endswith(" T main"))
    build_id = build_id_of(binary)
    for user in USERS:
        (directory / user).mkdir(mode=0o711)
        BuildIdFs(directory / user)("add", binary)
    run([tool("chown"), "-R", f"{USER}:{USER}", directory / "user"], check=True)
    page = 0x1000
    first = int(address, 16) // page * page
    script = (
        f"subject 7/7 1.000000: PERF_RECORD_MMAP2 7/7: [0x{0x10000 + first:x}(0x1000) @ 0x{first:x}"
        f" <{build_id}>]: r-xp /subject\n"
        f"subject 7 1.000001: 1 cycles: \n"
        f"\t{int(address, 16):16x} [unknown] (/subject)\n\n"
    )
    for kind in ("pids",):
        cgroup(kind).mkdir()
    try:
        yield Subject(directory, build_id, f"{build_id}+0x{address}", script)
    finally:
        for kind in ("pids",):
            cgroup(kind).rmdir()


@contextlib.contextmanager
def standard_input(kind: str, text: str, place: Path) -> Iterator[int]:
    """A descriptor of a kind, from which this text can be read."""
    with contextlib.ExitStack() as stack:
        if kind == "file":
            (place / "input").write_text(text)
            reading = os.open(place / "input", os.O_RDONLY)
        elif kind == "socket":
            ours, its = socket.socketpair()
            ours.sendall(text.encode())
            ours.close()
            reading = its.detach()
        elif kind == "terminal":
            writing, reading = pty.openpty()
            stack.callback(os.close, writing)
            os.write(writing, text.encode() + b"\x04")
        else:
            reading, writing = os.pipe()
            os.write(writing, text.encode())
            os.close(writing)
        stack.callback(os.close, reading)
        yield reading


def command(subject: Subject, user: str, way: str) -> Command:
    words = {
        "argument": ["symbolize", subject.request],
        "input": ["symbolize"],
        "perf script": ["symbolize", "--perf-script"],
    }[way]
    text = {"input": f"{subject.request}\n", "perf script": subject.script}.get(way, "")
    return Command(["--store", str(subject.store(user)), *words], text)


def ask(
    subject: Subject, environment: Environment, user: str, ways: Sequence[str], place: Path
) -> list[subprocess.CompletedProcess[str]]:
    """Run the program once for each way."""
    place.mkdir()
    before = environment.before(place)
    if user == "user":
        os.chown(place, USER, USER)
        before = [*as_user(place), *before]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name, value in environment.env.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = f"{value}:{ROOT}" if name == "PYTHONPATH" else value
    if environment.stdin == "closed":
        before = ["/bin/sh", "-c", 'exec "$@" 0<&-', "sh", *before]
    argv = [os.fsdecode(word) for word in before]
    commands = [command(subject, user, way) for way in ways]
    if not environment.is_for_one:
        return run_in_turn(argv, commands, variables, ROOT)
    (only,) = commands
    with standard_input(environment.stdin, only.text, place) as reading:
        done = subprocess.run(
            [*argv, *COMMAND, *only.words],
            stdin=reading, capture_output=True, text=True, errors="replace", check=False,
            timeout=120, cwd=ROOT, env=variables,
        )  # fmt: skip
    return [done]


def failure(
    subject: Subject,
    environment: Environment,
    user: str,
    way: str,
    done: subprocess.CompletedProcess[str],
) -> str:
    """What is wrong with an answer; nothing if it is the right one."""
    well = {
        "argument": f"{subject.request} main {subject.directory}/subject.c:1",
        "input": f"{subject.request} main {subject.directory}/subject.c:1",
        "perf script": "main+0x0 (/subject)",
    }[way] in done.stdout
    told = environment.notes in done.stderr and bool(done.stderr) == bool(environment.notes)
    if done.returncode == 0 and well and told:
        return ""
    return f"{environment.name}, {user}, {way}: {done.returncode} {done.stdout!r} {done.stderr!r}"


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda environment: environment.name)
def test_environment(subject: Subject, environment: Environment) -> None:
    """Each user who can have it, each way; one after the other, as it may count processes.

    Requests in an argument and in the input differ from perf's output by the input alone.
    """
    users = USERS[:1] if environment.root_only else USERS
    ways = ["perf script"]
    if environment.stdin != "pipe":
        ways = [way for way in WAYS if environment.stdin != "closed" or way not in READING]
    together = [[way] for way in ways] if environment.is_for_one else [ways]
    said = []
    for number, (user, part) in enumerate(itertools.product(users, together)):
        place = subject.directory / f"{ENVIRONMENTS.index(environment)}-{number}"
        for way, done in zip(part, ask(subject, environment, user, part, place), strict=True):
            said.append(failure(subject, environment, user, way, done))
    assert not any(said), "\n".join(filter(None, said))
