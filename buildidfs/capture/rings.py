# SPDX-License-Identifier: Apache-2.0
"""The events of all CPUs, in the order in which they happened.

Two rings to a CPU. Each executable mapping has to be looked at before the process is gone, so one
record in the first ring wakes us; where processes come from is only needed to understand mappings,
so the second is read along with it and wakes nobody until it is half full. Being woken is most of
what watching costs others.
"""

from __future__ import annotations

import errno
import select
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from buildidfs.formats import perfrecords
from buildidfs.linux import perf_event
from buildidfs.linux.perf_event import Ring

if TYPE_CHECKING:
    from buildidfs.formats.perfrecords import Record

_PAGES: Final = 512
_LEAST_PAGES: Final = 8
_HALF: Final = 2
_NO_MEMORY: Final = frozenset((errno.EPERM, errno.ENOMEM))
_NOT_THERE: Final = frozenset((errno.ENODEV, errno.EINVAL))

_time = attrgetter("time")


class Rings:
    """Rings of every CPU that runs, registered with ``epoll``; raises OSError where refused.

    ``prompt`` has a change of namespaces wake us as well.
    """

    def __init__(self, epoll: select.epoll, *, prompt: bool = False) -> None:
        self._epoll = epoll
        self._waking = perf_event.MMAP | (perf_event.NAMESPACES if prompt else 0)
        self._quiet = perf_event.TASK | (0 if prompt else perf_event.NAMESPACES)
        self._mappings: dict[int, Ring] = {}
        self._tasks: dict[int, Ring] = {}
        self._pages = _PAGES
        try:
            self.follow_cpus()
        except BaseException:
            self.close()
            raise
        if not self._mappings:
            raise OSError(errno.ENODEV, "no CPU to watch")

    def follow_cpus(self) -> bool:
        """Take in CPUs that were turned on, give up those turned off; whether there were any.

        What happened on a new CPU until now is not known. Raises OSError.
        """
        online = perf_event.online_cpus()
        if online == self._mappings.keys():
            return False
        changed = False
        for cpu in self._mappings.keys() - online:
            self._close(cpu)
            changed = True
        for cpu in sorted(online - self._mappings.keys()):
            changed |= self._open(cpu)
        return changed

    def drain(self) -> list[Record]:
        """All records that are waiting, in the order of their times."""
        parts = [data for ring in self._mappings.values() if (data := ring.take())]
        # Read after the mappings: whatever led to one of them is in there by now.
        parts += [data for ring in self._tasks.values() if (data := ring.take())]
        if not parts:
            return []
        records = [record for data in parts for record in perfrecords.decode(data)]
        if len(parts) > 1:
            records.sort(key=_time)
        return records

    def close(self) -> None:
        """End the events; safe to call twice."""
        for cpu in list(self._mappings):
            self._close(cpu)

    def _open(self, cpu: int) -> bool:
        """Open both rings of a CPU, with as much memory as we get; False if it is off again."""
        while True:
            rings: list[Ring] = []
            try:
                rings.append(Ring(cpu, self._waking, pages=self._pages, watermark=1))
                half = self._pages * perf_event.PAGE // _HALF
                rings.append(Ring(cpu, self._quiet, pages=self._pages, watermark=half))
            except OSError as error:
                for ring in rings:
                    ring.close()
                if error.errno in _NOT_THERE and cpu not in perf_event.online_cpus():
                    return False
                if error.errno not in _NO_MEMORY or self._pages <= _LEAST_PAGES:
                    raise
                self._pages //= _HALF
                continue
            self._mappings[cpu], self._tasks[cpu] = rings
            for ring in rings:
                self._epoll.register(ring.fileno(), select.EPOLLIN)
            return True

    def _close(self, cpu: int) -> None:
        for rings in (self._mappings, self._tasks):
            ring = rings.pop(cpu)
            self._epoll.unregister(ring.fileno())
            ring.close()
