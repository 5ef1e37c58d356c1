# SPDX-License-Identifier: Apache-2.0
"""Files that no server has, remembered for a while by all processes of a store.

    upstream/absent     8192 buckets of four entries: key (16 bytes), until (u64, Unix time in s),
                        lifetime (u32, s), CRC-32 of all three

The file is a table of a fixed size, mapped by each process and written without a lock. If two
processes write an entry at once, its checksum fails, which costs one more request. A full bucket
loses the entry that ends first. The key includes the servers, so entries do not apply to other
servers.

The store is read before this table, so a captured file counts at once.
"""

from __future__ import annotations

import mmap
import os
import time
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.model import BuildId, Kind

_NAME: Final = b"absent"
_BUCKETS: Final = 8192
_WAYS: Final = 4
_ENTRY: Final = Struct("<16sQII")
_CHECKED: Final = _ENTRY.size - 4
_BUCKET_BYTES: Final = _WAYS * _ENTRY.size
_BYTES: Final = _BUCKETS * _BUCKET_BYTES


class Absences:
    """The files that no server has. Thread-safe.

    If the store cannot be written, the table is in the memory of this process.
    """

    def __init__(
        self,
        directory: bytes,
        servers: Iterable[str],
        lifetime_s: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._servers = fingerprint("\n".join(servers).encode("utf-8", "surrogateescape"))
        self._lifetime_s = min(lifetime_s, (1 << 32) - 1)
        self._clock = clock
        self._map = _mapped(os.path.join(directory, _NAME))

    def has(self, build_id: BuildId, kind: Kind) -> bool:
        """Return True if all servers recently said that they do not have the file."""
        key, at = self._place(build_id, kind)
        now = int(self._clock())
        return any(name == key and until > now for name, until, _ in self._bucket(at))

    def add(self, build_id: BuildId, kind: Kind) -> None:
        """Remember that no server has the file."""
        if not self._lifetime_s:
            return
        key, at = self._place(build_id, kind)
        now = int(self._clock())
        bucket = self._bucket(at)
        same = [offset for name, _, offset in bucket if name == key]
        offset = same[0] if same else min(bucket, key=lambda entry: entry[1])[2]
        self._write(offset, key, now + self._lifetime_s)

    def forget(self, build_id: BuildId, kind: Kind) -> None:
        """Forget that no server has the file, so that the servers are asked again."""
        key, at = self._place(build_id, kind)
        for name, _, offset in self._bucket(at):
            if name == key:
                self._map[offset : offset + _ENTRY.size] = bytes(_ENTRY.size)

    def close(self) -> None:
        """Close the table."""
        self._map.close()

    def _place(self, build_id: BuildId, kind: Kind) -> tuple[bytes, int]:
        """Return the key of a file, and the offset of its bucket."""
        key = fingerprint(self._servers + bytes((kind,)) + build_id)
        return key, int.from_bytes(key[:4], "little") % _BUCKETS * _BUCKET_BYTES

    def _bucket(self, at: int) -> list[tuple[bytes, int, int]]:
        """Return the key, end and offset of each entry in a bucket.

        Damaged entries count as free, and so do entries made in the future by a wrong clock.
        """
        found = []
        now = int(self._clock())
        for offset in range(at, at + _BUCKET_BYTES, _ENTRY.size):
            key, until, lifetime, check = _ENTRY.unpack_from(self._map, offset)
            sound = check == crc32(self._map[offset : offset + _CHECKED])
            is_ours = sound and until <= now + lifetime
            found.append((key, until, offset) if is_ours else (b"", 0, offset))
        return found

    def _write(self, offset: int, key: bytes, until: int) -> None:
        entry = _ENTRY.pack(key, until, self._lifetime_s, 0)[:_CHECKED]
        self._map[offset : offset + _ENTRY.size] = entry + crc32(entry).to_bytes(4, "little")


def _mapped(path: bytes) -> mmap.mmap:
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with closing_fd(os.open(path, flags, 0o600)) as fd:
            if os.fstat(fd).st_size != _BYTES:
                os.ftruncate(fd, 0)
                # Writing to a page in a hole of the file raises SIGBUS if the disk is full.
                os.posix_fallocate(fd, 0, _BYTES)
            return mmap.mmap(fd, _BYTES)
    except OSError:
        return mmap.mmap(-1, _BYTES)
