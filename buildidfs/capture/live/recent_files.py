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
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> None:
        """Remember a `place_key`."""
        if len(self._young) >= self._most:
            self._old, self._young = self._young, set()
        self._young.add(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove these keys, so that their files count as new."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)
