# SPDX-License-Identifier: Apache-2.0
"""Files that are not mapped any more, found where others still see them, or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from buildidfs.capture.live.process_table import Finder, HeldNamespaces, Home, Tasks
from buildidfs.formats.perf.records import Mapped
from buildidfs.linux import mounts, namespaces
from buildidfs.model import NamespaceSet
from tests.support.clients.tools import tool
from tests.support.filesystems import silentfs
from tests.support.harness.children import cat_program, needs_root, private_cat
from tests.support.harness.scans import open_descriptors, own_namespaces
from tests.support.harness.waiting import until

GONE = 4194303


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def record(path: Path, pid: int = GONE, inode: int | None = None) -> Mapped:
    """The mapping of a file."""
    number = path.stat().st_ino if inode is None else inode
    return Mapped(1, pid, 0x1000, 0x2000, 0, os.fsencode(path), inode=number)


def home_of(*pids: int) -> Home:
    """The home of the first of these processes."""
    home = Home(namespaces.of_pid(pids[0]))
    home.pids.extend(pids)
    return home


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in a thread of its own, because a finder takes over the root of its thread."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def found(record: Mapped, home: Home, host: int = 0, namespace_fd: int = -1) -> Path | None:
    paths: list[Path] = []

    def look() -> None:
        finder = Finder(host)
        fd = finder.find(record, home, namespace_fd)
        finder.close()
        if fd >= 0:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.read(fd, 1)
            paths.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
            os.close(fd)

    in_thread(look)
    return paths[0] if paths else None


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def app(tmp_path: Path) -> Path:
    return Path(shutil.copy(cat_program(), tmp_path / "app"))


def test_by_a_neighbour(app: Path) -> None:
    home = home_of(os.getpid(), GONE)
    assert found(record(app), home) == app
    # Not by the process itself, which does not map it any more.
    assert found(record(app, pid=os.getpid()), home) is None


def test_by_ourselves_on_the_host(app: Path) -> None:
    home = Home(own_namespaces())
    home.pids.append(GONE)
    assert found(record(app), home, host=own_namespaces().mnt) == app
    assert found(record(app), home, host=1) is None


def test_the_name_of_another_file_is_not_enough(app: Path, tmp_path: Path) -> None:
    home = home_of(os.getpid())
    number = app.stat().st_ino
    (tmp_path / "other").write_bytes(b"other")
    (tmp_path / "other").rename(app)
    assert found(record(app, inode=number), home) is None
    assert found(record(app), home) == app


def test_only_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert found(record(tmp_path / "fifo"), home_of(os.getpid())) is None
    assert found(record(tmp_path), home_of(os.getpid())) is None


def test_nothing_is_found_without_the_namespace(app: Path) -> None:
    home = Home()
    home.pids.append(os.getpid())
    assert found(record(app), home) is None


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_in_the_namespace_it_was_in(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        inode = os.stat(f"/proc/{child.pid}/exe").st_ino
        mapped = record(tmp_path / "cat", inode=inode)
        assert not (tmp_path / "cat").exists()
        assert found(mapped, home_of(child.pid)) is not None
        # One that has moved on is no neighbour.
        moved = home_of(os.getpid())
        moved.pids.append(child.pid)
        assert found(mapped, moved) is None
    assert found(mapped, home_of(os.getpid(), child.pid)) is None


# --- held namespaces -----------------------------------------------------------------------------


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_held_namespace_outlives_its_processes(tmp_path: Path) -> None:
    held = HeldNamespaces(close_all, most=512)
    with private_cat(tmp_path) as child:
        inode = os.stat(f"/proc/{child.pid}/exe").st_ino
        home = home_of(child.pid)
        held.hold(home, child.pid)
    mapped = record(tmp_path / "cat", inode=inode)
    assert found(mapped, home) is None, "no process is left to ask"
    fd = held.borrow(home)
    assert found(mapped, home, namespace_fd=fd) == tmp_path / "cat"
    assert found(record(tmp_path / "cat", inode=inode + 1), home, namespace_fd=fd) is None
    os.close(fd)
    until(lambda: held.expire() or not len(held), "the end of the hold")
    assert held.borrow(home) == -1


def test_no_descriptor_is_left_for_a_copy() -> None:
    held, home = HeldNamespaces(close_all, most=512), home_of(os.getpid())
    held.hold(home, os.getpid())
    assert len(held) == 1
    free = os.open("/", os.O_PATH)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        assert held.borrow(home) == -1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    until(lambda: held.expire() or not len(held), "the end of the hold")


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_path_below_a_mount_that_was_the_root_of_the_process(tmp_path: Path) -> None:
    """chroot(2) into a mount: the path of the record begins there."""
    held = HeldNamespaces(close_all, most=512)
    with private_cat(tmp_path) as child:
        status = os.stat(f"/proc/{child.pid}/exe")
        home = home_of(child.pid)
        held.hold(home, child.pid)
    device = os.major(status.st_dev), os.minor(status.st_dev)
    fd = held.borrow(home)
    inside = Mapped(1, GONE, 0x1000, 0x2000, 0, b"/cat", device, status.st_ino)
    assert found(inside, home, namespace_fd=fd) == tmp_path / "cat"
    elsewhere = Mapped(1, GONE, 0x1000, 0x2000, 0, b"/cat", (0, 0), status.st_ino)
    assert found(elsewhere, home, namespace_fd=fd) is None
    os.close(fd)
    until(lambda: held.expire() or not len(held), "the end of the hold")


@pytest.mark.root
@needs_root("namespaces of its own")
def test_finder_stays_in_its_own_namespace_and_root(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        fd = os.open(f"/proc/{child.pid}/ns/mnt", os.O_RDONLY)

        def look() -> None:
            before = os.stat("/"), os.stat("/proc/thread-self/ns/mnt")
            visitor = namespaces.Visitor()
            root_fd = visitor.open_root(fd)
            assert os.fsencode(tmp_path) in visitor.mountinfo(fd, 1 << 20)
            assert os.fsencode(tmp_path) not in mounts.mountinfo()
            assert len(visitor.mountinfo(fd, 100)) == 100
            os.close(root_fd)
            visitor.close()
            after = os.stat("/"), os.stat("/proc/thread-self/ns/mnt")
            for left, right in zip(before, after, strict=True):
                assert os.path.samestat(left, right)

        in_thread(look)
        os.close(fd)


@pytest.mark.root
@needs_root("namespaces of its own")
def test_number_of_held_namespaces_is_bounded(tmp_path: Path) -> None:
    closed: list[int] = []

    def close(fds: Iterable[int]) -> None:
        found = [fd for fd in fds if fd >= 0]
        closed.extend(found)
        close_all(found)

    held = HeldNamespaces(close, most=2)
    homes = [home_of(os.getpid()) for _ in range(3)]
    for home in homes[:2]:
        held.hold(home, os.getpid())
    held.hold(homes[0], GONE)  # used again: the other one is the oldest now
    assert (len(held), closed) == (2, [])
    held.hold(homes[2], os.getpid())
    assert (len(held), len(closed)) == (2, 1)
    assert held.borrow(homes[1]) == -1
    fds = [held.borrow(home) for home in (homes[0], homes[2])]
    assert min(fds) >= 0
    close_all(fds)
    until(lambda: held.expire() or not len(held), "the end of the hold")


_PIVOT = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
os.chdir(sys.argv[1])
pivot_root = 155 if os.uname().machine == "x86_64" else 41
assert libc.syscall(pivot_root, b".", b".") == 0, os.strerror(ctypes.get_errno())
assert libc.umount2(b".", 2) == 0, os.strerror(ctypes.get_errno())
print("there", flush=True)
sys.stdin.readline()
"""


@pytest.mark.root
@pytest.mark.fuse
@needs_root("mounts in a namespace of its own")
@pytest.mark.parametrize("is_root", [False, True])
def test_filesystem_that_never_answers_delays_nothing(tmp_path: Path, is_root: bool) -> None:
    """Be it on the path, or the root of the namespace."""
    silent, private = tmp_path / "silent", tmp_path / "private"
    silent.mkdir()
    private.mkdir()
    held = HeldNamespaces(close_all, most=512)
    pivot = [tool("unshare"), "-m", sys.executable, "-I", "-S", "-c", _PIVOT, os.fspath(silent)]
    with silentfs.served(silent, cat_program()) as server:
        with (
            subprocess.Popen(pivot, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            if is_root
            else private_cat(private)
        ) as child:
            if is_root:
                assert child.stdout is not None
                assert child.stdout.readline() == b"there\n"
                assert os.path.samefile(f"/proc/{child.pid}/root", silent)
            home = home_of(child.pid)
            held.hold(home, child.pid)
            child.communicate(b"\n")
        server.send_signal(signal.SIGSTOP)
        path = b"/app" if is_root else os.fsencode(silent / "app")
        mapped = Mapped(1, GONE, 0x1000, 0x2000, 0, path, inode=2)
        fd = held.borrow(home)
        assert fd >= 0
        asked = threading.Thread(target=found, args=(mapped, home, 0, fd), daemon=True)
        asked.start()
        asked.join(20)
        assert not asked.is_alive()
        os.close(fd)
        until(lambda: held.expire() or not len(held), "the end of the hold")


def test_namespace_that_the_process_has_left_is_not_held() -> None:
    held = HeldNamespaces(close_all, most=512)
    moved = Home(NamespaceSet(mnt=own_namespaces().mnt + 1))
    held.hold(moved, os.getpid())
    held.hold(home_of(os.getpid()), GONE)  # through a neighbour
    assert len(held) == 1
    until(lambda: held.expire() or not len(held), "the end of the hold")


def test_process_table_tells_the_namespaces_that_were_entered() -> None:
    tasks = Tasks()
    tasks.entered(1, NamespaceSet(mnt=10), 1)
    tasks.forked(2, 1, 2)
    tasks.entered(2, NamespaceSet(mnt=10), 2)
    tasks.entered(2, NamespaceSet(mnt=11), 3)
    assert [pid for pid, _ in tasks.newcomers()] == [1, 2]
    assert not tasks.has_newcomers
