# SPDX-License-Identifier: Apache-2.0
"""watch as it is run: what it captures, what it says, and what becomes of it when things fail."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import mmap
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.model import BuildId, Kind
from buildidfs.store import Store
from tests.support.clients.commands import ROOT
from tests.support.clients.tools import run, tool
from tests.support.containers.ephemeral import container
from tests.support.containers.imitating import control_group, entering
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.elf.programs import build_id_of, sha256
from tests.support.filesystems.mapped import SharedMapping, overlay
from tests.support.harness.catches import Program as Probe
from tests.support.harness.children import copied_cat
from tests.support.harness.mounts import COMMAND, loop_devices
from tests.support.harness.unable import unable
from tests.support.harness.waiting import lines, until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from buildidfs.store import JournalRecord
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs
    from tests.support.harness.watching import Watcher

root = pytest.mark.root
host = pytest.mark.host
pytestmark = pytest.mark.slow

MIB = 1 << 20
# Two cores, and others who want them.
PATIENCE = 90.0

# Maps a file that others may be writing to, and holds it; argument: the path.
_MAPPER = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
held = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
assert held[:1]  # a touch
print("up", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path)


def journal(store: Path) -> list[JournalRecord]:
    with Store.open(store, read_only=True) as opened:
        return list(opened.journal.since())


def seen(store: Path, path: Path | str) -> list[JournalRecord]:
    """What the journal has at a path."""
    return [each for each in journal(store) if each.path == os.fsencode(path)]


def digests(store: Path, build_id: str) -> set[str]:
    """The SHA-256 of each file that the store has under a build ID."""
    with Store.open(store, read_only=True) as opened:
        ordinal = opened.index.ordinal(BuildId.from_hex(build_id))
        if ordinal is None:
            return set()
        return {each.digest.hex() for kind in Kind for each in opened.index.variants(ordinal, kind)}


def captured(store: Path, path: Path) -> None:
    """Wait until the store has a file with the bytes it has at ``path``."""
    build_id, right = build_id_of(path), sha256(path)
    until(lambda: right in digests(store, build_id), f"the capture of {path}", PATIENCE)


def is_sound(store: Path) -> bool:
    with Store.open(store) as opened:
        return list(opened.check(digests=True)) == []


def pidfds(watcher: Watcher) -> list[int]:
    return [os.pidfd_open(pid) for pid in watcher.processes()]


def have_ended(fds: list[int]) -> None:
    for fd in fds:
        assert select.select([fd], [], [], PATIENCE)[0]
        os.close(fd)


def catchers(watcher: Watcher) -> list[int]:
    """The process that catches, after the one that guards it if there is one."""
    found = []
    for pid in watcher.processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text() == "buildidfs-catch\n":
                found.append(pid)
    return found


def ephemeral(probe: Probe, directory: Path) -> str:
    """Run the probe on a tmpfs in a mount namespace of its own, from ``directory``/app, to its end.

    Returns the inode number of that namespace.
    """
    directory.mkdir(exist_ok=True)
    script = 'mount -t tmpfs none "$1"; cp "$2" "$1/app"; exec "$1/app" here'
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", directory, probe.exe]
    inode = run(argv, check=True).out.split()[1]
    assert not (directory / "app").exists()
    return inode


def is_free_of(watcher: Watcher, device: int) -> bool:
    """Whether no process of the watch has anything open on a filesystem."""
    for pid in watcher.processes():
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            # Closed meanwhile, which is what is waited for.
            with contextlib.suppress(OSError):
                if link.stat().st_dev == device:
                    return False
    return True


@contextlib.contextmanager
def memory_filesystem(point: Path) -> Iterator[Path]:
    """Mount a filesystem in memory, of 48 MiB, at ``point``."""
    point.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=48m", "none", point], check=True)
    try:
        yield point
    finally:
        run([tool("umount"), "-l", point], check=True)


@contextlib.contextmanager
def mapping(path: Path) -> Iterator[None]:
    """A process that has a file mapped executable."""
    argv = [sys.executable, "-c", _MAPPER, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert lines(process.stdout, lambda got: len(got) == 1) == ["up"]
            yield
        finally:
            process.kill()


# --- what is captured ----------------------------------------------------------------------------


@root
@host
@pytest.mark.parametrize("kind", ["tmpfs", pytest.param("crun", marks=pytest.mark.watch)])
def test_container_that_has_gone_is_in_store_and_journal(
    directory: Path, program: Program, kind: str
) -> None:
    with watching(directory / "store", "--no-scan", "--json") as watcher:
        with container(kind, program, directory / "container") as running:
            inode = int(os.readlink(f"/proc/{running.stuck}/ns/mnt")[5:-1])
            label = running.label or f"mnt:{inode}"
            device = os.stat(f"/proc/{running.stuck}/root{running.app}/bin/hot").st_dev
            captured(watcher.store, program.exe.shipped)
            captured(watcher.store, program.lib.shipped)
            until(lambda: is_free_of(watcher, device), "an end of what is open", PATIENCE)
            running.destroy()
        for binary in program.binaries:
            captured(watcher.store, binary.shipped)
            path = f"{running.app}/{'bin' if binary is program.exe else 'lib'}"
            (record,) = [
                each
                for each in seen(watcher.store, f"{path}/{binary.shipped.name}")
                if each.container == label
            ]
            assert record.build_id.hex() == binary.build_id
            assert record.namespaces.mnt == inode
            assert record.mnt_ns_id
            assert record.scanner == "watch"
        path = f"{running.app}/bin/hot"
        place = (path, label)  # others may have a container with such a path, too
        (event,) = [
            each for each in watcher.events if (each.get("path"), each.get("container")) == place
        ]
        assert (event["event"], event["build_id"]) == ("captured", program.exe.build_id)
        assert event["mnt_ns_id"] == record.mnt_ns_id
        assert abs(event["time"] - time.time()) < 3600
        until(lambda: watcher.facts["caught"] >= 2, "the counts", PATIENCE)
    last = watcher.events[-1]
    assert last["event"] == "stopped"
    assert last["captured"] == sum(each["event"] == "captured" for each in watcher.events)
    assert last["mode"] == "following"
    assert last["records"] >= last["caught"] >= 2
    assert last["waiting"] == 0
    assert is_sound(watcher.store)


@root
@host
def test_device_is_free_soon_after_the_container(directory: Path, program: Program) -> None:
    """What is captured is closed, so that nothing stays mounted or attached."""
    with watching(directory / "store", "--no-scan") as watcher:
        with container("ext4", program, directory / "container") as running:
            device = os.stat(f"/proc/{running.stuck}/root{running.app}/bin/hot").st_dev
            captured(watcher.store, program.exe.shipped)
            captured(watcher.store, program.lib.shipped)
            until(lambda: is_free_of(watcher, device), "an end of what is open", PATIENCE)
            running.destroy()  # unmounts, and waits for the loop device
        assert loop_devices(directory) == []


@root
@host
@pytest.mark.parametrize("scan", [True, False])
def test_what_runs_already_is_captured_unless_told_not_to(
    directory: Path, probe: Probe, scan: bool
) -> None:
    running, later = directory / "running", directory / "later"
    options = [] if scan else ["--no-scan"]
    with copied_cat(running), watching(directory / "store", *options) as watcher:
        if scan:
            until(lambda: seen(watcher.store, running), "what runs", PATIENCE)
        run([probe.place(later)], check=True)
        captured(watcher.store, later)
        until(lambda: watcher.facts["caught"] and watcher.facts["idle"], "rest", PATIENCE)
        assert bool(seen(watcher.store, running)) is scan
        assert watcher.facts["scans"] == int(scan)


@root
@host
@pytest.mark.parametrize("place", ["", ".debug/"])
def test_debug_file_beside_a_running_program(directory: Path, place: str) -> None:
    """The debug file has the name in .gnu_debuglink, which the copy of the program has, too."""
    source = directory / "main.c"
    source.write_text(
        f'#include <unistd.h>\nconst char token[] = "{place}{directory}";\n'
        "int main(void) { for (;;) pause(); }\n"
    )
    wanted = {}
    with watching(directory / "store", "--no-scan") as watcher, contextlib.ExitStack() as stack:
        for number in range(3):
            app = directory / f"app{number}"
            debug = directory / f"{place}app{number}.dbg"
            debug.parent.mkdir(exist_ok=True)
            options = ["-g", f"-DNUMBER={number}", "-Wl,--build-id=0x" + secrets.token_hex(20)]
            run([tool("gcc"), *options, source, "-o", app], check=True)
            run([tool("objcopy"), "--only-keep-debug", app, debug], check=True)
            run([tool("objcopy"), "-S", f"--add-gnu-debuglink={debug}", app], check=True)
            wanted[build_id_of(app)] = sha256(debug)
            process = stack.enter_context(subprocess.Popen([app]))
            stack.callback(process.kill)
        until(
            lambda: all(digest in digests(watcher.store, each) for each, digest in wanted.items()),
            "the debug files",
            PATIENCE,
        )


@root
@host
@pytest.mark.watch
def test_excluded_paths_and_other_containers(
    directory: Path, program: Program, probe: Probe
) -> None:
    label = "docker:" + program.exe.build_id[:12]
    options = ["--no-scan", "--container", label, "--exclude", "*/libhot.*"]
    with watching(directory / "store", *options) as watcher:
        run([probe.exe], check=True)
        with container("crun", program, directory / "container") as running:
            assert running.label == label
            captured(watcher.store, program.exe.shipped)
            running.destroy()
        ephemeral(probe, directory / "place")
        until(lambda: watcher.facts["caught"] and watcher.facts["idle"], "rest", PATIENCE)
    assert digests(watcher.store, program.lib.build_id) == set()
    assert {record.container for record in journal(watcher.store)} == {label}


@root
@host
def test_settings_are_the_defaults_of_options(directory: Path, probe: Probe) -> None:
    settings = directory / "buildidfs.toml"
    settings.write_text('[watch]\nexclude = ["*/excluded"]\npin-seconds = 5\npin-bytes = "1G"\n')
    command = [*COMMAND, "--config", settings]
    paths = [probe.place(directory / name) for name in ("excluded", "left-out", "wanted")]
    with watching(
        directory / "store", "--no-scan", "--exclude", "*/left-out", command=command
    ) as watcher:
        for path in paths:
            run([path], check=True)
        captured(watcher.store, paths[-1])
    assert [bool(seen(watcher.store, path)) for path in paths] == [False, False, True]


@root
@host
def test_library_overwritten_in_place(directory: Path, probe: Probe) -> None:
    """The same inode at the same path, and not even another size: each version is itself."""
    library = directory / "lib.so"
    versions = []
    for number in range(4):
        source = directory / f"lib{number}.so"
        content = bytearray(probe.lib.read_bytes())
        old = bytes.fromhex(build_id_of(probe.lib))
        at = content.index(old)
        content[at : at + len(old)] = os.urandom(len(old))
        source.write_bytes(content)
        versions.append((build_id_of(source), sha256(source), bytes(content)))
    with watching(directory / "store", "--no-scan") as watcher:
        inodes = set()
        for build_id, right, content in versions:
            library.write_bytes(content)
            inodes.add(library.stat().st_ino)
            run([probe.exe, library], check=True)
            until(
                lambda b=build_id, r=right: digests(watcher.store, b) == {r},
                "this version", PATIENCE,
            )  # fmt: skip
        assert len(inodes) == 1
        # Sooner than they can be copied: some may be missed, and none may be mistaken.
        for _, _, content in versions * 5:
            library.write_bytes(content)
            run([probe.exe, library], check=True)
        until(lambda: watcher.facts["idle"], "rest", PATIENCE)
    for build_id, right, _ in versions:
        assert digests(watcher.store, build_id) == {right}
    assert {each.build_id.hex() for each in seen(watcher.store, library)} == {
        build_id for build_id, _, _ in versions
    }
    assert is_sound(watcher.store)


@root
@host
@pytest.mark.parametrize("where", ["disk", "overlay"])
def test_library_changed_through_an_older_mapping(
    directory: Path, probe: Probe, where: str
) -> None:
    """Its inode, size and times stand still: only that it has a writer tells that it may change."""
    original = probe.lib.read_bytes()
    old = bytes.fromhex(build_id_of(probe.lib))
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(overlay(directory / "layers")) if where != "disk" else directory
        library = place / "lib.so"
        library.write_bytes(original)
        shared = stack.enter_context(SharedMapping(library))
        watcher = stack.enter_context(watching(directory / "store", "--no-scan"))
        before = library.stat()
        for _ in range(3):
            build_id = os.urandom(len(old))
            content = original.replace(old, build_id)
            shared.write(content)
            right = hashlib.sha256(content).hexdigest()

            def caught(build_id: str = build_id.hex(), right: str = right) -> bool:
                run([probe.exe, library], check=True)
                return digests(watcher.store, build_id) == {right}

            until(caught, "this version", PATIENCE)
        after = library.stat()
        assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    assert is_sound(watcher.store)


# Writes a byte of its second argument, a file, to its first, a descriptor, 20 times a second, and
# the rest when its standard input ends.
_WRITER = """
import os, select, sys
to, source = int(sys.argv[1]), open(sys.argv[2], "rb")
os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
while not select.select([0], [], [], 0.05)[0]:
    os.write(to, source.read(1))
while data := source.read(1 << 20):
    os.write(to, data)
"""


class Growing:
    """A file of 20 MB that a process writes, slowly until `finish`. Its first page is there.

    A file at which no process writes for a second is taken as it is. So the writer waits neither
    for the processors, which real-time scheduling gives it, nor for a disk: ``path`` is in memory.
    """

    def __init__(self, path: Path) -> None:
        build_id = os.urandom(20)
        self.build_id = build_id.hex()
        data = elf_file([TEXT, Section(b".data", os.urandom(20_000_000))], build_id=build_id)
        source = path.with_suffix(".source")
        source.write_bytes(data[mmap.PAGESIZE :])
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o755)
        try:
            os.write(fd, data[: mmap.PAGESIZE])
            argv = [sys.executable, "-I", "-S", "-c", _WRITER, str(fd), source]
            self._writer = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=[fd])
        finally:
            os.close(fd)

    def finish(self) -> None:
        """Have the rest written, and wait for that."""
        assert self._writer.stdin is not None
        self._writer.stdin.close()
        assert self._writer.wait(PATIENCE) == 0

    def close(self) -> None:
        """Be done with it; safe to call twice."""
        with self._writer:
            self._writer.kill()


@root
@host
def test_file_is_captured_when_its_writer_is_done(directory: Path) -> None:
    with (
        memory_filesystem(directory / "memory") as memory,
        watching(directory / "store", "--no-scan", "--json") as watcher,
    ):
        path = memory / "growing.so"
        with contextlib.closing(Growing(path)) as file, mapping(path):
            until(lambda: watcher.facts["retried"], "an attempt", PATIENCE)
            assert digests(watcher.store, file.build_id) == set()
            file.finish()
            until(lambda: digests(watcher.store, file.build_id), "the capture", PATIENCE)
        assert digests(watcher.store, file.build_id) == {sha256(path)}
        assert path.stat().st_size > 20_000_000
        assert not [each for each in watcher.events if each["event"] == "not captured"]


@root
@host
def test_file_that_is_written_for_ever_is_told_of(directory: Path) -> None:
    """The writer outlives the watch: a scan of its process waits for the end of it once more."""
    options = ["--no-scan", "--json", "--pin-seconds", "1"]
    with (
        memory_filesystem(directory / "memory") as memory,
        contextlib.closing(Growing(memory / "growing.so")) as file,
    ):
        path = memory / "growing.so"
        with watching(directory / "store", *options) as watcher, mapping(path):

            def not_captured() -> list[dict[str, Any]]:
                return [
                    each
                    for each in watcher.events
                    if each["event"] == "not captured" and each["path"] == str(path)
                ]

            event = until(not_captured, "that it was not captured", PATIENCE)[0]
            until(lambda: seen(watcher.store, path), "the journal", PATIENCE)
        assert (event["path"], event["build_id"]) == (str(path), file.build_id)
        assert event["reason"]
        assert [each.build_id.hex() for each in seen(watcher.store, path)] == [file.build_id]
        assert digests(watcher.store, file.build_id) == set()
        assert watcher.events[-1]["let_go"] >= 1


@root
@host
@pytest.mark.fuse
@pytest.mark.client
def test_it_does_not_capture_itself(
    directory: Path, buildidfs: BuildIdFs, program: Program, stripped: Path, probe: Probe
) -> None:
    """Readers of the mount, and the mount's own process, make nothing new."""
    gdb = [tool("gdb"), "-nx", "-batch", "-ex", "info functions"]
    with watching(buildidfs.store, "--no-scan") as watcher:
        run([stripped, "leak"], check=True)
        captured(watcher.store, program.exe.shipped)
        with buildidfs.mounted() as mount:
            elf = mount / program.exe.build_id / "elf"
            with elf.open("rb") as file, pytest.raises(PermissionError):
                mmap.mmap(file.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
            for _ in range(3):
                run([tool("readelf"), "-nS", elf], check=True)
                run([*gdb, elf], check=True)
                buildidfs("list")
            # What was mapped before this has been dealt with when this is there.
            last = probe.place(directory / "last")
            run([last], check=True)
            captured(watcher.store, last)
        found = [each.path for each in journal(watcher.store)]
    assert os.fsencode(last) in found
    own = (os.fsencode(buildidfs.store), os.fsencode(buildidfs.mountpoint))
    assert [path for path in found if path.startswith(own)] == []


# --- what it says --------------------------------------------------------------------------------


@root
@host
@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "terminal"])
def test_signals_end_it_and_leave_nothing(directory: Path, how: str) -> None:
    with watching(directory / "store") as watcher:
        fds = pidfds(watcher)
        # And one more if there is anything on this host that may not answer.
        assert len(fds) >= 2
        if how == "terminal":  # which tells everybody
            for fd in fds[1:]:
                signal.pidfd_send_signal(fd, signal.SIGINT)
        watcher.stop(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
        have_ended(fds)
        assert watcher.log.count("\n") == 1, watcher.log
        assert watcher.log.startswith("following, ")
        assert watcher.facts == {}, "it is not present any more"
    assert is_sound(watcher.store)


@root
@host
def test_service_manager_is_told(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    with watching(directory / "store", "--no-scan") as watcher:
        told = watcher.told
        assert told.messages[0].startswith("READY=1\nSTATUS=following, 0 captured")
        until(lambda: told.lines.count("WATCHDOG=1") >= 3, "signs of life", PATIENCE)
        run([copied(directory / "true", Path(tool("true")).resolve())], check=True)
        until(
            lambda: [x for x in told.lines if x.startswith("STATUS=following, ")],
            "the status", PATIENCE,
        )  # fmt: skip
        assert "STOPPING=1" not in told.lines
        watcher.stop()
        until(lambda: told.lines[-1] == "STOPPING=1", "that it stops", PATIENCE)
    assert told.lines.count("READY=1") == 1
    statuses = [line for line in told.lines if line.startswith("STATUS=")]
    assert all(old != new for old, new in pairwise(statuses)), "each message wakes its reader"


def copied(path: Path, program: Path) -> Path:
    """A copy of a program."""
    path.write_bytes(program.read_bytes())
    path.chmod(0o755)
    return path


@root
@host
def test_status_shows_it(buildidfs: BuildIdFs, probe: Probe) -> None:
    with watching(buildidfs.store, "--no-scan") as watcher:
        run([probe.exe], check=True)
        until(lambda: watcher.facts.get("captured"), "the counts", PATIENCE)
        done = buildidfs("status", "--json", check=False)
        found = json.loads(done.out)
        # Other tests have files that a watch cannot read, and loses.
        assert (done.rc, found["well"]) in ((0, True), (5, False))
        (process,) = found["processes"]
        assert (process["role"], process["state"]) == ("watch", "running")
        assert process["pid"] == watcher.pid
        assert process["facts"]["mode"] == "following"
        assert process["facts"]["captured"] > 0
        assert f"pid {watcher.pid}" in buildidfs("status", check=False).out
    assert buildidfs("status", check=False).rc == 3


@root
@host
def test_reader_of_the_output_that_goes(directory: Path, probe: Probe) -> None:
    words = [*COMMAND, "--store", directory / "store", "watch", "--json"]
    argv = [os.fspath(word) for word in words]
    with subprocess.Popen(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            lines(process.stdout, lambda got: bool(got))
            children = [os.pidfd_open(pid) for pid in _children(process.pid)]
            assert children
            process.stdout.close()
            ephemeral(probe, directory / "place")
            assert process.wait(PATIENCE) == 128 + signal.SIGPIPE
            assert process.stderr is not None
            said = process.stderr.read().splitlines()
            assert [
                x for x in said if not x.startswith(b"buildidfs: warning: not captured: ")
            ] == []
            have_ended(children)
        finally:
            process.kill()
    assert is_sound(directory / "store")


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_without_the_privilege_it_scans(directory: Path) -> None:
    watched = watching(
        directory / "store", "--json", "--exclude", "*", command=unable(*COMMAND), code=3
    )
    with watched as watcher:
        until(lambda: watcher.facts.get("scans", 0) >= 2, "scans", PATIENCE)
        assert watcher.facts["mode"] == "polling"
        (text,) = watcher.facts["degraded"]
        assert "scanning every 2 s" in text
    warnings = [line for line in watcher.log.splitlines() if not line.startswith("{")]
    assert warnings == [f"buildidfs: warning: {text}"]
    last = watcher.events[-1]
    assert (last["event"], last["mode"], last["degraded"]) == ("stopped", "polling", [text])


# --- what fails ----------------------------------------------------------------------------------


@root
@host
def test_killed_catcher_is_started_again(directory: Path, probe: Probe) -> None:
    with watching(directory / "store", "--no-scan") as watcher:
        for number in (1, 2):
            os.kill(catchers(watcher)[-1], signal.SIGKILL)
            # Whether it is there in time for this or not: it is looked for.
            with copied_cat(directory / f"running{number}"):
                until(lambda n=number: seen(watcher.store, directory / f"running{n}"),
                      "what runs", PATIENCE)  # fmt: skip
                until(lambda n=number: watcher.facts["restarts"] == n
                      and watcher.facts["scans"] >= n, "the restart", PATIENCE)  # fmt: skip
        assert watcher.facts["mode"] == "following"
        ephemeral(probe, directory / "place")
        captured(watcher.store, probe.exe)
        until(lambda: watcher.facts["records"] > 0, "what the last one has counted", PATIENCE)
    assert watcher.log.count("the catcher ended (it was killed): starting it again") == 2


@root
@host
def test_killed_watch_leaves_nothing_and_the_next_goes_on(directory: Path, probe: Probe) -> None:
    store = directory / "store"
    with copied_cat(directory / "running"):
        with watching(store, "--no-scan") as watcher:
            ephemeral(probe, directory / "place")
            until(lambda: seen(store, directory / "place/app"), "a catch", PATIENCE)
            fds = pidfds(watcher)
            watcher.crash()
            have_ended(fds)
        assert watcher.facts == {}
        assert is_sound(store)
        assert not seen(store, directory / "running")
        with watching(store):
            until(lambda: seen(store, directory / "running"), "what still runs", PATIENCE)
    assert is_sound(store)


@pytest.fixture
def small(directory: Path) -> Iterator[Path]:
    """A filesystem of 48 MiB."""
    with memory_filesystem(directory / "small") as point:
        yield point


def _fill(directory: Path) -> Path:
    """Take all room of a filesystem."""
    ballast = directory / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):  # no space left
        for size in (MIB, 1 << 12):
            with contextlib.suppress(OSError):
                while True:
                    os.write(file.fileno(), os.urandom(size))
    usage = os.statvfs(directory)
    assert usage.f_bavail < 16
    return ballast


def _only_below(directory: Path) -> list[str]:
    """Options of watch: what is elsewhere is excluded, wherever its path begins to differ."""
    path = f"{directory}/"
    globs = (f"{glob.escape(path[:at])}[!{letter}]*" for at, letter in enumerate(path))
    return [word for each in globs for word in ("--exclude", each)]


@root
@host
def test_full_store_recovers(directory: Path, small: Path, probe: Probe) -> None:
    store = small / "store"
    # What others run does not fit, and one of theirs may be removed to make room for ours.
    with watching(store, "--no-scan", *_only_below(directory)) as watcher:
        first = probe.place(directory / "first")
        run([first], check=True)
        captured(store, first)
        until(lambda: watcher.facts["idle"], "rest", PATIENCE)
        with Store.open(store) as opened:  # or it would make room
            mine = [build_id for _, build_id in opened.index.build_ids_from()]
            assert [str(each) for each in mine] == [build_id_of(first)]
            opened.pin(mine)
        ballast = _fill(small)
        with copied_cat(directory / "running") as child:
            # Deleted, or it could be had again, and would only be noted.
            shutil.copy(directory / "running", directory / "copy")
            (directory / "running").unlink()
            until(lambda: watcher.facts["store_error"], "that the store is full", PATIENCE)
            gone = elf_file([TEXT], build_id=(gone_id := os.urandom(20)))
            (directory / "gone.so").write_bytes(gone)
            with mapping(directory / "gone.so"):
                pass
            (directory / "gone.so").unlink()
            assert "no space left" in watcher.facts["store_error"]
            assert child.poll() is None
            ballast.unlink()
            captured(store, directory / "copy")
            until(lambda: seen(store, directory / "gone.so"), "the journal", PATIENCE)
            until(lambda: not watcher.facts["store_error"], "the end of it", PATIENCE)
        assert watcher.facts["unjournaled"] == 0
    assert [each.build_id for each in seen(store, directory / "gone.so")] == [gone_id]
    assert seen(store, directory / "running")
    assert is_sound(store)
    assert "Traceback" not in watcher.log


def test_nothing_is_mistaken(directory: Path) -> None:
    """So that the others can fail: digests are those of what is there."""
    content = elf_file([TEXT], build_id=b"\xab" * 20)
    (directory / "a.so").write_bytes(content)
    run([*COMMAND, "--store", directory / "store", "scan", "tree", directory / "a.so"],
        cwd=ROOT, check=True)  # fmt: skip
    assert digests(directory / "store", "ab" * 20) == {hashlib.sha256(content).hexdigest()}
    assert digests(directory / "store", "cd" * 20) == set()


@root
def test_only_one_control_group_is_followed(directory: Path, probe: Probe, tmp_path: Path) -> None:
    """Programs in the group and below it are captured, before and after the start."""
    store = tmp_path / "store"
    with control_group() as group, control_group() as other:
        running = probe.place(directory / "running")
        held = subprocess.Popen([*entering(group), running, "wait"], stdin=subprocess.PIPE)
        try:
            until(lambda: str(held.pid) in (group / "cgroup.procs").read_text(), "the group")
            with watching(store, "--cgroup", group) as watcher:
                captured(store, running)
                outside = [probe.place(directory / f"outside{number}") for number in range(20)]
                for path in outside:
                    run([*entering(other), path], check=True)
                inside = [probe.place(directory / f"inside{number}") for number in range(20)]
                for path in inside:
                    run([*entering(group), path], check=True)
                for path in inside:
                    captured(store, path)
                assert watcher.facts["missed"] == 0
        finally:
            held.kill()
            held.communicate()
    paths = {each.path for each in journal(store)}
    assert paths.isdisjoint(map(os.fsencode, outside))


def test_directory_that_is_no_control_group_is_refused(tmp_path: Path) -> None:
    result = run([*COMMAND, "--store", tmp_path / "store", "watch", "--cgroup", tmp_path])
    assert result.rc == 2
    assert "is not a control group" in result.text
