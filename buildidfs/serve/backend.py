# SPDX-License-Identifier: Apache-2.0
"""The store that is served, while others prune, repair, delete or replace it.

A store that was deleted can be read through its map as if it were there, and a new one in its place
knows files that the old one does not. So an absence counts only while the index that was asked is
the one at its place. A worker whose index is not ends, and the next one opens what is there.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buildidfs.errors import BuildIdFsError, StoreError
from buildidfs.serve.counters import Misses
from buildidfs.store import Store
from buildidfs.view import view_of

if TYPE_CHECKING:
    from collections.abc import Callable


class Backend:
    """An open store and its view, whose methods are thread-safe.

    ``misses`` are the build IDs that clients of the server asked for in vain.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        opened: Callable[[bytes], Store] | None = None,
        misses: Misses | None = None,
        worker: int = 0,
    ) -> None:
        """Open the store at ``path``, by ``opened``. Raises `StoreError`.

        ``misses`` are those of all workers, of which this is number ``worker``.
        """
        root = os.path.abspath(os.fsencode(path))
        self._data = os.path.join(root, b"index", b"data.mdb")
        self.store = Store.open(root, read_only=True) if opened is None else opened(root)
        try:
            self._identity = self._look()
            self.view = view_of(self.store)
            self.misses = misses or Misses()
            self.misses.choose(worker, self.view.misses.every)
        except (OSError, BuildIdFsError):
            self.store.close()
            raise

    def check(self) -> None:
        """Raise `StoreError` if the index that is open is not the one of the store any more."""
        if not self.is_current():
            raise StoreError(f"store {os.fsdecode(self.store.path)} was deleted or replaced")

    def is_current(self) -> bool:
        """Return True if the open index is that of the store."""
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
