# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.up and .status: what is run, with which environment, and how that is read.

That it runs is in tests/system/test_up.py, how it is kept running in test_daemon_supervise.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec import UNSET

from buildidfs.answers import Verdict
from buildidfs.config import RetentionSettings
from buildidfs.errors import StoreMissing, UsageError
from buildidfs.store import Store
from buildidfs.store.run_files import Presence, Present, present
from buildidfs.watch import status, up
from buildidfs.watch.status import UP, WATCH, PartState
from buildidfs.watch.up import RETRY
from tests.support.clients.tools import run

ROOT = Path(__file__).resolve().parents[2]


def test_programs_are_those_of_the_command_line() -> None:
    watch, mount = up.programs(["--store", "/s"], b"-odd\xff")
    command = (sys.executable, "-m", "buildidfs", "--store", "/s")
    assert watch.argv == (*command, "watch")
    assert not watch.needed
    assert mount.argv == (*command, "mount", "--foreground", "--", os.fsdecode(b"-odd\xff"))
    assert mount.needed
    assert [each.name for each in up.programs([], None)] == ["watch"]
    assert [each.name for each in up.programs([], b"/m", watch=False)] == ["mount"]
    assert up.programs([], None)[0].argv[-1] == "watch"


def test_what_is_for_us_is_not_for_them(tmp_path: Path) -> None:
    ours = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "JOURNAL_STREAM": "1"}
    environ = up._environment({**ours, "HOME": "/h"})
    assert environ["HOME"] == "/h"
    assert not set(ours) & set(environ)
    # from anywhere they find the package that this is
    code = "import buildidfs; print(buildidfs.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert Path(done.stdout.strip()) == Path(up.buildidfs.__file__)


def test_parts_of_a_supervisor(tmp_path: Path) -> None:
    parts = [
        PartState("watch", "waiting", reason="no", due=7),
        PartState("mount", "running", pid=5),
    ]
    with Presence(tmp_path, UP, children=parts):
        supervisor = up.running(tmp_path)
        assert supervisor is not None
        assert status.parts(supervisor) == parts
    assert up.running(tmp_path) is None


@pytest.mark.parametrize("children", [None, 3, [3], [{"name": "x"}], [{"name": "x", "state": "y"}]])
def test_supervisor_of_another_version_has_no_parts(tmp_path: Path, children: object) -> None:
    with Presence(tmp_path, UP, children=children):
        (supervisor,) = present(tmp_path)
        assert status.parts(supervisor) == []


def test_second_up_has_to_want_the_same(tmp_path: Path) -> None:
    with Presence(tmp_path, UP, mountpoint=b"/a\xff"):
        (supervisor,) = present(tmp_path)
        up.refuse_second(supervisor, b"/a\xff", {})
        for other in (b"/b", None):
            with pytest.raises(UsageError, match="up already"):
                up.refuse_second(supervisor, other, {})
    with Presence(tmp_path, UP):
        (supervisor,) = present(tmp_path)
        up.refuse_second(supervisor, None, {})
        with pytest.raises(UsageError, match="without a mount"):
            up.refuse_second(supervisor, b"/a", {})


def test_hurry_waits_for_one_that_tells_nothing_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look finds the supervisor one step further on."""
    running = up.running
    steps: list[list[PartState]] = [
        [],
        [],
        [PartState("mount", "starting")],
        [PartState("mount", "running")],
    ]
    with Presence(tmp_path, UP) as supervisor:

        def look(path: up.StorePath, role: str = UP) -> Present | None:
            if step := steps.pop(0):
                supervisor.update(children=step)
            return running(path, role)

        monkeypatch.setattr(up, "running", look)
        before = signal.signal(RETRY, signal.SIG_IGN)
        try:
            up.hurry(tmp_path, 100)
        finally:
            signal.signal(RETRY, before)
    assert steps == []


_EARLY = """
import os, sys
from buildidfs.watch import (up)
class Found(up.Supervisor):
    def run(self, ready):
        os.kill(os.getpid(), up.RETRY)
        super().run(ready)
up.Supervisor = Found
programs = [up.ProgramSpec("a", ("true",))]
up.start(sys.argv[1], programs, environ=os.environ, mountpoint=None, ready=lambda: None)
"""


def test_supervisor_that_is_hurried_before_it_waits_for_that(tmp_path: Path) -> None:
    run([sys.executable, "-c", _EARLY, tmp_path / "store"], cwd=ROOT, check=True)


def test_settling_is_the_end_of_the_first_scan(tmp_path: Path) -> None:
    start = time.monotonic()
    up.settle(tmp_path, 100)  # nobody watches
    with Presence(tmp_path, WATCH, scans=1, waiting=0) as watch:
        up.settle(tmp_path, 100)
        assert time.monotonic() - start < 50
        for facts in ({"scans": 0}, {"scans": 1, "waiting": 3}):
            watch.update(**facts)
            start = time.monotonic()
            up.settle(tmp_path, 0.3)
            assert time.monotonic() - start >= 0.3


def test_second_up_with_an_option_that_would_be_ignored_is_refused(tmp_path: Path) -> None:
    with Presence(tmp_path, "up", options={"--log": "/var/log/x"}):
        (supervisor,) = present(tmp_path, "up")
    up.refuse_second(supervisor, None, {})
    up.refuse_second(supervisor, None, {"--log": "/var/log/x"})
    with pytest.raises(UsageError, match=r"already, without --metrics 9481 .* buildidfs down"):
        up.refuse_second(supervisor, None, {"--log": "/var/log/x", "--metrics": "9481"})


def test_status_puts_together_who_belongs_together(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        status.take(tmp_path / "store", RetentionSettings())
    root = tmp_path / "store"
    Store.create(root).close()
    assert status.take(root, RetentionSettings()).processes == []
    assert status.take(root, RetentionSettings()).verdict is Verdict.DOWN
    pid = os.getpid()
    parts = [PartState("watch", "running", pid=pid), PartState("mount", "waiting", reason="busy")]
    with Presence(root, "mount", mountpoint=b"/else"), Presence(root, "watch", mode="following"):
        assert status.take(root, RetentionSettings()).verdict is Verdict.HEALTHY
        with Presence(root, "up", children=parts) as supervisor:
            found = status.take(root, RetentionSettings())
            assert [each.role for each in found.processes] == ["up", "watch", "mount", "mount"]
            _, watch, failed, other = found.processes
            assert (watch.pid, watch.restarts, watch.facts) == (pid, 0, {"mode": "following"})
            assert (failed.pid, failed.reason, failed.facts) == (None, "busy", UNSET)
            assert not other.has_supervisor
            assert failed.state == "waiting"
            assert found.verdict is Verdict.DOWN
            assert found.findings[0].reason == "mount does not run: busy"
            supervisor.update(children=parts[:1])
            assert status.take(root, RetentionSettings()).verdict is Verdict.HEALTHY
