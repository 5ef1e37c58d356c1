# SPDX-License-Identifier: Apache-2.0
"""The missing build IDs that clients of a server asked for, in lists of several workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.model import BuildId
from buildidfs.serve import counters
from buildidfs.serve.counters import MissedId, SharedMisses, most_frequent
from buildidfs.shares import Share
from buildidfs.view.layouts import browse

if TYPE_CHECKING:
    from buildidfs.store import Store

FLOOD = 5000


def test_client_that_asks_for_many_build_ids_keeps_those_of_others(store: Store) -> None:
    """Another worker reads them, and the page shows fewer than the worker keeps."""
    lists = SharedMisses(2)
    own = browse.Misses(store)
    lists.choose(0, own.every)
    victim = BuildId(b"\1" * 20)
    own.note_build_id(victim, 0, share=Share("client 192.0.2.1"))
    for number in range(FLOOD):
        for _ in range(2):
            made = BuildId(number.to_bytes(20, "big"))
            own.note_build_id(made, 0, share=Share("client 192.0.2.66"))
    lists.publish()
    lists._worker = 1
    lists._own = list
    found = lists.every()
    assert len(found) == counters.MOST
    shown = most_frequent(found, 50)
    assert len(shown) == 50
    assert bytes(victim) in {each.build_id for each in shown}


def test_most_frequent_come_first() -> None:
    rows = [MissedId(bytes([n]), 0, count, 0.0, float(n)) for n, count in enumerate((1, 3, 2, 3))]
    assert [each.build_id for each in most_frequent(rows, 3)] == [b"\3", b"\1", b"\2"]
