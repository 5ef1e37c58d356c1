# SPDX-License-Identifier: Apache-2.0
"""Mounts and their filesystems: list them, tell their types, and unmount.

Source: proc(5), umount(2), statfs(2), statmount(2), include/uapi/linux/magic.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
from typing import Final, NamedTuple

from buildidfs.formats import proc_text
from buildidfs.linux import machine, syscalls

FILESYSTEM_TYPE = b"fuse.buildidfs"

SERVER_GONE: Final = frozenset((errno.ENOTCONN, errno.ECONNABORTED))
"""Errors of statfs(2) for a FUSE mount whose server has ended."""

MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

OVERLAY_MAGIC: Final = 0x794C7630
PIPE_MAGIC: Final = 0x50495045

_FUSE_MAGIC: Final = 0x65735546

# Filesystems whose files are on other machines, or on the host of a virtual machine: types with
# their magic numbers, from linux/magic.h and the filesystems' own headers. OpenAFS and the kernel's
# AFS have the same type. The driver of FUSE serves virtiofs, too, but without its mount options.
_REMOTE: Final = {
    b"nfs": (0x6969,), b"nfs4": (0x6969,), b"smbfs": (0x517B,), b"cifs": (0xFF534D42,),
    b"smb3": (0xFE534D42,), b"ceph": (0x00C36400,), b"9p": (0x01021997,),
    b"afs": (0x5346414F, 0x6B414653), b"coda": (0x73757245,), b"lustre": (0x0BD00BD0,),
    b"gfs2": (0x01161970,), b"ocfs2": (0x7461636F,), b"beegfs": (0x19830326,),
    b"gpfs": (0x47504653,), b"orangefs": (0x20030528,), b"virtiofs": (_FUSE_MAGIC,),
    b"vboxsf": (0x786F4256,),
}  # fmt: skip

SERVER_MAGICS: Final = frozenset(
    (_FUSE_MAGIC, *(magic for magics in _REMOTE.values() for magic in magics))
)
"""The magic numbers of the types for which `needs_server` is True."""

# These may report no blocks although they store files: tmpfs, ramfs, hugetlbfs, the layers of an
# overlay, and files of a server.
_WITHOUT_BLOCKS: Final = SERVER_MAGICS | {0x01021994, 0x858458F6, 0x958458F6, OVERLAY_MAGIC}
_EFIVARFS: Final = 0xDE5E81E4  # reports the memory of the firmware as blocks

_INITIAL_MOUNTINFO: Final = "/proc/1/mountinfo"

# struct statfs begins with f_type, a word; its size is below this on every architecture.
_STATFS_SIZE: Final = 256

_SYS_STATMOUNT: Final = 457  # the same on every architecture but alpha
_STATMOUNT_SB_BASIC: Final = 0x01
_STATMOUNT_MNT_ROOT: Final = 0x08
_STATMOUNT_FS_TYPE: Final = 0x20
_STATMOUNT_REQUEST: Final = struct.Struct("=IIQQQ")  # size, spare, mount, mask, mount namespace
_STATMOUNT_ANSWER: Final = struct.Struct(
    "=4x4xQIIQ"  # size, options; mask, major, minor, magic
    "4xI 64x I"  # flags, type; numbers of mounts, propagation; root
)
_STATMOUNT_SIZE: Final = 512  # strings follow
_STATMOUNT_STRINGS: Final = 8192

_umount2 = syscalls.libc.umount2
_umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_umount2.restype = ctypes.c_int

_fstatfs = syscalls.libc.fstatfs
_fstatfs.argtypes = (ctypes.c_int, ctypes.c_void_p)
_fstatfs.restype = ctypes.c_int


def mountinfo() -> bytes:
    """Return the mounts that this process sees, as text; `procfs.mountinfo` has those of others.

    Raises OSError.
    """
    with open("/proc/self/mountinfo", "rb") as file:
        return file.read()


def initial_mountinfo() -> bytes:
    """Return the mounts that process 1 sees, as text; our own if that may not be read.

    Raises OSError.
    """
    try:
        with open(_INITIAL_MOUNTINFO, "rb") as file:
            return file.read()
    except OSError:
        return mountinfo()


def how_to_get_fuse() -> str:
    """Return a clause on how to get a missing /dev/fuse."""
    try:
        with open("/proc/filesystems", "rb") as file:
            is_loaded = b"nodev\tfuse" in file.read().splitlines()
    except OSError:
        is_loaded = False
    if machine.is_contained():
        load = "" if is_loaded else "modprobe fuse on the host, then "
        return f"{load}give the container --device /dev/fuse --cap-add SYS_ADMIN"
    return "mknod -m 666 /dev/fuse c 10 229" if is_loaded else "load the module with modprobe fuse"


def is_fuse(fstype: bytes) -> bool:
    """Return True for a type in mountinfo if a process serves such filesystems through /dev/fuse;
    this includes ours.
    """
    return fstype.partition(b".")[0] in (b"fuse", b"fuseblk")


def needs_server(fstype: bytes) -> bool:
    """Return True for a type in mountinfo if a process or a machine serves such filesystems."""
    return fstype in _REMOTE or is_fuse(fstype)


def mount_id(fd: int) -> int:
    """Return the number in mountinfo of the mount that ``fd`` was opened on; O_PATH suffices.

    The result is -1 if the kernel does not report it. The number means no other mount as long as
    the file is open. Raises OSError.
    """
    with open(f"/proc/self/fdinfo/{fd}", "rb") as lines:
        return next((int(line[7:]) for line in lines if line.startswith(b"mnt_id:")), -1)


def own_mount_devices(text: bytes) -> set[tuple[int, int]]:
    """Return the (major, minor) of every mount of buildidfs in a mountinfo text.

    Capture skips files on them, which are in a store already. Malformed lines are skipped.
    """
    mark = b" - %b " % FILESYSTEM_TYPE  # blanks within fields are escaped
    if mark not in text:
        return set()
    lines = (line for line in text.split(b"\n") if mark in line)
    return {mount.dev for mount in proc_text.mounts_in(b"\n".join(lines))}


def umount2(path: bytes, flags: int = 0) -> None:
    """Unmount ``path``; with MNT_DETACH even while it is in use.

    Raises OSError: EBUSY, EINVAL if nothing is mounted there, EPERM without CAP_SYS_ADMIN.
    """
    if _umount2(syscalls.check_path(path), flags):
        raise syscalls.last_error(path)


def set_read_ahead(st_dev: int, kib: int) -> None:
    """Set the read-ahead of the filesystem with a device number, in KiB.

    Raises OSError: EACCES without root, ENOENT if the filesystem has no read-ahead of its own.
    Source: Documentation/ABI/testing/sysfs-class-bdi.
    """
    path = f"/sys/class/bdi/{os.major(st_dev)}:{os.minor(st_dev)}/read_ahead_kb"
    with open(path, "wb", buffering=0) as file:
        file.write(b"%d\n" % kib)


def filesystem_magic(fd: int) -> int:
    """Return the magic number of the filesystem of an open file (O_PATH suffices).

    The call may ask the server of the filesystem. Raises OSError.
    """
    answer = ctypes.create_string_buffer(_STATFS_SIZE)
    if _fstatfs(fd, ctypes.addressof(answer)):
        raise syscalls.last_error()
    return ctypes.c_long.from_buffer(answer).value & 0xFFFFFFFF


def stores_files(fd: int, status: os.stat_result | None = None) -> bool:
    """Return True if the filesystem of an open file (O_PATH suffices) can store files of users.

    procfs, sysfs, tracefs and all other interfaces of the kernel cannot, although their files look
    regular: they are on no block device and have no blocks (simple_statfs in fs/libfs.c). A read
    there may have any effect; one of trace_pipe or /proc/kmsg takes the text from other readers.

    ``status`` is that of ``fd``, if the caller has it. The call may ask the server of the
    filesystem. Raises OSError.
    """
    status = status or os.fstat(fd)
    if os.major(status.st_dev):
        return True  # on a block device
    try:
        magic = filesystem_magic(fd)
    except OSError as error:
        # Only the server of a FUSE filesystem can do without an answer.
        if error.errno != errno.ENOSYS:
            raise
        return True
    if magic == OVERLAY_MAGIC and stat.S_ISREG(status.st_mode):
        # Even an unprivileged user can mount an overlay with sysfs as a layer.
        return status.st_blocks > 0
    return magic in _WITHOUT_BLOCKS or (magic != _EFIVARFS and os.fstatvfs(fd).f_blocks > 0)


def mount_magic(mount: int, namespace: int = 0) -> int:
    """Return the magic number of the filesystem of a mount; no server is asked.

    ``mount`` is a number of `inodes.unique_mount_id`, ``namespace`` one of `namespaces.mnt_ns_id`,
    or 0 for our own. Raises OSError: ENOENT if it is not mounted there, ENOSYS before Linux 6.8
    (commit 46eae99ef7330), and EINVAL for other namespaces before 6.11 (commit 71aacb4c8c76b).
    """
    found: int = _statmount(mount, namespace, _STATMOUNT_SB_BASIC)[1][3]
    return found


class ShownMount(NamedTuple):
    """A mount: (major, minor) of its superblock, the directory that it shows, its type.

    ``root`` is a path within the filesystem, as in `formats.proc_text.MountInfo`; ``fstype`` has no
    subtype.
    """

    dev: tuple[int, int]
    root: bytes
    fstype: bytes


def placed(mount: int, namespace: int) -> ShownMount:
    """Return facts about one mount, without reading all of mountinfo.

    Arguments and errors are those of `mount_magic`; also EOVERFLOW if the path is too long.
    """
    wanted = _STATMOUNT_SB_BASIC | _STATMOUNT_MNT_ROOT | _STATMOUNT_FS_TYPE
    answer, fields = _statmount(mount, namespace, wanted, _STATMOUNT_STRINGS)
    mask, major, minor, _, fstype, root = fields
    if mask & wanted != wanted:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def text(at: int) -> bytes:
        begin = _STATMOUNT_SIZE + at
        return answer[begin : answer.index(b"\0", begin)]

    return ShownMount((major, minor), text(root), text(fstype))


def _statmount(
    mount: int, namespace: int, mask: int, strings: int = 0
) -> tuple[bytes, tuple[int, ...]]:
    """Call statmount(2) with room for ``strings`` bytes of strings. Raises OSError."""
    size = _STATMOUNT_REQUEST.size
    request = ctypes.create_string_buffer(
        _STATMOUNT_REQUEST.pack(size, 0, mount, mask, namespace), size
    )
    answer = ctypes.create_string_buffer(_STATMOUNT_SIZE + strings)
    syscalls.syscall(
        _SYS_STATMOUNT, ctypes.addressof(request), ctypes.addressof(answer), len(answer), 0
    )
    return answer.raw if strings else b"", _STATMOUNT_ANSWER.unpack_from(answer)


class InitialDevices:
    """The filesystems that process 1 sees, by their device numbers. For one thread.

    Mountinfo is read again when the kernel reports a change of the mount table (POLLPRI, see
    proc_pid_mounts(5)). A mount shows one filesystem as long as it exists, so no change of devices
    is missed. Paths in mountinfo may be outdated, because the kernel does not report the rename of
    a directory.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._changes = select.poll()
        self._devices: frozenset[bytes] = frozenset()

    def has(self, dev: tuple[int, int]) -> bool:
        """Return True if the filesystem with this (major, minor) is mounted. Raises OSError."""
        if self._fd < 0:
            self._fd = _open_initial_mountinfo()
            self._changes.register(self._fd, select.POLLPRI)
            self._read()
        elif self._changes.poll(0):
            self._read()
        return b"%d:%d" % dev in self._devices

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self._fd >= 0:
            self._changes.unregister(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        with open(self._fd, "rb", closefd=False) as file:
            file.seek(0)
            rows = (line.split(b" ", 3) for line in file.read().split(b"\n"))
            self._devices = frozenset(row[2] for row in rows if len(row) > 2)


def _open_initial_mountinfo() -> int:
    flags = os.O_RDONLY | os.O_CLOEXEC
    try:
        return os.open(_INITIAL_MOUNTINFO, flags)
    except OSError:
        return os.open("/proc/self/mountinfo", flags)
