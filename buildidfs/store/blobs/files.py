# SPDX-License-Identifier: Apache-2.0
"""Files of blobs: staged without a name, linked under their SHA-256 when they are on disk.

A staged file is O_TMPFILE in the blobs filesystem, so that a process killed at any moment leaves
nothing behind. It gets its name only after fsync, and the index learns of it only after that: so a
name under ``blobs/`` always has all of its bytes. If the filesystem has no O_TMPFILE (NFS, vfat),
the file lies in ``staging/`` and is locked while in use; the next open of the store removes files
that are not locked.

The original itself is never linked: the link would be the same inode, and an overwrite in place
would put other bytes under the digest.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import Fd, close_fds, closing_fd, on_error
from buildidfs.model import Digest
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.errors import FULL, full, translated

if TYPE_CHECKING:
    import hashlib

T = TypeVar("T")

CHUNK: Final = 1 << 20

_ZEROS = bytes(CHUNK)

_BLOCK = 4096

#: Bytes of a sparse file that are left out if they are all zeros.
_PIECE = 16 << 10

#: Bytes that may be allocated beyond the end of a file, and are freed when it is closed.
_EXCESS = 64 << 10

_OTHERS_S = 60.0

# linux/magic.h
_XFS = 0x58465342

#: If the inode of a blob has no room for extended attributes, they take a block of their own.
_ATTRIBUTES = 2 * _BLOCK


class Staged(Fd):
    """Bytes in the store's filesystem that have no name yet; closed by commit, or by `close`.

    ``fd`` reads the staged bytes. Callers identify these bytes, not those of the source. If the
    source was written to during the copy, the bytes are still exactly those of ``digest``.
    ``doubtful`` is True if an fsync failed: the next fsync may succeed although the bytes are not
    on disk. ``counted`` is called when the bytes no longer count as staged. A caller that only
    waits for the commit calls `lend`: until then the store may drop the bytes, if the host has
    them.
    """

    __slots__ = ("_is_dropped", "_is_lent", "counted", "digest", "doubtful", "name", "size")

    _lending: Final = threading.Lock()

    def __init__(self, fd: int, name: bytes | None) -> None:
        super().__init__(fd)
        self.name = name
        self.size = 0
        self.digest = Digest(bytes(32))
        self.doubtful = False
        self.counted: Callable[[], None] | None = None
        self._is_lent = self._is_dropped = False

    def lend(self) -> None:
        """Let `take_back` drop the bytes until `claim` is called."""
        self._is_lent = True

    def take_back(self) -> bool:
        """Drop the bytes if they are lent; return False if they are not."""
        with self._lending:
            is_lent, self._is_lent = self._is_lent, False
            if is_lent:
                self._is_dropped = True
                self.close()
        return is_lent

    def claim(self) -> bool:
        """End the loan; return False if the bytes were dropped."""
        with self._lending:
            self._is_lent = False
            return not self._is_dropped  # files of a bundle have no descriptor

    def disk_bytes(self) -> int:
        """Return the number of bytes that the file takes on disk."""
        return taken(os.fstat(self.fd))

    def uncount(self) -> None:
        """Stop counting the bytes as staged; safe to call twice."""
        counted, self.counted = self.counted, None
        if counted is not None:
            counted()

    def close(self) -> None:
        """Drop the bytes unless they were sealed; safe to call twice."""
        self.uncount()
        if self.name is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.name)
            self.name = None
        super().close()


class BlobFile(NamedTuple):
    """The file of a blob, identified by stat(2); ``stored`` is its size in bytes."""

    stored: int
    inode: int
    ctime_ns: int


class BlobState(enum.Enum):
    """The state of the blob file that already has the digest of staged bytes as its name."""

    MISSING = enum.auto()
    DAMAGED = enum.auto()
    """The file exists, but its bytes do not have that digest."""
    NEW = enum.auto()
    """The file is right, but no row refers to it yet, so its name may not be on disk."""
    KEPT = enum.auto()


class Blobs:
    """The ``blobs/`` directory of a store. Safe to use from several threads."""

    def __init__(self, root: bytes, *, writable: bool, anonymous: bool = True) -> None:
        self.root = root
        self._directory_path = os.path.join(root, b"blobs")
        self._staging_path = os.path.join(root, b"staging")
        try:
            self._directory = os.open(self._directory_path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise StoreError(
                f"{printable(self._directory_path)}: {error.strerror}: the store is damaged"
            ) from error
        self._anonymous = anonymous
        self._no_reflink: set[int] = set()
        self._others_since = -math.inf
        self._other_bytes = 0
        if writable:
            self._sweep()

    @functools.cached_property
    def _preallocates(self) -> bool:
        """True on XFS, which allocates twice the size of a growing file until the file is
        closed.
        """
        from buildidfs.linux import mounts  # imports ctypes, which readers do not need

        return mounts.filesystem_magic(self._directory) == _XFS

    def close(self) -> None:
        """Close the directory."""
        fd, self._directory = self._directory, -1
        close_fds(fd)

    def path(self, digest: Digest) -> bytes:
        """Return the absolute path of a blob, even if the blob does not exist."""
        return os.path.join(self._directory_path, os.fsencode(_name(digest)))

    def open(self, digest: Digest) -> int:
        """Open a blob for reading; raises `IntegrityError` if it is gone."""
        try:
            return os.open(_name(digest), os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
        except FileNotFoundError as error:
            raise IntegrityError(f"blob {digest} is missing from {printable(self.root)}") from error
        except OSError as error:
            raise StoreError(
                f"blob {digest} of {printable(self.root)}: {error.strerror}"
            ) from error

    def size(self, digest: Digest) -> int | None:
        """Return the size of a blob's file in bytes; None if there is no such file."""
        try:
            return os.stat(_name(digest), dir_fd=self._directory).st_size
        except FileNotFoundError:
            return None

    def file(self, digest: Digest) -> BlobFile | None:
        """Return the file of a blob; None if there is none."""
        try:
            status = os.stat(_name(digest), dir_fd=self._directory)
        except FileNotFoundError:
            return None
        return BlobFile(status.st_size, status.st_ino, status.st_ctime_ns)

    def disk_bytes(self, digest: Digest) -> int:
        """Return the bytes that the file of a blob takes on disk; 0 if there is none."""
        try:
            return taken(os.stat(_name(digest), dir_fd=self._directory))
        except FileNotFoundError:
            return 0

    def names(self) -> Iterable[Digest]:
        """Yield every blob in the directory, in no order; files with other names are skipped."""
        for prefix in os.listdir(self._directory_path):
            with contextlib.suppress(NotADirectoryError, FileNotFoundError):
                for name in os.listdir(os.path.join(self._directory_path, prefix)):
                    with contextlib.suppress(ValueError):
                        yield Digest(bytes.fromhex(name.decode("ascii", "replace")))

    # --- data beside the bytes -------------------------------------------------------------------

    def origin(self, digest: Digest) -> bytes:
        """Return the origin that is kept beside a blob (see `provenance`); it may be empty."""
        return read_origin(self._directory, _name(digest))

    def keep_origin(self, digest: Digest, data: bytes) -> None:
        """Replace the origin beside a blob that exists. This changes the ctime of its file."""
        with translated(self.root), closing_fd(self.open(digest)) as fd:
            if self._keep_origin(fd, digest, data):
                self._unlink(_name(digest) + ORIGIN_SUFFIX)

    def _keep_origin(self, fd: int, digest: Digest, data: bytes) -> bool:
        """Keep the origin beside a blob: in an attribute if possible, else in a file.

        Return False if it is in a file.
        """
        if not data or attach_origin(fd, data):
            return True
        name = _name(digest)
        self._make_bucket(name)
        with self._new_named() as draft:
            file_ops.write_fully_at(draft.fd, data, 0)
            os.fsync(draft.fd)
            self._give_name(name + ORIGIN_SUFFIX, draft)
        return False

    def draft(self) -> Staged:
        """Return an empty file to be filled and then passed to `replace`."""
        with translated(self.root):
            return self._new_named()

    def replace(self, digest: Digest, draft: Staged) -> None:
        """Replace the bytes of a blob durably, and keep its attributes."""
        with translated(self.root):
            data = self.origin(digest)
            if data:
                attach_origin(draft.fd, data)
            sync_all([draft.fd])
            self._give_name(_name(digest), draft)
            sync_directories(self._directory, {digest.hex()[:2]})

    def unlink(self, digest: Digest) -> None:
        """Remove a blob with its attributes; does nothing if it is gone."""
        with translated(self.root):
            self._unlink(_name(digest))
            self._unlink(_name(digest) + ORIGIN_SUFFIX)

    def set_aside(self, digest: Digest) -> None:
        """Move the file at the place of a blob to ``quarantine/``, where it replaces an
        older one.
        """
        with translated(self.root):
            directory = os.path.join(self.root, b"quarantine")
            os.makedirs(directory, 0o700, exist_ok=True)
            for suffix in ("", ORIGIN_SUFFIX):
                with contextlib.suppress(FileNotFoundError):
                    target = os.path.join(directory, (digest.hex() + suffix).encode())
                    os.rename(_name(digest) + suffix, target, src_dir_fd=self._directory)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._directory)

    def filesystem(self) -> os.statvfs_result:
        """Return the size of the filesystem and its free bytes and inodes."""
        return os.fstatvfs(self._directory)

    def free_bytes(self) -> int:
        """Return the bytes that an unprivileged writer may still use on the filesystem."""
        usage = self.filesystem()
        return usage.f_bavail * usage.f_frsize

    def other_bytes(self) -> int:
        """Return the disk usage of the directories in ``blobs/`` and of the names of generated
        code.

        The result may be a minute old.
        """
        now = time.monotonic()
        if now - self._others_since > _OTHERS_S:
            from buildidfs.store import jit_maps  # imported here because readers do not need it

            self._others_since = now
            with os.scandir(self._directory) as entries:
                size = sum(e.stat().st_blocks * 512 for e in entries if e.is_dir())
            self._other_bytes = size + jit_maps.disk_bytes(self.root)
        return self._other_bytes

    # --- staging ---------------------------------------------------------------------------

    def stage(
        self,
        fd: int,
        limit: int | None = None,
        expected: int = 0,
        more: Callable[[int], None] = lambda size: None,
    ) -> Staged:
        """Copy and hash the bytes of an open file; see `Store.stage`.

        ``more`` is called before more than ``expected`` bytes are written.
        """
        before = os.fstat(fd)
        staged = self._new_staged()
        with on_error(staged.close):
            if limit is None:
                limit = most_read(before.st_size)
            if not (0 < before.st_size <= limit and self._reflink(fd, before.st_dev, staged)):
                if self._preallocates and 0 < expected >= before.st_size:
                    with translated(self.root):
                        os.posix_fallocate(staged.fd, 0, min(before.st_size, limit))
                self._copy(fd, limit, staged, _Grant(expected, more), _is_sparse(before))
            if self.size(staged.digest) is None:
                file_ops.start_writeback(staged.fd)  # the fsync of `seal` will wait less
        return staged

    def _new_staged(self) -> Staged:
        with translated(self.root):
            if self._anonymous:
                fd = file_ops.open_unnamed(self._directory_path, 0o400)
                if fd is not None:
                    return Staged(fd, None)
                self._anonymous = False
            return self._new_named()

    def _new_named(self) -> Staged:
        os.makedirs(self._staging_path, 0o700, exist_ok=True)
        while True:
            name = os.path.join(self._staging_path, os.urandom(8).hex().encode())
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            # A sweeper may remove it between creation and lock.
            with contextlib.suppress(BlockingIOError), Fd(os.open(name, flags, 0o400)) as file:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(file.fd).st_nlink:
                    return Staged(file.release(), name)

    def _sweep(self) -> None:
        """Remove the files that dead processes left in ``staging/``."""
        with contextlib.suppress(FileNotFoundError, PermissionError):
            for name in os.listdir(self._staging_path):
                path = os.path.join(self._staging_path, name)
                flags = os.O_RDONLY | os.O_CLOEXEC
                with contextlib.suppress(OSError), closing_fd(os.open(path, flags)) as fd:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)

    def _reflink(self, fd: int, device: int, staged: Staged) -> bool:
        if device in self._no_reflink:
            return False
        try:
            if not file_ops.reflink(fd, staged.fd):
                self._no_reflink.add(device)
                return False
        except OSError as error:
            if error.errno in FULL:
                raise full(self.root, error.errno) from error
            return False  # the source is unreadable: the copy will report that
        with translated(self.root):
            staged.size = os.fstat(staged.fd).st_size
            staged.digest = digest_of(staged.fd)
        return True

    def _copy(self, fd: int, limit: int, staged: Staged, grant: _Grant, sparse: bool) -> None:
        """Copy and hash in one pass. The hash is that of the written bytes."""
        hasher = sha256()
        offset, hole = 0, False
        with Buffer() as buffer:
            while offset < limit:
                got = os.preadv(fd, [buffer.view[: limit - offset]], offset)
                if not got:
                    break
                chunk = buffer.view[:got]
                hasher.update(chunk)
                hole = got == CHUNK and buffer.raw.startswith(_ZEROS)
                if not hole:
                    pieces = _pieces(chunk) if sparse else ((0, chunk),)
                    for at, piece in pieces:
                        grant.write(len(piece))
                        with translated(self.root):
                            file_ops.write_fully_at(staged.fd, piece, offset + at)
                    hole = sparse
                offset += got
        status = os.fstat(staged.fd)
        if hole or status.st_size != offset or status.st_blocks * 512 > offset + _EXCESS:
            with translated(self.root):
                os.ftruncate(staged.fd, offset)
        staged.size = offset
        staged.digest = Digest(hasher.digest())

    # --- sealing ---------------------------------------------------------------------------

    def seal(
        self,
        batch: Iterable[Staged],
        standing: Callable[[Staged], BlobState],
        origin: Callable[[Digest], bytes] = lambda digest: b"",
    ) -> set[Digest]:
        """Make staged bytes durable and give them their names; return the digests added.

        ``standing`` returns the state of a file that has the name already; a damaged file goes to
        quarantine. ``origin`` returns the data to keep beside a new blob, see `provenance`. Raises
        `StoreFull`, `StoreError`.
        """
        missing: dict[Digest, Staged] = {}
        present: set[Digest] = set()
        with translated(self.root):
            for staged in batch:
                digest = staged.digest
                if digest in missing or digest in present:
                    continue
                there = standing(staged)
                if there is BlobState.NEW:
                    present.add(digest)
                elif there is not BlobState.KEPT:
                    missing[digest] = staged
                    if there is BlobState.DAMAGED:
                        self.set_aside(digest)
            for digest, staged in missing.items():
                self._keep_origin(staged.fd, digest, origin(digest))
            for staged in missing.values():
                staged.doubtful = True
            sync_all([staged.fd for staged in missing.values()])
            for staged in missing.values():
                staged.doubtful = False
            for digest, staged in missing.items():
                self._link(digest, staged)
            sync_directories(self._directory, {digest.hex()[:2] for digest in (*missing, *present)})
        return set(missing)

    def _link(self, digest: Digest, staged: Staged) -> None:
        name = _name(digest)
        self._make_bucket(name)
        try:
            self._give_name(name, staged)
        except FileExistsError:
            if self.size(digest) == staged.size:
                return  # another process was faster
            os.unlink(name, dir_fd=self._directory)
            self._give_name(name, staged)

    def _make_bucket(self, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name[:2], 0o700, dir_fd=self._directory)

    def _give_name(self, name: str, staged: Staged) -> None:
        if staged.name is not None:
            os.rename(staged.name, name, dst_dir_fd=self._directory)
            staged.name = None
            return
        file_ops.link_fd(staged.fd, self._directory, name.encode())


def _name(digest: Digest) -> str:
    text = digest.hex()
    return f"{text[:2]}/{text}"


class _Grant:
    """Counts down a number of bytes that may be written, and requests more when it is used up."""

    def __init__(self, left: int, more: Callable[[int], None]) -> None:
        self._left = left
        self._more = more

    def write(self, size: int) -> None:
        """Count bytes that are about to be written. Raises any exception of ``more``."""
        if size > self._left:
            self._more(size - self._left)
            self._left = size
        self._left -= size


def _is_sparse(status: os.stat_result) -> bool:
    return status.st_blocks * 512 < status.st_size - _PIECE


def _pieces(chunk: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Split a chunk into pieces; yield (offset, bytes) of each piece that is not all zeros."""
    for at in range(0, len(chunk), _PIECE):
        piece = chunk[at : at + _PIECE]
        if piece != _ZEROS[: len(piece)]:
            yield at, piece


def taken(status: os.stat_result) -> int:
    """Return the bytes that a file takes on disk, given its stat(2) result.

    A sparse file takes less than its size. XFS allocates blocks beyond the end of a growing file;
    these are not counted, because XFS frees them when the file is closed.
    """
    most = -(-status.st_size // _BLOCK) * _BLOCK + _ATTRIBUTES
    return min(status.st_blocks * 512, most)


#: Bytes read of a file that claims no size (files of proc); kallsyms has about 20 MB.
_UNSIZED_LIMIT: Final = 256 << 20


def sha256() -> hashlib._Hash:
    """A new SHA-256."""
    import hashlib  # imports OpenSSL, which a process that only reads names does not need

    return hashlib.sha256()


def most_read(size: int) -> int:
    """Return the maximum number of bytes to read of a file that has ``size`` according to stat(2).

    Files of proc have size 0 there.
    """
    return size or _UNSIZED_LIMIT


def digest_of(fd: int, progress: Callable[[int], None] | None = None) -> Digest:
    """Hash the bytes of an open file without copying them; raises OSError.

    After each piece, ``progress`` is called with its number of bytes.
    """
    hasher = sha256()
    with Buffer() as buffer:
        offset, end = 0, most_read(os.fstat(fd).st_size)
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
    """Hash the content of a blob from its open file; ``form`` is its encoding (`schema.FORM_ZSTD`).

    If the content cannot be decoded, the result is the digest of no bytes. Raises OSError, and
    `StoreError` if the package that decodes it is missing.
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
    """A pooled read buffer. A fresh buffer would cost a page fault per page."""

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


def sync_all(fds: list[int]) -> None:
    """Call fsync on all files at the same time: most filesystems then commit several in one step of
    their journal.
    """
    _at_the_same_time(os.fsync, fds)


def sync_directories(parent: int, names: set[str]) -> None:
    """Call fsync on an open directory and on the named directories in it."""

    def sync(name: str) -> None:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with closing_fd(os.open(name, flags, dir_fd=parent)) as fd:
            os.fsync(fd)

    os.fsync(parent)
    _at_the_same_time(sync, sorted(names))


def _at_the_same_time(work: Callable[[T], None], items: Sequence[T]) -> None:
    if len(items) < 4:
        for item in items:
            work(item)
        return
    from concurrent.futures import ThreadPoolExecutor  # readers do not need it

    with ThreadPoolExecutor(min(16, len(items))) as pool:
        for _ in pool.map(work, items):
            pass


ORIGIN_ATTRIBUTE: Final = b"user.buildidfs"
ORIGIN_SUFFIX: Final = ".origin"

MAX_ORIGIN_BYTES: Final = 64 << 10
"""The maximum size of the origin kept beside a blob. Extended attributes cannot be larger on any
filesystem (XATTR_SIZE_MAX); the files have the same limit.
"""

_NO_ATTRIBUTE: Final = frozenset(
    (errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM)
)


def attach_origin(fd: int, data: bytes) -> bool:
    """Keep the origin in an attribute of a file; return False if that is impossible. Raises
    OSError.
    """
    try:
        try:
            os.setxattr(fd, ORIGIN_ATTRIBUTE, data)
        except PermissionError as error:
            if error.errno != errno.EACCES:
                raise
            # A blob is read-only, but a user who is not root must be able to set the attribute.
            os.fchmod(fd, 0o600)
            try:
                os.setxattr(fd, ORIGIN_ATTRIBUTE, data)
            finally:
                os.fchmod(fd, 0o400)
    except OSError as error:
        if error.errno in _NO_ATTRIBUTE:
            return False
        raise
    return True


def read_origin(directory: int, name: str) -> bytes:
    """Return the bytes kept beside the file ``name`` of an open directory; they may be empty."""
    try:
        fd = os.open(name + ORIGIN_SUFFIX, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return _attached(directory, name)
    with open(fd, "rb") as file:
        return file.read(MAX_ORIGIN_BYTES)


def _attached(directory: int, name: str) -> bytes:
    try:
        with closing_fd(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as fd:
            return os.getxattr(fd, ORIGIN_ATTRIBUTE)
    except OSError:
        return b""
