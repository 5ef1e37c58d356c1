# SPDX-License-Identifier: Apache-2.0
"""Which superblocks are watched: on texts, and on what is mounted in a namespace of the test's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from buildidfs.capture import superblocks
from buildidfs.formats import mountinfo
from buildidfs.linux import procfs
from tests.support.children import needs_root, private_cat
from tests.support.clients import run, tool

TEXT = b"""\
22 27 0:21 / /proc rw - proc proc rw
23 27 0:22 / /sys rw - sysfs sysfs rw
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
26 24 0:24 / /dev/pts rw - devpts devpts rw
27 1 254:0 / / rw - ext4 /dev/vda rw
28 27 0:28 / /mqueue rw - mqueue mqueue rw
29 27 0:29 / /cg rw - cgroup2 cgroup2 rw
30 27 0:30 / /nfs rw - nfs4 server:/x rw
31 27 0:31 / /ours ro - fuse.buildidfs buildidfs ro
32 27 0:32 / /sshfs rw - fuse.sshfs x: rw
33 27 8:1 / /ntfs rw - fuseblk /dev/sda1 rw
34 27 0:34 /@ /btrfs rw - btrfs /dev/vdb rw
35 27 7:3 / /squash ro - squashfs /dev/loop3 ro
36 27 0:36 / /o1 rw - overlay overlay rw,lowerdir=/a:/sshfs/b,upperdir=/u,workdir=/w
37 27 0:37 / /o2 rw - overlay overlay rw,lowerdir=/a:/sshfsb,upperdir=/u,workdir=/w
38 27 0:38 / /o3 rw - overlay overlay rw,lowerdir+=/a,lowerdir+=/sshfs
39 27 0:39 / /o4 rw - overlay overlay rw,lowerdir=l/A:l/B
40 27 0:40 / /virtiofs rw - virtiofs share rw
"""


def points(found: list[mountinfo.MountInfo]) -> list[bytes]:
    return [mount.mount_point for mount in found]


def test_what_may_hold_programs_and_answers() -> None:
    mounts = list(mountinfo.parse(TEXT))
    slow = superblocks.slow_points(mounts)
    assert slow == [b"/nfs", b"/ours", b"/sshfs", b"/ntfs"]
    assert points(superblocks.watchable(mounts, slow)) == [
        b"/dev/shm", b"/", b"/btrfs", b"/squash", b"/o2", b"/o4",
    ]  # fmt: skip
    # Layers relative to a place that nobody knows: the end decides.
    assert b"/o4" not in points(superblocks.watchable(mounts, [b"/var/lib/layers/l/B"]))


def test_what_the_host_has_is_not_even_parsed() -> None:
    host = {b"0:21", b"254:0", b"0:23"}
    rest = superblocks.without(TEXT, host)
    assert len(rest) == TEXT.count(b"\n") - 3
    assert not {b"/proc", b"/", b"/dev/shm"} & set(points(rest))
    assert superblocks.without(b"", set()) == []
    assert superblocks.without(b"nonsense\n\n1 2 3\n", set()) == []


@pytest.mark.root
@needs_root("mounts in a namespace of its own")
def test_private_ones_are_those_that_the_host_does_not_have(tmp_path: Path) -> None:
    host = superblocks.HostMounts()
    try:
        with private_cat(tmp_path) as child:
            assert not host.refresh()
            pid_fd = procfs.open_pid(child.pid)
            root_fd = procfs.open_root(pid_fd)
            try:
                private = superblocks.without(superblocks.read(pid_fd), host.devices)
                assert points(private) == [os.fsencode(tmp_path)]
                fd = superblocks.open_mount(root_fd, private[0], may_ask=True)
                assert os.path.samestat(os.fstat(fd), os.stat(f"/proc/{child.pid}/root{tmp_path}"))
                os.close(fd)
                # In our own root there is another directory at that place.
                own_fd = os.open("/", os.O_PATH)
                with pytest.raises(FileNotFoundError):
                    superblocks.open_mount(own_fd, private[0], may_ask=True)
                os.close(own_fd)
            finally:
                os.close(root_fd)
                os.close(pid_fd)
    finally:
        host.close()


@pytest.mark.root
@needs_root("mounts")
def test_what_the_host_mounts_later_is_noticed(tmp_path: Path) -> None:
    host = superblocks.HostMounts()
    try:
        # Others may mount something at any time.
        host.refresh()
        assert os.fsencode(tmp_path) not in points(host.visible)
        run([tool("mount"), "-t", "tmpfs", "none", tmp_path], check=True)
        try:
            device = os.stat(tmp_path).st_dev
            assert host.refresh()
            assert os.fsencode(tmp_path) in points(host.visible)
            assert b"%d:%d" % (os.major(device), os.minor(device)) in host.devices
        finally:
            run([tool("umount"), tmp_path], check=True)
        assert host.refresh()
        assert os.fsencode(tmp_path) not in points(host.visible)
    finally:
        host.close()
