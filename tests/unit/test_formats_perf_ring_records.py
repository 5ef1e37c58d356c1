# SPDX-License-Identifier: Apache-2.0
"""Records written by hand, as linux/perf_event.h has them, and whatever else bytes can be."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.formats.perf import ring_records
from buildidfs.formats.perf.ring_records import Entered, Exited, Forked, Lost, Mapped, Record
from buildidfs.model import NamespaceSet

MMAP2, LOST, COMM, EXIT, FORK, NAMESPACES = 10, 2, 3, 4, 7, 16
BUILD_ID = 1 << 14
EXECUTABLE = 5  # PROT_READ | PROT_EXEC
TIME = 0x0123456789ABCDEF


def record(kind: int, body: bytes, misc: int = 0, time: int = TIME) -> bytes:
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


def with_build_id(build_id: bytes, length: int | None = None) -> bytes:
    place = struct.pack("=IIQQQ", 100, 101, 0x1000, 0x3000, 0)
    size = len(build_id) if length is None else length
    union = struct.pack("=BxH20s", size, 0, build_id)
    return place + union + struct.pack("=II", EXECUTABLE, 2) + padded(b"/bin/app")


def task(pid: int, parent: int, tid: int, time: int = 5) -> bytes:
    return struct.pack("=IIIIQ", pid, parent, tid, parent, time)


def entered(pid: int, tid: int, inodes: list[int], count: int | None = None) -> bytes:
    body = struct.pack("=IIQ", pid, tid, len(inodes) if count is None else count)
    return body + b"".join(struct.pack("=QQ", 4, inode) for inode in inodes)


def only(data: bytes) -> Record:
    (found,) = ring_records.decode(data)
    return found


def test_mapping() -> None:
    assert only(record(MMAP2, mapped(b"/bin/app"))) == Mapped(
        TIME, 100, 0x7F0000001000, 0x7F0000004000, (8, 1), 4711, 99, b"/bin/app", tid=101
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
    assert list(ring_records.decode(record(MMAP2, mapped(b"/data", prot=3)))) == []


@pytest.mark.parametrize("size", [0, 8, 16, 20])
def test_build_id_instead_of_the_inode(size: int) -> None:
    build_id = bytes(range(1, size + 1))
    found = only(record(MMAP2, with_build_id(build_id), misc=BUILD_ID | 2))
    assert isinstance(found, Mapped)
    assert (found.build_id, found.dev, found.inode, found.generation) == (build_id, (0, 0), 0, 0)
    assert found.path == b"/bin/app"


def test_build_id_is_never_longer_than_its_place() -> None:
    found = only(record(MMAP2, with_build_id(b"\xaa" * 20, length=255), misc=BUILD_ID))
    assert isinstance(found, Mapped)
    assert found.build_id == b"\xaa" * 20


def test_processes_but_not_threads() -> None:
    data = [
        record(FORK, task(20, 10, 20)), record(FORK, task(20, 10, 21)),
        record(EXIT, task(20, 10, 21)), record(EXIT, task(20, 10, 20)),
    ]  # fmt: skip
    assert list(ring_records.decode(b"".join(data))) == [Forked(5, 20, 10), Exited(5, 20)]


def test_namespaces_in_their_order() -> None:
    found = only(record(NAMESPACES, entered(30, 30, [1, 2, 3, 4, 5, 6, 7])))
    expected = NamespaceSet(net=1, uts=2, ipc=3, pid=4, user=5, mnt=6, cgroup=7)
    assert found == Entered(TIME, 30, expected)


def test_namespaces_of_older_and_newer_kernels() -> None:
    older = only(record(NAMESPACES, entered(30, 30, [1, 2])))
    assert older == Entered(TIME, 30, NamespaceSet(1, 2))
    newer = only(record(NAMESPACES, entered(30, 30, list(range(1, 10)))))
    assert newer == Entered(TIME, 30, NamespaceSet(*range(1, 8)))


def test_a_thread_does_not_take_its_process_along() -> None:
    assert list(ring_records.decode(record(NAMESPACES, entered(30, 31, [1] * 7)))) == []


def test_more_namespaces_than_there_is_room_for() -> None:
    for count in (8, 1 << 32, (1 << 64) - 1):
        data = record(NAMESPACES, entered(30, 30, [1] * 7, count=count))
        assert list(ring_records.decode(data)) == []


def test_lost() -> None:
    assert only(record(LOST, struct.pack("=QQ", 3, 1972))) == Lost(TIME, 1972)


def test_others_are_passed_over() -> None:
    data = record(COMM, bytes(24)) + record(99, b"") + record(MMAP2, mapped(b"/bin/app"))
    assert isinstance(only(data), Mapped)


@pytest.mark.parametrize("kind", [MMAP2, LOST, EXIT, FORK, NAMESPACES])
def test_records_that_are_too_short(kind: int) -> None:
    for size in range(8, 40):
        data = struct.pack("=IHH", kind, 0, size) + bytes(size - 8)
        after = record(LOST, struct.pack("=QQ", 3, 7))
        assert list(ring_records.decode(data + after))[-1] == Lost(TIME, 7)


@pytest.mark.parametrize("size", [0, 1, 7, 9999])
def test_ends_at_what_is_no_record(size: int) -> None:
    good = record(LOST, struct.pack("=QQ", 3, 7))
    bad = struct.pack("=IHH", MMAP2, 0, size) + bytes(100)
    assert list(ring_records.decode(good + bad + good)) == [Lost(TIME, 7)]


def test_every_cut_of_a_sequence() -> None:
    whole = [
        record(FORK, task(20, 10, 20)), record(NAMESPACES, entered(20, 20, [1] * 7)),
        record(MMAP2, mapped(b"/bin/app")), record(EXIT, task(20, 10, 20)),
    ]  # fmt: skip
    data = b"".join(whole)
    for end in range(len(data) + 1):
        complete = sum(end >= sum(map(len, whole[: n + 1])) for n in range(len(whole)))
        assert len(list(ring_records.decode(data[:end]))) == complete


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
    assert len(list(ring_records.decode(data))) <= len(data) // 8
    assert len(list(ring_records.decode(bytes(reversed(data))))) <= len(data) // 8


@given(st.binary(max_size=300))
def test_any_mapping_is_decoded_or_left(body: bytes) -> None:
    for misc in (0, BUILD_ID):
        for found in ring_records.decode(record(MMAP2, body, misc=misc)):
            assert isinstance(found, Mapped)
            assert len(found.build_id) <= 20
            assert b"\0" not in found.path
