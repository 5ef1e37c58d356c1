# SPDX-License-Identifier: Apache-2.0
"""The history that a watch writes: each minute one row of the store's content and the losses."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Self

from buildidfs.catalog.containers import suffix
from buildidfs.catalog.survey import Surveyor
from buildidfs.errors import BuildIdFsError
from buildidfs.linux.threads import Background
from buildidfs.store.schema import MAX_HISTORY_GROUPS, MAX_HISTORY_NAME, HistoryGroup, HistoryRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.catalog.survey import Survey
    from buildidfs.store import CapturedContainer, Store
    from buildidfs.watch.state import WatchLimits, WatchState

log = logging.getLogger(__name__)

_CONTAINER: Final = 0
_IMAGE: Final = 1


class Minutes(Background):
    """Writes the history of a store within a ``with`` block, in a thread of its own.

    ``state`` returns the state of the watch. If a row cannot be written, as on a full disk, its
    counts are added to the next row.
    """

    def __init__(
        self,
        store: Store,
        state: Callable[[], WatchState],
        limits: WatchLimits,
    ) -> None:
        super().__init__("buildidfs-minutes")
        self._store = store
        self._state = state
        self._every_s = limits.row_s
        self._surveyor = Surveyor(store, limits.row_s, first_s=limits.first_row_s)
        self._captured = self._lost = 0

    def __enter__(self) -> Self:
        self._surveyor.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__()
        self._surveyor.__exit__()

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            try:
                self._write()
            except (BuildIdFsError, OSError) as error:
                log.info("no row of the history was written: %s", error)

    def _write(self) -> None:
        state, held, survey = self._state(), self._store.stats(), self._surveyor.latest
        captured = state.ingest.captured
        lost = sum(loss.count for loss in state.losses)
        counted = None if survey is None else survey.all
        row = HistoryRow(
            time_ns=time.time_ns(),
            build_ids=held.ids,
            blobs=held.blobs,
            stored_bytes=held.stored_bytes,
            index_bytes=held.index_bytes,
            free_bytes=held.free_bytes,
            counted=0 if counted is None else counted.build_ids,
            executable=0 if counted is None else counted.executable,
            symbols=0 if counted is None else counted.symbols,
            debuginfo=0 if counted is None else counted.debuginfo,
            captured=max(captured - self._captured, 0),
            lost=max(lost - self._lost, 0),
            lag_ms=int(state.lag_s * 1000),
            groups=() if survey is None else tuple(_groups(survey)),
        )
        self._store.history.add(row)
        self._captured, self._lost = captured, lost


def _groups(survey: Survey) -> Iterator[HistoryGroup]:
    """Yield the containers seen last, and as many images as a row has room for."""
    images = list(survey.images.items())[: MAX_HISTORY_GROUPS // 2]
    for each in survey.containers[: MAX_HISTORY_GROUPS - len(images)]:
        its = each.container
        shares = (each.shares.executable, each.shares.symbols, each.shares.debuginfo)
        counts = (round(share * each.build_ids) for share in shares)
        yield HistoryGroup(_CONTAINER, row_name(group_name(its)), each.build_ids, *counts)
    for name, counted in images:
        yield HistoryGroup(
            _IMAGE,
            row_name(name),
            counted.build_ids,
            counted.executable,
            counted.symbols,
            counted.debuginfo,
        )


def group_name(container: CapturedContainer) -> str:
    """Return the name under which a container has its rows: the name that its engine gives it, as
    long as the engine is root's.
    """
    return (container.called.shown or container.label) + suffix(container)


def row_name(name: str) -> str:
    """Return the name of a container or image as rows have it: valid UTF-8 of limited length."""
    plain = name.encode("utf-8", "surrogateescape")[:MAX_HISTORY_NAME]
    return plain.decode("utf-8", "replace")
