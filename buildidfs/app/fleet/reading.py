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
import sys
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import config
from buildidfs.errors import BuildIdFsError
from buildidfs.linux import child as child_process
from buildidfs.linux import threads
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId, Kind, Origin, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.config import Settings
    from buildidfs.resolve.remote_files import RemoteFile
    from buildidfs.store import Store

_log = logging.getLogger(__name__)

_WAITING: Final = 64
_COMMIT_S: Final = 600.0


class _Order(msgspec.Struct):
    """A file to commit."""

    store: bytes
    settings: bytes
    origin: Origin
    build_id: bytes
    kind: int


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
    from buildidfs.resolve.remote_files import RemoteFiles, Tier
    from buildidfs.resolve.tiered_store import TieredStore

    remote = settings.remote
    tiers = [Tier(each.url, Trust[each.trust.upper()]) for each in remote.tiers]
    if remote.url:
        tiers.append(Tier(remote.url, Trust[remote.trust.upper()]))
    if remote.private and private:
        tiers.append(Tier(remote.private, Trust[remote.trust.upper()], private=True))

    def make(root: bytes) -> RemoteFiles:
        keeper = Keeper(root, settings)
        return RemoteFiles(tiers, root, keeper.keep, config.seconds(remote.refresh))

    return TieredStore.over(path, make)


class Keeper:
    """Commits remote files to a store in another process, one after another.

    `keep` does not wait for a commit, and a failed commit is only logged.
    """

    def __init__(self, store_path: bytes, settings: Settings) -> None:
        self._store_path = store_path
        self._settings = msgspec.json.encode(settings)
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
        from buildidfs.resolve.tiered_store import origin_of

        order = _Order(
            self._store_path,
            self._settings,
            origin_of(file).origin,
            bytes(file.build_id),
            file.artifact.kind,
        )
        # The settings may have passwords, but each user may read the arguments of a process.
        with open(os.memfd_create("buildidfs-order"), "wb", buffering=0) as told:
            told.write(msgspec.msgpack.encode(order))
            words = (str(fd), str(told.fileno()))
            program = child_process.python(__name__, *words, paths=list(filter(None, sys.path)))
            started = child_process.start(
                [sys.executable, "-I", *program],
                stdout=child_process.DEVNULL,
                cwd="/",
                pass_fds=(fd, told.fileno()),
            )
        if started.wait(_COMMIT_S) is None:
            started.end(1.0)
            _log.warning("cannot store %s: the store takes too long", file.key)


def main(words: Sequence[str]) -> None:
    """Commit one file. The arguments are descriptors of its bytes and of an order of `Keeper`."""
    from buildidfs.app import upkeep
    from buildidfs.capture.base import PinnedFile
    from buildidfs.ingest import Ingest

    fd, order_fd = map(int, words)
    with open(order_fd, "rb") as file:
        file.seek(0)
        order = msgspec.msgpack.decode(file.read(), type=_Order)
    threads.stand_back()
    settings = msgspec.json.decode(order.settings, type=config.Settings)
    kind = Kind(order.kind)
    given = kind if kind in (Kind.VDSO, Kind.KALLSYMS) else None
    sighting = Sighting(order.origin, time.time_ns())
    pinned = PinnedFile(sighting, fd, given, BuildId(order.build_id), is_copy=True)
    try:
        with upkeep.open_for_capture(order.store, settings) as store:
            Ingest(store).run([pinned])
    except BuildIdFsError as error:
        raise SystemExit(f"buildidfs: cannot store a file of the bucket: {error}") from None
