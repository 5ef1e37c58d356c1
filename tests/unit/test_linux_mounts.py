# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.mounts, on texts and in private mount namespaces."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import sys
from pathlib import Path

import pytest

from buildidfs.formats import proc_text as parser
from buildidfs.linux import inodes, mounts, namespaces, procfs, syscalls
from buildidfs.linux.file_ops import closing_fd
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.children import needs_root, private_cat
from tests.support.harness.waiting import until

_OURS = (
    b"36 22 0:52 / /buildid ro,nosuid,nodev,relatime shared:7 - fuse.buildidfs buildidfs ro\n"
    b"40 22 0:61 / /mnt/a\\040-\\040b ro - fuse.buildidfs store\\040x ro,user_id=0\n"
    b"41 40 7:300 /x /mnt/c ro shared:1 master:2 propagate_from:3 - fuse.buildidfs b ro\n"
)
_OTHERS = (
    b"22 1 254:0 / / rw - ext4 /dev/vda rw\n"
    b"37 22 0:53 / /fuse.buildidfs rw - fuse.sshfs fuse.buildidfs rw\n"
    b"38 22 0:54 / /x rw shared:1 - fuse.buildidfs2 y rw\n"
    b"39 22 0:55 / /y rw - tmpfs fuse.buildidfs rw\n"
    b"42 22 0:56 / /z rw - fuse buildidfs rw\n"
)


def test_own_mounts_are_found_among_others() -> None:
    assert mounts.own_mount_devices(_OURS + _OTHERS) == {(0, 52), (0, 61), (7, 300)}
    assert mounts.own_mount_devices(_OTHERS) == set()
    assert mounts.own_mount_devices(b"") == set()


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense",
        b" - fuse.buildidfs",
        b"1 2 - fuse.buildidfs b ro",
        b"1 2 052 / / ro - fuse.buildidfs b ro",
        b"1 2 a:b / / ro - fuse.buildidfs b ro",
        b"1 2 : / / ro - fuse.buildidfs b ro",
        b"1 2 0:5",
    ],
)
def test_lines_that_are_no_mounts_are_passed_over(line: bytes) -> None:
    assert mounts.own_mount_devices(line + b"\n" + _OURS) == {(0, 52), (0, 61), (7, 300)}


def test_our_own_mounts_as_the_parser_sees_them() -> None:
    text = mounts.mountinfo()
    devices = {mount.dev for mount in parser.mounts_in(text) if mount.fstype == b"fuse.buildidfs"}
    assert mounts.own_mount_devices(text) == devices
    assert any(mount.mount_point == b"/" for mount in parser.mounts_in(text))


def test_the_mount_of_an_open_file(tmp_path: Path) -> None:
    table = {mount.mount_id: mount.mount_point for mount in parser.mounts_in(mounts.mountinfo())}
    for path in (tmp_path, Path("/proc/self")):
        fd = os.open(path, os.O_PATH)
        try:
            assert os.fsencode(path).startswith(table[mounts.mount_id(fd)])
        finally:
            os.close(fd)


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_mounts_of_another_namespace(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        fd = procfs.open_pid(child.pid)
        try:
            theirs = procfs.mountinfo(fd)
        finally:
            os.close(fd)
        points = {mount.mount_point for mount in parser.mounts_in(theirs)}
        ours = {mount.mount_point for mount in parser.mounts_in(mounts.mountinfo())}
    assert os.fsencode(tmp_path) in points - ours


def test_plain_directory_cannot_be_unmounted(tmp_path: Path) -> None:
    text = "Invalid argument" if os.geteuid() == 0 else "Operation not permitted"
    with pytest.raises(OSError, match=text) as caught:
        mounts.umount2(os.fsencode(tmp_path))
    assert caught.value.filename == os.fsencode(tmp_path)
    with pytest.raises(OSError, match="NUL byte"):
        mounts.umount2(b"/\0x")


@pytest.mark.root
@needs_root("mounts and unmounts")
def test_a_mount_in_use_can_be_detached_only(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path)
    run([tool("mount"), "-t", "tmpfs", "none", tmp_path], check=True)
    try:
        with (tmp_path / "open").open("wb"):
            with pytest.raises(OSError, match="busy") as caught:
                mounts.umount2(path)
            assert caught.value.errno == errno.EBUSY
            mounts.umount2(path, mounts.MNT_DETACH)
        assert path not in {mount.mount_point for mount in parser.mounts_in(mounts.mountinfo())}
    finally:
        run([tool("umount"), "-l", tmp_path])


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_read_ahead_of_one_filesystem(tmp_path: Path) -> None:
    """A loop device names its setting as a FUSE mount does, and needs no server."""
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    image, root = tmp_path / "image", tmp_path / "root"
    root.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    run([tool("mkfs.ext4"), "-q", "-F", image], check=True)
    with private_cat(root, "ext4", "loop", str(image)) as child:
        dev = os.stat(f"/proc/{child.pid}/exe").st_dev
        setting = Path(f"/sys/class/bdi/{os.major(dev)}:{os.minor(dev)}/read_ahead_kb")
        before = int(setting.read_text())
        try:
            for kib in (before + 64, 1024):
                mounts.set_read_ahead(dev, kib)
                assert int(setting.read_text()) == kib
        finally:
            setting.write_text(f"{before}\n")


def test_a_filesystem_without_read_ahead() -> None:
    with pytest.raises(FileNotFoundError):
        mounts.set_read_ahead(os.makedev(0, 0xFFFFF), 1024)


# --- buildidfs.linux.statfs: the kind of a filesystem, by any descriptor


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_magic_of_proc(flags: int) -> None:
    fd = os.open("/proc/self/status", flags)
    try:
        assert mounts.filesystem_magic(fd) == 0x9FA0
    finally:
        os.close(fd)


def test_magic_of_a_closed_descriptor() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        mounts.filesystem_magic(-1)


# --- What a mount is of, against what statfs(2) says of the same


TMPFS_MAGIC = 0x01021994
PROC_SUPER_MAGIC = 0x9FA0


def mount_of(path: str | Path) -> int:
    """The unique number of the mount that a path is on."""
    fd = os.open(path, os.O_PATH)
    try:
        number = inodes.unique_mount_id(fd)
    finally:
        os.close(fd)
    if number is None:
        pytest.skip("this kernel does not tell the unique number of mounts (before 6.8)")
    return number


def magic_of(path: str | Path) -> int:
    """f_type of statfs(2), the first word of its answer."""
    answer = ctypes.create_string_buffer(256)
    assert syscalls.libc.statfs(os.fsencode(path), answer) == 0
    return int.from_bytes(answer.raw[:8], "little")


def _has_statmount() -> bool:
    try:
        with closing_fd(os.open("/", os.O_PATH)) as fd:
            mounts.mount_magic(inodes.unique_mount_id(fd) or 0)
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


needs_statmount = pytest.mark.skipif(
    not _has_statmount(), reason="this kernel has no statmount (before 6.8)"
)


@needs_statmount
@pytest.mark.parametrize("path", ["/", "/proc", "/proc/self/maps", "/sys", "/dev"])
def test_as_statfs_has_it(path: str) -> None:
    assert mounts.mount_magic(mount_of(path)) == magic_of(path)


@needs_statmount
def test_proc_is_proc() -> None:
    assert mounts.mount_magic(mount_of("/proc")) == PROC_SUPER_MAGIC


@needs_statmount
def test_no_such_mount() -> None:
    with pytest.raises(FileNotFoundError):
        mounts.mount_magic((1 << 63) - 1)


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
@needs_statmount
def test_facts_of_a_mount_as_in_mountinfo(tmp_path: Path) -> None:
    """Names with blanks, with what looks like an escape, long ones, and deleted ones."""
    names = ["plain", "a b", "a\\057b", "/".join(["x" * 200] * 10)]
    for name in names:
        (tmp_path / "from" / name).mkdir(parents=True)
    gone = tmp_path / "from" / "gone"
    gone.mkdir()
    points = [tmp_path / f"point{number}" for number in range(len(names) + 1)]
    try:
        for name, point in zip([*names, "gone"], points, strict=True):
            point.mkdir()
            run([tool("mount"), "--bind", tmp_path / "from" / name, point], check=True)
        gone.rmdir()
        table = {each.mount_point: each for each in parser.mounts_in(mounts.mountinfo())}
        for point in points:
            expected = table[os.fsencode(point)]
            found = mounts.placed(mount_of(point), 0)
            assert found == (expected.dev, expected.root, expected.fstype)
        assert found.root.endswith(b"/gone//deleted")
    finally:
        for point in points:
            run([tool("umount"), "-l", point])


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_devices_of_the_host_are_read_again_after_each_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    real = mounts.InitialDevices._read

    def counted(self: mounts.InitialDevices) -> None:
        reads.append(1)
        real(self)

    monkeypatch.setattr(mounts.InitialDevices, "_read", counted)
    monkeypatch.setattr(mounts, "_INITIAL_MOUNTINFO", "/proc/self/mountinfo")
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    with contextlib.closing(mounts.InitialDevices()) as devices:
        root = os.stat(tmp_path).st_dev
        assert devices.has((os.major(root), os.minor(root)))
        run([tool("mount"), "-t", "tmpfs", "none", first], check=True)
        try:
            number = os.stat(first).st_dev
            device = os.major(number), os.minor(number)
            assert devices.has(device)
            run([tool("mount"), "--bind", first, second], check=True)
            unmount(first)
            assert devices.has(device)
        finally:
            run([tool("umount"), "-l", first])
            run([tool("umount"), "-l", second], check=True)
        assert not devices.has(device)
        until(lambda: _is_quiet(devices, device, reads), "a moment without mounts of others")
    devices.close()


def _is_quiet(devices: mounts.InitialDevices, device: tuple[int, int], reads: list[int]) -> bool:
    before = len(reads)
    for _ in range(100):
        devices.has(device)
    return len(reads) == before


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
@needs_statmount
def test_a_mount_of_another_namespace(tmp_path: Path) -> None:
    with private_cat(tmp_path) as child:
        mount = mount_of(f"/proc/{child.pid}/root/{tmp_path}")
        pid_fd = procfs.open_pid(child.pid)
        try:
            number = namespaces.mnt_ns_id(pid_fd)
        finally:
            os.close(pid_fd)
        assert mounts.mount_magic(mount, number) == TMPFS_MAGIC
        with pytest.raises(FileNotFoundError):
            mounts.mount_magic(mount)
    # A watch of the host may have the namespace open for a moment.
    until(lambda: _is_unknown(mount, number), "the end of the namespace")


def _is_unknown(mount: int, namespace: int) -> bool:
    try:
        mounts.mount_magic(mount, namespace)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.EINVAL, errno.EPERM)
    return False


@pytest.mark.parametrize(
    ("path", "stored"),
    [
        ("/proc/version", False),
        ("/proc/self", False),
        ("/sys/kernel/notes", False),
        ("/dev/shm", True),
        (sys.executable, True),
    ],
)
def test_interfaces_of_the_kernel_store_no_files(path: str, *, stored: bool) -> None:
    with closing_fd(os.open(path, os.O_PATH)) as fd:
        assert mounts.stores_files(fd) is stored


def test_files_in_memory_are_stored() -> None:
    with closing_fd(os.memfd_create("x")) as fd:
        assert mounts.stores_files(fd)


@needs_root("mounts an overlay")
def test_overlay_does_not_hide_an_interface_of_the_kernel(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    lower.mkdir()
    (lower / "stored").write_text("x")
    shown = tmp_path / "shown"
    shown.mkdir()
    option = f"lowerdir=/sys/kernel:{lower}"
    run([tool("mount"), "-t", "overlay", "-o", option, "none", shown], check=True)
    try:
        for name, stored in (("notes", False), ("stored", True)):
            with closing_fd(os.open(shown / name, os.O_PATH)) as fd:
                assert mounts.stores_files(fd) is stored
    finally:
        run([tool("umount"), shown], check=True)


@pytest.mark.parametrize(
    ("fstype", "is_fuse", "needs_server"),
    [
        (b"fuse", True, True),
        (b"fuseblk", True, True),
        (b"fuse.sshfs", True, True),
        (b"fuseblk.ntfs", True, True),
        (b"fusectl", False, False),
        (b"virtiofs", False, True),
        (b"vboxsf", False, True),
        (b"nfs4", False, True),
        (b"ext4", False, False),
        (b"overlay", False, False),
    ],
)
def test_types_that_a_server_serves(fstype: bytes, is_fuse: bool, needs_server: bool) -> None:
    assert mounts.is_fuse(fstype) is is_fuse
    assert mounts.needs_server(fstype) is needs_server
