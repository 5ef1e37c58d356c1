# SPDX-License-Identifier: Apache-2.0
"""``buildidfs doctor`` under conditions that are really as bad as it says."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.clients.commands import ROOT
from tests.support.clients.terminals import on_terminal
from tests.support.clients.tools import Argument, Result, run, tool, unmount
from tests.support.harness import restricted
from tests.support.harness.forbidding import forbidding
from tests.support.harness.mounts import COMMAND, BuildIdFs, is_mountpoint
from tests.support.harness.restricted import as_nobody, limited, unshared, without
from tests.support.harness.waiting import lines, until

pytestmark = pytest.mark.root

_AREAS = ["privileges", "kernel", "limits", "fuse", "store"]
_MIB = 1 << 20
_FICLONE = 0x40049409


class Report:
    """What ``doctor --json`` said."""

    def __init__(self, result: Result) -> None:
        assert "Traceback" not in result.text, str(result)
        assert result.err == "", str(result)
        self.result = result
        self.rc = result.rc
        self.findings = [json.loads(line) for line in result.out.splitlines()]

    def __getitem__(self, name: str) -> dict[str, str]:
        (found,) = [each for each in self.findings if each["name"] == name]
        return found

    def state(self, name: str) -> str:
        """ok, degraded or failed."""
        return self[name]["state"]

    def failed(self) -> list[str]:
        """The names of what failed."""
        return [each["name"] for each in self.findings if each["state"] == "failed"]


def _words(store: Path) -> list[Argument]:
    return ["--store", store, "doctor", "--json"]


def _doctor(store: Path, *options: Argument) -> Report:
    return Report(BuildIdFs(store.parent, store)(*options, "doctor", "--json", check=False))


@pytest.fixture
def store(directory: Path) -> Path:
    """A store that holds something."""
    return _filled(directory)


@pytest.fixture(scope="module")
def kept(scratch: Path) -> Path:
    """A store like that, which no test changes."""
    directory = scratch / "doctor"
    directory.mkdir()
    return _filled(directory)


@pytest.fixture(scope="module")
def usual(kept: Path) -> Report:
    """The report for that store."""
    return _doctor(kept)


def _filled(directory: Path) -> Path:
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", tool("true"))
    return buildidfs.store


def _listing(store: Path) -> list[tuple[str, int, int, int]]:
    """Everything below a directory, and when it was changed; readers register in the lock file."""
    return sorted(
        (str(path), path.lstat().st_mode, path.lstat().st_mtime_ns, path.lstat().st_size)
        for path in [store, *store.rglob("*")]
        if path.name != "lock.mdb"
    )


# --- all is well ---------------------------------------------------------------------------


@pytest.mark.host
@pytest.mark.fuse
def test_nothing_has_failed_for_root_on_the_host(store: Path) -> None:
    before = _listing(store)
    report = _doctor(store)
    assert report.failed() == []
    assert report.rc == 0
    assert list(dict.fromkeys(each["area"] for each in report.findings)) == _AREAS
    for each in report.findings:
        assert each["found"], each
        assert bool(each["remedy"]) == (each["state"] != "ok"), each
    assert "1 build ID, 1 blob" in report["index"]["found"]
    assert _listing(store) == before


@pytest.mark.host
@pytest.mark.fuse
def test_a_store_that_is_not_there_is_not_made(directory: Path) -> None:
    report = _doctor(directory / "none" / "store")
    assert report.rc == 0, report.failed()
    assert "the first scan makes it" in report["directory"]["found"]
    assert list(directory.iterdir()) == []


def test_lines_for_people_begin_with_the_state(kept: Path) -> None:
    result = run([*COMMAND, "--store", kept, "doctor"], cwd=ROOT)
    lines = result.out.splitlines()
    assert [line.removesuffix(":") for line in lines if line.endswith(":")] == _AREAS
    states = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert {"ok"} <= {*states} - {f"{area}:" for area in _AREAS} <= {"ok", "degraded", "failed"}
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("degraded", "failed")):
            assert after.startswith("          -> "), line
        elif not line.startswith(" "):
            assert not after.startswith(" "), line


def test_quiet_shows_only_what_is_not_ok(store: Path) -> None:
    store.chmod(0o755)
    result = run([*COMMAND, "-q", "--store", store, "doctor"], cwd=ROOT)
    assert "degraded  directory: " in result.out
    assert "chmod 700" in result.out
    assert not [line for line in result.out.splitlines() if line.startswith("ok")]
    assert {each["state"] for each in _doctor(store, "-q").findings} <= {"degraded", "failed"}


def test_it_is_quick(kept: Path) -> None:
    took: list[float] = []
    while len(took) < 5 and min(took, default=math.inf) >= 1.5:
        begin = time.monotonic()
        Report(run([*COMMAND, *_words(kept)], cwd=ROOT))
        took.append(time.monotonic() - begin)
    assert min(took) < 1.5, took


# --- privileges ----------------------------------------------------------------------------


def test_nobody_is_told_what_to_ask_for(kept: Path) -> None:
    report = Report(as_nobody(*_words(kept)))
    assert report.rc == 60
    for name in ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_CHECKPOINT_RESTORE"):
        assert report.state(name) == "failed"
        assert name in report[name]["remedy"]
    assert report.state("processes") == "failed"
    assert re.search(r": 1 \(.+: Permission denied\)", report["processes"]["found"])
    assert report.state("mapped files") == "failed"
    assert report.state("directory") == "failed"
    assert report.state("real-time scheduling") == "degraded"
    assert report.state("leases") == "ok", "files of one's own can be leased"
    assert report.state("CAP_SYS_ADMIN") == "degraded"
    paranoid = int(Path("/proc/sys/kernel/perf_event_paranoid").read_text())
    assert report.state("perf events") == ("failed" if paranoid >= 0 else "ok")


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        (["sys_ptrace"], {"CAP_SYS_PTRACE": "failed"}),
        (["dac_read_search", "dac_override"], {"CAP_DAC_READ_SEARCH": "failed"}),
        (["dac_read_search"], {"CAP_DAC_READ_SEARCH": "ok"}),
        (["checkpoint_restore"], {"CAP_CHECKPOINT_RESTORE": "ok", "mapped files": "ok"}),
        (
            ["checkpoint_restore", "sys_admin"],
            {"CAP_CHECKPOINT_RESTORE": "failed", "mapped files": "failed"},
        ),
        (["perfmon"], {"CAP_PERFMON": "ok", "perf events": "ok"}),
        (["perfmon", "sys_admin"], {"CAP_PERFMON": "failed", "perf events": "failed"}),
        (["sys_nice"], {"CAP_SYS_NICE": "degraded", "real-time scheduling": "degraded"}),
        (["sys_chroot"], {"CAP_SYS_CHROOT": "degraded"}),
        (["lease"], {"CAP_LEASE": "degraded"}),
        (["ipc_lock"], {"CAP_IPC_LOCK": "degraded"}),
        (["syslog"], {"CAP_SYSLOG": "degraded"}),
        (["sys_admin"], {"CAP_SYS_ADMIN": "degraded", "helper": "failed"}),
    ],
)
def test_a_capability_that_is_missing_is_named(
    kept: Path, dropped: list[str], expected: dict[str, str]
) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 0:
        expected = {name: state for name, state in expected.items() if "perf" not in name.lower()}
    report = Report(without(dropped, *_words(kept)))
    assert {name: report.state(name) for name in expected} == expected, str(report.result)
    if any(state == "failed" for name, state in expected.items() if name.startswith("CAP_")):
        assert report.rc == 60
    for name, state in expected.items():
        if name.startswith("CAP_") and state != "ok":
            assert name.removeprefix("CAP_") in report[name]["remedy"]


def test_in_a_pid_namespace_only_its_processes_are_seen(kept: Path) -> None:
    options = ["--pid", "--fork", "--mount-proc"]
    report = Report(unshared(options, *_words(kept)))
    assert report.state("PID namespace") == "failed"
    assert "only the processes of this PID namespace" in report["PID namespace"]["found"]
    assert report.rc == 60


def test_proc_of_another_pid_namespace_is_noticed(kept: Path) -> None:
    report = Report(unshared(["--pid", "--fork"], *_words(kept)))
    assert report.state("PID namespace") == "failed"
    assert "another PID namespace" in report["PID namespace"]["found"]


def test_root_of_a_user_namespace_is_no_root(kept: Path) -> None:
    options = ["--user", "--map-root-user", "--mount"]
    if run([tool("unshare"), *options, tool("true")]).rc != 0:
        pytest.skip("user namespaces are not allowed here")
    report = Report(unshared(options, *_words(kept)))
    assert report.rc == 60
    assert report.state("user namespace") == "failed"
    assert report.state("CAP_SYS_PTRACE") == "ok", "it has it, in there"
    assert report.state("mapped files") == "failed"


@pytest.mark.host
def test_a_mount_namespace_of_its_own_is_noticed(kept: Path) -> None:
    assert _doctor(kept).state("mount namespace") == "ok"
    assert Report(unshared(["--mount"], *_words(kept))).state("mount namespace") == "degraded"


# --- the kernel ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "request_", "name", "state"),
    [
        ("ioctl", errno.ENOTTY, 0xC0686611, "memory maps", "degraded"),  # PROCMAP_QUERY
        ("ioctl", errno.ENOTTY, 0x8008B705, "mount namespace IDs", "degraded"),  # NS_GET_MNTNS_ID
        ("fcntl", errno.EINVAL, 1024, "leases", "degraded"),  # F_SETLEASE
        ("openat2", errno.ENOSYS, None, "openat2", "degraded"),
        ("perf_event_open", errno.ENOSYS, None, "perf events", "failed"),
        ("perf_event_open", errno.EPERM, None, "perf events", "failed"),
        ("sched_setscheduler", errno.EPERM, None, "real-time scheduling", "degraded"),
    ],
)
def test_what_the_kernel_lacks_is_noticed(
    kept: Path, usual: Report, call: str, error: int, request_: int | None, name: str, state: str
) -> None:
    report = Report(forbidding(call, error, request_, *_words(kept)))
    assert report.state(name) == state, str(report.result)
    assert report[name] != usual[name]
    if state == "failed":
        assert report.rc == 3 or usual.rc == 60
    # What is mounted is up to others, too.
    others = [each["name"] for each in report.findings if each["area"] != "fuse"]
    others.remove(name)
    changed = [each for each in others if report.state(each) != usual.state(each)]
    assert changed == []


# --- limits --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "state"), [("256", "failed"), ("1024", "degraded"), ("8192", "ok")]
)
def test_few_open_files(kept: Path, most: str, state: str) -> None:
    report = Report(limited([f"--nofile={most}"], *_words(kept)))
    assert report.state("open files") == state
    assert report.rc in ((3, 60) if state == "failed" else (0, 3, 60))
    assert most in report["open files"]["found"]


def test_locked_memory_counts_without_the_privilege(kept: Path) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 0:
        pytest.skip("perf_event_paranoid is -1: nothing counts")
    setpriv = [tool("setpriv"), "--bounding-set=-ipc_lock", *COMMAND, *_words(kept)]
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    enough = most == resource.RLIM_INFINITY or most >= (os.cpu_count() or 1) << 22
    for limit, state in ((0, "degraded"), (most, "ok" if enough else "degraded")):
        report = Report(run([tool("prlimit"), f"--memlock={limit}", *setpriv], cwd=ROOT))
        assert report.state("locked memory") == state
    report = Report(limited(["--memlock=0"], *_words(kept)))
    assert report.state("locked memory") == "ok", "CAP_IPC_LOCK stands above the limit"


# --- FUSE ----------------------------------------------------------------------------------


def test_without_the_device(kept: Path) -> None:
    script = 'mount -t tmpfs none /dev && exec "$@"'
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", *COMMAND, *_words(kept)]
    report = Report(run(argv, cwd=ROOT))
    assert report.state("device") == "failed"
    assert "--device /dev/fuse" in report["device"]["remedy"]
    assert report.rc in (3, 60)


def test_a_container_without_the_device_is_not_told_to_load_a_module(
    kept: Path, directory: Path
) -> None:
    assert b"nodev\tfuse" in Path("/proc/filesystems").read_bytes().splitlines()
    script = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    inside = [tool("unshare"), "-m", "--pid", "--fork", "--mount-proc", "sh", "-c", script, "sh"]
    report = Report(run([*inside, *COMMAND, *_words(kept)], cwd=ROOT))
    remedy = "give the container --device /dev/fuse --cap-add SYS_ADMIN"
    assert report["device"]["remedy"] == remedy
    (directory / "mnt").mkdir()
    done = run([*inside, *COMMAND, "--store", kept, "mount", directory / "mnt"], cwd=ROOT)
    assert done.rc == 40, done
    assert done.err == f"buildidfs: /dev/fuse does not exist: {remedy}\n"


def test_root_is_not_told_to_become_root(kept: Path, directory: Path) -> None:
    dropped = ["sys_ptrace", "checkpoint_restore", "sys_admin", "sys_nice", "syslog", "perfmon"]
    report = Report(without(dropped, *_words(kept)))
    told = [each["remedy"] for each in report.findings if "run as root" in each["remedy"]]
    assert told == []
    assert "--cap-add=SYS_PTRACE" in report["processes"]["remedy"]
    for words in (["scan", "proc"], ["stats"]):
        done = without(dropped, "--store", directory / "other", *words)
        assert "as root" not in done.out + done.err, done
        assert "--cap-add=" in done.out + done.err, done


@pytest.mark.watch
@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["setpriv", "--bounding-set=-perfmon,-sys_admin"], "let root have CAP_PERFMON: --cap-add"),
        (["unshare", "-Ur"], "this user namespace do not count for it: run it on the host"),
    ],
)
def test_watch_tells_root_why_it_may_not_follow(
    directory: Path, words: list[str], remedy: str
) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 0:
        pytest.skip("perf_event_paranoid is -1: everybody may")
    argv = [tool(words[0]), *words[1:], *COMMAND, "--store", directory / "other"]
    with subprocess.Popen(
        [os.fspath(each) for each in (*argv, "watch", "--no-scan")],
        cwd=ROOT,
        stderr=subprocess.PIPE,
    ) as watch:
        assert watch.stderr is not None
        try:
            said = lines(watch.stderr, lambda got: any("cannot follow" in line for line in got))
        finally:
            watch.terminate()
    (line,) = [line for line in said if "cannot follow" in line]
    assert remedy in line
    assert "as root" not in line


@pytest.mark.fuse
def test_a_mount_that_answers_one_that_hangs_and_one_that_is_dead(directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", tool("true"))
    buildidfs.mountpoint.mkdir()
    words = [*COMMAND, "--store", buildidfs.store, "mount", buildidfs.mountpoint, "--foreground"]
    server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    name = f"mount {buildidfs.mountpoint}"
    try:
        until(lambda: is_mountpoint(buildidfs.mountpoint), "mount")
        assert _doctor(buildidfs.store).state(name) == "ok"
        server.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        silent = _doctor(buildidfs.store)
        assert time.monotonic() - begin > 4
        assert silent.state(name) == "degraded"
        assert "no answer" in silent[name]["found"]
        assert silent.state("index") == "ok", "everything after it was asked as well"
        server.kill()
        server.wait(30)
        dead = _doctor(buildidfs.store)
        assert dead.state(name) == "degraded"
        assert f"buildidfs unmount {buildidfs.mountpoint}" in dead[name]["remedy"]
    finally:
        server.kill()
        server.wait(30)
        run([tool("umount"), "-l", buildidfs.mountpoint])
    assert name not in [each["name"] for each in _doctor(buildidfs.store).findings]


@pytest.mark.fuse
def test_a_store_on_fuse_is_refused(directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    buildidfs("scan", "tree", tool("true"))
    with buildidfs.mounted() as mount:
        report = _doctor(mount / "debug" / "store")
    assert report.state("filesystem") == "failed"
    assert report.state("writing") == "failed"
    assert report.rc in (3, 60)


# --- the store -----------------------------------------------------------------------------


@contextlib.contextmanager
def _mounted(point: Path, *options: Argument) -> Iterator[Path]:
    point.mkdir()
    run([tool("mount"), *options, point], check=True)
    try:
        yield point
    finally:
        unmount(point)


def test_a_store_in_memory_does_not_last(directory: Path) -> None:
    with _mounted(directory / "tmp", "-t", "tmpfs", "tmpfs") as point:
        report = _doctor(point / "store")
        assert report.state("filesystem") == "degraded"
        assert "lost at reboot" in report["filesystem"]["found"]


def test_a_store_in_a_container_goes_with_it(directory: Path) -> None:
    for name in ("lower", "upper", "work"):
        (directory / name).mkdir()
    parts = f"lowerdir={directory}/lower,upperdir={directory}/upper,workdir={directory}/work"
    with _mounted(directory / "over", "-t", "overlay", "-o", parts, "overlay") as point:
        report = _doctor(point / "store")
        assert report.state("filesystem") == "degraded"
        assert "overlay" in report["filesystem"]["found"]


@pytest.fixture
def small(directory: Path) -> Iterator[Path]:
    """A disk of 64 MiB with few inodes."""
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    image = directory / "image"
    with image.open("wb") as file:
        file.truncate(64 * _MIB)
    run([tool("mkfs.ext4"), "-q", "-m", "0", "-N", "128", image], check=True)
    with _mounted(directory / "small", "-o", "loop", image) as point:
        yield point


def test_little_room_and_none(small: Path) -> None:
    report = _doctor(small / "store")
    assert report.state("free space") == "degraded"
    assert "filesystem" in report["free space"]["remedy"]
    with (small / "ballast").open("wb") as file, contextlib.suppress(OSError):
        while True:
            file.write(os.urandom(1 << 16))
            file.flush()
    report = _doctor(small / "store")
    assert report.state("free space") == "failed"
    assert report.rc in (3, 60)


def test_few_inodes_and_none(small: Path) -> None:
    assert _doctor(small / "store").state("free inodes") == "degraded"
    with contextlib.suppress(OSError):
        for number in range(1000):
            (small / str(number)).touch()
    report = _doctor(small / "store")
    assert report.state("free inodes") == "failed"
    assert report.state("unnamed files") == "failed"


def test_a_read_only_filesystem(small: Path) -> None:
    BuildIdFs(small)("scan", "tree", tool("true"))
    run([tool("mount"), "-o", "remount,ro", small], check=True)
    report = _doctor(small / "store")
    assert report.state("writing") == "failed"
    assert report.state("index") == "ok", "it can be read"


def test_others_may_not_look_into_a_store(store: Path) -> None:
    store.chmod(0o750)
    assert _doctor(store)["directory"]["remedy"] == f"chmod 700 {store}"
    store.chmod(0o700)
    assert _doctor(store).state("directory") == "ok"
    os.chown(store, 1000, 1000)
    report = _doctor(store)
    assert report.state("directory") == "degraded"
    assert "user 1000" in report["directory"]["found"]


def test_what_is_no_store(directory: Path) -> None:
    file = directory / "file"
    file.touch()
    assert _doctor(file).state("directory") == "failed"
    full = directory / "full"
    full.mkdir()
    (full / "something").touch()
    report = _doctor(full)
    assert report.state("directory") == "failed"
    assert "not empty" in report["directory"]["found"]
    (full / "something").unlink()
    assert _doctor(full).state("directory") == "ok"


def test_a_store_of_a_newer_version(store: Path) -> None:
    (store / "format").write_text("buildidfs store 99\n")
    report = _doctor(store)
    assert report.state("index") == "failed"
    assert "format 99" in report["index"]["found"]
    assert "buildidfs check --repair" in report["index"]["remedy"]
    assert report.rc in (3, 60)


def test_an_index_that_was_cut_short(store: Path) -> None:
    data = store / "index" / "data.mdb"
    os.truncate(data, 8192)
    before = _listing(store)
    report = _doctor(store)
    assert report.state("index") == "failed"
    assert report["index"]["remedy"]
    assert report.state("leftovers") == "ok", "what comes after it was asked"
    assert _listing(store) == before


def test_a_missing_lock_file_is_not_made(store: Path) -> None:
    lock = store / "index" / "lock.mdb"
    lock.unlink()
    assert _doctor(store).state("index") == "degraded"
    assert not lock.exists()


def test_what_was_left_half_copied(store: Path) -> None:
    (store / "staging").mkdir(exist_ok=True)
    left = store / "staging" / "0123456789abcdef"
    left.write_bytes(b"x" * 10_000)
    assert _doctor(store).state("leftovers") == "ok", "it may be in use"
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    report = _doctor(store)
    assert report.state("leftovers") == "degraded"
    assert report["leftovers"]["found"].startswith("1 file, 12 KiB")
    assert left.exists()


def test_names_are_shown_so_that_no_terminal_obeys_them(directory: Path) -> None:
    result = run([*COMMAND, "--store", directory / "a\nb\x1b[31m", "doctor"], cwd=ROOT)
    assert "\x1b" not in result.text
    assert "a\\nb" in result.out


def test_a_configuration_that_makes_no_sense_is_a_usage_error(directory: Path) -> None:
    config = directory / "bad.toml"
    config.write_text("[watch]\nstrict = 3\n")
    result = run([*COMMAND, "--config", config, "doctor"], cwd=ROOT)
    assert (result.rc, result.out) == (2, "")
    assert len(result.err.splitlines()) == 1


def test_the_restrictions_restrict(directory: Path) -> None:
    """A control: what the tests above rest on."""
    shown = restricted.without(["sys_ptrace"], "--version")
    assert shown.rc == 0
    result = as_nobody("--store", directory / "none", "scan", "tree", tool("true"))
    assert result.rc != 0
    assert "Permission denied" in result.err


def test_states_have_colours_on_a_terminal(directory: Path) -> None:
    words = (*COMMAND, "--store", directory / "store", "doctor")
    assert b"\x1b[32mok\x1b[0m        " in on_terminal(*words).raw
    plain = on_terminal(*words, env={"NO_COLOR": "1"})
    assert b"\x1b" not in plain.raw
    # A path is one word, however long it is.
    remarks = [line for line in plain.lines if max(map(len, line.split()), default=0) < 40]
    assert max(map(len, remarks)) <= 80, "clauses are folded at words"


def test_remedy_for_several_findings_stands_once_below_them(directory: Path) -> None:
    said = as_nobody("--store", directory / "store", "doctor").out.splitlines()
    privileges = said[1 : said.index("kernel:")]
    assert sum("missing: " in line for line in privileges) > 3
    (remedy,) = [line for line in privileges if "-> run as root" in line]
    assert "CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH, CAP_CHECKPOINT_RESTORE, " in remedy
