# SPDX-License-Identifier: Apache-2.0
"""buildidfs.cli.history: points in time as people say them."""

from __future__ import annotations

import time

import pytest

from buildidfs.cli.common import point_in_time
from buildidfs.wording import moment
from tests.support.harness.captures import NOW, SECOND


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0s", NOW),
        ("90s", NOW - 90 * SECOND),
        ("10m", NOW - 600 * SECOND),
        ("2h", NOW - 7200 * SECOND),
        ("3d", NOW - 3 * 86_400 * SECOND),
        ("1w", NOW - 7 * 86_400 * SECOND),
        ("999999999w", 0),
        ("@1700000000", NOW),
        ("@1700000000.25", NOW + SECOND // 4),
        ("2023-11-14T22:13:20+00:00", NOW),
        ("2023-11-14T23:13:20+0100", NOW),
        ("2023-11-15", NOW + (6 * 3600 + 46 * 60 + 40) * SECOND),
        ("2023-11-14T17:13:20", NOW),
        ("2023-11-14 17:13", NOW - 20 * SECOND),
        ("1901-01-01", 0),
    ],
)
def test_points_in_time(monkeypatch: pytest.MonkeyPatch, text: str, expected: int) -> None:
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    try:
        assert point_in_time(text, NOW) == expected
        assert point_in_time(moment(NOW / SECOND), 0) == NOW, "what we print is understood"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    "text",
    ["", "10", "10 m", "m", "-5m", "1y", "yesterday", "@", "@x", "@1e9", "2023-13-01", "10m\n"],
)
def test_what_is_no_point_in_time(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        point_in_time(text, NOW)
