# SPDX-License-Identifier: Apache-2.0
"""Whether an event with build IDs spoils the events of others on this kernel.

The kernel makes one record of a mapping and hands it to every event that wants it. Since build IDs
can be in it (commit 88a16a1309333, Linux 5.12), the mark that one is in there could stay in the
record for the events after: their readers take a device number for a build ID, and perf crashes.
Seen on Linux 6.18, gone in 7.2. What runs there must not ask for build IDs at all.

Tried with events of this process only, so that no session of others gets such a record from us:
the kernel hands it to those of whole CPUs first, then to those of the process, newest first.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator
from typing import Final

from buildidfs.linux import perf_event, syscalls

_ATTRIBUTES: Final = struct.Struct("=IIQQQQQIIQQQQIiQIHHIIQ")
_NUMBERS: Final = {
    "x86_64": 298, "aarch64": 241, "riscv64": 241, "loongarch64": 241, "ppc64le": 319,
    "s390x": 331, "i686": 336, "armv7l": 364,
}  # fmt: skip
_TYPE_SOFTWARE: Final = 1
_COUNT_DUMMY: Final = 9
_FLAG_FD_CLOEXEC: Final = 8
_EXCLUDE_KERNEL: Final = 1 << 5  # or it takes CAP_PERFMON
_EXCLUDE_HYPERVISOR: Final = 1 << 6

_HEAD: Final = struct.Struct("=Q")
_HEAD_OFFSET: Final = 1024  # in struct perf_event_mmap_page
_RECORD: Final = struct.Struct("=IHH")  # type, misc, size
_MMAP2: Final = 10
_MISC_BUILD_ID: Final = 1 << 14
_RING: Final = 8 * mmap.PAGESIZE
_MOST_FILES: Final = 8  # each makes a record of less than a page in each ring


def build_ids_leak() -> bool | None:
    """Whether events without build IDs get records marked as having one; None: cannot be told.

    It cannot be where nothing that this process runs has a build ID in memory. Takes a few
    milliseconds. Raises OSError: EACCES or EPERM where events of one's own are not allowed either,
    ENOSYS, EINVAL for a kernel without build IDs in events.
    """
    with _OwnEvent(0) as plain, _OwnEvent(perf_event.BUILD_ID) as asking:
        for path in _own_programs():
            _map(path)
        if not any(misc & _MISC_BUILD_ID for misc in asking.mappings()):
            return None
        return any(misc & _MISC_BUILD_ID for misc in plain.mappings())


class _OwnEvent:
    """Mappings of this thread, on any CPU; a context manager."""

    def __init__(self, more: int) -> None:
        number = _NUMBERS.get(os.uname().machine)
        if number is None:
            raise OSError(errno.ENOSYS, f"no perf_event_open known for {os.uname().machine}")
        flags = perf_event.MMAP | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR | more
        size = _ATTRIBUTES.size
        attributes = _ATTRIBUTES.pack(
            _TYPE_SOFTWARE, size, _COUNT_DUMMY, 0, 0, 0, flags, *(0,) * 15
        )
        buffer = ctypes.create_string_buffer(attributes, size)
        self._fd = syscalls.syscall(number, ctypes.addressof(buffer), 0, -1, -1, _FLAG_FD_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, mmap.PAGESIZE + _RING)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> _OwnEvent:
        return self

    def __exit__(self, *exc: object) -> None:
        self._map.close()
        os.close(self._fd)

    def mappings(self) -> Iterator[int]:
        """The ``misc`` of each record of a mapping. There are too few for the ring to be full."""
        (head,) = _HEAD.unpack_from(self._map, _HEAD_OFFSET)
        position = 0
        while position + _RECORD.size <= min(head, _RING):
            kind, misc, size = _RECORD.unpack_from(self._map, mmap.PAGESIZE + position)
            if kind == _MMAP2:
                yield misc
            position += max(size, _RECORD.size)


def _own_programs() -> list[bytes]:
    """Files that this process runs, whose first page the kernel has therefore in memory."""
    with open("/proc/self/maps", "rb") as file:
        lines = [line.split(None, 5) for line in file]
    paths = [
        fields[5].rstrip(b"\n")
        for fields in lines
        if b"x" in fields[1] and fields[5:] and fields[5].startswith(b"/")
    ]
    return list(dict.fromkeys(paths))[:_MOST_FILES]


def _map(path: bytes) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # deleted meanwhile: another will do
    try:
        os.pread(fd, 64, 0)
        flags, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC
        mmap.mmap(fd, mmap.PAGESIZE, flags=flags, prot=access).close()
    except OSError:
        pass  # on a filesystem without execution: another will do
    finally:
        os.close(fd)
