# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.buffers: memory that is large enough, aligned, and writable."""

from __future__ import annotations

import ctypes

import pytest

from buildidfs.mount.buffers import huge


@pytest.mark.parametrize("size", [1, 1 << 20, 2 << 20, (2 << 20) + 1])
def test_huge(size: int) -> None:
    buffer = huge(size)
    assert len(buffer) >= size
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % (2 << 20) == 0
    buffer[-1] = 7
    assert buffer[0] == 0
    assert buffer[-1] == 7
