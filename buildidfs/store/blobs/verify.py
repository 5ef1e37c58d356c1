# SPDX-License-Identifier: Apache-2.0
"""Open blobs, and refuse those whose bytes have changed since they were written.

The inode and the change time show if a file was touched: no process can set a change time
(inode(7)). If they differ from the row, the file was restored from a backup, moved to another disk,
or written to; then the blob is read as a whole before it is used. The process remembers the result
until it ends, and the next writer records it (`fsck.check`, a capture of the same bytes).
Changes below the filesystem are found by reading all blobs now and then, or by the kernel with
fs-verity.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING, BinaryIO, Final

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.linux.file_ops import Fd, closing_on_error, read_fully, write_fully
from buildidfs.model import Digest
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.blobs import files
from buildidfs.store.blobs.files import BlobFile, BlobState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.index.environment import Environment

ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"

_MOST_REMEMBERED: Final = 4096
_ATTEMPTS: Final = 3
_CHUNK: Final = 1 << 20


class Blob(Fd):
    """The content of an open blob; a context manager. `pread` may be called from any thread.

    ``fd`` is the descriptor of the blob's file, ``status`` the result of fstat(2) when the blob was
    opened, ``form`` the encoding of the content (`schema.FORM_ZSTD`). If ``is_plain``, the file is
    the content itself. ``size`` is the number of bytes of content.
    """

    __slots__ = ("_copy", "_packed", "form", "is_plain", "size", "status")

    def __init__(self, fd: int, form: int, status: os.stat_result) -> None:
        """Take over ``fd``. Raises `IntegrityError`, and `StoreError` if the package zstandard is
        missing.
        """
        super().__init__(fd)
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
        """Return up to ``size`` bytes from ``offset``; fewer only at the end.

        Raises OSError (ESTALE: the file has been written to since it was opened), and
        `IntegrityError` for damaged content.
        """
        if not self.is_plain:
            return self._packed.pread(size, offset)
        data = read_fully(self.fd, size, offset)
        if self.was_written():  # after the read, because a write may come after an earlier check
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return data

    @property
    def is_remote(self) -> bool:
        """True if reads may wait for a network."""
        return False

    @property
    def is_packed(self) -> bool:
        """True if the file has the content in compressed form."""
        return not self.is_plain and self.fd >= 0

    @property
    def extent(self) -> tuple[int, int] | None:
        """Return descriptor and offset of the plain content in a file; None for a
        compressed blob.
        """
        return (self.fd, 0) if self.is_plain else None

    def read_at(self, offset: int, size: int) -> bytes:
        """Do the same as `pread`, with the arguments in the order that decoders use."""
        return self.pread(size, offset)

    def chunks(self) -> Iterator[bytes]:
        """Yield the content in pieces. Raises the exceptions of `pread`."""
        for offset in range(0, self.size, _CHUNK):
            yield self.pread(_CHUNK, offset)

    def computed(self) -> Digest:
        """Hash the content, and return the digest."""
        hasher = files.sha256()
        for chunk in self.chunks():
            hasher.update(chunk)
        return Digest(hasher.digest())

    def fileno(self) -> int:
        """Return a descriptor of a file that has the content; `close` closes the descriptor.

        Its offset is 0 at the first call. Raises OSError, `IntegrityError`.
        """
        if self.is_plain:
            return self.fd
        if self._copy is None:
            import tempfile  # processes that only read plain blobs do not need it

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
        """Return True if the file has been written to since it was opened; for readers of the
        descriptor.

        Does not use the ctime, which also changes when the blob is removed.
        """
        return self.is_plain and os.fstat(self.fd).st_mtime_ns != self.status.st_mtime_ns

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self._copy is not None:
            self._copy.close()
            self._copy = None
        if not self.is_plain:
            self._packed.close()
        else:
            super().close()


class VerifiedBlobs:
    """Opens blobs of a store. May be used from several threads."""

    def __init__(self, environment: Environment, files: Blobs) -> None:
        self._env = environment
        self._rows = environment.tables["digests"]
        self.files = files
        # For each digest, the file that was read, and the form in which its bytes had that digest;
        # None if they did not have it.
        self._read: dict[Digest, tuple[BlobFile, int | None]] = {}

    def path(self, digest: Digest) -> bytes:
        """Return the absolute path of a blob's file, even if the file does not exist."""
        return self.files.path(digest)

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob's file in bytes; None if there is none."""
        return self.files.size(digest)

    def names(self) -> Iterable[Digest]:
        """Yield every blob that has a file, in no order."""
        return self.files.names()

    def open_now(self, digest: Digest) -> Blob | None:
        """Open a blob; return None if the whole blob has to be read first.

        Raises `IntegrityError` if the blob is gone, or is known to have other bytes.
        """
        with closing_on_error(self.files.open(digest)) as fd:
            status = os.fstat(fd)
            form = self._form_now(digest, status)
            if form is not None:
                return Blob(fd, form, status)
        os.close(fd)
        return None

    def _form_now(self, digest: Digest, status: os.stat_result) -> int | None:
        """Return the encoding of the content in a file with that status; None if the file must be
        read first.
        """
        row = self._env.get(self._rows, digest)
        file = (status.st_size, status.st_ino, status.st_ctime_ns)
        if row is not None and len(row) > schema.FORM_AT:
            # If the form contradicts the size, the row is damaged: then the bytes must be read.
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
        """Open a blob; read the whole blob first if its file may have changed.

        Raises `IntegrityError` if the blob is gone, or has other bytes.
        """
        opened = self.open_now(digest)
        if opened is not None:
            return opened
        with closing_on_error(self.files.open(digest)) as fd:
            form = self.form_of(digest, fd)
            if form is None:
                raise self._damaged(digest)
            status = os.fstat(fd)
        return Blob(fd, form, status)

    def form_of(
        self, digest: Digest, fd: int, progress: Callable[[int], None] | None = None
    ) -> int | None:
        """Read a blob's file as a whole; return the encoding of its content, or None if the bytes
        are wrong.

        ``progress`` is called with the number of bytes read. Raises `StoreError` if the file cannot
        be read.
        """
        for _ in range(_ATTEMPTS):
            before = _file(fd)
            # The form may differ from that of the row: compression replaces the file first.
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
            if error.errno == errno.EIO:  # the disk cannot read it, or fs-verity refuses the read
                return False
            where = printable(self.files.path(digest))
            raise StoreError(f"{where}: {error.strerror}") from error

    def read(self, digest: Digest) -> tuple[BlobFile, int | None] | None:
        """Return the file of a blob as it was when the blob was last read, and the encoding of its
        content.

        The encoding is None if the bytes were wrong. Returns None if the blob was not read.
        """
        return self._read.get(digest)

    def is_untouched(self, digest: Digest) -> bool:
        """Return True if stat(2) shows that a blob's file is still the one that was written."""
        file, row = self.files.file(digest), self._env.get(self._rows, digest)
        return file is not None and row is not None and schema.is_file(row, *file)

    def standing(self, staged: Staged) -> BlobState:
        """Return the state of the file that has the digest of staged bytes as its name; may read
        the whole file.
        """
        digest = staged.digest
        if self.files.file(digest) is None:
            return BlobState.MISSING
        if self.is_untouched(digest):
            return BlobState.KEPT
        try:
            self.open(digest).close()
        except IntegrityError:
            return BlobState.DAMAGED
        return BlobState.NEW if self._env.get(self._rows, digest) is None else BlobState.KEPT

    def _damaged(self, digest: Digest) -> IntegrityError:
        return IntegrityError(
            f"blob {digest} of {printable(self.files.root)} has not the bytes that were captured:"
            " run buildidfs check --repair"
        )


def _file(fd: int) -> BlobFile:
    status = os.fstat(fd)
    return BlobFile(status.st_size, status.st_ino, status.st_ctime_ns)
