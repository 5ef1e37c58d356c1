# SPDX-License-Identifier: Apache-2.0
"""What a mount is of, against what statfs(2) says of the same."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

from buildidfs.linux import namespaces, procfs, statmount, statx, syscalls
from tests.support.children import needs_root, private_cat

TMPFS_MAGIC = 0x01021994
PROC_SUPER_MAGIC = 0x9FA0


def mount_of(path: str | Path) -> int:
    """The unique number of the mount that a path is on."""
    fd = os.open(path, os.O_PATH)
    try:
        number = statx.unique_mount_id(fd)
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
        statmount.magic(mount_of("/"))
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


needs_statmount = pytest.mark.skipif(
    not _has_statmount(), reason="this kernel has no statmount (before 6.8)"
)


@needs_statmount
@pytest.mark.parametrize("path", ["/", "/proc", "/proc/self/maps", "/sys", "/dev"])
def test_as_statfs_has_it(path: str) -> None:
    assert statmount.magic(mount_of(path)) == magic_of(path)


@needs_statmount
def test_proc_is_proc() -> None:
    assert statmount.magic(mount_of("/proc")) == PROC_SUPER_MAGIC


@needs_statmount
def test_no_such_mount() -> None:
    with pytest.raises(FileNotFoundError):
        statmount.magic((1 << 63) - 1)


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
        assert statmount.magic(mount, number) == TMPFS_MAGIC
        with pytest.raises(FileNotFoundError):
            statmount.magic(mount)
    # Whatever number the kernel says so with, it is not found any more.
    with pytest.raises(OSError, match=r"No such file|Invalid|not permitted"):
        statmount.magic(mount, number)
