# SPDX-License-Identifier: Apache-2.0
"""Mappings that changed, the shares of new files, and processes that generate code."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.live.grabber import State, end_now
from buildidfs.capture.live.process_table import Home
from buildidfs.capture.live.protocol import Generated, Message
from buildidfs.formats.perf.records import Exited, Mapped
from buildidfs.formats.perf.records import Generated as GeneratedRecord
from buildidfs.linux import procfs
from buildidfs.model import NamespaceSet
from buildidfs.shares import Share
from tests.support.scans import open_descriptors

CODE = mmap.PROT_READ | mmap.PROT_EXEC

GONE = 4194303


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
        assert (end_now(pid_fd, cut), end_now(pid_fd, inside)) == (end, 0)

        def refused(*_: object) -> None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))

        monkeypatch.setattr(procfs, "executable_at", refused)
        assert (end_now(pid_fd, cut), end_now(pid_fd, inside)) == (end, 0)
    assert end_now(pid_fd, cut) == 0
    os.close(pid_fd)


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


def test_process_that_generates_code_is_reported_now_and_then(state: State, sent: Sent) -> None:
    own = os.getpid()
    for second in range(30):
        state.apply(GeneratedRecord(second * 1_000_000_000, own))
        state.send_reports()
    assert sent.pids == [own] * 3
    state.apply(Exited(30_000_000_000, own))
    state.apply(GeneratedRecord(30_000_000_001, own))  # another process
    state.apply(GeneratedRecord(30_000_000_001, GONE))
    state.send_reports()
    assert sent.pids == [own] * 4


def test_container_with_many_compilers_uses_up_its_share(state: State, sent: Sent) -> None:
    for pid in range(1, 5001):
        state.tell_generated(pid, 1, home(mnt=4242))
    state.send_reports()
    assert len(sent.pids) < 2000
    state.tell_generated(os.getpid(), 1, home(mnt=state.host))
    state.send_reports()
    assert sent.pids[-1] == os.getpid()


@pytest.mark.root
def test_user_of_the_host_with_many_compilers_uses_up_a_share(state: State, sent: Sent) -> None:
    argv = ["sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(argv, user=4242, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for second in range(0, 20_000, 10):
            state.tell_generated(process.pid, second * 1_000_000_000, home(mnt=state.host))
        state.send_reports()
        process.kill()
    assert 100 < len(sent.pids) < 1500
    (share,) = {each.share for each in sent.messages if isinstance(each, Generated)}
    assert share == Share("uid 4242")
