# SPDX-License-Identifier: Apache-2.0
"""One fetch of a file at a time, for all threads and processes of a store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from collections.abc import Iterator
from typing import Final

from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import fingerprint

_NAME: Final = b"lock"
_RETRY_S: Final = 0.05
# struct flock, of which open file description locks use all but the process ID.
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BUSY: Final = frozenset((errno.EAGAIN, errno.EACCES))


@contextlib.contextmanager
def alone(directory: bytes, key: bytes, patience_s: float) -> Iterator[bool]:
    """Lock a key against other threads and processes while the block runs; yield True if one of
    them had it at first.

    A lock on one byte of the file ``upstream/lock`` stands for a key; the kernel releases it when
    its process ends. If it is kept for longer than ``patience_s``, the block runs without it.
    """
    try:
        path = os.path.join(directory, _NAME)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield False  # the store cannot be written, so no file can be added either
        return
    with closing_fd(fd):
        at = int.from_bytes(fingerprint(key, 8), "little") >> 2
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
        deadline = time.monotonic() + patience_s
        was_busy = False
        while not _taken(fd, lock) and time.monotonic() < deadline:
            was_busy = True
            time.sleep(_RETRY_S)
        yield was_busy


def _taken(fd: int, wanted: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _BUSY  # without locks a file may be fetched twice, at worst
    return True
