# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.procfs on this process, on children, and on processes that are gone."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from buildidfs.formats import proc_text
from buildidfs.linux import inodes, procfs
from tests.support.clients.tools import run, tool
from tests.support.harness.catches import Program, started
from tests.support.harness.children import cat_program, copied_cat, needs_root, private_cat, running

_PAGE = mmap.PAGESIZE
_needs_map_files = needs_root("links in map_files are not for everybody")


@pytest.fixture
def me() -> Iterator[int]:
    fd = procfs.open_pid(os.getpid())
    yield fd
    os.close(fd)


def _mapping_of(pid_fd: int, path: Path) -> tuple[int, int]:
    for mapping in proc_text.mappings_in(procfs.maps(pid_fd)):
        if mapping.path == os.fsencode(path) and mapping.executable:
            return mapping.start, mapping.end
    raise AssertionError(f"{path} is not mapped")


def test_error_about_a_long_text_holds_none_of_it(me: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(procfs, "MOST_TEXT", size := len(procfs.maps(me)) // 2)
    tracemalloc.start()
    try:
        with pytest.raises(OSError, match="more mappings") as error:
            procfs.maps(me)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert error.value.errno == errno.EFBIG
    assert held < size / 2


def _read_and_close(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


def test_pids_are_sorted_and_include_us() -> None:
    pids = procfs.pids()
    assert os.getpid() in pids
    assert pids == sorted(set(pids))


def test_text_files(me: int) -> None:
    assert procfs.cgroup(me) == Path("/proc/self/cgroup").read_bytes()
    assert procfs.mountinfo(me) == Path("/proc/self/mountinfo").read_bytes()
    assert procfs.uids(me)[:3] == os.getresuid()
    assert procfs.exe(me) == os.fsencode(os.readlink("/proc/self/exe"))
    assert any(b"[stack]" in line for line in procfs.maps(me).splitlines())


def test_a_long_text_is_read_to_its_end(me: int) -> None:
    """More mappings than fit in one read; neighbours differ, so the kernel cannot merge them."""
    with mmap.mmap(-1, 4000 * _PAGE) as memory:
        for page in range(0, 4000, 2):
            memory.madvise(mmap.MADV_DONTFORK, page * _PAGE, _PAGE)
        text = procfs.maps(me)
    assert len(text) > 1 << 17
    assert text.endswith(b"\n")
    assert b"[stack]" in text


def test_a_process_may_call_itself_anything(me: int) -> None:
    before = procfs.comm(me)
    try:
        Path("/proc/self/comm").write_bytes(b"a) R 1 (\n x")
        assert procfs.comm(me) == b"a) R 1 (\n x"
        assert not procfs.is_kernel_thread(me)
        assert not procfs.is_stopped(os.getpid())
    finally:
        Path("/proc/self/comm").write_bytes(before)


def test_kernel_threads_are_told_from_processes(me: int) -> None:
    assert not procfs.is_kernel_thread(me)
    kthreadd = procfs.open_pid(2)
    try:
        if procfs.comm(kthreadd) != b"kthreadd":
            pytest.skip("pid 2 is not kthreadd in this pid namespace")
        assert procfs.is_kernel_thread(kthreadd)
        assert procfs.uids(kthreadd)[0] == 0
    finally:
        os.close(kthreadd)


def test_pid_of_no_process() -> None:
    with pytest.raises(FileNotFoundError):
        procfs.open_pid(int(Path("/proc/sys/kernel/pid_max").read_text()) + 1)


@pytest.mark.parametrize(
    "look",
    [
        procfs.maps,
        procfs.open_maps,
        procfs.mountinfo,
        procfs.cgroup,
        procfs.comm,
        procfs.exe,
        procfs.uids,
        procfs.open_root,
        lambda fd: procfs.open_map_file(fd, _PAGE, 2 * _PAGE),
        lambda fd: procfs.read_memory(fd, _PAGE, 16),
    ],
)
def test_pinned_process_that_is_gone_is_never_another(
    look: Callable[[int], object],
) -> None:
    with running([cat_program()]) as child:
        fd = procfs.open_pid(child.pid)
    try:
        with pytest.raises(OSError, match="No such") as caught:
            look(fd)
        assert caught.value.errno in (errno.ESRCH, errno.ENOENT)
    finally:
        os.close(fd)


def test_a_zombie_has_no_memory_map() -> None:
    with running([cat_program()]) as child:
        fd = procfs.open_pid(child.pid)
        try:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            assert procfs.comm(fd) == os.fsencode(cat_program().name)
            with contextlib.suppress(ProcessLookupError):
                assert procfs.maps(fd) == b""
        finally:
            os.close(fd)


def test_a_process_is_read_through_a_living_thread_after_its_first_one_ended(
    tmp_path: Path,
) -> None:
    program = Program(tmp_path)
    with started([program.exe, "leaderless", "name=worker", "here", "wait"]) as child:
        assert Path(f"/proc/{child.pid}/maps").read_bytes() == b""
        (thread,) = set(os.listdir(f"/proc/{child.pid}/task")) - {str(child.pid)}
        fd = procfs.open_pid(child.pid)
        try:
            assert procfs.maps(fd) == Path(f"/proc/{thread}/maps").read_bytes()
            assert procfs.exe(fd) == os.fsencode(program.exe)
            assert os.readlink("ns/mnt", dir_fd=fd) == os.readlink("/proc/self/ns/mnt")
            assert os.readlink("root", dir_fd=fd) == "/"
            start, end = _mapping_of(fd, program.exe)
            if os.geteuid() == 0:
                file = procfs.open_map_file(fd, start, end)
                assert _read_and_close(file) == program.exe.read_bytes()
            # These are properties of the process, not of the thread.
            assert (procfs.comm(fd), procfs.innermost_pid(fd)) == (b"probe", child.pid)
            fields = Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()
            assert procfs.start_ticks(fd) == int(fields[19])
            assert procfs.thread_name(int(thread)) == b"worker"
        finally:
            os.close(fd)


@pytest.mark.root
@_needs_map_files
def test_map_files_gives_the_mapped_file(tmp_path: Path) -> None:
    content = cat_program().read_bytes()
    with copied_cat(tmp_path / "cat") as child:
        fd = procfs.open_pid(child.pid)
        try:
            start, end = _mapping_of(fd, tmp_path / "cat")
            assert _read_and_close(procfs.open_map_file(fd, start, end)) == content
            link = os.readlink(procfs.map_file_name(start, end), dir_fd=fd)
            assert link == os.fsencode(tmp_path / "cat")

            (tmp_path / "other").write_bytes(b"not what is mapped")
            (tmp_path / "other").rename(tmp_path / "cat")
            assert _read_and_close(procfs.open_map_file(fd, start, end)) == content

            (tmp_path / "cat").unlink()
            assert procfs.exe(fd) == os.fsencode(tmp_path / "cat") + b" (deleted)"
            assert _read_and_close(procfs.open_map_file(fd, start, end)) == content

            for wrong in ((start + _PAGE, end), (start, end - 1), (_PAGE, 2 * _PAGE)):
                with pytest.raises(FileNotFoundError):
                    procfs.open_map_file(fd, *wrong)
        finally:
            os.close(fd)


@pytest.mark.root
@_needs_map_files
def test_map_files_reaches_into_a_filesystem_that_is_detached(tmp_path: Path) -> None:
    content = cat_program().read_bytes()
    with private_cat(tmp_path) as child:
        fd = procfs.open_pid(child.pid)
        try:
            start, end = _mapping_of(fd, tmp_path / "cat")
            assert not (tmp_path / "cat").exists()
            nsenter = [tool("nsenter"), "-m", "-t", str(child.pid)]
            run([*nsenter, tool("umount"), "-l", tmp_path], check=True)
            root = procfs.open_root(fd)
            try:
                with pytest.raises(FileNotFoundError):
                    inodes.open_regular_in_root(root, os.fsencode(tmp_path / "cat"))
            finally:
                os.close(root)
            assert _read_and_close(procfs.open_map_file(fd, start, end)) == content
        finally:
            os.close(fd)


@pytest.mark.root
@_needs_map_files
def test_a_file_may_outlive_its_process(tmp_path: Path) -> None:
    """The descriptor keeps the filesystem, although its only mount is gone with the namespace."""
    with private_cat(tmp_path) as child:
        fd = procfs.open_pid(child.pid)
        start, end = _mapping_of(fd, tmp_path / "cat")
        pinned = procfs.open_map_file(fd, start, end)
        os.close(fd)
    assert _read_and_close(pinned) == cat_program().read_bytes()


@pytest.mark.root
@_needs_map_files
def test_a_memfd_is_a_regular_file(me: int) -> None:
    memfd = os.memfd_create("code")
    os.write(memfd, b"\x7fELF" + bytes(_PAGE - 4))
    with mmap.mmap(memfd, _PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        os.close(memfd)
        start, end = _mapping_of(me, Path("/memfd:code"))
        assert _read_and_close(procfs.open_map_file(me, start, end))[:4] == b"\x7fELF"


@pytest.mark.root
@_needs_map_files
def test_a_mapped_device_is_not_opened(me: int) -> None:
    zero = os.open("/dev/zero", os.O_RDONLY)
    with mmap.mmap(zero, _PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        os.close(zero)
        start, end = _mapping_of(me, Path("/dev/zero"))
        with pytest.raises(OSError, match="not a regular file") as caught:
            procfs.open_map_file(me, start, end)
        assert caught.value.errno == errno.EINVAL


def test_the_root_directory_of_a_process(me: int) -> None:
    fd = procfs.open_root(me)
    try:
        assert os.path.sameopenfile(fd, fd)
        assert os.path.samestat(os.fstat(fd), os.stat("/"))
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.listdir(fd)  # O_PATH: nothing of it has been opened
    finally:
        os.close(fd)


def test_memory_is_that_of_the_process(me: int) -> None:
    maps = list(proc_text.mappings_in(procfs.maps(me)))
    first = next(mapping for mapping in maps if mapping.path == procfs.exe(me))
    with Path("/proc/self/exe").open("rb") as file:
        assert procfs.read_memory(me, first.start, 64) == file.read(64)
    vdso = [mapping for mapping in maps if mapping.path == b"[vdso]"]
    for mapping in vdso:
        image = procfs.read_memory(me, mapping.start, mapping.end - mapping.start)
        assert len(image) == mapping.end - mapping.start
        assert image[:4] == b"\x7fELF"


def test_memory_ends_where_the_mapping_ends(me: int) -> None:
    with pytest.raises(OSError, match="Input/output error"):
        procfs.read_memory(me, _PAGE, 16)
    for address in (1 << 63, (1 << 64) - 1, 1 << 64, -1):
        with pytest.raises(OSError, match="Input/output error"):
            procfs.read_memory(me, address, 16)


def test_nothing_is_left_open(me: int) -> None:
    before = os.listdir("/proc/self/fd")
    procfs.is_kernel_thread(me)
    procfs.uids(me)
    procfs.read_memory(me, next(proc_text.mappings_in(procfs.maps(me))).start, 16)
    with pytest.raises(OSError, match="No such file"):
        procfs.open_map_file(me, _PAGE, 2 * _PAGE)
    assert os.listdir("/proc/self/fd") == before
