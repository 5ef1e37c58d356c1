# SPDX-License-Identifier: Apache-2.0
"""Records of perf events on processes and their mappings: in rings, and in perf.data.

`decode_ring` reads the records that the kernel writes into the rings of live events; all of them
end with the time (PERF_SAMPLE_TIME). `Events` reads the same records from a file: in either byte
order, followed by the fields of their event. Some of these come from perf itself, with a time of 0;
they describe the state before the first event. `Rewriter` writes such records with changed fields.
Source: perf_event_open(2), include/uapi/linux/perf_event.h, tools/lib/perf/include/perf/event.h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.perf.headers import CPUMODE, MAX_ID, MIN_ID
from buildidfs.model import NamespaceSet

if TYPE_CHECKING:
    from buildidfs.formats.perf.attributes import Layouts
    from buildidfs.formats.perf.record_stream import Raw

MMAP: Final = 1
_LOST: Final = 2
COMM: Final = 3
EXIT: Final = 4
FORK: Final = 7
SAMPLE: Final = 9
MMAP2: Final = 10
_LOST_SAMPLES: Final = 13
NAMESPACES: Final = 16
_CGROUP: Final = 19
CALLCHAIN_DEFERRED: Final = 22  # since Linux 6.19
HEADER_ATTR: Final = 64
HEADER_BUILD_ID: Final = 67
HEADER_FEATURE: Final = 80

TELLING: Final = frozenset((MMAP, MMAP2, COMM, FORK, NAMESPACES, _LOST, _LOST_SAMPLES))
"""The kinds of records that `Events` reads."""

KERNEL_PID: Final = 0xFFFFFFFF
"""The process ID that mappings of the kernel have."""

_MISC_DATA: Final = 1 << 13  # of a mapping
_MISC_EXEC: Final = 1 << 13  # of a fork or a name
_MISC_BUILD_ID: Final = 1 << 14

_PROT_EXEC: Final = 4
_PROT_READ_EXEC: Final = 5
_MAP_PRIVATE: Final = 2
_PATH_MAX: Final = 4096
_KINDS: Final = len(NamespaceSet.__struct_fields__)


class _Layout:
    """The fixed parts of records, in the byte order ``order`` of struct."""

    def __init__(self, order: str) -> None:
        self.header = Struct(f"{order}IHH")  # type, misc, size
        self.mmap = Struct(f"{order}IIQQQ")  # pid, tid; address, length, offset
        # The same; major, minor, inode, generation, or a build ID; protection, flags.
        self.mmap2 = Struct(f"{order}IIQQQIIQQII")
        self.task = Struct(f"{order}IIIIQ")  # pid, pid of the parent; tid, tid of the parent; time
        self.thread = Struct(f"{order}II")  # pid, tid
        self.namespaces = Struct(f"{order}IIQ")  # pid, tid, number of namespaces that follow
        self.namespace = Struct(f"{order}QQ")  # device, inode
        self.word = Struct(f"{order}Q")
        self.size = Struct(f"{order}I")


_NATIVE: Final = _Layout("=")
_HEADER: Final = _NATIVE.header.size
_UNION: Final = _HEADER + _NATIVE.mmap.size  # bits for inode and build ID
_MMAP_NAME: Final = _UNION
_MMAP2_NAME: Final = _HEADER + _NATIVE.mmap2.size
_TIME: Final = _NATIVE.word.size


class Mapped(msgspec.Struct, frozen=True, gc=False):
    """An executable mapping of a file, or of an area with a name in brackets.

    ``start``, ``end`` and ``offset`` are in bytes. A record has either ``build_id``, or ``dev``,
    ``inode`` and ``generation`` as in /proc/PID/maps; records of old kernels have neither.
    ``cpumode`` distinguishes mappings of the kernel and of guests from others. In records of rings,
    ``tid`` is the thread that mapped it.
    """

    time: int
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
    tid: int = 0


class ExecutableMemory(msgspec.Struct, frozen=True, gc=False):
    """Memory without a file was made executable: a process may put code there."""

    time: int
    pid: int


class GroupMade(msgspec.Struct, frozen=True, gc=False):
    """A control group was made: a container may be about to start."""

    time: int


class Output(msgspec.Struct, frozen=True, gc=False):
    """Bytes that a program of bpf(2) wrote, of events with SAMPLE_TIME and SAMPLE_RAW."""

    time: int
    data: bytes


class Forked(msgspec.Struct, frozen=True, gc=False):
    """A process began; it has the mappings of its parent if ``inherits``."""

    time: int
    pid: int
    parent: int
    inherits: bool = True


class Exited(msgspec.Struct, frozen=True, gc=False):
    """The last thread of a process ended, or its first thread."""

    time: int
    pid: int


class Executed(msgspec.Struct, frozen=True, gc=False):
    """A process became another program: all its mappings are gone."""

    time: int
    pid: int


class ThreadNamed(msgspec.Struct, frozen=True, gc=False):
    """A thread got a name (comm)."""

    time: int
    tid: int
    name: bytes


class ThreadForked(msgspec.Struct, frozen=True, gc=False):
    """A thread began, as a copy of the thread ``parent``."""

    time: int
    tid: int
    parent: int


class Entered(msgspec.Struct, frozen=True, gc=False):
    """A process is in these namespaces from now on: after clone, unshare or setns.

    A thread that enters others without its process is not reported.
    """

    time: int
    pid: int
    namespaces: NamespaceSet


class LostRecords(msgspec.Struct, frozen=True, gc=False):
    """``count`` records were dropped because the ring had no room."""

    time: int
    count: int


Record = Mapped | ExecutableMemory | GroupMade | Output | Forked | Exited | Entered | LostRecords
"""A record of a ring."""

Event = Mapped | Forked | Executed | Entered | LostRecords
"""A record of a file."""


def _build_id(data: bytes, union: int) -> bytes:
    return data[union + 4 : union + 4 + min(data[union], MAX_ID)]


def _entered(layout: _Layout, data: bytes, at: int, stop: int, time: int) -> Entered | None:
    """Return the namespaces in a record from ``at`` to ``stop``, where the fields of its event
    begin.
    """
    first = at + _HEADER + layout.namespaces.size
    if stop < first:
        return None
    pid, tid, count = layout.namespaces.unpack_from(data, at + _HEADER)
    if pid != tid or count > (stop - first) // layout.namespace.size:
        return None
    inodes = [
        layout.namespace.unpack_from(data, first + number * layout.namespace.size)[1]
        for number in range(min(count, _KINDS))
    ]
    return Entered(time, pid, NamespaceSet(*inodes))


_Decode = Callable[[bytes, int, int, int], Record | None]

# --- rings ---------------------------------------------------------------------------------------


def decode_ring(data: bytes, *, paths: bool = False) -> Iterator[Record]:
    """Yield the records in whole bytes of a ring, in its order; other kinds are skipped.

    Records of processes outside the PID namespace of the events are skipped, too: all of them have
    the number 0. With ``paths``, mappings without a path are skipped, because each program has one,
    except those of anonymous memory, for which only the process is reported. Ends early at an
    invalid record, because the kernel writes whole records only.

    The events must not have attr.build_id. While an event of another program has it, the kernel
    sets PERF_RECORD_MISC_MMAP_BUILD_ID in records of these events too, although they have device
    and inode (perf_event_mmap_output). So this flag is ignored.
    """
    unpack = _NATIVE.header.unpack_from
    position, end = 0, len(data)
    while position + _HEADER <= end:
        kind, misc, size = unpack(data, position)
        if size < _HEADER or position + size > end:
            return
        decode: _Decode | None = _DECODERS.get(kind)
        if paths and kind == MMAP2 and not _has_path(data, position + _MMAP2_NAME):
            decode = None
            if _is_anonymous(data, position + _MMAP2_NAME):
                decode = _ring_generated
        if decode is not None:
            record = decode(data, position, size, misc)
            if record is not None:
                yield record
        position += size


def _has_path(data: bytes, name: int) -> bool:
    return data[name : name + 1] == b"/" and data[name + 1 : name + 2] != b"/"


def _is_anonymous(data: bytes, name: int) -> bool:
    return data[name : name + len(_ANONYMOUS)] == _ANONYMOUS


def _ring_generated(data: bytes, position: int, size: int, misc: int) -> ExecutableMemory | None:
    if size < _MMAP2_NAME + len(_ANONYMOUS) + _TIME:
        return None
    fields = _UNPACK_MMAP2(data, position + _HEADER)
    pid, prot = fields[0], fields[-2]
    (time,) = _UNPACK_TIME(data, position + size - _TIME)
    return ExecutableMemory(time, pid) if pid and prot & _PROT_EXEC else None


def _ring_mapped(data: bytes, position: int, size: int, misc: int) -> Mapped | None:
    name = position + _MMAP2_NAME
    stop = position + size - _TIME
    if stop <= name:
        return None
    pid, tid, start, length, offset, major, minor, inode, generation, prot, _ = _UNPACK_MMAP2(
        data, position + _HEADER
    )
    if not prot & _PROT_EXEC or not pid:
        return None
    path = data[name:stop]
    terminator = path.find(b"\0")
    (time,) = _UNPACK_TIME(data, stop)
    return Mapped(
        time,
        pid,
        start,
        start + length,
        offset,
        path[:terminator] if terminator >= 0 else path,
        (major, minor),
        inode,
        generation,
        cpumode=misc & CPUMODE,
        tid=tid,
    )


def _ring_forked(data: bytes, position: int, size: int, misc: int) -> Forked | None:
    if size < _HEADER + _NATIVE.task.size:
        return None
    pid, parent, tid, _, time = _NATIVE.task.unpack_from(data, position + _HEADER)
    return Forked(time, pid, parent) if pid and pid == tid else None


def _ring_exited(data: bytes, position: int, size: int, misc: int) -> Exited | None:
    if size < _HEADER + _NATIVE.task.size:
        return None
    pid, _, tid, _, time = _NATIVE.task.unpack_from(data, position + _HEADER)
    return Exited(time, pid) if pid and pid == tid else None


def _ring_entered(data: bytes, position: int, size: int, misc: int) -> Entered | None:
    stop = position + size - _TIME
    if stop < position + _HEADER:
        return None
    (time,) = _UNPACK_TIME(data, stop)
    found = _entered(_NATIVE, data, position, stop, time)
    return found if found is not None and found.pid else None


def _ring_group_made(data: bytes, position: int, size: int, misc: int) -> GroupMade | None:
    if size < _HEADER + 2 * _TIME:
        return None
    return GroupMade(_UNPACK_TIME(data, position + size - _TIME)[0])


def _ring_output(data: bytes, position: int, size: int, misc: int) -> Output | None:
    first = position + _HEADER + _TIME + _NATIVE.size.size
    if first > position + size:
        return None
    (time,) = _UNPACK_TIME(data, position + _HEADER)
    (count,) = _NATIVE.size.unpack_from(data, position + _HEADER + _TIME)
    return Output(time, data[first : min(first + count, position + size)])


def _ring_lost(data: bytes, position: int, size: int, misc: int) -> LostRecords | None:
    if size < _HEADER + 3 * _TIME:
        return None
    (count,) = _UNPACK_TIME(data, position + _HEADER + _TIME)
    (time,) = _UNPACK_TIME(data, position + size - _TIME)
    return LostRecords(time, count)


_UNPACK_MMAP2: Final = _NATIVE.mmap2.unpack_from
_UNPACK_TIME: Final = _NATIVE.word.unpack_from
_ANONYMOUS: Final = b"//anon\0"
_DECODERS: Final[dict[int, _Decode]] = {
    _LOST: _ring_lost,
    EXIT: _ring_exited,
    FORK: _ring_forked,
    MMAP2: _ring_mapped,
    NAMESPACES: _ring_entered,
    _CGROUP: _ring_group_made,
    SAMPLE: _ring_output,
}


# --- files ---------------------------------------------------------------------------------------


class Events:
    """Reads the records of a file. Times that were not recorded are 0.

    For records that are too short, or of other kinds, the result is None.
    """

    def __init__(self, layouts: Layouts, order: str) -> None:
        self._layouts = layouts
        self._layout = _Layout(order)

    def read(self, raw: Raw) -> Event | None:
        kind = raw.kind
        if kind in (MMAP, MMAP2):
            return self.mapped(raw)
        if kind == FORK:
            return self._forked(raw)
        if kind == COMM:
            return self._executed(raw)
        if kind == NAMESPACES:
            trailer, time = self._layouts.trailer(raw.data, raw.at, raw.size)
            return _entered(self._layout, raw.data, raw.at, raw.at + raw.size - trailer, time or 0)
        if kind == _LOST and raw.size >= _HEADER + 16:
            return LostRecords(0, self._layout.word.unpack_from(raw.data, raw.at + _HEADER + 8)[0])
        if kind == _LOST_SAMPLES and raw.size >= _HEADER + 8:
            return LostRecords(0, self._layout.word.unpack_from(raw.data, raw.at + _HEADER)[0])
        return None

    def mapped(self, raw: Raw) -> Mapped | None:
        """Return an executable mapping; None also for a mapping of data."""
        kind, misc, data, at, size, *_ = raw
        trailer, recorded = self._layouts.trailer(data, at, size)
        time = recorded or 0
        name = _MMAP2_NAME if kind == MMAP2 else _MMAP_NAME
        if misc & _MISC_DATA or size - trailer <= name:
            return None
        pid, _, start, length, offset = self._layout.mmap.unpack_from(data, at + _HEADER)
        path = data[at + name : at + size - trailer].partition(b"\0")[0]
        end = start + length
        if len(path) >= _PATH_MAX or end > 1 << 64:
            return None
        mode = misc & CPUMODE
        if kind == MMAP:
            return Mapped(time, pid, start, end, offset, path, cpumode=mode)
        if misc & _MISC_BUILD_ID:
            build_id = _build_id(data, at + _UNION)
            build_id = build_id if data[at + _UNION] >= MIN_ID else b""
            return Mapped(time, pid, start, end, offset, path, build_id=build_id, cpumode=mode)
        fields = self._layout.mmap2.unpack_from(data, at + _HEADER)
        dev, inode, generation = fields[5:7], fields[7], fields[8]
        return Mapped(time, pid, start, end, offset, path, dev, inode, generation, cpumode=mode)

    def _forked(self, raw: Raw) -> Forked | None:
        if raw.size < _HEADER + self._layout.task.size:
            return None
        pid, parent, tid, _, time = self._layout.task.unpack_from(raw.data, raw.at + _HEADER)
        if pid == parent or pid != tid:
            return None  # a thread
        return Forked(time, pid, parent, not raw.misc & _MISC_EXEC)

    def thread(self, raw: Raw) -> ThreadNamed | ThreadForked | None:
        """Return the change of a thread in a record of the kind `COMM` or `FORK`."""
        if raw.kind == COMM and raw.size >= _HEADER + self._layout.thread.size:
            at = raw.at + _HEADER
            _, tid = self._layout.thread.unpack_from(raw.data, at)
            trailer, time = self._layouts.trailer(raw.data, raw.at, raw.size)
            text = raw.data[at + self._layout.thread.size : raw.at + raw.size - trailer]
            return ThreadNamed(time or 0, tid, text.partition(b"\0")[0])
        if raw.kind == FORK and raw.size >= _HEADER + self._layout.task.size:
            _, _, tid, parent, time = self._layout.task.unpack_from(raw.data, raw.at + _HEADER)
            return ThreadForked(time, tid, parent)
        return None

    def _executed(self, raw: Raw) -> Executed | None:
        if not raw.misc & _MISC_EXEC or raw.size < _HEADER + self._layout.thread.size:
            return None
        pid, _ = self._layout.thread.unpack_from(raw.data, raw.at + _HEADER)
        return Executed(self._layouts.trailer(raw.data, raw.at, raw.size)[1] or 0, pid)


class Rewriter:
    """Writes mappings with a build ID, or with another name."""

    def __init__(self, layouts: Layouts, order: str) -> None:
        self._layouts = layouts
        self._order = order

    def mapped(
        self,
        raw: Raw,
        build_id: bytes = b"",
        name: bytes | None = None,
        offset: int | None = None,
    ) -> bytes:
        """Return a mapping's record with ``build_id`` (at most `MAX_ID` bytes), in the kernel's
        form.

        Without a build ID, the record keeps its fields for the file. ``name`` replaces the path,
        ``offset`` the offset in the file. The record grows or shrinks by a multiple of 8 bytes.
        """
        kind, misc, data, at, size, *_ = raw
        trailer = self._layouts.trailer(data, at, size)[0]
        begin = _MMAP2_NAME if kind == MMAP2 else _MMAP_NAME
        if name is None:
            name = data[at + begin : at + size - trailer].partition(b"\0")[0]
        body = data[at + _HEADER : at + begin]
        fixed = _NATIVE.mmap.size
        if offset is not None:
            word = Struct(f"{self._order}Q")
            body = body[: fixed - word.size] + word.pack(offset) + body[fixed:]
        if build_id:
            union = bytes((len(build_id), 0, 0, 0)) + build_id.ljust(MAX_ID, b"\0")
            rest = body[fixed + len(union) :] or Struct(f"{self._order}II").pack(
                _PROT_READ_EXEC, _MAP_PRIVATE
            )
            body = body[:fixed] + union + rest
            kind, misc = MMAP2, misc | _MISC_BUILD_ID
        body += name + bytes(8 - len(name) % 8) + data[at + size - trailer : at + size]
        return Struct(f"{self._order}IHH").pack(kind, misc, _HEADER + len(body)) + body
