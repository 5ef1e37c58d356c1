# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.clock says what the kernel says in another way."""

from __future__ import annotations

import ctypes

from buildidfs.linux import clock, syscalls

_TIME_ERROR = 5  # what adjtimex returns while the clock is not synchronised


def test_synchronised_unless_the_kernel_calls_it_an_error() -> None:
    state = syscalls.libc.ntp_adjtime(ctypes.create_string_buffer(512))
    assert 0 <= state <= _TIME_ERROR
    assert clock.is_synchronised() == (state != _TIME_ERROR)
