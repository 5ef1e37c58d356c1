# SPDX-License-Identifier: Apache-2.0
"""Files that no server or bucket has, remembered for a while by all processes of a store.

    upstream/absent     8192 buckets of four entries: key (16 bytes), until (u64, Unix time in s),
                        lifetime (u32, s), CRC-32 of all three

The file is a table of a fixed size, which processes read and write without a lock. If two
processes write an entry at once, its checksum fails, which costs one more request. A full bucket
loses the entry that ends first. The key includes a scope, such as the servers, so entries do not
apply to other servers.

The store is read before this table, so a captured file counts at once.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Kind

_NAME: Final = b"upstream/absent"
_BUCKETS: Final = 8192
_WAYS: Final = 4
_ENTRY: Final = Struct("<16sQII")
_CHECKED: Final = _ENTRY.size - 4
_BUCKET_BYTES: Final = _WAYS * _ENTRY.size


class AbsentFiles:
    """The files that are not to be requested in a scope for a while. Thread-safe; takes no lock.

    If the store cannot be written, the table is in the memory of this process.
    """

    def __init__(self, store_path: bytes, scope: Iterable[str]) -> None:
        self._scope = fingerprint("\n".join(scope).encode("utf-8", "surrogateescape"))
        # Not a map of the file: a bad block or a shorter file would end the process.
        self._fd = _opened(os.path.join(store_path, _NAME))
        weakref.finalize(self, os.close, self._fd)

    def has(self, build_id: bytes, kind: Kind) -> bool:
        """Return True if the file was recently found to be absent."""
        key, at = self._place(build_id, kind)
        now = int(time.time())
        return any(name == key and until > now for name, until, _ in self._bucket(at))

    def add(self, build_id: bytes, kind: Kind, lifetime_s: int) -> None:
        """Remember a file as absent for some seconds."""
        if not lifetime_s:
            return
        lifetime_s = min(lifetime_s, (1 << 32) - 1)
        key, at = self._place(build_id, kind)
        now = int(time.time())
        bucket = self._bucket(at)
        same = [offset for name, _, offset in bucket if name == key]
        offset = same[0] if same else min(bucket, key=lambda entry: entry[1])[2]
        entry = _ENTRY.pack(key, now + lifetime_s, lifetime_s, 0)[:_CHECKED]
        self._write(offset, entry + crc32(entry).to_bytes(4, "little"))

    def forget(self, build_id: bytes, kind: Kind) -> None:
        """Forget that a file is absent."""
        key, at = self._place(build_id, kind)
        for name, _, offset in self._bucket(at):
            if name == key:
                self._write(offset, bytes(_ENTRY.size))

    def _write(self, offset: int, entry: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full; the file is requested once more
            os.pwrite(self._fd, entry, offset)

    def _place(self, build_id: bytes, kind: Kind) -> tuple[bytes, int]:
        """Return the key of a file, and the offset of its bucket."""
        key = fingerprint(self._scope + bytes((kind,)) + build_id)
        return key, int.from_bytes(key[:4], "little") % _BUCKETS * _BUCKET_BYTES

    def _bucket(self, at: int) -> list[tuple[bytes, int, int]]:
        """Return the key, end and offset of each entry in a bucket.

        Damaged entries count as free, and so do entries made in the future by a wrong clock.
        """
        data = b""
        with contextlib.suppress(OSError):
            data = os.pread(self._fd, _BUCKET_BYTES, at)
        found = []
        now = int(time.time())
        for start in range(0, len(data) - _ENTRY.size + 1, _ENTRY.size):
            key, until, lifetime, check = _ENTRY.unpack_from(data, start)
            is_sound = check == crc32(data[start : start + _CHECKED]) and until <= now + lifetime
            found.append((key, until, at + start) if is_sound else (b"", 0, at + start))
        free = range(at + _ENTRY.size * len(found), at + _BUCKET_BYTES, _ENTRY.size)
        return [*found, *((b"", 0, offset) for offset in free)]


def _opened(path: bytes) -> int:
    try:
        os.makedirs(os.path.dirname(path), 0o700, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.memfd_create("absent", os.MFD_CLOEXEC)
