# SPDX-License-Identifier: Apache-2.0
"""The events of all CPUs, in the order in which they happened.

Each CPU has three rings. The first wakes a thread with each record: a file that the kernel's
program does not know was touched (`first_touch`), or a control group was made, which is rare, and
means that a container starts. The second has executable mappings, and the third forks, exits and
namespaces, which only explain mappings. Both are read after the first one, and wake a thread when
they are half full. Most of what the watch costs other processes is the waking of threads. No ring
has comm records: the kernel writes one at each exec, and no module needs to know of an exec.

If the kernel refuses the program, each mapping wakes a thread, because it must be examined before
the process ends.

Rings are read one after the other while processes run and move between CPUs. A process may touch a
file on another CPU than that on which it mapped it, so the mappings of all CPUs are read together.
The third rings are read last: the cause of a mapping is there by then, because a process waits
until its record is written. Records that are newer than the start of the read are kept for the next
one; otherwise an effect could be reported before its cause, which may be in the unread ring of
another CPU.
"""

from __future__ import annotations

import errno
import select
import time
from bisect import bisect_right
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from buildidfs.formats.perf.records import decode_ring
from buildidfs.linux import perf_event
from buildidfs.linux.file_ops import on_error
from buildidfs.linux.perf_event import Ring

if TYPE_CHECKING:
    from buildidfs.capture.live.first_touch import FirstTouch
    from buildidfs.formats.perf.records import Record

_PAGES: Final = 512
_TOTAL_BYTES: Final = 64 << 20
_FEW_PAGES: Final = 32
_LEAST_PAGES: Final = 8
_HALF: Final = 2
_WAKING_PAGES: Final = 16
_QUIET: Final = perf_event.TASK | perf_event.NAMESPACES
_RECHECK_S: Final = 2.0
_NO_MEMORY: Final = frozenset((errno.EPERM, errno.ENOMEM))
_NOT_THERE: Final = frozenset((errno.ENODEV, errno.EINVAL))

_time = attrgetter("time")


class Rings:
    """The rings of all CPUs that are on. The constructor raises OSError if the kernel refuses
    events.

    ``pollers`` has a poller for each CPU. ``program`` wakes a thread for files that it does not
    know; without it each mapping wakes one. Every ``recheck`` seconds the rings check that each CPU
    still writes records.
    """

    def __init__(
        self,
        program: FirstTouch | None = None,
        *,
        cgroup_fd: int = -1,
        recheck: float = _RECHECK_S,
    ) -> None:
        self._program = program
        self._cgroup_fd = cgroup_fd
        self.pollers: dict[int, select.epoll] = {}
        self._recheck = recheck
        self._checked = time.monotonic()
        self._online: frozenset[int] = frozenset()
        self._stopped: set[int] = set()
        self._later: list[Record] = []
        self._waking: dict[int, Ring] = {}
        self._mappings: dict[int, Ring] = {}
        self._tasks: dict[int, Ring] = {}
        self._pages = _pages()
        self._groups = perf_event.CGROUP
        with on_error(self.close):
            self.follow_cpus()
        if not self._mappings:
            raise OSError(errno.ENODEV, "no CPU to watch")

    def cpus_changed(self) -> bool:
        """Return True if `follow_cpus` should be called. Other threads may read rings meanwhile.

        Raises OSError.
        """
        self._online = perf_event.online_cpus()
        # A CPU that was off needs new rings, also if it is on again by the time they are opened.
        self._stopped |= self._mappings.keys() - self._online
        if time.monotonic() - self._checked >= self._recheck:
            self._checked = time.monotonic()
            # Off and on again since the last call; when the machine sleeps all CPUs but one are.
            self._stopped |= {cpu for cpu, ring in self._waking.items() if not ring.is_counting()}
        return bool(self._stopped) or self._online != self._mappings.keys()

    def follow_cpus(self) -> bool:
        """Open rings of CPUs that were turned on, close those of others; True if there were any.

        Events on a new CPU before this call are lost. Raises OSError.
        """
        if not self.cpus_changed():
            return False
        changed = bool(self._stopped)
        for cpu in self._stopped:
            self._close(cpu)
        self._stopped.clear()
        for cpu in sorted(self._online - self._mappings.keys()):
            changed |= self._open(cpu)
        return changed

    def mappings(self, cpu: int) -> list[Record]:
        """Return new control groups, and mappings with a path, of one CPU since the last call.

        With a program, return its output on this CPU, too, and the mappings of all CPUs.
        """
        records = _take(self._waking.get(cpu))
        if self._program is None:
            return records + _take(self._mappings.get(cpu))
        for ring in list(self._mappings.values()):
            records += _take(ring)
        return records

    def is_pressed(self, cpu: int) -> bool:
        """Return True if the second ring of a CPU is so full that `changes` should be called, even
        without mappings.
        """
        ring = self._tasks.get(cpu)
        try:
            return ring is not None and ring.has_records(self._pages * perf_event.PAGE // _HALF)
        except ValueError:  # the CPU was turned off just now
            return False

    def changes(self) -> list[Record]:
        """Return the changes of processes, each after its cause; for one thread at a time.

        They include all causes of the mappings that `mappings` returned before. They are in order
        of time, except for a record that was written late and had no effect until then.
        """
        until = time.monotonic_ns()
        parts = [ring.take() for ring in self._tasks.values() if ring.has_records()]
        if not parts and not self._later:
            return []
        records = self._later + [one for data in parts for one in decode_ring(data)]
        records.sort(key=_time)
        end = bisect_right(records, until, key=_time)
        self._later = records[end:]
        del records[end:]
        return records

    def close(self) -> None:
        """End the events; safe to call twice."""
        for cpu in list(self._mappings):
            self._close(cpu)

    def _open(self, cpu: int) -> bool:
        """Open both rings of a CPU, as large as allowed; False if it is off again."""
        while True:
            rings: list[Ring] = []
            try:
                self._open_rings(cpu, rings)
            except OSError as error:
                for ring in rings:
                    ring.close()
                if error.errno in _NOT_THERE and cpu not in perf_event.online_cpus():
                    return False
                if error.errno == errno.EINVAL and self._groups:
                    self._groups = 0  # before Linux 5.7
                    continue
                if error.errno not in _NO_MEMORY or self._pages <= _LEAST_PAGES:
                    raise
                self._pages //= _HALF
                continue
            self._mappings[cpu], self._tasks[cpu], self._waking[cpu] = rings
            if self._program is not None:
                self._program.follow(cpu, self._waking[cpu].fileno())
            poller = self.pollers[cpu] = select.epoll()
            for ring in rings:
                poller.register(ring.fileno(), select.EPOLLIN | select.EPOLLET)
            return True

    def _open_rings(self, cpu: int, rings: list[Ring]) -> None:
        half, group = self._pages * perf_event.PAGE // _HALF, self._cgroup_fd
        for events, watermark in (
            (perf_event.MMAP, half if self._program is not None else 1),
            (_QUIET, half),
        ):
            rings.append(Ring(cpu, events, pages=self._pages, watermark=watermark, cgroup_fd=group))
        pages = min(self._pages, _WAKING_PAGES)
        rings.append(Ring(cpu, self._groups, pages=pages, watermark=1, has_output=True))

    def _close(self, cpu: int) -> None:
        self.pollers.pop(cpu).close()
        for rings in (self._mappings, self._tasks, self._waking):
            rings.pop(cpu).close()


def _take(ring: Ring | None) -> list[Record]:
    """Return the records of a ring with mappings or of one that wakes."""
    try:
        data = ring.take() if ring is not None and ring.has_records() else b""
    except ValueError:  # the CPU was turned off just now
        return []
    return list(decode_ring(data, paths=True)) if data else []


def _pages() -> int:
    """Return the pages of each ring: the memory of all rings is locked, for any number of CPUs."""
    share = _TOTAL_BYTES // perf_event.PAGE // 2 // len(perf_event.online_cpus())
    return min(max(1 << share.bit_length() - 1, _FEW_PAGES), _PAGES)
