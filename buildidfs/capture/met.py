# SPDX-License-Identifier: Apache-2.0
"""Which files were met already: bounded memory that forgets what was not met for long."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import FileIdentity

_REMEMBERED: Final = 1 << 14
_FILE: Final = struct.Struct("=QQQqqIII")
_PLACE: Final = struct.Struct("=Q")


def file_key(identity: FileIdentity) -> bytes:
    """What stands for a file as it is now, wherever it is seen."""
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
    """What stands for a file (`file_key`) at a path in a mount namespace."""
    return fingerprint(_PLACE.pack(mnt_ns_id) + file + path)


class Met:
    """Two generations: when the younger is full the older goes. Lookups take no lock."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        self._files: set[bytes] = set()
        self._old_files: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes, file: bytes) -> None:
        """Remember a `place_key` and the `file_key` in it."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
            self._old_files, self._files = self._files, set()
        self._young[key] = file
        self._files.add(file)

    def has_file(self, identity: FileIdentity) -> bool:
        """Whether a file was met, at whatever place."""
        file = file_key(identity)
        return file in self._files or file in self._old_files

    def forget(self, keys: Iterable[bytes]) -> None:
        """These were not met, after all."""
        for key in keys:
            for places, files in ((self._young, self._files), (self._old, self._old_files)):
                file = places.pop(key, None)
                if file is not None:
                    files.discard(file)
