# SPDX-License-Identifier: Apache-2.0
"""Mappings that changed, the shares of new files, and processes that generate code."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.live.grabber import FairShare, State, end_now
from buildidfs.capture.live.process_table import Home
from buildidfs.capture.live.protocol import Generated, Message
from buildidfs.formats.perf.records import Exited, Mapped
from buildidfs.formats.perf.records import Generated as GeneratedRecord
from buildidfs.linux import procfs
from buildidfs.model import NamespaceSet
from tests.support.scans import open_descriptors

GONE = 4194303
CODE = mmap.PROT_READ | mmap.PROT_EXEC


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def test_where_a_mapping_ends_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    pid_fd = procfs.open_pid(os.getpid())
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, CODE):
        (mapping,) = [
            one
            for line in procfs.maps(pid_fd).splitlines()
            if line.endswith(os.fsencode(path))
            for one in [line.split()[0].split(b"-")]
        ]
        start, end = (int(part, 16) for part in mapping)
        cut = Mapped(1, os.getpid(), start, end + 0x5000, 0, b"/x", inode=1)
        inside = Mapped(1, os.getpid(), start + mmap.PAGESIZE, end, 0, b"/x", inode=1)
        assert (end_now(cut), end_now(inside)) == (end, 0)

        def refused(*_: object) -> None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

        monkeypatch.setattr(procfs, "executable_at", refused)
        assert (end_now(cut), end_now(inside)) == (end, 0)
    os.close(pid_fd)
    assert end_now(cut) == 0
    assert end_now(Mapped(1, GONE, start, end, 0, b"/x", inode=1)) == 0


def taken(shares: FairShare, share: int | str, most: int = 100_000) -> int:
    """How many more a share admits now."""
    count = 0
    while count < most and shares.admit(share):
        count += 1
    return count


def test_burst_and_then_the_rate() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    assert taken(shares, 7) == 1000
    assert shares.is_exhausted(7)
    shares.refill(0.5)
    assert taken(shares, 7) == 50
    shares.refill(100.0)
    assert taken(shares, 7) == 100, "a pause is worth a second at most"


def test_flood_leaves_others_their_share() -> None:
    shares = FairShare(per_second=100, burst=1000)
    shares.refill(0.0)
    taken(shares, 7)
    assert not shares.is_exhausted("docker:a")
    assert taken(shares, "docker:a") == 1000
    shares.refill(1.0)
    assert (taken(shares, 7), taken(shares, "docker:a")) == (50, 50)


def test_share_that_is_not_used_any_more_is_forgotten() -> None:
    shares = FairShare(per_second=1000, burst=1000)
    shares.refill(0.0)
    assert shares.admit(7)
    assert shares.is_pressed
    shares.refill(1.0)
    assert not shares.is_pressed


def test_number_of_shares_is_bounded() -> None:
    shares = FairShare(per_second=0, burst=1000)
    home = Home(NamespaceSet(mnt=7))
    for number in range(5000):
        shares.admit(number)
        shares.drop(number, home, b"/app")
    dropped = shares.take_dropped()
    assert len(dropped) <= 1025
    assert sum(each.count for each in dropped) == 5000
    assert shares.take_dropped() == []
    assert taken(shares, "new") < 1000, "all that have no row have one together"


def test_dropped_mappings_are_named_and_counted() -> None:
    shares = FairShare()
    home = Home(NamespaceSet(mnt=7))
    for number in range(10_000):
        shares.drop(7, home, b"/lib/%d.so" % number)
    (dropped,) = shares.take_dropped()
    assert (dropped.home, dropped.count) == (home, 10_000)
    assert dropped.paths[0] == b"/lib/0.so"
    assert sum(map(len, dropped.paths)) <= 4096, "it fits into one message"


def test_share_is_the_container_and_else_the_mount_namespace() -> None:
    home = Home(NamespaceSet(mnt=7))
    assert home.share == 7
    home.label = "docker:a"
    assert home.share == "docker:a"


# --- generated code ------------------------------------------------------------------------------


class Sent:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def put(self, message: Message, fd: int = -1) -> None:
        self.messages.append(message)

    def flush(self) -> None:
        """All is sent already."""

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self.messages if isinstance(each, Generated)]


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def state(sent: Sent) -> Iterator[State]:
    unused: Any = None
    outbox: Any = sent
    made = State(unused, outbox, unused)
    yield made
    made.closer.finish(10.0)


def home(mnt: int) -> Home:
    return Home(NamespaceSet(mnt=mnt))


def test_process_that_generates_code_is_told_of_now_and_then(state: State, sent: Sent) -> None:
    for second in range(30):
        state.apply(GeneratedRecord(second * 1_000_000_000, 7))
    assert sent.pids == [7, 7, 7]
    state.apply(Exited(30_000_000_000, 7))
    state.apply(GeneratedRecord(30_000_000_001, 7))  # another process
    assert sent.pids == [7, 7, 7, 7]


def test_container_with_many_compilers_uses_up_its_share(state: State, sent: Sent) -> None:
    for pid in range(1, 5001):
        state.tell_generated(pid, 1, home(mnt=4242))
    assert len(sent.pids) < 2000
    for pid in range(6001, 8001):
        state.tell_generated(pid, 1, home(mnt=state.host))
    assert set(sent.pids) > set(range(6001, 8001))
