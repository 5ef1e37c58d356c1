# SPDX-License-Identifier: Apache-2.0
"""The upkeep of a store that something else writes to: its limits, and what was left behind."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs import config
from buildidfs.errors import BuildIdFsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.config import Settings
    from buildidfs.store import Store

UPKEEP_S: Final = 60.0
"""Between two looks at what has become too old, or too much, while nothing is captured."""

_COLLECT_S: Final = 24 * 3600.0

_log = logging.getLogger(__name__)


def compress_after(settings: Settings) -> int | None:
    """The age in seconds at which what nobody uses is to be compressed; None is never."""
    age = settings.retention.compress_after
    return None if age is None else config.seconds(age)


def compress(
    store: Store, after: int, enough: Callable[[], bool] = lambda: False
) -> tuple[int, int, int]:
    """Compress what was not used for so many seconds; ``enough`` ends it early.

    Returns how many blobs that were, and the bytes they took before and take now. Raises
    `StoreError`.
    """
    count = before = now = 0
    for _, done in store.compress(int(time.time()) - after, enough):
        count, before, now = count + 1, before + done.before, now + done.after
    if count:
        _log.info("compressed %d blobs, from %d to %d bytes", count, before, now)
    return count, before, now


class Upkeep:
    """Keeps a store within its policy and clean while something else writes to it.

    A context manager: a thread of its own works within the block. What goes wrong is logged.
    """

    def __init__(
        self, store: Store, every_s: float = UPKEEP_S, *, compress_after: int | None = None
    ) -> None:
        """``compress_after`` is the age in seconds at which what nobody uses is compressed."""
        self._store = store
        self._every_s = every_s
        self._compress_after = compress_after
        self._ending = threading.Event()
        self._collected = time.monotonic() - _COLLECT_S
        self._thread = threading.Thread(target=self._run, name="buildidfs-upkeep", daemon=True)

    def __enter__(self) -> Upkeep:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            try:
                self._tend()
            except BuildIdFsError as error:
                _log.warning("cannot look after the store: %s", error)
            except Exception:
                # Capturing does not depend on it.
                _log.exception("cannot look after the store")

    def _tend(self) -> None:
        self._store.enforce()
        now = time.monotonic()
        if now - self._collected >= _COLLECT_S:
            self._collected = now
            self._store.collect()
            if self._compress_after is not None:
                compress(self._store, self._compress_after, self._ending.is_set)
