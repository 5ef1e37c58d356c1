# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.procfs must say what the text of /proc/PID/maps says."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.formats import proc_text
from buildidfs.linux import procfs
from tests.support.elf import echo
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.children import cat_program, copied_cat, needs_root, private_cat, running

if TYPE_CHECKING:
    from buildidfs.model import Mapping

_PAGE = mmap.PAGESIZE
_AT_SYSINFO_EHDR = 33


def _has_query() -> bool:
    fd = os.open("/proc/self/maps", os.O_RDONLY)
    try:
        return any(True for _ in procfs.executable_file_mappings(fd))
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        return False
    finally:
        os.close(fd)


needs_query = pytest.mark.skipif(
    not _has_query(), reason="this kernel has no PROCMAP_QUERY (before 6.11)"
)


@pytest.fixture
def me() -> Iterator[int]:
    fd = procfs.open_pid(os.getpid())
    yield fd
    os.close(fd)


@contextlib.contextmanager
def _maps_of(pid: int) -> Iterator[tuple[int, int]]:
    pid_fd = procfs.open_pid(pid)
    maps_fd = procfs.open_maps(pid_fd)
    try:
        yield pid_fd, maps_fd
    finally:
        os.close(maps_fd)
        os.close(pid_fd)


def _queried(pid_fd: int) -> list[Mapping]:
    maps_fd = procfs.open_maps(pid_fd)
    try:
        return list(procfs.executable_file_mappings(maps_fd))
    finally:
        os.close(maps_fd)


def _parsed(pid_fd: int) -> list[Mapping]:
    return [
        mapping
        for mapping in proc_text.mappings_in(procfs.maps(pid_fd))
        if mapping.executable and mapping.inode
    ]


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[None]:
    """Map one executable page of a file of ours."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, _PAGE)
    with mmap.mmap(fd, _PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC):
        os.close(fd)
        yield


@needs_query
def test_query_agrees_with_the_text(me: int) -> None:
    queried = _queried(me)
    assert queried == _parsed(me)
    assert len(queried) > 3
    assert os.fsencode(os.readlink("/proc/self/exe")) in {mapping.path for mapping in queried}


@needs_query
def test_of_another_process_too() -> None:
    with running([cat_program()]) as child, _maps_of(child.pid) as (pid_fd, _):
        queried = _queried(pid_fd)
        assert queried == _parsed(pid_fd)
        assert os.fsencode(cat_program()) in {mapping.path for mapping in queried}


@needs_query
@pytest.mark.parametrize(
    "name",
    [
        b"plain",
        b"new\nline",
        b"carriage\rreturn",
        b"blank and\ttab",
        b"\xff\xfe\x80",
        b"trailing ",
        b" leading",
        b"back\\slash",
        b"x (deleted)",
        b"[vdso]",
        b"x" * 255,
    ],
)
@pytest.mark.parametrize("deleted", [False, True])
def test_names_of_every_kind(me: int, tmp_path: Path, name: bytes, deleted: bool) -> None:
    path = tmp_path / os.fsdecode(name)
    with _mapped(path):
        if deleted:
            path.unlink()
        queried = _queried(me)
        assert queried == _parsed(me)
    found = [mapping for mapping in queried if mapping.path.startswith(os.fsencode(tmp_path))]
    if name == b"x (deleted)" and not deleted:
        # Nothing tells this name from a deleted "x".
        assert [(mapping.path, mapping.deleted) for mapping in found] == [
            (os.fsencode(tmp_path / "x"), True)
        ]
    else:
        assert [(mapping.path, mapping.deleted) for mapping in found] == [
            (os.fsencode(path), deleted)
        ]


@needs_query
@pytest.mark.parametrize(("parts", "readable"), [(15, True), (18, False)])
def test_a_name_longer_than_the_kernel_tells(
    me: int, tmp_path: Path, parts: int, readable: bool
) -> None:
    """Past 4095 bytes the mapping is still there, without its path."""
    with contextlib.chdir(tmp_path):
        for _ in range(parts):
            Path("d" * 250).mkdir()
            os.chdir("d" * 250)
        with _mapped(Path("end")):
            inode = os.stat("end").st_ino
            found = [mapping for mapping in _queried(me) if mapping.inode == inode]
            text = [mapping for mapping in _parsed(me) if mapping.inode == inode]
            after = [mapping for mapping in _queried(me) if mapping.start > found[0].start]
    assert len(found) == 1
    assert text[0].path.endswith(b"/end")
    assert found[0].path == (text[0].path if readable else b"")
    assert (found[0].start, found[0].end) == (text[0].start, text[0].end)
    assert after, "the query went on after the long name"


@needs_query
def test_only_executable_mappings_of_files_are_told(me: int, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(_PAGE))
    executable = mmap.PROT_READ | mmap.PROT_EXEC
    before = len(_queried(me))
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), _PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ),
        mmap.mmap(-1, _PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, executable),
    ):
        assert len(_queried(me)) == before
        with mmap.mmap(file.fileno(), _PAGE, mmap.MAP_SHARED, executable):
            assert len(_queried(me)) == before + 1


@needs_query
def test_many_mappings_in_order(me: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(500):
            stack.enter_context(_mapped(tmp_path / str(number % 7)))
        queried = _queried(me)
        assert queried == _parsed(me)
    assert len(queried) > 500
    assert all(a.end <= b.start for a, b in itertools.pairwise(queried))


@needs_query
def test_two_queries_at_once_do_not_disturb_each_other() -> None:
    with _maps_of(os.getpid()) as (_, maps_fd):
        expected = list(procfs.executable_file_mappings(maps_fd))
        first = procfs.executable_file_mappings(maps_fd)
        second = procfs.executable_file_mappings(maps_fd)
        pairs = [(next(first), next(second)) for _ in expected]
    assert pairs == [(mapping, mapping) for mapping in expected]


@needs_query
def test_deleted_and_replaced_executables(tmp_path: Path) -> None:
    path = tmp_path / "cat"
    with copied_cat(path) as child, _maps_of(child.pid) as (pid_fd, _):
        inode = path.stat().st_ino
        path.unlink()
        path.write_bytes(b"another")
        found = [mapping for mapping in _queried(pid_fd) if mapping.inode == inode]
        assert [(mapping.path, mapping.deleted) for mapping in found] == [(os.fsencode(path), True)]
        assert _queried(pid_fd) == _parsed(pid_fd)


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
@needs_query
@pytest.mark.parametrize("fstype", ["tmpfs", "overlay"])
def test_filesystems_that_only_a_container_has(tmp_path: Path, fstype: str) -> None:
    options = "defaults"
    if fstype == "overlay":
        if "\toverlay\n" not in Path("/proc/filesystems").read_text():
            pytest.skip("this kernel has no overlay")
        lower, other = tmp_path / "lower", tmp_path / "other"
        for directory in (lower, other):
            directory.mkdir()
        (lower / "cat").write_bytes(cat_program().read_bytes())
        (lower / "cat").chmod(0o755)
        options = f"lowerdir={lower}:{other}"
    root = tmp_path / "root"
    root.mkdir()
    with private_cat(root, fstype, options) as child, _maps_of(child.pid) as (pid_fd, _):
        queried = _queried(pid_fd)
        assert queried == _parsed(pid_fd)
        assert os.fsencode(root / "cat") in {mapping.path for mapping in queried}


@needs_query
def test_every_process_that_we_may_see() -> None:
    """Whatever runs on this machine; a process that changes in between is asked again."""
    compared = 0
    for pid in procfs.pids():
        with contextlib.suppress(PermissionError, ProcessLookupError, FileNotFoundError):
            pid_fd = procfs.open_pid(pid)
            try:
                if procfs.is_kernel_thread(pid_fd):
                    continue
                for _ in range(5):
                    before, queried, after = _parsed(pid_fd), _queried(pid_fd), _parsed(pid_fd)
                    if before == after:
                        assert queried == before
                        compared += 1
                        break
            finally:
                os.close(pid_fd)
    assert compared


@needs_query
def test_a_process_that_is_gone() -> None:
    with running([cat_program()]) as child:
        pid_fd = procfs.open_pid(child.pid)
        maps_fd = procfs.open_maps(pid_fd)
        mappings = procfs.executable_file_mappings(maps_fd)
        assert next(mappings).inode
    try:
        for call in (
            lambda: list(mappings),
            lambda: list(procfs.executable_file_mappings(maps_fd)),
            lambda: procfs.vdso(maps_fd),
        ):
            with pytest.raises(ProcessLookupError):
                call()
    finally:
        os.close(maps_fd)
        os.close(pid_fd)


def test_file_without_the_query_raises_enotty() -> None:
    """A kernel without the query answers as any other file of /proc does."""
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="Inappropriate ioctl") as caught:
            list(procfs.executable_file_mappings(fd))
        assert caught.value.errno == errno.ENOTTY
    finally:
        os.close(fd)


@needs_query
def test_the_vdso_is_where_the_auxiliary_vector_says() -> None:
    words = Path("/proc/self/auxv").read_bytes()
    vector = dict(struct.iter_unpack("=QQ", words))
    with _maps_of(os.getpid()) as (pid_fd, maps_fd):
        found = procfs.vdso(maps_fd)
        named = [
            (mapping.start, mapping.end)
            for mapping in proc_text.mappings_in(procfs.maps(pid_fd))
            if mapping.path == b"[vdso]"
        ]
    if _AT_SYSINFO_EHDR not in vector:
        pytest.skip("this kernel gives its processes no vDSO")
    assert found is not None
    assert found[0] == vector[_AT_SYSINFO_EHDR]
    assert [found] == named


@needs_query
def test_a_file_called_vdso_is_not_the_vdso(me: int, tmp_path: Path) -> None:
    with _maps_of(os.getpid()) as (_, maps_fd), _mapped(tmp_path / "[vdso]"):
        real = procfs.vdso(maps_fd)
    names = {mapping.path: mapping for mapping in proc_text.mappings_in(procfs.maps(me))}
    if b"[vdso]" not in names:
        pytest.skip("this kernel gives its processes no vDSO")
    assert real == (names[b"[vdso]"].start, names[b"[vdso]"].end)


@needs_query
def test_build_id_of_a_mapping(tmp_path: Path) -> None:
    path = tmp_path / "program"
    build_id = echo.build(path)
    with running([path]) as child, _maps_of(child.pid) as (pid_fd, maps_fd):
        path.unlink()  # the name does not matter
        (mapping,) = [each for each in _queried(pid_fd) if each.path == os.fsencode(path)]
        told = procfs.build_id(maps_fd, mapping.start)
        assert told is not None
        assert told.hex() == build_id
        assert procfs.build_id(maps_fd, mapping.end - 1) == told
        assert procfs.build_id(maps_fd, 0) is None


@needs_query
@pytest.mark.parametrize(
    ("content", "told"),
    [
        (elf_file(build_id=b"\1" * 20), b"\1" * 20),
        (elf_file(build_id=b"\1\2"), b"\1\2"),
        (elf_file(build_id=b"\1" * 32), None),
        (elf_file(build_id=None), None),
        (b"text", None),
    ],
)
def test_build_ids_that_the_kernel_does_not_tell(
    tmp_path: Path, content: bytes, told: bytes | None
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with _mapped_as_it_is(path) as (maps_fd, address):
        assert procfs.build_id(maps_fd, address) == told


@contextlib.contextmanager
def _mapped_as_it_is(path: Path) -> Iterator[tuple[int, int]]:
    """Map an executable page of a file of ours; its map, and where it is."""
    with path.open("rb") as file:
        area = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with area, _maps_of(os.getpid()) as (pid_fd, maps_fd):
        (mapping,) = [each for each in _queried(pid_fd) if each.path == os.fsencode(path)]
        yield maps_fd, mapping.start


@needs_query
def test_the_mapping_at_an_address(me: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * _PAGE))
    maps_fd = procfs.open_maps(me)
    try:
        with path.open("rb") as file:
            area = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        with area:
            (found,) = [
                mapping
                for mapping in procfs.executable_file_mappings(maps_fd)
                if mapping.path == os.fsencode(path)
            ]
            for address in (found.start, found.start + _PAGE, found.end - 1):
                assert procfs.executable_at(maps_fd, address) == (found.start, found.end)
            assert procfs.executable_at(maps_fd, found.end) != (found.start, found.end)
        assert procfs.executable_at(maps_fd, found.start) is None
        assert procfs.executable_at(maps_fd, 0) is None
    finally:
        os.close(maps_fd)
