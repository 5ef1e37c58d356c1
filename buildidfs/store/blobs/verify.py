# SPDX-License-Identifier: Apache-2.0
"""Blobs are opened only when they are what they were when they were written.

Inode and change time of a file tell whether anybody has touched it since: nobody can set the latter
(inode(7)). A file that has others was restored from a backup, moved to another disk, or written to;
then all of it is read first. What is learned is remembered while the process lives, and written
down by the next who writes (`scrub`, `check`, a capture of the same bytes). What changes below the
filesystem is found when everything is read now and then, or, with fs-verity, by the kernel.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.store.blobs import hashing
from buildidfs.store.blobs.files import BlobFile, Standing
from buildidfs.store.errors import show
from buildidfs.store.schema import raw, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.model import Digest
    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.index.environment import Environment

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"

_MOST_REMEMBERED: Final = 4096
_ATTEMPTS: Final = 3


class OpenBlob(NamedTuple):
    """A descriptor of a blob's file, and how the content is in it (`schema.FORM_ZSTD`)."""

    fd: int
    form: int


class VerifiedBlobs:
    """Opens blobs of a store. May be used from several threads."""

    def __init__(self, environment: Environment, files: Blobs) -> None:
        self._env = environment
        self._rows = environment.tables["digests"]
        self.files = files
        # In what form the bytes were right, if they were, by digest, and of which file.
        self._read: dict[Digest, tuple[BlobFile, int | None]] = {}

    def path(self, digest: Digest) -> bytes:
        """Absolute path of a blob's file, whether it exists or not."""
        return self.files.path(digest)

    def size(self, digest: Digest) -> int | None:
        """Size of a blob's file in bytes; None if there is none."""
        return self.files.size(digest)

    def names(self) -> Iterable[Digest]:
        """Every blob that has a file, in no order."""
        return self.files.names()

    def open_now(self, digest: Digest) -> OpenBlob | None:
        """A blob's file; None if all of it has to be read first.

        Raises `IntegrityError` when it is gone, or is known to have other bytes.
        """
        fd = self.files.open(digest)
        try:
            status = os.fstat(fd)
            row = self._env.get(self._rows, digest)
            file = (status.st_size, status.st_ino, status.st_ctime_ns)
            if row is not None and len(row) > schema.FORM_AT:
                # A form that the size belies is damage: then the bytes have to tell.
                form = row[schema.FORM_AT]
                is_right = raw.is_file if form == schema.FORM_ZSTD else raw.is_plain_file
                if is_right(row, *file):
                    return OpenBlob(fd, form)
            known = self._read.get(digest)
            if known is not None and known[0] == file:
                if known[1] is not None:
                    return OpenBlob(fd, known[1])
                raise self._damaged(digest)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def open(self, digest: Digest) -> OpenBlob:
        """A blob's file, when need be after reading all of it.

        Raises `IntegrityError` when it is gone, or has other bytes.
        """
        opened = self.open_now(digest)
        if opened is not None:
            return opened
        fd = self.files.open(digest)
        try:
            form = self.form_of(digest, fd)
            if form is None:
                raise self._damaged(digest)
        except BaseException:
            os.close(fd)
            raise
        return OpenBlob(fd, form)

    def form_of(
        self, digest: Digest, fd: int, progress: Callable[[int], None] | None = None
    ) -> int | None:
        """Read all of a blob's file: how the right bytes are in it, None if they are not.

        ``progress`` hears how many were read. Raises `StoreError` where they cannot be.
        """
        for _ in range(_ATTEMPTS):
            before = _file(fd)
            # Not that of the row: whoever compresses the blob replaces the file first.
            compressed = os.pread(fd, len(ZSTD_MAGIC), 0) == ZSTD_MAGIC
            form: int | None = schema.FORM_PLAIN
            if not self._has(digest, fd, schema.FORM_PLAIN, progress):
                form = schema.FORM_ZSTD if compressed else None
                if compressed and not self._has(digest, fd, schema.FORM_ZSTD, progress):
                    form = None
            if _file(fd) == before:
                if len(self._read) >= _MOST_REMEMBERED:
                    self._read.clear()
                self._read[digest] = (before, form)
                return form
        return None  # somebody keeps writing to it

    def _has(
        self, digest: Digest, fd: int, form: int, progress: Callable[[int], None] | None
    ) -> bool:
        try:
            return hashing.content_digest(fd, form, progress) == digest
        except OSError as error:
            if error.errno == errno.EIO:  # the disk cannot read it, or fs-verity refuses to
                return False
            where = show(self.files.path(digest))
            raise StoreError(f"{where}: {error.strerror}") from error

    def read(self, digest: Digest) -> tuple[BlobFile, int | None] | None:
        """Which file of a blob was last read, and how the right bytes are in it; None for none."""
        return self._read.get(digest)

    def is_untouched(self, digest: Digest) -> bool:
        """Whether the file of a blob is the one that was written, as far as stat(2) tells."""
        file, row = self.files.file(digest), self._env.get(self._rows, digest)
        return file is not None and row is not None and raw.is_file(row, *file)

    def standing(self, staged: Staged) -> Standing:
        """What lies under the name that staged bytes are to get; may read all of it."""
        digest = staged.digest
        if self.files.file(digest) is None:
            return Standing.MISSING
        if self.is_untouched(digest):
            return Standing.KEPT
        try:
            os.close(self.open(digest).fd)
        except IntegrityError:
            return Standing.DAMAGED
        return Standing.NEW if self._env.get(self._rows, digest) is None else Standing.KEPT

    def _damaged(self, digest: Digest) -> IntegrityError:
        return IntegrityError(
            f"blob {digest} of {show(self.files.root)} has not the bytes that were captured:"
            " run buildidfs check --repair"
        )


def _file(fd: int) -> BlobFile:
    status = os.fstat(fd)
    return BlobFile(status.st_size, status.st_ino, status.st_ctime_ns)
