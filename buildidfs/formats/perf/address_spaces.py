# SPDX-License-Identifier: Apache-2.0
"""The address spaces of all processes of a profile, at any time in it.

perf.data is not in order of time: each CPU has its own records, written in turns. So all records of
address spaces are read first, and samples, of which there are many more, are looked up afterwards.
No record reports an unmapping, so the last mapping at an address counts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.errors import UsageError
from buildidfs.formats.budget import Budget, Spent
from buildidfs.formats.perf.records import Entered, Executed, Forked, Mapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.perf.records import Event

#: The most memory for a profile in bytes, roughly: tens of millions of mappings.
MAX_BYTES: Final = 1 << 30

_ENTRY: Final = Struct("=QQQQI")  # time, start, end, offset, file
_Entry = tuple[int, int, int, int, int]
_ENTRY_COST: Final = _ENTRY.size
_PROCESS_COST: Final = 300
_FILE_COST: Final = 500

_NO_FILE: Final = 0xFFFFFFF0
_EXECUTED: Final = 0xFFFFFFF1
_FORKED: Final = 0xFFFFFFF2
_BORN: Final = 0xFFFFFFF3
_ENTERED: Final = 0xFFFFFFF4
_BEGINNINGS: Final = frozenset((_EXECUTED, _FORKED, _BORN))
_HOMES: Final = frozenset((_FORKED, _BORN, _ENTERED))

# For one process. Linux allows a quarter of that at a time (vm.max_map_count).
_MOST_ENTRIES: Final = 1 << 18
# For processes that are kept ready for lookups: some hundred bytes each.
_MOST_READY: Final = 1 << 20
_MOST_BACK: Final = 1 << 12
_MOST_EXTENTS: Final = 16  # of one file, mapped at one time
# Entries that all searches for replaced mappings may look at: so many, and more for each entry.
_BACK_LEAST: Final = 1 << 21
_BACK_PER_ENTRY: Final = 64
_CHARGED: Final = 64
_EVER: Final = 1 << 64
_GENERATIONS: Final = 64
_PAGE_BITS: Final = 12


class File(msgspec.Struct, frozen=True, gc=False):
    """A mapped file; the fields are those of `records.Mapped`."""

    path: bytes
    dev: tuple[int, int]
    inode: int
    generation: int
    build_id: bytes
    cpumode: int


class MappedOffset(NamedTuple):
    """The file at an address: its number, the offset in it, and the time of the mapping."""

    file: int
    offset: int
    time: int


class Span(NamedTuple):
    """The extent in which an answer is valid: for the process as ``image``, at times from ``begin``
    until before ``end``, and for the whole page of the address if ``whole``.
    """

    image: int
    begin: int
    end: int
    whole: bool


class Spaces:
    """Address spaces by process and time. All times are in nanoseconds of one clock.

    ``files`` are all files that were ever mapped. Methods that add raise `UsageError` if the memory
    limit is exceeded; ``left_out`` counts mappings beyond the limit of a process.
    """

    def __init__(self) -> None:
        self.files: list[File] = []
        self._numbers: dict[File, int] = {}
        self._entries: dict[int, bytearray] = {}
        self._ready: dict[int, _Timeline] = {}
        self._ready_entries = 0
        self._back: Budget | None = None
        self._cost = 0
        self.left_out = 0

    def add(self, event: Event, time: int) -> int:
        """Add an event of that time; return the number of the mapped file, or -1."""
        if isinstance(event, Mapped):
            number = self.number(event)
            self._put(event.pid, time, event.start, event.end, event.offset, number)
            return number
        if isinstance(event, Forked):
            how = _FORKED if event.inherits else _BORN
            self._put(event.pid, time, event.parent, 0, 0, how)
        elif isinstance(event, Executed):
            self._put(event.pid, time, 0, 0, 0, _EXECUTED)
        elif isinstance(event, Entered):
            self._put(event.pid, time, event.namespaces.mnt, 0, 0, _ENTERED)
        return -1

    def find(self, pid: int, time: int, address: int) -> MappedOffset | None:
        """Find the file that a process had mapped at an address."""
        for _ in range(_GENERATIONS):
            timeline = self._timeline(pid)
            if timeline is None:
                return None
            found = timeline.find(time, address)
            if found is None or isinstance(found, MappedOffset):
                return found
            pid, time = found  # its mappings are those of its parent
        return None

    def span(self, pid: int, time: int, address: int) -> tuple[MappedOffset | None, Span]:
        """Do as `find`, and return the extent in which the answer is valid."""
        timeline = self._timeline(pid)
        if timeline is None:
            return None, Span(0, 0, _EVER, True)
        begin, end = timeline.between(time)
        found = self.find(pid, time, address)
        page = address >> _PAGE_BITS
        edges = ((page << _PAGE_BITS), ((page + 1) << _PAGE_BITS) - 1)
        whole = all(self._same(found, self.find(pid, time, edge), address - edge) for edge in edges)
        return found, Span(timeline.image(time), begin, end, whole)

    def _same(self, found: MappedOffset | None, other: MappedOffset | None, distance: int) -> bool:
        if found is None or other is None:
            return found is other
        return found == other._replace(offset=other.offset + distance)

    def image(self, pid: int, time: int) -> int:
        """Return a number for the program of a process at a time; it changes after each fork and
        exec.
        """
        timeline = self._timeline(pid)
        return 0 if timeline is None else timeline.image(time)

    def mapped(self, pid: int, image: int) -> list[tuple[int, int]]:
        """Return the files that a process mapped or inherited as ``image``: number and time of
        each.
        """
        found: list[tuple[int, int]] = []
        for _ in range(_GENERATIONS):
            timeline = self._timeline(pid)
            if timeline is None:
                break
            found += timeline.mapped(image)
            parent = timeline.parent(image)
            if parent is None or (above := self._timeline(parent[0])) is None:
                break
            pid, image = parent[0], above.image(parent[1])
        return found

    def extents(self, pid: int, image: int, file: int, time: int) -> list[tuple[int, int, int]]:
        """Return where a process as ``image`` had mapped a file at that time, or inherited it:
        start, end and offset in the file of each mapping.
        """
        for _ in range(_GENERATIONS):
            timeline = self._timeline(pid)
            if timeline is None:
                break
            if found := timeline.extents(image, file, time):
                return found
            parent = timeline.parent(image)
            if parent is None or (above := self._timeline(parent[0])) is None:
                break
            pid, image = parent[0], above.image(parent[1])
        return []

    def everything(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield all mappings: process, image, number of the file, time."""
        for pid in self._entries:
            timeline = self._timeline(pid)
            if timeline is not None:
                for image, file, time in timeline.everything():
                    yield pid, image, file, time

    def mount_namespace(self, pid: int, time: int) -> int:
        """Return the inode number of its mount namespace; 0 if unknown."""
        for _ in range(_GENERATIONS):
            timeline = self._timeline(pid)
            if timeline is None:
                return 0
            found = timeline.entered(time)
            if not isinstance(found, tuple):
                return found
            pid, time = found
        return 0

    def number(self, event: Mapped) -> int:
        """Return the number of the mapped file in ``files``."""
        file = File(
            event.path, event.dev, event.inode, event.generation, event.build_id, event.cpumode
        )
        number = self._numbers.get(file)
        if number is None:
            number = self._numbers[file] = len(self.files)
            self.files.append(file)
            self._spend(_FILE_COST + len(file.path))
        return number

    def _put(self, pid: int, time: int, start: int, end: int, offset: int, file: int) -> None:
        entries = self._entries.get(pid)
        if entries is None:
            entries = self._entries[pid] = bytearray()
            self._spend(_PROCESS_COST)
        if len(entries) >= _MOST_ENTRIES * _ENTRY.size:
            self.left_out += 1
            return
        entries += _ENTRY.pack(time, start, min(end, (1 << 64) - 1), offset, file)
        self._spend(_ENTRY_COST)

    def _spend(self, cost: int) -> None:
        self._cost += cost
        if self._cost > MAX_BYTES:
            raise UsageError("tells of more processes and mappings than can be kept in memory")

    def _timeline(self, pid: int) -> _Timeline | None:
        timeline = self._ready.get(pid)
        if timeline is None:
            entries = self._entries.get(pid)
            if entries is None:
                return None
            self._ready_entries += 1 + len(entries) // _ENTRY.size
            if self._ready_entries > _MOST_READY:
                self._ready.clear()
                self._ready_entries = 1 + len(entries) // _ENTRY.size
            if self._back is None:
                size = sum(map(len, self._entries.values())) // _ENTRY.size
                self._back = Budget(_BACK_LEAST + _BACK_PER_ENTRY * size)
            timeline = self._ready[pid] = _Timeline(bytes(entries), self._back)
        return timeline


class _Map:
    """Disjoint mappings: the remaining parts after later mappings have replaced earlier ones."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._numbers: list[int] = []

    def add(self, start: int, end: int, number: int) -> None:
        """Add a mapping that is later than all others, and remove its range from the others."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        starts, ends, numbers = [start], [end], [number]
        if first < last:
            if self._starts[first] < start:
                starts.insert(0, self._starts[first])
                ends.insert(0, start)
                numbers.insert(0, self._numbers[first])
            if self._ends[last - 1] > end:
                starts.append(end)
                ends.append(self._ends[last - 1])
                numbers.append(self._numbers[last - 1])
        self._starts[first:last] = starts
        self._ends[first:last] = ends
        self._numbers[first:last] = numbers

    def at(self, address: int) -> int:
        """Return the number of the mapping at an address, or -1."""
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._ends[place]:
            return -1
        return self._numbers[place]


class _Timeline:
    """The programs and mappings of one process number, in order of time."""

    def __init__(self, entries: bytes, back: Budget) -> None:
        self._back = back
        self._entries: list[_Entry] = sorted(
            _ENTRY.iter_unpack(entries), key=lambda entry: entry[0]
        )
        self._times = array("Q", [entry[0] for entry in self._entries])
        # For each number of entries: the last entry with which the process became another program,
        # counted from 1, and the last one with its mount namespace.
        self._images, self._homes = array("I", [0]), array("I", [0])
        self._maps: dict[int, _Map] = {}
        self._extents: dict[tuple[int, int, int], list[tuple[int, int, int]]] | None = None
        for number, (_, start, end, _, file) in enumerate(self._entries):
            image, home = self._images[-1], self._homes[-1]
            if file in _BEGINNINGS:
                image = number + 1
            if file in _HOMES:
                home = number + 1
            elif file < _NO_FILE:
                self._maps.setdefault(image, _Map()).add(start, end, number)
            self._images.append(image)
            self._homes.append(home)

    def find(self, time: int, address: int) -> MappedOffset | tuple[int, int] | None:
        """Find the file at an address. If the parent's mappings decide, return the parent and the
        time at which to look there.
        """
        count = bisect_right(self._times, time)
        image = self._images[count]
        mapped = self._maps.get(image)
        number = -1 if mapped is None else mapped.at(address)
        if number >= count:  # mapped later, over the earlier ones
            number = self._search(image, count, address)
        if number < 0:
            return self.parent(image)
        begin, start, _, offset, file = self._entries[number]
        return MappedOffset(file, address - start + offset, begin)

    def _search(self, image: int, count: int, address: int) -> int:
        """Return the last entry from ``image`` up to ``count`` that is a mapping there, or -1, also
        if the budget for such searches is used up.
        """
        entries = self._entries
        for number in range(count - 1, max(image, count - _MOST_BACK) - 1, -1):
            if number % _CHARGED == 0 and not self._may_go_back():
                break
            _, start, end, _, file = entries[number]
            if file < _NO_FILE and start <= address < end:
                return number
        return -1

    def _may_go_back(self) -> bool:
        try:
            self._back.charge(_CHARGED)
        except Spent:
            return False
        return True

    def between(self, time: int) -> tuple[int, int]:
        """Return the time of the last change up to ``time``, and that of the next change."""
        count = bisect_right(self._times, time)
        begin = self._times[count - 1] if count else 0
        return begin, self._times[count] if count < len(self._times) else _EVER

    def image(self, time: int) -> int:
        """Return the number of entries up to the one that began the program of that time."""
        return self._images[bisect_right(self._times, time)]

    def mapped(self, image: int) -> list[tuple[int, int]]:
        """Return the files that were mapped from ``image`` until the next fork or exec, each with
        its time.
        """
        found = []
        for begin, _, _, _, file in islice(self._entries, image, None):
            if file in _BEGINNINGS:
                break
            if file < _NO_FILE:
                found.append((file, begin))
        return found

    def extents(self, image: int, file: int, time: int) -> list[tuple[int, int, int]]:
        """Return start, end and offset of the first mappings of a file that were made at a time."""
        if self._extents is None:
            self._extents = {}
            for number, (when, start, end, offset, which) in enumerate(self._entries):
                if which < _NO_FILE:
                    key = self._images[number + 1], which, when
                    known = self._extents.setdefault(key, [])
                    if len(known) < _MOST_EXTENTS:
                        known.append((start, end, offset))
        return self._extents.get((image, file, time), [])

    def everything(self) -> Iterator[tuple[int, int, int]]:
        """Yield all mappings: image, number of the file, time."""
        for number, (begin, _, _, _, file) in enumerate(self._entries):
            if file < _NO_FILE:
                yield self._images[number + 1], file, begin

    def parent(self, image: int) -> tuple[int, int] | None:
        """Return the parent and the time, if ``image`` began with a fork."""
        begin, parent, _, _, what = self._entries[image - 1] if image else (0, 0, 0, 0, _BORN)
        return (parent, begin) if what == _FORKED else None

    def entered(self, time: int) -> int | tuple[int, int]:
        """Return the mount namespace of the process, 0 if unknown. If the parent's decides, return
        the parent and the time at which to look there.
        """
        home = self._homes[bisect_right(self._times, time)]
        begin, start, _, _, what = self._entries[home - 1] if home else (0, 0, 0, 0, _BORN)
        if what == _FORKED:
            return start, begin
        return start if what == _ENTERED else 0
