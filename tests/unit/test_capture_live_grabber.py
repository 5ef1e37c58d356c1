# SPDX-License-Identifier: Apache-2.0
"""Mappings that changed, the shares of new files, and processes that generate code."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buildidfs.capture.live.admission import RecentFiles
from buildidfs.capture.live.grabber import CatcherState, Lookout, end_now
from buildidfs.capture.live.process_table import Home
from buildidfs.capture.live.protocol import Generated, Message
from buildidfs.capture.origin.path_access import NOBODY
from buildidfs.formats.perf.records import ExecutableMemory, Exited, Mapped
from buildidfs.formats.proc_text import mappings_in
from buildidfs.linux import procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import NamespaceSet
from buildidfs.shares import Share, of_user
from tests.support.clients.tools import tool
from tests.support.elf import echo
from tests.support.filesystems import userfs
from tests.support.harness.children import running
from tests.support.harness.scans import open_descriptors

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
def state(sent: Sent) -> Iterator[CatcherState]:
    unused: Any = None
    outbox: Any = sent
    made = CatcherState(unused, outbox, unused)
    yield made
    made.closer.finish(10.0)


def home(mnt: int) -> Home:
    return Home(NamespaceSet(mnt=mnt))


def test_process_that_generates_code_is_reported_now_and_then(
    state: CatcherState, sent: Sent
) -> None:
    own = os.getpid()
    for second in range(30):
        state.apply(ExecutableMemory(second * 1_000_000_000, own))
        state.send_reports()
    assert sent.pids == [own] * 3
    state.apply(Exited(30_000_000_000, own))
    state.apply(ExecutableMemory(30_000_000_001, own))  # another process
    state.apply(ExecutableMemory(30_000_000_001, GONE))
    state.send_reports()
    assert sent.pids == [own] * 4


def test_container_with_many_compilers_uses_up_its_share(state: CatcherState, sent: Sent) -> None:
    for pid in range(GONE + 1, GONE + 5001):
        state.report_generated(pid, 1, home(mnt=4242))
    state.send_reports()
    assert len(sent.pids) < 2000
    state.report_generated(os.getpid(), 1, home(mnt=state.host))
    state.send_reports()
    assert sent.pids[-1] == os.getpid()


@pytest.mark.root
def test_user_of_the_host_with_many_compilers_uses_up_a_share(
    state: CatcherState, sent: Sent
) -> None:
    argv = ["sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(argv, user=4242, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for second in range(0, 20_000, 10):
            state.report_generated(process.pid, second * 1_000_000_000, home(mnt=state.host))
        state.send_reports()
        process.kill()
    assert 100 < len(sent.pids) < 1500
    (share,) = {each.share for each in sent.messages if isinstance(each, Generated)}
    assert share == Share("uid 4242")


# --- files of the host ---------------------------------------------------------------------------


def lookout_of(state: CatcherState, home: Home) -> Lookout:
    """A lookout after ``userfs.UID`` and users whose processes are gone used up their shares."""
    state.recent = RecentFiles()
    for user in (userfs.UID, NOBODY):
        while state.shares.admit(of_user(user)):
            pass
    home.mnt_ns_id = 1
    return Lookout(state, 0)


def first_code(pid: int, path: bytes) -> Mapped:
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        found = next(
            each for each in mappings_in(procfs.maps(pid_fd)) if each.executable and each.inode
        )
    return Mapped(1, pid, found.start, found.end, 0, path, inode=found.inode)


@pytest.mark.root
@pytest.mark.fuse
def test_user_with_a_fuse_server_that_shows_files_of_root_has_a_limit(
    state: CatcherState, directory: Path
) -> None:
    host = home(mnt=state.host)
    lookout = lookout_of(state, host)
    program, mountpoint = directory / "program", directory / "mnt"
    echo.build(program)
    mountpoint.mkdir()
    directory.chmod(0o755)
    with userfs.served(mountpoint, program, "public") as server:
        argv = [*userfs.entering(server, "public"), mountpoint / "app"]
        with running(argv) as child:
            record = first_code(child.pid, os.fsencode(mountpoint / "app"))
            lookout._grab(record, host)
            assert state.grips.empty()
        with running([mountpoint / "app"]) as child:
            lookout._grab(first_code(child.pid, record.path), host)
            assert state.grips.empty(), "run by root"
    with running([program]) as child:
        lookout._grab(first_code(child.pid, os.fsencode(program)), host)
        os.close(state.grips.get()[2])
    lookout.finish()


@pytest.mark.root
def test_processes_that_are_gone_have_the_limit_of_the_user_of_their_file(
    state: CatcherState, tmp_path: Path
) -> None:
    host = home(mnt=state.host)
    lookout = lookout_of(state, host)
    path = tmp_path / "file"
    path.touch()

    def grab(inode: int) -> int:
        lookout._grab(Mapped(1, GONE, 0x1000, 0x2000, 0, os.fsencode(path), inode=inode), host)
        return state.grips.qsize()

    assert grab(0) == 0, "no such file"
    os.chown(path, userfs.UID, 0)
    assert grab(path.stat().st_ino) == 0, "of the user"
    os.chown(path, 0, 0)
    assert grab(path.stat().st_ino) == 1, "of root"
    os.close(state.grips.get()[2])
    lookout.finish()


@pytest.mark.root
def test_home_on_the_host_that_is_not_known_yet_gives_no_second_share(
    state: CatcherState, directory: Path
) -> None:
    """Each process of a user in a new network namespace has such a home."""
    new = home(mnt=state.host)
    lookout = lookout_of(state, new)
    new.mnt_ns_id = 0
    argv = [tool("setpriv"), f"--reuid={userfs.UID}", "--clear-groups", copy_of_cat(directory)]
    with running(argv) as child:
        lookout._grab(first_code(child.pid, os.fsencode(directory / "cat")), new)
    assert state.grips.empty()
    lookout.finish()


def copy_of_cat(directory: Path) -> Path:
    copy = directory / "cat"
    shutil.copy(tool("cat"), copy)
    os.chown(copy, userfs.UID, 0)
    directory.chmod(0o755)
    return copy
