# SPDX-License-Identifier: Apache-2.0
"""The file that is opened is the file that is mapped, whichever way it is reached."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.process.process import Moved, PinnedProcess, Ways
from buildidfs.linux import syscalls
from tests.support.clients import tools
from tests.support.elf.elfwriter import elf_file
from tests.support.harness.children import cat_program, copied_cat, needs_root, running
from tests.support.harness.scans import open_descriptors

if TYPE_CHECKING:
    from buildidfs.model import Mapping

QUERY = [pytest.param(True, id="PROCMAP_QUERY"), pytest.param(False, id="maps text")]
LIBRARY = "libprobe.so"


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A shared library of this test's own."""
    source, path = tmp_path / "probe.c", tmp_path / LIBRARY
    source.write_text("int probe(void) { return 1; }\n")
    compile_library(source, path)
    return path


def compile_library(source: Path, path: Path) -> None:
    argv = [tools.tool("gcc"), "-shared", "-fPIC", "-Wl,--build-id", "-o", path, source]
    tools.run(argv, check=True)


def preloading(library: Path) -> list[str | Path]:
    return [tools.tool("env"), f"LD_PRELOAD={library}", cat_program()]


def mapping_of(process: PinnedProcess, path: Path) -> Mapping:
    (found,) = [
        mapping for mapping in process.executable_mappings() if mapping.path == os.fsencode(path)
    ]
    return found


def content(process: PinnedProcess, mapping: Mapping) -> bytes:
    fd, identity = process.pin(mapping)
    try:
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            data = file.read()
        assert identity.ino == os.fstat(fd).st_ino
    finally:
        os.close(fd)
    return data


@pytest.mark.parametrize("query", QUERY)
def test_both_ways_of_listing_agree(tmp_path: Path, query: bool) -> None:
    with (
        copied_cat(tmp_path / "a cat") as child,
        PinnedProcess(child.pid, Ways(query=query)) as process,
    ):
        listed = process.executable_mappings()
        assert os.fsencode(tmp_path / "a cat") in {mapping.path for mapping in listed}
        assert all(mapping.executable and mapping.inode for mapping in listed)
        with PinnedProcess(child.pid, Ways(query=not query)) as other:
            assert other.executable_mappings() == listed


@pytest.mark.parametrize("query", QUERY)
@pytest.mark.parametrize(
    "map_files", [pytest.param(True, marks=needs_root("uses map_files")), False]
)
def test_executable_and_library(
    tmp_path: Path, library: Path, query: bool, map_files: bool
) -> None:
    ways = Ways(query=query, map_files=map_files)
    with running(preloading(library)) as child, PinnedProcess(child.pid, ways) as process:
        assert content(process, mapping_of(process, cat_program())) == cat_program().read_bytes()
        assert content(process, mapping_of(process, library)) == library.read_bytes()


@pytest.mark.parametrize(
    "map_files", [pytest.param(True, marks=needs_root("uses map_files")), False]
)
@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_executable_without_its_name(tmp_path: Path, map_files: bool, fate: str) -> None:
    path = tmp_path / "cat"
    with copied_cat(path) as child, PinnedProcess(child.pid, Ways(map_files=map_files)) as process:
        path.unlink()
        if fate == "replaced":
            path.write_bytes(elf_file(build_id=b"another file"))
        assert content(process, mapping_of(process, path)) == cat_program().read_bytes()


@needs_root("uses map_files")
@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_library_without_its_name(library: Path, fate: str) -> None:
    before = library.read_bytes()
    with running(preloading(library)) as child, PinnedProcess(child.pid, Ways()) as process:
        library.unlink()
        if fate == "replaced":
            library.write_bytes(elf_file(build_id=b"another file"))
        assert content(process, mapping_of(process, library)) == before


@pytest.mark.parametrize(
    ("fate", "said"),
    [("deleted", "has no name any more"), ("replaced", "has no name any more")],
)
def test_library_without_its_name_is_not_guessed(library: Path, fate: str, said: str) -> None:
    ways = Ways(map_files=False)
    with running(preloading(library)) as child, PinnedProcess(child.pid, ways) as process:
        library.unlink()
        if fate == "replaced":
            library.write_bytes(elf_file(build_id=b"another file"))
        with pytest.raises(PermissionError, match=said):
            process.pin(mapping_of(process, library))


def test_name_that_leads_to_another_file_is_noticed(library: Path, tmp_path: Path) -> None:
    ways = Ways(map_files=False)
    with running(preloading(library)) as child, PinnedProcess(child.pid, ways) as process:
        mapping = mapping_of(process, library)
        # Listed before, replaced by rename after: the name still stands in the list.
        replacement = tmp_path / "replacement"
        replacement.write_bytes(elf_file(build_id=b"another file"))
        replacement.rename(library)
        with pytest.raises(PermissionError, match="leads to another file"):
            process.pin(mapping)


def test_build_id_in_memory_proves_a_file(library: Path, tmp_path: Path) -> None:
    """As on an overlay, where neither device nor inode number can be compared."""
    ways = Ways(map_files=False)
    with running(preloading(library)) as child, PinnedProcess(child.pid, ways) as process:
        mapping = mapping_of(process, library)
        copy = tmp_path / "copy"
        shutil.copy(library, copy)
        copy.rename(library)  # another inode with the same build ID
        assert content(process, mapping) == library.read_bytes()


def test_mapping_that_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with PinnedProcess(os.getpid(), Ways()) as process:
        with path.open("rb") as file:
            area = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
        mapping = mapping_of(process, path)
        area.close()
        if os.geteuid() == 0:
            with pytest.raises(Moved):
                process.pin(mapping)


@needs_root("uses map_files")
def test_another_file_at_the_same_place_is_not_taken_for_it(tmp_path: Path) -> None:
    mmap_ = syscalls.libc.mmap
    mmap_.restype = ctypes.c_void_p
    mmap_.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def place(path: Path, address: int | None) -> int:
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("rb") as file:
            flags = mmap.MAP_PRIVATE | (0x10 if address else 0)  # MAP_FIXED
            prot = mmap.PROT_READ | mmap.PROT_EXEC
            got = mmap_(address, mmap.PAGESIZE, prot, flags, file.fileno(), 0)
        assert got not in (None, ctypes.c_void_p(-1).value)
        return int(got)

    address = place(tmp_path / "first", None)
    try:
        with PinnedProcess(os.getpid(), Ways()) as process:
            mapping = mapping_of(process, tmp_path / "first")
            assert place(tmp_path / "second", address) == address
            with pytest.raises(Moved):
                process.pin(mapping)
            assert content(process, mapping_of(process, tmp_path / "second"))
    finally:
        assert syscalls.libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE)) == 0


def test_process_that_is_gone() -> None:
    with running([cat_program()]) as child:
        process = PinnedProcess(child.pid, Ways())
        assert not process.is_gone()
    with process:
        assert process.is_gone()
        with pytest.raises(OSError, match="No such"):
            process.executable_mappings()
    with pytest.raises(FileNotFoundError):
        PinnedProcess(child.pid, Ways())


def test_chroot_is_taken_off_paths() -> None:
    with running([cat_program()]) as child, PinnedProcess(child.pid, Ways()) as process:
        mapping = mapping_of(process, cat_program())
        assert process.path_in_root(mapping) == os.fsencode(cat_program())
        process.root_path = os.fsencode(cat_program().parent)
        assert process.path_in_root(mapping) == b"/" + os.fsencode(cat_program().name)
        process.root_path = b"/u"  # not a directory above
        assert process.path_in_root(mapping) == os.fsencode(cat_program())
