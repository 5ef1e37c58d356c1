# SPDX-License-Identifier: Apache-2.0
"""The archives inside rpm packages, of both forms."""

from __future__ import annotations

import pytest

from buildidfs.formats.archive import cpio
from buildidfs.formats.archive.common import Damaged, Member, Type
from tests.support.sources import Bytes, contents


def newc(
    name: bytes, data: bytes = b"", *, links: int = 1, inode: int = 1, mode: int = 0o100755
) -> bytes:
    fields = (inode, mode, 5, 6, links, 1_700_000_000, len(data), 8, 1, 0, 0, len(name) + 1, 0)
    text = b"070701" + b"".join(b"%08x" % field for field in fields) + name + b"\0"
    text += bytes(-len(text) % 4)
    return text + data + bytes(-len(data) % 4)


def short(number: int, data: bytes = b"") -> bytes:
    text = b"07070X%08x" % number
    return text + bytes(-len(text) % 4) + data + bytes(-len(data) % 4)


END = newc(b"TRAILER!!!")


def read(data: bytes, listed: list[Member] | None = None) -> list[tuple[Member, bytes]]:
    source = Bytes(data)
    return list(contents(cpio.members(source, lambda: listed or []), source))


def test_members() -> None:
    data = (
        newc(b"./usr", mode=0o040755)
        + newc(b"./usr/app", b"12345")
        + newc(b"./l", b"app", mode=0o120777)
    )
    found = read(data + END + b"more")
    assert [(member.type, content) for member, content in found] == [
        (Type.DIRECTORY, b""), (Type.FILE, b"12345"), (Type.OTHER, b"app"),
    ]  # fmt: skip
    assert found[1][0] == Member(b"./usr/app", Type.FILE, 5, 5, 0o755, 5, 6, 1_700_000_000 * 10**9)


def test_several_names_of_a_file() -> None:
    data = newc(b"a", links=2) + newc(b"b", b"content", links=2) + newc(b"c", b"x", inode=2)
    first, second, third = (member for member, _ in read(data + END))
    assert first.link == second.link is not None
    assert (first.stored, second.stored) == (0, 7)
    assert third.link is None


def test_short_form() -> None:
    listed = [Member(b"/a", Type.FILE, 3, 3), Member(b"/b", Type.FILE, 5, 5)]
    assert read(short(1, b"12345") + short(0, b"abc") + END, listed) == [
        (listed[1], b"12345"), (listed[0], b"abc"),
    ]  # fmt: skip


def test_list_is_asked_for_only_if_it_is_needed() -> None:
    def never() -> list[Member]:
        raise AssertionError("asked for")

    source = Bytes(newc(b"a", b"x") + END)
    assert len(list(cpio.members(source, never))) == 1
    with pytest.raises(AssertionError, match="asked for"):
        list(cpio.members(Bytes(short(0)), never))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "middle of a header"),
        (b"070702" + b"0" * 50, "middle of a header"),
        (b"070707" + b"0" * 104, "no header at 0"),
        (b"070701" + b"z" * 104, "not made of numbers"),
        (newc(b"n" * 5000, b""), "a name of 5001 bytes"),
        (newc(b"a", b"x" * 100)[:-60], "middle of a member"),
        (newc(b"a", b"x"), "middle of a header"),
        (short(2), "file 2 of 0"),
        (newc(b"a")[:-1], "middle of a member|middle of a name"),
    ],
)
def test_damage(data: bytes, message: str) -> None:
    source = Bytes(data)
    with pytest.raises(Damaged, match=message):
        list(cpio.members(source))


def test_a_name_of_no_bytes() -> None:
    raw = bytearray(newc(b"a"))
    raw[6 + 8 * 11 : 6 + 8 * 12] = b"0" * 8
    with pytest.raises(Damaged, match="a name of 0 bytes"):
        read(bytes(raw))
