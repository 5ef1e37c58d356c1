# SPDX-License-Identifier: Apache-2.0
"""A file counts for the user who decides what it shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildidfs.capture.origin.path_access import NOBODY, FileUsers
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.linux import inodes
from buildidfs.shares import of_user
from buildidfs.store.index.locations import share_at
from tests.support.clients.tools import run, tool
from tests.support.elf import echo
from tests.support.filesystems import userfs
from tests.support.harness.children import running
from tests.support.harness.scans import Memory, scan

GONE = 4194303
USER = 4242


def user_of(users: FileUsers, path: Path, pid: int = GONE) -> int:
    fd = os.open(path, os.O_PATH)
    try:
        return users.of(fd, inodes.identity(fd, ask=False), pid)
    finally:
        os.close(fd)


def test_file_on_a_mount_of_the_host_counts_for_its_owner(directory: Path) -> None:
    users = FileUsers()
    path = directory / "file"
    path.touch()
    assert [user_of(users, path) for _ in range(2)] == [os.geteuid()] * 2


@pytest.mark.root
@pytest.mark.fuse
def test_file_of_a_fuse_server_counts_for_its_mounter_and_not_for_the_owner_it_shows(
    directory: Path,
) -> None:
    program, mountpoint = directory / "program", directory / "mnt"
    echo.build(program)
    mountpoint.mkdir()
    directory.chmod(0o755)
    with userfs.served(mountpoint, program, "public") as server:
        with running([*userfs.entering(server, "host"), mountpoint / "app"]) as child:
            fd = os.open(f"/proc/{child.pid}/exe", os.O_PATH)
            scanned = scan(ProcScanner(Memory(), pids=[child.pid])).pinned
            (item,) = (each.pinned for each in scanned if each.path.endswith(b"/app"))
            assert share_at(item.sighting.origin) == of_user(userfs.UID)
        try:
            identity = inodes.identity(fd, ask=False)
            assert identity.uid == 0
            assert FileUsers().of(fd, identity, GONE) == userfs.UID
            run([tool("umount"), "-l", mountpoint])
            assert FileUsers().of(fd, identity, GONE) == NOBODY
        finally:
            os.close(fd)


@pytest.mark.root
def test_file_that_the_host_has_not_mounted_counts_for_the_user_of_the_process() -> None:
    fd = os.memfd_create("memory")
    try:
        identity = inodes.identity(fd)
        with running([tool("setpriv"), f"--reuid={USER}", "cat"]) as process:
            assert FileUsers().of(fd, identity, process.pid) == USER
        assert FileUsers().of(fd, identity, GONE) == NOBODY
        assert FileUsers().of(fd, identity, os.getpid()) == 0
    finally:
        os.close(fd)
