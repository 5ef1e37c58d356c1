# SPDX-License-Identifier: Apache-2.0
"""The trust in files: owners on mounts, and of copies, that others could fill do not count."""

from __future__ import annotations

import mmap
import os
import tempfile
import zlib
from pathlib import Path

import pytest

from buildidfs.capture.origin.builder import Owners, trust_of
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.linux import inodes, mounts
from buildidfs.model import Kind, NamespaceSet, Standing, Trust
from tests.support.elf.elfwriter import DWARF, TEXT, TEXT_SPLIT, debuglink, elf_file
from tests.support.harness.captures import identity
from tests.support.harness.children import cat_program, needs_root, private_cat, running
from tests.support.harness.scans import Memory, Scan, scan

DIGEST = b"0123456789abcdef" * 4
HOST_MNT = 6


def believed(path: Path, shown: bytes = b"", table: bytes | None = None) -> bool:
    fd = os.open(path, os.O_PATH)
    try:
        owners = Owners(mounts.mountinfo if table is None else lambda: table)
        return owners.believed(shown or os.fsencode(path), fd)
    finally:
        os.close(fd)


def mountinfo_of(path: Path, options: bytes) -> bytes:
    """A mount table in which what ``path`` is on has these options."""
    fd = os.open(path, os.O_PATH)
    try:
        text = Path(f"/proc/self/fdinfo/{fd}").read_bytes()
    finally:
        os.close(fd)
    number = text.partition(b"mnt_id:")[2].split()[0]
    return b"%s 1 8:1 / / %s - ext4 /dev/sda1 rw\n" % (number, options)


def test_ordinary_mount_is_believed(tmp_path: Path) -> None:
    assert believed(tmp_path, table=mountinfo_of(tmp_path, b"rw,nodev"))


def test_mount_that_users_can_make_is_not(tmp_path: Path) -> None:
    assert not believed(tmp_path, table=mountinfo_of(tmp_path, b"rw,nosuid,nodev"))


def test_mount_of_another_user_is_not(tmp_path: Path) -> None:
    assert not believed(tmp_path, table=b"")


@pytest.mark.parametrize(
    "path",
    [
        b"/var/lib/docker/overlay2/0/diff/usr/lib/libc.so.6",
        b"/backup/store/blobs/01/" + DIGEST,
        b"/root/.debug/usr/lib/libc.so.6/" + DIGEST[:40] + b"/elf",
        b"/root/.cache/debuginfod_client/" + DIGEST[:40] + b"/debuginfo",
        b"/export/" + DIGEST[:16] + b"/debug",
    ],
)
def test_copies_in_stores_and_caches_are_not(tmp_path: Path, path: bytes) -> None:
    assert not believed(tmp_path, path, mountinfo_of(tmp_path, b"rw"))


@pytest.mark.parametrize(
    "path",
    [
        b"/usr/lib/debug/.build-id/01/23456789abcdef.debug",
        b"/usr/lib/debug/.dwz/x86_64-linux-gnu/libc6.debug",
        b"/srv/cafe/elf.so",
        b"/srv/office/elf",
        b"/srv/blobs/01/app",
    ],
)
def test_names_that_only_look_similar_are(tmp_path: Path, path: bytes) -> None:
    assert believed(tmp_path, path, mountinfo_of(tmp_path, b"rw"))


@pytest.mark.parametrize(
    ("path", "standing"),
    [
        (os.fsencode(cat_program()), Standing.SYSTEM),
        (b"/usr/lib/none", Standing.SYSTEM),
        (b"/usr/local/none", Standing.INSTALLED),
        (b"/usr/no-such-directory/app", Standing.ELSEWHERE),
        (b"/usrs/app", Standing.ELSEWHERE),
        (b"/var/lib/volumes/data/app", Standing.ELSEWHERE),
        (b"/srv/usr/bin/app", Standing.ELSEWHERE),
    ],
)
def test_places_of_the_system(path: bytes, standing: Standing) -> None:
    if standing is Standing.INSTALLED and os.stat("/usr/local").st_mode & 0o022:
        standing = Standing.ELSEWHERE
    assert Owners(mounts.mountinfo).standing(path) is standing


@needs_root("makes directories in a place of the system's")
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o775, 0), (0o755, 1000)])
def test_directory_that_others_can_put_files_into(mode: int, owner: int) -> None:
    """Files of root's that lie elsewhere can be moved there."""
    with tempfile.TemporaryDirectory(dir="/usr/lib") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "below").mkdir(0o755)
        path = os.fsencode(directory / "below" / "app")
        assert Owners(mounts.mountinfo).standing(path) is Standing.SYSTEM
        os.chown(directory, owner, -1)
        directory.chmod(mode)
        assert Owners(mounts.mountinfo).standing(path) is Standing.ELSEWHERE


def test_mounts_are_told_apart_not_devices(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_PATH)
    elsewhere = os.open("/proc/self", os.O_PATH)
    try:
        first, again = inodes.unique_mount_id(fd), inodes.unique_mount_id(fd)
        if first is None:
            pytest.skip("the kernel tells no unique mount ID (before Linux 6.8)")
        assert first == again != inodes.unique_mount_id(elsewhere)
    finally:
        os.close(fd)
        os.close(elsewhere)


def trust_in(result: Scan, path: Path | bytes) -> Trust:
    (seen,) = [seen for seen in result.pinned if seen.path == os.fsencode(path)]
    return seen.pinned.sighting.origin.trust


@needs_root("mounts a filesystem in a mount namespace of its own")
def test_file_of_a_container_that_is_run_on_the_host(tmp_path: Path, as_host: NamespaceSet) -> None:
    with (
        private_cat(tmp_path) as inside,
        running([f"/proc/{inside.pid}/root{tmp_path}/cat"]) as outside,
    ):
        result = scan(ProcScanner(Memory(), pids=[outside.pid], initial=as_host))
    (binary,) = [seen for seen in result.pinned if seen.path.endswith(b"/cat")]
    assert binary.pinned.sighting.origin.trust is Trust.UNKNOWN
    # and what else it has mapped is the host's, so that the above is no accident
    (libc,) = [seen for seen in result.pinned if b"/libc.so" in seen.path]
    assert libc.pinned.sighting.origin.trust is Trust.HOST


@needs_root("gives a file to another user")
@pytest.mark.parametrize(("owner", "expected"), [(0, Trust.HOST), (1000, Trust.UNKNOWN)])
def test_debug_file_is_believed_no_more_than_the_binary_that_leads_there(
    tmp_path: Path, as_host: NamespaceSet, owner: int, expected: Trust
) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF])  # without a build ID: the binary says whose it is
    (tmp_path / "of-root").write_bytes(debug)
    (tmp_path / "app.debug").symlink_to("of-root")
    binary = tmp_path / "app"
    link = debuglink(b"app.debug", zlib.crc32(debug))
    binary.write_bytes(elf_file([TEXT, link], build_id=b"\x44" * 20))
    os.chown(binary, owner, owner)
    if not believed(binary):
        pytest.skip("temporary files are on a mount that is not believed")
    with binary.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with mapped:
        result = scan(ProcScanner(Memory(), pids=[os.getpid()], initial=as_host))
    (found,) = [seen.pinned for seen in result.pinned if seen.path.endswith(b"/app.debug")]
    assert (found.kind, found.sighting.origin.trust) == (Kind.DEBUGINFO, expected)


@pytest.mark.parametrize(
    ("changes", "mnt", "expected"),
    [
        ({}, 6, Trust.HOST),
        ({"uid": 1000}, 6, Trust.UNKNOWN),
        ({"mode": 0o100775}, 6, Trust.UNKNOWN),
        ({"mode": 0o100757}, 6, Trust.UNKNOWN),
        ({}, 60, Trust.CONTAINER),
        ({}, 0, Trust.UNKNOWN),
    ],
)
def test_trust_needs_root_and_the_host(changes: dict[str, int], mnt: int, expected: Trust) -> None:
    assert trust_of(identity(**changes), mnt, HOST_MNT) is expected


def test_owners_that_are_not_believed_do_not_count() -> None:
    trust = trust_of(identity(), HOST_MNT, HOST_MNT, owners_believed=False)
    assert trust is Trust.UNKNOWN
