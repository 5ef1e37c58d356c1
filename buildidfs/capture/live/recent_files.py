# SPDX-License-Identifier: Apache-2.0
"""Bounded memory of files that were sent: files that were not mapped lately are forgotten.

`RecentFiles` recognises files by their identity and place. `HostFiles` recognises files of the host
by their path, without looking into the process. A host mostly runs the same few files in places
where only root can change files, and statx on a path takes a fifth of the time of statx on a
process that has just begun. If the inode is that of the mapping, the path leads to the mapped file;
if the times are the same, the file did not change.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final

from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.perf.records import Mapped
    from buildidfs.model import FileIdentity

_REMEMBERED: Final = 1 << 14
_FILE: Final = struct.Struct("=QQQqqIII")
_PLACE: Final = struct.Struct("=Q")


def file_key(identity: FileIdentity) -> bytes:
    """Return a key of a file in its present state, independent of its place."""
    return _FILE.pack(
        identity.dev,
        identity.ino,
        identity.size,
        identity.mtime_ns,
        identity.ctime_ns,
        identity.mode,
        identity.uid,
        identity.gid,
    ) + (identity.scope or b"")


def place_key(mnt_ns_id: int, file: bytes, path: bytes) -> bytes:
    """Return a key of a file (`file_key`) at a path in a mount namespace."""
    return fingerprint(_PLACE.pack(mnt_ns_id) + file + path)


class RecentFiles:
    """Keys of files that were sent, in two generations. When the younger one is full, the older
    one is forgotten.

    Lookups take no lock.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> None:
        """Remember a key."""
        if len(self._young) >= _REMEMBERED:
            self._old, self._young = self._young, set()
        self._young.add(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove these keys, so that their files count as new."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)


# Directories in which only root can mount a filesystem that does not answer.
_PLACES: Final = (b"/usr/", b"/lib/", b"/lib64/", b"/bin/", b"/sbin/")
_NOT_THERE: Final = b"/usr/local/"
_MOST: Final = 4096

_Key = tuple[tuple[int, int], int, int]
_CTIME: Final = 4  # in `_Seen`
_Seen = tuple[int, int, int, int, int, int, int, int]


class HostFiles:
    """Files of the host that were sent, by path.

    Several threads may use it. If a race of two threads loses an entry, its file is looked up
    again.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[_Key, _Seen, bytes]] = {}
        self._paths: dict[bytes, bytes] = {}

    def find(self, record: Mapped) -> tuple[int, bytes] | None:
        """Return the change time in ns and the `place_key` of a file that a process of the host has
        mapped, if the file is known and unchanged.
        """
        known = self._known.get(record.path)
        if known is None or known[0] != (record.dev, record.inode, record.generation):
            return None
        try:
            return (known[1][_CTIME], known[2]) if _stat(record.path) == known[1] else None
        except OSError:
            return None

    def add(self, record: Mapped, identity: FileIdentity, place: bytes) -> None:
        """Remember a file that a process of the host has mapped and that was sent.

        ``place`` is its `place_key`.
        """
        # Only filesystems on disks do not reuse device numbers.
        if identity.scope != b"" or not record.path.startswith(_PLACES):
            return
        if record.path.startswith(_NOT_THERE):
            return
        if len(self._known) >= _MOST or len(self._paths) >= 2 * _MOST:
            self._known.clear()
            self._paths.clear()
        seen = _FILE.unpack_from(file_key(identity))  # in the order of `_stat`
        key = (record.dev, record.inode, record.generation)
        self._known[record.path] = (key, seen, place)
        self._paths[place] = record.path

    def forget(self, places: Iterable[bytes]) -> None:
        """Forget these files and no others, because a container can make its own files be
        forgotten.
        """
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
