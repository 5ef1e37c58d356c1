# SPDX-License-Identifier: Apache-2.0
"""Directories with mounts, devices and other people's roots below them."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.base import Unreadable
from buildidfs.capture.scan.tree import TreeScanner, identify_tree
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.model import BuildId, Trust
from buildidfs.store import Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.elf import echo
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems import silentfs
from tests.support.harness.children import running
from tests.support.harness.scans import Memory, Scan, open_descriptors, own_namespaces, scan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.root

ID = BuildId(b"\x44" * 20)
ELF = elf_file(build_id=ID)


@pytest.fixture
def place(directory: Path) -> Iterator[Path]:
    """A directory of this test's own, below which it may mount."""
    before = open_descriptors()
    yield directory
    assert open_descriptors() <= before


def scanned(*paths: Path) -> Scan:
    names = [os.fsencode(path) for path in paths]
    return scan(TreeScanner(Memory(), names, initial=own_namespaces()))


def mounted(place: Path, fstype: str, name: str) -> Path:
    point = place / name
    point.mkdir()
    run([tool("mount"), "-t", fstype, "none", point], check=True)
    return point


def test_other_filesystems_are_entered_and_interfaces_are_not(place: Path) -> None:
    (place / "a").write_bytes(ELF)
    memory = mounted(place, "tmpfs", "b")
    interfaces = [mounted(place, fstype, fstype) for fstype in ("proc", "sysfs")]
    try:
        (memory / "file").write_bytes(ELF)
        result = scanned(place)
        identified = dict(identify_tree([os.fsencode(place)]))
    finally:
        unmount(memory, *interfaces)
    expected = [os.fsencode(place / "a"), os.fsencode(memory / "file")]
    assert result.paths() == expected
    assert list(identified) == expected
    assert result.unreadable == []


def test_devices_are_not_opened(place: Path) -> None:
    # Opening the memory of the kernel's log would succeed, and reading it would block.
    os.mknod(place / "kmsg", stat.S_IFCHR | 0o600, os.makedev(1, 11))
    os.mknod(place / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    os.mkfifo(place / "fifo")
    (place / "file").write_bytes(ELF)
    result = scanned(place)
    assert result.paths() == [os.fsencode(place / "file")]
    assert (result.again, result.unreadable) == ([], [])
    (refused,) = scanned(place / "zero").unreadable
    assert "neither a regular file nor a directory" in refused.reason


def test_root_of_another_mount_namespace(place: Path) -> None:
    """It is read as its own processes see it, and not believed."""
    target = place / "mnt"
    target.mkdir()
    build_id = echo.build(place / "program")
    script = 'set -eu; mount -t tmpfs none "$1"; cp "$2" "$1/app"; exec "$1/app"'
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", target, place / "program"]
    with running(argv) as child:
        inside = Path(f"/proc/{child.pid}/root{target}")
        result = scanned(inside)
    (seen,) = result.pinned
    assert seen.path == os.fsencode(target / "app")
    assert seen.data == (place / "program").read_bytes()
    assert build_id in seen.data.hex()
    origin = seen.pinned.sighting.origin
    assert (origin.trust, origin.namespaces.mnt) == (Trust.CONTAINER, 0)


@pytest.mark.fuse
def test_own_mount_is_not_entered(buildidfs: BuildIdFs) -> None:
    """The mount does not answer now: a walk that asked it for anything would hang."""
    base = buildidfs.store.parent
    (base / "file").write_bytes(ELF)
    buildidfs("scan", "tree", base / "file")
    with buildidfs.mounted() as mount:
        assert ID.hex() in os.listdir(mount)
        with silentfs.silenced(mount):
            answers = _within(20, base)
        (refused,) = scanned(mount).unreadable
    assert isinstance(answers[os.fsencode(base / "file")], BuildId)
    assert not [path for path in answers if path.startswith(os.fsencode(mount))]
    assert "in the store already" in refused.reason


def _within(seconds: float, path: Path) -> dict[bytes, object]:
    answers: list[dict[bytes, object]] = []

    def ask() -> None:
        answers.append(dict(identify_tree([os.fsencode(path)])))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    assert answers, f"the walk did not end within {seconds} s"
    return answers[0]


def test_sparse_file_stays_sparse(place: Path) -> None:
    """A claim of size costs the store no room."""
    sparse = place / "sparse"
    sparse.write_bytes(ELF)
    os.truncate(sparse, 512 << 20)
    with Store.open(place / "store", create=True) as store:
        summary = Ingest(store).run(TreeScanner(StoreMemo(store), [os.fsencode(sparse)]))
        assert (summary.captured, summary.unreadable) == (1, [])
        ordinal = store.index.ordinal(ID)
        assert ordinal is not None
        (record,) = store.index.origins(ordinal)
        blob = os.stat(store.blobs.path(record.digest))
    assert blob.st_size == 512 << 20
    assert blob.st_blocks * 512 < 8 << 20


def test_directory_taken_away_meanwhile(place: Path) -> None:
    for name in ("a", "b", "c"):
        (place / name / "below").mkdir(parents=True)
        (place / name / "below/file").write_bytes(ELF)
    found = iter(TreeScanner(Memory(), [os.fsencode(place)]))
    first = next(found)
    (place / "b/below/file").unlink()
    (place / "b/below").rmdir()
    (place / "b").rmdir()
    # Led elsewhere by a link, it must not be followed.
    (place / "c").rename(place / "moved")
    (place / "c").symlink_to("/usr/bin")
    rest = list(found)
    for item in (first, *rest):
        assert not isinstance(item, Unreadable)
        item.close()  # type: ignore[union-attr]  # nothing is known, so all are pinned
    assert [item.sighting.origin.path for item in rest] in (  # type: ignore[union-attr]
        [],
        [os.fsencode(place / "moved/below/file")],
    )
