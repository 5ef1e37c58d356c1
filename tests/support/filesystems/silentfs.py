# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem with one executable file, whose server can be made to fall silent.

Run as ``python -m tests.support.filesystems.silentfs MOUNTPOINT FILE``: serves FILE as
MOUNTPOINT/app and forgets nothing, so that the kernel asks for everything anew.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyfuse3
import trio

from tests.support.clients.tools import run, tool
from tests.support.harness.mounts import is_mountpoint
from tests.support.harness.waiting import until

_APP = pyfuse3.InodeT(2)


class Operations(pyfuse3.Operations):
    """Of a filesystem with one file, ``fd``, that is not to be remembered."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    async def getattr(
        self, inode: pyfuse3.InodeT, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | 0o755)
        if inode == _APP:
            entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | 0o755)
            entry.st_size = os.fstat(self._fd).st_size
        entry.attr_timeout = entry.entry_timeout = 0
        return entry

    async def lookup(
        self,
        parent_inode: pyfuse3.InodeT,
        name: pyfuse3.FileNameT,
        ctx: pyfuse3.RequestContext,
    ) -> pyfuse3.EntryAttributes:
        if name != b"app":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_APP)

    async def open(
        self, inode: pyfuse3.InodeT, flags: pyfuse3.FlagT, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=pyfuse3.FileHandleT(1))

    async def read(self, fh: pyfuse3.FileHandleT, off: int, size: int) -> bytes:
        return os.pread(self._fd, size, off)


def _serve(mountpoint: str, file: str) -> None:
    options = {"fsname=silent", "exec"} | (pyfuse3.default_options - {"default_permissions"})
    pyfuse3.init(Operations(os.open(file, os.O_RDONLY)), mountpoint, options)
    trio.run(pyfuse3.main)


@contextlib.contextmanager
def served(mountpoint: Path, file: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Serve ``file`` as ``mountpoint``/app; the server is killed at the end, stopped or not."""
    argv: Sequence[str | Path] = [
        sys.executable, "-m", "tests.support.filesystems.silentfs", mountpoint, file,
    ]  # fmt: skip
    repository = Path(__file__).resolve().parents[3]
    server = subprocess.Popen(argv, cwd=repository, stdin=subprocess.DEVNULL)
    try:
        until(lambda: server.poll() is not None or is_mountpoint(mountpoint), "a mount")
        assert server.poll() is None, "the server ended"
        yield server
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait(30)
        run([tool("umount"), "-l", mountpoint])


@contextlib.contextmanager
def silenced(mountpoint: Path) -> Iterator[None]:
    """Stop the ``buildidfs mount --foreground`` that serves a mount point, for this block."""
    servers = [
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and _serves(entry, mountpoint)
    ]
    assert len(servers) == 1, servers
    os.kill(servers[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(servers[0], signal.SIGCONT)


def _serves(process: Path, mountpoint: Path) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"--foreground" in words and os.fsencode(mountpoint) in words


if __name__ == "__main__":
    _serve(*sys.argv[1:])
