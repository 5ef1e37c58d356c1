# SPDX-License-Identifier: Apache-2.0
"""up, down and status: both run, what is killed comes back, and nothing is left over."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.store import Store
from buildidfs.store.run_files import Presence, present
from tests.support.clients.commands import ROOT, calling
from tests.support.clients.tools import Result, run, tool
from tests.support.harness.captures import capture
from tests.support.harness.children import copied_cat
from tests.support.harness.mounts import COMMAND, BuildIdFs, is_mountpoint
from tests.support.harness.restricted import as_nobody
from tests.support.harness.waiting import until
from tests.support.servers.serving import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.clients.tools import Result

pytestmark = pytest.mark.fuse

HEX = "abcdef0123"


class Up:
    """``buildidfs up`` on a store with one file."""

    def __init__(self, buildidfs: BuildIdFs) -> None:
        self.run = buildidfs
        self.store = buildidfs.store
        self.mount = buildidfs.mountpoint
        self.log = buildidfs.store.parent / "up.log"

    def up(self, *words: str | Path, check: bool = True) -> Result:
        """Without following, which is the business of other tests, unless ``words`` say more."""
        return self.run("up", *(words or ("--no-watch",)), "--log", self.log, self.mount,
                        check=check)  # fmt: skip

    def status(self) -> dict[str, Any]:
        found = json.loads(self.run("status", "--json", check=False).out)
        assert isinstance(found, dict)
        return found

    def process(self, role: str) -> dict[str, Any]:
        (found,) = [each for each in self.status()["processes"] if each["role"] == role]
        assert isinstance(found, dict)
        return found

    def is_readable(self) -> bool:
        try:
            return (self.mount / HEX / "elf").read_bytes() == b"bytes"
        except OSError:
            return False

    def pidfds(self) -> list[int]:
        """Of everything that is present."""
        return [each.pidfd() for each in present(self.store)]


@pytest.fixture
def up(directory: Path) -> Iterator[Up]:
    """Whatever runs on the store at the end is killed, and what is mounted is taken away.

    Files of the distribution and of Python are excluded: to copy all that runs takes seconds.
    """
    settings = directory / "settings.toml"
    excluded = [f"{place}/*" for place in ("/usr", sys.prefix, sys.base_prefix)]
    settings.write_text(f"[watch]\nexclude = {json.dumps(excluded)}\n")
    buildidfs = BuildIdFs(directory, config=settings)
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, b"bytes", bytes.fromhex(HEX))])
    made = Up(buildidfs)
    yield made
    for each in present(made.store):
        with contextlib.suppress(ProcessLookupError):
            pidfd = each.pidfd()
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert select.select([pidfd], [], [], 20)[0]
            os.close(pidfd)
    while is_mountpoint(made.mount):
        run([tool("umount"), "-l", made.mount], check=True)


def _have_ended(pidfds: list[int]) -> None:
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], 30)[0]
        os.close(pidfd)


def test_up_serves_over_http_if_an_address_is_set(up: Up, tmp_path: Path) -> None:
    port = free_port()
    settings = tmp_path / "settings.toml"
    settings.write_text(f'[serve]\nlisten = "127.0.0.1:{port}"\n')
    words = ("--config", settings, "up", "--no-watch", "--log", up.log, up.mount)
    done = up.run(*words)
    assert f"Serving at 127.0.0.1:{port} (pid " in done.out, done
    url = f"http://127.0.0.1:{port}/buildid/{HEX}/executable"
    with urllib.request.urlopen(url) as reply:
        assert reply.read() == b"bytes"
    shown = up.run("--config", settings, "status", check=False).out
    assert f"serving at 127.0.0.1:{port}" in shown
    assert "takes effect" not in shown
    settings.write_text(f'[serve]\nlisten = "127.0.0.1:{port}"\nworkers = 2\n')
    shown = " ".join(up.run("--config", settings, "status", check=False).out.split())
    assert "the settings [serve] have changed: takes effect after buildidfs" in shown
    assert shown.count("takes effect") == 1
    pidfds = up.pidfds()
    assert len(pidfds) == 3
    ended = up.run("down").out
    assert "serve (pid " in ended
    _have_ended(pidfds)


# --- up and down ---------------------------------------------------------------------------------


def test_up_mounts_in_the_background_and_down_ends_that(up: Up) -> None:
    assert not up.mount.exists()
    done = up.up()
    assert f"Mounted at {up.mount}" in done.out
    assert "1 build ID captured" in done.out
    assert up.is_readable()
    pidfds = up.pidfds()
    assert len(pidfds) == 2
    ended = up.run("down")
    assert f"Unmounted {up.mount}; the store in {up.store} is kept." in ended.out
    assert "Ended mount (pid " in ended.out
    _have_ended(pidfds)
    assert not is_mountpoint(up.mount)
    assert present(up.store) == []
    assert "Nothing runs" in up.run("down").out
    up.up()
    assert up.is_readable()
    up.run("-q", "down")
    assert not is_mountpoint(up.mount)


@pytest.mark.watch
@pytest.mark.root
@pytest.mark.host
def test_up_follows_what_starts_to_run(up: Up, tmp_path: Path) -> None:
    done = up.run("up", "--log", up.log, up.mount)
    assert "Watching what starts to run" in done.out, done
    with copied_cat(tmp_path / "later"):
        until(lambda: f"{tmp_path}/later" in up.run("list").out, "the capture", 60)
    watch = up.process("watch")
    assert (watch["state"], watch["restarts"], watch["reason"]) == ("running", 0, "")
    assert watch["status"]
    assert watch["facts"]["mode"]
    pidfds = up.pidfds()
    assert len(pidfds) == 3
    assert "Ended watch (pid " in up.run("down").out
    _have_ended(pidfds)


@pytest.mark.watch
def test_up_again_is_no_error_and_starts_what_was_ended(up: Up) -> None:
    up.up()
    mount = up.process("mount")
    again = up.up()
    assert "Already up" in again.out
    assert up.process("mount") | {"facts": {}} == mount | {"facts": {}}
    # With nothing else to run the supervisor ends too, so it needs a second program.
    up.run("down")
    up.run("up", "--log", up.log, up.mount, check=False)
    up.run("unmount", up.mount)
    until(lambda: up.process("mount")["state"] == "ended", "the end of the mount")
    assert up.run("status", check=False).rc == 3
    assert not is_mountpoint(up.mount)
    up.run("up", up.mount, check=False)
    assert up.process("mount")["state"] == "running"
    assert up.is_readable()


def test_second_up_with_another_mount_point_is_refused(up: Up) -> None:
    up.up()
    other = up.run("up", "--no-watch", up.mount.parent / "other", check=False)
    assert other.rc == 2
    assert f"up already, with the mount at {up.mount} (pid " in other.err
    assert other.err.count("\n") == 1


def test_two_at_once_are_one(up: Up) -> None:
    argv = [sys.executable, "-m", "buildidfs", "--store", up.store, "up", "--no-watch", up.mount]
    both = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)]  # fmt: skip
    said = [each.communicate(timeout=60) for each in both]
    codes = {each.returncode for each in both}
    assert 0 in codes, said
    assert codes <= {0, 12}, said
    assert [each.role for each in present(up.store)].count("up") == 1
    assert up.is_readable()


def test_mount_point_that_is_busy_is_one_line_and_leaves_nothing(up: Up) -> None:
    up.mount.mkdir()
    (up.mount / "file").touch()
    done = up.up(check=False)
    assert done.rc == 40
    assert done.err == f"buildidfs: {up.mount} is not empty: what is in it would be hidden\n"
    assert done.out == ""
    assert present(up.store) == []
    absent = up.store.with_name("absent")
    done = run([*COMMAND, "--store", absent, "up", up.mount])
    assert (done.rc, absent.exists()) == (40, False)


def test_mount_point_that_cannot_be_made(up: Up) -> None:
    (up.store.parent / "file").touch()
    done = up.run("up", "--no-watch", up.store.parent / "file/below", check=False)
    assert done.rc == 40
    assert "cannot make" in done.err
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--no-mount", "--no-watch"],
        ["--no-mount", "/x"],
        ["--foreground", "--log", "x"],
    ],
)
def test_what_contradicts_itself_is_refused(up: Up, words: list[str]) -> None:
    done = up.run("up", *words, check=False)
    assert done.rc == 2
    assert done.err.count("\n") == 1


def test_mount_point_of_the_settings(up: Up, tmp_path: Path) -> None:
    settings = tmp_path / "buildidfs.toml"
    settings.write_text(f'[up]\nmountpoint = "{up.mount}"\n')
    up.run("--config", settings, "up", "--no-watch", "--log", up.log)
    assert up.is_readable()


def test_up_makes_the_store(up: Up) -> None:
    new = up.store.parent / "new"
    argv = [sys.executable, "-m", "buildidfs", "--store", new]
    run([*argv, "up", "--no-watch", up.mount], cwd=ROOT, check=True)
    try:
        assert is_mountpoint(up.mount)
    finally:
        run([*argv, "down"], cwd=ROOT, check=True)
    assert not is_mountpoint(up.mount)


@pytest.mark.root
def test_store_that_cannot_be_written(up: Up, directory: Path) -> None:
    run([tool("mount"), "--bind", up.store, up.store], check=True)
    try:
        run([tool("mount"), "-o", "remount,ro,bind", up.store], check=True)
        done = up.up(check=False)
        assert done.rc == 10
        assert "Read-only" in done.err
        assert done.err.count("\n") == 1
    finally:
        run([tool("umount"), "-l", up.store], check=True)


def test_foreground_ends_with_a_signal(up: Up) -> None:
    argv = [sys.executable, "-m", "buildidfs", "--store", up.store, "up", "--no-watch",
            "--foreground", up.mount]  # fmt: skip
    with subprocess.Popen(argv, cwd=ROOT) as process:
        try:
            until(up.is_readable, "the mount")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert not is_mountpoint(up.mount)
        finally:
            process.kill()


def _unready(up: Up, stderr: int | None = None) -> tuple[subprocess.Popen[bytes], Presence]:
    """``up`` that waits for its supervisor, which is stopped before it can say that it is ready."""
    words = [*COMMAND, "--store", str(up.store), "up", "--no-watch", str(up.mount)]
    for _ in range(20):
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, cwd=ROOT
        )
        (supervisor,) = until(lambda: present(up.store, "up"), "the supervisor")
        os.kill(supervisor.pid, signal.SIGSTOP)
        if not is_mountpoint(up.mount):
            return process, supervisor
        # The moment came too late.
        os.kill(supervisor.pid, signal.SIGCONT)
        process.communicate(timeout=60)
        up.run("down")
    pytest.fail("it was always ready before it could be stopped")


def test_given_up_while_waiting_leaves_nothing(up: Up) -> None:
    process, supervisor = _unready(up)
    pidfd = supervisor.pidfd()
    process.kill()
    process.wait()
    os.kill(supervisor.pid, signal.SIGCONT)
    _have_ended([pidfd])
    assert present(up.store) == []
    assert not is_mountpoint(up.mount)


# --- what is killed ------------------------------------------------------------------------------


def test_ctrl_c_ends_what_it_has_started_and_says_so(up: Up) -> None:
    process, supervisor = _unready(up, stderr=subprocess.PIPE)
    process.send_signal(signal.SIGINT)
    os.kill(supervisor.pid, signal.SIGCONT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.decode().strip() == "buildidfs: interrupted: what it has started is ended again"
    until(lambda: not present(up.store), "nothing runs any more")
    assert not is_mountpoint(up.mount)


def test_killed_mount_is_started_again(up: Up) -> None:
    up.up()
    first = up.process("mount")
    assert up.is_readable()
    os.kill(first["pid"], signal.SIGKILL)
    until(lambda: not up.is_readable(), "the end of the mount")
    until(lambda: up.process("mount")["restarts"] == 1, "the restart")
    until(up.is_readable, "the mount")
    second = up.process("mount")
    assert second["pid"] != first["pid"]
    assert second["reason"] == "killed by SIGKILL"
    text = up.run("status").out
    assert "restarts: 1" in text
    assert "last failure: killed by SIGKILL" in text


def test_killed_supervisor_leaves_nothing_running(up: Up) -> None:
    up.up()
    pidfds = up.pidfds()
    os.kill(up.process("up")["pid"], signal.SIGKILL)
    _have_ended(pidfds)
    assert present(up.store) == []
    assert not is_mountpoint(up.mount)
    assert up.run("status", check=False).rc == 3
    up.up()
    assert up.is_readable()


def test_everything_killed_is_cleaned_by_the_next_up(up: Up) -> None:
    up.up()
    pidfds = up.pidfds()
    pids = [up.process(role)["pid"] for role in ("up", "mount")]
    for pid in pids:  # the supervisor first, so that it cannot clean up
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    _have_ended(pidfds)
    assert is_mountpoint(up.mount), "the dead mount"
    assert not up.is_readable()
    up.up()
    assert up.is_readable()


def test_mount_that_hangs_is_killed_and_taken_away(up: Up) -> None:
    up.up()
    os.kill(up.process("mount")["pid"], signal.SIGSTOP)
    pidfds = up.pidfds()
    (supervisor,) = present(up.store, "up")
    pidfd = supervisor.pidfd()

    def has_ended() -> bool:
        if select.select([pidfd], [], [], 0.1)[0]:
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGTERM)  # again: it waits a while for the mount
        return False

    until(has_ended, "the end of the supervisor")
    _have_ended([pidfd, *pidfds])
    assert not is_mountpoint(up.mount)


@pytest.mark.root
def test_who_may_not_look_is_not_told_that_nothing_runs(up: Up) -> None:
    up.up()
    up.store.parent.chmod(0o755)
    up.store.chmod(0o700)
    done = as_nobody("--store", up.store, "down")
    assert done.rc == 60, done
    assert "run as its owner" in done.err
    assert up.is_readable()


@pytest.mark.watch
def test_down_does_not_say_that_it_unmounted_what_was_not_mounted(up: Up) -> None:
    up.run("up", "--log", up.log, up.mount, check=False)
    up.run("unmount", up.mount)
    until(lambda: up.process("mount")["state"] == "ended", "the end of the mount")
    done = up.run("down")
    assert "Unmounted" not in done.out
    assert f"The store in {up.store} is kept." in done.out


def test_down_does_not_wait_for_ever(up: Up) -> None:
    up.up()
    supervisor = up.process("up")["pid"]
    os.kill(supervisor, signal.SIGSTOP)
    try:
        done = up.run("down", "--timeout", "0.2", check=False)
        assert done.rc == 40
        assert done.err == f"buildidfs: pid {supervisor} has not ended within 0.2 s\n"
    finally:
        os.kill(supervisor, signal.SIGCONT)


@pytest.mark.watch
@pytest.mark.root
def test_watch_that_cannot_follow_is_said(up: Up) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 1:
        pytest.skip("perf_event_paranoid lets everybody follow")
    less = [tool("setpriv"), "--bounding-set=-all", "--no-new-privs", sys.executable]
    words = [*less, "-m", "buildidfs", "--store", up.store, "up", "--no-mount", "--log", up.log]
    polling = run(words, cwd=ROOT)
    assert polling.rc == 3, polling
    assert "scanning every" in polling.err, polling
    assert "build IDs captured" in polling.out
    assert up.process("watch")["facts"]["mode"] == "polling"
    up.run("down")


@pytest.mark.watch
@pytest.mark.root
@pytest.mark.host
def test_up_scans_once_if_the_watch_cannot_start(up: Up) -> None:
    """/proc of another PID namespace: the watch fails again and again, the supervisor goes on."""
    words = [sys.executable, "-m", "buildidfs", "--store", up.store]
    script = '"$@" up --no-mount --log "$0"; echo "rc $?"; "$@" status; echo "rc $?"; "$@" down'
    unshare = [tool("unshare"), "--pid", "--fork", tool("sh"), "-c", script]
    done = run([*unshare, up.log, *words], cwd=ROOT)
    assert "not following what starts to run: " in done.err
    assert "another PID namespace" in done.err
    assert "build IDs captured" in done.out, "the scan took what runs now"
    assert done.out.count("rc 3") == 2, done
    assert "last failure: " in done.out


# --- status --------------------------------------------------------------------------------------


def test_status_of_nothing(up: Up) -> None:
    done = up.run("status", check=False)
    assert done.rc == 3
    assert "nothing runs" in done.out
    found = up.status()
    with Store.open(up.store, read_only=True) as store:
        held = store.stats()
    disk = os.statvfs(up.store)
    assert 0 < found.pop("free_bytes") <= disk.f_blocks * disk.f_frsize
    assert found == {
        "store": str(up.store), "build_ids": 1, "blob_bytes": 5,
        "stored_bytes": held.stored_bytes, "omitted": 0, "configured": None,
        "evicted": {
            "recapturable": 0, "recapturable_bytes": 0, "lost": 0, "lost_bytes": 0, "named": []
        },
        "index_bytes": held.index_bytes, "jit_bytes": 0, "pins": 0, "max_size": None,
        "keep_free": min(disk.f_blocks * disk.f_frsize // 20, 4 << 30), "max_age": None,
        "min_age": 0, "verdict": "down", "well": False, "processes": [], "changed": [],
        "findings": [
            {"verdict": "down", "reason": "nothing runs", "remedy": "buildidfs up starts it"}
        ],
    }  # fmt: skip
    assert 0 < held.index_bytes <= (up.store / "index/data.mdb").stat().st_size
    up.run("pin", HEX)
    limits = up.store.parent / "limits.toml"
    limits.write_text('[retention]\nmax-size = "1G"\nkeep-free = "1M"\nmax-age = "2d"\n')
    asked = json.loads(up.run("--config", limits, "status", "--json", check=False).out)
    wanted = {"pins": 1, "max_size": 1 << 30, "keep_free": 1 << 20, "max_age": 2 * 24 * 3600}
    assert wanted.items() <= asked.items()


def test_status_of_no_store(up: Up) -> None:
    done = run(
        [sys.executable, "-m", "buildidfs", "--store", up.store / "none", "status"], cwd=ROOT
    )
    assert done.rc == 11


def test_status_of_a_mount_alone(up: Up) -> None:
    with up.run.mounted():
        # It is mounted first, and says so then.
        until(lambda: up.run("status", check=False).rc == 0, "a mount that is there")
        mount = up.process("mount")
        assert mount["mountpoint"] == str(up.mount)
        assert "restarts" not in mount


def test_status_names_everything(up: Up) -> None:
    up.up()
    mount, supervisor = up.process("mount"), up.process("up")
    assert up.status()["well"] is True
    assert supervisor["mountpoint"] == mount["mountpoint"] == str(up.mount)
    assert mount["state"] == supervisor["state"] == "running"
    assert mount["restarts"] == 0
    text = up.run("status").out
    for each in (mount, supervisor):
        assert f"pid {each['pid']}" in text
    assert "1 build ID, " in text


def test_status_says_that_a_mount_is_stopped(up: Up) -> None:
    up.up()
    pid = up.process("mount")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        done = up.run("status", check=False)
        assert done.rc == 3
        assert done.out.startswith("down\n")
        assert f"mount (pid {pid}) is stopped by a signal" in done.out
        assert f"-> kill -CONT {pid}" in done.out
        found = up.status()
        assert (found["verdict"], found["well"]) == ("down", False)
        assert up.process("mount")["state"] == "stopped"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: up.run("status", check=False).rc == 0, "an answer")


@pytest.mark.root
def test_status_says_that_a_mount_does_not_answer(up: Up) -> None:
    """Where the process cannot be looked at, the mount itself is asked."""
    up.up()
    pid = up.process("mount")["pid"]
    words = [sys.executable, "-m", "buildidfs", "--store", up.store, "status"]
    apart = [tool("unshare"), "--pid", "--fork", "--mount-proc", *words]
    assert run(apart, cwd=ROOT).rc == 0
    os.kill(pid, signal.SIGSTOP)
    try:
        done = run(apart, cwd=ROOT)
        assert done.rc == 3
        assert f"mount (pid {pid}) does not answer" in done.out
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.watch
@pytest.mark.root
@pytest.mark.host
def test_status_says_that_a_watch_is_stopped(up: Up) -> None:
    up.run("up", "--no-mount", "--log", up.log)
    until(lambda: up.run("status", check=False).rc in (0, 5), "the watch")
    watch = up.process("watch")["pid"]
    # The watch has other children while it scans.
    catcher = until(lambda: _catcher_of(watch), "the catcher")
    for pid, code, said in (
        (watch, 3, f"watch (pid {watch}) is stopped by a signal"),
        (catcher, 5, "nothing is followed just now: the process that opens files is stopped"),
    ):
        os.kill(pid, signal.SIGSTOP)
        try:
            done = until(functools.partial(_status_with, up, said), said)
            assert done.rc == code, done
            assert f"-> kill -CONT {pid}" in done.out
        finally:
            os.kill(pid, signal.SIGCONT)


def _catcher_of(watch: int) -> int:
    """Return the process ID of the catcher of a watch; 0 if it has none."""
    children = Path(f"/proc/{watch}/task").glob("*/children")
    for pid in " ".join(each.read_text() for each in children).split():
        with contextlib.suppress(OSError):  # it has ended
            if b"capture.live.catcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return 0


def _status_with(up: Up, said: str) -> Result | None:
    """Return the status if it says so."""
    done = up.run("status", check=False)
    return done if said in done.out else None


def test_status_has_one_format_with_and_without_up(up: Up) -> None:
    facts = {"mode": "following", "captured": 3, "held": 2, "waiting": 0, "let_go": 1}
    with Presence(up.store, "watch", **facts) as watch:
        alone = up.run("status").out
        part = {"name": "watch", "state": "running", "pid": os.getpid(), "since": 10**18}
        with Presence(up.store, "up", children=[part]):
            supervised = up.run("status").out
        assert watch.fileno() >= 0
    (line,) = [each for each in alone.splitlines() if each.startswith("watch ")]
    assert line in supervised.splitlines()
    assert "following, 3 captured" in line
    assert "1 let go uncopied" in line


def test_status_names_what_a_scan_could_not_read(up: Up) -> None:
    facts = {"mode": "following", "captured": 3, "held": 2, "waiting": 0, "unreadable": 5}
    unread = [{"path": f"/proc/{pid}", "reason": "Permission denied"} for pid in range(1, 6)]
    with Presence(up.store, "watch", **facts, unreadable_last=unread):
        said = up.run("status").out
    assert "5 unreadable; not readable: /proc/3 (Permission denied), /proc/4" in said
    assert said.rstrip().endswith("and 2 more")


def test_status_names_the_store_that_was_asked_for_in_its_remedies(up: Up) -> None:
    """A remedy that is copied must not act on another store."""
    done = run([sys.executable, "-m", "buildidfs", "--store", up.store, "status"], cwd=ROOT)
    assert f"-> buildidfs --store {up.store} up starts it" in done.out


def test_down_names_other_stores_that_are_up(up: Up, tmp_path: Path) -> None:
    up.up("--no-watch")
    done = run([sys.executable, "-m", "buildidfs", "--store", tmp_path / "other", "down"], cwd=ROOT)
    assert done.rc == 0
    assert f"Another store is still up: buildidfs --store {up.store} down\n" in done.out
    assert f"--store {tmp_path / 'other'} down" not in done.out


def test_status_shows_counters_and_strange_paths(up: Up) -> None:
    point = b"/a\xff\x1b[1m"
    facts = {"mode": "polling \x1bslowly", "captured": 17, "degraded": ["half \x1bblind"]}
    with Presence(up.store, "watch", mountpoint=point, **facts):
        done = up.run("status", check=False)
        text = done.out
        assert done.rc == 4
        assert text.startswith("degraded: polling")
        assert "polling \\x1bslowly, 17 captured" in text
        assert "half \\x1bblind" in text
        assert "\x1b" not in text
        watch = up.process("watch")
        assert watch["facts"] == facts
        assert watch["mountpoint_b64"]


# --- make up, make down --------------------------------------------------------------------------


@pytest.mark.watch
def test_scripts_of_make_work_twice(up: Up) -> None:
    command = calling(
        up.store.parent / "programs/buildidfs",
        ["env", f"PYTHONPATH={ROOT}", *COMMAND, "--config", str(up.run.config)],
    )
    env = {"STORE": str(up.store), "MOUNTPOINT": str(up.mount)}
    for _ in range(2):
        done = run([ROOT / "scripts/up", command], env=env, check=True)
        assert f"Mounted at {up.mount}" in done.out
        assert str(command) in done.out
        assert f"make down STORE='{up.store}' MOUNTPOINT='{up.mount}'" in done.out
        assert up.is_readable()
    for _ in range(2):
        done = run([ROOT / "scripts/down", command], env=env, check=True)
        assert not is_mountpoint(up.mount)
    assert f"Nothing runs that buildidfs up has started for {up.store}" in done.out
    # what an older version, or somebody by hand, has mounted
    up.run("mount", up.mount)
    done = run([ROOT / "scripts/down", command], env=env, check=True)
    assert f"Unmounted {up.mount}" in done.out
    assert not is_mountpoint(up.mount)


def test_make_of_nothing_says_what_there_is() -> None:
    done = run([tool("make"), "-s", "-C", ROOT], check=True)
    assert "make up " in done.out
    plan = run([tool("make"), "-n", "-C", ROOT], check=True).out
    assert "scripts/" not in plan


@pytest.mark.watch
@pytest.mark.root
@pytest.mark.host
def test_metrics_count_captures_and_requests(up: Up, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def value(name: str) -> float:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    up.up("--metrics", address)
    assert value("buildidfs_watch_mode") == 1
    before = value("buildidfs_captured_files_total")
    with copied_cat(directory / "cat"):
        until(lambda: value("buildidfs_captured_files_total") > before, "the capture")
    requests = value("buildidfs_mount_requests_total")
    assert requests > 0
    assert up.is_readable()
    until(lambda: value("buildidfs_mount_requests_total") > requests, "the requests")
    assert up.process("mount")["facts"]["requests"] > requests
    assert up.process("watch")["facts"]["sources"][0]["captured"] > 0


def test_wrong_metrics_are_refused_at_once(up: Up) -> None:
    done = up.up("--metrics", "example.org:80", check=False)
    assert (done.rc, "is not an IP address" in done.err) == (2, True), done
    assert present(up.store) == []
