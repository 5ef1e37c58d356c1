# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.syscalls: results, errors, and request codes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from buildidfs.linux import syscalls

_CLOSE_RANGE = 436  # like openat2, the same number everywhere


def test_a_result_comes_back() -> None:
    fd = os.open("/", os.O_PATH)
    assert syscalls.syscall(_CLOSE_RANGE, fd, fd, 0) == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_error_becomes_the_right_exception() -> None:
    with pytest.raises(OSError, match="Invalid argument") as caught:
        syscalls.syscall(_CLOSE_RANGE, 5, 4, 0, filename=b"what it was about")
    assert caught.value.errno == errno.EINVAL
    assert caught.value.filename == b"what it was about"
    with pytest.raises(OSError, match="not implemented"):
        syscalls.syscall(0x7FFF)


def test_paths_with_a_nul_are_refused() -> None:
    assert syscalls.check_path(b"/a/\xff") == b"/a/\xff"
    with pytest.raises(OSError, match="NUL") as caught:
        syscalls.check_path(b"/a\0b")
    assert caught.value.errno == errno.EINVAL


def test_request_codes_are_those_of_the_headers() -> None:
    """_IOWR('f', 17, 104 bytes), _IOR(0xb7, 5, u64)."""
    assert syscalls.ioc_read_write(ord("f"), 17, 104) == 0xC0686611
    assert syscalls.ioc_read(0xB7, 5, 8) == 0x8008B705


def test_importing_it_brings_little_along() -> None:
    script = (
        "import sys, ctypes; before = set(sys.modules);"
        "import buildidfs.linux.syscalls; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    added = set(done.stdout.decode().split()) - {"__future__", "errno"}
    assert added == {"buildidfs", "buildidfs.linux", "buildidfs.linux.syscalls"}
