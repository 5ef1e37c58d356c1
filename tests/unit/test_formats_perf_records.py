# SPDX-License-Identifier: Apache-2.0
"""Records of perf events: of files in both byte orders, of rings, and written anew."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.formats.perf import records
from buildidfs.formats.perf.attributes import Layouts, parse_attr
from buildidfs.formats.perf.record_stream import Raw
from buildidfs.formats.perf.records import (
    Entered,
    Events,
    ExecutableMemory,
    Executed,
    Exited,
    Forked,
    GroupMade,
    LostRecords,
    Mapped,
    Record,
    Rewriter,
    decode_ring,
)
from buildidfs.model import NamespaceSet
from tests.support.elf.perfwriter import CPU, EXEC, KERNEL, TID, TIME, USER, PerfWriter

ID = bytes(range(1, 21))


@pytest.fixture(params=["<", ">"])
def write(request: pytest.FixtureRequest) -> PerfWriter:
    return PerfWriter(request.param, TID | TIME | CPU)


def layouts(write: PerfWriter) -> Layouts:
    return Layouts([parse_attr(write.attr(), write.order, (7,))], write.order)


def raw_of(write: PerfWriter, record: bytes) -> Raw:
    """A record, not at the beginning of what was read."""
    little = "little" if write.order == "<" else "big"
    kind = int.from_bytes(record[:4], little)
    misc = int.from_bytes(record[4:6], little)
    return Raw(kind, misc, b"before.." + record, 8, len(record), 0)


def read(write: PerfWriter, record: bytes) -> object:
    return Events(layouts(write), write.order).read(raw_of(write, record))


def test_mapping_with_its_inode(write: PerfWriter) -> None:
    record = write.mmap2(
        5, 0x1000, 0x2000, b"/bin/caf\xe9", time=9, dev=(8, 2), inode=77, generation=3, offset=4096
    )
    assert read(write, record) == Mapped(
        9, 5, 0x1000, 0x3000, 4096, b"/bin/caf\xe9", (8, 2), 77, 3, b"", USER
    )


@pytest.mark.parametrize("length", [8, 16, 20])
def test_mapping_with_its_build_id(write: PerfWriter, length: int) -> None:
    record = write.mmap2(5, 0x1000, 0x2000, b"/a", time=9, build_id=ID[:length])
    assert read(write, record) == Mapped(
        9, 5, 0x1000, 0x3000, 0, b"/a", build_id=ID[:length], cpumode=USER
    )


def test_mapping_of_an_old_kernel(write: PerfWriter) -> None:
    record = write.mmap(records.KERNEL_PID, 1 << 63, 1 << 62, b"[kernel.kallsyms]_text", misc=1)
    assert read(write, record) == Mapped(
        0, records.KERNEL_PID, 1 << 63, 3 << 62, 0, b"[kernel.kallsyms]_text", cpumode=KERNEL
    )


def test_mappings_that_are_passed_over(write: PerfWriter) -> None:
    assert read(write, write.mmap2(5, 0, 1, b"/data", misc=USER | EXEC)) is None
    assert read(write, write.mmap2(5, (1 << 64) - 8, 4096, b"/a")) is None
    assert read(write, write.mmap2(5, 0, 1, b"/" + b"n" * 4096)) is None
    short = write.mmap2(5, 0, 1, b"/a")
    little = "little" if write.order == "<" else "big"
    for size in range(8, len(short), 8):
        cut = short[:6] + size.to_bytes(2, little) + short[8:size]
        raw = raw_of(write, cut)
        found = Events(layouts(write), write.order).read(raw)
        assert found is None or (isinstance(found, Mapped) and len(found.path) <= size)


def test_processes(write: PerfWriter) -> None:
    assert read(write, write.fork(6, 5, 99)) == Forked(99, 6, 5, True)
    assert read(write, write.fork(6, 5, 0, misc=EXEC)) == Forked(0, 6, 5, False)
    assert read(write, write.fork(5, 5, 99, tid=6)) is None
    assert read(write, write.fork(6, 5, 99, tid=7)) is None
    assert read(write, write.comm(6, b"sh", 99, exec_=True)) == Executed(99, 6)
    assert read(write, write.comm(6, b"renamed", 99)) is None
    entered = read(write, write.namespaces(6, [1, 2, 3, 4, 5, 6, 7, 8], 99))
    assert entered == Entered(99, 6, NamespaceSet(1, 2, 3, 4, 5, 6, 7))
    too_many = bytearray(write.namespaces(6, [1, 2]))
    too_many[16:24] = write.pack("Q", 1 << 60)
    assert read(write, bytes(too_many)) is None


def test_losses(write: PerfWriter) -> None:
    assert read(write, write.record(2, write.pack("QQ", 1, 30))) == LostRecords(0, 30)
    assert read(write, write.record(13, write.pack("Q", 4))) == LostRecords(0, 4)
    assert read(write, write.record(2, b"")) is None


@given(st.sampled_from([1, 2, 3, 7, 10, 13, 16]), st.integers(0, 65535), st.binary(max_size=200))
def test_any_record(kind: int, misc: int, body: bytes) -> None:
    write = PerfWriter("<")
    raw = raw_of(write, write.record(kind, body, misc))
    event = Events(layouts(write), "<").read(raw)
    if isinstance(event, Mapped):
        Rewriter(layouts(write), "<").mapped(raw, ID, b"/new")


# --- written anew --------------------------------------------------------------------------


def again(write: PerfWriter, record: bytes, *change: object) -> Mapped:
    written = Rewriter(layouts(write), write.order).mapped(raw_of(write, record), *change)  # type: ignore[arg-type]
    assert len(written) % 8 == 0
    event = read(write, written)
    assert isinstance(event, Mapped)
    return event


@pytest.mark.parametrize("length", [8, 20])
@pytest.mark.parametrize("name", [None, b"/a/longer@3f2a91c05b77", b"/n"])
def test_mapping_gets_a_build_id(write: PerfWriter, name: bytes | None, length: int) -> None:
    old = write.mmap2(5, 0x1000, 0x2000, b"/app/server", time=9, offset=4096)
    event = again(write, old, ID[:length], name)
    assert event == Mapped(
        9, 5, 0x1000, 0x3000, 4096, name or b"/app/server", build_id=ID[:length], cpumode=USER
    )
    oldest = write.mmap(5, 0x1000, 0x2000, b"/app/server", time=9)
    event = again(write, oldest, ID[:length], name)
    assert (event.build_id, event.path, event.time) == (ID[:length], name or b"/app/server", 9)


def test_mapping_stays_as_large_as_it_was(write: PerfWriter) -> None:
    old = write.mmap2(5, 0x1000, 0x2000, b"/app/server", time=9)
    assert len(Rewriter(layouts(write), write.order).mapped(raw_of(write, old), ID)) == len(old)


def test_mapping_gets_a_name_only(write: PerfWriter) -> None:
    old = write.mmap2(5, 0x1000, 0x2000, b"/a", time=9, dev=(0, 39), inode=2)
    event = again(write, old, b"", b"/a@0:39:2")
    assert (event.path, event.dev, event.inode, event.build_id) == (b"/a@0:39:2", (0, 39), 2, b"")
    with_id = write.mmap2(5, 0x1000, 0x2000, b"/a", time=9, build_id=ID)
    event = again(write, with_id, b"", b"/a@0102")
    assert (event.path, event.build_id) == (b"/a@0102", ID)


# --- rings ---------------------------------------------------------------------------------------

MMAP2, LOST, COMM, EXIT, FORK, NAMESPACES, CGROUP = 10, 2, 3, 4, 7, 16, 19
BUILD_ID = 1 << 14
EXECUTABLE = 5  # PROT_READ | PROT_EXEC
MOMENT = 0x0123456789ABCDEF


def record(kind: int, body: bytes, misc: int = 0, time: int = MOMENT) -> bytes:
    """Header, body, and what sample_id_all adds."""
    size = 8 + len(body) + 8
    return struct.pack("=IHH", kind, misc, size) + body + struct.pack("=Q", time)


def padded(name: bytes) -> bytes:
    """A name as the kernel writes it: with its NUL, and more up to a multiple of eight bytes."""
    return name + bytes(8 - len(name) % 8)


def mapped(name: bytes, *, prot: int = EXECUTABLE, tail: bytes | None = None) -> bytes:
    place = struct.pack("=IIQQQ", 100, 101, 0x7F0000001000, 0x3000, 0x2000)
    file = struct.pack("=IIQQII", 8, 1, 4711, 99, prot, 2)
    return place + file + (padded(name) if tail is None else tail)


def task(pid: int, parent: int, tid: int, time: int = 5) -> bytes:
    return struct.pack("=IIIIQ", pid, parent, tid, parent, time)


def entered(pid: int, tid: int, inodes: list[int], count: int | None = None) -> bytes:
    body = struct.pack("=IIQ", pid, tid, len(inodes) if count is None else count)
    return body + b"".join(struct.pack("=QQ", 4, inode) for inode in inodes)


def only(data: bytes) -> Record:
    (found,) = decode_ring(data)
    return found


def test_mapping() -> None:
    assert only(record(MMAP2, mapped(b"/bin/app"))) == Mapped(
        MOMENT, 100, 0x7F0000001000, 0x7F0000004000, 0x2000, b"/bin/app", (8, 1), 4711, 99, tid=101
    )


@pytest.mark.parametrize("name", [b"/", b"/seven77", b"[vdso]", b"//anon", b"/\xff\n", b"/a" * 900])
def test_names_of_every_length(name: bytes) -> None:
    found = only(record(MMAP2, mapped(name)))
    assert isinstance(found, Mapped)
    assert found.path == name


def test_name_without_its_end() -> None:
    found = only(record(MMAP2, mapped(b"", tail=b"/notnul/")))
    assert isinstance(found, Mapped)
    assert found.path == b"/notnul/"


def test_only_executable_mappings() -> None:
    assert list(decode_ring(record(MMAP2, mapped(b"/data", prot=3)))) == []


def test_anonymous_memory_tells_of_its_process_only() -> None:
    data = record(MMAP2, mapped(b"//anon")) + record(MMAP2, mapped(b"[vdso]"))
    data += record(MMAP2, mapped(b"//anon", prot=3)) + record(MMAP2, mapped(b"//another"))
    assert list(decode_ring(data, paths=True)) == [ExecutableMemory(MOMENT, 100)]
    assert len(list(decode_ring(data))) == 3


def test_flag_of_another_event_hides_no_inode() -> None:
    """The kernel leaves the flag in the records of events without build IDs."""
    found = only(record(MMAP2, mapped(b"/bin/app"), misc=BUILD_ID | 2))
    assert isinstance(found, Mapped)
    assert (found.build_id, found.dev, found.inode, found.generation) == (b"", (8, 1), 4711, 99)


def test_processes_but_not_threads() -> None:
    data = [
        record(FORK, task(20, 10, 20)), record(FORK, task(20, 10, 21)),
        record(EXIT, task(20, 10, 21)), record(EXIT, task(20, 10, 20)),
    ]  # fmt: skip
    assert list(decode_ring(b"".join(data))) == [Forked(5, 20, 10), Exited(5, 20)]


def test_namespaces_in_their_order() -> None:
    found = only(record(NAMESPACES, entered(30, 30, [1, 2, 3, 4, 5, 6, 7])))
    expected = NamespaceSet(net=1, uts=2, ipc=3, pid=4, user=5, mnt=6, cgroup=7)
    assert found == Entered(MOMENT, 30, expected)


def test_namespaces_of_older_and_newer_kernels() -> None:
    older = only(record(NAMESPACES, entered(30, 30, [1, 2])))
    assert older == Entered(MOMENT, 30, NamespaceSet(1, 2))
    newer = only(record(NAMESPACES, entered(30, 30, list(range(1, 10)))))
    assert newer == Entered(MOMENT, 30, NamespaceSet(*range(1, 8)))


def test_a_thread_does_not_take_its_process_along() -> None:
    assert list(decode_ring(record(NAMESPACES, entered(30, 31, [1] * 7)))) == []


def test_more_namespaces_than_there_is_room_for() -> None:
    for count in (8, 1 << 32, (1 << 64) - 1):
        data = record(NAMESPACES, entered(30, 30, [1] * 7, count=count))
        assert list(decode_ring(data)) == []


def test_lost() -> None:
    assert only(record(LOST, struct.pack("=QQ", 3, 1972))) == LostRecords(MOMENT, 1972)


def test_others_are_passed_over() -> None:
    data = record(COMM, bytes(24)) + record(99, b"") + record(MMAP2, mapped(b"/bin/app"))
    assert isinstance(only(data), Mapped)


def test_new_control_group() -> None:
    body = struct.pack("=Q", 4711) + padded(b"/machine/container")
    assert only(record(CGROUP, body)) == GroupMade(MOMENT)


@pytest.mark.parametrize("kind", [MMAP2, LOST, EXIT, FORK, NAMESPACES, CGROUP])
def test_records_that_are_too_short(kind: int) -> None:
    for size in range(8, 40):
        data = struct.pack("=IHH", kind, 0, size) + bytes(size - 8)
        after = record(LOST, struct.pack("=QQ", 3, 7))
        assert list(decode_ring(data + after))[-1] == LostRecords(MOMENT, 7)


@pytest.mark.parametrize("size", [0, 1, 7, 9999])
def test_ends_at_what_is_no_record(size: int) -> None:
    good = record(LOST, struct.pack("=QQ", 3, 7))
    bad = struct.pack("=IHH", MMAP2, 0, size) + bytes(100)
    assert list(decode_ring(good + bad + good)) == [LostRecords(MOMENT, 7)]


def test_every_cut_of_a_sequence() -> None:
    whole = [
        record(FORK, task(20, 10, 20)), record(NAMESPACES, entered(20, 20, [1] * 7)),
        record(MMAP2, mapped(b"/bin/app")), record(EXIT, task(20, 10, 20)),
    ]  # fmt: skip
    data = b"".join(whole)
    for end in range(len(data) + 1):
        complete = sum(end >= sum(map(len, whole[: n + 1])) for n in range(len(whole)))
        assert len(list(decode_ring(data[:end]))) == complete


_KINDS = st.sampled_from([MMAP2, LOST, EXIT, FORK, NAMESPACES, 0, 77])
_RECORDS = st.tuples(_KINDS, st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.binary())


@given(st.lists(_RECORDS), st.booleans())
def test_any_bytes_are_decoded_or_left(
    parts: list[tuple[int, int, int, bytes]], honest: bool
) -> None:
    """Never an error, never more records than can be in there."""
    data = b"".join(
        struct.pack("=IHH", kind, misc, 8 + len(body) if honest else size) + body
        for kind, misc, size, body in parts
    )
    assert len(list(decode_ring(data))) <= len(data) // 8
    assert len(list(decode_ring(bytes(reversed(data))))) <= len(data) // 8


@given(st.binary(max_size=300))
def test_any_mapping_is_decoded_or_left(body: bytes) -> None:
    for misc in (0, BUILD_ID):
        for found in decode_ring(record(MMAP2, body, misc=misc)):
            assert isinstance(found, Mapped)
            assert len(found.build_id) <= 20
            assert b"\0" not in found.path
