# SPDX-License-Identifier: Apache-2.0
"""buildidfs.app.live.rescans: each look that is asked for is had, soon, and not more of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from buildidfs.app.live import rescans
from buildidfs.app.live.rescans import Scans
from tests.support.waiting import until

Look = list[int] | None


class Looked:
    """A `Scans` whose looks only note what was to be looked at, and do what ``during`` says."""

    def __init__(self) -> None:
        self.looks: list[Look] = []
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.during: Callable[[Look, threading.Event], None] = lambda pids, ending: None
        self.scans = Scans(self._look)

    def _look(self, pids: Sequence[int] | None, ending: threading.Event) -> None:
        noted = None if pids is None else list(pids)
        self.begun.append(time.monotonic())
        self.looks.append(noted)
        try:
            self.during(noted, ending)
        finally:
            self.ended.append(time.monotonic())

    def wait(self, number: int) -> None:
        until(lambda: len(self.ended) >= number, f"{number} looks")

    def settle(self, pid: int) -> None:
        """Return when all that was asked for has been done: one that is asked for last is."""
        until(lambda: self.scans.is_idle, "an end of the looks")
        self.scans.process(pid)
        until(lambda: self.looks[-1:] == [[pid]] and self.scans.is_idle, "the last look")


@pytest.fixture
def looked() -> Iterator[Looked]:
    made = Looked()
    yield made
    made.scans.close()


@pytest.fixture
def held(looked: Looked) -> Iterator[threading.Event]:
    """The first look goes on until this is set."""
    go_on = threading.Event()
    looked.during = lambda pids, ending: None if go_on.is_set() else _wait(go_on)
    yield go_on
    go_on.set()


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_nothing_is_looked_at_unasked(looked: Looked) -> None:
    assert not looked.scans.is_idle, "it has not begun"
    looked.scans.start()
    looked.settle(1)
    assert looked.looks == [[1]]
    assert looked.scans.count == 0


@pytest.fixture
def long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than anybody waits here."""
    monkeypatch.setattr(rescans, "_BETWEEN_S", 600.0)


@pytest.mark.usefixtures("long_pause")
def test_first_look_at_everything_is_at_once(looked: Looked) -> None:
    looked.scans.everything("start")
    looked.scans.start()
    looked.wait(1)
    assert looked.looks == [None]
    until(lambda: looked.scans.count == 1, "the count")
    assert looked.scans.is_idle


def test_asked_twice_is_done_once(looked: Looked, held: threading.Event) -> None:
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    assert not looked.scans.is_idle
    for _ in range(5):
        looked.scans.everything("a gap")
    held.set()
    looked.wait(2)
    looked.settle(1)
    assert looked.looks == [None, None, [1]]
    assert looked.scans.count == 2


@pytest.mark.parametrize("when", ["during", "after"])
def test_looks_at_everything_have_pauses(looked: Looked, held: threading.Event, when: str) -> None:
    """What makes events come too fast is not over when the look is, which takes a CPU."""
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    if when == "during":
        looked.scans.everything("a gap")
    held.set()
    looked.wait(1)
    looked.scans.everything("a gap")
    looked.wait(2)
    assert looked.looks == [None, None]
    assert looked.begun[1] - looked.ended[0] >= rescans._BETWEEN_S - 0.01


@pytest.mark.usefixtures("long_pause")
def test_look_at_a_process_delays_no_look_at_everything(looked: Looked) -> None:
    looked.scans.start()
    looked.scans.process(7)
    looked.wait(1)
    until(lambda: looked.scans.is_idle, "an end of the look")
    looked.scans.everything("start")
    looked.wait(2)
    assert looked.looks == [[7], None]


def test_processes_are_looked_at_together_after_a_moment(looked: Looked) -> None:
    looked.scans.start()
    asked = time.monotonic()
    for pid in (30, 10, 20, 10, 30):
        looked.scans.process(pid)
    looked.wait(1)
    looked.settle(1)
    assert looked.looks == [[30, 10, 20], [1]]
    assert looked.begun[0] - asked >= rescans._SETTLED_S - 0.01
    assert looked.scans.count == 0


def test_more_processes_than_are_worth_it(looked: Looked) -> None:
    looked.scans.start()
    for pid in range(5000):
        looked.scans.process(pid)
    looked.wait(1)
    assert looked.looks[0] == list(range(1024))


def test_processes_of_one_container_leave_room_for_others(looked: Looked) -> None:
    looked.scans.start()
    for pid in range(5000):
        looked.scans.process(pid, "docker:flood")
    for pid in range(5000, 5010):
        looked.scans.process(pid, "docker:b")
        looked.scans.process(pid + 100)
    looked.wait(1)
    assert len(looked.looks[0]) == 256 + 20
    assert set(looked.looks[0][256:]) == {*range(5000, 5010), *range(5100, 5110)}


def test_look_at_everything_is_one_at_each_process(looked: Looked, held: threading.Event) -> None:
    looked.scans.start()
    looked.scans.process(7)
    looked.scans.everything("start")
    until(lambda: looked.looks, "the first look")
    looked.scans.process(8)  # may have been passed already
    held.set()
    looked.wait(2)
    looked.settle(1)
    assert looked.looks == [None, [8], [1]]


def test_again_and_again(looked: Looked) -> None:
    looked.scans.start()
    looked.scans.every(0.05)
    looked.wait(4)
    looked.scans.close()
    assert looked.looks == [None] * len(looked.looks)
    assert not looked.scans.is_idle
    pauses = [b - a for a, b in zip(looked.ended, looked.begun[1:], strict=False)]
    assert min(pauses) >= 0.04


def test_a_fault_ends_one_look(looked: Looked, caplog: pytest.LogCaptureFixture) -> None:
    def fail(pids: Look, ending: threading.Event) -> None:
        raise RuntimeError("a fault")

    looked.during = fail
    looked.scans.start()
    looked.scans.process(7)
    looked.wait(1)
    looked.scans.everything("start")
    looked.wait(2)
    until(lambda: looked.scans.is_idle, "an end of the look")
    looked.during = lambda pids, ending: None
    looked.settle(1)
    assert looked.looks == [[7], None, [1]]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a look at running processes failed"
    ] * 2


def test_close_in_the_middle_of_a_look(looked: Looked) -> None:
    looked.during = lambda pids, ending: _wait(ending)
    looked.scans.start()
    looked.scans.everything("start")
    until(lambda: looked.looks, "the look")
    looked.scans.everything("a gap")
    looked.scans.process(7)
    looked.scans.close()
    assert looked.looks == [None]
    assert len(looked.ended) == 1
    assert looked.scans.count == 0, "it was not finished"
    looked.scans.close()


def test_close_while_nothing_is_done_and_before_the_start(looked: Looked) -> None:
    Scans(looked.scans._look).close()
    looked.scans.start()
    looked.scans.process(7)
    looked.scans.close()
    assert looked.looks == []
