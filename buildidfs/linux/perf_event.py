# SPDX-License-Identifier: Apache-2.0
"""Events of the whole system through perf_event_open(2): what is mapped, by whom, where.

An event of a CPU counts nothing (a dummy) and leaves records in a ring that is shared with the
kernel; formats.perfrecords decodes them. It takes CAP_PERFMON or CAP_SYS_ADMIN, or a
perf_event_paranoid of -1. Process IDs are those of the PID namespace that opens the event.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
import time
from typing import Final

from buildidfs.linux import syscalls

_NUMBERS: Final = {
    "x86_64": 298, "aarch64": 241, "riscv64": 241, "loongarch64": 241, "ppc64le": 319,
    "s390x": 331, "i686": 336, "armv7l": 364,
}  # fmt: skip

_ATTRIBUTES: Final = struct.Struct("=IIQQQQQIIQQQQIiQIHHIIQ")
_TYPE_SOFTWARE: Final = 1
_COUNT_DUMMY: Final = 9
_FLAG_FD_CLOEXEC: Final = 8
_CLOCK_MONOTONIC: Final = 1
_EVENT_IOC_DISABLE: Final = 0x2401

# Bits of struct perf_event_attr, from linux/perf_event.h.
MMAP: Final = 1 << 8 | 1 << 23
"""Executable mappings, as PERF_RECORD_MMAP2."""
TASK: Final = 1 << 13
"""Fork and exit."""
NAMESPACES: Final = 1 << 28
"""clone, unshare and setns (commit e422267322cd3, Linux 4.12)."""
BUILD_ID: Final = 1 << 34
"""With `MMAP`: the build ID instead of the inode (commit 88a16a1309333, Linux 5.12)."""

_WATERMARK: Final = 1 << 14
_SAMPLE_ID_ALL: Final = 1 << 18
_USE_CLOCKID: Final = 1 << 25
_SAMPLE_TIME: Final = 1 << 2

# In the first page of the ring, struct perf_event_mmap_page, in words of 8 bytes.
_HEAD: Final = 1024 // 8
_TAIL: Final = 1032 // 8

_TOTAL_TIME_ENABLED: Final = 1
_COUNTS: Final = struct.Struct("=QQ")  # of read_format: value, time enabled

PAGE: Final = mmap.PAGESIZE
"""Bytes of a page."""


def online_cpus() -> frozenset[int]:
    """The CPUs that run now. Raises OSError. Source: Documentation/admin-guide/cputopology.rst."""
    with open("/sys/devices/system/cpu/online", encoding="ascii") as file:
        return parse_cpus(file.read())


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers in a list such as ``0-3,7``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


class Ring:
    """The records of one event on one CPU, of every process; a context manager.

    ``events`` are bits such as `MMAP`; ``pages`` a power of two. `fileno` becomes readable when
    ``watermark`` bytes are waiting. Raises OSError: EACCES or EPERM without the privilege, ENODEV
    for a CPU that is off, EPERM or ENOMEM where so much memory may not be locked.
    """

    def __init__(self, cpu: int, events: int, *, pages: int, watermark: int) -> None:
        self.cpu = cpu
        self._size = pages * PAGE
        self._fd = _open(cpu, events, watermark)
        try:
            self._map = mmap.mmap(self._fd, PAGE + self._size)
        except BaseException:
            os.close(self._fd)
            raise
        # Its items are read and written whole, which struct's are not: it zeroes them first.
        self._words = memoryview(self._map)[:PAGE].cast("Q")
        self._tail = 0
        self._checked = (0, time.monotonic_ns())
        self._barrier = threading.Lock()
        self._taking = threading.Lock()

    def fileno(self) -> int:
        """To poll for records."""
        return self._fd

    def has_records(self, size: int = 1) -> bool:
        """Whether there are ``size`` bytes to `take`."""
        return self._words[_HEAD] - self._tail >= size

    def take(self) -> bytes:
        """All records that are waiting, whole ones; their room is the kernel's again.

        May be called from several threads.
        """
        with self._taking:
            return self._take()

    def _take(self) -> bytes:
        # What the kernel wrote before it moved the head has to be read after the head, and before
        # the tail is moved. Leaving a lock and taking it again is the barrier that Python has.
        with self._barrier:
            head = self._words[_HEAD]
        size = head - self._tail
        if not size:
            return b""
        begin = self._tail % self._size
        end = begin + size
        shared = self._map
        with self._barrier:
            if end <= self._size:
                data = shared[PAGE + begin : PAGE + end]
            else:
                data = shared[PAGE + begin :] + shared[PAGE : PAGE + end - self._size]
        with self._barrier:
            self._words[_TAIL] = self._tail = head
        return data

    def is_counting(self) -> bool:
        """Whether the event was there, half of the time since the last call at least. Interrupts
        the CPU.

        One whose CPU was turned off, be it for a moment or while the machine slept, makes no more
        records after that, and neither the descriptor nor anything else says so. Raises OSError.
        """
        # Of the time that passed only what has passed for sure: we may be interrupted in between.
        passed = time.monotonic_ns() - self._checked[1]
        enabled = _COUNTS.unpack(os.read(self._fd, _COUNTS.size))[1]
        counted = enabled - self._checked[0]
        self._checked = (enabled, time.monotonic_ns())
        return bool(2 * counted >= passed)

    def stop(self) -> None:
        """No more records are made; those that are waiting can be taken. Raises OSError."""
        fcntl.ioctl(self._fd, _EVENT_IOC_DISABLE, 0)

    def close(self) -> None:
        """Let go of the event; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            self._words.release()
            self._map.close()
            os.close(fd)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open(cpu: int, events: int, watermark: int) -> int:
    flags = events | _WATERMARK | _SAMPLE_ID_ALL | _USE_CLOCKID
    attributes = _ATTRIBUTES.pack(
        _TYPE_SOFTWARE,
        _ATTRIBUTES.size,
        _COUNT_DUMMY,
        0,
        _SAMPLE_TIME,
        _TOTAL_TIME_ENABLED,
        flags,
        watermark,
        *(0,) * 6,
        _CLOCK_MONOTONIC,
        *(0,) * 7,
    )
    return open_event(attributes, -1, cpu)


def open_event(attributes: bytes, pid: int, cpu: int) -> int:
    """A descriptor of an event; ``attributes`` is struct perf_event_attr. Raises OSError."""
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no perf_event_open known for {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return syscalls.syscall(number, ctypes.addressof(buffer), pid, cpu, -1, _FLAG_FD_CLOEXEC)
