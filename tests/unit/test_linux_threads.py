# SPDX-License-Identifier: Apache-2.0
"""Descriptors are closed, all of them, by somebody else."""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from buildidfs.linux import threads
from buildidfs.linux.threads import Alarm, Closer
from tests.support.clients.tools import run, tool
from tests.support.filesystems.silentfs import served
from tests.support.harness.children import needs_root
from tests.support.harness.waiting import until


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


def test_room_for_descriptors_is_made_before_it_is_needed() -> None:
    """In a process of its own, because a table of descriptors never becomes smaller."""
    program = """
import re, resource
from buildidfs.linux import threads
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
room = lambda: int(re.search("FDSize:(.*)", open("/proc/self/status").read())[1])
before = room()
threads.reserve_descriptors(1000)
print(before, room())
threads.reserve_descriptors(1 << 40)
print(room())
"""
    done = run([sys.executable, "-c", program], check=True)
    before, after, most = map(int, done.out.split())
    assert before < 1000 <= after < 2000 <= most


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


@pytest.mark.root
@pytest.mark.fuse
def test_a_filesystem_that_never_answers_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel asks the server about each close, and the thread cannot be woken."""
    monkeypatch.setattr(threads, "_SLOW_CLOSE_S", 0.05)
    monkeypatch.setattr(threads, "_MOST_CLOSING", 3)
    tmp_path.joinpath("mnt").mkdir()
    closer = Closer()
    with served(tmp_path / "mnt", Path(tool("true"))) as server:
        silent = [os.open(tmp_path / "mnt/app", os.O_RDONLY) for _ in range(3)]
        server.send_signal(signal.SIGSTOP)
        for fd in silent[:2]:
            other = os.open("/", os.O_PATH)
            closer.close([fd])
            closer.close([other])
            until(lambda other=other: closer.relieve() or not is_open(other), "another thread")
            assert not closer.is_stuck()
        closer.close(silent[2:])
        until(closer.is_stuck, "the last thread to wait")
        assert not closer.finish(0.1)
        server.send_signal(signal.SIGCONT)
        until(lambda: not closer.is_stuck(), "an answer")
    assert closer.finish(20)


_HURRY = """
import os
from buildidfs.linux import threads
print(repr(threads.hurry()))
def policy():
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK, os.getpriority(os.PRIO_PROCESS, 0)
print(policy(), flush=True)
if not os.fork():
    print(policy(), flush=True)
    os._exit(0)
os.wait()
"""


def hurried(*under: str) -> tuple[str, str, str]:
    """The answer of `hurry` in a process run ``under`` a command, its urgency, and its child's."""
    out = run([*under, sys.executable, "-c", _HURRY], cwd=Path(__file__).parents[2], check=True).out
    said, own, childs = out.splitlines()
    return said, own, childs


@pytest.mark.root
@needs_root("real-time scheduling")
def test_before_all_others() -> None:
    said, own, childs = hurried()
    if said != "None":
        pytest.skip(f"this root may not: {said}")
    assert own.startswith(f"({os.SCHED_RR},")
    assert childs.startswith(f"({os.SCHED_OTHER},")


@pytest.mark.root
@needs_root("drops capabilities")
def test_refused() -> None:
    said, own, _ = hurried(tool("setpriv"), "--bounding-set=-sys_nice")
    if resource.getrlimit(resource.RLIMIT_RTPRIO)[0]:
        pytest.skip("this machine lets everybody have real-time scheduling")
    assert own.startswith(f"({os.SCHED_OTHER},")
    assert "no real-time scheduling" in said
    assert "CAP_SYS_NICE" in said
    assert "short-lived may be missed" in said
    assert "\n" not in said


@pytest.mark.root
@needs_root("raises a limit")
def test_a_better_nice_value_instead() -> None:
    if not resource.getrlimit(resource.RLIMIT_RTPRIO)[0]:
        hard = resource.getrlimit(resource.RLIMIT_NICE)[1]
        if 0 <= hard < 35 and run([tool("prlimit"), "--nice=35:35", tool("true")]).rc:
            pytest.skip("this root may not raise limits (CAP_SYS_RESOURCE)")
    said, own, childs = hurried(
        tool("prlimit"), "--nice=35:35", "--rtprio=0:0", tool("setpriv"), "--bounding-set=-sys_nice"
    )
    assert "nice -15" in said
    assert own == f"({os.SCHED_OTHER}, -15)"
    assert childs == f"({os.SCHED_OTHER}, 0)"


def test_the_limit_of_open_files_is_raised_as_far_as_allowed() -> None:
    script = """
import resource
from buildidfs.linux.threads import allow_many_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
allow_many_descriptors()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    assert run([sys.executable, "-c", script]).out.split() == ["128", "128"]


def test_closers_of_a_bound_thread_run_anywhere() -> None:
    mine, seen = os.sched_getaffinity(0), list[set[int]]()
    closer = Closer()

    def work() -> None:
        threads.stay_on(max(mine))
        seen.append(os.sched_getaffinity(0))
        for _ in closer._threads:  # so that another one is started by this thread
            closer._busy[-1] = 0.0
        closer.relieve()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    closers = [one.native_id for one in closer._threads]
    assert len(closers) == 2
    assert None not in closers
    until(lambda: all(os.sched_getaffinity(one) == mine for one in closers if one), "the closers")
    assert seen == [{max(mine)}]
    assert closer.finish(20)


@pytest.mark.parametrize(("name", "shown"), [(b"short", "short"), (b"x" * 40, "x" * 15)])
def test_the_name_of_a_thread(name: bytes, shown: str) -> None:
    seen: list[str] = []

    def work() -> None:
        threads.name_thread(name)
        seen.append(Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text())

    before = Path("/proc/self/comm").read_text()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [f"{shown}\n"]
    assert Path("/proc/self/comm").read_text() == before


@pytest.mark.skipif(
    not os.path.exists("/proc/self/autogroup"), reason="a kernel without groups of sessions"
)
def test_a_session_that_stands_back_has_the_lowest_priority() -> None:
    program = (
        "from buildidfs.linux import threads\n"
        "threads.stand_back(session=True)\n"
        "print(open('/proc/self/autogroup').read().split()[-1])"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, start_new_session=True, capture_output=True, check=True)
    assert done.stdout == b"19\n"


def test_wait_ends_after_the_first_of_several_calls() -> None:
    with Alarm(0.1) as alarm:
        assert not select.select([alarm], [], [], 0.15)[0], "not set"
        began = time.monotonic()
        for _ in range(10):
            alarm.set()
            time.sleep(0.005)
        alarm.wait()
        assert 0.1 <= time.monotonic() - began < 5
        assert not select.select([alarm], [], [], 0.15)[0], "not set since"
        alarm.set()
        alarm.wait()


def test_change_before_a_call_is_seen_after_a_wait() -> None:
    """However the call falls between the steps of the waiting thread."""
    changes, seen = 0, 0
    with Alarm(0.0001) as alarm:

        def work() -> None:
            nonlocal seen
            while seen < 2000:
                alarm.wait()
                seen = changes

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        while changes < 2000:
            changes += 1
            alarm.set()
        thread.join(20)
        assert seen == 2000
