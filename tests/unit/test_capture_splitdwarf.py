# SPDX-License-Identifier: Apache-2.0
"""The .dwp file of a binary is found beside it, and is kept under a name made of its build ID."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from buildidfs import names
from buildidfs.capture import base as capture_elf_file
from buildidfs.capture.archive.elf_members import ArchiveOrigin, Members, MemberSpool
from buildidfs.capture.archive.stream import ArchiveLimits, LimitedStream
from buildidfs.capture.debug_files import Companion, Companions
from buildidfs.capture.scan.tree import TreeScanner, identify_tree
from buildidfs.formats.archive import tar as tar_format
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import inodes
from buildidfs.model import PUBLIC_ACCESS, Absence, BuildId, Kind, Trust
from tests.support.clients.tools import run, tool
from tests.support.elf import debugforms
from tests.support.elf.elfwriter import ET_REL, elf_file
from tests.support.filesystems.sources import tar
from tests.support.harness.scans import Memory, Scan, open_descriptors, remember, scan


class Split(NamedTuple):
    """A library with its package, stripped, and its debug file."""

    full: Path
    package: Path
    stripped: Path
    debug: Path

    @property
    def build_id(self) -> BuildId:
        """Of all but the package."""
        found = describe(self.full).build_id
        return found

    @property
    def kept_under(self) -> BuildId:
        """The package's stand-in for a build ID."""
        found = names.package_id(self.build_id)
        assert found is not None
        return found


def describe(path: Path) -> ElfFile:
    fd = os.open(path, os.O_RDONLY)
    try:
        found = capture_elf_file.describe(fd)
    finally:
        os.close(fd)
    assert isinstance(found, ElfFile)
    return found


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """A library whose debug information is split."""
    directory = tmp_path_factory.mktemp("split")
    full = debugforms.library(directory, "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(full)
    debug, stripped = directory / "lib.debug", directory / "stripped"
    run([tool("objcopy"), "--only-keep-debug", full, debug], check=True)
    link = f"--add-gnu-debuglink={debug}"
    run([tool("objcopy"), "--strip-all", link, full, stripped], check=True)
    return Split(full, package, stripped, debug)


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def place(root: Path, path: str, file: Path) -> Path:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(file, target)
    return target


def found(root: Path, path: str, memory: Memory | None = None) -> list[tuple[bytes, str, bool]]:
    """Paths of the companions of a binary, what they are kept under, and whether they are known."""
    root_fd = os.open(root, os.O_PATH)
    result = []
    try:
        looking = Companions(root_fd, memory if memory is not None else Memory())
        for item in looking.of(path.encode(), describe(root / path.lstrip("/"))):
            assert isinstance(item, Companion)
            with item:
                known = item.known is not None
                kept = item.known.build_id if item.known else item.build_id
                assert item.kind is (None if known or kept is None else Kind.DEBUGINFO)
                result.append((item.path, str(kept or ""), known))
    finally:
        os.close(root_fd)
    return result


def test_names_can_be_read_back() -> None:
    for build_id in (BuildId(b"\1\2"), BuildId(b"\xab" * 20), BuildId(bytes(116))):
        kept_under = names.package_id(build_id)
        assert kept_under is not None
        assert names.package_owner(kept_under) == build_id
        assert names.package_owner(build_id) is None
    assert names.package_id(BuildId(bytes(117))) is None
    assert names.package_owner(BuildId(b".dwp")) is None
    assert names.package_owner(BuildId(b".dwp\1")) is None


def test_beside_the_binary(tmp_path: Path, split: Split) -> None:
    place(tmp_path, "app/lib.so", split.full)
    assert found(tmp_path, "/app/lib.so") == []
    package = place(tmp_path, "app/lib.so.dwp", split.package)
    wanted = (b"/app/lib.so.dwp", str(split.kept_under))
    assert found(tmp_path, "/app/lib.so") == [(*wanted, False)]
    memory = Memory()
    scanned = tree(tmp_path, memory)
    remember(memory, scanned)
    assert inodes.identity_at(-1, os.fsencode(package)) in memory
    assert found(tmp_path, "/app/lib.so", memory) == [(*wanted, True)]


@pytest.mark.parametrize("name", ["lib.so.dwp", ".debug/lib.debug.dwp", ".debug/lib.so.dwp"])
def test_of_a_stripped_binary(tmp_path: Path, split: Split, name: str) -> None:
    place(tmp_path, "app/lib.so", split.stripped)
    place(tmp_path, f"app/{name}", split.package)
    assert found(tmp_path, "/app/lib.so") == []  # which says nothing of units
    place(tmp_path, "app/.debug/lib.debug", split.debug)
    *_, last = found(tmp_path, "/app/lib.so")
    assert last == (f"/app/{name}".encode(), str(split.kept_under), False)


def test_of_another_binary(tmp_path: Path, split: Split) -> None:
    other = debugforms.library(tmp_path / "other", "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(other)
    place(tmp_path, "app/lib.so", split.full)
    place(tmp_path, "app/lib.so.dwp", package)
    assert found(tmp_path, "/app/lib.so") == []
    assert [item.known.absence for item in tree(tmp_path / "app").again] == [Absence.NO_BUILD_ID]


# --- directories ---------------------------------------------------------------------------------


def tree(path: Path, memory: Memory | None = None) -> Scan:
    return scan(TreeScanner(memory if memory is not None else Memory(), [os.fsencode(path)]))


@pytest.mark.parametrize("binary", ["lib.so", "lib.so.debug"])
def test_in_a_directory(tmp_path: Path, split: Split, binary: str) -> None:
    place(tmp_path, f"app/{binary}", split.full if binary == "lib.so" else split.debug)
    place(tmp_path, "app/lib.so.dwp", split.package)
    pinned = {seen.path: seen.pinned for seen in tree(tmp_path).pinned}
    package = pinned[os.fsencode(tmp_path / "app/lib.so.dwp")]
    assert (package.kind, package.build_id) == (Kind.DEBUGINFO, split.kept_under)


def test_a_dry_run_tells_the_same(tmp_path: Path, split: Split) -> None:
    binary = place(tmp_path, "app/lib.so", split.full)
    package = place(tmp_path, "app/lib.so.dwp", split.package)
    alone = place(tmp_path, "other/lib.so.dwp", split.package)
    answers = dict(identify_tree([os.fsencode(tmp_path)]))
    assert answers == {
        os.fsencode(binary): split.build_id,
        os.fsencode(package): split.kept_under,
        os.fsencode(alone): Absence.NO_BUILD_ID,
    }
    assert tree(tmp_path).paths() == [os.fsencode(binary), os.fsencode(package)]


def test_known_in_a_directory(tmp_path: Path, split: Split) -> None:
    place(tmp_path, "app/lib.so", split.full)
    place(tmp_path, "app/lib.so.dwp", split.package)
    memory = Memory()
    remember(memory, tree(tmp_path, memory))
    again = tree(tmp_path, memory)
    assert again.pinned == []
    assert {item.known.build_id for item in again.again} == {split.build_id, split.kept_under}


def test_without_its_binary(tmp_path: Path, split: Split) -> None:
    package = place(tmp_path, "lib.so.dwp", split.package)
    (tmp_path / "text.dwp").write_text("no ELF file")
    (tmp_path / "elf.dwp").write_bytes(elf_file(etype=ET_REL))
    for path, absences in ((tmp_path, 3), (package, 1)):
        result = tree(path)
        assert (result.pinned, len(result.again)) == ([], absences)


def test_no_link_leads_out_of_the_directory(tmp_path: Path, split: Split) -> None:
    place(tmp_path, "outside/lib.so", split.full)
    place(tmp_path, "app/lib.so.dwp", split.package)
    (tmp_path / "app/lib.so").symlink_to(tmp_path / "outside/lib.so")
    assert tree(tmp_path / "app").pinned == []
    # within it, one may
    (tmp_path / "app/lib.so").unlink()
    (tmp_path / "app/lib.so").symlink_to("../outside/lib.so")
    assert os.fsencode(tmp_path / "app/lib.so.dwp") in tree(tmp_path).paths()


# --- archives ------------------------------------------------------------------------------------


def archive(entries: list[tuple[str, Path]], memory: Memory | None = None) -> Scan:
    data = tar([(name, file.read_bytes()) for name, file in entries])
    whose = ArchiveOrigin("package:app", "app.deb", Trust.PACKAGE, "package")
    members = Members(
        b"scope", b"/app.deb", lambda path: (whose,),
        memo=Memory() if memory is None else memory, spool=MemberSpool(), limits=ArchiveLimits(),
        access=PUBLIC_ACCESS,
    )  # fmt: skip
    stream = LimitedStream(iter([data]), 1 << 40, 1 << 20)
    return scan(members.scan(tar_format.members(stream), stream))


@pytest.mark.parametrize("binary", ["lib.so", "lib.so.debug"])
def test_in_an_archive(split: Split, binary: str) -> None:
    owner = split.full if binary == "lib.so" else split.debug
    entries = [(f"./app/{binary}", owner), ("./app/lib.so.dwp", split.package)]
    memory = Memory()
    first = archive(entries, memory)
    kept = [(seen.path, seen.pinned.kind, seen.pinned.build_id) for seen in first.pinned]
    assert kept == [
        (b"/app/" + binary.encode(), None, None),
        (b"/app/lib.so.dwp", Kind.DEBUGINFO, split.kept_under),
    ]
    assert first.pinned[1].data == split.package.read_bytes()
    remember(memory, first)
    again = archive(entries, memory)
    assert [item.known.build_id for item in again.again] == [split.build_id, split.kept_under]


def test_without_its_binary_in_an_archive(tmp_path: Path, split: Split) -> None:
    """Which may be there, but somewhere else, or later, or another one."""
    other = debugforms.library(tmp_path, "-gdwarf-4", "-gsplit-dwarf")
    for entries in (
        [("lib.so.dwp", split.package)],
        [("lib.so.dwp", split.package), ("lib.so", split.full)],
        [("a/lib.so", split.full), ("lib.so.dwp", split.package)],
        [("lib.so", split.full), ("lib.so.dwo", split.package)],
        [("lib.so", other), ("lib.so.dwp", split.package)],
        [("lib.so", split.stripped), ("lib.so.dwp", split.package)],
        [("lib.so", split.full), ("lib.so.dwp", split.debug)],
    ):
        result = archive(entries)
        assert [seen.pinned.build_id for seen in result.pinned] == [None] * len(result.pinned)
        absences = [item.known.absence for item in result.again]
        assert absences == [Absence.NO_BUILD_ID] * (len(entries) - len(result.pinned))
