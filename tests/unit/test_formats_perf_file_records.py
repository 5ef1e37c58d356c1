# SPDX-License-Identifier: Apache-2.0
"""Records of profiles that tell of processes and mappings, read, written anew, put together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import UsageError
from buildidfs.formats.perf import address_spaces, file_records
from buildidfs.formats.perf.address_spaces import Found, Spaces
from buildidfs.formats.perf.attributes import Layouts, parse_attr
from buildidfs.formats.perf.file_records import Events, Executed, Forked, Lost, Mapped, Rewriter
from buildidfs.formats.perf.ring_records import Entered
from buildidfs.formats.perf.stream import Raw
from buildidfs.model import NamespaceSet
from tests.support.perfwriter import CPU, EXEC, KERNEL, TID, TIME, USER, PerfWriter

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
    record = write.mmap(
        file_records.KERNEL_PID, 1 << 63, 1 << 62, b"[kernel.kallsyms]_text", misc=1
    )
    assert read(write, record) == Mapped(
        0, file_records.KERNEL_PID, 1 << 63, 3 << 62, 0, b"[kernel.kallsyms]_text", cpumode=KERNEL
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
    assert read(write, write.record(2, write.pack("QQ", 1, 30))) == Lost(30)
    assert read(write, write.record(13, write.pack("Q", 4))) == Lost(4)
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


# --- address spaces --------------------------------------------------------------------------


def mapped(pid: int, start: int, path: bytes, time: int = 0, size: int = 0x1000) -> Mapped:
    return Mapped(time, pid, start, start + size, 0x100, path, (8, 1), 5, 0, b"", USER)


def made(*events: file_records.Event) -> Spaces:
    spaces = Spaces()
    for event in events:
        spaces.add(event, getattr(event, "time", 0))
    return spaces


def path_at(spaces: Spaces, pid: int, time: int, address: int) -> bytes | None:
    found = spaces.find(pid, time, address)
    return None if found is None else spaces.files[found.file].path


def test_place_in_a_file() -> None:
    spaces = made(mapped(1, 0x1000, b"/a", 5))
    assert spaces.find(1, 9, 0x1234) == Found(0, 0x334, 5)
    assert spaces.find(1, 9, 0x0FFF) is None
    assert spaces.find(1, 9, 0x2000) is None
    assert spaces.find(1, 4, 0x1234) is None
    assert spaces.find(2, 9, 0x1234) is None


def test_what_is_mapped_over() -> None:
    spaces = made(mapped(1, 0x1000, b"/a", 1, 0x3000), mapped(1, 0x2000, b"/b", 5))
    assert [path_at(spaces, 1, 4, at) for at in (0x1000, 0x2000, 0x3000)] == [b"/a"] * 3
    assert [path_at(spaces, 1, 5, at) for at in (0x1000, 0x2000, 0x3000)] == [b"/a", b"/b", b"/a"]


def test_mappings_that_share_a_page() -> None:
    spaces = made(mapped(1, 0x1000, b"/jit-1", 1, 0x10), mapped(1, 0x1010, b"/jit-2", 2, 0x10))
    for _ in range(2):
        assert [path_at(spaces, 1, 3, at) for at in (0x1004, 0x1014, 0x1024)] == [
            b"/jit-1", b"/jit-2", None,
        ]  # fmt: skip


def test_order_in_the_file_does_not_matter() -> None:
    spaces = made(mapped(1, 0x1000, b"/new", 9), Executed(5, 1), mapped(1, 0x1000, b"/old", 1))
    assert path_at(spaces, 1, 4, 0x1000) == b"/old"
    assert path_at(spaces, 1, 6, 0x1000) is None
    assert path_at(spaces, 1, 9, 0x1000) == b"/new"


def test_child_has_what_its_parent_had() -> None:
    spaces = made(
        mapped(1, 0x1000, b"/a"),
        Forked(5, 2, 1, True),
        mapped(1, 0x2000, b"/later", 6),
        mapped(2, 0x3000, b"/own", 7),
        Forked(8, 3, 2, True),
        Executed(9, 2),
    )
    assert path_at(spaces, 2, 6, 0x1000) == b"/a"
    assert path_at(spaces, 2, 6, 0x2000) is None
    assert path_at(spaces, 2, 7, 0x3000) == b"/own"
    assert path_at(spaces, 3, 99, 0x1000) == b"/a"
    assert path_at(spaces, 3, 99, 0x3000) == b"/own"
    assert path_at(spaces, 2, 99, 0x3000) is None
    assert path_at(spaces, 2, 4, 0x1000) is None


def test_number_that_is_used_again() -> None:
    spaces = made(
        mapped(2, 0x1000, b"/a", 1),
        mapped(1, 0x2000, b"/p"),
        Forked(5, 2, 1, True),
        mapped(3, 0x1000, b"/c", 1),
        Forked(5, 3, 1, False),
    )
    assert path_at(spaces, 3, 4, 0x1000) == b"/c"
    assert path_at(spaces, 3, 5, 0x1000) is None
    assert path_at(spaces, 2, 4, 0x1000) == b"/a"
    assert path_at(spaces, 2, 5, 0x1000) is None
    assert path_at(spaces, 2, 5, 0x2000) == b"/p"


def test_endless_descent() -> None:
    spaces = made(Forked(5, 1, 2, True), Forked(5, 2, 1, True))
    assert spaces.find(1, 9, 0x1000) is None
    assert spaces.mount_namespace(1, 9) == 0
    assert spaces.mapped(1, 1) == []


def test_what_a_process_was() -> None:
    spaces = made(
        mapped(1, 0x1000, b"/sh", 1),
        Executed(3, 1),
        mapped(1, 0x1000, b"/app", 4),
        mapped(1, 0x2000, b"/lib", 5),
        Forked(7, 2, 1, True),
        mapped(2, 0x3000, b"/plugin", 8),
    )
    first, second = spaces.image(1, 2), spaces.image(1, 9)
    assert first != second
    assert [spaces.files[file].path for file, _ in spaces.mapped(1, first)] == [b"/sh"]
    assert [(spaces.files[file].path, time) for file, time in spaces.mapped(1, second)] == [
        (b"/app", 4), (b"/lib", 5),
    ]  # fmt: skip
    child = {spaces.files[file].path for file, _ in spaces.mapped(2, spaces.image(2, 9))}
    assert child == {b"/plugin", b"/app", b"/lib"}
    everything = {(pid, spaces.files[file].path) for pid, _, file, _ in spaces.everything()}
    assert everything == {(1, b"/sh"), (1, b"/app"), (1, b"/lib"), (2, b"/plugin")}


def test_mount_namespaces() -> None:
    def entered(pid: int, mnt: int, time: int) -> Entered:
        return Entered(time, pid, NamespaceSet(mnt=mnt))

    spaces = made(entered(1, 10, 0), Forked(5, 2, 1, True), entered(2, 20, 7), Executed(8, 2))
    assert [spaces.mount_namespace(2, time) for time in (5, 6, 7, 9)] == [10, 10, 20, 20]
    assert spaces.mount_namespace(1, 9) == 10
    assert spaces.mount_namespace(3, 9) == 0


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_spaces, "MAX_BYTES", 10_000)
    with pytest.raises(UsageError, match="more processes and mappings"):
        made(*(mapped(number, 0x1000, b"/%d" % number) for number in range(100)))


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 9)), max_size=40),
    st.integers(0, 10),
)
def test_any_mappings(mappings: list[tuple[int, int, int]], time: int) -> None:
    """What was mapped last there, by then."""
    events = [
        mapped(1, 0x1000 * start, b"/%d" % number, when, 0x1000 * size)
        for number, (start, size, when) in enumerate(mappings)
    ]
    spaces = made(*events)
    in_order = sorted(events, key=lambda event: event.time or 0)
    for page in range(45):
        address = 0x1000 * page + 8
        expected = None
        for event in in_order:
            if (event.time or 0) <= time and event.start <= address < event.end:
                expected = event.path
        assert path_at(spaces, 1, time, address) == expected


def test_how_far_an_answer_holds() -> None:
    spaces = made(mapped(1, 0x1000, b"/a", 5), mapped(1, 0x2000, b"/b", 8, 0x800), Executed(9, 1))
    found, span = spaces.span(1, 6, 0x1008)
    assert found == Found(0, 0x108, 5)
    assert (span.begin, span.end, span.whole) == (5, 8, True)
    assert not spaces.span(1, 8, 0x2008)[1].whole
    assert not spaces.span(1, 8, 0x2FFF)[1].whole
    nothing, later = spaces.span(1, 10, 0x1008)
    assert (nothing, later.begin, later.whole) == (None, 9, True)
    assert later.image != span.image
    assert spaces.span(2, 1, 0)[0] is None


def test_a_process_with_too_many_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_spaces, "_MOST_ENTRIES", 10)
    spaces = made(*(mapped(1, 0x1000 * number, b"/a", number) for number in range(15)))
    assert spaces.left_out == 5
    assert path_at(spaces, 1, 99, 0x9000) == b"/a"
    assert path_at(spaces, 1, 99, 0xA000) is None


def test_many_processes() -> None:
    spaces = made(*(mapped(pid, 0x1000 * pid, b"/%d" % (pid % 7), pid) for pid in range(1, 9000)))
    for _ in range(2):
        for pid in range(1, 9000):
            assert path_at(spaces, pid, pid, 0x1000 * pid) == b"/%d" % (pid % 7)
