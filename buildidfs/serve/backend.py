# SPDX-License-Identifier: Apache-2.0
"""The store that is served, while other processes prune, repair, delete or replace it.

A deleted store can still be read through its map, and a new store in its place has files that the
old one lacks. So an absence counts only while the open index is the one at the store's path. If it
is not, the worker ends, and the next worker opens the new index.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buildidfs.errors import BuildIdFsError, StoreError
from buildidfs.fleet import reading
from buildidfs.store import Store
from buildidfs.view import view_of

if TYPE_CHECKING:
    from buildidfs.config import Settings
    from buildidfs.serve.counters import SharedMisses


class Backend:
    """An open store and its view. Methods are thread-safe.

    ``misses`` are the missing build IDs that clients of the server requested.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: Settings,
        misses: SharedMisses,
        worker: int,
    ) -> None:
        """Open the store at ``path`` with the buckets of the settings. Raises `StoreError`.

        ``misses`` are the lists of all workers; ``worker`` is the number of this one.
        """
        root = os.path.abspath(os.fsencode(path))
        self._data = os.path.join(root, b"index", b"data.mdb")
        opened = reading.opener(settings, private=False)
        self.store = Store.open(root, read_only=True) if opened is None else opened(root)
        self.settings = settings
        try:
            self._identity = self._look()
            self.view = view_of(self.store)
            self.misses = misses
            self.misses.choose(worker, self.view.misses.every)
        except (OSError, BuildIdFsError):
            self.store.close()
            raise

    def check(self) -> None:
        """Raise `StoreError` if another index than the open one is now at the store's path."""
        if not self.is_current():
            raise StoreError(f"store {os.fsdecode(self.store.path)} was deleted or replaced")

    def is_current(self) -> bool:
        """Return True if the open index is the one at the store's path."""
        try:
            return self._look() == self._identity
        except OSError:
            return False

    def _look(self) -> tuple[int, int]:
        status = os.stat(self._data)
        return status.st_dev, status.st_ino

    def close(self) -> None:
        """Close the store; safe to call twice."""
        self.store.close()
