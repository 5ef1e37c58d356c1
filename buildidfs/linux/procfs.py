# SPDX-License-Identifier: Apache-2.0
"""/proc/PID, through a descriptor of its directory.

A pid may be given to another process at any moment; the directory may not. Everything here is
relative to the descriptor of `open_pid`, which fails with ENOENT or ESRCH once the process is
gone, and never answers for its successor. EACCES is usual for other users' processes, and happens
to root too. Source: proc(5).
"""

from __future__ import annotations

import errno
import os

from buildidfs.linux import openat2

_CHUNK = 1 << 16
_PF_KTHREAD = 0x00200000
_OFFSET_MAX = (1 << 63) - 1  # of pread; the kernel maps nothing above


def pids() -> list[int]:
    """Return the processes that /proc shows, in ascending order. Raises OSError."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def open_pid(pid: int) -> int:
    """Pin the process: a descriptor of its directory in /proc, for the functions below.

    Raises OSError; FileNotFoundError if there is no such process.
    """
    return os.open(b"/proc/%d" % pid, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def read_text(pid_fd: int, name: bytes) -> bytes:
    """Read a text file of the process. Raises OSError."""
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)
    try:
        return _read_all(fd)
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    first = os.read(fd, _CHUNK)
    if not first:
        return b""
    chunks = [first]
    while chunk := os.read(fd, _CHUNK):
        chunks.append(chunk)
    return b"".join(chunks)


def maps(pid_fd: int) -> bytes:
    """Read the memory map as text, for `proc_text.mappings_in`; empty for a kernel thread.

    Raises OSError.
    """
    return read_text(pid_fd, b"maps")


def open_maps(pid_fd: int) -> int:
    """Open the memory map, for `procmap_query`. Raises OSError."""
    return os.open(b"maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)


def mountinfo(pid_fd: int) -> bytes:
    """Read the mounts of the process's mount namespace below its root. Raises OSError."""
    return read_text(pid_fd, b"mountinfo")


def cgroup(pid_fd: int) -> bytes:
    """Read the cgroup file, for formats.container.cgroup. Raises OSError."""
    return read_text(pid_fd, b"cgroup")


def comm(pid_fd: int) -> bytes:
    """Return the name of the process: at most 15 bytes, any bytes. Raises OSError."""
    return read_text(pid_fd, b"comm").removesuffix(b"\n")


def exe(pid_fd: int) -> bytes:
    """Return the path of the executable in the process's root, with " (deleted)" if it is.

    Raises OSError; FileNotFoundError for a kernel thread.
    """
    return os.readlink(b"exe", dir_fd=pid_fd)


def is_stopped(pid: int) -> bool:
    """True if a signal or a tracer has stopped the process; False if it runs, or is gone."""
    try:
        pid_fd = open_pid(pid)
    except OSError:
        return False
    try:
        return _stat_fields(pid_fd)[0] in (b"T", b"t")
    except OSError:
        return False
    finally:
        os.close(pid_fd)


def is_kernel_thread(pid_fd: int) -> bool:
    """Return True for a thread of the kernel, which maps no files. Raises OSError."""
    return bool(int(_stat_fields(pid_fd)[6]) & _PF_KTHREAD)


def _stat_fields(pid_fd: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the third on: the second, comm, may hold anything."""
    fields = read_text(pid_fd, b"stat").rpartition(b")")[2].split()
    if len(fields) < 20:
        raise _gone()
    return fields


def _gone() -> OSError:
    return OSError(errno.ESRCH, os.strerror(errno.ESRCH))


def uids(pid_fd: int) -> tuple[int, int, int, int]:
    """Real, effective, saved and filesystem user ID, in our user namespace. Raises OSError."""
    real, effective, saved, filesystem = _status_numbers(pid_fd, b"Uid:")[:4]
    return real, effective, saved, filesystem


def groups(pid_fd: int) -> list[int]:
    """The supplementary groups, in our user namespace. Raises OSError."""
    return _status_numbers(pid_fd, b"Groups:")


def innermost_pid(pid_fd: int) -> int:
    """The number that the process has in its own PID namespace. Raises OSError."""
    return _status_numbers(pid_fd, b"NSpid:")[-1]


def start_ticks(pid_fd: int) -> int:
    """When the process began, in clock ticks since the boot of the host. Raises OSError."""
    return int(_stat_fields(pid_fd)[19])


def root_user(pid_fd: int) -> int:
    """The user who is root in the user namespace of the process; -1 if none is. Raises OSError."""
    for line in read_text(pid_fd, b"uid_map").splitlines():
        inside, outside, _ = (int(number) for number in line.split())
        if inside == 0:
            return outside
    return -1


def _status_numbers(pid_fd: int, key: bytes) -> list[int]:
    for line in read_text(pid_fd, b"status").splitlines():
        if line.startswith(key):
            return [int(number) for number in line.split()[1:]]
    raise _gone()


def map_file_name(start: int, end: int) -> bytes:
    """Return the name of the link to the file mapped there, in the process's directory."""
    return b"map_files/%x-%x" % (start, end)


def open_map_file(pid_fd: int, start: int, end: int) -> int:
    """Open for reading exactly the file that is mapped at ``start`` to ``end``.

    It works when the file is deleted, replaced, unmounted or hidden under another mount. Only a
    regular file is opened, else OSError(EINVAL); names in /dev/ are for the caller to skip.

    Raises OSError: ENOENT if there is no such mapping (any more), EPERM or EACCES without
    CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN, EACCES for another user's FUSE filesystem.
    """
    # O_PATH pins the inode before it is judged: between a stat and an open of the link the
    # process could map a device in its place.
    name = map_file_name(start, end)
    path_fd = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=pid_fd)
    try:
        return openat2.reopen_regular(path_fd)
    finally:
        os.close(path_fd)


def open_root(pid_fd: int) -> int:
    """Pin the root directory of the process (O_PATH), for `openat2.open_in_root`.

    Raises OSError.
    """
    return os.open(b"root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)


def read_memory(pid_fd: int, address: int, size: int) -> bytes:
    """Read up to ``size`` bytes of the process's memory; fewer where the mapping ends.

    Raises OSError: EIO if nothing is mapped at ``address``, EACCES without CAP_SYS_PTRACE.
    """
    if not 0 <= address <= _OFFSET_MAX:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    fd = os.open(b"mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)
    try:
        return os.pread(fd, size, address)
    finally:
        os.close(fd)
