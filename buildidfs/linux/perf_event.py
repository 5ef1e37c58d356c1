# SPDX-License-Identifier: Apache-2.0
"""Events of perf_event_open(2): mappings of files by all processes, or by this one.

An event of a CPU counts nothing (a dummy) and writes records into a ring that is shared with the
kernel; `formats.perf.records` decodes them. It needs CAP_PERFMON or CAP_SYS_ADMIN, or a
perf_event_paranoid of -1. Process IDs are those of the PID namespace that opens the event.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import struct
import sys
import threading
import time
from typing import Final

from buildidfs.formats.perf.attributes import (
    COUNT_BPF_OUTPUT,
    COUNT_DUMMY,
    READ_TIME_ENABLED,
    SAMPLE_ID_ALL,
    SAMPLE_RAW,
    SAMPLE_TIME,
    pack_attr,
)
from buildidfs.linux import syscalls
from buildidfs.linux.file_ops import Fd, closing_fd, closing_on_error

_NUMBERS: Final = {
    "x86_64": 298, "aarch64": 241, "riscv64": 241, "loongarch64": 241, "ppc64le": 319,
    "s390x": 331, "i686": 336, "armv7l": 364,
}  # fmt: skip

_FLAG_FD_CLOEXEC: Final = 8
_FLAG_PID_CGROUP: Final = 4
_EVENT_IOC_DISABLE: Final = 0x2401

# Bits of struct perf_event_attr, from linux/perf_event.h.
MMAP: Final = 1 << 8 | 1 << 23
"""Executable mappings, as PERF_RECORD_MMAP2."""
TASK: Final = 1 << 13
"""Fork and exit."""
NAMESPACES: Final = 1 << 28
"""clone, unshare and setns (commit e422267322cd3, Linux 4.12)."""
CGROUP: Final = 1 << 32 | 1 << 24
"""New control groups (commit 96aaab686505c, Linux 5.7).

The kernel does not pass them to an event that asks for nothing else (is_sb_event). The second bit
(comm_exec) asks for nothing by itself, and makes it pass them.
"""
COMM: Final = 1 << 9
"""New names of threads."""

_EXCLUDE_KERNEL: Final = 1 << 5  # or the event needs CAP_PERFMON
_EXCLUDE_HYPERVISOR: Final = 1 << 6

# In the first page of the ring, struct perf_event_mmap_page, in words of 8 bytes.
_HEAD: Final = 1024 // 8
_TAIL: Final = 1032 // 8

_OWN_RING: Final = 8 * mmap.PAGESIZE
_COUNT: Final = struct.Struct("=Q")

_COUNTS: Final = struct.Struct("=QQ")  # of read_format: value, time enabled

PAGE: Final = mmap.PAGESIZE
"""Bytes of a page."""


def online_cpus() -> frozenset[int]:
    """Return the CPUs that run now. Raises OSError.

    Source: Documentation/admin-guide/cputopology.rst.
    """
    # Python's text files take ten system calls, and the catcher reads this every second.
    with Fd(os.open("/sys/devices/system/cpu/online", os.O_RDONLY | os.O_CLOEXEC)) as file:
        return parse_cpus(os.read(file.fd, PAGE).decode("ascii"))


@functools.lru_cache(maxsize=1)
def parse_cpus(text: str) -> frozenset[int]:
    """Return the numbers of a list such as ``0-3,7``."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


class Ring(Fd):
    """The records of one event on one CPU, made by every process; a context manager.

    ``events`` are bits such as `MMAP`; ``pages`` is a power of two. `fileno` becomes readable when
    ``watermark`` bytes are waiting. With ``has_output``, programs of bpf(2) may write records, too.
    With ``cgroup_fd``, the directory of a control group, only processes in it and below it make
    records (PERF_FLAG_PID_CGROUP). Raises OSError: EACCES or EPERM without the privilege, ENODEV
    for a CPU that is off, EPERM or ENOMEM if the limit of locked memory is too low.
    """

    def __init__(
        self,
        cpu: int,
        events: int,
        *,
        pages: int,
        watermark: int,
        has_output: bool = False,
        cgroup_fd: int = -1,
    ) -> None:
        self.cpu = cpu
        self._size = pages * PAGE
        config = COUNT_BPF_OUTPUT if has_output else COUNT_DUMMY
        super().__init__(_open(cpu, events, watermark, config, cgroup_fd))
        with closing_on_error(self.fd):
            self._map = mmap.mmap(self.fd, PAGE + self._size)
        # Its items are read and written in one access; struct zeroes an item first.
        self._words = memoryview(self._map)[:PAGE].cast("Q")
        self._tail = 0
        self._checked = (0, time.monotonic_ns())
        self._barrier = threading.Lock()
        self._taking = threading.Lock()

    def has_records(self, size: int = 1) -> bool:
        """Return True if there are ``size`` bytes to `take`."""
        return self._words[_HEAD] - self._tail >= size

    def take(self) -> bytes:
        """Return all complete waiting records, and free their room for the kernel.

        Thread-safe.
        """
        with self._taking:
            return self._take()

    def _take(self) -> bytes:
        # Records before a new head must be read after the head and before the tail moves. Python's
        # memory barrier is to release a lock and take it again.
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
        """Return True if the event was enabled for at least half of the time since the last call.

        After its CPU was turned off, even for a moment, or the machine slept, an event makes no
        more records, and neither its descriptor nor a record shows this. The call interrupts the
        CPU. Raises OSError.
        """
        # A lower bound of the passed time, because this thread may be interrupted in between.
        passed = time.monotonic_ns() - self._checked[1]
        enabled = _COUNTS.unpack(os.read(self.fd, _COUNTS.size))[1]
        counted = enabled - self._checked[0]
        self._checked = (enabled, time.monotonic_ns())
        return bool(2 * counted >= passed)

    def stop(self) -> None:
        """Stop making records; `take` still returns those that wait. Raises OSError."""
        fcntl.ioctl(self.fd, _EVENT_IOC_DISABLE, 0)

    def close(self) -> None:
        """Close the event; safe to call twice."""
        if self.fd >= 0:
            self._words.release()
            self._map.close()
            super().close()


def _open(cpu: int, events: int, watermark: int, config: int, cgroup_fd: int) -> int:
    attributes = pack_attr(
        events | SAMPLE_ID_ALL,
        SAMPLE_TIME | (SAMPLE_RAW if config == COUNT_BPF_OUTPUT else 0),
        read_format=READ_TIME_ENABLED,
        watermark=watermark,
        clockid=time.CLOCK_MONOTONIC,
        config=config,
    )
    return _open_event(attributes, cgroup_fd, cpu, 0 if cgroup_fd < 0 else _FLAG_PID_CGROUP)


def _open_event(attributes: bytes, pid: int, cpu: int, flags: int = 0) -> int:
    """Open an event; ``attributes`` is struct perf_event_attr. Raises OSError."""
    number = _NUMBERS.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no perf_event_open known for {os.uname().machine}")
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    return syscalls.syscall(
        number, ctypes.addressof(buffer), pid, cpu, -1, _FLAG_FD_CLOEXEC | flags
    )


class OwnEvent:
    """An event of this thread on any CPU, which needs no privilege; a context manager.

    ``events`` are bits such as `MMAP`, ``sample_type`` those of `formats.perf.attributes`. Raises
    OSError: EACCES or EPERM if a process may not even open events of its own, ENOSYS.
    """

    def __init__(self, events: int, sample_type: int = 0) -> None:
        flags = events | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        with closing_fd(_open_event(pack_attr(flags, sample_type), 0, -1)) as fd:
            self._map = mmap.mmap(fd, PAGE + _OWN_RING)

    def __enter__(self) -> OwnEvent:
        return self

    def __exit__(self, *exc: object) -> None:
        self._map.close()

    def records(self) -> bytes:
        """Return all records; the caller makes too few to fill the ring."""
        (head,) = _COUNT.unpack_from(self._map, _HEAD * _COUNT.size)
        return self._map[PAGE : PAGE + min(head, _OWN_RING)]


_NAME_SIZE: Final = 16
_TIME_SIZE: Final = 8
_TRIES: Final = 5


def perf_offset() -> tuple[int, int]:
    """Return the offset from times of perf events to Unix time, and its possible error (ns).

    The clock of perf events (local_clock() of the kernel) starts with the machine, cannot be set,
    and no call reads it. But each record of an event has a time of that clock, so this function
    makes an event of this thread write a record. Raises OSError as `OwnEvent` does.
    """
    events = COMM | SAMPLE_ID_ALL
    with OwnEvent(events, SAMPLE_TIME) as event:
        return min((_look(event) for _ in range(_TRIES)), key=lambda found: found[1])


def _look(event: OwnEvent) -> tuple[int, int]:
    before = time.time_ns()
    # The name of this thread is set to its present one, which makes a record.
    name = ctypes.create_string_buffer(_NAME_SIZE)
    for operation in (syscalls.PR_GET_NAME, syscalls.PR_SET_NAME):
        syscalls.prctl(operation, ctypes.addressof(name))
    after = time.time_ns()
    # A record ends with its time.
    event_time = int.from_bytes(event.records()[-_TIME_SIZE:], sys.byteorder)
    return (before + after) // 2 - event_time, (after - before) // 2 + 1
