# SPDX-License-Identifier: Apache-2.0
"""The history that a watch writes: rows of counts, none where there is no room."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs.capture.live.protocol import Counts
from buildidfs.ingest.committer import WatchCounters
from buildidfs.store import Store
from buildidfs.store.schema import MAX_HISTORY_NAME
from buildidfs.watch.history_writer import Minutes, row_name
from buildidfs.watch.state import LossCount, WatchLimits, WatchState
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.waiting import until
from tests.support.servers import pagestore

LIMITS = WatchLimits(row_s=0.05)


class Watching:
    """How a watch does, as a test says."""

    def __init__(self) -> None:
        self.captured = self.lost = 0

    def state(self) -> WatchState:
        losses = (LossCount("gone", "", 0, self.lost, 0),)
        counters = WatchCounters(captured=self.captured)
        state = WatchState("following", (), Counts(), counters, 0, 0, 1, 0, True)
        return msgspec.structs.replace(state, losses=losses, lag_s=0.25)


def test_rows_have_what_the_store_has_and_what_happened_since(tmp_path: Path) -> None:
    pagestore.make(tmp_path / "store", many=6)
    watching = Watching()
    with Store.open(tmp_path / "store") as store:
        watching.captured, watching.lost = 7, 2
        with Minutes(store, watching.state, LIMITS):
            until(lambda: list(store.history.since()), "the first row")
            watching.captured = 10
            until(lambda: sum(each.captured for each in store.history.since()) == 10, "the next")
        rows = list(store.history.since())
        held = store.stats()
    assert len(rows) <= 2  # one a minute
    assert sum(each.lost for each in rows) == 2
    assert rows[0].lag_ms == 250
    assert (rows[0].build_ids, rows[0].stored_bytes) == (held.ids, held.stored_bytes)


def test_rows_have_the_coverage_of_public_containers_and_images(tmp_path: Path) -> None:
    pagestore.make(tmp_path / "store", many=6)
    with Store.open(tmp_path / "store") as store:
        minutes = Minutes(store, Watching().state, msgspec.structs.replace(LIMITS, first_row_s=0.0))
        with minutes:
            until(lambda: any(each.counted for each in store.history.since()), "a count")
        row = [each for each in store.history.since() if each.counted][-1]
    assert (row.counted, row.executable) == (12, 12)
    named = {(each.kind, each.name): each for each in row.groups}
    assert {name for _, name in named} >= {"shop/cart-7d9f/cart", "registry.example/cart:1.4"}
    assert not any("hidden" in name for _, name in named)
    assert named[0, "shop/cart-7d9f/cart"].build_ids == 5


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 4 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=4m", "tmpfs", point], check=True)
    yield point
    unmount(point)


@pytest.mark.root
def test_full_disk_costs_rows_and_nothing_else(
    small: Path, caplog: pytest.LogCaptureFixture
) -> None:
    watching = Watching()
    with Store.create(small / "store") as store:
        ballast = small / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, os.statvfs(small).f_bavail * 4096)
        watching.captured = 5
        caplog.set_level("INFO")
        with Minutes(store, watching.state, LIMITS):
            until(lambda: "no row of the history" in caplog.text, "a row that is not written")
            assert list(store.history.since()) == []
            watching.captured = 9
            ballast.unlink()
            until(lambda: list(store.history.since()), "a row once there is room")
        rows = list(store.history.since())
        assert rows[0].captured == 9
        assert list(store.check()) == []


def test_name_of_a_stranger_is_cut() -> None:
    assert len(row_name("x" * 5000)) == MAX_HISTORY_NAME
    assert row_name("a\udcff") == "a\ufffd"
