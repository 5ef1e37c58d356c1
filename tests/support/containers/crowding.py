# SPDX-License-Identifier: Apache-2.0
"""A store with a limit, files that are gone, and a host that has more than fits.

Programs that no machine has seen before are run and deleted, while trees and packages of the host
are scanned into the same store. `Crowd.verdict` says what became of the programs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from buildidfs.model import BuildId, Digest
from buildidfs.store import Store
from buildidfs.store.index.environment import acquire, release
from buildidfs.store.retention.plan import Planner
from tests.support.clients.tools import run, tool
from tests.support.harness.mounts import COMMAND, BuildIdFs

#: Between two looks of the witness.
_LOOK_S = 0.2

_MARK = bytes(range(0xC0, 0xD4))
_SOURCE = "#include <unistd.h>\nint main(void) { usleep(200000); return 0; }\n"


@dataclasses.dataclass
class Verdict:
    """How many programs were made, and ``lost`` (not in the store).

    Of the lost ones the journal does not know those ``unseen``: they did not make way for others.
    Those ``displaced`` made way while their files were there, and were deleted after that: the
    store does not count them as losses, and the witness does not see them.
    ``recapturable`` blobs were in the store, and known to be so, while a blob was lost.
    """

    made: int
    lost: int
    recapturable: int
    losses: int
    omitted: int
    unseen: int
    displaced: int

    @property
    def is_sound(self) -> bool:
        """Return False if a program is lost while the store keeps a recapturable file."""
        return not (self.lost and self.recapturable)


class Witness:
    """Sees which blobs could be had again at the moment of a loss.

    What is in the store at the end tells nothing: a blob may have come into the room that a loss
    made, or the host may have been seen to have the same file only then. So `look` is called again
    and again. A blob counts if it could be had again before a loss, and is there after it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._looks: list[tuple[frozenset[tuple[Digest, int]], int]] = []
        self.kept: set[Digest] = set()

    def look(self) -> None:
        """Compare the store with what it was a moment ago."""
        with Store.open(self._path, read_only=True) as store:
            env = acquire(store.path, read_only=True)
            try:
                found = frozenset(
                    (each.candidate.digest, store.index.ordinal(each.candidate.build_ids[0]) or 0)
                    for each in Planner(env).recapturable()
                )
            finally:
                release(env)
            self._looks = [*self._looks[-2:], (found, store.evictions().losses)]
        if len(self._looks) == 3:
            # The losses were counted after each look at the blobs, so one more look is needed.
            (before, early), (_, late), (after, _) = self._looks
            if late > early:
                self.kept |= {digest for digest, _ in before & after}


class Crowd:
    """Makes programs, runs and deletes them, and scans beside it; ``seed`` decides on all."""

    def __init__(self, place: Path, seed: int, max_size: int) -> None:
        self.store = place / "store"
        self.witness = Witness(self.store)
        self.dice = random.Random(seed)
        self.ids: list[str] = []
        self._place = place
        self._settings = place / "settings.toml"
        self._settings.write_text(f"[retention]\nmax-size = {max_size}\n")
        self._buildidfs = BuildIdFs(place, self.store, self._settings)
        source, self._template = place / "program.c", place / "program"
        source.write_text(_SOURCE)
        run([tool("gcc"), "-O1", f"-Wl,--build-id=0x{_MARK.hex()}", "-o", self._template, source],
            check=True)  # fmt: skip

    @property
    def command(self) -> list[str]:
        """The program with the store and its settings."""
        return [*COMMAND, "--store", str(self.store), "--config", str(self._settings), "-q"]

    def sizes(self, count: int, least: int, most: int) -> list[int]:
        """Sizes in bytes, as many of each order of magnitude."""
        low, high = math.log(least), math.log(most)
        return [int(math.exp(self.dice.uniform(low, high))) for _ in range(count)]

    def run_and_delete(self, sizes: Sequence[int], pause: float = 0.05) -> None:
        """Run programs of about these sizes, each for a moment, and delete each when it ends."""
        for size in sizes:
            path = self._made(size)
            subprocess.run([path], check=True)
            path.unlink()
            time.sleep(self.dice.uniform(0, pause))

    def add_and_delete(self, sizes: Sequence[int]) -> None:
        """Capture programs of another user, and delete them."""
        paths = [self._made(size) for size in sizes]
        for path in paths:
            os.chown(path, 1000, 1000)
        self.scan("add", *map(str, paths))
        for path in paths:
            path.unlink()

    def scan(self, *words: str) -> int:
        """Run a command on the store; returns its exit status, which may be 3."""
        done = self._buildidfs("-q", *words, check=False)
        assert done.rc in (0, 3, 14), done
        return done.rc

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Have the witness look all the time during the block, and once more after it."""
        ending = threading.Event()
        failures: list[BaseException] = []

        def observe() -> None:
            try:
                while not ending.wait(_LOOK_S):
                    if (self.store / "format").exists():
                        self.witness.look()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=observe)
        thread.start()
        try:
            yield
        finally:
            ending.set()
            thread.join()
        if failures:
            raise failures[0]
        for _ in range(2):
            self.witness.look()

    @contextlib.contextmanager
    def scanning(self, *commands: Sequence[str]) -> Iterator[None]:
        """Run these commands beside the block, each again and again, in processes of their own."""
        ending = threading.Event()
        failures: list[BaseException] = []

        def repeat(words: Sequence[str]) -> None:
            try:
                while not ending.is_set():
                    self.scan(*words)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=repeat, args=(words,)) for words in commands]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ending.set()
            for thread in threads:
                thread.join()
        if failures:
            raise failures[0]

    def verdict(self) -> Verdict:
        """What became of the programs; see `observed`."""
        with Store.open(self.store) as store:
            assert list(store.check()) == []
            lost = [
                each for each in self.ids if store.index.ordinal(BuildId.from_hex(each)) is None
            ]
            evictions = store.evictions()
            rows = list(store.journal.since())
        recapturable = len(self.witness.kept)
        unseen = len(set(lost) - {str(row.build_id) for row in rows})
        displaced = len(set(lost) & {str(row.build_id) for row in rows if row.omitted is not None})
        losses, omitted = evictions.losses, evictions.omitted
        return Verdict(len(self.ids), len(lost), recapturable, losses, omitted, unseen, displaced)

    def _made(self, size: int) -> Path:
        build_id = self.dice.randbytes(20)
        path = self._place / f"gone-{len(self.ids)}"
        data = self._template.read_bytes().replace(_MARK, build_id)
        payload = self.dice.randbytes(size)
        # Written by a process of its own: a thread that forks meanwhile would hand on a descriptor
        # to write to it, and the kernel runs nothing that may be written to.
        command = [tool("dd"), "status=none", f"of={path}", "bs=1M"]
        subprocess.run(command, input=data + payload, check=True)
        path.chmod(0o755)
        self.ids.append(build_id.hex())
        return path
