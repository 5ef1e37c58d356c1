# SPDX-License-Identifier: Apache-2.0
"""Records that perf events leave in their ring: which files are mapped, and by whom.

Only what tells of processes and mappings is decoded. Source: perf_event_open(2) and
include/uapi/linux/perf_event.h; every record ends with the time it was made (`SAMPLE_TYPE`).
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Final

import msgspec

from buildidfs.model import NamespaceSet

SAMPLE_TYPE: Final = 1 << 2
"""PERF_SAMPLE_TIME: the one field that, with sample_id_all, ends each record."""

_LOST: Final = 2
_EXIT: Final = 4
_FORK: Final = 7
_MMAP2: Final = 10
_NAMESPACES: Final = 16

_MISC_BUILD_ID: Final = 1 << 14
_PROT_EXEC: Final = 4
_KINDS: Final = len(NamespaceSet.__struct_fields__)

_HEADER: Final = Struct("=IHH")  # type, misc, size
_TIME: Final = Struct("=Q")
_MAPPED: Final = Struct("=IIQQQIIQQI4x")  # pid, tid; addr, len, pgoff; maj, min, ino, gen; prot
_NAME: Final = _HEADER.size + _MAPPED.size
_TASK: Final = Struct("=IIIIQ")  # pid, ppid, tid, ptid, time
_IN: Final = Struct("=IIQ")  # pid, tid, number of namespaces
_NAMESPACE: Final = Struct("=QQ")  # device, inode
_COUNT: Final = Struct("=QQ")  # event, lost


class Mapped(msgspec.Struct, gc=False):
    """A file was mapped executable. Addresses in bytes, ``dev`` and ``inode`` as in /proc/PID/maps.

    ``tid`` is the thread that did it: it can be asked when the first one of its process is gone.

    ``build_id`` is what the kernel read, where it was asked to; ``dev``, ``inode`` and
    ``generation`` are then 0. Names that are no paths (``[vdso]``, ``//anon``) come too.
    """

    time: int
    pid: int
    start: int
    end: int
    dev: tuple[int, int]
    inode: int
    generation: int
    path: bytes
    build_id: bytes = b""
    tid: int = 0


class Forked(msgspec.Struct, gc=False):
    """A process began; threads are not reported."""

    time: int
    pid: int
    parent: int


class Exited(msgspec.Struct, gc=False):
    """A process ended: its last thread, or the one it began with."""

    time: int
    pid: int


class Entered(msgspec.Struct, gc=False):
    """A process is in these namespaces from now on: after clone, unshare or setns.

    A thread that goes elsewhere without its process is not reported.
    """

    time: int
    pid: int
    namespaces: NamespaceSet


class Lost(msgspec.Struct, gc=False):
    """So many records found no room in the ring."""

    time: int
    count: int


Record = Mapped | Forked | Exited | Entered | Lost


def decode(data: bytes, *, paths: bool = False) -> Iterator[Record]:
    """The records in whole bytes of a ring, in its order; others are passed over.

    So are those of processes outside the PID namespace that the events were opened in: all of them
    have the number 0. With ``paths`` so are mappings of what has no path, which each program has
    one of. Ends early at what is not a record: the kernel writes whole ones only.
    """
    position, end = 0, len(data)
    while position + _HEADER.size <= end:
        kind, misc, size = _HEADER.unpack_from(data, position)
        if size < _HEADER.size or position + size > end:
            return
        reader = _READERS.get(kind)
        if paths and kind == _MMAP2 and not _has_path(data, position + _NAME):
            reader = None
        if reader is not None:
            record = reader(data, position, size, misc)
            if record is not None:
                yield record
        position += size


def _has_path(data: bytes, name: int) -> bool:
    return data[name : name + 1] == b"/" and data[name + 1 : name + 2] != b"/"


def _mapped(data: bytes, position: int, size: int, misc: int) -> Mapped | None:
    name = position + _NAME
    stop = position + size - _TIME.size
    if stop <= name:
        return None
    pid, tid, start, length, _, major, minor, inode, generation, prot = _MAPPED.unpack_from(
        data, position + _HEADER.size
    )
    if not prot & _PROT_EXEC or not pid:
        return None
    path = data[name:stop]
    terminator = path.find(b"\0")
    build_id = b""
    if misc & _MISC_BUILD_ID:
        union = position + _HEADER.size + 32
        build_id = data[union + 4 : union + 4 + min(data[union], 20)]
        major = minor = inode = generation = 0
    (time,) = _TIME.unpack_from(data, stop)
    return Mapped(
        time,
        pid,
        start,
        start + length,
        (major, minor),
        inode,
        generation,
        path[:terminator] if terminator >= 0 else path,
        build_id,
        tid,
    )


def _forked(data: bytes, position: int, size: int, misc: int) -> Forked | None:
    if size < _HEADER.size + _TASK.size:
        return None
    pid, parent, tid, _, time = _TASK.unpack_from(data, position + _HEADER.size)
    return Forked(time, pid, parent) if pid and pid == tid else None


def _exited(data: bytes, position: int, size: int, misc: int) -> Exited | None:
    if size < _HEADER.size + _TASK.size:
        return None
    pid, _, tid, _, time = _TASK.unpack_from(data, position + _HEADER.size)
    return Exited(time, pid) if pid and pid == tid else None


def _entered(data: bytes, position: int, size: int, misc: int) -> Entered | None:
    first = position + _HEADER.size + _IN.size
    stop = position + size - _TIME.size
    if stop < first:
        return None
    pid, tid, count = _IN.unpack_from(data, position + _HEADER.size)
    if not pid or pid != tid or count > (stop - first) // _NAMESPACE.size:
        return None
    inodes = [
        _NAMESPACE.unpack_from(data, first + number * _NAMESPACE.size)[1]
        for number in range(min(count, _KINDS))
    ]
    (time,) = _TIME.unpack_from(data, stop)
    return Entered(time, pid, NamespaceSet(*inodes))


def _lost(data: bytes, position: int, size: int, misc: int) -> Lost | None:
    if size < _HEADER.size + _COUNT.size + _TIME.size:
        return None
    _, count = _COUNT.unpack_from(data, position + _HEADER.size)
    (time,) = _TIME.unpack_from(data, position + size - _TIME.size)
    return Lost(time, count)


_READERS: Final = {
    _LOST: _lost,
    _EXIT: _exited,
    _FORK: _forked,
    _MMAP2: _mapped,
    _NAMESPACES: _entered,
}
