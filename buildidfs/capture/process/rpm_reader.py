# SPDX-License-Identifier: Apache-2.0
"""A confined process that reads a copy of a container's rpm database with SQLite.

SQLite is not made for hostile databases. The process has the rights of a symbolizer (see
`linux.sandbox`), and processor time in proportion to the database. It ends with its input.
"""

from __future__ import annotations

import os
import select
import sqlite3
import sys
import time
import weakref
from typing import TYPE_CHECKING, Final

from buildidfs.formats.budget import Budget
from buildidfs.formats.package_databases import UNKNOWN, Package, shown
from buildidfs.formats.rpm_database import RpmDatabase
from buildidfs.linux import child, confinement, file_ops
from buildidfs.linux.file_ops import closing_fd, closing_on_error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from buildidfs.linux.child import Child

_SIZE_MAX: Final = 256 << 20
_MAGIC: Final = b"SQLite format 3\0"
_JOURNAL: Final = slice(18, 20)
_NO_WRITE_AHEAD_LOG: Final = b"\1\1"
_PIECE: Final = 1 << 20
_ANSWER_S: Final = 5.0
_ANSWER_BYTES: Final = 1024
_GRACE_S: Final = 1.0

_SECONDS: Final = 1  # of processor time, and one more for each MiB
_MEMORY: Final = 128 << 20  # besides the database
_ADDRESSES: Final = 4 << 30
_STEPS_PER_BYTE: Final = 2
_STEPS_LEAST: Final = 1 << 20


class RpmReader:
    """The answers of a process about one database; the process is started at the first question.

    ``fd`` is the open database, which is copied. Raises OSError, also if it is too large. A file
    that is no database has no packages.
    """

    def __init__(self, fd: int) -> None:
        self._size = os.fstat(fd).st_size
        if self._size > _SIZE_MAX or os.pread(fd, len(_MAGIC), 0) != _MAGIC:
            raise OSError("no database, or too large")
        self._copy = os.memfd_create("rpmdb", os.MFD_CLOEXEC)
        with closing_on_error(self._copy):
            at = 0
            while at < self._size and (piece := os.pread(fd, min(_PIECE, self._size - at), at)):
                file_ops.write_fully(self._copy, piece)
                at += len(piece)
            os.fchmod(self._copy, 0o444)  # the process becomes another user
        self._process: Child | None = None
        self._closing = weakref.finalize(self, os.close, self._copy)

    def owner(self, paths: list[bytes]) -> Package:
        """Return the package that has one of the paths; `UNKNOWN` also if the process has ended."""
        try:
            if self._process is None:
                self._start()
            reply = self._answer(" ".join(path.hex() for path in paths).encode())
        except OSError:
            reply = b""
        if not reply.endswith(b"\n"):
            if self._process is not None:
                self._process.end(_GRACE_S)
            return UNKNOWN
        name, _, version = reply[:-1].partition(b"\t")
        return Package(shown(name), shown(version), "rpm") if name else UNKNOWN

    def _start(self) -> None:
        words = [str(self._copy), str(os.getpid()), str(self._size)]
        self._process = child.start(
            child.module_command(__name__, *words),
            env={},
            cwd="/",
            stdin=child.PIPE,
            stdout=child.PIPE,
            stderr=child.DEVNULL,
            pass_fds=[self._copy],
            new_session=True,
        )
        self._closing()
        weakref.finalize(self, self._process.end, _GRACE_S)

    def _answer(self, question: bytes) -> bytes:
        """Return a line of the process; without its end if the process ends or takes too long."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdin.closed:
            return b""
        process.stdin.write(question + b"\n")
        deadline = time.monotonic() + _ANSWER_S
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        reply = b""
        while not reply.endswith(b"\n") and len(reply) < _ANSWER_BYTES:
            if not poll.poll(max(deadline - time.monotonic(), 0) * 1000):
                break
            piece = os.read(process.stdout.fileno(), _ANSWER_BYTES)
            if not piece:
                break
            reply += piece
        return reply


# --- in a process of its own ---------------------------------------------------------------------


def main(words: Sequence[str]) -> None:
    """Answer lines of paths in hexadecimal with name and version of the package, until the input
    ends. Arguments: descriptor of the database, process that starts this one, and size. Raises
    OSError, `sqlite3.Error`.
    """
    fd, parent, size = map(int, words)
    with closing_fd(fd):
        content = bytearray(os.pread(fd, size, 0))
    limits = _MEMORY + 3 * size, _ADDRESSES, _SECONDS + size // (1 << 20)
    for _ in confinement.confine(parent, limits, ["/nonexistent"], [""]):
        pass
    content[_JOURNAL] = _NO_WRITE_AHEAD_LOG  # else SQLite would look for the log
    connection = sqlite3.connect(":memory:")
    connection.deserialize(content)
    del content
    database = RpmDatabase(connection, Budget(_STEPS_LEAST + _STEPS_PER_BYTE * size))
    for line in sys.stdin.buffer:
        found = database.owner(map(bytes.fromhex, line.decode("ascii").split()))
        sys.stdout.buffer.write(f"{found.name}\t{found.version}\n".encode())
        sys.stdout.buffer.flush()
