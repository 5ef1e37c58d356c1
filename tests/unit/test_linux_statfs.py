# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.statfs: the kind of a filesystem, by any descriptor."""

from __future__ import annotations

import os

import pytest

from buildidfs.linux import statfs


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_magic_of_proc(flags: int) -> None:
    fd = os.open("/proc/self/status", flags)
    try:
        assert statfs.magic(fd) == 0x9FA0
    finally:
        os.close(fd)


def test_what_is_not_open() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        statfs.magic(-1)
