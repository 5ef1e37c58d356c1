# SPDX-License-Identifier: Apache-2.0
"""A filesystem that does not answer is asked once, and a late answer is thrown away."""

from __future__ import annotations

import threading

import pytest

from buildidfs.capture.unresponsive.timeouts import Patience, Silences

DEVICE, OTHER = (0, 99), (0, 98)


def unwanted(answer: object) -> None:
    pytest.fail(f"{answer} was discarded")


def test_answer_is_passed_on() -> None:
    assert Patience(60).ask(DEVICE, lambda: 42, unwanted) == 42


def test_error_is_passed_on() -> None:
    def refuse() -> None:
        raise PermissionError(13, "no")

    with pytest.raises(PermissionError):
        Patience(60).ask(DEVICE, refuse, unwanted)


def test_silence_is_not_waited_for_twice() -> None:
    released, discarded = threading.Event(), threading.Event()
    asked = []

    def never() -> str:
        asked.append(True)
        released.wait(60)
        return "late"

    def discard(answer: str) -> None:
        assert answer == "late"
        discarded.set()

    patience = Patience(0.01)
    try:
        for _ in range(3):
            with pytest.raises(TimeoutError, match="does not answer"):
                patience.ask(DEVICE, never, discard)
        assert len(asked) == 1
        assert patience.ask(OTHER, lambda: "at once", unwanted) == "at once"
    finally:
        released.set()
    assert discarded.wait(60)


def test_silence_ends_after_its_time() -> None:
    silences = Silences(seconds=0.0)
    silences.add(DEVICE)
    assert not silences.has(DEVICE)
    silences = Silences(seconds=60.0)
    silences.add(DEVICE)
    assert silences.has(DEVICE)
    assert not silences.has(OTHER)


def test_owner_of_several_silent_filesystems_is_not_asked() -> None:
    silences = Silences(60.0, most_of_an_owner=2)
    silences.add(DEVICE, "anna")
    assert not silences.has(OTHER, "anna")
    silences.add((0, 97), "anna")
    assert silences.has(OTHER, "anna")
    assert not silences.has(OTHER, "berta")
