# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.syscalls against what os.stat says, and against recycled device numbers."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.linux import inodes, procfs
from tests.support.clients.tools import run, tool
from tests.support.harness.children import needs_root, private_cat

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")


def _same(identity: FileIdentity, stat: os.stat_result) -> bool:
    return (
        identity.dev, identity.ino, identity.size, identity.mtime_ns, identity.ctime_ns,
        identity.mode, identity.uid, identity.gid,
    ) == (
        stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns,
        stat.st_mode, stat.st_uid, stat.st_gid,
    )  # fmt: skip


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH], ids=["open", "O_PATH"])
@pytest.mark.parametrize("path", ["/bin/sh", "/", "/dev/null", "/proc/self/maps"])
def test_identity_agrees_with_fstat(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        assert _same(inodes.identity(fd), os.fstat(fd))
    finally:
        os.close(fd)


def test_large_old_and_foreign_values_survive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate((1 << 40) + 3)
        os.utime(path, ns=(0, -5_000_000_007))
        if os.geteuid() == 0:
            os.chown(path, 0xFFFF_FFFE, 0xFFFF_FFFD)
        identity = inodes.identity(file.fileno())
        assert _same(identity, os.fstat(file.fileno()))
    assert identity.size == (1 << 40) + 3
    assert identity.mtime_ns == -5_000_000_007


def test_a_deleted_file_has_its_identity_still(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        before = inodes.identity(file.fileno())
        (tmp_path / "file").unlink()
        after = inodes.identity(file.fileno())
    assert (after.dev, after.ino, after.scope) == (before.dev, before.ino, before.scope)


def test_identity_at_follows_links_or_not(tmp_path: Path, directory: int) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert inodes.identity_at(directory, b"file").size == 5
    assert inodes.identity_at(directory, b"link") == inodes.identity_at(directory, b"file")
    link = inodes.identity_at(directory, b"link", follow=False)
    assert _same(link, os.lstat(tmp_path / "link"))
    absolute = os.fsencode(tmp_path / "link")
    assert inodes.identity_at(directory, absolute) == inodes.identity_at(directory, b"file")


@pytest.mark.parametrize(
    ("path", "number"),
    [
        (b"missing", errno.ENOENT),
        (b"", errno.ENOENT),
        (b"file/x", errno.ENOTDIR),
        (b"file\0/x", errno.EINVAL),
    ],
)
def test_identity_at_names_the_path_in_its_error(
    tmp_path: Path, directory: int, path: bytes, number: int
) -> None:
    (tmp_path / "file").write_bytes(b"")
    text = "NUL byte" if number == errno.EINVAL else os.strerror(number)
    with pytest.raises(OSError, match=text) as caught:
        inodes.identity_at(directory, path)
    assert caught.value.errno == number
    assert caught.value.filename == (path or None)


def test_a_closed_descriptor_is_an_error() -> None:
    fd = os.open("/", os.O_PATH)
    os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        inodes.identity(fd)


def test_an_anonymous_device_is_scoped_by_boot_and_mount() -> None:
    fd = os.memfd_create("anonymous")
    try:
        identity = inodes.identity(fd)
        assert os.major(identity.dev) == 0
        if identity.scope is None:
            pytest.skip("this kernel has no unique mount IDs (before 6.8)")
        assert len(identity.scope) == 24
        assert identity.scope[:16].hex() == _BOOT_ID
        assert inodes.identity(fd).scope == identity.scope
    finally:
        os.close(fd)


def test_a_disk_needs_no_scope_but_a_loop_device_does() -> None:
    """The whole rule, from the kernel's answer to `FileIdentity.scope`."""
    unique = inodes._STATX_MNT_ID_UNIQUE
    boot = bytes.fromhex(_BOOT_ID)
    assert inodes.boot_id() == boot
    for major in (8, 254, 259):
        assert inodes._scope(major, 1, unique, 7) == b""
        assert inodes._scope(major, 1, 0, 0) == b""
        # An image with fixed times: only the mount tells it from its next version.
        assert inodes._scope(major, 0, unique, 7) == boot + b"\7\0\0\0\0\0\0\0"
        assert inodes._scope(major, 0, 0, 0) is None
    for major in (0, 7):
        assert inodes._scope(major, 1, unique, 7) == boot + b"\7\0\0\0\0\0\0\0"
        assert inodes._scope(major, 1, 0, 7) is None


def test_every_thread_has_a_buffer_of_its_own(tmp_path: Path) -> None:
    seen: dict[int, set[int]] = {}

    def look(size: int) -> None:
        with (tmp_path / str(size)).open("wb") as file:
            file.truncate(size)
            seen[size] = {inodes.identity(file.fileno()).size for _ in range(2000)}

    threads = [threading.Thread(target=look, args=(size,)) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {size: {size} for size in (1, 2, 3, 4)}


def _identity_of_executable(child: subprocess.Popen[bytes]) -> FileIdentity:
    pid_fd = procfs.open_pid(child.pid)
    try:
        return inodes.identity_at(pid_fd, b"exe")
    finally:
        os.close(pid_fd)


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_filesystems_that_follow_each_other_are_told_apart(tmp_path: Path) -> None:
    """tmpfs after tmpfs gets the same device and inode numbers again: only scope differs."""
    seen = []
    for _ in range(3):
        with private_cat(tmp_path) as child:
            seen.append(_identity_of_executable(child))
    assert all(os.major(identity.dev) == 0 for identity in seen)
    if any(identity.scope is None for identity in seen):
        pytest.skip("this kernel has no unique mount IDs (before 6.8)")
    assert len({identity.scope for identity in seen}) == 3


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_a_file_of_a_loop_device_is_scoped(tmp_path: Path) -> None:
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    image, root = tmp_path / "image", tmp_path / "root"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    run([tool("mkfs.ext4"), "-q", "-F", image], check=True)
    with private_cat(root, "ext4", "loop", str(image)) as child:
        identity = _identity_of_executable(child)
    assert os.major(identity.dev) == 7
    assert identity.scope is None or len(identity.scope) == 24


def test_times_that_nothing_has_room_for() -> None:
    fd = os.memfd_create("far")  # as on any tmpfs, where everybody may do that
    try:
        for seconds, shown in ((1 << 60, (1 << 63) - 1), (-(1 << 60), -(1 << 63))):
            os.utime(fd, (seconds, seconds))
            assert inodes.identity(fd).mtime_ns == shown
    finally:
        os.close(fd)


def test_root_of_a_mount(tmp_path: Path) -> None:
    found = {}
    for path in ("/proc", "/proc/self", tmp_path):
        fd = os.open(path, os.O_PATH)
        try:
            found[path] = inodes.rooted_mount_id(fd), inodes.unique_mount_id(fd)
        finally:
            os.close(fd)
    assert found["/proc"] == (found["/proc/self"][1], found["/proc/self"][1])
    assert found["/proc/self"][0] is found[tmp_path][0] is None


def test_identity_and_mount_in_one_call(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/proc"), Path("/dev/shm")):
        fd = os.open(path, os.O_PATH)
        try:
            expected = inodes.identity(fd), inodes.unique_mount_id(fd)
            assert inodes.identity_on_mount(fd) == expected
            assert inodes.identity_on_mount(fd, ask=False) == expected
        finally:
            os.close(fd)
