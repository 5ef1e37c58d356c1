# SPDX-License-Identifier: Apache-2.0
"""buildidfs.client_limits: how long a client waits, and for what."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from buildidfs.client_limits import Lane, Places, Rate, client_of
from buildidfs.shares import Quota


class Clock:
    """A clock that stands still until it is set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_client_waits_after_a_burst_and_no_other_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    rate = Rate(10)
    assert [rate.delay("a") for _ in range(40)] == pytest.approx([0.0] * 40, abs=1e-6)
    assert [rate.delay("a") for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    assert rate.delay("b") == 0.0
    clock.now += 1
    assert rate.delay("a") == 0.0
    assert all(Rate(0).delay("a") == 0.0 for _ in range(10_000))


def test_clients_that_have_rested_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    rate = Rate(10)
    for number in range(100):
        rate.delay(number)
    clock.now += 10
    rate.delay("last")
    assert list(rate._until) == ["last"]


def test_client_with_too_many_downloads_waits_for_one_of_its_own() -> None:
    places = Places(Quota(4))
    began: list[str] = []
    for name in ("a1", "a2", "a3", "b1"):
        places.take(name[0], name, partial(began.append, name))
    assert began == ["a1", "a2", "b1"]
    places.give_back("b")
    assert began == ["a1", "a2", "b1"]
    places.give_back("a")
    assert began == ["a1", "a2", "b1", "a3"]
    places.take("a", "a4", lambda: began.append("a4"))
    assert places.forget("a4")
    assert not places.forget("a4")
    places.give_back("a")
    assert "a4" not in began


class Work:
    """Pieces of work in a lane, by names whose first letter is the client."""

    def __init__(self, at_once: int, most: int) -> None:
        self._lane = Lane(ThreadPoolExecutor(1), at_once, most)
        self.began: list[str] = []
        self.unwanted: set[str] = set()

    def enter(self, *names: str) -> list[bool]:
        """Ask for pieces of work."""
        return [self._lane.enter(name[0], partial(self._begin, name)) for name in names]

    def end(self, *names: str) -> None:
        """End pieces of work."""
        for name in names:
            self._lane.leave(name[0])

    def _begin(self, name: str) -> bool:
        if name in self.unwanted:
            return False
        self.began.append(name)
        return True


def test_clients_take_turns_in_a_lane() -> None:
    work = Work(at_once=1, most=100)
    assert all(work.enter("a1", "a2", "a3", "b1", "b2", "c1"))
    assert work.began == ["a1"]
    work.end("a1", "a2", "b1", "c1", "a3")
    assert work.began == ["a1", "a2", "b1", "c1", "a3", "b2"]
    work.end("b2")
    work.enter("a4", "a5")
    assert work.began[-1] == "a4"


def test_lane_has_a_bound_for_each_client() -> None:
    work = Work(at_once=2, most=8)
    assert work.enter("a1", "a2", "a3", "a4", "a5", "b1") == [True] * 4 + [False, True]
    assert work.began == ["a1", "a2"]
    work.end("a1")
    assert work.began[2:] == ["a3"]
    work.end("a2")
    assert work.began[3:] == ["b1"]
    assert work.enter("a5") == [True]


def test_work_that_is_not_wanted_any_more_is_left_out() -> None:
    work = Work(at_once=1, most=4000)
    names = [f"a{number}" for number in range(2000)]
    assert all(work.enter(*names))
    work.unwanted = set(names[1:])
    assert all(work.enter("b1"))
    work.end("a0")
    assert work.began == ["a0", "b1"]
    work.end("b1")
    work.unwanted.clear()
    assert work.enter("a1") == [True]
    assert work.began[2:] == ["a1"]


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("strange", "strange"),
    ],
)
def test_network_of_64_bits_is_one_client(address: str, client: str) -> None:
    assert client_of(address) == client
