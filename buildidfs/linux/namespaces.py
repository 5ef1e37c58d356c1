# SPDX-License-Identifier: Apache-2.0
"""The namespaces of a process, and the numbers of control groups.

Source: namespaces(7), ioctl_nsfs(2), cgroups(7), kernfs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct

from buildidfs.formats import proc_text
from buildidfs.linux import mounts, procfs, syscalls
from buildidfs.linux.file_ops import close_fds, closing_fd, on_error
from buildidfs.model import NamespaceSet

_LINKS = (b"ns/net", b"ns/uts", b"ns/ipc", b"ns/pid", b"ns/user", b"ns/mnt", b"ns/cgroup")

_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_NSIO = 0xB7
_NS_GET_MNTNS_ID = syscalls.ioc_read(_NSIO, 5, _U64.size)
_NS_GET_PARENT = _NSIO << 8 | 2
_NS_GET_OWNER_UID = _NSIO << 8 | 4

_CLONE_FS = 0x00000200
_CLONE_NEWNS = 0x00020000

_INIT = 1
_KTHREADD = 2


def of(pid_fd: int) -> NamespaceSet:
    """Return the namespaces of a process; ``pid_fd`` is the descriptor of its directory, see
    `procfs.open_pid`.

    A kind of namespace that the kernel does not have is 0. Raises OSError: EACCES if the process
    may not be read, ESRCH if it is gone.
    """
    inodes = [_inode(pid_fd, link) for link in _LINKS]
    if not inodes[5]:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
    return NamespaceSet(*inodes)


def mnt(pid_fd: int) -> int:
    """Return the mount namespace of a process; 0 if it is gone. Raises OSError."""
    return _inode(pid_fd, b"ns/mnt")


def user_owner(pid_fd: int) -> int:
    """Return the ID of the user who made the user namespace of a process. Raises OSError."""
    with closing_fd(os.open(b"ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)) as fd:
        return _owner_of(fd)


def _owner_of(user_fd: int) -> int:
    answer = bytearray(_U32.size)
    fcntl.ioctl(user_fd, _NS_GET_OWNER_UID, answer)
    return int(_U32.unpack(answer)[0])


@functools.cache
def own_user() -> int:
    """Return the number of our own user namespace."""
    return os.stat("/proc/self/ns/user").st_ino


def outermost_owner(pid_fd: int) -> int | None:
    """Return the user who made the user namespace of a process; None if the process is in ours.

    In nested namespaces, it is the user who made the outermost one below ours. Users in the inner
    ones have numbers that say nothing. Raises OSError as `of` does.
    """
    fds = foreign_users(pid_fd)
    try:
        return _owner_of(fds[-1]) if fds else None
    finally:
        close_fds(*fds)


def of_pid(pid: int) -> NamespaceSet:
    """Do as `of` for a pid that cannot be reused meanwhile: our own, or that of a process that
    never ends.
    """
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        return of(pid_fd)


def initial() -> NamespaceSet:
    """Return the namespaces of the host, as far as they are visible: those of its first process.

    If pid 1 may not be read, kthreadd is used, which shares the kernel's first namespaces;
    otherwise this process. Raises OSError.
    """
    try:
        return of_pid(_INIT)
    except OSError:
        pass
    try:
        pid_fd = procfs.open_pid(_KTHREADD)
    except OSError:
        return of_pid(os.getpid())
    # Inside a pid namespace the second process may be any program.
    with contextlib.suppress(OSError), closing_fd(pid_fd):
        if procfs.is_kernel_thread(pid_fd):
            return of(pid_fd)
    return of_pid(os.getpid())


def open_initial_root() -> tuple[int, int]:
    """Open the root directory of the host (O_PATH); with the `mnt_ns_id` of its mount namespace.

    It is the root of the first process; if that may not be read, our root, provided that we are in
    the host's mount namespace. Raises OSError.
    """
    try:
        return _root_of(_INIT)
    except PermissionError:
        if of_pid(os.getpid()).mnt != initial().mnt:
            raise
        return _root_of(os.getpid())


def _root_of(pid: int) -> tuple[int, int]:
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        number = mnt_ns_id(pid_fd)
        return procfs.open_root(pid_fd), number


def mnt_ns_id(pid_fd: int) -> int:
    """Return the number of a process's mount namespace, which is not reused until the next boot.

    Returns 0 if the kernel does not report it (before commit e8e43a1fcc5c, Linux 6.11). Raises
    OSError as `of` does.
    """
    with closing_fd(open_mnt(pid_fd)) as fd:
        return mnt_ns_id_of(fd)


def open_mnt(pid_fd: int) -> int:
    """Open the mount namespace of a process: fstat(2) has its number as st_ino.

    Closing the last descriptor of a namespace may take milliseconds. Raises OSError as `of` does.
    """
    return os.open(b"ns/mnt", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)


def mnt_ns_id_of(fd: int) -> int:
    """Return the `mnt_ns_id` of a namespace that `open_mnt` returned. Raises OSError."""
    answer = bytearray(_U64.size)
    try:
        fcntl.ioctl(fd, _NS_GET_MNTNS_ID, answer)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL):
            raise
        return 0
    return int(_U64.unpack(answer)[0])


class Visitor:
    """Looks into mount namespaces for one thread, which returns to its own namespace after each
    look.

    It must be used in the thread that made it; from then on this thread shares its root and its
    working directory with no other. Needs CAP_SYS_ADMIN and CAP_SYS_CHROOT: raises OSError without
    them.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        with on_error(self.close):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
            self._thread = self._keep(os.open(b"/proc/thread-self", flags))
            self._own = self._keep(open_mnt(self._thread))
            self._root = self._keep(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            syscalls.unshare(_CLONE_FS)
            self._leave()

    def close(self) -> None:
        """Close all descriptors; safe to call twice."""
        fds, self._fds = self._fds, []
        close_fds(*fds)

    def open_root(self, namespace_fd: int) -> int:
        """Open the root directory of a namespace that `open_mnt` returned (O_PATH).
        Raises OSError.
        """
        self._enter(namespace_fd)
        try:
            return os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            self._return()

    def mountinfo(self, namespace_fd: int, most: int) -> bytes:
        """Return the first ``most`` bytes of the mounts of such a namespace. Raises OSError."""
        self._enter(namespace_fd)
        try:
            # The kernel uses the namespace and root at the time of the open.
            fd = os.open(b"mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._thread)
        finally:
            self._return()
        with open(fd, "rb") as file:
            return file.read(most)

    def _keep(self, fd: int) -> int:
        self._fds.append(fd)
        return fd

    def _enter(self, namespace_fd: int) -> None:
        syscalls.setns(namespace_fd, _CLONE_NEWNS)

    def _leave(self) -> None:
        """Go back to our own namespace and to our root, which may differ from the root of the
        namespace.
        """
        self._enter(self._own)
        os.fchdir(self._root)
        os.chroot(b".")

    def _return(self) -> None:
        """Do as `_leave`. Raises RuntimeError if that fails, because the thread must not continue
        in another namespace.
        """
        try:
            self._leave()
        except OSError as error:
            raise RuntimeError("a thread cannot leave the mount namespace it looks into") from error


def foreign_users(pid_fd: int) -> list[int]:
    """Open the process's user namespace and its ancestors, from the inside outwards, without ours
    and those above.

    The list is empty for a process in our own user namespace. The caller closes them. Raises
    OSError as `of` does.
    """
    ours = os.stat("/proc/self/ns/user")
    found: list[int] = []
    fd = os.open(b"ns/user", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)
    while not os.path.samestat(os.fstat(fd), ours):
        found.append(fd)
        try:
            fd = fcntl.ioctl(fd, _NS_GET_PARENT)
        except OSError:
            return found  # EPERM: its parent is not a descendant of ours
    os.close(fd)
    return found


def _inode(pid_fd: int, link: bytes) -> int:
    try:
        text = os.readlink(link, dir_fd=pid_fd)  # "mnt:[4026531841]"
    except FileNotFoundError:
        return 0
    return int(text.partition(b"[")[2].rstrip(b"]"))


def cgroup_id(path: bytes) -> int:
    """Return the number of the control group at a path of the unified hierarchy (version 2).

    A later container of the same name has the same path, but another number. The number is not
    reused until the next boot; PERF_SAMPLE_CGROUP and bpf_get_current_cgroup_id report it, and with
    inode numbers of 64 bits it is that of the directory. The result is 0 if there is no such group
    (any more), the group is outside of our cgroup namespace, or the hierarchy is not mounted here.
    """
    status = _cgroup_status(path)
    return 0 if status is None else status.st_ino


def cgroup_owner(path: bytes) -> int | None:
    """Return the user who owns a control group, and so may make others in it; None if unknown."""
    status = _cgroup_status(path)
    return None if status is None else status.st_uid


def _cgroup_status(path: bytes) -> os.stat_result | None:
    if not path.startswith(b"/") or b".." in path.split(b"/"):
        return None
    place = _cgroup_hierarchy()
    if place is None:
        return None
    mount_point, device = place
    try:
        status = os.stat(mount_point + path, follow_symlinks=False)
    except (OSError, ValueError):
        return None
    # Another filesystem may be mounted there by now.
    return status if status.st_dev == device else None


@functools.cache
def _cgroup_hierarchy() -> tuple[bytes, int] | None:
    """Return the mount point of the whole unified hierarchy, and its device number."""
    try:
        text = mounts.mountinfo()
    except OSError:
        return None
    for mount in proc_text.mounts_in(text):
        # With another root, the mount shows only a part, or another cgroup namespace.
        if mount.fstype == b"cgroup2" and mount.root == b"/":
            return mount.mount_point, os.makedev(*mount.dev)
    return None
