# SPDX-License-Identifier: Apache-2.0
"""One fetch of a file at a time, for all threads of a process and all processes of a store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import fingerprint

T = TypeVar("T")

_NAME: Final = b"lock"
_RETRY_S: Final = 0.05
# struct flock, of which open file description locks use all but the process ID.
_FLOCK: Final = struct.Struct("@hhqqi4x")
_BUSY: Final = frozenset((errno.EAGAIN, errno.EACCES))


class Flights(Generic[T]):
    """The running fetches, by key.

    Between processes a lock on one byte of the file ``upstream/lock`` stands for a key; the kernel
    releases the lock when its process ends. ``patience_s`` is the time to wait for another process.
    """

    def __init__(self, directory: bytes, patience_s: float) -> None:
        self._path = os.path.join(directory, _NAME)
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._flights: dict[bytes, Future[T]] = {}

    def run(self, key: bytes, work: Callable[[], T]) -> T:
        """Run ``work``, or wait for another thread that runs it for the same key.

        The result is the same for both: the value or the exception of ``work``.
        """
        with self._lock:
            flight = self._flights.get(key)
            is_ours = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if not is_ours:
            return flight.result()
        try:
            with self._alone(key):
                flight.set_result(work())
        except BaseException as error:
            flight.set_exception(error)
        finally:
            with self._lock:
                del self._flights[key]
        return flight.result()

    @contextlib.contextmanager
    def _alone(self, key: bytes) -> Iterator[None]:
        """Lock a key against other processes while the block runs.

        If another process keeps the lock too long, the block runs without it.
        """
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            yield  # the store cannot be written, so no file can be added either
            return
        with closing_fd(fd):
            at = int.from_bytes(fingerprint(key, 8), "little") >> 2
            wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, 1, 0)
            deadline = time.monotonic() + self._patience_s
            while not _taken(fd, wanted) and time.monotonic() < deadline:
                time.sleep(_RETRY_S)
            yield


def _taken(fd: int, wanted: bytes) -> bool:
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except OSError as error:
        return error.errno not in _BUSY  # without locks a file may be fetched twice, at worst
    return True
