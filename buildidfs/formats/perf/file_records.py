# SPDX-License-Identifier: Apache-2.0
"""Records of a profile that tell of processes and what they map; and such records rewritten.

As `perfrecords`, which reads those of live rings: here they come in either byte order, from events
that recorded whatever fields they were asked for, and partly from perf itself, which tells of what
was there before the first event, with a time of 0.
Source: include/uapi/linux/perf_event.h, tools/lib/perf/include/perf/event.h.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.perf.headers import CPUMODE, MAX_ID, MIN_ID
from buildidfs.formats.perf.ring_records import Entered
from buildidfs.model import NamespaceSet

if TYPE_CHECKING:
    from buildidfs.formats.perf.attributes import Layouts
    from buildidfs.formats.perf.stream import Raw

MMAP: Final = 1
COMM: Final = 3
EXIT: Final = 4
FORK: Final = 7
SAMPLE: Final = 9
MMAP2: Final = 10
NAMESPACES: Final = 16
HEADER_BUILD_ID: Final = 67
HEADER_ATTR: Final = 64
HEADER_FEATURE: Final = 80

_LOST: Final = 2
_LOST_SAMPLES: Final = 13

TELLING: Final = frozenset((MMAP, MMAP2, COMM, FORK, NAMESPACES, _LOST, _LOST_SAMPLES))
"""The kinds of records that `Events` reads."""

KERNEL_PID: Final = 0xFFFFFFFF
"""The process that mappings of the kernel are said to belong to."""

_MISC_DATA: Final = 1 << 13
_MISC_EXEC: Final = 1 << 13
_MISC_BUILD_ID: Final = 1 << 14

_HEADER: Final = 8
_FIXED: Final = 32  # pid, tid, address, length, offset
_UNION: Final = _HEADER + _FIXED
_ID_AT: Final = _UNION + 4
_MMAP_NAME: Final = _UNION
_MMAP2_NAME: Final = _UNION + 24 + 8
_KINDS: Final = len(NamespaceSet.__struct_fields__)
_PATH_MAX: Final = 4096

_PROT_READ_EXEC: Final = 5
_MAP_PRIVATE: Final = 2


class Mapped(msgspec.Struct, frozen=True, gc=False):
    """A file, or what has a name in brackets, was mapped executable.

    ``start``, ``end``, ``offset`` in bytes. Either ``build_id`` is known, or ``dev``, ``inode`` and
    ``generation`` are, as /proc/PID/maps has them; or neither, in records of old kernels.
    ``cpumode`` tells mappings of the kernel and of guests from others.
    """

    time: int | None
    pid: int
    start: int
    end: int
    offset: int
    path: bytes
    dev: tuple[int, int] = (0, 0)
    inode: int = 0
    generation: int = 0
    build_id: bytes = b""
    cpumode: int = 0


class Forked(msgspec.Struct, frozen=True, gc=False):
    """A process began; what it has mapped is what its parent had then if ``inherits``."""

    time: int
    pid: int
    parent: int
    inherits: bool


class Executed(msgspec.Struct, frozen=True, gc=False):
    """A process became another program: from now on nothing is mapped."""

    time: int | None
    pid: int


class Lost(msgspec.Struct, frozen=True, gc=False):
    """So many records found no room when they were made."""

    count: int


Event = Mapped | Forked | Executed | Entered | Lost


class Events:
    """Reads records; what tells of nothing here, or is too short, comes out as None."""

    def __init__(self, layouts: Layouts, order: str) -> None:
        self._layouts = layouts
        self._mapped = Struct(f"{order}IIQQQ")
        self._inode = Struct(f"{order}IIQQ")
        self._task = Struct(f"{order}IIIIQ")
        self._in = Struct(f"{order}IIQ")
        self._namespace = Struct(f"{order}QQ")
        self._pid = Struct(f"{order}II")
        self._word = Struct(f"{order}Q")

    def read(self, raw: Raw) -> Event | None:
        """What a record tells."""
        kind = raw.kind
        if kind in (MMAP, MMAP2):
            return self.mapped(raw)
        if kind == FORK:
            return self._forked(raw)
        if kind == COMM:
            return self._executed(raw)
        if kind == NAMESPACES:
            return self._entered(raw)
        if kind == _LOST and raw.size >= _HEADER + 16:
            return Lost(self._word.unpack_from(raw.data, raw.at + _HEADER + 8)[0])
        if kind == _LOST_SAMPLES and raw.size >= _HEADER + 8:
            return Lost(self._word.unpack_from(raw.data, raw.at + _HEADER)[0])
        return None

    def mapped(self, raw: Raw) -> Mapped | None:
        """An executable mapping; None also for one of data."""
        kind, misc, data, at, size, *_ = raw
        trailer, time = self._layouts.trailer(data, at, size)
        name = _MMAP2_NAME if kind == MMAP2 else _MMAP_NAME
        if misc & _MISC_DATA or size - trailer <= name:
            return None
        pid, _, start, length, offset = self._mapped.unpack_from(data, at + _HEADER)
        path = data[at + name : at + size - trailer].partition(b"\0")[0]
        end = start + length
        if len(path) >= _PATH_MAX or end > 1 << 64:
            return None
        mode = misc & CPUMODE
        if kind == MMAP:
            return Mapped(time, pid, start, end, offset, path, cpumode=mode)
        if misc & _MISC_BUILD_ID:
            length = min(data[at + _UNION], MAX_ID)
            build_id = data[at + _ID_AT : at + _ID_AT + length] if length >= MIN_ID else b""
            return Mapped(time, pid, start, end, offset, path, build_id=build_id, cpumode=mode)
        major, minor, inode, generation = self._inode.unpack_from(data, at + _UNION)
        dev = (major, minor)
        return Mapped(time, pid, start, end, offset, path, dev, inode, generation, cpumode=mode)

    def _forked(self, raw: Raw) -> Forked | None:
        if raw.size < _HEADER + self._task.size:
            return None
        pid, parent, tid, _, time = self._task.unpack_from(raw.data, raw.at + _HEADER)
        if pid == parent or pid != tid:
            return None  # a thread
        return Forked(time, pid, parent, not raw.misc & _MISC_EXEC)

    def _executed(self, raw: Raw) -> Executed | None:
        if not raw.misc & _MISC_EXEC or raw.size < _HEADER + 8:
            return None
        pid, _ = self._pid.unpack_from(raw.data, raw.at + _HEADER)
        return Executed(self._layouts.trailer(raw.data, raw.at, raw.size)[1], pid)

    def _entered(self, raw: Raw) -> Entered | None:
        trailer, time = self._layouts.trailer(raw.data, raw.at, raw.size)
        first = raw.at + _HEADER + self._in.size
        room = raw.at + raw.size - trailer - first
        if room < 0:
            return None
        pid, tid, count = self._in.unpack_from(raw.data, raw.at + _HEADER)
        if pid != tid or count > room // self._namespace.size:
            return None
        inodes = [
            self._namespace.unpack_from(raw.data, first + number * self._namespace.size)[1]
            for number in range(min(count, _KINDS))
        ]
        return Entered(time or 0, pid, NamespaceSet(*inodes))


class Rewriter:
    """Makes mappings tell a build ID, or another name."""

    def __init__(self, layouts: Layouts, order: str) -> None:
        self._layouts = layouts
        self._order = order

    def mapped(self, raw: Raw, build_id: bytes = b"", name: bytes | None = None) -> bytes:
        """A mapping's record with ``build_id`` (at most `MAX_ID` bytes), as the kernel makes it.

        Without, it keeps what it says of its file. ``name`` takes the place of the path. It is
        larger or smaller than before by a multiple of 8 bytes.
        """
        kind, misc, data, at, size, *_ = raw
        trailer = self._layouts.trailer(data, at, size)[0]
        begin = _MMAP2_NAME if kind == MMAP2 else _MMAP_NAME
        if name is None:
            name = data[at + begin : at + size - trailer].partition(b"\0")[0]
        body = data[at + _HEADER : at + begin]
        if build_id:
            union = bytes((len(build_id), 0, 0, 0)) + build_id.ljust(MAX_ID, b"\0")
            rest = body[_FIXED + 24 :] or Struct(f"{self._order}II").pack(
                _PROT_READ_EXEC, _MAP_PRIVATE
            )
            body = body[:_FIXED] + union + rest
            kind, misc = MMAP2, misc | _MISC_BUILD_ID
        body += name + bytes(8 - len(name) % 8) + data[at + size - trailer : at + size]
        return Struct(f"{self._order}IHH").pack(kind, misc, _HEADER + len(body)) + body
