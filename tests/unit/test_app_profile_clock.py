# SPDX-License-Identifier: Apache-2.0
"""How times of a profile become times of the day."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from buildidfs.app.profile import clock as profile_clock
from buildidfs.app.profile.clock import SHARP_NS, Clock, aligned, by_file_time, of_this_boot
from buildidfs.capture.scan.perf_data import Profile
from buildidfs.formats.perf import headers
from buildidfs.linux import clock as linux_clock
from tests.support.perfwriter import PerfWriter

SECOND = 1_000_000_000
MILLISECOND = SECOND // 1000
OFFSET = 1_700_000_000 * SECOND
ROUGH = Clock(OFFSET, 32 * SECOND, "rough")


def test_a_profile_that_says_it(tmp_path: Path) -> None:
    write = PerfWriter()
    path = tmp_path / "perf.data"
    for content, offset in (
        (write.pack("IIQQ", 1, 1, OFFSET + 5, 5), OFFSET),
        (write.pack("IIQQ", 9, 1, OFFSET + 5, 5), None),
        (b"short", None),
    ):
        path.write_bytes(write.file(write.comm(1, b"x"), {headers.CLOCK_DATA: content}))
        with Profile(bytes(path)) as profile:
            clock = profile_clock.recorded(profile)
        assert (None if clock is None else clock.offset_ns) == offset
        assert clock is None or clock.error_ns <= SHARP_NS


def test_a_profile_of_this_machine_that_says_it(tmp_path: Path) -> None:
    write = PerfWriter()
    path = tmp_path / "perf.data"
    for clockid, wrong, is_local in (
        (time.CLOCK_MONOTONIC, 0, True),
        (time.CLOCK_BOOTTIME, 0, True),
        (time.CLOCK_MONOTONIC, 3600 * SECOND, False),
        (time.CLOCK_REALTIME, 0, False),  # is the same everywhere
    ):
        event = time.clock_gettime_ns(clockid)
        content = write.pack("IIQQ", 1, clockid, time.time_ns() + wrong, event)
        path.write_bytes(write.file(write.comm(1, b"x"), {headers.CLOCK_DATA: content}))
        with Profile(bytes(path)) as profile:
            clock = profile_clock.recorded(profile)
        assert clock is not None
        assert clock.is_local == is_local


def test_by_the_time_of_the_file() -> None:
    """What was last in it happened up to a minute before it was written."""
    last = 5000 * SECOND
    clock = by_file_time(OFFSET + last, last)
    for late in (0, 30, 60):
        true_offset = OFFSET - late * SECOND
        assert abs(true_offset - clock.offset_ns) <= clock.error_ns
    assert clock.error_ns > SHARP_NS


def test_differences_that_are_alike() -> None:
    true = OFFSET + 3 * SECOND
    alike = [(number, true + number * MILLISECOND // 2) for number in range(8)]
    others = [(number, true - (5 + number) * SECOND) for number in range(8)]
    clock = aligned(ROUGH, [*others, *alike])
    assert clock is not None
    assert abs(clock.offset_ns - true) <= 5 * MILLISECOND
    assert clock.error_ns < SECOND
    assert "8 files" in clock.how
    assert clock.is_seen


def test_too_few_are_alike() -> None:
    assert aligned(ROUGH, []) is None
    assert aligned(ROUGH, [(1, OFFSET), (2, OFFSET)]) is None
    assert aligned(ROUGH, [(1, OFFSET)] * 5) is None  # one file, five times


def test_several_occasions_that_look_the_same() -> None:
    """The same container, started again and again: the nearest may be the one before."""
    runs = [(number, OFFSET + run * SECOND) for number in range(6) for run in range(2)]
    assert aligned(ROUGH, runs) is None
    assert aligned(ROUGH, [*runs, (6, OFFSET), (7, OFFSET)]) is None
    more = [(number, OFFSET) for number in range(6, 10)]
    clock = aligned(ROUGH, [*runs, *more])
    assert clock is not None
    assert clock.offset_ns == OFFSET


def test_clock_of_this_machine() -> None:
    try:
        offset, error = linux_clock.perf_offset()
    except OSError as refused:
        pytest.skip(f"events of one's own are not allowed here: {refused.strerror}")
    now = time.time_ns()
    last = now - offset
    clock = of_this_boot(now + SECOND, last, now + SECOND)
    assert clock is not None
    assert abs(clock.offset_ns - offset) < SECOND // 10
    assert error < clock.error_ns < SECOND // 10
    assert clock.is_local
    later = of_this_boot(now + SECOND, last, now + 3600 * SECOND)
    assert later is not None
    assert later.error_ns > SECOND // 10
    # written a day before, or by a machine that began at another time
    assert of_this_boot(now - 86_400 * SECOND, last, now) is None
    assert of_this_boot(now, last - 86_400 * SECOND, now) is None


def test_far_away_from_when_the_file_was_written() -> None:
    far = [(number, OFFSET + 40 * SECOND) for number in range(9)]
    assert aligned(ROUGH, far) is None
