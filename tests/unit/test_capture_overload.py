# SPDX-License-Identifier: Apache-2.0
"""Too much is what lasts."""

from __future__ import annotations

from buildidfs.capture.overload import Overload


def test_a_burst_is_not_too_much() -> None:
    it = Overload(most=10, seconds=2)
    assert not it.add(1000, 5.0)
    assert not it.add(1, 6.0)
    assert not it.add(1000, 7.0)


def test_several_seconds_in_a_row_are() -> None:
    it = Overload(most=10, seconds=3)
    found = [it.add(6, second + part) for second in range(4) for part in (0.1, 0.2)]
    assert found == [False] * 5 + [True] * 3


def test_a_second_of_silence_begins_anew() -> None:
    it = Overload(most=10, seconds=2)
    assert not it.add(11, 0.5)
    assert not it.add(11, 2.5)
    assert it.add(11, 3.5)
    assert not it.add(11, 9.5)
