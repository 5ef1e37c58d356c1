# SPDX-License-Identifier: Apache-2.0
"""The history of a store: one row per minute with its contents; older rows are thinned out."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.store import schema
from buildidfs.store.index.queries import DAMAGE, prefixed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from buildidfs.store.index.environment import Environment, Table, Txn
    from buildidfs.store.schema import HistoryRow

_S: Final = 1_000_000_000
_DAY_S: Final = 86_400

TIERS: Final = (
    (_DAY_S, 60), (7 * _DAY_S, 600), (32 * _DAY_S, 3600), (400 * _DAY_S, _DAY_S),
)  # fmt: skip
"""Pairs (age, interval) in seconds: of the rows up to that age, one per interval is kept. Rows
beyond the last age are removed.
"""

_MOST_MERGED: Final = 256
_AHEAD_NS: Final = 3600 * _S


class History:
    """Reads and writes of the history. A store of an earlier version that is open for reading only
    has none.
    """

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._table = environment.tables.get("history")

    def since(self, since_ns: int = 0) -> Iterator[HistoryRow]:
        """Yield the rows from a time on, in order of time; damaged rows are skipped."""
        if self._table is None:
            return
        with self._env.read() as txn:
            start = schema.U64.pack(max(since_ns, 0))
            rows = list(prefixed(txn, self._table, b"", start))
        for key, value in rows:
            try:
                yield schema.unpack_history(key, value)
            except DAMAGE:
                continue  # `check` reports it

    def add(self, row: HistoryRow) -> None:
        """Write a row, and merge some older ones. Raises `StoreFull`, `StoreError`."""
        table = self._env.tables["history"]
        key, value = schema.pack_history(row)

        def write(txn: Txn) -> None:
            txn.put(key, value, db=table)
            with txn.cursor(table) as cursor:
                keys = list(cursor.iternext(keys=True, values=False))
            for each in _too_many(keys, row.time_ns)[:_MOST_MERGED]:
                _merge(txn, table, each)

        self._env.write(write)


def _too_many(keys: Sequence[bytes], now_ns: int) -> list[list[bytes]]:
    """Return groups of old rows to reduce: of several rows the last one stays, and a single row is
    removed.

    A single row is removed because it is too old, or because its time is in the future.
    """
    kept = len(keys) - schema.MAX_HISTORY
    groups = []
    for slot, members in groupby(keys, lambda key: _slot(key, now_ns)):
        group = list(members)
        if slot is None:
            groups += [[key] for key in group]
        elif len(group) > 1:
            groups.append(group)
    # There are more than that only if the clock was set back and forth.
    return groups + [[key] for key in keys[: max(kept, 0)]]


def _slot(key: bytes, now_ns: int) -> tuple[int, int] | None:
    """Return the interval that a row stands for; None for a row that is to be removed."""
    if len(key) != schema.U64.size:
        return None
    time_ns = int.from_bytes(key, "big")
    if time_ns > now_ns + _AHEAD_NS:
        return None
    for age_s, step_s in TIERS:
        end = -(-time_ns // (step_s * _S)) * step_s * _S
        if now_ns - end < age_s * _S:
            return step_s, end
    return None


def _merge(txn: Txn, table: Table, keys: Sequence[bytes]) -> None:
    """Merge rows into the last one; a single row is removed."""
    rows = []
    for key in keys:
        value = txn.get(key, db=table)
        try:
            rows.append(schema.unpack_history(key, value or b""))
        except DAMAGE:
            continue  # it is removed below with the others
    for key in keys:
        txn.delete(key, db=table)
    if len(keys) > 1 and rows:
        merged = msgspec.structs.replace(
            rows[-1],
            captured=sum(row.captured for row in rows),
            lost=sum(row.lost for row in rows),
            lag_ms=max(row.lag_ms for row in rows),
        )
        key, value = schema.pack_history(merged)
        txn.put(key, value, db=table)
