# SPDX-License-Identifier: Apache-2.0
"""The default limits hold on small filesystems, and what is gone outlives what this host has."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from tests.support.containers.crowding import Crowd
from tests.support.filesystems.smallfs import SPARSE, Lowest, odd_files, programs, small_filesystem

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.root

MIB = 1 << 20
_ROOM = 24 * MIB


@pytest.mark.host  # elsewhere nothing can be captured again, and the smallest files take turns
@pytest.mark.parametrize(("kind", "size"), [("ext4", 40), ("xfs", 300)])
def test_limits_hold_while_more_is_scanned_than_fits(
    buildidfs: BuildIdFs, directory: Path, kind: str, size: int
) -> None:
    odd_files(directory / "odd", tiny=600, sparse=8)
    paths = (programs(directory / "bin", size * MIB * 5 // 4), directory / "odd")
    with small_filesystem(directory, kind, size * MIB) as point:
        buildidfs.store = point / "store"
        with Lowest(point) as lowest:
            first = buildidfs("scan", "tree", "--json", *paths, check=False)
            second = buildidfs("scan", "tree", "--json", *paths, check=False)
            third = buildidfs("scan", "tree", *paths, check=False)
        assert {first.rc, second.rc, third.rc} <= {0, 3, 14}, first
        assert lowest.bytes_beyond > -4 * MIB, lowest.text
        assert lowest.inodes_beyond > -64, lowest.text
        with Lowest(point) as at_rest:
            assert json.loads(first.out)["captured"] > 20
        assert at_rest.bytes_beyond >= 0, at_rest.text
        again = json.loads(second.out)
        evicted = again["evicted"]
        found = (evicted["recapturable"], evicted["lost"])
        assert found == (0, 0), f"it fills what is free, at most\n{first}\n{second}"
        assert "there is nothing else in it" not in first.err + second.err + third.err
        with Store.open(buildidfs.store) as store:
            assert list(store.check(digests=True)) == []


def test_sparse_files_count_as_what_they_take(buildidfs: BuildIdFs, directory: Path) -> None:
    """Eight files of 64 MiB, with 1.5 MiB in each, beside 400 small ones, in 40 MB."""
    odd_files(directory / "odd", tiny=400, sparse=8)
    with small_filesystem(directory, "ext4", 40 * MIB) as point:
        buildidfs.store = point / "store"
        summary = json.loads(buildidfs("scan", "tree", "--json", directory / "odd").out)
        assert (summary["captured"], summary["omitted"], summary["unreadable"]) == (408, 0, [])
        with Store.open(buildidfs.store, read_only=True) as store:
            stats = store.stats()
        assert stats.blob_bytes > 8 * SPARSE
        assert stats.stored_bytes < 32 * MIB


@pytest.mark.host
def test_what_is_gone_outlives_what_can_be_had_again(directory: Path) -> None:
    """Trees are scanned in several processes, while files are captured that are gone then."""
    crowd = Crowd(directory, 0, _ROOM)
    sizes = crowd.sizes(40, 1 << 10, 2 * MIB)
    first = programs(directory / "first", 2 * _ROOM)
    last = programs(directory / "last", 2 * _ROOM, backward=True)
    trees = [("scan", "tree", str(tree)) for tree in (first, last)]
    crowd.scan(*trees[0])
    with crowd.observed(), crowd.scanning(*trees):
        for start in range(0, len(sizes), 8):
            crowd.add_and_delete(sizes[start : start + 8])
    found = crowd.verdict()
    assert found.made == 40
    assert found.is_sound, found
    assert found.omitted > 0, "there was more than fits"
