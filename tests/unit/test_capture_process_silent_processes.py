# SPDX-License-Identifier: Apache-2.0
"""Questions about processes that answer, or do not answer, and their owners."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.process import silent_processes as processes
from buildidfs.capture.process.silent_processes import NoAnswer, ProcessGate, described, owner_of
from buildidfs.linux import procfs, threads
from tests.support.filesystems.userfs import UID
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def ours() -> Iterator[int]:
    fd = procfs.open_pid(os.getpid())
    yield fd
    os.close(fd)


def test_answers_and_errors_are_those_of_the_question(ours: int) -> None:
    gate = ProcessGate()
    assert gate.ask(ours, os.getpid(), procfs.start_ticks) == procfs.start_ticks(ours)
    with pytest.raises(FileNotFoundError):
        gate.ask(ours, os.getpid(), lambda fd: os.stat("nowhere", dir_fd=fd))


@pytest.fixture
def _held(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for an event counts as one that the kernel holds."""
    monkeypatch.setattr(threads, "is_held", lambda thread: True)


@pytest.mark.usefixtures("_held")
def test_silent_process_is_asked_once_until_it_answers(ours: int) -> None:
    gate, release, late = ProcessGate(0.01), threading.Event(), list[int]()
    with pytest.raises(NoAnswer):
        gate.ask(ours, os.getpid(), lambda fd: int(release.wait(30)), late.append)
    (silent,) = gate.silent.rows()
    assert silent.pid == os.getpid()
    assert described([silent]).startswith("1 process does not answer")
    with pytest.raises(NoAnswer):
        gate.ask(ours, os.getpid(), lambda fd: pytest.fail("it was asked"))
    release.set()
    until(lambda: not len(gate.silent), "the late answer")
    assert late == [1]
    assert gate.ask(ours, os.getpid(), lambda fd: 7) == 7


def _is_answered(gate: ProcessGate, pid_fd: int, pid: int) -> bool:
    try:
        gate.ask(pid_fd, pid, lambda fd: time.sleep(0.1))
    except NoAnswer:
        return False
    return True


@pytest.mark.root
@pytest.mark.usefixtures("_held")
def test_owner_whose_processes_answer_slowly_takes_no_more_time(ours: int) -> None:
    """Each answer comes in time, so no process is silent."""
    gate = ProcessGate()
    with (
        subprocess.Popen(["sleep", "60"], user=UID) as slow,
        subprocess.Popen(["sleep", "60"], user=UID + 1) as other,
    ):
        slow_fd, other_fd = procfs.open_pid(slow.pid), procfs.open_pid(other.pid)
        asked = sum(iter(lambda: _is_answered(gate, slow_fd, slow.pid), False))
        assert 0 < asked < 20
        assert gate.silent.unasked() == (slow.pid,)
        assert gate.ask(other_fd, other.pid, lambda fd: 7) == 7
        for _ in range(20):  # root of the host has no limit
            gate.ask(ours, os.getpid(), lambda fd: time.sleep(0.06))
        for fd in (slow_fd, other_fd):
            os.close(fd)
        slow.kill()
        other.kill()


def test_thread_without_a_cpu_is_no_silent_process(ours: int) -> None:
    def work(fd: int) -> int:
        began = time.thread_time()
        while time.thread_time() - began < 0.1:
            pass
        return fd

    assert ProcessGate(0.01).ask(ours, os.getpid(), work) >= 0


def test_thread_that_waits_for_a_pipe_is_held_and_one_that_waits_for_a_lock_is_not() -> None:
    reading, writing = os.pipe()
    lock = threading.Lock()
    lock.acquire()
    of_pipe = threading.Thread(target=os.read, args=(reading, 1))
    of_lock = threading.Thread(target=lock.acquire)
    of_pipe.start()
    of_lock.start()
    until(lambda: threads.is_held(of_pipe.native_id or 0), "the wait for the pipe")
    assert not threads.is_held(of_lock.native_id or 0)
    os.write(writing, b".")
    lock.release()
    for thread in (of_pipe, of_lock):
        thread.join()
    os.close(reading)
    os.close(writing)


@pytest.mark.root
@pytest.mark.usefixtures("_held")
def test_silent_processes_of_one_owner_take_bounded_time_and_nothing_of_others(
    ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_SHORT_S", 0.01)
    gate, release = ProcessGate(0.05), threading.Event()
    users = [subprocess.Popen(["sleep", "60"], user=UID, group=UID) for _ in range(40)]
    fds = [procfs.open_pid(user.pid) for user in users]
    try:
        for user, fd in zip(users, fds, strict=True):
            with pytest.raises(NoAnswer):
                gate.ask(fd, user.pid, lambda fd: release.wait(30))
        count = len(gate.silent)
        # On a busy host the time of one owner ends before the number of their processes.
        assert 0 < count <= 16
        said = described(gate.silent.rows(), gate.silent.unasked())
        assert all(f"{user.pid} (sleep)" in said for user in users[: min(count, 12)])
        more = f" and {count - 12} more" if count > 12 else ""
        assert said.endswith(f"{more}; {40 - count} more of the same owner not asked")
        assert owner_of(ours) == ""
        assert owner_of(fds[0]) == f"uid {UID}"
        assert gate.ask(ours, os.getpid(), lambda fd: 7) == 7
    finally:
        release.set()
        for user, fd in zip(users, fds, strict=True):
            os.close(fd)
            user.kill()
            user.wait()
