# SPDX-License-Identifier: Apache-2.0
"""Reading all blobs now and then, slowly, while something else writes to the store.

Disks forget, and nobody notices who does not read. Each blob is read about once a month, at a rate
that disturbs nobody; where it was broken off is kept in the store. What is damaged is captured
again, or goes to quarantine, see `checking`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs import config
from buildidfs.errors import BuildIdFsError
from buildidfs.linux import scheduling

if TYPE_CHECKING:
    from buildidfs.config import Settings
    from buildidfs.store import Store
    from buildidfs.store.schema.schema import DigestRow

EVERY_S: Final = 30 * 86_400
"""What was read, or written, within that time is not read."""

_PAUSE_S: Final = 3600.0
_FIRST_S: Final = 60.0

_log = logging.getLogger(__name__)


class _Ended(Exception):
    """The block is over, in the middle of a file."""


class Scrubbing:
    """Reads blobs of a store in a thread of its own, within a ``with`` block.

    What is found is logged. ``first_s`` is how long it waits before it begins, in seconds.
    """

    def __init__(self, store: Store, settings: Settings, first_s: float = _FIRST_S) -> None:
        self._store = store
        self._settings = settings
        self._rate = config.size(settings.check.scrub_rate)
        self._first_s = first_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buildidfs-scrub", daemon=True)

    def __enter__(self) -> Scrubbing:
        if self._rate > 0:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        scheduling.stand_back()
        wait = self._first_s
        while not self._ending.wait(wait):
            wait = _PAUSE_S
            try:
                self._read_all()
            except _Ended:
                return
            except BuildIdFsError as error:
                _log.warning("cannot read the blobs: %s", error)
            except Exception:
                # Capturing does not depend on it.
                _log.exception("cannot read the blobs")

    def _read_all(self) -> None:
        damaged = False
        checker = self._store.checker()
        for fault in checker.scrub(self._pace, _is_due):
            _log.error("%s", fault.text)
            damaged = True
        if damaged:
            self._restore()

    def _restore(self) -> None:
        from buildidfs.app.upkeep import check

        for result in check.restore(self._store, self._settings):
            level = logging.ERROR if result.state == "lost" else logging.WARNING
            _log.log(level, "%s", result.fault.text)

    def _pace(self, size: int) -> None:
        if self._ending.wait(size / self._rate):
            raise _Ended


def _is_due(row: DigestRow) -> bool:
    last = max(row.verified, row.ctime_ns // 1_000_000_000)
    return time.time() - last > EVERY_S
