# SPDX-License-Identifier: Apache-2.0
"""Reads of objects by ranges, which are kept in a sparse file without a name.

A range is fetched when it is first read, in blocks of `BLOCK` bytes. One thread fetches it, and
other threads that need it wait. Sequential reads fetch more at a time, as much as the storage sends
within a second. When all blocks have come, the file is verified, and its owner is informed. If the
filesystem is nearly full, bytes are not kept, but fetched for each read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from buildidfs.errors import IntegrityError
from buildidfs.linux.file_ops import open_unnamed, read_fully, write_fully_at
from buildidfs.store import Blob

BLOCK: Final = 64 << 10
MOST_AHEAD: Final = 4 << 20
_FIRST_MOST: Final = 1 << 20
_SLOW_S: Final = 1.0
_FAST_S: Final = 0.25
_FREE: Final = 64 << 20
"""Bytes that must stay free on the filesystem of the sparse file."""
_NO_ROOM: Final = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))
_SCRATCH: Final = (b"/var/tmp", b"/dev/shm")


Fetch = Callable[[int, int, int], bytes]
"""A function that fetches bytes of an object from an offset. It returns them, or writes them to the
same place of the file with a descriptor, unless that is -1.

It raises OSError: EIO if the storage does not answer, ESTALE if the object has another version now.
"""


class RangeReader:
    """The bytes of an object of ``size`` bytes, as far as they were fetched.

    May be used from several threads. ``done`` is called once, in the thread that fetched the last
    block.
    """

    def __init__(
        self, size: int, fetch: Fetch, done: Callable[[RangeReader], None], directory: bytes
    ) -> None:
        """Make the sparse file in ``directory``, or in another place with room. Raises OSError."""
        self.size = size
        self.failure: str = ""
        """The reason why the bytes are wrong; empty while no fault is known."""
        self._fetch = fetch
        self._done = done
        self._fd = _scratch(directory)
        blocks = -(-size // BLOCK)
        self._has = bytearray(blocks)
        self._missing = blocks
        self._coming: set[int] = set()
        self._changed = threading.Condition()
        self._next = 0
        self._ahead = BLOCK
        self._most = _FIRST_MOST
        self._unkept = 0, b""
        self.requests = 0
        """The number of fetches."""

    def put_first(self, data: bytes) -> None:
        """Store the first bytes, which came with the facts about the object."""
        data = data[: self.size]
        whole = len(data) == self.size
        count = len(self._has) if whole else len(data) // BLOCK
        try:
            self._keep(0, count, data[: self.size if whole else count * BLOCK])
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            self._unkept = 0, data

    def read_at(self, offset: int, size: int) -> bytes:
        """Do the same as `pread`, with the arguments in the order that decoders use."""
        return self.pread(size, offset)

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to ``size`` bytes from ``offset``, fewer only at the end.

        Raises OSError (EIO, ESTALE), and `IntegrityError` for bytes that are known to be wrong.
        """
        if self.failure:
            raise IntegrityError(self.failure)
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        try:
            self._need(offset // BLOCK, -(-end // BLOCK), self._more(offset, end))
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            return self._passed_on(offset, end)
        return read_fully(self._fd, end - offset, offset)

    def _passed_on(self, offset: int, end: int) -> bytes:
        """Return the bytes from ``offset`` to before ``end`` without keeping them; only the last
        fetch stays in memory.
        """
        at, data = self._unkept
        if not at <= offset < end <= at + len(data):
            at = offset // BLOCK * BLOCK
            data = self._fetched(at, min(-(-end // BLOCK) * BLOCK, self.size) - at)
            self._unkept = at, data
        return data[offset - at : end - at]

    def _more(self, offset: int, end: int) -> int:
        """Return the number of blocks to fetch beyond the end of a read; sequential reads
        get more.
        """
        with self._changed:
            follows = offset == self._next and offset > 0
            self._next = end
            self._ahead = min(2 * self._ahead, MOST_AHEAD) if follows else BLOCK // 2
            return self._ahead // BLOCK

    def _need(self, first: int, last: int, ahead: int) -> None:
        """Wait until the blocks from ``first`` to before ``last`` are present."""
        while True:
            with self._changed:
                start = self._has.find(0, first, last)
                if start < 0:
                    return
                if start in self._coming:
                    self._changed.wait()
                    continue
                end = start
                most = min(last + ahead, start + self._most // BLOCK, len(self._has))
                while end < most and not self._has[end] and end not in self._coming:
                    end += 1
                self._coming.update(range(start, end))
            try:
                self._get(start, end)
            finally:
                with self._changed:
                    self._coming.difference_update(range(start, end))
                    self._changed.notify_all()

    def _get(self, start: int, end: int) -> None:
        offset = start * BLOCK
        self._check_room((end - start) * BLOCK)  # before the fetch, which would be useless
        self._fetched(offset, min(end * BLOCK, self.size) - offset, self._fd)
        self._note_kept(start, end)

    def _fetched(self, offset: int, size: int, fd: int = -1) -> bytes:
        """Fetch a range, and adjust the number of bytes that are fetched at a time."""
        self.requests += 1
        began = time.monotonic()
        data = self._fetch(offset, size, fd)
        took = time.monotonic() - began
        if fd < 0 and len(data) != size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if took > _SLOW_S:
            self._most = max(BLOCK, min(self._most, size) // 2)
        elif took < _FAST_S and size >= self._most:
            self._most = min(2 * self._most, MOST_AHEAD)
        return data

    def _check_room(self, size: int) -> None:
        room = os.fstatvfs(self._fd)
        if room.f_bavail * room.f_frsize < _FREE + size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _keep(self, start: int, end: int, data: bytes) -> None:
        self._check_room(len(data))
        write_fully_at(self._fd, data, start * BLOCK)
        self._note_kept(start, end)

    def _note_kept(self, start: int, end: int) -> None:
        with self._changed:
            before = self._missing
            self._missing -= self._has.count(0, start, end)
            self._has[start:end] = b"\1" * (end - start)
            is_last = before > 0 and not self._missing
        if is_last:
            self._done(self)

    @property
    def is_complete(self) -> bool:
        """Return True if all bytes were fetched."""
        return not self._missing

    @property
    def bytes_kept(self) -> int:
        """Return the number of bytes that the sparse file takes."""
        return self._has.count(1) * BLOCK

    def fileno(self) -> int:
        """Return the descriptor of the sparse file."""
        return self._fd

    def close(self) -> None:
        """Remove the sparse file; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


class RemoteBlob(Blob):
    """An open object with the interface of a blob of the store."""

    __slots__ = ("_closed", "_reader", "_release")

    def __init__(self, reader: RangeReader, release: Callable[[], None]) -> None:
        """``release`` is called when the blob is closed."""
        self.fd = -1
        self.is_plain = False
        self.size = reader.size
        self._copy = None
        self._reader = reader
        self._release = release
        self._closed = False

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to ``size`` bytes from ``offset``; raises the errors of `RangeReader.pread`."""
        return self._reader.pread(size, offset)

    @property
    def is_remote(self) -> bool:
        """Return True, because reads may wait for a network."""
        return True

    @property
    def extent(self) -> tuple[int, int] | None:
        """Return None, because the bytes may have to be fetched."""
        return None

    def close(self) -> None:
        """Close the object; safe to call twice."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        if not self._closed:
            self._closed = True
            self._release()


def _scratch(directory: bytes) -> int:
    for place in (directory, *_SCRATCH):
        with contextlib.suppress(OSError):
            fd = open_unnamed(place)
            if fd is not None:
                return fd
    raise OSError(errno.ENOSPC, "no directory for a file without a name")
