# SPDX-License-Identifier: Apache-2.0
"""Filesystems that are too small, what was free of them at the least, and files of odd sizes."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from tests.support.clients.tools import run, tool, unmount
from tests.support.elf.elfwriter import TEXT, Section, elf_file

_MAKE = {
    "ext4": ("mkfs.ext4", "-q", "-F", "-m", "0"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
}
_PERIOD_S = 0.003

SPARSE = 64 << 20
"""Size of a sparse file in bytes."""


@contextlib.contextmanager
def small_filesystem(directory: Path, kind: str, size: int) -> Iterator[Path]:
    """A filesystem of so many bytes in a file below ``directory``, mounted."""
    image, point = directory / f"{kind}.image", directory / kind
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    name, *options = _MAKE[kind]
    run([tool(name), *options, image], check=True)
    run([tool("mount"), "-o", "loop", image, point], check=True)
    try:
        yield point
    finally:
        unmount(point)
        image.unlink()


def programs(directory: Path, size: int, *, backward: bool = False) -> Path:
    """Copies of this host's programs in the order of their names, of ``size`` bytes at least.

    A scan takes them for the host's own, as it does the originals, which are far more than a test
    needs.
    """
    directory.mkdir()
    for path in sorted(Path("/usr/bin").iterdir(), reverse=backward):
        if size <= 0:
            return directory
        if path.is_file() and not path.is_symlink():
            shutil.copy(path, directory)
            size -= path.stat().st_size
    raise AssertionError("the programs of this host are fewer")


def odd_files(directory: Path, tiny: int, sparse: int) -> None:
    """ELF files of a few hundred bytes, and such as have 1.5 MiB in 64; every other one is of
    another user, who may take it away.
    """
    for name, count in (("tiny", tiny), ("sparse", sparse)):
        (directory / name).mkdir(parents=True)
        for number in range(count):
            path = directory / name / str(number)
            build_id = name.encode()[:4] + b"%016d" % number
            if name == "tiny":
                path.write_bytes(elf_file(build_id=build_id))
            else:
                _write_sparse(path, build_id)
            if number % 2:
                os.chown(path, 1000, 1000)


def _write_sparse(path: Path, build_id: bytes) -> None:
    data = elf_file([TEXT, Section(b".data", os.urandom(700 << 10))], build_id=build_id)
    with path.open("wb") as file:
        file.write(data)
        file.truncate(SPARSE)
        file.seek(SPARSE * 3 // 4)
        file.write(os.urandom(800 << 10))


class Lowest:
    """How little of a filesystem was free while the block ran, against the default limit."""

    def __init__(self, point: Path) -> None:
        usage = os.statvfs(point)
        total = usage.f_blocks * usage.f_frsize
        self.keep_bytes = min(total // 20, 4 << 30)
        self.keep_inodes = usage.f_files * self.keep_bytes // total
        self._point = point
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.bytes = self.inodes = 1 << 62

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ending.set()
        self._thread.join()

    @property
    def bytes_beyond(self) -> int:
        """The lowest number of free bytes, less those that were to stay free."""
        return self.bytes - self.keep_bytes

    @property
    def inodes_beyond(self) -> int:
        """The same of inodes."""
        return self.inodes - self.keep_inodes

    @property
    def text(self) -> str:
        """Both, for people."""
        return (
            f"{self.bytes >> 10} KiB free, limit {self.keep_bytes >> 10};"
            f" {self.inodes} inodes, limit {self.keep_inodes}"
        )

    def _watch(self) -> None:
        while not self._ending.wait(_PERIOD_S):
            usage = os.statvfs(self._point)
            self.bytes = min(self.bytes, usage.f_bavail * usage.f_frsize)
            self.inodes = min(self.inodes, usage.f_favail)
