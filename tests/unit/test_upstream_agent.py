# SPDX-License-Identifier: Apache-2.0
"""The process that fetches for a front door: how it ends, and starts again after a fault."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

from buildidfs.config import Settings
from buildidfs.model import BuildId, Kind
from buildidfs.profile import fetch
from buildidfs.upstream import agent
from buildidfs.upstream.fetcher import Upstreams
from buildidfs.upstream.options import FetchOptions, FetchState
from tests.support.harness.waiting import until
from tests.support.servers.upstreams import Handler, Upstream, serving_files, upstream

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from buildidfs.store import Store
    from buildidfs.upstream.agent import Agent

ID, OTHER = (BuildId(bytes([number]) * 20) for number in (1, 2))


@contextlib.contextmanager
def asking(store: Store, server: Upstream, wait: float = 30.0) -> Iterator[Agent]:
    options = FetchOptions((server.url,), timeout=60.0, wait=wait)
    with contextlib.closing(fetch.agent_of(store.path, Settings(), options)) as asker:
        yield asker


def children() -> list[int]:
    """The processes that fetch for this one."""
    mine = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    every = [int(pid) for file in mine for pid in file.read_text().split()]
    return [pid for pid in every if fetch.__name__.encode() in _words(pid)]


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def test_process_ends_by_itself_when_the_agent_is_closed(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with upstream(serving_files({})) as server, asking(store, server) as asker:
        assert asker.fetch(ID, Kind.DEBUGINFO) == FetchState.ABSENT
        assert len(children()) == 1
    assert not children()
    assert "is killed" not in caplog.text


def test_process_whose_server_hangs_ends_by_itself(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with upstream(Handler.hang) as server:
        with asking(store, server, wait=0.1) as asker:
            assert asker.fetch(ID, Kind.DEBUGINFO) == agent.LATE
            until(lambda: server.requests, "a request")
        assert not children()
    assert "is killed" not in caplog.text


def test_process_that_was_killed_is_started_again_at_once(store: Store) -> None:
    def answer(build_id: BuildId) -> bool:
        return asker.fetch(build_id, Kind.DEBUGINFO) == FetchState.ABSENT

    with upstream(serving_files({})) as server, asking(store, server) as asker:
        assert answer(ID)
        first = children()
        os.kill(first[0], signal.SIGKILL)
        until(lambda: first != children(), "its end")
        until(lambda: answer(OTHER), "an answer of the next process")


def test_absence_that_another_process_found_causes_no_request(store: Store) -> None:
    with upstream(serving_files({})) as server:
        options = FetchOptions((server.url,))
        with Upstreams(store, options) as upstreams:
            assert upstreams.fetch(ID, Kind.DEBUGINFO).state is FetchState.ABSENT
        with contextlib.closing(fetch.agent_of(store.path, Settings(), options)) as asker:
            assert not asker.is_worth_asking(ID, Kind.DEBUGINFO)
            assert asker.fetch(ID, Kind.DEBUGINFO) == FetchState.ABSENT
            assert asker.is_worth_asking(OTHER, Kind.DEBUGINFO)
            assert not children()
        assert sum(server.requests.values()) == 1


def test_failure_is_no_absence_and_is_not_repeated_at_once(store: Store) -> None:
    def broken(handler: Handler) -> None:
        handler.send(b"", 400)

    with upstream(broken) as server, asking(store, server) as asker:
        for _ in range(3):
            assert asker.fetch(ID, Kind.DEBUGINFO) == FetchState.UNAVAILABLE
        assert not asker.is_worth_asking(ID, Kind.DEBUGINFO)
        assert sum(server.requests.values()) == 1
