# SPDX-License-Identifier: Apache-2.0
"""Which filesystems may be watched for what is opened on them, and how they are got at.

A superblock is *private* when the host's mount namespace does not have it: it belongs to
containers, and is gone with them. Everything here is found out without asking a filesystem that
may not answer.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import TYPE_CHECKING, Final

from buildidfs.capture import patience
from buildidfs.formats import mountinfo
from buildidfs.linux import mounts, openat2

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from buildidfs.formats.mountinfo import MountInfo

# Besides those on block devices. A list of what may be watched, not of what may not: proc, sysfs,
# cgroup, devpts, mqueue and their like hold no programs, refuse permission events or have side
# effects when opened; the kernel gets new ones of that sort with each version; and whatever a
# server or a FUSE process stands behind, our own mounts first of all, may keep those waiting
# who open a file there, which reading an event does.
_WITHOUT_DEVICE: Final = frozenset(
    (
        b"aufs", b"bcachefs", b"btrfs", b"jffs2", b"overlay", b"ramfs", b"rootfs", b"tmpfs",
        b"ubifs", b"zfs",
    )
)  # fmt: skip

_LAYERS: Final = (b"lowerdir", b"upperdir", b"datadir")
_CHUNK: Final = 1 << 16
# Bytes of a container's mountinfo that are read: about 2000 mounts. Somebody waits meanwhile.
_MOST: Final = 1 << 18
_MOST_OF_HOST: Final = 1 << 24


class HostMounts:
    """The mounts of the host, as they are now."""

    def __init__(self) -> None:
        self._fds = [os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)]
        # The host's own, should we live in a namespace of ours: a service may.
        with contextlib.suppress(OSError):
            self._fds.append(os.open("/proc/1/mountinfo", os.O_RDONLY | os.O_CLOEXEC))
        self._changes = select.poll()
        for fd in self._fds:
            self._changes.register(fd, select.POLLPRI)
        self._read()

    def close(self) -> None:
        """Let go of the files."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def refresh(self) -> bool:
        """Notice what was mounted meanwhile (proc_pid_mounts(5) says how); whether anything was."""
        if not self._changes.poll(0):
            return False
        self._read()
        return True

    def _read(self) -> None:
        texts = []
        for fd in self._fds:
            os.lseek(fd, 0, os.SEEK_SET)
            texts.append(_read(fd, _MOST_OF_HOST))
        self.visible: list[MountInfo] = list(mountinfo.parse(texts[0]))
        """Those that we can get at by their path."""
        self.devices = frozenset(map(_device, b"".join(texts).split(b"\n")))
        """Of all superblocks of the host: ``254:0``, as mountinfo has it."""
        self.slow_points = slow_points(self.visible)
        """Where filesystems are mounted that may not answer."""


def read(pid_fd: int) -> bytes:
    """The mounts of a process as text, of somebody who has very many only the first.

    Raises OSError.
    """
    fd = os.open(b"mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)
    try:
        return _read(fd, _MOST)
    finally:
        os.close(fd)


def _read(fd: int, most: int) -> bytes:
    chunks, size = [], 0
    while size < most and (chunk := os.read(fd, _CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    return b"".join(chunks)


def without(text: bytes, devices: Container[bytes]) -> list[MountInfo]:
    """The mounts in a mountinfo text that are of none of these superblocks.

    Most lines of a container's are of the host's superblocks; they are not even parsed.
    """
    lines = [line for line in text.split(b"\n") if _device(line) not in devices]
    return list(mountinfo.parse(b"\n".join(lines)))


def watchable(candidates: Iterable[MountInfo], slow: Iterable[bytes]) -> list[MountInfo]:
    """Those of the mounts that may hold programs, and answer.

    ``slow`` are the places of filesystems that do not: an overlay of them does not either.
    """
    points = tuple(slow)
    return [
        mount
        for mount in candidates
        if (mount.dev[0] or mount.fstype in _WITHOUT_DEVICE)
        and not is_slow(mount)
        and not (mount.fstype == b"overlay" and _rests_on(mount, points))
    ]


def is_slow(mount: MountInfo) -> bool:
    """Whether somebody has to answer before a file there can be opened."""
    return patience.is_slow_type(mount.fstype) or mount.fstype == mounts.FILESYSTEM_TYPE


def slow_points(all_mounts: Iterable[MountInfo]) -> list[bytes]:
    """Where filesystems are mounted that may not answer."""
    return [mount.mount_point for mount in all_mounts if is_slow(mount)]


def open_mount(root_fd: int, mount: MountInfo, *, may_ask: bool) -> int:
    """Pin the root of a mount (O_PATH) of the namespace and root that ``root_fd`` belongs to.

    ``may_ask`` says that no filesystem on the way needs anybody's answer. Nothing of the path is
    resolved outside that root, and what is mounted over it is not taken for it.
    Raises OSError; FileNotFoundError if the mount is not to be seen.
    """
    try:
        fd = openat2.open_cached_in_root(root_fd, mount.mount_point)
    except OSError:
        if not may_ask:
            raise
        fd = openat2.open_in_root(root_fd, mount.mount_point, os.O_PATH)
    try:
        if _mount_id(fd) != mount.mount_id:
            raise FileNotFoundError(mount.mount_point)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _mount_id(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line.split()[1])
    return -1


def _device(line: bytes) -> bytes:
    fields = line.split(b" ", 3)
    return fields[2] if len(fields) == 4 else b""


def _rests_on(mount: MountInfo, points: tuple[bytes, ...]) -> bool:
    """Whether a layer of an overlay lies at or below one of these places.

    Paths are those of whoever mounted it: mostly the host's, sometimes relative to a directory
    that we do not know. Of those the end is compared.
    """
    if not points:
        return False
    for item in mount.super_options.split(b","):
        key, _, value = item.partition(b"=")
        if key.rstrip(b"+") not in _LAYERS:
            continue
        for layer in mountinfo.unescape(value).split(b":"):
            for point in points:
                if layer == point or layer.startswith(point.rstrip(b"/") + b"/"):
                    return True
                if not layer.startswith(b"/") and layer and point.endswith(b"/" + layer):
                    return True
    return False
