# SPDX-License-Identifier: Apache-2.0
"""Pending files are taken smallest first, and let go when too many wait or too long."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator

import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.ingest import pending_files as module
from buildidfs.ingest.pending_files import LetGo, PendingFile, PendingFiles
from buildidfs.shares import HOST, Share
from tests.support.harness.captures import sighting
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    until(lambda: open_descriptors() <= before, "every descriptor to be closed")


def pin(size: int = 100, *, age: float = 0.0, slow: bool = False) -> PendingFile:
    fd = os.open("/dev/null", os.O_RDONLY)
    path = b"/file/of/%d" % size
    return PendingFile(
        PinnedFile(sighting(path, size=size), fd), None, b"k" * 16, time.monotonic() - age, slow
    )


def taken(pins: PendingFiles) -> list[int]:
    """The sizes of what is handed out, in order."""
    sizes = []
    while (found := pins.take(0)) is not None:
        sizes.append(found.sighting.origin.identity.size)
        pins.done(found)
    return sizes


def of(gone: list[LetGo]) -> list[int]:
    return [item.pending.sighting.origin.identity.size for item in gone]


@pytest.fixture
def pins() -> Iterator[PendingFiles]:
    made = PendingFiles()
    yield made
    made.close()


def test_smallest_first_and_of_several_the_oldest(pins: PendingFiles) -> None:
    first, second = pin(5), pin(5)
    for item in (pin(7), first, pin(1), second, pin(6)):
        assert pins.put(item) == []
    small = pins.take(0)
    assert small is not None
    assert small.sighting.origin.identity.size == 1
    assert pins.take(0) is first
    assert pins.take(0) is second
    assert taken(pins) == [6, 7]
    pins.done(small, first, second)
    assert len(pins) == pins.held_bytes == 0


def test_pin_whose_time_is_nearly_over_goes_first_but_only_one_at_a_time(
    pins: PendingFiles,
) -> None:
    for item in (pin(1), pin(900, age=29), pin(2), pin(800, age=28)):
        pins.put(item)
    urgent = pins.take(0)
    assert urgent is not None
    assert urgent.sighting.origin.identity.size == 900
    small = pins.take(0)
    assert small is not None
    assert small.sighting.origin.identity.size == 1, "another worker goes on with small ones"
    pins.done(urgent, small)
    assert taken(pins) == [800, 2]


def test_a_pin_that_is_given_back_waits(pins: PendingFiles) -> None:
    pins.put(pin(1))
    item = pins.take(0)
    assert item is not None
    pins.give_back(item, 0.05)
    assert pins.idle
    assert pins.take(0) is None
    begin = time.monotonic()
    assert pins.take(20) is item
    assert time.monotonic() - begin >= 0.03
    pins.give_back(item, 0)
    assert pins.take(0) is item
    pins.done(item)


def test_those_that_may_not_answer_are_asked_for_apart(pins: PendingFiles) -> None:
    slow = pin(1, slow=True)
    pins.put(slow)
    pins.put(pin(2))
    assert taken(pins) == [2]
    assert pins.take(0, slow=True) is slow
    assert pins.take(0, slow=True) is None
    pins.done(slow)


def test_those_that_may_not_answer_leave_room() -> None:
    pins = PendingFiles(max_count=16)
    assert pins.put(pin(1, slow=True)) == []
    assert pins.put(pin(2, slow=True)) == []
    (gone,) = pins.put(pin(3, slow=True))
    assert gone.pending.sighting.origin.identity.size == 3
    assert "may not answer" in gone.reason
    assert pins.put(pin(4)) == []
    pins.close()


def test_too_many_bytes_let_the_biggest_go() -> None:
    pins = PendingFiles(max_bytes=10 * MIB)
    for size in (4, 1, 3):
        assert pins.put(pin(size * MIB)) == []
    (gone,) = pins.put(pin(3 * MIB))
    assert gone.pending.sighting.origin.identity.size == 4 * MIB
    assert gone.pending.file.fd == -1
    assert gone.reason == "more than 10 MiB wait to be copied"
    (gone,) = pins.put(pin(1 << 62))
    assert gone.pending.sighting.origin.identity.size == 1 << 62, "it goes and takes nobody with it"
    assert pins.held_bytes == 7 * MIB
    assert taken(pins) == [MIB, 3 * MIB, 3 * MIB]
    pins.close()


def test_what_is_in_work_is_counted_but_leaves_half() -> None:
    pins = PendingFiles(max_bytes=10 * MIB)
    pins.put(pin(9 * MIB))
    big = pins.take(0)
    assert big is not None
    assert pins.put(pin(5 * MIB)) == []
    assert of(pins.put(pin(1 * MIB))) == [5 * MIB]
    pins.done(big)
    assert pins.put(pin(8 * MIB)) == []
    pins.close()


def test_too_many_files_let_the_biggest_go() -> None:
    pins = PendingFiles(max_count=3)
    gone = [item for size in (5, 9, 2, 7, 1) for item in pins.put(pin(size))]
    assert of(gone) == [9, 7]
    assert {item.reason for item in gone} == {"more than 3 files wait to be copied"}
    assert taken(pins) == [1, 2, 5]
    pins.close()


def test_one_that_waits_for_its_next_try_can_be_let_go() -> None:
    pins = PendingFiles(max_count=1)
    pins.put(pin(9))
    item = pins.take(0)
    assert item is not None
    pins.give_back(item, 60)
    assert of(pins.put(pin(3))) == [9]
    assert taken(pins) == [3]
    pins.close()


def test_number_follows_the_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for limit, count in ((700, 64), (1000, 360)):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            assert PendingFiles().max_count == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_time_is_over() -> None:
    pins = PendingFiles(seconds=10)
    for item in (pin(1, age=11), pin(2, age=1), pin(3, age=12)):
        pins.put(item)
    gone = pins.expire()
    assert of(gone) == [3, 1]
    assert {item.reason for item in gone} == {"not copied within 10 s"}
    assert pins.expire() == []
    assert taken(pins) == [2]
    pins.close()


def test_time_of_those_in_work_is_not_over_until_they_are_given_back(pins: PendingFiles) -> None:
    item = pin(1, age=29.9)
    pins.put(item)
    assert pins.take(0) is item
    assert pins.expire(0.2) == []
    assert item.file.fd >= 0
    pins.give_back(item, 60, "a process keeps writing to it")
    (gone,) = pins.expire()
    assert (gone.pending, gone.reason) == (item, "a process keeps writing to it")
    assert item.file.fd == -1


def test_expiry_is_waited_for() -> None:
    pins = PendingFiles(seconds=0.2)
    found: list[LetGo] = []
    waiter = threading.Thread(target=lambda: found.extend(pins.expire(None)))
    waiter.start()
    pins.put(pin(4))
    begin = time.monotonic()
    waiter.join(20)
    assert of(found) == [4]
    assert time.monotonic() - begin < 5
    pins.close()


def test_closing_lets_go_of_all_and_wakes_everybody(pins: PendingFiles) -> None:
    waiters = [
        threading.Thread(target=pins.take, args=(60,)),
        threading.Thread(target=pins.take, args=(60,), kwargs={"slow": True}),
        threading.Thread(target=pins.expire, args=(60,)),
    ]
    item = pin(1)
    pins.put(item)
    assert pins.take(0) is item
    pins.put(pin(2, slow=True))
    for waiter in waiters[:1] + waiters[2:]:
        waiter.start()
    gone = pins.close()
    assert of(gone) == [2]
    waiters[1].start()
    for waiter in waiters:
        waiter.join(20)
        assert not waiter.is_alive()
    assert item.file.fd >= 0, "it is in work"
    pins.give_back(item, 1)
    assert item.file.fd == -1
    assert of(pins.put(late := pin(5))) == [5]
    assert late.file.fd == -1
    assert pins.take(0) is None
    assert pins.close() == []


def test_descriptors_that_take_long_to_close_delay_nobody(
    pins: PendingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last one of a filesystem does; a pipe's stands for it here."""
    release, real = threading.Event(), os.close

    def close(fd: int) -> None:
        if threading.current_thread().name == "buildidfs-close":
            release.wait(60)
        real(fd)

    monkeypatch.setattr(module.os, "close", close)
    pins.put(pin(1))
    begin = time.monotonic()
    assert taken(pins) == [1]
    assert time.monotonic() - begin < 5
    release.set()


def test_many_threads_lose_nothing() -> None:
    """Each pin is copied or let go, once."""
    pins = PendingFiles(seconds=60, max_count=50)
    count, copied, gone = 4000, [], []

    def work(number: int) -> None:
        while not pins.closed:
            item = pins.take(0.01)
            if item is None:
                continue
            os.fstat(item.file.fd)  # it is open as long as it is in work
            if item.tries < number % 3:
                item.tries += 1
                pins.give_back(item, 0.0005 * (number % 2))
            else:
                copied.append(item)
                pins.done(item)

    def feed(number: int) -> None:
        for size in range(count // 2):
            gone.extend(pins.put(pin((size * 7919 + number) % 1000)))

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    feeders = [threading.Thread(target=feed, args=(number,)) for number in range(2)]
    for thread in workers + feeders:
        thread.start()
    for feeder in feeders:
        feeder.join(60)
    until(lambda: len(pins) == 0, "everything to be taken")
    gone += pins.close()
    for worker in workers:
        worker.join(20)
    pins.close()
    everything = copied + [item.pending for item in gone]
    assert len(everything) == len(set(everything)) == count
    assert {item.file.fd for item in everything} == {-1}
    assert len(copied) >= 50
    assert pins.held_bytes == 0


# --- shares --------------------------------------------------------------------------------------


FLOOD, B, C = Share("flood"), Share("b"), Share("c")


def of_share(share: Share, size: int = 100, *, slow: bool = False) -> PendingFile:
    made = pin(size, slow=slow)
    made.share = share
    return made


def shares_taken(pins: PendingFiles) -> list[Share]:
    order = []
    while (found := pins.take(0)) is not None:
        order.append(found.share)
        pins.done(found)
    return order


def test_host_comes_first_and_containers_take_turns(pins: PendingFiles) -> None:
    for share in (FLOOD, FLOOD, FLOOD, FLOOD, B, B, HOST, C, HOST):
        pins.put(of_share(share, 1 if share == FLOOD else 1000))
    assert shares_taken(pins) == [HOST, HOST, FLOOD, B, C, FLOOD, B, FLOOD, FLOOD]


def test_container_that_comes_later_waits_for_one_turn(pins: PendingFiles) -> None:
    for _ in range(10):
        pins.put(of_share(FLOOD))
    first = pins.take(0)
    assert first is not None
    pins.put(of_share(B))
    pins.done(first)
    assert B in shares_taken(pins)[:2]


@pytest.mark.parametrize("slow", [False, True])
def test_too_many_files_are_let_go_of_the_share_that_has_most(slow: bool) -> None:
    most = 10
    pins = PendingFiles(max_count=most * module._SLOW_SHARE if slow else most)
    gone = []
    for number in range(most * 5):
        gone += pins.put(of_share(FLOOD, 1, slow=slow))
        if number % 10 == 0:
            gone += pins.put(of_share(B, MIB, slow=slow))
    assert {each.pending.share for each in gone} == {FLOOD}
    assert len(pins) == most
    pins.close()


def test_too_many_bytes_are_let_go_of_the_share_that_has_most() -> None:
    pins = PendingFiles(max_bytes=100 * MIB)
    gone = pins.put(of_share(B, 30 * MIB)) + pins.put(of_share(HOST, 30 * MIB))
    for _ in range(1000):
        gone += pins.put(of_share(FLOOD, MIB))
    assert {each.pending.share for each in gone} == {FLOOD}
    assert pins.held_bytes <= 100 * MIB
    pins.close()


def test_host_alone_is_bounded_too() -> None:
    pins = PendingFiles(max_count=10)
    assert len([each for _ in range(30) for each in pins.put(of_share(HOST))]) == 20
    pins.close()


def test_many_shares_cost_no_more_than_one() -> None:
    """Each file in a mount namespace of its own."""
    pins = PendingFiles(max_count=2000)
    for number in range(6000):
        pins.put(of_share(Share(f"mnt:{number}")))
    assert len(pins) == 2000
    assert len(set(shares_taken(pins))) == 2000
    assert pins._waiting._by_size == {}, "nothing is kept for who has nothing"
    assert pins._waiting.most_bytes.largest() is None
    pins.close()


def test_user_with_many_namespaces_has_one_share(pins: PendingFiles) -> None:
    for number in range(100):
        pins.put(of_share(Share("uid 1000", f"mnt:{number}"), 1))
    for _ in range(10):
        pins.put(of_share(B, 1000))
    assert shares_taken(pins)[:20].count(B) == 10
