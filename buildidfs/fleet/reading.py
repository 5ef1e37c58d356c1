# SPDX-License-Identifier: Apache-2.0
"""Open a store together with the buckets of the fleet; keep the files that were read from the
buckets.

A mount and a server open their store for reading only. So a separate process commits the complete
files. It gets the bytes through a descriptor, and ends after the commit.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Final

from buildidfs import config
from buildidfs.ingest import upkeep
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Trust

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.config import Settings
    from buildidfs.fleet.remote_files import RemoteFile
    from buildidfs.store import Store

_log = logging.getLogger(__name__)

_WAITING: Final = 64
_COMMIT_S: Final = 600.0


def opener(settings: Settings, *, private: bool = True) -> Callable[[bytes], Store] | None:
    """Return a function that opens a store with the buckets of the settings.

    Returns None if there are none to read from. Without ``private``, the bucket of private files is
    left out.
    """
    remote = settings.remote
    if not remote.read or not (remote.url or remote.tiers):
        return None
    return lambda path: _opened(path, settings, private=private)


def _opened(path: bytes, settings: Settings, *, private: bool) -> Store:
    """Open a store with its buckets. Raises `UsageError`, `StoreError`."""
    from buildidfs.fleet.remote_files import RemoteFiles, Tier
    from buildidfs.fleet.tiered_store import TieredStore

    remote = settings.remote
    tiers = [Tier(each.url, Trust[each.trust.upper()]) for each in remote.tiers]
    if remote.url:
        tiers.append(Tier(remote.url, Trust[remote.trust.upper()]))
    if remote.private and private:
        tiers.append(Tier(remote.private, Trust[remote.trust.upper()], private=True))

    def make(root: bytes) -> RemoteFiles:
        keeper = RemoteCommitter(root, settings)
        return RemoteFiles(tiers, root, keeper.keep, config.seconds(remote.refresh))

    return TieredStore.over(path, make)


class RemoteCommitter:
    """Commits remote files to a store in another process, one after another.

    `keep` does not wait for a commit, and a failed commit is only logged.
    """

    def __init__(self, store_path: bytes, settings: Settings) -> None:
        self._store_path = store_path
        self._settings = settings
        self._queue: queue.Queue[tuple[RemoteFile, int]] = queue.Queue(_WAITING)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def keep(self, file: RemoteFile, fd: int) -> None:
        """Commit a file with the bytes of ``fd``, unless too many wait; duplicates the
        descriptor.
        """
        if not os.access(self._store_path, os.W_OK):
            return
        own = os.dup(fd)
        try:
            self._queue.put_nowait((file, own))
        except queue.Full:
            os.close(own)  # a later reader fetches it again from the bucket
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="buildidfs-keep", daemon=True
                )
                self._thread.start()

    def _run(self) -> None:
        while True:
            file, fd = self._queue.get()
            with closing_fd(fd):
                try:
                    self._commit(file, fd)
                except OSError as error:
                    _log.warning("cannot store %s: %s", file.key, error.strerror)

    def _commit(self, file: RemoteFile, fd: int) -> None:
        from buildidfs.fleet.tiered_store import origin_of

        kind = int(file.artifact.kind)
        copied = upkeep.CopiedFile(origin_of(file).origin, bytes(file.build_id), kind)
        started = upkeep.start_writer(self._store_path, self._settings, copied, fd)
        if started.wait(_COMMIT_S) is None:
            started.end(1.0)
            _log.warning("cannot store %s: the store takes too long", file.key)
