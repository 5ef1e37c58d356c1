# SPDX-License-Identifier: Apache-2.0
"""SHA-256 of open files, in pieces that fit the cache."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from buildidfs.errors import IntegrityError
from buildidfs.model import Digest
from buildidfs.store.schema import schema

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Callable

CHUNK: Final = 1 << 20

#: Taken from a file that claims no size (those of proc); kallsyms is about 20 MB.
_UNSIZED_LIMIT: Final = 256 << 20


def sha256() -> hashlib._Hash:
    """What hashes."""
    import hashlib  # with OpenSSL, which a process that only reads names does without

    return hashlib.sha256()


def limit(size: int) -> int:
    """How much is read of a file that says it has ``size`` bytes."""
    return size or _UNSIZED_LIMIT


def digest_of(fd: int, progress: Callable[[int], None] | None = None) -> Digest:
    """Hash the bytes of an open file without copying them; raises OSError.

    ``progress`` hears of the bytes of each piece that was read.
    """
    hasher = sha256()
    with Buffer() as buffer:
        offset, end = 0, limit(os.fstat(fd).st_size)
        while offset < end:
            got = os.preadv(fd, [buffer.view[: end - offset]], offset)
            if not got:
                break
            hasher.update(buffer.view[:got])
            offset += got
            if progress is not None:
                progress(got)
    return Digest(hasher.digest())


def content_digest(fd: int, form: int, progress: Callable[[int], None] | None = None) -> Digest:
    """Hash the content of a blob's open file, which is in it in that form (`schema.FORM_ZSTD`).

    What cannot be decoded has the digest of nothing. Raises OSError, and `StoreError` where the
    package that decodes is missing.
    """
    if form != schema.FORM_ZSTD:
        return digest_of(fd, progress)
    from buildidfs.store.blobs.zstd import FRAME_BYTES, CompressedBlob

    hasher = sha256()
    try:
        with contextlib.closing(CompressedBlob(os.dup(fd))) as blob:
            for offset in range(0, blob.size, FRAME_BYTES):
                piece = blob.pread(FRAME_BYTES, offset)
                hasher.update(piece)
                if progress is not None:
                    progress(len(piece))
    except IntegrityError:
        return Digest(bytes(32))
    return Digest(hasher.digest())


class Buffer:
    """A read buffer that goes back to a pool, since a fresh one costs a page fault per page."""

    _pool: list[bytearray] = []  # noqa: RUF012 - shared on purpose; append and pop are atomic

    def __enter__(self) -> Buffer:
        try:
            self.raw = self._pool.pop()
        except IndexError:
            self.raw = bytearray(CHUNK)
        self.view = memoryview(self.raw)
        return self

    def __exit__(self, *exc: object) -> None:
        self.view.release()
        if len(self._pool) < 16:
            self._pool.append(self.raw)
