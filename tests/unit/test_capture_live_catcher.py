# SPDX-License-Identifier: Apache-2.0
"""The catcher's guard over its threads, and its turns."""

from __future__ import annotations

import os
import select
import socket

import pytest

from buildidfs.capture.live import protocol
from buildidfs.capture.live.catcher import Catcher
from buildidfs.capture.live.grabber import Lookout
from buildidfs.capture.process.silent_processes import MOST


class _Stuck(Lookout):
    """A lookout whose thread waits for this process."""

    def stuck(self, seconds: float) -> tuple[float, int] | None:
        return 0.0, os.getpid()


@pytest.mark.root
def test_catcher_ends_when_the_most_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = list[int]()
    monkeypatch.setattr(os, "_exit", ends.append)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, select.epoll() as poller:
        catcher = Catcher(theirs)
        monkeypatch.setattr(catcher, "_begin", lambda lookout, poller: None)
        for _ in range(MOST):
            assert not ends
            lookout = _Stuck(catcher._state, 0)
            catcher._lookouts[lookout] = poller
            catcher._replace_stuck(lookout, poller)
            assert lookout.is_replaced
        assert ends == [1]
        received = protocol.receive(ours)
    assert received is not None
    assert received[0] == protocol.CatcherFailed("too many processes do not answer")


@pytest.mark.root
def test_tick_is_idle_if_nothing_was_counted() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        catcher = Catcher(theirs)
        catcher._state.counts.records += 1
        assert catcher._tick()
        received = protocol.receive(ours)
        assert received is not None
        assert received[0] == catcher._state.counts
        assert not catcher._tick()
