# SPDX-License-Identifier: Apache-2.0
"""Files named by a user are captured with their debug files, or the reason is told."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs import names
from buildidfs.capture.base import Known
from buildidfs.capture.scan.tree import GivenFiles
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Kind, Quality, Trust
from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.elf import debugforms
from tests.support.elf.elfwriter import DWARF, ET_CORE, ET_REL, SYMTAB, TEXT, elf_file
from tests.support.elf.kernels import bzimage_file, packed_vmlinux
from tests.support.elf.programs import build_id_of
from tests.support.harness.children import private_cat
from tests.support.harness.scans import (
    Memory,
    Scan,
    open_descriptors,
    own_namespaces,
    remember,
    scan,
)

ID, GIVEN = BuildId(b"\x31" * 20), BuildId(b"\x32" * 8)
SYMBOLS = b"ffffffff81000000 T _stext\nffffffff81000100 t one\t[module]\n"


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def given(*paths: Path, memory: Memory | None = None, **options: object) -> Scan:
    return scan(
        GivenFiles(
            memory if memory is not None else Memory(),
            [os.fsencode(path) for path in paths],
            initial=own_namespaces(),
            **options,  # type: ignore[arg-type]  # as given
        )
    )


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def reason(result: Scan) -> str:
    (item,) = result.unreadable
    assert (result.pinned, result.again) == ([], [])
    return item.reason


def test_binary(tmp_path: Path) -> None:
    path = write(tmp_path / "app", elf_file(build_id=ID))
    (tmp_path / "link").symlink_to("app")
    (seen,) = given(tmp_path / "link").pinned
    assert (seen.path, seen.data) == (os.fsencode(path), path.read_bytes())
    assert seen.pinned.sighting.origin.scanner == "add"


def test_debug_files_come_along(tmp_path: Path) -> None:
    full = debugforms.library(tmp_path, "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(full)
    debug, shipped = tmp_path / ".debug/lib.debug", tmp_path / "app/lib.so"
    debug.parent.mkdir()
    shipped.parent.mkdir()
    run([tool("objcopy"), "--only-keep-debug", full, debug], check=True)
    run([tool("objcopy"), "--strip-all", f"--add-gnu-debuglink={debug}", full, shipped], check=True)
    shutil.move(debug.parent, shipped.parent)
    shutil.move(package, shipped.parent / "lib.so.dwp")
    result = given(shipped)
    assert {os.path.basename(path) for path in result.paths()} == {
        b"lib.so",
        b"lib.debug",
        b"lib.so.dwp",
    }
    kept_under = names.package_id(BuildId.from_hex(build_id_of(shipped)))
    assert [seen.pinned.build_id for seen in result.pinned] == [None, None, kept_under]
    memory = Memory()
    remember(memory, result)
    again = given(shipped, memory=memory)
    assert (again.pinned, len(again.again)) == ([], 2)  # what is known is not read for its units


def test_package_alone(tmp_path: Path) -> None:
    full = debugforms.library(tmp_path, "-gdwarf-4", "-gsplit-dwarf")
    package = debugforms.packed(full)
    (seen,) = given(package).pinned
    kept_under = names.package_id(BuildId.from_hex(build_id_of(full)))
    assert (seen.pinned.kind, seen.pinned.build_id) == (Kind.DEBUGINFO, kept_under)
    memory = Memory()
    remember(memory, given(package))
    assert given(package, memory=memory).pinned == []
    full.unlink()
    assert "without a build ID" in reason(given(package))


def test_modules_and_kernels_are_unpacked(tmp_path: Path) -> None:
    inside = elf_file(build_id=ID)
    module = write(tmp_path / "a.ko.gz", gzip.compress(inside))
    kernel = write(tmp_path / "vmlinuz", bzimage_file(packed_vmlinux(inside, "xz")))
    assert [seen.data for seen in given(module, kernel).pinned] == [inside, inside]


def test_files_that_cannot_be_added(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    assert reason(given(tmp_path)) == "a directory: use scan tree"
    assert reason(given(fifo)) == "not a regular file"
    assert reason(given(tmp_path / "missing")) == "No such file or directory"
    assert reason(given(write(tmp_path / "text", b"text"))) == "not an ELF file"
    without = reason(given(write(tmp_path / "without", elf_file(etype=ET_REL))))
    assert without == "ELF file without a build ID; --build-id gives it one"
    dump = write(tmp_path / "core", elf_file(etype=ET_CORE))
    assert reason(given(dump)) == "a core file: use scan core"


def test_build_id_that_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "without", elf_file([TEXT, DWARF, SYMTAB]))
    result = given(path, build_id=GIVEN)
    (seen,) = result.pinned
    assert (seen.pinned.kind, seen.pinned.build_id) == (None, GIVEN)
    memory = Memory({seen.pinned.sighting.origin.identity: Known(GIVEN)})
    assert given(path, memory=memory, build_id=GIVEN).pinned == []
    assert len(given(path, memory=memory, build_id=ID).pinned) == 1
    with_own = write(tmp_path / "with", elf_file(build_id=ID))
    assert reason(given(with_own, build_id=GIVEN)) == "has another build ID of its own"
    assert len(given(with_own, build_id=ID).pinned) == 1
    assert reason(given(write(tmp_path / "text", b"text"), build_id=GIVEN)) == "not an ELF file"


def test_file_with_a_given_build_id_is_all_that_it_is(tmp_path: Path) -> None:
    path = write(tmp_path / "without", elf_file([TEXT, DWARF]))
    with Store.create(tmp_path / "store") as store:
        scanner = GivenFiles(StoreMemo(store), [os.fsencode(path)], build_id=GIVEN)
        assert Ingest(store).run(scanner).captured == 1
        ordinal = store.index.ordinal(GIVEN)
        assert ordinal is not None
        for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO):
            artifact = store.index.artifact(ordinal, kind)
            assert artifact is not None
            assert artifact.quality is Quality.DEBUGINFO


def test_kallsyms(tmp_path: Path) -> None:
    path = write(tmp_path / "kallsyms", SYMBOLS)
    path.chmod(0o440)
    (seen,) = given(path, build_id=GIVEN, kallsyms=True).pinned
    assert (seen.path, seen.data) == (b"[kernel.kallsyms]", SYMBOLS)
    assert (seen.pinned.kind, seen.pinned.build_id) == (Kind.KALLSYMS, GIVEN)
    assert seen.pinned.sighting.origin.identity == inodes.identity_at(-1, os.fsencode(path))
    memory = Memory({seen.pinned.sighting.origin.identity: Known(GIVEN)})
    (again,) = given(path, memory=memory, build_id=GIVEN, kallsyms=True).again
    assert again.sighting.origin.path == b"[kernel.kallsyms]"
    other = write(tmp_path / "other", elf_file(build_id=ID))
    assert "not a copy" in reason(given(other, build_id=GIVEN, kallsyms=True))
    running = Path("/proc/kallsyms")
    assert "scan kernel" in reason(given(running, build_id=GIVEN, kallsyms=True))


@pytest.mark.root
def test_file_of_another_mount_namespace_belongs_to_that(tmp_path: Path, as_host: object) -> None:
    path = write(tmp_path / "app", elf_file(build_id=ID))
    (seen,) = given(path).pinned
    assert seen.pinned.sighting.origin.trust is Trust.HOST
    (tmp_path / "private").mkdir()
    with private_cat(tmp_path / "private") as child:
        inside = Path(f"/proc/{child.pid}/root{tmp_path}/private/cat")
        (seen,) = given(inside).pinned
    assert seen.pinned.sighting.origin.trust is Trust.CONTAINER
