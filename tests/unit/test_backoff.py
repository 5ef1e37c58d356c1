# SPDX-License-Identifier: Apache-2.0
"""Growing delays between attempts."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import buildidfs
from buildidfs.backoff import Attempts, Backoff

if TYPE_CHECKING:
    import pytest

PACKAGE = Path(buildidfs.__file__).parent


def test_each_delay_is_twice_the_last_one_up_to_a_limit() -> None:
    backoff = Backoff(1, 10)
    assert [backoff.delay(earlier) for earlier in range(6)] == [1, 2, 4, 8, 10, 10]
    assert backoff.delay(10**6) == 10


def test_jitter_varies_a_delay_by_its_fraction() -> None:
    delays = {Backoff(8, 8, 0.25).delay(0) for _ in range(100)}
    assert len(delays) > 50
    assert 6 <= min(delays) < max(delays) <= 10


def test_an_attempt_is_due_after_its_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    attempts = Attempts(Backoff(1, 10))
    assert attempts.is_due
    assert attempts.failed() == 1
    assert not attempts.is_due
    now[0] += 1
    assert attempts.is_due
    assert attempts.failed() == 2
    assert attempts.failed(least=60) == 60
    assert attempts.due == 161
    attempts.succeeded()
    assert attempts.is_due
    assert attempts.failed() == 1


def test_delays_start_from_the_first_one_after_a_time_without_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    attempts = Attempts(Backoff(1, 10))
    assert [attempts.failed() for _ in range(3)] == [1, 2, 4]
    now[0] = attempts.due + 9.9
    assert attempts.failed() == 8
    now[0] = attempts.due + 10
    assert attempts.failed() == 1


def test_no_other_module_doubles_a_delay() -> None:
    doubled = re.compile(
        r"(pause|delay) = min\(.*(\* 2|2 \*)|2(\.0)? ?\*\* ?\S*(tries|attempt|failures)"
    )
    found = [
        path.relative_to(PACKAGE)
        for path in PACKAGE.rglob("*.py")
        if path.name != "backoff.py" and doubled.search(path.read_text())
    ]
    assert found == []
