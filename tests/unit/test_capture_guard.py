# SPDX-License-Identifier: Apache-2.0
"""Whatever becomes of the process that execs wait for, no exec waits for long.

All of it on a filesystem that only the test has, so that nobody else is held up.
"""

from __future__ import annotations

import os
import re
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.guard import EXIT_HUNG
from buildidfs.linux import mounts
from tests.support.children import cat_program, needs_root
from tests.support.clients import run, tool
from tests.support.guarded import guarded, start_program
from tests.support.waiting import until

pytestmark = [pytest.mark.root, needs_root("fanotify marks of filesystems")]

# The limit is 0.2 s, and machines are busy.
SOON = 1.5


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of the test's own with a program on it."""
    path = tmp_path / "private"
    path.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", path], check=True)
    try:
        (path / "cat").write_bytes(cat_program().read_bytes())
        (path / "cat").chmod(0o755)
        yield path
    finally:
        mounts.umount2(os.fsencode(path), mounts.MNT_DETACH)


def seconds_to_run(private: Path) -> float:
    """How long a program takes that has to be allowed."""
    began = time.monotonic()
    with start_program(private) as child:
        assert child.wait(20) == 0
    return time.monotonic() - began


def looks(guard: int) -> int:
    """How often the guard has slept and woken up."""
    status = Path(f"/proc/{guard}/status").read_text()
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def let_it_look(guard: int, times: int = 12) -> None:
    """Wait until the guard has looked so often: three times what it takes to be sure."""
    before = looks(guard)
    until(lambda: looks(guard) >= before + times, "the guard to look")


def gone(pid: int) -> bool:
    """Whether the process has ended, whoever has to take note of that."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_one_that_answers_is_left_alone(private: Path) -> None:
    with guarded("answer", private) as it:
        for _ in range(20):
            assert seconds_to_run(private) < SOON
        let_it_look(it.guard)
        assert not gone(it.child)


@pytest.mark.parametrize("mode", ["spin", "hold"])
def test_one_that_keeps_an_exec_waiting_is_ended(private: Path, mode: str) -> None:
    with guarded(mode, private) as it:
        let_it_look(it.guard)
        assert not gone(it.child)
        assert seconds_to_run(private) < SOON
        assert it.code() == EXIT_HUNG
        assert gone(it.child)
        assert seconds_to_run(private) < SOON


def test_one_that_is_stopped_is_ended_when_somebody_waits(private: Path) -> None:
    with guarded("answer", private) as it:
        assert seconds_to_run(private) < SOON
        os.kill(it.child, signal.SIGSTOP)
        let_it_look(it.guard)
        assert not gone(it.child), "nobody was waiting for it"
        assert seconds_to_run(private) < SOON
        assert it.code() == EXIT_HUNG
        assert gone(it.child)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_the_guard_is_the_end_of_its_child(private: Path, number: int) -> None:
    with guarded("hold", private) as it, start_program(private) as waiting:
        os.kill(it.guard, number)
        until(lambda: gone(it.child), "the end of the child", SOON)
        assert waiting.wait(SOON) == 0


def test_the_terminal_stops_neither(private: Path) -> None:
    with guarded("answer", private) as it:
        for number in (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU):
            for pid in (it.guard, it.child):
                os.kill(pid, number)
        let_it_look(it.guard)
        assert seconds_to_run(private) < SOON
        assert not gone(it.child)


def test_the_death_of_the_child_lets_everybody_go_on(private: Path) -> None:
    with guarded("hold", private, limit=9.0) as it, start_program(private) as waiting:
        os.kill(it.child, signal.SIGKILL)
        assert waiting.wait(SOON) == 0
        assert it.code() == 128 + signal.SIGKILL


def test_what_the_child_returns_is_passed_on(private: Path) -> None:
    with guarded("return", private) as it:
        assert it.code() == 7


def test_a_fault_of_the_child_is_one_line(private: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with guarded("raise", private) as it:
        assert it.code() == 1
    assert capfd.readouterr().err == "watching ended: RuntimeError: a fault\n"


def test_everybody_can_be_let_go_without_the_holder(private: Path) -> None:
    """What is done about a child that even SIGKILL does not end, here by another's hand."""
    with guarded("release", private, limit=9.0) as it:
        assert seconds_to_run(private) < SOON
        # Nobody is asked any more, although the child is still there, and stopped.
        os.kill(it.child, signal.SIGSTOP)
        assert seconds_to_run(private) < SOON
        assert not gone(it.child)
        assert not select.select([it.process.stdout], [], [], 0)[0]
