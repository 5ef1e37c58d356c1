# SPDX-License-Identifier: Apache-2.0
"""Translate failures of the operating system into one-line errors of the store."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from buildidfs.errors import StoreError, StoreFull
from buildidfs.names import printable

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def full(path: bytes, code: int) -> StoreFull:
    """Return the error for a filesystem or a quota without room."""
    what = "quota exhausted" if code == errno.EDQUOT else "no space left on its filesystem"
    return StoreFull(
        f"store {printable(path)}: {what}: free some room, or move the store to a larger filesystem"
    )


def not_to_be_written(path: bytes) -> StoreError:
    """Return the error for writing to a store that is open for reading only."""
    return StoreError(
        f"store {printable(path)} was opened for reading only: its filesystem is read-only, or it"
        " belongs to another user"
    )


def remedy(error: OSError) -> str:
    """Return the end of an error message: the remedy if access was refused, else an empty text."""
    if error.errno not in (errno.EACCES, errno.EPERM) or os.geteuid() == 0:
        return ""
    return ": only its owner may use it; do so as that user (sudo), or name your own with --store"


@contextlib.contextmanager
def translated(path: bytes) -> Iterator[None]:
    """Turn OSError within into `StoreFull` or `StoreError`, naming the store at ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(path, error.errno) from error
        where = f" ({printable(os.fsencode(error.filename))})" if error.filename else ""
        raise StoreError(
            f"store {printable(path)}: {error.strerror}{where}{remedy(error)}"
        ) from error
