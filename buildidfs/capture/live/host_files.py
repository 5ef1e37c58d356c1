# SPDX-License-Identifier: Apache-2.0
"""Files of the host that were met before, recognised without looking into the process.

Most of what a host runs is the same few files in places where only root can change anything. To ask
for one of those by its path takes a fifth of what it takes by way of a process that has just begun.
That it is the one that was mapped is known from its inode, and that it is as it was from its times.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.perf.ring_records import Mapped
    from buildidfs.model import FileIdentity

# Where nobody but root can put something in the way that does not answer.
_PLACES: Final = (b"/usr/", b"/lib/", b"/lib64/", b"/bin/", b"/sbin/")
_NOT_THERE: Final = b"/usr/local/"
_MOST: Final = 4096

_Key = tuple[tuple[int, int], int, int]
_Seen = tuple[int, int, int, int, int, int, int, int]


class HostFiles:
    """May be used by several threads; what is lost between two of them is looked up again."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[_Key, _Seen]] = {}
        self._paths: dict[bytes, bytes] = {}

    def has(self, record: Mapped) -> bool:
        """Whether what a process of the host has mapped was met, and is as it was."""
        known = self._known.get(record.path)
        if known is None or known[0] != (record.dev, record.inode, record.generation):
            return False
        try:
            return _stat(record.path) == known[1]
        except OSError:
            return False

    def add(self, record: Mapped, identity: FileIdentity, place: bytes) -> None:
        """Remember a file that a process of the host has mapped, and that was handed on.

        ``place`` is its `met.place_key`.
        """
        # Only of filesystems on disks are the numbers not given to others.
        if identity.scope != b"" or not record.path.startswith(_PLACES):
            return
        if record.path.startswith(_NOT_THERE):
            return
        if len(self._known) >= _MOST or len(self._paths) >= 2 * _MOST:
            self._known.clear()
            self._paths.clear()
        seen = (
            identity.dev,
            identity.ino,
            identity.size,
            identity.mtime_ns,
            identity.ctime_ns,
            identity.mode,
            identity.uid,
            identity.gid,
        )
        key = (record.dev, record.inode, record.generation)
        self._known[record.path] = (key, seen)
        self._paths[place] = record.path

    def forget(self, places: Iterable[bytes]) -> None:
        """Look at these again, and at no others: a container can have its files forgotten."""
        for place in places:
            path = self._paths.pop(place, None)
            if path is not None:
                self._known.pop(path, None)


def _stat(path: bytes) -> _Seen:
    found = os.stat(path)
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_uid,
        found.st_gid,
    )
