# SPDX-License-Identifier: Apache-2.0
"""A program in the kernel that wakes the catcher when a process first touches an unknown file.

At each page fault of a mapped file, and at each exec, the program looks the file up in a map. The
key is the file in its present state (device, inode, generation, change time) and the mount
namespace of the process, so a file that changed, or a container that is new, is unknown. If the map
has no entry, the program writes a record into a ring, which wakes the thread of that CPU. Known
files wake nothing.

The program only wakes: the catcher pins a file by the record of its mapping, which is in the ring
of mappings by then. `Touches` adds a state of a file to the map when the catcher has recognised the
file by such a record, and found the same change time. From then on a record of the file needs no
look into the process, unless the program reports another state of the file. A file without a
record, which is mapped as data, is in the map for a while.

The tracepoints `mm_filemap_map_pages` and `mm_filemap_fault` exist since Linux 6.12 (commits
1f2ee8c7f4ae and following), and need no other feature of the kernel than BTF.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import sys
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs import log
from buildidfs.linux import bpf
from buildidfs.linux.bpf import Btf

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped

_FILES: Final = 1 << 16
_USERS: Final = 1 << 10
_CPUS: Final = 4096
# A second touch of a file within this time wakes no thread: the one that was woken is at work.
_PENDING_NS: Final = 5_000_000
_DATA_NS: Final = 2_000_000_000
# A user other than root can wake threads so many times in a window, and so cannot keep the threads
# of the catcher busy.
_WINDOW_NS: Final = 100_000_000
_MOST_IN_WINDOW: Final = 500
_LICENSE: Final = b"Dual BSD/GPL"  # of the program in the kernel, which needs one of a short list

# struct key { u64 inode, mnt_ns_id; s64 ctime; u32 ctime_nsec, dev, generation, kind; }
# struct event { struct key; u64 pid; }, on the program's stack.
_KEY: Final = struct.Struct("=QQqIIII")
_EVENT: Final = struct.Struct(f"={_KEY.size}sQ")
_EVENT_AT: Final = -_EVENT.size
_INODE, _MNT_ID, _CTIME, _NSEC, _DEV, _GENERATION, _KIND, _PID = (
    _EVENT_AT + offset for offset in (0, 8, 16, 24, 28, 32, 36, 40)
)
_VALUE: Final = _EVENT_AT - 16
_USER: Final = _VALUE - 8
_FLAG_FREE: Final = 0x7FFFFFFF  # the highest bit of the nanoseconds is a flag since Linux 6.13

# Kinds of keys: a state of a file that was touched or executed; a file in any state, mapped as
# data. An event of the last kind says that a user has touched too many files.
_TOUCHED, _EXECUTED, _DATA, _LIMITED = range(4)

_MINOR_BITS: Final = 20  # of a device number inside the kernel
_NS: Final = 1_000_000_000

_TRACEPOINTS: Final = (
    ("mm_filemap_map_pages", _TOUCHED),
    ("mm_filemap_fault", _TOUCHED),
    ("sched_process_exec", _EXECUTED),
)
_EXEC_ARGUMENT: Final = 2  # struct linux_binprm; the first one of the others is an address_space


class Touch(NamedTuple):
    """The first touch of an unknown file: the key of its state, its place, and its change time in
    ns. ``is_limited``: a user has touched so many that further ones are not reported for a moment.
    """

    key: bytes
    dev: tuple[int, int]
    inode: int
    mnt_ns_id: int
    ctime_ns: int
    is_limited: bool


def decode_touch(data: bytes) -> Touch:
    """Decode what the program has written. Raises ValueError."""
    try:
        key, _ = _EVENT.unpack_from(data)
    except struct.error as error:
        raise ValueError(f"not a touch: {error}") from error
    inode, mnt_ns_id, seconds, nanoseconds, dev, _, kind = _KEY.unpack(key)
    numbers = dev >> _MINOR_BITS, dev & (1 << _MINOR_BITS) - 1
    ctime = seconds * _NS + nanoseconds
    return Touch(key, numbers, inode, mnt_ns_id, ctime, kind == _LIMITED)


class FirstTouch:
    """The program and its map; close it to end both.

    With ``cgroup_fd``, it reports only processes of a control group (version 2) and those below it.
    Raises OSError if the kernel refuses the program or lacks the tracepoints, LookupError and
    ValueError if the types of the kernel are not understood. Methods are thread-safe.
    """

    def __init__(self, cgroup_fd: int = -1) -> None:
        self._fds = contextlib.ExitStack()
        self._lock = threading.Lock()
        types = Btf()
        # A kernel without the tracepoints has other structures, too, and before Linux 5.11 it
        # counts maps against RLIMIT_MEMLOCK: look for the tracepoints first.
        numbers = [(types.tracepoint(name), kind) for name, kind in _TRACEPOINTS]
        places = _Places(types)
        with contextlib.ExitStack() as undo:
            undo.callback(self._fds.close)
            self._files = self._own(bpf.create_map(bpf.LRU_HASH, _KEY.size, 8, _FILES))
            self._rings = self._own(bpf.create_map(bpf.PERF_EVENT_ARRAY, 4, 4, _CPUS))
            self._users = self._own(bpf.create_map(bpf.LRU_HASH, 4, 16, _USERS))
            self._groups = -1
            if cgroup_fd >= 0:
                self._groups = self._own(bpf.create_map(bpf.CGROUP_ARRAY, 4, 4, 1))
                bpf.set_descriptor(self._groups, 0, cgroup_fd)
            self._slot = bpf.Slot(self._files, _KEY.size, 8)
            for number, kind in numbers:
                self._attach(number, places, kind)
            undo.pop_all()

    def _own(self, fd: int) -> int:
        self._fds.callback(os.close, fd)
        return fd

    def _attach(self, tracepoint: int, places: _Places, kind: int) -> None:
        maps = _Maps(self._files, self._rings, self._users, self._groups)
        code = _program(places, maps, kind)
        self._own(bpf.attach(self._own(bpf.load(code, tracepoint, _LICENSE, b"buildidfs"))))

    def follow(self, cpu: int, ring_fd: int) -> None:
        """Write into this ring on a CPU. Raises OSError."""
        bpf.set_descriptor(self._rings, cpu, ring_fd)

    def know(self, key: bytes) -> None:
        """From now on wake no thread for a file in this state."""
        with self._lock:
            self._slot.put(key, bytes(8))

    def know_data(self, touch: Touch) -> None:
        """Wake no thread for a file in any state for a while, unless it is executed."""
        inode, mnt_ns_id, _, _, dev, generation, _ = _KEY.unpack(touch.key)
        key = _KEY.pack(inode, mnt_ns_id, 0, 0, dev, generation, _DATA)
        until = time.monotonic_ns() + _DATA_NS
        with self._lock:
            self._slot.put(key, until.to_bytes(8, sys.byteorder))

    def forget(self, key: bytes) -> None:
        """Let the next touch of a file in this state wake the catcher."""
        with self._lock:
            self._slot.remove(key)

    def close(self) -> None:
        """End the program; safe to call twice."""
        self._fds.close()


def start(cgroup_fd: int = -1) -> tuple[FirstTouch | None, str]:
    """Start the program. If this kernel or its settings refuse it, return None and the reason."""
    try:
        return FirstTouch(cgroup_fd), ""
    except FileNotFoundError:
        return None, "the kernel has no BTF, or does not report touches of files as Linux 6.12 does"
    except OSError as error:
        return None, f"the kernel refuses a BPF program: {error.strerror or error}"
    except (LookupError, ValueError) as error:
        return None, f"this kernel's types are not as expected: {error}"


class _Maps(NamedTuple):
    """Descriptors of the maps; ``groups`` has the followed control group, or is -1."""

    files: int
    rings: int
    users: int
    groups: int


class _Places:
    """The offsets of the fields that the program reads."""

    def __init__(self, types: Btf) -> None:
        offset = types.offset
        self.host = offset("address_space", "host")
        self.sb = offset("inode", "i_sb")
        self.inode = offset("inode", "i_ino")
        self.generation = offset("inode", "i_generation")
        self.ctime, self.nsec = _change_time(types)
        self.dev = offset("super_block", "s_dev")
        self.nsproxy = offset("task_struct", "nsproxy")
        self.mnt_ns = offset("nsproxy", "mnt_ns")
        self.ns_id = _namespace_id(types)
        self.exec_file = offset("linux_binprm", "file")
        self.file_inode = offset("file", "f_inode")


def _change_time(types: Btf) -> tuple[int, int]:
    """Return the offsets of the seconds and nanoseconds of an inode's change time."""
    try:  # since commit 3aa63a569c64e (Linux 6.11)
        return types.offset("inode", "i_ctime_sec"), types.offset("inode", "i_ctime_nsec")
    except LookupError:
        at = types.offset("inode", "__i_ctime")  # since Linux 6.6
        return at, at + types.offset("timespec64", "tv_nsec")


def _namespace_id(types: Btf) -> int:
    """Return the offset of the ID of a mount namespace, which is never used again."""
    try:
        return types.offset("mnt_namespace", "ns", "ns_id")  # since Linux 6.18
    except LookupError:
        return types.offset("mnt_namespace", "seq")


# Registers of the program that survive calls.
_CONTEXT, _POINTED, _INODE_OF, _UNTIL = 6, 7, 8, 9


def _program(places: _Places, maps: _Maps, kind: int) -> bytes:
    """Return the instructions: find the inode, make the key, look it up, report it if unknown."""
    a = bpf.Assembler()
    a.move(_CONTEXT, 1)
    if maps.groups >= 0:
        a.load_map(1, maps.groups)
        a.set(2, 0)
        a.call(bpf.CURRENT_TASK_UNDER_CGROUP)
        a.jump(bpf.JNE_K, 0, 1, "end")
    _make_key(a, places, kind)
    _look_up(a, maps.files, "unknown")
    a.label("unknown")
    if kind == _TOUCHED:
        for at, value, size in ((_CTIME, 0, 8), (_NSEC, 0, 4), (_KIND, _DATA, 4)):
            a.store_constant(bpf.FP, at, value, size)
        _look_up(a, maps.files, "new")
        a.label("new")
        _store_state(a, places, kind)
    _limit(a, maps.users)
    a.label("report")
    a.call(bpf.KTIME_GET_NS)
    a.add(0, _PENDING_NS)
    a.store(bpf.FP, _VALUE, 0)
    _update(a, maps.files, _EVENT_AT)
    a.label("send")
    a.call(bpf.GET_CURRENT_PID_TGID)
    a.high_half(0)
    a.store(bpf.FP, _PID, 0)
    a.move(1, _CONTEXT)
    a.load_map(2, maps.rings)
    a.set(3, -1)
    a.high_half(3)  # the ring of this CPU
    _address(a, 4, _EVENT_AT)
    a.set(5, _EVENT.size)
    a.call(bpf.PERF_EVENT_OUTPUT)
    a.label("end")
    a.exit()
    return a.code()


def _make_key(a: bpf.Assembler, places: _Places, kind: int) -> None:
    """Make the key of the file and the mount namespace of the process.

    The verifier knows the types of all pointers, so they are followed without a call. What cannot
    be read is 0.
    """
    a.load(_INODE_OF, _CONTEXT, 8 * (_EXEC_ARGUMENT if kind == _EXECUTED else 0))
    path = (places.exec_file, places.file_inode) if kind == _EXECUTED else (places.host,)
    for offset in path:
        a.load(_INODE_OF, _INODE_OF, offset)
    a.jump(bpf.JEQ_K, _INODE_OF, 0, "end")
    a.load(1, _INODE_OF, places.inode)
    a.store(bpf.FP, _INODE, 1)
    a.load(1, _INODE_OF, places.generation, 4)
    a.store(bpf.FP, _GENERATION, 1, 4)
    a.load(1, _INODE_OF, places.sb)
    a.load(1, 1, places.dev, 4)
    a.store(bpf.FP, _DEV, 1, 4)
    _store_state(a, places, kind)
    a.call(bpf.GET_CURRENT_TASK_BTF)
    for offset in (places.nsproxy, places.mnt_ns, places.ns_id):
        a.load(0, 0, offset)
    a.store(bpf.FP, _MNT_ID, 0)


def _store_state(a: bpf.Assembler, places: _Places, kind: int) -> None:
    a.load(1, _INODE_OF, places.ctime)
    a.store(bpf.FP, _CTIME, 1)
    a.load(1, _INODE_OF, places.nsec, 4)
    a.mask(1, _FLAG_FREE)
    a.store(bpf.FP, _NSEC, 1, 4)
    a.store_constant(bpf.FP, _KIND, kind, 4)


def _look_up(a: bpf.Assembler, files: int, missing: str) -> None:
    """Jump to ``missing`` if the map has not the key, or its time is over; else end."""
    a.load_map(1, files)
    _address(a, 2, _EVENT_AT)
    a.call(bpf.MAP_LOOKUP)
    a.jump(bpf.JEQ_K, 0, 0, missing)
    a.load(_UNTIL, 0, 0)
    a.jump(bpf.JEQ_K, _UNTIL, 0, "end")
    a.call(bpf.KTIME_GET_NS)
    a.jump(bpf.JLT_X, 0, _UNTIL, "end")


def _limit(a: bpf.Assembler, users: int) -> None:
    """Count the files of a user; after too many in a window report that, and then nothing."""
    a.call(bpf.GET_CURRENT_UID_GID)
    a.store(bpf.FP, _USER, 0, 4)
    a.load(1, bpf.FP, _USER, 4)
    a.jump(bpf.JEQ_K, 1, 0, "report")
    a.load_map(1, users)
    _address(a, 2, _USER)
    a.call(bpf.MAP_LOOKUP)
    a.move(_POINTED, 0)
    a.jump(bpf.JEQ_K, _POINTED, 0, "first")
    a.call(bpf.KTIME_GET_NS)
    a.load(1, _POINTED, 0)
    a.add(1, _WINDOW_NS)
    a.jump(bpf.JLT_X, 1, 0, "window")
    a.load(1, _POINTED, 8)
    a.add(1, 1)
    a.store(_POINTED, 8, 1)
    a.set(2, _MOST_IN_WINDOW)
    a.jump(bpf.JLT_X, 1, 2, "report")
    a.store_constant(bpf.FP, _KIND, _LIMITED, 4)
    a.jump(bpf.JEQ_K, 1, _MOST_IN_WINDOW, "send")
    a.go("end")
    a.label("window")
    a.store(_POINTED, 0, 0)
    a.store_constant(_POINTED, 8, 1)
    a.go("report")
    a.label("first")
    a.call(bpf.KTIME_GET_NS)
    a.store(bpf.FP, _VALUE, 0)
    a.store_constant(bpf.FP, _VALUE + 8, 1)
    _update(a, users, _USER)


def _update(a: bpf.Assembler, map_fd: int, key: int) -> None:
    """Put a value from the stack into a map."""
    a.load_map(1, map_fd)
    _address(a, 2, key)
    _address(a, 3, _VALUE)
    a.set(4, 0)
    a.call(bpf.MAP_UPDATE)


def _address(a: bpf.Assembler, target: int, at: int) -> None:
    """Set a register to a place on the stack."""
    a.move(target, bpf.FP)
    a.add(target, at)


# --- recognised files ----------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_TRACES: Final = log.is_debug()  # see `grabber`

_REMEMBERED: Final = 1 << 14
_MOST_STATES: Final = 8  # of one file that is recognised

_File = tuple[tuple[int, int], int]
_Place = tuple[tuple[int, int], int, int]


class _Recognised:
    """A file in a mount namespace: its change time in ns, its `place_key`, and the keys of states
    that the program knows.
    """

    __slots__ = ("ctime_ns", "keys", "place")

    def __init__(self, ctime_ns: int, place: bytes) -> None:
        self.ctime_ns = ctime_ns
        self.place = place
        self.keys: set[bytes] = set()


class Touches:
    """The touched and the recognised files, in bounded memory. Thread-safe.

    Homes must be known, else their files are not recognised. A record and a touch may be read in
    either order, by different threads. So the latest record of each file is kept: if a touch shows
    that its file has changed since, the record is looked at after all.
    """

    def __init__(self, program: FirstTouch, most: int = _REMEMBERED) -> None:
        self._program = program
        self._most = most
        self._lock = threading.Lock()
        self._waiting: dict[_Place, list[Touch]] = {}
        self._recognised: dict[_Place, _Recognised] = {}
        self._places: dict[bytes, _Place] = {}
        self._young: dict[_File, tuple[Mapped, Home, bool]] = {}
        self._old: dict[_File, tuple[Mapped, Home, bool]] = {}

    def add(self, touch: Touch) -> None:
        """Take a touch, before the records of mappings are read."""
        if _TRACES:
            _log.debug("the kernel's program reports inode %d of %d:%d", touch.inode, *touch.dev)
        with self._lock:
            place = touch.dev, touch.inode, touch.mnt_ns_id
            self._waiting.setdefault(place, []).append(touch)

    def skips(self, record: Mapped, home: Home) -> bool:
        """Return True if the file of a record is recognised, and no change of it is reported."""
        place = record.dev, record.inode, home.mnt_ns_id
        skips = place in self._recognised and place not in self._waiting
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}
        self._young[record.dev, record.inode] = record, home, skips
        if _TRACES and skips:
            _log.debug("%s: known to the kernel's program, pid %d", record.path, record.pid)
        return skips

    def recognise(self, record: Mapped, home: Home, ctime_ns: int, place_key: bytes) -> None:
        """Let the program know a file that the catcher has recognised by a record."""
        place = record.dev, record.inode, home.mnt_ns_id
        with self._lock:
            known = self._recognised.get(place)
            if known is None or known.ctime_ns != ctime_ns or known.place != place_key:
                if known is not None:
                    self._forget(place)
                elif len(self._recognised) >= self._most:
                    self._forget(next(iter(self._recognised)))
                known = self._recognised[place] = _Recognised(ctime_ns, place_key)
                self._places[place_key] = place
            self._know(known, self._waiting.pop(place, ()))

    def settle(self, touches: Iterable[Touch]) -> Iterator[tuple[Mapped, Home]]:
        """Yield the records that must be looked at after all, once all records were handled."""
        for touch in touches:
            place = touch.dev, touch.inode, touch.mnt_ns_id
            with self._lock:
                if self._waiting.pop(place, None) is None:
                    continue
                known = self._recognised.get(place)
                if known is not None and self._know(known, (touch,)):
                    continue
                latest = self._young.get(place[:2]) or self._old.get(place[:2])
                if latest is None and known is None:
                    self._program.know_data(touch)
            if latest is not None and latest[2]:
                yield latest[0], latest[1]

    def _know(self, known: _Recognised, touches: Iterable[Touch]) -> bool:
        """Let the program know the touches of a recognised state; False for another state."""
        same = [touch for touch in touches if touch.ctime_ns == known.ctime_ns]
        for touch in same:
            if len(known.keys) < _MOST_STATES:
                known.keys.add(touch.key)
                if _TRACES:
                    _log.debug("the kernel's program knows inode %d from now on", touch.inode)
                self._program.know(touch.key)
        return bool(same)

    def forget(self, place_keys: Iterable[bytes]) -> None:
        """Let the program report these files again."""
        with self._lock:
            for place_key in place_keys:
                place = self._places.get(place_key)
                if place is not None:
                    self._forget(place)

    def _forget(self, place: _Place) -> None:
        known = self._recognised.pop(place)
        self._places.pop(known.place, None)
        for key in known.keys:
            self._program.forget(key)
