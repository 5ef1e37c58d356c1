# SPDX-License-Identifier: Apache-2.0
"""The build IDs that commits to a store change, for a push that follows the store."""

from __future__ import annotations

import select
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from buildidfs.store.coordination import ChangeListener

_SETTLE_S: Final = 1.0
_POLL_S: Final = 60.0
_LISTEN_S: Final = 0.5
_MOST_CHANGES: Final = 100_000


class Changes:
    """Collects the ordinals that commits change, in a thread, so that commits never wait for a
    network.

    A context manager.
    """

    def __init__(self, listener: ChangeListener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._ordinals: set[int] | None = set()
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buildidfs-changes", daemon=True)

    def __enter__(self) -> Changes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], _LISTEN_S)[0]:
                continue
            found = self._listener.receive()
            self._listener.acknowledge()
            if found is None:
                continue
            with self._lock:
                if not found or self._ordinals is None:
                    self._ordinals = None
                else:
                    self._ordinals.update(found)
                    if len(self._ordinals) > _MOST_CHANGES:
                        self._ordinals = None
            self._news.set()

    def take(self) -> set[int] | None:
        """Return the changes since the last call; None if everything may have changed."""
        self._news.clear()
        with self._lock:
            taken, self._ordinals = self._ordinals, set()
        return taken

    def wait(self, stop: threading.Event) -> set[int] | None:
        """Wait for a change, and a little longer for further changes; None if everything may have
        changed.
        """
        for _ in range(int(_POLL_S / _SETTLE_S)):
            if stop.wait(_SETTLE_S):
                return set()
            if self._news.is_set():
                return self.take()
        return set()
