# SPDX-License-Identifier: Apache-2.0
"""/proc/PID, through a descriptor of its directory.

The kernel may reuse a pid at any moment, but a descriptor of the directory stays with its process.
All functions take the descriptor that `open_pid` returns: once the process is gone, they fail with
ENOENT or ESRCH, and never show a later process with the same pid. EACCES is usual for processes of
other users, and even root may get it. Source: proc(5).

The first thread of a process may end before the others. Its directory then has no maps, map_files,
exe, root, namespaces and open files any more, but those of the other threads do. `open_pid` returns
the directory of such a thread, so all readers of a process go through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Iterator

from buildidfs.linux import inodes, syscalls
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Mapping

MOST_TEXT = 64 << 20
"""The most bytes of mappings or mounts of a process; any user can make many long ones."""

GONE = frozenset((errno.ENOENT, errno.ESRCH))
"""Errors for a process that has ended, and for a link of it that leads nowhere any more."""

_CHUNK = 1 << 16
_PF_KTHREAD = 0x00200000
_OFFSET_MAX = (1 << 63) - 1  # for pread; the kernel maps nothing above
_NO_MAPPING = _OFFSET_MAX + 1
_PAGE = 4096


_GROUP_PROCESSES = "cgroup.procs"


def pids() -> list[int]:
    """Return the processes in /proc, in ascending order. Raises OSError."""
    return sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())


def pids_in_cgroup(directory: str) -> list[int]:
    """Return the processes in a control group and in those below it, in ascending order; see
    cgroups(7). Groups that are gone have none.
    """
    found: set[int] = set()
    for group, _, names in os.walk(directory):
        if _GROUP_PROCESSES in names:
            path = os.path.join(group, _GROUP_PROCESSES)
            with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
                found.update(int(line) for line in file)
    return sorted(found - {0})  # 0: of another PID namespace


def open_pid(pid: int) -> int:
    """Pin the process: return a descriptor of its directory in /proc, for the functions below.

    If the first thread has ended, the directory is that of the oldest thread that lives. Waits for
    no process. Raises OSError; FileNotFoundError if there is no such process.
    """
    fd = _open_task(pid)
    if is_empty(fd):
        with contextlib.suppress(OSError):
            for thread in _threads(fd):
                if thread != pid and (other := _open_thread(thread, pid)) >= 0:
                    os.close(fd)
                    return other
    return fd


def _open_task(number: int) -> int:
    # The directories of threads are not listed in /proc, but have map_files, which those in
    # /proc/PID/task lack.
    return os.open(b"/proc/%d" % number, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def is_empty(pid_fd: int) -> bool:
    """Return True for a thread without memory: one that has ended, or one of the kernel."""
    try:
        exe(pid_fd)
    except OSError as error:
        return error.errno in GONE
    return False


def _threads(pid_fd: int) -> list[int]:
    """Return the threads of a process, the oldest first; some may have ended. Raises OSError."""
    fd = os.open(b"task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)
    with closing_fd(fd):
        return [int(name) for name in os.listdir(fd)]


def _open_thread(thread: int, pid: int) -> int:
    """Return the directory of a living thread of process ``pid``, or -1."""
    try:
        fd = _open_task(thread)
    except OSError:
        return -1
    with contextlib.suppress(OSError):
        if not is_empty(fd) and _process_of(fd) == pid:
            return fd
    os.close(fd)
    return -1


def _process_of(pid_fd: int) -> int:
    return _status_numbers(pid_fd, b"Tgid:")[0]


def read_text(pid_fd: int, name: bytes) -> bytes:
    """Read a text file of the process. Raises OSError: EFBIG if it is longer than `MOST_TEXT`."""
    with closing_fd(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)) as fd:
        chunks, size = [], 0
        while size <= MOST_TEXT and (chunk := os.read(fd, _CHUNK)):
            size += len(chunk)
            chunks.append(chunk)
        if size > MOST_TEXT:
            chunks.clear()  # else the traceback of the error holds them
        _check_size(size)
        return b"".join(chunks)


def _check_size(size: int) -> None:
    if size > MOST_TEXT:
        raise OSError(errno.EFBIG, "it has more mappings or mounts than are read")


def open_files(pid_fd: int) -> list[bytes]:
    """Return the paths of the files that a process has open, as the kernel shows them.

    Raises OSError.
    """
    fd = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)
    with closing_fd(fd):
        found = []
        for name in os.listdir(fd):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(os.fsencode(name), dir_fd=fd))
        return found


def maps(pid_fd: int) -> bytes:
    """Read the memory map as text, for `proc_text.mappings_in`; empty for a kernel thread.

    Raises OSError.
    """
    return read_text(pid_fd, b"maps")


def open_maps(pid_fd: int) -> int:
    """Open the memory map, for `executable_mappings` and the like. Raises OSError."""
    return os.open(b"maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)


def mountinfo(pid_fd: int) -> bytes:
    """Read the mounts that the process sees: those of its mount namespace below its root. Raises
    OSError.
    """
    return read_text(pid_fd, b"mountinfo")


def cgroup(pid_fd: int) -> bytes:
    """Read the cgroup file, for formats.container.cgroup. Raises OSError."""
    return read_text(pid_fd, b"cgroup")


def comm(pid_fd: int) -> bytes:
    """Return the name of the process, which is that of its first thread even if this has ended: at
    most 15 bytes, any bytes. Raises OSError.
    """
    return _of_first_thread(pid_fd, b"comm").removesuffix(b"\n")


def thread_name(thread: int) -> bytes:
    """Return the name of a thread as `comm` does. Raises OSError."""
    with open(b"/proc/%d/comm" % thread, "rb") as file:
        return file.read().removesuffix(b"\n")


def _of_first_thread(pid_fd: int, name: bytes) -> bytes:
    return read_text(pid_fd, b"task/%d/%b" % (_process_of(pid_fd), name))


def auxiliary(pid_fd: int) -> bytes:
    """Read the auxiliary vector of the process, in words of its own size. Raises OSError."""
    return read_text(pid_fd, b"auxv")


def exe(pid_fd: int) -> bytes:
    """Return the path of the executable in the process's root, followed by " (deleted)" if the file
    is deleted.

    Raises OSError; FileNotFoundError for a kernel thread.
    """
    return os.readlink(b"exe", dir_fd=pid_fd)


def is_stopped(pid: int) -> bool:
    """True if a signal or a tracer has stopped the process; False if it runs, or is gone."""
    try:
        pid_fd = open_pid(pid)
    except OSError:
        return False
    with closing_fd(pid_fd):
        try:
            return _stat_fields(read_text(pid_fd, b"stat"))[0] in (b"T", b"t")
        except OSError:
            return False


def is_kernel_thread(pid_fd: int) -> bool:
    """Return True for a kernel thread, which maps no files. Raises OSError."""
    return bool(int(_stat_fields(read_text(pid_fd, b"stat"))[6]) & _PF_KTHREAD)


def _stat_fields(text: bytes) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the third on; the second, comm, may contain any
    bytes. Raises OSError if the text is empty, because the process is gone.
    """
    fields = text.rpartition(b")")[2].split()
    if len(fields) < 20:
        raise _gone()
    return fields


def _gone() -> OSError:
    return OSError(errno.ESRCH, os.strerror(errno.ESRCH))


def uids(pid_fd: int) -> tuple[int, int, int, int]:
    """Return real, effective, saved and filesystem user ID, in our user namespace.
    Raises OSError.
    """
    real, effective, saved, filesystem = _status_numbers(pid_fd, b"Uid:")[:4]
    return real, effective, saved, filesystem


def groups(pid_fd: int) -> list[int]:
    """Return the supplementary groups, in our user namespace. Raises OSError."""
    return _status_numbers(pid_fd, b"Groups:")


def innermost_pid(pid_fd: int) -> int:
    """Return the process ID in the process's own PID namespace. Raises OSError."""
    return _status_numbers(pid_fd, b"NStgid:")[-1]


def start_ticks(pid_fd: int) -> int:
    """Return the start time of the process in clock ticks since boot. Raises OSError."""
    return int(_stat_fields(_of_first_thread(pid_fd, b"stat"))[19])


def root_user(pid_fd: int) -> int:
    """Return the user who is root in the user namespace of the process; -1 if none is. Raises
    OSError.
    """
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
    """Return the name, in the process's directory, of the link to the file that is mapped at these
    addresses.
    """
    return b"map_files/%x-%x" % (start, end)


def await_memory_map(pid_fd: int) -> None:
    """Wait until the memory map of the process can be read, so that a signal can end the wait.

    Call it before a lookup in map_files. If two processes look the same name up while the map is
    locked, the second one waits for the first, and not even SIGKILL ends that wait (fs/dcache.c
    d_wait_lookup). The name here belongs to this thread, and lies where no process has a mapping.
    """
    start = _NO_MAPPING + threading.get_native_id() * _PAGE
    with contextlib.suppress(OSError):  # ENOENT, or what the lookup after it reports
        os.stat(map_file_name(start, start + _PAGE), dir_fd=pid_fd, follow_symlinks=False)


def open_map_file(pid_fd: int, start: int, end: int) -> int:
    """Open for reading exactly the file that is mapped at ``start`` to ``end``.

    This works even if the file is deleted, replaced, unmounted or hidden under another mount. If
    the file is not a regular one, OSError(EINVAL) is raised; the caller must skip names in /dev/.

    Raises OSError: ENOENT if there is no such mapping (any more), EPERM or EACCES without
    CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN, EACCES for another user's FUSE filesystem.
    """
    # O_PATH pins the inode before the check: between a stat and an open of the link the process
    # could map a device in its place.
    name = map_file_name(start, end)
    with closing_fd(os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=pid_fd)) as path_fd:
        return inodes.reopen_regular(path_fd)


def open_root(pid_fd: int) -> int:
    """Pin the root directory of the process (O_PATH), for `inodes.open_in_root`.

    Raises OSError.
    """
    return os.open(b"root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)


def read_memory(pid_fd: int, address: int, size: int) -> bytes:
    """Read up to ``size`` bytes of the process's memory; fewer if the mapping ends.

    Raises OSError: EIO if nothing is mapped at ``address``, EACCES without CAP_SYS_PTRACE.
    """
    with closing_fd(open_memory(pid_fd)) as fd:
        return memory_at(fd, address, size)


def open_memory(pid_fd: int) -> int:
    """Open the memory of the process, for `memory_at`. Raises OSError."""
    return os.open(b"mem", os.O_RDONLY | os.O_CLOEXEC, dir_fd=pid_fd)


def memory_at(memory_fd: int, address: int, size: int) -> bytes:
    """Read memory as `read_memory` does. Raises OSError."""
    if not 0 <= address <= _OFFSET_MAX:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return os.pread(memory_fd, size, address)


# PROCMAP_QUERY (commit ed5d583a88a9, Linux 6.11): the kernel skips data and anonymous memory, and
# returns unescaped names; three to four times as fast as the text. struct procmap_query of
# linux/fs.h: size, query_flags, query_addr, vma_start, vma_end, vma_flags, vma_page_size,
# vma_offset, inode; dev_major, dev_minor, vma_name_size, build_id_size; vma_name_addr,
# build_id_addr.
_QUERY = struct.Struct("=9Q 4I 2Q")
_ANSWER = struct.Struct("=24x QQ 16x QQ III 4x 16x")
_ADDRESS = struct.Struct("=Q")
_ADDRESS_AT = 16
_SIZE = struct.Struct("=I")
_NAME_SIZE_AT = 80
_NAME_ADDRESS_AT = 88
_BUILD_ID_SIZE_AT = 84

_REQUEST = syscalls.ioc_read_write(ord("f"), 17, _QUERY.size)

_EXECUTABLE = 0x04
_COVERING_OR_NEXT = 0x10
_FILE_BACKED = 0x20

_NAME_MAX = 4096
_BUILD_ID_MAX = 20  # BUILD_ID_SIZE_MAX of linux/buildid.h
_ADDRESS_LIMIT = 1 << 64
_DELETED = b" (deleted)"


def executable_mappings(maps_fd: int, *, only_files: bool) -> Iterator[Mapping]:
    """Yield the executable mappings by ascending address; with ``only_files`` those of files.

    Anonymous memory has the inode number 0. ``maps_fd`` is a result of `procfs.open_maps`. A name
    longer than 4095 bytes is not available: such a mapping has an empty path. Mappings made
    meanwhile may or may not be yielded.

    Raises OSError: ENOTTY if the kernel lacks the query, ESRCH if the process is gone, EFBIG if the
    names are longer than `MOST_TEXT` together.
    """
    return _mappings(maps_fd, _EXECUTABLE | _FILE_BACKED if only_files else _EXECUTABLE)


def file_mappings(maps_fd: int) -> Iterator[Mapping]:
    """Yield all mappings of files as `executable_mappings` does; ``executable`` is False for
    each.
    """
    return _mappings(maps_fd, _FILE_BACKED)


def _mappings(maps_fd: int, flags: int) -> Iterator[Mapping]:
    executable = bool(flags & _EXECUTABLE)
    size = 0
    for start, end, offset, inode, major, minor, name in _query(maps_fd, flags):
        size += len(name)
        _check_size(size)
        deleted = name.endswith(_DELETED)
        if deleted:
            name = name[: -len(_DELETED)]
        yield Mapping(start, end, executable, offset, (major, minor), inode, name, deleted)


def executable_file_mappings(maps_fd: int) -> Iterator[Mapping]:
    """Yield the `executable_mappings` of files."""
    return executable_mappings(maps_fd, only_files=True)


def vdso(maps_fd: int) -> tuple[int, int] | None:
    """Return the start and end of the vDSO of the process, or None if it has none.

    Raises OSError as `executable_file_mappings` does.
    """
    for start, end, _offset, _inode, _major, _minor, name in _query(maps_fd, _EXECUTABLE):
        if name == b"[vdso]":
            return start, end
    return None


def executable_at(maps_fd: int, address: int) -> tuple[int, int] | None:
    """Return start and end of the executable file mapping that has ``address``, or None.

    Raises OSError as `executable_file_mappings` does.
    """
    for start, end, *_ in _query(maps_fd, _EXECUTABLE | _FILE_BACKED, address):
        return (start, end) if start <= address else None
    return None


def build_id(maps_fd: int, address: int) -> bytes | None:
    """Return the build ID of the file that is mapped at ``address``, as the kernel reads it.

    Returns None if nothing is mapped there, or if the file has no build ID of 1 to 20 bytes in a
    note with a program header. The kernel may have to ask the filesystem for the page.

    Raises OSError as `executable_file_mappings` does.
    """
    buffer = ctypes.create_string_buffer(_BUILD_ID_MAX)
    query = bytearray(_QUERY.size)
    _QUERY.pack_into(
        query, 0,
        _QUERY.size, 0, address, 0, 0, 0, 0, 0, 0,
        0, 0, 0, _BUILD_ID_MAX,
        0, ctypes.addressof(buffer),
    )  # fmt: skip
    try:
        fcntl.ioctl(maps_fd, _REQUEST, query)
    except FileNotFoundError:
        return None
    (size,) = _SIZE.unpack_from(query, _BUILD_ID_SIZE_AT)
    return buffer.raw[:size] or None


_Answer = tuple[int, int, int, int, int, int, bytes]


def _query(maps_fd: int, flags: int, address: int = 0) -> Iterator[_Answer]:
    """Query one mapping after another; the buffers are reused from call to call."""
    name_buffer = ctypes.create_string_buffer(_NAME_MAX)
    name_view = memoryview(name_buffer).cast("B")
    query = bytearray(_QUERY.size)
    _QUERY.pack_into(
        query, 0,
        _QUERY.size, flags | _COVERING_OR_NEXT, 0, 0, 0, 0, 0, 0, 0,
        0, 0, 0, 0,
        ctypes.addressof(name_buffer), 0,
    )  # fmt: skip
    ioctl = fcntl.ioctl
    while address < _ADDRESS_LIMIT:
        _ADDRESS.pack_into(query, _ADDRESS_AT, address)
        _SIZE.pack_into(query, _NAME_SIZE_AT, _NAME_MAX)
        try:
            try:
                ioctl(maps_fd, _REQUEST, query)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                _without_name(maps_fd, query)
        except FileNotFoundError:
            return  # nothing at or above this address
        start, end, offset, inode, major, minor, length = _ANSWER.unpack_from(query)
        name = bytes(name_view[: length - 1]) if length else b""
        yield start, end, offset, inode, major, minor, name
        address = end


def _without_name(maps_fd: int, query: bytearray) -> None:
    """Repeat the query without the name: the kernel accepts a size of 0 only without a buffer."""
    (name_address,) = _ADDRESS.unpack_from(query, _NAME_ADDRESS_AT)
    _SIZE.pack_into(query, _NAME_SIZE_AT, 0)
    _ADDRESS.pack_into(query, _NAME_ADDRESS_AT, 0)
    fcntl.ioctl(maps_fd, _REQUEST, query)
    _ADDRESS.pack_into(query, _NAME_ADDRESS_AT, name_address)
