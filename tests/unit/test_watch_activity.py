# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.status: rates of a few looks, and a watch that was started anew."""

from __future__ import annotations

from typing import Any

from buildidfs.answers import Process, Removed, Status, Verdict
from buildidfs.catalog.containers import Names
from buildidfs.watch.status import Activity

SOURCE = {"container": "docker:ab", "bytes": 5, "last": 1.0}


def look(
    captured: int, *, stored: int = 0, requests: int = 0, since: int = 1, **more: Any
) -> Status:
    """A status with a watch and a mount."""
    sources = [{**SOURCE, "captured": captured}]
    facts = {"captured": captured, "sources": sources, **more}
    processes = [
        Process("watch", "running", 7, since, facts=facts),
        Process("mount", "running", 8, 1.0, mountpoint="/buildid", facts={"requests": requests}),
    ]
    return Status(
        store="/s", build_ids=0, blob_bytes=0, stored_bytes=stored, jit_bytes=0, index_bytes=0,
        free_bytes=0, pins=0, evicted=Removed(0, 0, 0, 0, []),
        omitted=0, max_size=None, keep_free=0,
        max_age=None, min_age=0, configured=None, verdict=Verdict.HEALTHY, well=True, findings=[],
        processes=processes,
    )  # fmt: skip


def test_rates_of_the_last_half_minute() -> None:
    activity = Activity()
    first = activity.add(look(10, stored=100), Names(), 0)
    assert (first.rate, first.growth, first.rows[0].rate) == (None, None, None)
    view = activity.add(look(40, stored=600, requests=20), Names(), 10)
    assert (view.rate, view.growth, view.rows[0].rate) == (3.0, 50.0, 3.0)
    assert view.mounts[0].rate == 2.0
    view = activity.add(look(65, stored=600), Names(), 35)
    assert (view.rate, view.growth) == (1.0, 0.0)


def test_watch_that_was_started_anew_has_no_negative_rate() -> None:
    activity = Activity()
    activity.add(look(1000), Names(), 0)
    assert activity.add(look(5, since=2), Names(), 10).rate is None
    assert activity.add(look(15, since=2), Names(), 20).rate == 1.0


def test_container_that_only_lost_files_has_a_row() -> None:
    losses = [
        {"container": label, "reason": reason, "count": 2, "recent": 1}
        for label in ("docker:cd", "docker:ab")
        for reason in ("one", "two")
    ]
    rows = Activity().add(look(1, losses=losses), Names(), 0).rows
    assert [(row.container, row.captured, row.lost, row.recent) for row in rows] == [
        ("docker:ab", 1, 4, 2), ("docker:cd", 0, 4, 2),
    ]  # fmt: skip


def test_facts_that_this_version_cannot_read_count_as_none() -> None:
    view = Activity().add(look(1, losses=[{"container": 5}]), Names(), 0)
    assert (view.facts, view.rows) == (None, [])
