# SPDX-License-Identifier: Apache-2.0
"""Killing buildidfs at random moments, and the power of the disk that its store is on.

A `Ledger` knows what has been acknowledged: what a command that ended well captured, and what one
that is still running has said that it captured. After each crash all of that must be there with the
bytes it had, and ``buildidfs check`` must find nothing wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients.tools import Argument, run, tool
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness.mounts import COMMAND
from tests.support.harness.waiting import until

_REPOSITORY = Path(__file__).resolve().parents[3]
# Damage was found, and there was nothing left that may be removed.
_ENDED = (0, 14, 20)
_CAPTURED = re.compile(r"captured .* \(([0-9a-f]{40})\)$", re.MULTILINE)


@dataclasses.dataclass
class Ledger:
    """SHA-256 (hex) by build ID (hex): of files that nobody may remove, and of all others.

    ``made`` are files that exist, whether or not they were captured.
    """

    kept: dict[str, str] = dataclasses.field(default_factory=dict)
    told: dict[str, str] = dataclasses.field(default_factory=dict)
    made: dict[str, str] = dataclasses.field(default_factory=dict)

    def tell(self, build_ids: Sequence[str]) -> None:
        """Expect files of `made` from now on, because they were said to be captured."""
        for build_id in build_ids:
            if build_id in self.made:
                self.told[build_id] = self.made[build_id]

    def lost(self, store: Path, *, removing: bool = False) -> list[str]:
        """What is not there as it should be; what may have been removed is forgotten then."""
        found = []
        with Store.open(store, read_only=True) as opened:
            for build_id, digest in list((self.told | self.kept).items()):
                problem = _problem(opened, build_id, digest)
                if problem == "gone" and removing and build_id not in self.kept:
                    self.told.pop(build_id)
                elif problem:
                    found.append(f"{build_id}: {problem}")
        return found


def _problem(store: Store, build_id: str, digest: str) -> str:
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    artifact = None if ordinal is None else store.index.artifact(ordinal, Kind.EXECUTABLE)
    if artifact is None:
        return "gone"
    if artifact.digest.hex() != digest:
        return f"has {artifact.digest}"
    with store.open_blob(artifact.digest) as blob:
        return "" if blob.computed().hex() == digest else "other bytes"


def make_files(directory: Path, count: int, ledger: Ledger, dice: random.Random) -> Path:
    """So many ELF files that nobody has seen before, of 1 to 64 KiB."""
    directory.mkdir(parents=True)
    for number in range(count):
        build_id = dice.randbytes(20)
        filling = Section(b".rodata", dice.randbytes(dice.choice((1, 4, 64)) << 10), flags=2)
        data = elf_file([TEXT, filling], build_id=build_id)
        (directory / f"file{number}").write_bytes(data)
        ledger.made[build_id.hex()] = hashlib.sha256(data).hexdigest()
    return directory


@dataclasses.dataclass(frozen=True)
class Operation:
    """A command to kill. ``setting_up`` makes what it works on, and gives its arguments.

    ``after`` is called with the process while it runs; ``longest`` is how long it takes at most, in
    seconds, where that cannot be measured. ``removes`` says that what nobody pinned may be gone,
    and ``repeated`` that it begins with a damaged store and has to come to its end once before that
    is sound.
    """

    name: str
    setting_up: Callable[[Crashes], Sequence[Argument]]
    after: Callable[[Crashes], None] | None = None
    longest: float | None = None
    removes: bool = False
    repeated: bool = False


class Crashes:
    """A store on which one `Operation` after the other is killed. A context manager."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.store = directory / "store"
        self.dice = random.Random(seed)
        self.ledger = Ledger()
        self.finished = self.killed = 0
        self._number = 0
        self._durations: dict[str, float] = {}
        kept = make_files(directory / "kept", 30, self.ledger, self.dice)
        self.call("scan", "tree", kept)
        self.ledger.kept = dict(self.ledger.made)
        self.call("pin", *self.ledger.kept)

    def call(self, *arguments: Argument, ok: tuple[int, ...] = (0,)) -> str:
        """Run a command to its end; what it printed."""
        argv = [*COMMAND, "--store", self.store, *arguments]
        done = run(argv, cwd=_REPOSITORY)
        assert done.rc in ok, f"{argv[3:]} ended with {done.rc}: {done.err[-2000:]}"
        return done.out

    def fresh(self) -> Path:
        """A name in the directory that is not taken."""
        self._number += 1
        return self.directory / f"files{self._number}"

    def crash(self, operation: Operation) -> list[str]:
        """Run it, kill it, look; what is wrong afterwards, in words."""
        arguments = operation.setting_up(self)
        if operation.name not in self._durations:
            self._durations[operation.name] = self._measure(operation, arguments)
            self.ledger.lost(self.store, removing=operation.removes)
            arguments = operation.setting_up(self)
        output = self._kill(operation, arguments)
        self.ledger.tell(acknowledged(output))
        if operation.repeated:
            self.call(*arguments, ok=_ENDED)
        problems = [f"{operation.name}: {line}" for line in self._check()]
        lost = self.ledger.lost(self.store, removing=operation.removes)
        problems += [f"{operation.name}: {line}" for line in lost]
        return problems

    def _measure(self, operation: Operation, arguments: Sequence[Argument]) -> float:
        if operation.longest is not None:
            return operation.longest
        begin = time.monotonic()
        self.call(*arguments, ok=_ENDED)
        return time.monotonic() - begin

    def _kill(self, operation: Operation, arguments: Sequence[Argument]) -> str:
        log = self.directory / "log"
        moment = self.dice.uniform(0.1, 1.1) * self._durations[operation.name]
        with log.open("wb") as output:
            argv = [os.fspath(word) for word in (*COMMAND, "--store", self.store, *arguments)]
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=_REPOSITORY,
                start_new_session=True,
            )
        try:
            begin = time.monotonic()
            deadline = begin + moment
            while (left := deadline - time.monotonic()) > 0 and process.poll() is None:
                if operation.after is not None:
                    operation.after(self)
                time.sleep(min(left, 0.01))
            if process.poll() is None:
                self.killed += 1
            else:
                self.finished += 1
                # The first run may have been slow, beside others.
                self._durations[operation.name] = time.monotonic() - begin
        finally:
            kill_session(process)
        return log.read_text(errors="replace")

    def _check(self) -> list[str]:
        done = run([*COMMAND, "--store", self.store, "check"], cwd=_REPOSITORY)
        return [] if done.rc == 0 else [f"check says {done.rc}: {(done.out + done.err)[-500:]}"]


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill the leader of a session, and all that is in it."""
    for pid in _session_of(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(30)
    until(lambda: not _session_of(process.pid), "an end of what was started", 30)


def _session_of(leader: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdecimal():
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry))
    return found


def acknowledged(output: str) -> list[str]:
    """The build IDs that a command said it has captured, whole lines only."""
    whole = output[: output.rfind("\n") + 1]
    found = _CAPTURED.findall(whole)
    for line in whole.splitlines():
        if line.startswith("{"):
            event = json.loads(line)
            if event.get("event") == "captured":
                found.append(event["build_id"])
    return found


def _scan(crashes: Crashes) -> Sequence[Argument]:
    files = make_files(crashes.fresh(), 60, crashes.ledger, crashes.dice)
    return ("-v", "scan", "tree", files)


def _watch(crashes: Crashes) -> Sequence[Argument]:
    make_programs(crashes.fresh(), 20, crashes.ledger, crashes.dice)
    return ("watch", "--json", "--no-scan")


def make_programs(directory: Path, count: int, ledger: Ledger, dice: random.Random) -> None:
    """So many programs that nobody has run before; they end at once."""
    directory.mkdir()
    template = Path("/bin/true").read_bytes()
    shown = run([tool("readelf"), "-n", "/bin/true"], check=True).out
    build_id = bytes.fromhex(shown.partition("Build ID: ")[2].split()[0])
    assert template.count(build_id) == 1
    for number in range(count):
        new = dice.randbytes(len(build_id))
        data = template.replace(build_id, new)
        path = directory / f"program{number}"
        path.write_bytes(data)
        path.chmod(0o755)
        ledger.made[new.hex()] = hashlib.sha256(data).hexdigest()


def _run_one(crashes: Crashes) -> None:
    programs = sorted((crashes.directory / f"files{crashes._number}").iterdir())
    if programs:
        subprocess.run([crashes.dice.choice(programs)], check=True)


def _prune(crashes: Crashes) -> Sequence[Argument]:
    crashes.call("scan", "tree", make_files(crashes.fresh(), 60, crashes.ledger, crashes.dice))
    return ("prune", "--max-size", "1KiB")


def _gc(crashes: Crashes) -> Sequence[Argument]:
    for number in range(20):
        name = hashlib.sha256(crashes.dice.randbytes(8)).hexdigest()
        path = crashes.store / "blobs" / name[:2] / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"nobody speaks of it")
        os.utime(path, (number, number))
    return ("gc",)


def _check(crashes: Crashes) -> Sequence[Argument]:
    return ("check", "--verify-data", "--from-start")


def _repair(crashes: Crashes) -> Sequence[Argument]:
    files = make_files(crashes.fresh(), 5, crashes.ledger, crashes.dice)
    crashes.call("scan", "tree", files)
    for path in files.iterdir():
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        blob = crashes.store / "blobs" / digest[:2] / digest
        blob.chmod(0o600)
        with blob.open("r+b") as stream:
            stream.seek(-1, os.SEEK_END)
            stream.write(b"rot")
    return ("check", "--verify-data", "--from-start", "--repair")


OPERATIONS = (
    Operation("scan", _scan),
    Operation("watch", _watch, after=_run_one, longest=2.0),
    Operation("prune", _prune, removes=True),
    Operation("gc", _gc),
    Operation("check", _check),
    Operation("repair", _repair, removes=True, repeated=True),
)
"""Every command that writes to a store."""
