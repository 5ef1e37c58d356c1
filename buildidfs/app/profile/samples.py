# SPDX-License-Identifier: Apache-2.0
"""Where the samples of a profile fell, counted.

There may be hundreds of millions of them, and most fall into pages that others fell into before:
what was found for a page of a process is looked up again only when the process has changed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.perf.attributes import CONTEXT_KERNEL, CONTEXT_USER, MAX_CONTEXT
from buildidfs.formats.perf.headers import KERNEL, USER
from buildidfs.formats.perf.records import KERNEL_PID

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.perf.address_spaces import Spaces

UNMAPPED: Final = -1
IN_KERNEL: Final = -2
IN_GUEST: Final = -3

_PAGE_BITS: Final = 12
_MOST_PAGES: Final = 1 << 18
_MODES: Final = {CONTEXT_KERNEL: KERNEL, CONTEXT_USER: USER}


class Hit(NamedTuple):
    """Where samples fell: the number of the file, or a negative one for what is none, since when
    it was mapped, and in which process as what (`Spaces.image`).
    """

    file: int
    time: int
    pid: int
    image: int


class Hits:
    """Counts samples by where they fell in ``spaces``. ``mode`` is CPUMODE of their records."""

    def __init__(self, spaces: Spaces) -> None:
        self._spaces = spaces
        self._counts: dict[Hit, list[int]] = {}
        # From when and until when it holds, and the count: a list of one, to be added to.
        self._pages: dict[tuple[int, int], tuple[int, int, list[int]]] = {}

    def add(self, pid: int, time: int, address: int, mode: int) -> None:
        """One more sample."""
        self._count_of(pid, time, address, mode)[0] += 1

    def add_chain(self, pid: int, time: int, address: int, mode: int, chain: Iterable[int]) -> None:
        """One more sample, which counts once for each place in its call chain, too."""
        leaf = self._count_of(pid, time, address, mode)
        counts = {id(leaf): leaf}
        for each in chain:
            if each >= MAX_CONTEXT:
                mode = _MODES.get(each, 0)
            else:
                count = self._count_of(pid, time, each, mode)
                counts[id(count)] = count
        for count in counts.values():
            count[0] += 1

    def result(self) -> Counter[Hit]:
        """How many samples fell where."""
        return Counter({hit: count for hit, (count,) in self._counts.items()})

    def _count_of(self, pid: int, time: int, address: int, mode: int) -> list[int]:
        if mode == KERNEL:
            pid = KERNEL_PID
        elif mode != USER:
            return self._new(Hit(IN_GUEST, 0, 0, 0))
        known = self._pages.get((pid, address >> _PAGE_BITS))
        if known is not None and known[0] <= time < known[1]:
            return known[2]
        return self._look_up(pid, time, address)

    def _look_up(self, pid: int, time: int, address: int) -> list[int]:
        found, span = self._spaces.span(pid, time, address)
        if found is not None and pid != KERNEL_PID:
            hit = Hit(found.file, found.time, pid, span.image)
        elif found is not None:
            hit = Hit(found.file, 0, KERNEL_PID, 0)
        elif pid != KERNEL_PID:
            hit = Hit(UNMAPPED, 0, pid, 0)
        else:
            hit = Hit(IN_KERNEL, 0, KERNEL_PID, 0)
        count = self._new(hit)
        if span.whole:
            if len(self._pages) >= _MOST_PAGES:
                self._pages.clear()
            self._pages[pid, address >> _PAGE_BITS] = (span.begin, span.end, count)
        return count

    def _new(self, hit: Hit) -> list[int]:
        count = self._counts.get(hit)
        if count is None:
            count = self._counts[hit] = [0]
        return count
