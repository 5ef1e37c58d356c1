# SPDX-License-Identifier: Apache-2.0
"""When the store is said to be in trouble, and when somebody is sent to look for what was lost."""

from __future__ import annotations

import math
import time

import pytest

from buildidfs.errors import StoreError, StoreFull
from buildidfs.ingest.committer import Trouble, WatchCounters

FULL = StoreFull("store /s: full")


def test_it_is_over_when_bytes_and_rows_can_be_written() -> None:
    counters = WatchCounters()
    trouble = Trouble(counters, lambda: None)
    trouble.passed()
    assert not trouble
    trouble.failed(FULL)
    trouble.failed(FULL, rows=True)
    assert trouble
    assert counters.store_error == "store /s: full"
    assert counters.store_full_since == pytest.approx(time.time(), abs=60)
    assert trouble.rows_at > time.monotonic()
    trouble.passed()
    assert trouble
    assert trouble.probe_at == math.inf
    trouble.passed(rows=True)
    assert not trouble
    assert (counters.store_error, counters.store_full_since) == ("", 0)
    assert trouble.recover_at == math.inf, "nothing was lost"


def test_only_a_full_store_is_full() -> None:
    counters = WatchCounters()
    Trouble(counters, lambda: None).failed(StoreError("locked"))
    assert (counters.store_error, counters.store_full_since) == ("locked", 0)


def test_what_was_lost_is_looked_for_less_and_less_often() -> None:
    """A store without room for one huge file, and with room for the others."""
    trouble = Trouble(WatchCounters(), lambda: None)
    pauses = []
    for _ in range(9):
        trouble.failed(FULL)
        trouble.lost()
        trouble.passed()
        pauses.append(max(trouble.recover_at - time.monotonic(), 0))
        trouble.recovered()
        assert trouble.recover_at == math.inf
    assert pauses == pytest.approx([0, 10, 20, 40, 80, 160, 320, 600, 600], abs=5)


def test_each_kind_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(WatchCounters(), lambda: None)
    for _ in range(5):
        trouble.failed(FULL)
        trouble.passed()
    trouble.failed(StoreError("store /s: locked"))
    assert [record.getMessage() for record in caplog.records] == [
        "store /s: full; trying again until it can be written",
        "the store can be written again",
        "store /s: locked; trying again until it can be written",
    ]
