# SPDX-License-Identifier: Apache-2.0
"""Who may name blobs and who may take them away: `naming` and `removing`, never at one time.

A commit finds that a blob is there, and then writes the row that speaks of it; a removal deletes
the row and then the blob. Between the two steps of either the other must not come. LMDB's lock
covers rows only, so there is this one around it: always taken before a write transaction is begun,
never within one.

It is flock(2) on the file ``lock``, shared for those who name. Each use opens it anew, because
the lock belongs to the open file description: so it also holds between threads. flock gives no
turn to who waits for an exclusive lock while others come and go with shared ones; so everybody
passes a gate first, which is the directory ``blobs``, and who wants to remove closes it behind
him.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from buildidfs.store.errors import translated

_FILE = b"lock"
_GATE = b"blobs"


@contextlib.contextmanager
def naming(root: bytes) -> Iterator[None]:
    """While blobs get names, until the commit that speaks of them. Raises `StoreError`."""
    with contextlib.ExitStack() as stack:
        with translated(root), _held(_opened_gate(root), fcntl.LOCK_SH):
            stack.enter_context(_held(_opened_file(root), fcntl.LOCK_SH))
        yield


@contextlib.contextmanager
def removing(root: bytes) -> Iterator[None]:
    """While rows and then their blobs are removed. Raises `StoreError`."""
    with contextlib.ExitStack() as stack:
        with translated(root):
            stack.enter_context(_held(_opened_gate(root), fcntl.LOCK_EX))
            stack.enter_context(_held(_opened_file(root), fcntl.LOCK_EX))
        yield


def _opened_gate(root: bytes) -> int:
    return os.open(os.path.join(root, _GATE), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _opened_file(root: bytes) -> int:
    # Made by whoever is first: a store that comes from an earlier version has none.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(os.path.join(root, _FILE), flags, 0o600)


@contextlib.contextmanager
def _held(fd: int, how: int) -> Iterator[None]:
    try:
        fcntl.flock(fd, how)
        try:
            yield
        finally:
            # A child that was forked meanwhile has the description too, and would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)
