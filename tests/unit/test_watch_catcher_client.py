# SPDX-License-Identifier: Apache-2.0
"""The catcher as it runs: what it catches of programs that do all that programs do, and what
becomes of it when it, its owner or the machine does not do its part.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.live.protocol import Counts, Lost, Missed, Refused
from buildidfs.errors import CapabilityError
from buildidfs.formats.container import cgroup
from buildidfs.linux import namespaces, procfs
from buildidfs.model import BuildId
from buildidfs.watch.catcher_client import Watcher
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems.silentfs import served
from tests.support.harness.catches import Catches, Program, stepping
from tests.support.harness.children import needs_root, private_cat
from tests.support.harness.own_group import own_group
from tests.support.harness.scans import own_namespaces
from tests.support.harness.waiting import lines, until

pytestmark = [pytest.mark.root, needs_root("events of the whole system")]

ROOT = Path(__file__).parents[2]
CPU1 = Path("/sys/devices/system/cpu/cpu1/online")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture(scope="module")
def shared() -> Iterator[Catches]:
    with Catches() as catches:
        yield catches


@pytest.fixture
def catches(shared: Catches) -> Iterator[Catches]:
    """One catcher for all tests that leave it as it is."""
    yield shared
    assert shared.ended == []
    shared.drop()


@pytest.fixture
def marker(program: Program, tmp_path: Path) -> Path:
    """For `Catches.settle`."""
    return program.place(tmp_path / "marker")


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not run during this block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        status = Path(f"/proc/{pid}/stat")
        until(lambda: status.read_text().rpartition(")")[2].split()[0] == "T", "it to stop")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def here(text: str) -> tuple[int, int]:
    """What a probe printed of where it is: the number of its mount namespace, and the inode."""
    number, inode = map(int, text.split())
    if not number:
        pytest.skip("this kernel has no numbers of mount namespaces (before 6.11)")
    return number, inode


def test_a_program_that_is_gone_with_its_namespace_and_filesystem(
    catches: Catches, program: Program, tmp_path: Path
) -> None:
    script = 'mount -t tmpfs none "$1"; cp "$2" "$1/app"; exec "$1/app"'
    argv = [tool("unshare"), "-mu", "sh", "-c", script, "sh", tmp_path, program.exe]
    number, inode = here(run(argv, check=True).out)
    held = catches.one(tmp_path / "app")
    assert not (tmp_path / "app").exists()
    assert held.data == program.exe.read_bytes()
    caught, place, ours = held.caught, held.caught.place, own_namespaces()
    assert (place.mnt_ns_id, place.namespaces.mnt) == (number, inode)
    assert place.namespaces.uts != ours.uts
    assert (place.namespaces.net, place.namespaces.pid) == (ours.net, ours.pid)
    pid_fd = procfs.open_pid(os.getpid())
    try:
        assert place.cgroup == cgroup.path(procfs.cgroup(pid_fd))
    finally:
        os.close(pid_fd)
    assert caught.build_id is None
    assert caught.identity.size == len(held.data)
    assert caught.identity.ino == os.fstat(held.fd).st_ino


def test_what_was_sent_is_sent_again_only_with_a_reason(
    catches: Catches, program: Program, marker: Path
) -> None:
    app = program.place(marker.with_name("app"))
    catches.settle(marker)  # where children of ours live is known from now on
    first = run([app], check=True).out
    run([app], check=True)
    catches.settle(marker)
    (held,) = catches.of(app)
    assert held.caught.place.mnt_ns_id == here(first)[0]

    catches.watcher.forget([held.caught.key])
    catches.settle(marker)
    run([app], check=True)
    run([app], check=True)
    catches.settle(marker)
    assert len(catches.of(app)) == 2

    # Overwritten in place: the same inode at the same path, other bytes.
    with app.open("ab") as file:
        file.write(b"more")
    run([app], check=True)
    catches.settle(marker)
    assert len(catches.of(app)) == 3
    assert catches.of(app)[2].data == program.exe.read_bytes() + b"more"

    # In a namespace that nobody else is in, which is looked at as long as this one lives.
    run([app], check=True)
    with stepping([tool("unshare"), "-m", app, "here", "wait"]) as go_on:
        elsewhere = go_on()
        catches.wait(app, 4)
    catches.settle(marker)
    assert len(catches.of(app)) == 4
    assert catches.of(app)[3].caught.place.mnt_ns_id == here(elsewhere)[0] != here(first)[0]


def test_forgetting_more_than_fits_a_message(
    catches: Catches, program: Program, marker: Path
) -> None:
    app = program.place(marker.with_name("app"))
    run([app], check=True)
    held = catches.one(app)
    keys = [os.urandom(16) for _ in range(3000)]
    catches.watcher.forget([*keys, held.caught.key])
    catches.settle(marker)
    run([app], check=True)
    catches.wait(app, 2)


def test_grabbers_run_on_the_cpus_of_their_events(catches: Catches) -> None:
    """With the kernel's program; they then hold up the process that touched an unknown file."""
    if catches.others(Refused):
        pytest.skip("this kernel refuses the program")
    mine = os.sched_getaffinity(0)
    tasks = map(int, os.listdir(f"/proc/{catches.watcher.pid}/task"))
    bound = [cpus for each in tasks if len(cpus := os.sched_getaffinity(each)) < len(mine)]
    assert sorted(bound, key=min) == [{cpu} for cpu in sorted(mine) for _ in range(2)]


def test_mappings_of_known_programs_are_read_soon(catches: Catches, program: Program) -> None:
    def records() -> int:
        counts = catches.others(Counts)
        return max((each.records for each in counts if isinstance(each, Counts)), default=0)

    for _ in range(4):
        run([program.exe], check=True)
        time.sleep(0.1)
    until(lambda: records() > 0, "the first counts")
    before = records()
    for _ in range(50):
        run([program.exe], check=True)
    until(lambda: records() >= before + 50, "the records of 50 programs", 20)


def test_catcher_sleeps_while_nothing_is_mapped() -> None:
    with own_group() as group:
        (group / "idle").mkdir()
        watcher = Watcher(lambda message, fd: os.close(fd), lambda reason: None, f"{group}/idle")
        watcher.start()
        try:
            until(lambda: _wakes(watcher.pid, 2.0) <= 6, "two wake-ups a second", 30)
        finally:
            watcher.close()
            (group / "idle").rmdir()


def _wakes(pid: int, seconds: float) -> int:
    """How often the threads of a process give up the CPU in a time."""
    before = _switches(pid)
    time.sleep(seconds)
    return _switches(pid) - before


def _switches(pid: int) -> int:
    status = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(map(int, re.findall(r"^voluntary_ctxt_switches:\t(\d+)", status, re.MULTILINE)))


def test_a_library_that_is_loaded_late(catches: Catches, program: Program, tmp_path: Path) -> None:
    library = tmp_path / "liblate.so"
    library.write_bytes(program.lib.read_bytes())
    with stepping([program.exe, "wait", "here", "wait", library, "here"]) as go_on:
        go_on()
        assert catches.of(library) == []
        go_on()
        assert catches.one(library).data == program.lib.read_bytes()


@pytest.mark.parametrize("what", ["program", "library"])
def test_code_and_data_on_the_same_pages(
    catches: Catches, program: Program, tmp_path: Path, what: str
) -> None:
    """The first mapping spans the whole file, and its end is mapped over at once."""
    source, path = tmp_path / "old.c", tmp_path / "old"
    source.write_text("int data[100000] = { 1 };\nint main(void) { return 0; }\n")
    kind = ["-shared", "-fPIC"] if what == "library" else ["-pie", "-fPIE"]
    options = [*kind, "-Wl,-z,noseparate-code", "-Wl,--build-id"]
    run([tool("gcc"), *options, "-o", path, source], check=True)
    run([tool("readelf"), "-lW", path], check=True)
    run([program.exe, path] if what == "library" else [path], check=True)
    assert catches.one(path).data == path.read_bytes()


def test_a_program_in_memory(catches: Catches, program: Program) -> None:
    name = f"probe-{os.getpid()}"
    fd = os.memfd_create(name, 0)
    try:
        os.write(fd, program.exe.read_bytes())
        argv = [f"/proc/self/fd/{fd}"]
        assert subprocess.run(argv, pass_fds=[fd], capture_output=True, check=True).stdout
    finally:
        os.close(fd)
    assert catches.one(f"/memfd:{name}").data == program.exe.read_bytes()


def test_a_file_that_is_deleted(catches: Catches, program: Program, tmp_path: Path) -> None:
    before, after = program.place(tmp_path / "before"), program.place(tmp_path / "after")
    fd = os.open(before, os.O_RDONLY)
    try:
        before.unlink()
        argv = [f"/proc/self/fd/{fd}"]
        subprocess.run(argv, pass_fds=[fd], capture_output=True, check=True)
    finally:
        os.close(fd)
    assert catches.one(before).data == program.exe.read_bytes()
    with stopped(catches.watcher.pid):
        child = subprocess.Popen([after, "wait"], stdin=subprocess.PIPE)
        until(lambda: any(after.samefile(one) for one in executables()), "it to run")
        after.unlink()
    with child:
        assert catches.one(after).data == program.exe.read_bytes()


def executables() -> Iterator[str]:
    """The links to what processes run, of all that may be looked at."""
    for pid in procfs.pids():
        with contextlib.suppress(OSError):
            os.stat(f"/proc/{pid}/exe")
            yield f"/proc/{pid}/exe"


def test_a_program_in_a_chroot(catches: Catches, tmp_path: Path) -> None:
    name = f"app-{os.urandom(4).hex()}"
    source, path = tmp_path / "app.c", tmp_path / "root" / name
    path.parent.mkdir()
    source.write_text(
        "#include <unistd.h>\n"
        'int main(void) { char c; return write(1, "up\\n", 3) + read(0, &c, 1) != 4; }\n'
    )
    run([tool("gcc"), "-static", "-Wl,--build-id", "-o", path, source], check=True)
    argv = [tool("chroot"), path.parent, f"/{name}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        assert lines(child.stdout, lambda got: got == ["up"])
        held = catches.one(f"/{name}")
        assert held.caught.place.chrooted
        assert held.caught.place.namespaces == own_namespaces()
        assert held.data == path.read_bytes()
        child.stdin.write(b"\n")
        child.stdin.close()
        assert child.wait(20) == 0


@pytest.mark.fuse
def test_a_server_is_not_asked_for_anything(
    catches: Catches, program: Program, marker: Path, tmp_path: Path
) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    with served(mountpoint, program.exe) as server:
        fd = os.open(mountpoint / "app", os.O_RDONLY)
        words = ["wait", f"map={fd}", "here", "wait"]
        with stepping([program.exe, *words], fds=[fd]) as go_on:
            os.close(fd)
            with stopped(server.pid):
                go_on()
                held = catches.one(mountpoint / "app")
                # And it goes on with all others.
                catches.settle(marker)
            assert fcntl.fcntl(held.fd, fcntl.F_GETFL) & os.O_PATH
            assert Path(f"/proc/self/fd/{held.fd}").read_bytes() == program.exe.read_bytes()


def test_in_a_namespace_that_was_there(catches: Catches, program: Program, tmp_path: Path) -> None:
    app = program.place(tmp_path / "app")
    with private_cat(make(tmp_path / "fs")) as child:
        pid_fd = procfs.open_pid(child.pid)
        try:
            expected = namespaces.mnt_ns_id(pid_fd), namespaces.mnt(pid_fd)
        finally:
            os.close(pid_fd)
        argv = [tool("nsenter"), "-t", str(child.pid), "-m", app]
        assert here(run(argv, check=True).out) == expected
        place = catches.one(app).caught.place
        assert (place.mnt_ns_id, place.namespaces.mnt) == expected


def make(path: Path) -> Path:
    path.mkdir()
    return path


def test_a_process_that_moves_without_exec(
    catches: Catches, program: Program, tmp_path: Path
) -> None:
    libraries = [tmp_path / "libbefore.so", tmp_path / "libafter.so"]
    for library in libraries:
        library.write_bytes(program.lib.read_bytes())
    words = ["wait", libraries[0], "here", "wait", "unshare", libraries[1], "here", "wait"]
    with stepping([program.exe, *words]) as go_on:
        for library in libraries:
            place_here = here(go_on())
            place = catches.one(library).caught.place
            assert (place.mnt_ns_id, place.namespaces.mnt) == place_here
    before, after = (catches.one(library).caught.place for library in libraries)
    assert before.mnt_ns_id != after.mnt_ns_id


def test_a_process_whose_first_thread_is_gone(
    catches: Catches, program: Program, tmp_path: Path
) -> None:
    library = tmp_path / "libthread.so"
    library.write_bytes(program.lib.read_bytes())
    words = ["leaderless", "wait", library, "here", "wait"]
    with stepping([program.exe, *words]) as go_on:
        place_here = here(go_on())
        held = catches.one(library)
        place = held.caught.place
        assert (place.mnt_ns_id, place.namespaces.mnt) == place_here
        assert held.data == program.lib.read_bytes()


def test_numbers_of_namespaces_that_are_used_again(
    catches: Catches, program: Program, marker: Path
) -> None:
    app = program.place(marker.with_name("app"))
    expected: list[tuple[int, int]] = []

    def is_used_again() -> bool:
        """Run one more; the catcher holds each namespace for a while, and its number with it."""
        expected.append(here(run([tool("unshare"), "-m", app], check=True).out))
        return len({inode for _, inode in expected}) <= len(expected) - 20

    until(is_used_again, "numbers that are used again")
    catches.settle(marker)
    seen = [held.caught.place for held in catches.of(app)]
    # One that is gone too soon may be missed, but none is said to be in another's namespace.
    told = [(place.mnt_ns_id, place.namespaces.mnt) for place in seen if place.mnt_ns_id]
    assert set(told) <= set(expected), catches.others(Lost)
    assert len(set(told)) == len(told) >= 0.9 * len(expected)


# Runs the programs 0 to 1999 of a directory, eight at a time.
_STARTING = """
#include <fcntl.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char name[16];
    int running = 0, failed = 0, status;
    if (chdir(argv[1]) || dup2(open("/dev/null", O_WRONLY), 1) != 1)
        return 1;
    for (int number = 0; number < 2000 || running; running--) {
        for (; number < 2000 && running < 8; number++, running++) {
            snprintf(name, sizeof(name), "./%d", number);
            if (vfork() == 0) {
                execl(name, name, (char *)0);
                _exit(127);
            }
        }
        failed |= wait(&status) < 0 || status;
    }
    return failed;
}
"""


@pytest.mark.watch  # another watch would compete for the processors
def test_two_thousand_processes(catches: Catches, program: Program, marker: Path) -> None:
    """Each runs a path of its own, as fast as two at a time can be started."""
    starter = compiled(marker.with_name("starter"), _STARTING)
    directory = make(marker.with_name("many"))
    first = program.place(directory / "0")
    for number in range(1, 2000):
        os.link(first, directory / str(number))
    run([starter, directory], check=True, timeout=120)
    catches.settle(marker)
    names = {held.caught.path for held in catches.below(directory)}
    missed = [one for one in catches.others(Missed) if os.fsencode(directory) in one.path]
    assert missed == []
    assert len(names) == 2000
    assert catches.others(Lost) == []


def compiled(path: Path, source: str) -> Path:
    path.with_suffix(".c").write_text(source)
    run([tool("gcc"), "-static", "-o", path, path.with_suffix(".c")], check=True)
    return path


def test_nothing_is_kept_open(catches: Catches, program: Program, marker: Path) -> None:
    # One that is closed may be the last of a filesystem, and is closed by a thread of its own.
    descriptors = Path(f"/proc/{catches.watcher.pid}/fd")
    catches.settle(marker)
    before = len(os.listdir(descriptors))
    with private_cat(make(marker.with_name("fs"))):
        for number in range(50):
            run([program.place(marker.with_name(f"app{number}"))], check=True)
    catches.settle(marker)
    # Others run programs, too, and one may be on its way.
    until(lambda: len(os.listdir(descriptors)) <= before + 5, "descriptors to be closed")


def test_it_never_waits_for_a_larger_table_of_descriptors(catches: Catches) -> None:
    status = Path(f"/proc/{catches.watcher.pid}/status").read_text()
    (room,) = re.findall(r"^FDSize:\s*(\d+)$", status, re.MULTILINE)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert int(room) >= min(16_384, limit)


# Files of the host that a catcher holds; containers have half of it.
_HELD = 2048


def resident(pid: int) -> int:
    """The memory of a process, in bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) << 10


@pytest.mark.watch  # another watch would compete for the processors
@pytest.mark.host
def test_nobody_takes_what_it_sends(marker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounded, and nothing but bytes is given up: what it was is told for each file."""
    monkeypatch.setattr("buildidfs.watch.catcher_client._BUFFER", 1 << 16)
    count = 4000
    directory = make(marker.with_name("many"))
    ids = {}
    for number in range(count):
        path = directory / str(number)
        build_id = os.urandom(20)
        path.write_bytes(elf_file(build_id=build_id))
        ids[os.fsencode(path)] = build_id
    with Catches() as catches, contextlib.ExitStack() as stack:
        pid = catches.watcher.pid
        catches.settle(marker)
        before = resident(pid)
        catches.gate.clear()
        for path in ids:
            fd = os.open(path, os.O_RDONLY)
            code = mmap.PROT_READ | mmap.PROT_EXEC
            stack.enter_context(mmap.mmap(fd, 0, mmap.MAP_PRIVATE, code))
            os.close(fd)
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) > _HELD, "files to wait")
        # What is waiting to be told takes descriptors as well, until it is found out what it is.
        until(lambda: len(os.listdir(f"/proc/{pid}/fd")) < _HELD + 100, "the others to be closed")
        catches.gate.set()
        until(lambda: len(catches.below(directory)) >= count, "all of them", seconds=60)
        held = catches.below(directory)
        assert {one.caught.path for one in held} == ids.keys()
        pinned = [one for one in held if one.fd >= 0]
        told = [one for one in held if one.fd < 0]
        assert len(pinned) >= _HELD
        assert len(told) > 100
        for one in pinned:
            assert one.caught.build_id is None
            assert ids[one.caught.path] in one.data
        for one in told:
            assert one.caught.build_id == BuildId(ids[one.caught.path])
        assert resident(pid) < before + (32 << 20)
        # What could not be held is when it is met again; what was held is not sent again.
        for one in (told[0], pinned[0]):
            with open(one.caught.path, "rb") as file:
                code = mmap.PROT_READ | mmap.PROT_EXEC
                stack.enter_context(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, code))
        assert catches.wait(told[0].caught.path, 2)[1].fd >= 0
        catches.settle(marker)
        assert len(catches.of(pinned[0].caught.path)) == 1
        until(lambda: catches.others(Counts), "a sum")
        assert catches.ended == []


@pytest.mark.watch  # another watch would compete for the processors
def test_more_events_than_there_is_room_for(
    catches: Catches, program: Program, marker: Path
) -> None:
    path = marker.with_name("file")
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file, stopped(catches.watcher.pid):
        code = mmap.PROT_READ | mmap.PROT_EXEC
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})  # so that they fill the ring of one CPU
        try:
            for _ in range(25_000):
                mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, code).close()
        finally:
            os.sched_setaffinity(0, before)

    def lost() -> list[object]:
        # The kernel says so together with the next thing that happens on that CPU.
        run([tool("true")], check=True)
        return list(catches.others(Lost))

    until(lost, "word of what was lost")
    assert all(isinstance(one, Lost) and one.count > 0 for one in catches.others(Lost))
    names = (marker.with_name(f"app{number}") for number in itertools.count())

    def is_followed_again() -> bool:
        # One that ends while the rest of the records is read is caught without its namespace, or,
        # if its namespace ends with it, not at all.
        app = program.place(next(names))
        place_here = here(run([tool("unshare"), "-m", app], check=True).out)
        catches.settle(marker)
        places = [held.caught.place for held in catches.of(app)]
        return [(place.mnt_ns_id, place.namespaces.mnt) for place in places] == [place_here]

    until(is_followed_again, "a program in its namespace")


def test_one_that_is_killed(program: Program, tmp_path: Path) -> None:
    app = program.place(tmp_path / "app")
    with Catches() as catches:
        os.kill(catches.watcher.pid, signal.SIGKILL)
        until(lambda: catches.ended, "word of its end")
        assert catches.ended == ["it was killed"]
        catches.watcher.close()
        assert catches.watcher.pid == 0
        catches.watcher.forget([b"key"])
        until(lambda: catches.watcher.is_due, "the next start")
        catches.watcher.start()
        run([app], check=True)
        catches.one(app)


def test_one_that_is_told_to_end() -> None:
    with Catches() as catches:
        pid = catches.watcher.pid
        # What a terminal or systemd sends to all is for the owner to deal with.
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert not Path(f"/proc/{pid}").exists()
    assert catches.ended == []
    catches.watcher.close()


_OWNER = """
import sys, threading
from buildidfs.watch.catcher_client import Watcher
watcher = Watcher(lambda message, fd: None, print)
print(watcher.start())
print(watcher.pid, flush=True)
threading.Event().wait()
"""


@pytest.mark.watch
def test_one_whose_owner_is_killed() -> None:
    argv = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, cwd=ROOT) as owner:
        try:
            assert owner.stdout is not None
            pid = int(lines(owner.stdout, lambda got: len(got) == 2)[1])
            assert Path(f"/proc/{pid}").exists()
        finally:
            owner.kill()
        until(lambda: not Path(f"/proc/{pid}").exists(), "the catcher to end")


_LEFT_OPEN = """
import os, sys
from buildidfs.watch.catcher_client import Watcher
for executable in (sys.executable, "/bin/false"):
    before = os.listdir("/proc/self/fd")
    sys.executable = executable
    watcher = Watcher(lambda message, fd: fd < 0 or os.close(fd), print)
    try:
        watcher.start()
    except Exception as error:
        assert executable == "/bin/false", error
    watcher.close()
    assert len(os.listdir("/proc/self/fd")) == len(before)
"""


@pytest.mark.watch
def test_nothing_is_left_open() -> None:
    result = run([sys.executable, "-W", "error", "-c", _LEFT_OPEN], cwd=ROOT, check=True)
    assert result.text == ""


_REFUSED = """
from buildidfs.watch.catcher_client import Watcher
from buildidfs.errors import CapabilityError
watcher = Watcher(lambda message, fd: None, print)
try:
    print(watcher.start())
except CapabilityError as error:
    print("refused:", error)
watcher.close()
"""


@pytest.mark.parametrize("lacking", ["-all", "-perfmon,-sys_admin"])
def test_without_the_privilege(lacking: str) -> None:
    if int(Path("/proc/sys/kernel/perf_event_paranoid").read_text()) < 0:
        pytest.skip("everybody may have events on this machine")
    argv = [tool("setpriv"), f"--bounding-set={lacking}", sys.executable, "-c", _REFUSED]
    result = run(argv, cwd=ROOT, check=True)
    assert result.err == ""
    (line,) = result.out.splitlines()
    assert line.startswith("refused: cannot follow what is mapped: ")
    assert "CAP_PERFMON" in line


@pytest.mark.watch
def test_without_real_time_scheduling() -> None:
    script = _REFUSED.replace("print(watcher.start())", "print(*watcher.start())")
    argv = [tool("setpriv"), "--bounding-set=-sys_nice", sys.executable, "-c", script]
    result = run(argv, cwd=ROOT, check=True)
    assert "no real-time scheduling" in result.out
    assert result.err == ""


def test_an_interpreter_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", tool("false"))
    watcher = Watcher(lambda message, fd: None, print)
    with pytest.raises(Exception, match=r"did not start|before it began") as caught:
        watcher.start()
    assert not isinstance(caught.value, CapabilityError)
    assert watcher.pid == 0


@pytest.mark.watch  # it turns a CPU off
@pytest.mark.skipif(not os.access(CPU1, os.W_OK), reason="no CPU can be turned off here")
def test_a_process_that_moves_while_its_cpu_writes_no_records(
    catches: Catches, program: Program, tmp_path: Path
) -> None:
    library = tmp_path / "libmoved.so"
    library.write_bytes(program.lib.read_bytes())
    words = ["wait", "unshare", "here", "wait", library, "here", "wait"]
    before = os.sched_getaffinity(0)
    app = program.place(tmp_path / "app")
    try:
        with stepping([app, *words]) as go_on:
            pid = catches.one(app).caught.pid
            # This is over before the catcher opens the rings of the CPU again.
            CPU1.write_text("0")
            CPU1.write_text("1")
            os.sched_setaffinity(pid, {1})
            go_on()
            until(lambda: catches.others(Lost), "word of a CPU that was off")
            place_here = here(go_on())
            place = catches.one(library).caught.place
            assert (place.mnt_ns_id, place.namespaces.mnt) == place_here
    finally:
        CPU1.write_text("1")
        os.sched_setaffinity(0, before)


@pytest.mark.watch  # it turns a CPU off
def test_cpus_that_are_turned_off_and_on(
    catches: Catches, program: Program, tmp_path: Path
) -> None:
    before = os.sched_getaffinity(0)
    try:
        CPU1.write_text("0")
        until(lambda: catches.others(Lost), "word of a CPU that is gone")
        count = len(catches.others(Lost))
        CPU1.write_text("1")
        until(lambda: len(catches.others(Lost)) > count, "word of a CPU that is back")
    finally:
        CPU1.write_text("1")
        os.sched_setaffinity(0, before)
    app = program.place(tmp_path / "app")
    run([tool("taskset"), "-c", "1", app], check=True)
    catches.one(app)
