# SPDX-License-Identifier: Apache-2.0
"""A filesystem whose every read takes a while, as on a disk that is busy: SOURCE DELAY MOUNTPOINT.

Shows the regular files of the directory SOURCE. Nothing is cached by the kernel, so that each
read comes here and waits DELAY seconds; other requests are answered meanwhile.
"""

from __future__ import annotations

import errno
import os
import stat
import sys

import pyfuse3
import trio


class SlowFiles(pyfuse3.Operations):
    """One flat directory; inode numbers count its sorted names from 2."""

    def __init__(self, source: str, delay: float) -> None:
        super().__init__()
        self._delay = delay
        self._paths = [os.path.join(source, name) for name in sorted(os.listdir(source))]

    def _path(self, inode: int) -> str:
        try:
            return self._paths[inode - 2]
        except IndexError:
            raise pyfuse3.FUSEError(errno.ENOENT) from None

    async def getattr(
        self, inode: int, ctx: pyfuse3.RequestContext | None = None
    ) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
        else:
            entry.st_mode = stat.S_IFREG | 0o644
            entry.st_size = os.stat(self._path(inode)).st_size
        return entry

    async def lookup(
        self, parent: int, name: bytes, ctx: pyfuse3.RequestContext
    ) -> pyfuse3.EntryAttributes:
        for number, path in enumerate(self._paths):
            if os.fsencode(os.path.basename(path)) == name:
                return await self.getattr(number + 2)
        raise pyfuse3.FUSEError(errno.ENOENT)

    async def open(self, inode: int, flags: int, ctx: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=os.open(self._path(inode), os.O_RDONLY), direct_io=True)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        await trio.sleep(self._delay)
        return os.pread(fh, size, offset)

    async def release(self, fh: int) -> None:
        os.close(fh)


def main() -> None:
    """Serve until unmounted."""
    source, delay, mount_point = sys.argv[1:]
    options = {*pyfuse3.default_options, "fsname=slow", "ro"}
    pyfuse3.init(SlowFiles(source, float(delay)), mount_point, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
