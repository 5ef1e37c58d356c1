# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.up

What fails is started again, and nothing is left over.

The supervisor runs in a process of its own, on programs made for it; what it says of them in the
store is what the tests look at.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.store.run_files import present
from buildidfs.watch import up
from buildidfs.watch.status import parts
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from buildidfs.watch.status import PartState

ROOT = Path(__file__).resolve().parents[2]

_RUNNER = """
import json, os, sys
from buildidfs import errors, log
from buildidfs.watch.up import ProgramSpec
from buildidfs.watch.up import Supervisor
from buildidfs.backoff import Backoff
from buildidfs.store.run_files import Presence
log.setup(1)
root, programs, patience = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
made = []
for values in programs:
    argv = ("sh", "-c", values.pop("sh"))
    done = f"{root}/{values['name']}.cleaned"
    made.append(ProgramSpec(argv=argv, cleanup=lambda done=done: open(done, "x").close(), **values))
with Presence.only(root, "up") as known:
    try:
        backoff = Backoff(**{"first": 0.5, "most": 60, **patience})
        supervisor = Supervisor(made, known, os.environ, backoff)
        supervisor.run(lambda: print("ready", flush=True))
    except errors.BuildIdFsError as error:
        print(type(error).__name__, error, flush=True)
        sys.exit(error.exit_code)
"""

# Says that it is ready, then waits to be ended.
_TELL = (
    f"{sys.executable} -S -c 'import os, socket, sys;"
    " socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto("
    'sys.argv[1].encode(), b"\\0" + os.environ["NOTIFY_SOCKET"][1:].encode())\''
)
GOOD = f"{_TELL} READY=1; exec sleep 1000"


class Running:
    """A supervisor at work."""

    def __init__(self, root: Path, process: subprocess.Popen[str]) -> None:
        self.root = root
        self.process = process

    def parts(self) -> dict[str]:
        return {part.name: part for each in present(self.root, "up") for part in parts(each)}

    def part(self, name: str) -> PartState:
        return self.parts()[name]

    def until(self, name: str, **wanted: object) -> PartState:
        """The part, once all of these attributes of it are so."""

        def there() -> PartState | None:
            part = self.parts().get(name)
            good = part is not None and all(getattr(part, x) == y for x, y in wanted.items())
            return part if good else None

        try:
            return until(there, f"{name} {wanted}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; it is {self.parts()}; {self.log()}") from None

    def log(self) -> str:
        return (self.root / "log").read_text()

    def said(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], 20)[0], self.log()
        return self.process.stdout.readline().strip()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


@contextlib.contextmanager
def _running(root: Path, *programs: dict[str, Any], **patience: float) -> Iterator[Running]:
    argv = [sys.executable, "-c", _RUNNER, root, json.dumps(programs), json.dumps(patience)]
    with (root / "log").open("w") as log:
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True)
    running = Running(root, process)
    with process:
        try:
            yield running
        finally:
            fds = []
            for part in running.parts().values():
                with contextlib.suppress(ProcessLookupError):
                    fds += [os.pidfd_open(part.pid)] if part.pid else []
            process.kill()
            for fd in fds:  # they end by themselves; a test that leaves one fails
                ended = _has_ended(fd)
                if not ended:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
                assert ended


def _has_ended(pidfd: int, seconds: float = 20) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


def test_ready_when_all_are(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    slow = f"until [ -e {gate} ]; do sleep 0.01; done; {GOOD}"
    with _running(tmp_path, {"name": "a", "sh": GOOD}, {"name": "b", "sh": slow}) as running:
        part = running.until("a", state="running")
        assert running.part("b").state == "starting"
        assert not select.select([running.process.stdout], [], [], 0)[0]
        gate.touch()
        assert running.said() == "ready"
        assert running.part("b").state == "running"
        assert part.pid != running.part("b").pid
        assert running.stop() == 0
        assert (tmp_path / "a.cleaned").exists()
        assert (tmp_path / "b.cleaned").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ends_them_in_order(tmp_path: Path, number: signal.Signals) -> None:
    order = tmp_path / "order"

    def program(name: str) -> dict[str, Any]:
        trap = f"trap 'sleep 0.05; echo {name} >> {order}; exit 0' TERM"
        return {"name": name, "sh": f"{trap}; {_TELL} READY=1; while :; do sleep 0.01; done"}

    with _running(tmp_path, program("first"), program("second")) as running:
        assert running.said() == "ready"
        assert running.stop(number) == 0
        assert order.read_text().split() == ["first", "second"]
        assert present(tmp_path) == []


def test_what_fails_is_started_again_later_each_time(tmp_path: Path) -> None:
    count = tmp_path / "count"
    bad = f"date +%s.%N >> {count}; echo 'buildidfs: error: broken' >&2; exit 60"
    with _running(
        tmp_path, {"name": "bad", "sh": bad}, {"name": "good", "sh": GOOD}, first=0.1, most=0.4
    ) as running:
        assert running.said() == "ready", "it is not needed"
        good = running.part("good")
        until(lambda: len(count.read_text().split()) >= 6, "starts")
        until(lambda: running.part("bad").restarts >= 5, "its entry in the file")
        part = running.until("bad", state="waiting", reason="broken")
        assert part.due > part.since
        assert running.part("good") == good
        assert running.stop() == 0
    times = [float(line) for line in count.read_text().split()]
    waits = [after - before for before, after in itertools.pairwise(times)]
    assert all(wait >= least for wait, least in zip(waits, (0.1, 0.2, 0.4, 0.4), strict=False))
    assert max(waits) < 10
    assert "warning: bad: broken; again in 0.1 s" in running.log()


def test_reason_without_a_word(tmp_path: Path) -> None:
    with _running(tmp_path, {"name": "a", "sh": "exit 7"}, first=100) as running:
        running.until("a", reason="ended with exit status 7")


def test_reason_is_the_last_line(tmp_path: Path) -> None:
    bad = "printf 'first\\nbuildidfs: warning: so \\033[1mwhat\\377\\n\\nlast'; exit 1"
    with _running(tmp_path, {"name": "a", "sh": bad}, first=100) as running:
        running.until("a", reason="last")
        assert "a: first" in running.log()
        assert "warning: a: so \\x1b[1mwhat\\\\xff" in running.log()


def test_needed_one_that_cannot_run_ends_all(tmp_path: Path) -> None:
    bad = "echo 'buildidfs: /x is busy'; exit 40"
    with _running(
        tmp_path, {"name": "a", "sh": GOOD}, {"name": "b", "sh": bad, "needed": True}
    ) as running:
        assert running.said() == "MountError /x is busy"
        assert running.process.wait(20) == 40
        assert present(tmp_path) == []
        assert (tmp_path / "b.cleaned").exists()


def test_needed_one_that_crashes_gets_another_chance(tmp_path: Path) -> None:
    once = tmp_path / "once"
    program = f"[ -e {once} ] || {{ touch {once}; kill -9 $$; }}; {GOOD}"
    with _running(tmp_path, {"name": "a", "sh": program, "needed": True}, first=0.01) as running:
        assert running.said() == "ready"
        assert running.part("a").restarts == 1


def test_needed_one_that_fails_later_is_started_again(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    program = f"[ ! -e {bad} ] || exit 40; {GOOD}"
    with _running(tmp_path, {"name": "a", "sh": program, "needed": True}, first=0.01) as running:
        assert running.said() == "ready"
        bad.touch()
        os.kill(running.part("a").pid, signal.SIGKILL)
        running.until("a", reason="ended with exit status 40")
        bad.unlink()
        running.until("a", state="running")


def test_what_ends_by_itself_stays_ended(tmp_path: Path) -> None:
    with _running(tmp_path, {"name": "a", "sh": "exit 0"}, {"name": "b", "sh": GOOD}) as running:
        assert running.said() == "ready"
        assert running.part("a").state == "ended"
        assert running.part("a").restarts == 0
        assert running.process.poll() is None


def test_supervisor_of_nothing_ends(tmp_path: Path) -> None:
    with _running(tmp_path, {"name": "a", "sh": "exit 0"}) as running:
        assert running.process.wait(20) == 0


def test_retry_starts_at_once_what_does_not_run(tmp_path: Path) -> None:
    fixed = tmp_path / "fixed"
    program = f"[ -e {fixed} ] || exit 9; {GOOD}"
    programs = [{"name": "a", "sh": program}, {"name": "b", "sh": GOOD}]
    with _running(tmp_path, *programs, first=1000) as running:
        running.until("a", state="waiting", reason="ended with exit status 9")
        good = running.until("b", state="running")
        fixed.touch()
        up.hurry(tmp_path, 20)
        assert running.part("a").state == "running"
        assert running.part("b") == good


def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    with _running(tmp_path, {"name": "a", "sh": GOOD}, {"name": "b", "sh": GOOD}) as running:
        assert running.said() == "ready"
        fds = [os.pidfd_open(part.pid) for part in running.parts().values()]
        assert not any(_has_ended(fd, 0) for fd in fds)
        running.process.kill()
        assert all(_has_ended(fd) for fd in fds)
        for fd in fds:
            os.close(fd)


def test_one_that_does_not_end_is_killed_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    stubborn = f"trap '' TERM; sleep 1000 & echo $! > {child}; {GOOD.replace('exec', '')}; :"
    program = {"name": "a", "sh": stubborn, "grace": 0.1}
    with _running(tmp_path, program) as running:
        assert running.said() == "ready"
        grandchild = os.pidfd_open(int(child.read_text()))
        leader = os.pidfd_open(running.part("a").pid)
        assert running.stop() == 0
        assert _has_ended(leader)
        assert _has_ended(grandchild)
        os.close(grandchild)
        os.close(leader)
        assert "a does not end: killing it" in running.log()


def test_second_signal_is_impatience(tmp_path: Path) -> None:
    stubborn = f"trap 'touch {tmp_path}/asked' TERM; {_TELL} READY=1; while :; do sleep 0.01; done"
    with _running(tmp_path, {"name": "a", "sh": stubborn, "grace": 1000}) as running:
        assert running.said() == "ready"
        running.process.send_signal(signal.SIGINT)
        until((tmp_path / "asked").exists, "SIGTERM")
        assert running.stop(signal.SIGINT) == 0


def test_rest_of_a_killed_program_goes_before_the_next_starts(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"sleep 1000 & echo $! > {child}; {GOOD}"
    with _running(tmp_path, {"name": "a", "sh": program}, first=1000) as running:
        part = running.until("a", state="running")
        grandchild = os.pidfd_open(int(child.read_text()))
        os.kill(part.pid, signal.SIGKILL)
        assert _has_ended(grandchild)
        os.close(grandchild)


def test_status_is_shown(tmp_path: Path) -> None:
    with _running(tmp_path, {"name": "a", "sh": f"{_TELL} STATUS=busy; {GOOD}"}) as running:
        assert running.said() == "ready"
        assert running.until("a", status="busy", state="running").reason == ""


def test_output_without_end_is_no_harm(tmp_path: Path) -> None:
    program = f"head -c 3000000 /dev/zero | tr '\\0' x; {GOOD}"
    with _running(tmp_path, {"name": "a", "sh": program}) as running:
        assert running.said() == "ready"
        assert running.stop() == 0
    assert max(len(line) for line in running.log().splitlines()) < 5000
