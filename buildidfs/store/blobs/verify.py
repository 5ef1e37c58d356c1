# SPDX-License-Identifier: Apache-2.0
"""Open blobs, and refuse those whose bytes have changed since they were written.

Inode and change time of a file tell if it was touched since: no process can set the latter
(inode(7)). A file that has others was restored from a backup, moved to another disk, or written to;
then all of it is read first. What is learned is remembered while the process lives, and written
down by the next who writes (`scrub`, `check`, a capture of the same bytes). What changes below the
filesystem is found when everything is read now and then, or, with fs-verity, by the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, BinaryIO, Final, Self

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.linux.file_ops import read_fully, write_fully
from buildidfs.model import Digest
from buildidfs.store import schema
from buildidfs.store.blobs import files
from buildidfs.store.blobs.files import BlobFile, Standing
from buildidfs.store.errors import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.index.environment import Environment

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"

_MOST_REMEMBERED: Final = 4096
_ATTEMPTS: Final = 3
_CHUNK: Final = 1 << 20


class Blob:
    """The content of an open blob; a context manager. `pread` may be called from any thread.

    ``fd`` is the descriptor of the blob's file, ``status`` what fstat(2) said of it when it was
    opened, ``form`` how the content is in it (`schema.FORM_ZSTD`); ``is_plain`` says that the file
    is the content. ``size`` is in bytes of content.
    """

    __slots__ = ("_copy", "_packed", "fd", "form", "is_plain", "size", "status")

    def __init__(self, fd: int, form: int, status: os.stat_result) -> None:
        """Take ``fd`` over. Raises `IntegrityError`, and `StoreError` without the package."""
        self.fd = fd
        self.form = form
        self.status = status
        self._copy: BinaryIO | None = None
        if form != schema.FORM_ZSTD:
            self.is_plain = True
            self.size = status.st_size
            return
        from buildidfs.store.blobs.zstd import CompressedBlob

        self.is_plain = False
        self._packed = CompressedBlob(fd)
        self.size = self._packed.size

    def pread(self, size: int, offset: int, /) -> bytes:
        """Up to ``size`` bytes from ``offset``, fewer only at the end.

        Raises OSError, and `IntegrityError` for content that was damaged.
        """
        if self.is_plain:
            return read_fully(self.fd, size, offset)
        return self._packed.pread(size, offset)

    @property
    def is_remote(self) -> bool:
        """True if reads may wait for a network."""
        return False

    @property
    def is_packed(self) -> bool:
        """True if the file has the content compressed."""
        return not self.is_plain and self.fd >= 0

    @property
    def extent(self) -> tuple[int, int] | None:
        """Descriptor and offset at which a file has the content as it is; None for a compressed
        blob."""
        return (self.fd, 0) if self.is_plain else None

    def read_at(self, offset: int, size: int) -> bytes:
        """`pread`, as decoders ask for it."""
        return self.pread(size, offset)

    def chunks(self) -> Iterator[bytes]:
        """The content, a piece after the other. Raises what `pread` does."""
        for offset in range(0, self.size, _CHUNK):
            yield self.pread(_CHUNK, offset)

    def computed(self) -> Digest:
        """The digest of the content, which is read for it."""
        hasher = files.sha256()
        for chunk in self.chunks():
            hasher.update(chunk)
        return Digest(hasher.digest())

    def fileno(self) -> int:
        """A descriptor of a file that is the content, at offset 0 the first time; `close` ends it.

        Raises OSError, `IntegrityError`.
        """
        if self.is_plain:
            return self.fd
        if self._copy is None:
            import tempfile  # which who only reads plain blobs does without

            with contextlib.ExitStack() as stack:
                file = stack.enter_context(tempfile.TemporaryFile(buffering=0))
                self._copy_to(file)
                file.seek(0)
                stack.pop_all()
            self._copy = file
        return self._copy.fileno()

    def _copy_to(self, file: BinaryIO) -> None:
        for chunk in self.chunks():
            write_fully(file.fileno(), chunk)

    def was_written(self) -> bool:
        """Return True if the file has been written to since it was opened.

        The change time tells no more: it is another one also when the blob was removed.
        """
        return self.is_plain and os.fstat(self.fd).st_mtime_ns != self.status.st_mtime_ns

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        if not self.is_plain:
            self._packed.close()
        elif self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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

    def open_now(self, digest: Digest) -> Blob | None:
        """Open a blob; None if all of it has to be read first.

        Raises `IntegrityError` if it is gone, or is known to have other bytes.
        """
        fd = self.files.open(digest)
        try:
            status = os.fstat(fd)
            form = self._form_now(digest, status)
        except BaseException:
            os.close(fd)
            raise
        if form is None:
            os.close(fd)
            return None
        return Blob(fd, form, status)

    def _form_now(self, digest: Digest, status: os.stat_result) -> int | None:
        """Return the state of the content in a file with that status; None if it must be read."""
        row = self._env.get(self._rows, digest)
        file = (status.st_size, status.st_ino, status.st_ctime_ns)
        if row is not None and len(row) > schema.FORM_AT:
            # A form that the size belies is damage: then the bytes have to tell.
            form = row[schema.FORM_AT]
            is_right = schema.is_file if form == schema.FORM_ZSTD else schema.is_plain_file
            if is_right(row, *file):
                return form
        known = self._read.get(digest)
        if known is None or known[0] != file:
            return None
        if known[1] is None:
            raise self._damaged(digest)
        return known[1]

    def open(self, digest: Digest) -> Blob:
        """Open a blob, if need be after reading all of it.

        Raises `IntegrityError` if it is gone, or has other bytes.
        """
        opened = self.open_now(digest)
        if opened is not None:
            return opened
        fd = self.files.open(digest)
        try:
            form = self.form_of(digest, fd)
            if form is None:
                raise self._damaged(digest)
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        return Blob(fd, form, status)

    def form_of(
        self, digest: Digest, fd: int, progress: Callable[[int], None] | None = None
    ) -> int | None:
        """Read all of a blob's file: how the right bytes are in it, None if they are not.

        ``progress`` hears how many were read. Raises `StoreError` where they cannot be.
        """
        for _ in range(_ATTEMPTS):
            before = _file(fd)
            # Not that of the row: compression replaces the file first.
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
        return None  # a process keeps writing to it

    def _has(
        self, digest: Digest, fd: int, form: int, progress: Callable[[int], None] | None
    ) -> bool:
        try:
            return files.content_digest(fd, form, progress) == digest
        except OSError as error:
            if error.errno == errno.EIO:  # the disk cannot read it, or fs-verity refuses to
                return False
            where = show(self.files.path(digest))
            raise StoreError(f"{where}: {error.strerror}") from error

    def read(self, digest: Digest) -> tuple[BlobFile, int | None] | None:
        """Which file of a blob was last read, and how the right bytes are in it; None for none."""
        return self._read.get(digest)

    def is_untouched(self, digest: Digest) -> bool:
        """Return True if a blob's file is the one that was written, as far as stat(2) tells."""
        file, row = self.files.file(digest), self._env.get(self._rows, digest)
        return file is not None and row is not None and schema.is_file(row, *file)

    def standing(self, staged: Staged) -> Standing:
        """Look at the file under the name that staged bytes are to get; may read all of it."""
        digest = staged.digest
        if self.files.file(digest) is None:
            return Standing.MISSING
        if self.is_untouched(digest):
            return Standing.KEPT
        try:
            self.open(digest).close()
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
