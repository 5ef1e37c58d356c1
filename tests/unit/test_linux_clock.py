# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.clock says what the kernel says in another way."""

from __future__ import annotations

import ctypes
import threading
import time
from pathlib import Path

import pytest

from buildidfs.linux import clock, syscalls
from tests.support.scans import open_descriptors

_TIME_ERROR = 5  # what adjtimex returns while the clock is not synchronised


def test_synchronised_unless_the_kernel_calls_it_an_error() -> None:
    state = syscalls.libc.ntp_adjtime(ctypes.create_string_buffer(512))
    assert 0 <= state <= _TIME_ERROR
    assert clock.is_synchronised() == (state != _TIME_ERROR)


# --- buildidfs.linux.perf_clock, against the events of this kernel


@pytest.fixture
def own_events() -> None:
    try:
        clock.perf_offset()
    except OSError as error:
        pytest.skip(f"events of one's own are not allowed here: {error.strerror}")


@pytest.mark.usefixtures("own_events")
def test_it_is_the_same_clock_each_time() -> None:
    first, first_error = clock.perf_offset()
    time.sleep(0.05)
    second, second_error = clock.perf_offset()
    assert abs(second - first) <= first_error + second_error + 100_000
    assert first_error < 100_000_000


@pytest.mark.usefixtures("own_events")
def test_it_began_with_the_machine() -> None:
    offset, _ = clock.perf_offset()
    began = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    assert abs(offset / 1e9 - began) < 60


@pytest.mark.usefixtures("own_events")
def test_nothing_is_left_and_the_thread_keeps_its_name() -> None:
    found = []

    def ask() -> None:
        Path("/proc/thread-self/comm").write_text("named")
        before = open_descriptors()
        clock.perf_offset()
        found.append((Path("/proc/thread-self/comm").read_text(), open_descriptors() - before))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [("named\n", 0)]
