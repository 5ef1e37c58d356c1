# SPDX-License-Identifier: Apache-2.0
"""Bodies of responses from files: the kernel sends them, or pieces of them are read.

If a blob is written to while it is sent, a client must not get a complete body. So the last piece
of each body is read, the file is checked, and only then the piece is sent: a complete body is
right.
"""

from __future__ import annotations

import errno
import os
import select
import time
from typing import TYPE_CHECKING, Final

from buildidfs.view.attributes import blank, stale

if TYPE_CHECKING:
    from buildidfs.view import FileContent

PIECE: Final = 256 << 10
LAST_PIECE: Final = 64 << 10
_SENT_AT_ONCE: Final = 1 << 20
_LONG: Final = 4 << 20
_FAST_MS: Final = 5
_TURN_S: Final = 0.05
"""Seconds of a turn.

A thread stays with the client of a long file if the client takes more within `_FAST_MS`, because
the way to the loop and back takes as long. The turn is limited, because other clients wait for the
thread.
"""


class Content:
    """``size`` bytes from ``offset`` of an open file; `close` closes the file.

    With ``stored`` these are bytes of the blob's file in its form on disk.
    """

    __slots__ = ("_blob", "_extent", "_file", "_offset", "_zeros", "size")

    def __init__(self, file: FileContent, offset: int, size: int, *, stored: bool = False) -> None:
        assert file.blob is not None
        self._file = file
        self._blob = file.blob
        self._zeros = file.zeros
        self._offset = offset
        self.size = size
        self._extent = (file.blob.fd, 0) if stored else file.blob.extent

    def read(self) -> bytes:
        """Return all bytes. Raises OSError, `IntegrityError`."""
        return self._piece(0, self.size)

    def read_now(self) -> bytes | None:
        """Return all bytes if that needs no disk access; else None. Raises OSError."""
        if self._extent is None:
            return None
        buffer = bytearray(self.size)
        fd, start = self._extent
        try:
            got = os.preadv(fd, [buffer], start + self._offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return None
            raise
        if got != self.size:
            return None
        blank(buffer, self._offset, self._zeros)
        if self._blob.was_written():
            raise stale()
        return bytes(buffer)

    def send(self, socket: int, done: int) -> int:
        """Send bytes from ``done`` on, as many as a non-blocking socket takes; return the new
        ``done``.

        Returns when the client is slower than this thread, or after a turn. Raises OSError,
        `IntegrityError`.
        """
        end = time.monotonic() + _TURN_S
        while done < self.size and time.monotonic() < end:
            try:
                done += self._send_some(socket, done)
            except BlockingIOError:
                if self.size < _LONG or not _takes_more(socket):
                    break
        return done

    def _send_some(self, socket: int, done: int) -> int:
        left = self.size - done
        plain = left - LAST_PIECE if self._extent is not None else 0
        for zeros in self._zeros:
            if zeros.offset + zeros.size > self._offset + done:
                plain = min(plain, zeros.offset - self._offset - done)
        if plain <= 0 or self._extent is None:
            # A compressed blob is read in frames, which begin at multiples of their size.
            return os.write(
                socket, self._piece(done, min(left, PIECE - (self._offset + done) % PIECE))
            )
        fd, start = self._extent
        at = start + self._offset + done
        sent = os.sendfile(socket, fd, at, min(plain, _SENT_AT_ONCE))
        if not sent or self._blob.was_written():
            raise stale()
        return sent

    def _piece(self, at: int, size: int) -> bytes:
        offset = self._offset + at
        if self._extent is not None:
            fd, start = self._extent
            data = os.pread(fd, size, start + offset)
        else:
            data = self._blob.pread(size, offset)
        if len(data) != size or self._blob.was_written():
            raise stale()
        if not self._zeros:
            return data
        buffer = bytearray(data)
        blank(buffer, offset, self._zeros)
        return bytes(buffer)

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._file.close()


def _takes_more(socket: int) -> bool:
    """Return True if a socket can take more bytes after a short wait."""
    poll = select.poll()
    poll.register(socket, select.POLLOUT)
    return bool(poll.poll(_FAST_MS))
