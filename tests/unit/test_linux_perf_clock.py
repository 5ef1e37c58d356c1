# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.perf_clock, against the events of this kernel."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from buildidfs.linux import perf_clock
from tests.support.scans import open_descriptors


@pytest.fixture(autouse=True)
def _allowed() -> None:
    try:
        perf_clock.offset()
    except OSError as error:
        pytest.skip(f"events of one's own are not allowed here: {error.strerror}")


def test_it_is_the_same_clock_each_time() -> None:
    first, first_error = perf_clock.offset()
    time.sleep(0.05)
    second, second_error = perf_clock.offset()
    assert abs(second - first) <= first_error + second_error + 100_000
    assert first_error < 100_000_000


def test_it_began_with_the_machine() -> None:
    offset, _ = perf_clock.offset()
    began = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert abs(offset / 1e9 - began) < 60


def test_nothing_is_left_and_the_thread_keeps_its_name() -> None:
    found = []

    def ask() -> None:
        Path("/proc/thread-self/comm").write_text("named")
        before = open_descriptors()
        perf_clock.offset()
        found.append((Path("/proc/thread-self/comm").read_text(), open_descriptors() - before))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [("named\n", 0)]
