# SPDX-License-Identifier: Apache-2.0
"""Build IDs of a Debian mirror, sorted in a file that is read through a map.

    upstream/apt-NAME   "buildidfs apt 1\\n"; 32 bytes: hash of the lists it was made of; u32 number
                        of build IDs, u32 number of packages; for each build ID 12 bytes of its hash
                        and u32 number of a package, sorted; for each package u64 offset of its row;
                        rows: SHA-256, u64 size, path and a zero byte. All is big-endian.

A debug suite has 200,000 build IDs in 25,000 packages: a dictionary of them would take 50 MB in
each process that fetches. If the file is damaged, a lookup finds no package, or a package without
the build ID.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.archive.apt_lists import ListedPackage

_MAGIC: Final = b"buildidfs apt 1\n"
_HASH_BYTES: Final = 32
_COUNTS: Final = Struct(">II")
_KEY: Final = Struct(">12sI")
_OFFSET: Final = Struct(">Q")
_ROW: Final = Struct(">32sQ")
_KEYS_AT: Final = len(_MAGIC) + _HASH_BYTES + _COUNTS.size
_MOST_IDS: Final = 1 << 24
_MOST_PATH: Final = 4096
_DRAFT_S: Final = 3600.0


class Entry(msgspec.Struct, frozen=True):
    """A package: its path on the mirror, SHA-256 and size in bytes."""

    path: bytes
    sha256: bytes
    size: int


class AptIndex:
    """An open index. ``made_of`` is the hash of the lists from which it was made."""

    def __init__(self, path: bytes) -> None:
        """Raises OSError, and ValueError for an invalid file."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < _KEYS_AT:
                raise ValueError("too short")
            self._map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.made_of = self._map[len(_MAGIC) : len(_MAGIC) + _HASH_BYTES]
        self._ids, self._packages = _COUNTS.unpack_from(self._map, _KEYS_AT - _COUNTS.size)
        self._packages_at = _KEYS_AT + self._ids * _KEY.size
        rows_at = self._packages_at + self._packages * _OFFSET.size
        if self._map[: len(_MAGIC)] != _MAGIC or rows_at > size:
            self._map.close()
            raise ValueError("not an index")

    def find(self, build_id: bytes) -> Entry | None:
        """Return the package with the debug file of a build ID; None if there is none."""
        key = fingerprint(build_id, 12)
        low, high = 0, self._ids
        while low < high:
            middle = (low + high) // 2
            if _KEY.unpack_from(self._map, _KEYS_AT + middle * _KEY.size)[0] < key:
                low = middle + 1
            else:
                high = middle
        if low == self._ids:
            return None
        found, number = _KEY.unpack_from(self._map, _KEYS_AT + low * _KEY.size)
        return self._package(number) if found == key else None

    def _package(self, number: int) -> Entry | None:
        if number >= self._packages:
            return None
        (at,) = _OFFSET.unpack_from(self._map, self._packages_at + number * _OFFSET.size)
        if at + _ROW.size > len(self._map):
            return None
        sha256, size = _ROW.unpack_from(self._map, at)
        path = self._map[at + _ROW.size : at + _ROW.size + _MOST_PATH].partition(b"\0")[0]
        return Entry(path, sha256, size)

    def close(self) -> None:
        """Close the file."""
        self._map.close()


def write(path: bytes, made_of: bytes, packages: Iterable[ListedPackage]) -> None:
    """Write an index, whole or not at all. Raises OSError, and ValueError for too many IDs."""
    keys: dict[bytes, int] = {}
    rows: list[bytes] = []
    for package in packages:
        for build_id in package.build_ids:
            keys.setdefault(fingerprint(build_id, 12), len(rows))
        rows.append(
            _ROW.pack(package.sha256, package.size) + package.path[: _MOST_PATH - 1] + b"\0"
        )
        if len(keys) > _MOST_IDS:
            raise ValueError(f"more than {_MOST_IDS} build IDs")
    _sweep(path)
    draft = path + b".%d" % os.getpid()
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(_MAGIC + made_of + _COUNTS.pack(len(keys), len(rows)))
            for key in sorted(keys):
                file.write(_KEY.pack(key, keys[key]))
            at = _KEYS_AT + len(keys) * _KEY.size + len(rows) * _OFFSET.size
            for row in rows:
                file.write(_OFFSET.pack(at))
                at += len(row)
            file.writelines(rows)
        os.rename(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def _sweep(path: bytes) -> None:
    """Remove drafts of killed processes."""
    directory, name = os.path.split(path)
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.startswith(name + b"."):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DRAFT_S:
                        os.unlink(entry.path)
