# SPDX-License-Identifier: Apache-2.0
"""How many new files of each container are looked at."""

from __future__ import annotations

from buildidfs.capture.live.fair_share import FairShare
from buildidfs.capture.live.process_table import Home
from buildidfs.model import NamespaceSet


def taken(shares: FairShare, share: int | str, most: int = 100_000) -> int:
    """How many more a share admits now."""
    count = 0
    while count < most and shares.admit(share):
        count += 1
    return count


def test_burst_and_then_the_rate() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    assert taken(shares, 7) == 1000
    assert shares.is_exhausted(7)
    shares.refill(0.5)
    assert taken(shares, 7) == 50
    shares.refill(100.0)
    assert taken(shares, 7) == 100, "a pause is worth a second at most"


def test_flood_leaves_others_their_share() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    taken(shares, 7)
    assert not shares.is_exhausted("docker:a")
    assert taken(shares, "docker:a") == 1000
    shares.refill(1.0)
    assert (taken(shares, 7), taken(shares, "docker:a")) == (50, 50)


def test_share_that_is_not_used_any_more_is_forgotten() -> None:
    shares = FairShare(per_second=1000, burst=1000)
    shares.refill(0.0)
    assert shares.admit(7)
    assert shares.is_pressed
    shares.refill(1.0)
    assert not shares.is_pressed


def test_number_of_shares_is_bounded() -> None:
    shares = FairShare(per_second=0, burst=1000)
    home = Home(NamespaceSet(mnt=7))
    for number in range(5000):
        shares.admit(number)
        shares.drop(number, home, b"/app")
    dropped = shares.take_dropped()
    assert len(dropped) <= 1025
    assert sum(each.count for each in dropped) == 5000
    assert shares.take_dropped() == []
    assert taken(shares, "new") < 1000, "all that have no row have one together"


def test_dropped_mappings_are_named_and_counted() -> None:
    shares = FairShare()
    home = Home(NamespaceSet(mnt=7))
    for number in range(10_000):
        shares.drop(7, home, b"/lib/%d.so" % number)
    (dropped,) = shares.take_dropped()
    assert (dropped.home, dropped.count) == (home, 10_000)
    assert dropped.paths[0] == b"/lib/0.so"
    assert sum(map(len, dropped.paths)) <= 4096, "it fits into one message"


def test_share_is_the_container_and_else_the_mount_namespace() -> None:
    home = Home(NamespaceSet(mnt=7))
    assert home.share == 7
    home.label = "docker:a"
    assert home.share == "docker:a"
