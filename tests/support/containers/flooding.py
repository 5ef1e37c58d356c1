# SPDX-License-Identifier: Apache-2.0
"""A container that floods a watch with small files, beside programs that must not be lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.support.clients.tools import Argument, run, tool
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.waiting import lines

if TYPE_CHECKING:
    from tests.support.containers.shortlife import Expected, ShortLife

SIZE: Final = 1000
"""Bytes of each file of a flood."""

_SOURCE = Path(__file__).with_name("flood.c")
# Mounts made in here are nobody else's, and gone with its last process.
CONTAINER: Final[tuple[Argument, ...]] = ("unshare", "-m", "--propagation", "private")


class Flood:
    """A running flood from a mount namespace of its own; ``count`` and ``rate`` when it is over.

    ``rate`` is in files a second, as measured.
    """

    def __init__(self, process: subprocess.Popen[bytes], mnt: int) -> None:
        self._process = process
        self.mnt = mnt
        """The inode number of its mount namespace."""
        self.count = 0
        self.rate = 0.0

    def end(self) -> None:
        """End it, and learn how much it was."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        workers = [line.split() for line in self._process.stdout.read().splitlines()]
        assert self._process.wait(60) == 0
        self.count = sum(int(count) for count, _ in workers)
        self.rate = sum(int(count) / (int(elapsed) / 1e9) for count, elapsed in workers)


@contextlib.contextmanager
def flooding(
    place: Path,
    rate: float,
    workers: int = 1,
    first: int = 0,
    prefix: tuple[Argument, ...] = (),
) -> Iterator[Flood]:
    """Flood from a container until the end of the block; ``rate`` 0 is as fast as it can.

    The block begins when the flood has mapped its ``first`` files. ``prefix`` is the beginning of
    the command.
    """
    place.mkdir()
    program, template = place / "flood", place / "template"
    run([tool("gcc"), "-O2", "-w", "-o", program, _SOURCE], check=True)
    build_id = secrets.token_bytes(20)
    content = elf_file(build_id=build_id, build_id_in="segment", section_headers=False)
    content = content.ljust(SIZE, b"\0")
    assert len(content) == SIZE
    template.write_bytes(content)
    (place / "root").mkdir()
    script = 'mount -t tmpfs none "$1" && exec "$2" "$1" "$3" "$4" "$5" "$6" "$7"'
    argv: list[Argument] = [
        *prefix, *CONTAINER, "sh", "-c", script, "sh", place / "root", program, template,
        str(content.index(build_id)), str(rate), str(workers),
        str(first),
    ]  # fmt: skip
    process = subprocess.Popen(
        [os.fspath(word) for word in argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    # To leave the block closes the pipes, which ends all of its workers.
    with process:
        assert process.stdout is not None
        assert lines(process.stdout, lambda got: len(got) == workers) == ["up"] * workers
        flood = Flood(process, os.stat(f"/proc/{process.pid}/ns/mnt").st_ino)
        yield flood
        flood.end()


def beside(items: ShortLife, count: int, life: float = 0.001) -> tuple[Expected, Expected]:
    """Run so many programs on the host, and at the same time as many in one other container."""
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(items.run, "host", count, 1, life)
        container = pool.submit(items.run, "host", count, 1, life, CONTAINER)
        return host.result(), container.result()
