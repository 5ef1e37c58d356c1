# SPDX-License-Identifier: Apache-2.0
"""Files that are written to through a shared mapping alone, and overlays to have them on."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from buildidfs.linux.syscalls import last_error, libc
from tests.support.clients.tools import run, tool

_mmap = libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_munmap = libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


class SharedMapping:
    """A writable shared mapping of a whole file, without any descriptor of it.

    ``mmap.mmap`` keeps a descriptor open, which shows as a writer where the mapping does not. All
    pages are dirty from the start, so stores leave no trace in the times of the file.
    """

    def __init__(self, path: Path) -> None:
        self._size = path.stat().st_size
        fd = os.open(path, os.O_RDWR)
        try:
            address = _mmap(
                None, self._size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0
            )
        finally:
            os.close(fd)
        if address == _FAILED:
            raise last_error()
        self._address = address
        view = (ctypes.c_char * self._size).from_address(address)
        self.view = memoryview(view).cast("B")
        for offset in range(0, self._size, mmap.PAGESIZE):
            self.view[offset] = self.view[offset]

    def __enter__(self) -> SharedMapping:
        return self

    def __exit__(self, *exception: object) -> None:
        self.view.release()
        _munmap(self._address, self._size)

    def write(self, content: bytes) -> None:
        """Replace the content of the file."""
        self.view[: len(content)] = content


@contextlib.contextmanager
def overlay(place: Path) -> Iterator[Path]:
    """A writable overlay; yields where it is mounted."""
    for name in ("lower", "upper", "work", "merged"):
        (place / name).mkdir(parents=True)
    options = f"lowerdir={place}/lower,upperdir={place}/upper,workdir={place}/work"
    run([tool("mount"), "-t", "overlay", "overlay", "-o", options, place / "merged"], check=True)
    try:
        yield place / "merged"
    finally:
        run([tool("umount"), "-l", place / "merged"], check=True)
