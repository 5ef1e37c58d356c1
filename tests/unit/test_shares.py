# SPDX-License-Identifier: Apache-2.0
"""buildidfs.shares: no owner takes the room of others in a bounded table."""

from __future__ import annotations

import random

from buildidfs.shares import HOST, FairQueue, FairTable, Share, Shares, Turns, of_user

VICTIM = Share("/docker/victim", "/docker/victim")


def places(count: int, owner: str = "uid 1000") -> list[Share]:
    return [Share(owner, f"mnt:{number}") for number in range(count)]


def test_user_with_many_namespaces_takes_no_room_of_others() -> None:
    """Each of 1,280 namespaces of a user has one entry, as a victim has."""
    table: FairTable[int, Share] = FairTable(1024, 256, keep_first=True)
    for number, share in enumerate(places(1280)):
        table.put(number, share, share)
    gone = [table.put(2000 + number, VICTIM, VICTIM) for number in range(120)]
    assert all(each is not None and each.owner == "uid 1000" for each in gone)
    assert sum(each == VICTIM for each in table.values()) == 120
    assert len(table) <= 1024
    assert table.refused == 1280 - 768 + 120


def test_table_keeps_a_reserve_for_root() -> None:
    table: FairTable[int, Share] = FairTable(100, 25)
    for uid in range(1, 500):
        table.put(uid, of_user(uid), of_user(uid))
    assert len(table) == 75
    for number in range(25):
        assert table.put(1000 + number, HOST, HOST) is None
    table.put(2000, HOST, HOST)
    assert sum(each == HOST for each in table.values()) == 26, "the first of all others went"


def test_full_table_drops_the_first_or_the_last_item() -> None:
    oldest: FairTable[int, int] = FairTable(2)
    newest: FairTable[int, int] = FairTable(2, keep_first=True)
    for table in (oldest, newest):
        assert (table.put(1, VICTIM, 1), table.put(2, VICTIM, 2)) == (None, None)
    assert (oldest.put(3, VICTIM, 3), newest.put(3, VICTIM, 3)) == (1, 3)
    assert (oldest.values(), newest.values()) == ([2, 3], [1, 2])
    assert (oldest.renew(2, 4), oldest.renew(7, 7), oldest.values()) == (True, False, [3, 4])
    assert (oldest.first(), newest.pop(1), newest.pop(1), 1 in newest) == (3, 1, None, False)


def test_owner_who_fills_a_table_in_any_order_takes_no_room_of_others() -> None:
    chosen = random.Random(4)
    for keep_first in (False, True):
        table: FairTable[int, Share] = FairTable(40, 10, keep_first=keep_first)
        few = {chosen.randrange(400): share for share in places(6, "uid 7")}
        for number in range(400):
            share = few.get(number) or chosen.choice([HOST, VICTIM, of_user(1)])
            gone = table.put(number, share, share)
            assert gone is None or gone.owner != "uid 7"
            if not number % 7 and table.pop(number - 3) == few.get(number - 3):
                few.pop(number - 3, None)
        assert sum(each.owner == "uid 7" for each in table.values()) == len(few)
        assert len(table) <= 40
        counts = [sum(each == share for each in table.values()) for share in (VICTIM, of_user(1))]
        assert max(counts) - min(counts) <= 2
        for number in range(400):
            table.pop(number)
        assert (len(table), table.put(1, HOST, HOST), table.items()) == (0, None, [(1, HOST)])


def test_owners_take_turns_and_then_their_places() -> None:
    queue: FairQueue[str] = FairQueue(100)
    for number, share in enumerate(places(3)):
        queue.put(share, f"a{number}")
    for number in range(2):
        queue.put(VICTIM, f"v{number}")
    taken = [queue.pop() for _ in range(6)]
    assert taken == ["a0", "v0", "a1", "v1", "a2", None]


def test_full_queue_drops_the_items_of_the_largest_owner() -> None:
    queue: FairQueue[Share] = FairQueue(100)
    for share in places(500):
        queue.put(share, share)
    for _ in range(10):
        queue.put(VICTIM, VICTIM)
    items = iter(queue.pop, None)
    assert sum(each == VICTIM for each in items) == 10
    assert (len(queue), queue.refused) == (0, 410)


def test_largest_place_is_that_of_the_largest_owner() -> None:
    shares = Shares(others=2)
    shares.add(HOST, 5)
    assert shares.largest() == HOST
    shares.add(Share("uid 1", "a"), 2)
    shares.add(Share("uid 1", "b"), 1)
    assert shares.largest() == Share("uid 1", "a"), "root counts half"
    shares.add(VICTIM, 3)
    shares.add(VICTIM, -3)
    shares.add(Share("uid 1", "a"), -2)
    shares.add(Share("uid 1", "b"), -1)
    assert (shares.largest(), shares[HOST]) == (HOST, 5)


def test_shares_without_turns_are_left_out() -> None:
    turns = Turns()
    assert not turns
    assert turns.next() is None
    turns.add(VICTIM)
    turns.add(HOST)
    turns.add(VICTIM)
    assert [turns.next(), turns.next(), turns.next()] == [VICTIM, HOST, VICTIM]
    turns.remove(HOST)
    assert HOST not in turns
    assert [turns.next(), turns.next()] == [VICTIM, VICTIM]
