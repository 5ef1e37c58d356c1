# SPDX-License-Identifier: Apache-2.0
"""A scan of processes: what it pins, what it passes over, what it says."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import signal
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin import builder
from buildidfs.capture.process.mapped_by import Mapper, Mappers
from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.unresponsive.filesystems import Devices, Patience
from buildidfs.errors import UsageError
from buildidfs.formats.elf import identify
from buildidfs.linux import machine, mounts, procfs
from buildidfs.model import EVERYBODY, OWNER, BuildId, Kind, NamespaceSet, Trust
from tests.support.containers.imitating import container_and_imitation
from tests.support.elf import moved
from tests.support.elf.elfwriter import TEXT, TEXT_SPLIT, Section, debuglink, elf_file
from tests.support.filesystems import silentfs
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.catches import Program, started
from tests.support.harness.children import cat_program, copied_cat, needs_root, running
from tests.support.harness.scans import (
    Memory,
    Scan,
    open_descriptors,
    own_namespaces,
    remember,
    scan,
)

ID = BuildId(b"\x33" * 20)
VDSO = b"[vdso]"


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def scanned(*pids: int, memory: Memory | None = None, ways: Ways | None = None) -> Scan:
    return scan(ProcScanner(memory or Memory(), pids=pids, ways=ways, initial=own_namespaces()))


def map_readable(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ)


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Path]:
    """A file with a build ID that this process has mapped."""
    path = tmp_path / "mapped.so"
    path.write_bytes(elf_file(build_id=ID))
    with map_executable(path):
        yield path


def map_executable(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("map_files", [True, False])
def test_everything_that_is_mapped(tmp_path: Path, query: bool, map_files: bool) -> None:
    path = tmp_path / "cat"
    with copied_cat(path) as child:
        result = scanned(child.pid, ways=Ways(query=query, map_files=map_files))
        libraries = {
            os.fsencode(line.split()[5])
            for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()
            if " r-xp " in line and "/" in line
        }
    assert libraries <= set(result.paths())
    assert len(libraries) > 1
    assert result.data(path) == cat_program().read_bytes()
    assert result.unreadable == []
    origin = next(s for s in result.pinned if s.path == os.fsencode(path)).pinned.sighting.origin
    assert (origin.host, origin.scanner, origin.container) == (machine.host_name(), "proc", "")
    assert origin.namespaces.mnt == os.stat("/proc/self/ns/mnt").st_ino
    assert origin.identity.size == cat_program().stat().st_size


@pytest.mark.root
def test_a_process_without_its_first_thread_is_scanned(tmp_path: Path) -> None:
    program = Program(tmp_path)
    with started([program.exe, "leaderless", program.lib, "here", "wait"]) as child:
        result = scanned(child.pid)
        (found,) = [
            each
            for each in Mappers(lambda _, mapping: mapping.path == os.fsencode(program.lib))
            if isinstance(each, Mapper)
        ]
    assert not result.unreadable
    assert result.data(program.exe) == program.exe.read_bytes()
    assert result.data(program.lib) == program.lib.read_bytes()
    assert (found.pid, found.comm) == (child.pid, b"probe")


@pytest.fixture(scope="module")
def mover(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moved.build(tmp_path_factory.mktemp("moved") / "mover")


@pytest.mark.root
@pytest.mark.parametrize("what", ["code", "all"])
@pytest.mark.parametrize("query", [True, False])
def test_a_program_whose_code_has_moved_is_captured(mover: Path, what: str, query: bool) -> None:
    with moved.running(mover, what) as child:
        mappings = Path(f"/proc/{child.pid}/maps").read_text().splitlines()
        its = [line for line in mappings if line.endswith(str(mover))]
        assert not any("x" in line.split()[1] for line in its)
        assert bool(its) == (what == "code")
        result = scanned(child.pid, ways=Ways(query=query))
        wanted = Mappers(lambda _, mapping: mapping.path == os.fsencode(mover))
        found = [each.pid for each in wanted if isinstance(each, Mapper)]
    assert result.data(mover) == mover.read_bytes()
    assert found == [child.pid]
    assert not result.unreadable


@pytest.mark.root
@pytest.mark.parametrize("query", [True, False])
def test_the_files_of_a_guest_of_an_emulator_are_captured(
    mover: Path, tmp_path: Path, query: bool
) -> None:
    guest, data = tmp_path / "guest", tmp_path / "data"
    guest.write_bytes(elf_file(build_id=ID))
    data.write_bytes(bytes(8192))
    for each in (guest, data):
        with moved.running(mover, "guest", each) as child:
            result = scanned(child.pid, ways=Ways(query=query))
        assert (os.fsencode(each) in result.paths()) == (each == guest)
        assert result.data(mover) == mover.read_bytes()
    # Without generated code, a file that is only read is data.
    with map_readable(guest):
        assert os.fsencode(guest) not in scanned(os.getpid()).paths()


@pytest.mark.root
def test_a_program_without_a_name_is_captured(mover: Path, tmp_path: Path) -> None:
    with open(os.memfd_create("mover"), "wb") as memory:
        memory.write(mover.read_bytes())
        memory.flush()
        with moved.running(f"/proc/self/fd/{memory.fileno()}", "all", fd=memory.fileno()) as child:
            assert mover.read_bytes() in {each.data for each in scanned(child.pid).pinned}
    gone = tmp_path / "gone"
    gone.write_bytes(mover.read_bytes())
    gone.chmod(0o755)
    with moved.running(gone, "all") as child:
        gone.unlink()
        assert scanned(child.pid).data(gone) == mover.read_bytes()
    loader = next(Path("/lib64").glob("ld-linux-x86-64.so.2"))
    with moved.running(loader, mover) as child:
        assert scanned(child.pid).data(mover) == mover.read_bytes()


@pytest.mark.root
def test_process_that_enters_its_container_during_the_scan_is_seen_there() -> None:
    """The process makes memory executable, which the scan reports before it opens files."""
    make = "import mmap, os; m = mmap.mmap(-1, 4096, prot=7); print(input(), flush=True); input()"
    argv = ["unshare", "--mount", sys.executable, "-c", make]
    with container_and_imitation() as (group, _), running(argv) as child:

        def enter(pid: int) -> None:
            (group / "cgroup.procs").write_text(f"{pid}")

        found = scan(ProcScanner(Memory(), pids=[child.pid], generated=enter)).pinned
    origins = [each.pinned.sighting.origin for each in found if each.path != b"[vdso]"]
    assert origins
    assert {os.path.basename(each.cgroup) for each in origins} == {os.fsencode(group.name)}
    assert {each.container for each in origins} == {f"docker:{group.name[7:19]}"}


def test_met_in_two_processes_pinned_once(tmp_path: Path) -> None:
    with copied_cat(tmp_path / "cat") as first, running([tmp_path / "cat"]) as second:
        paths = scanned(first.pid, second.pid).paths()
    assert len(paths) == len(set(paths))


def test_known_files_are_not_pinned(mapped: Path) -> None:
    memory = Memory()
    first = scanned(os.getpid(), memory=memory)
    remember(memory, first)
    again = scanned(os.getpid(), memory=memory)
    assert os.fsencode(mapped) in first.paths()
    assert set(again.paths()) <= {VDSO}
    seen = {item.sighting.origin.path for item in again.again}
    assert set(first.paths()) - {VDSO} <= seen


def test_changed_file_is_not_the_known_one(mapped: Path) -> None:
    memory = Memory()
    remember(memory, scanned(os.getpid(), memory=memory))
    with mapped.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.write(b"\0")
    assert os.fsencode(mapped) in scanned(os.getpid(), memory=memory).paths()


def test_debug_file_comes_along(tmp_path: Path) -> None:
    debug = elf_file([TEXT_SPLIT, Section(b".debug_info", b"\1")], build_id=ID)
    crc = zlib.crc32(debug)
    binary, beside = tmp_path / "bin", tmp_path / ".debug/bin.debug"
    binary.write_bytes(elf_file([debuglink(b"bin.debug", crc)], build_id=ID))
    beside.parent.mkdir()
    beside.write_bytes(debug)
    with map_executable(binary):
        result = scanned(os.getpid())
    assert result.data(beside) == debug


def test_file_without_a_name(tmp_path: Path) -> None:
    path = tmp_path / "gone"
    path.write_bytes(elf_file(build_id=ID))
    with map_executable(path):
        path.unlink()
        result = scanned(os.getpid())
    if os.geteuid() == 0:
        assert result.data(path) == elf_file(build_id=ID)
    else:
        (item,) = [item for item in result.unreadable if item.path == os.fsencode(path)]
        assert "CAP_CHECKPOINT_RESTORE" in item.reason


def test_memory_of_devices_is_passed_over(mapped: Path) -> None:
    with open("/dev/zero", "r+b") as device:
        area = mmap.mmap(device.fileno(), 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_EXEC)
    with area:
        assert "/dev/zero" in Path("/proc/self/maps").read_text()
        result = scanned(os.getpid())
    assert os.fsencode(mapped) in result.paths()
    # Files of this and other tests that this process has mapped may be in /dev/shm.
    paths = [path for path in result.paths() if not path.startswith(b"/dev/shm/")]
    assert [path for path in paths if path.startswith(b"/dev/")] == []
    assert result.unreadable == []


def test_own_mounts_are_passed_over(mapped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = mapped.stat()
    device = (os.major(status.st_dev), os.minor(status.st_dev))
    if os.fsencode(mapped) not in scanned(os.getpid()).paths():
        pytest.fail("it has to be found at all")
    monkeypatch.setattr(mounts, "own_mount_devices", lambda text: {device})
    memory = Memory()
    assert os.fsencode(mapped) not in scanned(os.getpid(), memory=memory).paths()
    assert status.st_ino not in {identity.ino for identity in memory.asked}


def test_vdso(mapped: Path) -> None:
    result = scanned(os.getpid())
    (vdso,) = [seen for seen in result.pinned if seen.path == VDSO]
    assert vdso.pinned.kind is Kind.VDSO
    build_id = identify.identify(vdso.data[:4096], FileReader(vdso.data))
    assert isinstance(build_id, BuildId)
    memory = Memory()
    remember(memory, result, build_id)
    again = scanned(os.getpid(), memory=memory)
    assert VDSO not in again.paths()
    assert VDSO in {item.sighting.origin.path for item in again.again}


def test_process_that_does_not_exist_is_said_when_asked_for() -> None:
    with running([cat_program()]) as child:
        pass
    result = scanned(child.pid)
    assert result.unreadable == [
        Unreadable(b"/proc/%d" % child.pid, "no such process", errno.ESRCH)
    ]
    later = ProcScanner(Memory(), pids=[child.pid], may_have_ended=True)
    assert scan(later).unreadable == [], "the caller had found it some time ago"


def test_process_that_ends_meanwhile_is_not_an_error(
    mapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running([cat_program()]) as child:
        pass
    monkeypatch.setattr(procfs, "pids", lambda: [child.pid, os.getpid()])
    result = scan(ProcScanner(Memory()))
    assert os.fsencode(mapped) in result.paths()
    assert result.unreadable == []


def test_containers_only_leaves_the_host_out(mapped: Path) -> None:
    own = own_namespaces()
    scanner = ProcScanner(Memory(), pids=[os.getpid()], containers_only=True, initial=own)
    result = scan(scanner)
    assert result.paths() == [VDSO]  # which is the same inside
    assert (result.again, result.unreadable) == ([], [])


def test_which_namespaces_are_not_the_hosts_is_kept(mapped: Path) -> None:
    own = own_namespaces()
    initial = NamespaceSet(mnt=1, uts=own.uts, pid=2)
    result = scan(ProcScanner(Memory(), pids=[os.getpid()], initial=initial))
    (origin,) = [
        seen.pinned.sighting.origin for seen in result.pinned if seen.path == os.fsencode(mapped)
    ]
    assert builder.apart_names(origin.apart) == ["pid", "mnt"]
    assert builder.label_by(origin.cgroup, own, origin.apart, ["mnt"]) == origin.container


def test_container_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no container 'nobody'"):
        scan(ProcScanner(Memory(), pids=[os.getpid()], containers=["nobody"]))


def test_stopping_early_closes_everything(mapped: Path) -> None:
    found = iter(ProcScanner(Memory(), pids=[os.getpid()]))
    for _ in range(3):
        item = next(found)
        assert not isinstance(item, Unreadable)
        item.close()  # type: ignore[union-attr]  # nothing is known, so all are pinned
    found.close()  # type: ignore[attr-defined]  # a generator


@needs_root("has a file of root's")
@pytest.mark.parametrize(("mode", "expected"), [(0o755, Trust.HOST), (0o777, Trust.UNKNOWN)])
def test_host_is_believed_only_where_root_wrote(
    mapped: Path, as_host: NamespaceSet, mode: int, expected: Trust
) -> None:
    if os.statvfs(mapped).f_flag & os.ST_NOSUID:
        pytest.skip("temporary files are on a filesystem mounted nosuid")
    mapped.chmod(mode)
    result = scan(ProcScanner(Memory(), pids=[os.getpid()], initial=as_host))
    (seen,) = [seen for seen in result.pinned if seen.path == os.fsencode(mapped)]
    assert seen.pinned.sighting.origin.trust is expected


def test_a_thread_of_the_kernel_is_no_container() -> None:
    threads = []
    for pid in procfs.pids():
        with (
            contextlib.suppress(OSError),
            PinnedProcess(pid, Ways()) as process,
        ):  # some end meanwhile
            if procfs.is_kernel_thread(process.fd):
                threads.append(pid)
    if not threads:
        pytest.skip("no thread of the kernel can be seen in this pid namespace")
    elsewhere = NamespaceSet(mnt=1)
    scanner = ProcScanner(Memory(), pids=threads, containers=["none"], initial=elsewhere)
    with pytest.raises(UsageError, match="none is running"):
        list(scanner)


@pytest.mark.fuse
@needs_root("mounts a filesystem")
def test_debug_files_on_a_silent_filesystem(tmp_path: Path) -> None:
    path = tmp_path / "mapped.so"
    path.write_bytes(elf_file([debuglink(b"app", 0)], build_id=ID))
    hidden = tmp_path / ".debug"
    hidden.mkdir()
    with silentfs.served(hidden, path) as server, map_executable(path):
        server.send_signal(signal.SIGSTOP)
        result = scan(
            ProcScanner(
                Memory(),
                pids=[os.getpid()],
                initial=own_namespaces(),
                patience=Patience(0.3),
            )
        )
    assert os.fsencode(path) in result.paths()
    reasons = {item.path: item.reason for item in result.unreadable}
    assert reasons[os.fsencode(hidden / "app")] == "its filesystem does not answer"
    assert not any(place.startswith(b"/usr/lib/debug/") for place in reasons)


def reaches(result: Scan, path: Path) -> list[int]:
    """The reach of a file, each time it was pinned or known."""
    items = [*(seen.pinned for seen in result.pinned), *result.again]
    origins = [item.sighting.origin for item in items]
    return [origin.reach for origin in origins if origin.path == os.fsencode(path)]


@needs_root("others cannot enter their own directories so far down")
@pytest.mark.parametrize("slow", [False, True])
def test_reach_of_a_new_file(directory: Path, monkeypatch: pytest.MonkeyPatch, slow: bool) -> None:
    """Also where filesystems may not answer; of a known file it is not asked for."""
    monkeypatch.setattr(Devices, "learn", lambda *_, **__: slow)
    path = directory / "cat"
    memory = Memory()
    with copied_cat(path) as child:
        result = scanned(child.pid, memory=memory)
        assert reaches(result, path) == [EVERYBODY]
        assert {seen.pinned.sighting.origin.reach for seen in result.pinned} == {EVERYBODY}
        directory.chmod(0o700)
        assert reaches(scanned(child.pid), path) == [OWNER]
        remember(memory, result)
        assert reaches(scanned(child.pid, memory=memory), path) == [0]
        path.unlink()
        assert reaches(scanned(child.pid), path) == [OWNER]


@needs_root("others cannot enter their own directories so far down")
def test_reach_of_a_debug_file(directory: Path) -> None:
    debug = elf_file([TEXT_SPLIT], build_id=ID)
    link = debuglink(b"cat.debug", zlib.crc32(debug))
    hidden = directory / ".debug"
    hidden.mkdir()
    (hidden / "cat.debug").write_bytes(debug)
    path = directory / "mapped.so"
    path.write_bytes(elf_file([TEXT, link], build_id=ID))
    with map_executable(path):
        assert reaches(scanned(os.getpid()), hidden / "cat.debug") == [EVERYBODY]
        hidden.chmod(0o750)
        os.chown(hidden, 61001, 61001)
        assert reaches(scanned(os.getpid()), path) == [EVERYBODY]
        assert reaches(scanned(os.getpid()), hidden / "cat.debug") == [OWNER]


def test_reach_of_a_file_of_a_process_that_is_gone(
    mapped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held already, and captured all the same."""

    def refused(pid_fd: int) -> int:
        raise ProcessLookupError(errno.ESRCH, "No such process")

    monkeypatch.setattr(procfs, "open_root", refused)
    result = scanned(os.getpid())
    assert reaches(result, mapped) == [OWNER]
    assert result.data(mapped) == mapped.read_bytes()


LONG_MAP = """
import ctypes, os, sys
name, count = b"x" * 250, int(sys.argv[1])
for _ in range(15):
    os.mkdir(name)
    os.chdir(name)
fd = os.open(name, os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 4096)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
for _ in range(count):
    assert libc.mmap(None, 4096, 5, 2, fd, 0) != ctypes.c_void_p(-1).value
print(input(), flush=True)
input()
"""


@pytest.mark.parametrize("query", [True, False])
def test_process_with_a_huge_memory_map_is_named_and_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: bool
) -> None:
    """Twenty thousand mappings of a long name would take as much memory for each such process."""
    monkeypatch.chdir(tmp_path)
    with running([sys.executable, "-c", LONG_MAP, "20000"]) as child:
        ways = Ways(query=query, answer_s=30)
        tracemalloc.start()
        found = scan(ProcScanner(Memory(), pids=[child.pid, os.getpid()], ways=ways))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert b"/proc/%d" % child.pid in {each.path for each in found.unreadable}
    assert any("more mappings" in each.reason for each in found.unreadable)
    assert found.pinned
    assert peak < 160 << 20
    shutil.rmtree(tmp_path)
