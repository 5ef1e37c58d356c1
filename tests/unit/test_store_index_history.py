# SPDX-License-Identifier: Apache-2.0
"""The history: rows come back, thin out with age, and are bounded whatever the clock does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from zlib import crc32

import lmdb
import msgspec
import pytest

from buildidfs.errors import StoreError
from buildidfs.store import Store, schema
from buildidfs.store.index.history import TIERS
from buildidfs.store.schema import HistoryGroup, HistoryRow
from tests.support.harness.damages import with_new_index

S = 1_000_000_000
DAY = 86_400
NOW = 1_700_006_400 * S  # a midnight


def row(time_ns: int, captured: int = 1, **fields: int) -> HistoryRow:
    return HistoryRow(time_ns, captured=captured, **fields)


def test_row_comes_back_as_it_was_written(store: Store) -> None:
    written = HistoryRow(
        NOW, 5, 6, 7, 8, 9, 5, 4, 3, 2, 10, 1, 250,
        (HistoryGroup(0, "shop/cart", 3, 3, 2, 1), HistoryGroup(1, "cart:1.4", 3, 3, 2, 1)),
    )  # fmt: skip
    store.history.add(written)
    assert list(store.history.since()) == [written]
    assert list(store.history.since(NOW + 1)) == []
    assert list(store.check()) == []


def test_rows_thin_out_with_age_and_lose_no_count(store: Store) -> None:
    minutes = 26 * 60
    for number in range(minutes):
        store.history.add(row(NOW + number * 60 * S, lost=int(number % 7 == 0), lag_ms=number))
    rows = list(store.history.since())
    end = NOW + (minutes - 1) * 60 * S
    ages = [(end - each.time_ns) // S for each in rows]
    steps = [(b.time_ns - a.time_ns) // S for a, b in pairwise(rows)]
    assert {step for age, step in zip(ages, steps, strict=False) if age < DAY} == {60}
    old = [step for age, step in zip(ages, steps, strict=False) if age > DAY + 1200]
    assert set(old) == {600}
    assert sum(each.captured for each in rows) == minutes
    assert sum(each.lost for each in rows) == -(-minutes // 7)
    assert rows[-1].lag_ms == minutes - 1
    assert list(store.check()) == []


def test_number_of_rows_has_a_bound(store: Store) -> None:
    count = 500 * 4
    for number in range(count):
        store.history.add(row(NOW + number * 6 * 3600 * S))
    rows = list(store.history.since())
    end = NOW + (count - 1) * 6 * 3600 * S
    assert len(rows) < 32 * 4 + 400 - 32 + 3
    assert end - rows[0].time_ns <= (TIERS[-1][0] + DAY) * S


def test_clock_that_was_ahead_leaves_nothing(store: Store) -> None:
    store.history.add(row(NOW + 9 * DAY * S))
    store.history.add(row(NOW))
    assert [each.time_ns for each in store.history.since()] == [NOW]


def test_most_rows_of_a_wild_clock_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "MAX_HISTORY", 10)
    for number in range(30):
        store.history.add(row(NOW + number * 60 * S))
    assert next(store.history.since()).time_ns == NOW + 20 * 60 * S


def test_row_is_not_written_to_a_store_that_is_only_read(store: Store) -> None:
    path = store.path
    store.close()
    with (
        Store.open(path, read_only=True) as reader,
        pytest.raises(StoreError, match="reading only"),
    ):
        reader.history.add(row(NOW))


def test_store_of_an_earlier_version_has_no_history(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store"):
        pass
    with (
        lmdb.open(str(tmp_path / "store/index"), max_dbs=64, map_size=1 << 24) as environment,
        environment.begin(write=True) as txn,
    ):
        txn.drop(environment.open_db(b"history", txn=txn))
    with Store.open(tmp_path / "store", read_only=True) as store:
        assert list(store.history.since()) == []
        assert list(store.check()) == []
    with Store.open(tmp_path / "store") as store:
        store.history.add(row(NOW))
        assert len(list(store.history.since())) == 1


@pytest.mark.parametrize("change", ["value", "key", "check"])
def test_damaged_row_is_found_and_goes(tmp_path: Path, change: str) -> None:
    with Store.create(tmp_path / "store") as store:
        for number in range(3):
            store.history.add(row(NOW + number * 60 * S))
    with (
        lmdb.open(str(tmp_path / "store/index"), max_dbs=64, map_size=1 << 24) as environment,
        environment.begin(write=True) as txn,
    ):
        table = environment.open_db(b"history", txn=txn, create=False)
        key, value = schema.pack_history(row(NOW + 60 * S))
        if change == "key":
            txn.put(schema.U64.pack(NOW + 61 * S), value, db=table)
        else:
            at = len(value) - 1 if change == "check" else 3
            txn.put(key, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :], db=table)
    with Store.open(tmp_path / "store") as store:
        assert len(list(store.check())) == 1
        assert len(list(store.history.since())) == (3 if change == "key" else 2)
        with with_new_index(store) as again:
            assert list(again.check()) == []
            assert len(list(again.history.since())) == (3 if change == "key" else 2)


def test_fields_of_later_versions_are_passed_over() -> None:
    fields = [*msgspec.structs.astuple(row(NOW)), "more"]
    body = msgspec.msgpack.encode(fields)
    key = schema.U64.pack(NOW)
    value = body + schema.CHECK.pack(crc32(body, crc32(key)))
    assert schema.unpack_history(key, value) == row(NOW)
