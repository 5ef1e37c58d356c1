# SPDX-License-Identifier: Apache-2.0
"""The past of a store: a row a minute of how much it held, thinned with age."""

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
"""Up to which age (s) one row is kept in how many seconds. Older rows go."""

_MOST_MERGED: Final = 256
_AHEAD_NS: Final = 3600 * _S


class History:
    """Reads and writes of the history. A store of an earlier version that is only read has none."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._table = environment.tables.get("history")

    def since(self, since_ns: int = 0) -> Iterator[HistoryRow]:
        """Rows of that time or later, in order of time; damaged ones are left out."""
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
        """Write a row, and put some older ones together. Raises `StoreFull`, `StoreError`."""
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
    """The rows to be put together: groups, in each of which the last one stays.

    A group of one is of a row that goes: it is too old, or of a time that has not come.
    """
    kept = len(keys) - schema.MAX_HISTORY
    groups = []
    for slot, members in groupby(keys, lambda key: _slot(key, now_ns)):
        group = list(members)
        if slot is None:
            groups += [[key] for key in group]
        elif len(group) > 1:
            groups.append(group)
    # More than that are only there after the clock was set back and forth.
    return groups + [[key] for key in keys[: max(kept, 0)]]


def _slot(key: bytes, now_ns: int) -> tuple[int, int] | None:
    """The span of time that a row stands for; None for a row that goes."""
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
    """Put rows together into the last one; a single one is removed."""
    rows = []
    for key in keys:
        value = txn.get(key, db=table)
        try:
            rows.append(schema.unpack_history(key, value or b""))
        except DAMAGE:
            continue  # it goes, as the others do
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
