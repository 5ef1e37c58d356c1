# SPDX-License-Identifier: Apache-2.0
"""Bytes out of the store, verified against their digest before anybody gets them."""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from typing import TYPE_CHECKING, BinaryIO

from buildidfs.errors import IntegrityError, UsageError
from buildidfs.store.failures import show

if TYPE_CHECKING:
    from buildidfs.model import Artifact
    from buildidfs.store.store import Store

_CHUNK = 1 << 20


def to_stream(store: Store, artifact: Artifact, stream: BinaryIO) -> None:
    """Write the artifact to a stream, after all of it has been verified.

    Raises `IntegrityError` before the first byte is written, and OSError of the stream.
    """
    with open(store.open_blob(artifact.digest), "rb", buffering=0) as blob:
        if hashlib.file_digest(blob, "sha256").digest() != artifact.digest:
            raise _damaged(store, artifact)
        blob.seek(0)
        while chunk := blob.read(_CHUNK):
            stream.write(chunk)


def is_written_through(path: str | bytes) -> bool:
    """Whether output to ``path`` goes to what is there, and nothing may take its place.

    That is what is neither a file nor absent: /dev/null of a root who only wants to see the
    messages, a FIFO that somebody reads, a symbolic link. Raises OSError.
    """
    try:
        return not stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def to_file(store: Store, artifact: Artifact, path: str) -> None:
    """Make ``path`` a file with the artifact's bytes and time; whole and verified, or not at all.

    What is hashed is what was written. A device, FIFO or symbolic link that is there already is
    written to, not replaced. Raises `IntegrityError`, and `UsageError` when the file cannot be
    made.
    """
    try:
        if is_written_through(path):
            with open(path, "wb") as stream:
                to_stream(store, artifact, stream)
            return
        directory, name = os.path.split(path)
        fd, draft = tempfile.mkstemp(prefix=f".{name[:200]}.", dir=directory or ".")
        try:
            with open(fd, "wb") as stream:
                _copy_verified(store, artifact, stream)
            os.rename(draft, path)
        except BaseException:
            os.unlink(draft)
            raise
    except OSError as error:
        raise UsageError(f"cannot write {show(os.fsencode(path))}: {error.strerror}") from error


def _copy_verified(store: Store, artifact: Artifact, stream: BinaryIO) -> None:
    hasher = hashlib.sha256()
    with open(store.open_blob(artifact.digest), "rb", buffering=0) as blob:
        while chunk := blob.read(_CHUNK):
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
    where = show(store.blob_path(artifact.digest))
    return IntegrityError(f"{where}: its bytes do not match their digest; capture the file again")
