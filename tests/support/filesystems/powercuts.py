# SPDX-License-Identifier: Apache-2.0
"""A disk that loses its power: what was not synced is not there.

The store is on ext4 on a loop device, whose backing file is on XFS. FICLONE (ioctl_ficlonerange(2))
makes a copy of the backing file that nobody writes to meanwhile: the blocks that ext4 had written
out by then, and no others. Mounted again, its journal is replayed as after a power cut.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.crashing import Ledger, acknowledged, kill_session, make_files
from tests.support.harness.mounts import COMMAND

_REPOSITORY = Path(__file__).resolve().parents[3]
_FICLONE = 0x40049409  # include/uapi/linux/fs.h
_OUTER, _INNER = 1 << 30, 96 << 20


class PowerCuts:
    """A store on a disk of its own. A context manager; ``ledger`` is what has to survive."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.ledger = Ledger()
        self.cuts = 0
        self._directory = directory
        self._dice = random.Random(seed)
        self._stack = contextlib.ExitStack()
        self._number = 0

    def __enter__(self) -> PowerCuts:
        with contextlib.ExitStack() as stack:
            outer = self._directory / "outer.img"
            _allocate(outer, _OUTER)
            run([tool("mkfs.xfs"), "-q", "-m", "reflink=1", outer], check=True)
            self._backing = stack.enter_context(_mounted(outer, self._directory / "outer"))
            self._image = self._backing / "disk.img"
            _allocate(self._image, _INNER)
            run([tool("mkfs.ext4"), "-q", self._image], check=True)
            self._disk = stack.enter_context(_mounted(self._image, self._directory / "disk"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def scan(self, files: int, cuts: int) -> list[str]:
        """Scan so many new files, cut the power so many times meanwhile; what was wrong then."""
        self._number += 1
        tree = make_files(self._directory / f"tree{self._number}", files, self.ledger, self._dice)
        log = self._directory / "log"
        copies: list[tuple[Path, dict[str, str]]] = []
        with log.open("wb") as output:
            argv = [*COMMAND, "--store", str(self._disk / "store"), "-v", "scan", "tree", str(tree)]
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=_REPOSITORY,
                start_new_session=True,
            )  # fmt: skip
        try:
            while process.poll() is None and len(copies) < cuts:
                time.sleep(self._dice.uniform(0, 0.2))
                copies.append(self._copy(log))
            code = process.wait(120)
            assert code == 0, f"scan ended with {code}: {log.read_text()[-2000:]}"
            copies.append(self._copy(log))
        finally:
            kill_session(process)
        problems = []
        for copy, expected in copies:
            self.cuts += 1
            problems += [f"cut {self.cuts}: {line}" for line in self._look(copy, expected)]
            copy.unlink()
        return problems

    def _copy(self, log: Path) -> tuple[Path, dict[str, str]]:
        """The disk as it would be after a cut now, and what was acknowledged before."""
        self.ledger.tell(acknowledged(log.read_text(errors="replace")))
        expected = dict(self.ledger.told)
        copy = self._backing / f"copy{time.monotonic_ns()}"
        with self._image.open("rb") as source, copy.open("wb") as target:
            fcntl.ioctl(target, _FICLONE, source.fileno())
        return copy, expected

    def _look(self, copy: Path, expected: dict[str, str]) -> list[str]:
        with _mounted(copy, self._directory / "after") as disk:
            store = disk / "store"
            if not (store / "format").exists():
                return ["there is no store"] if expected else []
            done = run([*COMMAND, "--store", store, "check"], cwd=_REPOSITORY)
            problems = [] if done.rc == 0 else [f"check: {done.rc} {(done.out + done.err)[-500:]}"]
            return problems + Ledger(told=expected).lost(store)


def _allocate(path: Path, size: int) -> None:
    with path.open("wb") as file:
        file.truncate(size)


@contextlib.contextmanager
def _mounted(image: Path, point: Path) -> Iterator[Path]:
    point.mkdir(exist_ok=True)
    run([tool("mount"), "-o", "loop", image, point], check=True)
    try:
        yield point
    finally:
        unmount(point)
        os.rmdir(point)
