# SPDX-License-Identifier: Apache-2.0
"""Export of artifacts, verified against their digest before they are given out."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import tempfile
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from buildidfs.errors import IntegrityError, UsageError
from buildidfs.linux.file_ops import Fd, closing_fd, closing_on_error, on_error
from buildidfs.names import printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import Artifact
    from buildidfs.store.store import Store


def to_stream(store: Store, artifact: Artifact, stream: BinaryIO) -> None:
    """Write an artifact to a stream, after all of it has been verified.

    Raises `IntegrityError` before the first byte is written, and OSError of the stream.
    """
    with store.open_blob(artifact.digest) as blob:
        if blob.computed() != artifact.digest:
            raise _damaged(store, artifact)
        for chunk in blob.chunks():
            stream.write(chunk)


def open_through(path: str | bytes) -> int | None:
    """Open ``path`` for writing if it must be written to; return None if it is to be replaced.

    A path must be written to if it exists and is not a regular file: /dev/null, a FIFO that has a
    reader, a symbolic link. Raises OSError (EPERM) if the path may be a trap. This is so if other
    users than its owner and root may create names in the directory, and the path is a link, or a
    file of another user: the link may lead to a file of ours, or the user may wait for data that
    only we may read.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISREG(status.st_mode):
        return None
    if not _is_open_to_others(os.path.dirname(path) or os.curdir):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.EPERM, "a symbolic link in a directory that others may write to")
    with closing_fd(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as pinned:
        # The check comes before the open: opening a FIFO without a reader would block for ever.
        now = os.fstat(pinned)
        if stat.S_ISREG(now.st_mode) or not _is_ours(now):
            raise OSError(errno.EPERM, "another user's, in a directory that others may write to")
        return os.open(f"/proc/self/fd/{pinned}", os.O_WRONLY | os.O_CLOEXEC)


def open_draft(path: str | bytes) -> int:
    """Open a file for reading and writing that only we can access: a new one, or our earlier one.

    Raises OSError: EPERM if the file at the path belongs to another user.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with contextlib.suppress(FileNotFoundError):
        with Fd(os.open(path, flags)) as draft:
            found = os.fstat(draft.fd)
            is_private = stat.S_ISREG(found.st_mode) and not found.st_mode & 0o077
            if found.st_uid == os.geteuid() and is_private and found.st_nlink == 1:
                return draft.release()
        if found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, f"{printable(os.fsencode(path))} belongs to another user")
        os.unlink(path)  # other processes may have it open
    return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)


def open_log(path: str | bytes) -> int:
    """Open a file for appending messages; create it if there is none. Raises OSError as
    `open_through`.

    If other users may create names in its directory, the file must be ours and must not be a link.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if not _is_open_to_others(os.path.dirname(path) or os.curdir):
        return os.open(path, flags, 0o600)
    with closing_on_error(os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)) as fd:
        found = os.fstat(fd)
        if not _is_ours(found) or found.st_nlink > 1:
            raise OSError(errno.EPERM, "another user's, in a directory that others may write to")
        os.set_blocking(fd, True)
    return fd


def _is_ours(status: os.stat_result) -> bool:
    """Return True if a file belongs to our user, to root, or to the owner of /.

    The owner of / is root in a user namespace that has no number for root.
    """
    return status.st_uid in (os.geteuid(), 0, os.stat("/").st_uid)


def _is_open_to_others(directory: str | bytes) -> bool:
    status = os.stat(directory)
    return not _is_ours(status) or bool(status.st_mode & 0o022)


def to_file(store: Store, artifact: Artifact, path: str) -> None:
    """Write the artifact with its time to ``path``: whole and verified, or not at all.

    The digest is checked over the written bytes. An existing device, FIFO or symbolic link is
    written to, not replaced. Raises `IntegrityError`, and `UsageError` if the file cannot be made.
    """
    _to_file(
        path,
        lambda stream: to_stream(store, artifact, stream),
        lambda stream: _copy_verified(store, artifact, stream),
    )


def data_to_file(data: bytes, path: str) -> None:
    """Write bytes to ``path``, whole or not at all, as `to_file` does."""

    def write(stream: BinaryIO) -> None:
        stream.write(data)

    _to_file(path, write, write)


def _to_file(
    path: str, write_through: Callable[[BinaryIO], None], write: Callable[[BinaryIO], None]
) -> None:
    """Write through an existing path, or replace it. Raises `UsageError`."""
    try:
        through = open_through(path)
        if through is not None:
            with open(through, "wb") as stream:
                write_through(stream)
            return
        directory, name = os.path.split(path)
        fd, draft = tempfile.mkstemp(prefix=f".{name[:200]}.", dir=directory or ".")
        with on_error(partial(os.unlink, draft)):
            with open(fd, "wb") as stream:
                write(stream)
            os.rename(draft, path)
    except OSError as error:
        raise UsageError(
            f"cannot write {printable(os.fsencode(path))}: {error.strerror}"
        ) from error


def _copy_verified(store: Store, artifact: Artifact, stream: BinaryIO) -> None:
    hasher = hashlib.sha256()
    with store.open_blob(artifact.digest) as blob:
        for chunk in blob.chunks():
            hasher.update(chunk)
            stream.write(chunk)
    if hasher.digest() != artifact.digest:
        raise _damaged(store, artifact)
    stream.flush()
    umask = os.umask(0o077)
    os.umask(umask)
    os.fchmod(stream.fileno(), (0o600 | artifact.mode) & ~umask)
    os.utime(stream.fileno(), ns=(artifact.mtime_ns, artifact.mtime_ns))


def _damaged(store: Store, artifact: Artifact) -> IntegrityError:
    where = printable(store.blobs.path(artifact.digest))
    return IntegrityError(f"{where}: its bytes do not match their digest; capture the file again")
