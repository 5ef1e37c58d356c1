# SPDX-License-Identifier: Apache-2.0
"""The rate at which new files are opened, and its division."""

from __future__ import annotations

from buildidfs.capture.live.admission import FairShare
from buildidfs.capture.live.process_table import Home
from buildidfs.model import NamespaceSet
from buildidfs.shares import Share

FLOOD = Share("mnt:7")
OTHER = Share("/docker/a")


def taken(shares: FairShare, share: Share, most: int = 100_000) -> int:
    """How many more a share admits now."""
    count = 0
    while count < most and shares.admit(share):
        count += 1
    return count


def test_burst_and_then_the_rate() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    assert taken(shares, FLOOD) == 1000
    assert shares.is_exhausted(FLOOD)
    shares.refill(0.5)
    assert taken(shares, FLOOD) == 50
    shares.refill(100.0)
    assert taken(shares, FLOOD) == 100, "a pause is worth a second at most"


def test_flood_leaves_others_their_share() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    taken(shares, FLOOD)
    assert not shares.is_exhausted(OTHER)
    assert taken(shares, OTHER) == 1000
    shares.refill(1.0)
    assert (taken(shares, FLOOD), taken(shares, OTHER)) == (50, 50)


def test_files_seen_elsewhere_leave_half_of_a_share_to_new_ones() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    while shares.admit(FLOOD, is_copy=True):
        pass
    assert taken(shares, FLOOD) == 500
    shares.refill(1.0)
    assert not shares.admit(FLOOD, is_copy=True)
    assert taken(shares, FLOOD) == 100


def test_share_that_is_not_used_any_more_is_forgotten() -> None:
    shares = FairShare(per_second=1000, burst=1000)
    shares.refill(0.0)
    assert shares.admit(FLOOD)
    assert shares.is_pressed
    shares.refill(1.0)
    assert not shares.is_pressed


def test_number_of_shares_is_bounded() -> None:
    shares = FairShare(per_second=0, burst=1000)
    home = Home(NamespaceSet(mnt=7))
    for number in range(5000):
        shares.admit(Share(f"mnt:{number}"))
        shares.drop(Share(f"mnt:{number}"), home, b"/app")
    dropped = shares.take_dropped()
    assert len(dropped) <= 2049
    assert sum(each.count for each in dropped) == 5000
    assert shares.take_dropped() == []
    assert taken(shares, Share("new")) < 1000, "all that have no row have one together"


def test_dropped_mappings_are_named_and_counted() -> None:
    shares = FairShare()
    home = Home(NamespaceSet(mnt=7))
    for number in range(10_000):
        shares.drop(FLOOD, home, b"/lib/%d.so" % number)
    (dropped,) = shares.take_dropped()
    assert (dropped.home, dropped.count) == (home, 10_000)
    assert dropped.paths[0] == b"/lib/0.so"
    assert sum(map(len, dropped.paths)) <= 4096, "it fits into one message"


def test_places_of_an_owner_divide_its_share() -> None:
    """A user with a hundred containers has not more than a user with one."""
    shares = FairShare(per_second=1000, burst=1000)
    shares.refill(0.0)
    many = [Share("uid 1000", f"mnt:{number}") for number in range(100)]
    assert sum(taken(shares, each) for each in many) < 3000
    assert taken(shares, OTHER) >= 128
    shares.refill(0.5)
    assert sum(taken(shares, each) for each in many) <= 250
    assert taken(shares, OTHER) == 250


def test_place_of_an_owner_cannot_starve_its_other_place() -> None:
    shares = FairShare(per_second=1000, burst=1000)
    shares.refill(0.0)
    taken(shares, Share("uid 1000", "flood"))
    assert taken(shares, Share("uid 1000", "quiet")) >= 128
