# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.dir_handles: whose handle a directory's is, and what is kept for it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from buildidfs.mount.dir_handles import MOST, DirHandles
from buildidfs.view import PUBLIC, nodes
from tests.support.callers import Who, calling
from tests.support.children import needs_root

OWN = 1000
NODES = [nodes.ROOT, nodes.of_id(7, nodes.SLOT_VARIANTS), nodes.of_path(2**31 - 1),
         nodes.of_dwz(b"x"), nodes.of_perf_id(2**31 - 1, 2**31 - 1)]  # fmt: skip


def ctx(uid: int, gid: int = 5, pid: int | None = None) -> Any:
    """Somebody who asks; the process is ours unless it matters."""
    return SimpleNamespace(uid=uid, gid=gid, pid=os.getpid() if pid is None else pid)


@pytest.fixture
def listings() -> DirHandles:
    return DirHandles(everything=False, own=OWN)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("uid", [0, OWN])
def test_nothing_is_kept_for_who_sees_everything(listings: DirHandles, node: int, uid: int) -> None:
    handle = listings.open(node, ctx(uid))
    assert handle == node
    assert listings.viewer_of(handle) == (node, None)
    listings.release(handle)
    assert len(listings) == 0
    everything = DirHandles(everything=True, own=OWN)
    assert everything.open(node, None) == node  # type: ignore[arg-type]  # not looked at


@pytest.mark.parametrize("node", NODES)
def test_others_are_told_apart(listings: DirHandles, node: int) -> None:
    handles = [listings.open(node, ctx(uid, gid)) for uid, gid in ((7, 5), (7, 6), (8, 5))]
    assert len({*handles, node}) == 4
    assert max(handles) < 1 << 64
    for handle, (uid, gid) in zip(handles, ((7, 5), (7, 6), (8, 5)), strict=True):
        found, reader = listings.viewer_of(handle)
        assert found == node
        assert reader is not None
        assert (reader.uid, reader.groups) == (uid, frozenset((gid, *os.getgroups())))
    listings.release(handles[1])
    assert len(listings) == 2
    assert listings.viewer_of(handles[0])[0] == node


@needs_root("becomes another user")
def test_all_their_groups_are_known(listings: DirHandles) -> None:
    with calling(Who(7, 5, (11, 12))) as caller:
        _, reader = listings.viewer_of(listings.open(1, ctx(7, 5, caller.pid)))
    assert reader is not None
    assert reader.groups == frozenset((5, 11, 12))


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 40])
def test_groups_that_cannot_be_told(listings: DirHandles, pid: int) -> None:
    _, reader = listings.viewer_of(listings.open(1, ctx(7, 5, pid)))
    assert reader is not None
    assert (reader.uid, reader.groups) == (7, None)


@pytest.mark.parametrize("node", NODES)
def test_too_many_are_listed_what_everybody_may_read(node: int) -> None:
    listings = DirHandles(everything=False, own=OWN, most=6)
    kept = [listings.open(node, ctx(7)) for _ in range(3)]
    handle = listings.open(node, ctx(7))
    assert listings.viewer_of(handle) == (node, PUBLIC)
    listings.release(handle)
    assert len(listings) == 3
    listings.release(kept[0])
    _, reader = listings.viewer_of(listings.open(node, ctx(7)))
    assert reader is not PUBLIC


def test_user_with_many_open_directories_leaves_others_theirs() -> None:
    listings = DirHandles(everything=False, own=OWN, most=100)
    for _ in range(1000):
        listings.open(nodes.ROOT, ctx(7))
    for uid in (8, 9, 10):
        handles = [listings.open(nodes.ROOT, ctx(uid)) for _ in range(5)]
        assert all(listings.viewer_of(handle)[1] is not PUBLIC for handle in handles)


def test_closed_directory_has_no_viewer(listings: DirHandles) -> None:
    handle = listings.open(nodes.ROOT, ctx(7))
    listings.release(handle)
    listings.release(handle)
    assert listings.viewer_of(handle)[1] == PUBLIC


def test_handles_are_not_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildidfs.mount.dir_handles._LAST", 4)
    listings = DirHandles(everything=False, own=OWN, most=8)
    handles = [listings.open(1, ctx(7)) for _ in range(3)]
    for _ in range(10):
        handle = listings.open(1, ctx(7))
        assert handle not in handles
        listings.release(handle)
    assert MOST < 1 << 28, "there is always one left"
