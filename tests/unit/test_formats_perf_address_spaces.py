# SPDX-License-Identifier: Apache-2.0
"""Address spaces of the processes of a profile, at any time in it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buildidfs.errors import UsageError
from buildidfs.formats.perf import address_spaces, records
from buildidfs.formats.perf.address_spaces import MappedOffset, Spaces
from buildidfs.formats.perf.records import Entered, Executed, Forked, Mapped
from buildidfs.model import NamespaceSet
from tests.support.elf.perfwriter import USER

ID = bytes(range(1, 21))


def mapped(pid: int, start: int, path: bytes, time: int = 0, size: int = 0x1000) -> Mapped:
    return Mapped(time, pid, start, start + size, 0x100, path, (8, 1), 5, 0, b"", USER)


def made(*events: records.Event) -> Spaces:
    spaces = Spaces()
    for event in events:
        spaces.add(event, getattr(event, "time", 0))
    return spaces


def path_at(spaces: Spaces, pid: int, time: int, address: int) -> bytes | None:
    found = spaces.find(pid, time, address)
    return None if found is None else spaces.files[found.file].path


def test_place_in_a_file() -> None:
    spaces = made(mapped(1, 0x1000, b"/a", 5))
    assert spaces.find(1, 9, 0x1234) == MappedOffset(0, 0x334, 5)
    assert spaces.find(1, 9, 0x0FFF) is None
    assert spaces.find(1, 9, 0x2000) is None
    assert spaces.find(1, 4, 0x1234) is None
    assert spaces.find(2, 9, 0x1234) is None


def test_later_mapping_replaces() -> None:
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


def test_image_changes_with_fork_and_exec() -> None:
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
    """The last mapping there, by then."""
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
    assert found == MappedOffset(0, 0x108, 5)
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


def test_extents_of_a_file_are_those_of_one_time() -> None:
    """A child has those of its parent; the same file may be mapped many times at once."""
    spaces = Spaces()
    file = -1
    for number in range(40):
        start = 0x10000 * number
        file = spaces.add(Mapped(0, 1, start, start + 0x1000, 0x3000, b"/app", inode=5), 0)
    spaces.add(Mapped(9, 1, 0x900000, 0x902000, 0x4000, b"/app", inode=5), 9)
    spaces.add(Forked(12, 2, 1), 12)
    assert len(spaces.extents(1, spaces.image(1, 5), file, 0)) == 16
    assert spaces.extents(1, spaces.image(1, 9), file, 9) == [(0x900000, 0x902000, 0x4000)]
    assert spaces.extents(2, spaces.image(2, 13), file, 9) == [(0x900000, 0x902000, 0x4000)]
    assert spaces.extents(1, spaces.image(1, 9), file, 10) == []
