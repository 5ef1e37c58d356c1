# SPDX-License-Identifier: Apache-2.0
"""Members of archives as files of their own, for as long as somebody has them open.

Small ones are kept in memory, others in a file without a name. How much there is of both at one
time is bounded: who wants to add more waits until others are closed, as long as any are. Whoever
has them may want to see more first, so when nothing was closed for a while, one is added.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import PinnedFile
from buildidfs.capture.elf_file import memory_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Sighting

MEMORY_BYTES: Final = 16 << 20
"""A larger file is not kept in memory."""
OPEN_BYTES: Final = 256 << 20
"""All open files together have that much, or there is only one."""

_PATIENCE_S: Final = 5.0

_NO_TMPFILE: Final = frozenset((errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT))


class Spooled(PinnedFile):
    """A pinned file that says when it is closed."""

    done: Callable[[], None] | None = None

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        super().close()
        done, self.done = self.done, None
        if done is not None:
            done()


class Ended(Exception):
    """Nothing more is wanted."""


class Spool:
    """Makes files; ``directory`` is where larger ones are, by default that for temporary files."""

    def __init__(self, directory: bytes | None = None, *, open_bytes: int = OPEN_BYTES) -> None:
        self._directory = directory
        self._room = open_bytes
        self._changed = threading.Condition()
        self._open = 0
        self._ended = False

    def pin(
        self,
        sighting: Sighting,
        size: int,
        pieces: Iterable[bytes | memoryview],
        extents: tuple[tuple[int, int], ...] | None = None,
    ) -> Spooled:
        """A file of ``size`` bytes, made of ``pieces``; may wait for others to be closed.

        ``extents``, (offset, size), say where the pieces belong if there are holes. Raises OSError,
        what ``pieces`` raises, and `Ended`.
        """
        self._enter(size)
        try:
            fd = self.file(size, pieces, extents)
        except BaseException:
            self._leave(size)
            raise
        return Spooled(sighting, fd, is_copy=True, done=lambda: self._leave(size))

    def file(
        self,
        size: int,
        pieces: Iterable[bytes | memoryview],
        extents: tuple[tuple[int, int], ...] | None = None,
    ) -> int:
        """The descriptor of such a file, which does not count. Raises OSError."""
        fd = memory_file(b"member", b"") if size <= MEMORY_BYTES else self._unnamed()
        try:
            if extents is None:
                _write(fd, pieces)
            else:
                os.ftruncate(fd, size)
                _write_extents(fd, pieces, extents)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def end(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _enter(self, size: int) -> None:
        with self._changed:
            while self._open and self._open + size > self._room and not self._ended:
                if not self._changed.wait(_PATIENCE_S):
                    break
            if self._ended:
                raise Ended
            self._open += size

    def _leave(self, size: int) -> None:
        with self._changed:
            self._open -= size
            self._changed.notify_all()

    def _unnamed(self) -> int:
        directory = self._directory or os.fsencode(tempfile.gettempdir())
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.dup(file.fileno())


def _write(fd: int, pieces: Iterable[bytes | memoryview]) -> None:
    for piece in pieces:
        view = memoryview(piece)
        while view:
            view = view[os.write(fd, view) :]


def _write_extents(
    fd: int, pieces: Iterable[bytes | memoryview], extents: tuple[tuple[int, int], ...]
) -> None:
    """Write the pieces to where the extents, which are as long as all of them, say."""
    remaining = iter(extents)
    offset = left = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            while not left:
                offset, left = next(remaining)
            written = os.pwrite(fd, view[:left], offset)
            view, offset, left = view[written:], offset + written, left - written
