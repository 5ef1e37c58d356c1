# SPDX-License-Identifier: Apache-2.0
"""buildidfs.shares.Quota: places divided among users."""

from __future__ import annotations

from buildidfs.shares import Quota


def taken(quota: Quota, uid: int) -> int:
    count = 0
    while count < 10_000 and quota.take(uid):
        count += 1
    return count


def test_each_user_has_half_of_what_others_leave() -> None:
    quota = Quota(1000)
    assert [taken(quota, uid) for uid in (7, 8, 9)] == [500, 250, 125]


def test_place_given_back_can_be_taken_again() -> None:
    quota = Quota(10)
    assert taken(quota, 7) == 5
    quota.give_back(7)
    assert quota.take(7)
    assert not quota.take(7)
    assert taken(quota, 8) == 2
    for _ in range(9):
        quota.give_back(7)
    assert taken(quota, 8) == 3, "a user cannot give back more than they have"
    for _ in range(5):
        quota.give_back(8)
    assert quota._held == {}


def test_several_places_are_taken_at_once_or_not_at_all() -> None:
    quota = Quota(16)
    assert quota.take("a", 8)
    assert not quota.take("a")
    assert not quota.take("b", 5)
    assert quota.take("b", 4)
    quota.give_back("a", 7)
    assert quota.take("a", 5)
    assert not quota.take("a", 2)
    for user in ("a", "b"):
        quota.give_back(user, 100)
    assert quota.take("c", 8)
