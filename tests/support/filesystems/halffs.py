# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem with one program, whose server can be told to answer for its first pages only.

Run as ``python -m tests.support.filesystems.halffs MOUNTPOINT FILE``. Until SIGUSR1 comes it is as
any other; from then on each read beyond the first page is taken from the kernel and never
answered, which not even SIGKILL gets a reader out of. Reads are not cached then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyfuse3
import trio

from tests.support.clients.tools import run, tool
from tests.support.filesystems import silentfs
from tests.support.harness.mounts import is_mountpoint

FIRST = 4096
"""Bytes that are answered for."""


class Operations(silentfs.Operations):
    """As `silentfs`, until it ``is_silent``."""

    is_silent = False

    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        # Else the kernel would ask for more than its readers do.
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(1), direct_io=self.is_silent)

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        if self.is_silent and off >= FIRST:
            await trio.sleep_forever()
        return await super().read(fh, off, size)


async def _listen(operations: Operations) -> None:
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        print("ready", flush=True)  # before this the signal would end the process
        async for _ in signals:
            operations.is_silent = True
            print("silent", flush=True)


async def _run(operations: Operations) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_listen, operations)
        await pyfuse3.main()
        nursery.cancel_scope.cancel()


def _serve(mountpoint: str, file: str) -> None:
    operations = Operations(os.open(file, os.O_RDONLY))
    options = {"fsname=half", "exec", "allow_other"}
    pyfuse3.init(operations, mountpoint, options | pyfuse3.default_options)
    trio.run(_run, operations)


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def fall_silent(self) -> None:
        """Answer for no more than the first page of the file from now on."""
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGUSR1)
        assert self._process.stdout.readline() == b"silent\n"


@contextlib.contextmanager
def served(mountpoint: Path, file: Path) -> Iterator[Server]:
    """Serve ``file`` as ``mountpoint``/app; the end of the server, at last, frees its readers."""
    mountpoint.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.filesystems.halffs", mountpoint, file],
        cwd=Path(__file__).resolve().parents[3],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n", "the server ended"
            assert is_mountpoint(mountpoint)
            yield Server(process)
        finally:
            process.kill()
            process.wait(30)
            run([tool("umount"), "-l", mountpoint])


if __name__ == "__main__":
    _serve(*sys.argv[1:])
