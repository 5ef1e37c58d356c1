# SPDX-License-Identifier: Apache-2.0
"""Files that processes have opened, kept open for the moment they turn out to be mapped."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.capture.closer import Closer

_DELETED = b" (deleted)"


class _Held(msgspec.Struct):
    pid: int
    dev: int
    ino: int
    since: float


class Stash:
    """At most ``most`` descriptors, each for at most ``seconds``; the oldest goes first."""

    def __init__(self, closer: Closer, most: int = 1024, seconds: float = 2.0) -> None:
        self._closer = closer
        self._most = most
        self._seconds = seconds
        self._held: dict[int, _Held] = {}  # by descriptor, the oldest first
        self._of: dict[int, list[int]] = {}  # by process

    def __len__(self) -> int:
        return len(self._held)

    def put(self, pid: int, fd: int) -> None:
        """Keep a file that ``pid`` has opened; takes the descriptor. Raises OSError."""
        found = os.fstat(fd)
        fds = self._of.setdefault(pid, [])
        for other in fds:
            held = self._held[other]
            if held.ino == found.st_ino and held.dev == found.st_dev:
                self._closer.close((fd,))
                return
        fds.append(fd)
        self._held[fd] = _Held(pid, found.st_dev, found.st_ino, time.monotonic())
        if len(self._held) > self._most:
            self._let_go((next(iter(self._held)),))

    def take(self, pid: int, inode: int, path: bytes) -> int | None:
        """The file that ``pid`` has opened and then mapped as ``path``; the caller has it now.

        By its inode number, and among several by its name; else, since filesystems made of
        others number their files differently in mappings, the only one of that name.
        """
        fds = self._of.get(pid, ())
        found = [fd for fd in fds if self._held[fd].ino == inode] or list(fds)
        if len(found) != 1 or self._held[found[0]].ino != inode:
            name = _name(path)
            found = [fd for fd in found if _name(_path_of(fd)) == name]
        if len(found) != 1:
            return None
        self._forget(found[0])
        return found[0]

    def drop(self, pid: int) -> None:
        """Let go of all that is kept for a process."""
        self._let_go(tuple(self._of.get(pid, ())))

    def expire(self) -> None:
        """Let go of what is too old."""
        before = time.monotonic() - self._seconds
        old = []
        for fd, held in self._held.items():
            if held.since > before:
                break
            old.append(fd)
        self._let_go(old)

    def clear(self) -> None:
        """Let go of everything."""
        self._let_go(tuple(self._held))

    def _let_go(self, fds: Iterable[int]) -> None:
        for fd in fds:
            self._forget(fd)
        self._closer.close(fds)

    def _forget(self, fd: int) -> None:
        pid = self._held.pop(fd).pid
        fds = self._of[pid]
        fds.remove(fd)
        if not fds:
            del self._of[pid]


def _path_of(fd: int) -> bytes:
    try:
        return os.readlink(b"/proc/self/fd/%d" % fd)
    except OSError:
        return b""


def _name(path: bytes) -> bytes:
    return os.path.basename(path.removesuffix(_DELETED))
