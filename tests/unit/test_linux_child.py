# SPDX-License-Identifier: Apache-2.0
"""Child processes: their start, their end, and those that the kernel keeps."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from buildidfs.linux import child
from tests.support.clients.tools import tool
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import lines, until

ROOT = Path(__file__).resolve().parents[2]

_PARENT = """
import os, signal, sys, time
from buildidfs.linux import syscalls
me, wait = os.getpid(), os.pipe()
child = os.fork()
if child == 0:
    os.close(wait[1])
    if sys.argv[1] == "late":
        os.read(wait[0], 1)
    syscalls.end_with(me, signal.SIGTERM)
    os.execvp("sleep", ["sleep", "1000"])
print(child, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["early", "late"])
def test_child_ends_with_its_parent(when: str) -> None:
    argv = [sys.executable, "-c", _PARENT, when]
    with subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        grandchild = os.pidfd_open(int(lines(parent.stdout, lambda got: len(got) == 1)[0]))
        try:
            assert select.select([grandchild], [], [], 0)[0] == []
            parent.kill()
            assert select.select([grandchild], [], [], 20)[0] == [grandchild]
        finally:
            if not select.select([grandchild], [], [], 0)[0]:
                signal.pidfd_send_signal(grandchild, signal.SIGKILL)
            os.close(grandchild)


def test_start_tells_the_exit_status_and_the_signal() -> None:
    for script, code in (("exit 7", 7), ("kill -TERM $$", -signal.SIGTERM)):
        process = child.start([tool("sh"), "-c", script])
        assert process.wait(30) == code
        assert process.poll() == process.code == code
        process.send(signal.SIGKILL)  # it is reaped: nothing gets it


def test_wait_ends_after_its_time_and_the_pidfd_tells_the_end() -> None:
    before = open_descriptors()
    process = child.start([tool("sleep"), "60"])
    assert process.wait(0.01) is None
    poll = select.poll()
    poll.register(process.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    process.send(signal.SIGTERM)
    assert poll.poll(30_000)
    assert process.wait() == -signal.SIGTERM
    assert open_descriptors() <= before


def test_wait_works_without_pidfds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise PermissionError(1, "a filter of system calls")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    assert child.start([tool("true")]).wait(30) == 0


def test_pipes_lead_to_the_program() -> None:
    process = child.start([tool("cat")], stdin=child.PIPE, stdout=child.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"hello")
    process.stdin.close()
    assert process.stdout.read() == b"hello"
    assert process.wait(30) == 0
    assert process.end(1)


def test_group_gets_the_signal_too() -> None:
    script = "sleep 60 & echo $!; wait"
    process = child.start([tool("sh"), "-c", script], stdout=child.PIPE, new_session=True)
    assert process.stdout is not None
    grandchild = os.pidfd_open(int(process.stdout.readline()))
    process.send(signal.SIGKILL, group=True)
    assert process.wait(30) == -signal.SIGKILL
    assert select.select([grandchild], [], [], 30)[0]
    os.close(grandchild)
    process.stdout.close()


def test_fork_does_the_work_and_ends() -> None:
    reading, writing = os.pipe()
    process = child.fork(lambda: os.write(writing, b"done"))
    assert process.wait(30) == 0
    assert os.read(reading, 10) == b"done"
    os.close(reading)
    os.close(writing)


def test_child_that_the_kernel_keeps_is_reaped_later(monkeypatch: pytest.MonkeyPatch) -> None:
    process = child.start([tool("sleep"), "60"])
    monkeypatch.setattr(process, "send", lambda number: None)
    assert not process.end(0.01)
    before = child.left_behind()
    assert before >= 1
    os.kill(process.pid, signal.SIGKILL)
    until(lambda: child.left_behind() == before - 1, "its end")
    assert process.code == -signal.SIGKILL


def test_missing_program_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        child.start(["/nonexistent/program"])
