# SPDX-License-Identifier: Apache-2.0
"""Descriptors are closed, all of them, by somebody else."""

from __future__ import annotations

import os

from buildidfs.linux.fd_closer import Closer
from tests.support.waiting import until


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_all_are_closed_before_it_is_finished() -> None:
    fds = [os.open("/", os.O_PATH) for _ in range(50)]
    closer = Closer()
    closer.close(fds[:10])
    closer.close(())
    until(lambda: not any(map(is_open, fds[:10])), "the first to be closed")
    assert all(map(is_open, fds[10:]))
    closer.close(fds[10:])
    assert closer.finish(20)
    assert not any(map(is_open, fds))


def test_one_that_is_not_open_does_not_stop_it() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    closer = Closer()
    closer.close((reading, writing))
    assert closer.finish(20)
    assert not is_open(writing)


def test_delay_holds_until_the_end() -> None:
    fds = [os.open("/", os.O_PATH) for _ in range(3)]
    closer = Closer(delay=3600)
    closer.close(fds)
    assert all(map(is_open, fds))
    assert closer.finish(20)
    assert not any(map(is_open, fds))
