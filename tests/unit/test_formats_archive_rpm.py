# SPDX-License-Identifier: Apache-2.0
"""The header of rpm packages: names, and the list of files."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest

from buildidfs.formats.archive import rpm
from buildidfs.formats.archive.common import Damaged, Type
from tests.support.sources import Bytes

NAME, VERSION, RELEASE, EPOCH, ARCH = 1000, 1001, 1002, 1003, 1022
SIZES, MODES, TIMES, DEVICES, INODES = 1028, 1030, 1034, 1095, 1096
LONG_SIZES, INDEXES, BASES, DIRECTORIES = 5008, 1116, 1117, 1118
STRING, ARRAY = 6, 8
INT16, INT32, INT64 = 3, 4, 5
LETTERS = {INT16: "H", INT32: "I", INT64: "Q"}

NAMED: dict[int, tuple[int, Any]] = {
    NAME: (STRING, b"app"), VERSION: (STRING, b"1.2"), RELEASE: (STRING, b"3.fc40"),
    ARCH: (STRING, b"x86_64"),
}  # fmt: skip
FILES: dict[int, tuple[int, Any]] = {
    BASES: (ARRAY, [b"app", b"app2", b"link", b"dir"]),
    DIRECTORIES: (ARRAY, [b"/usr/bin/", b"/"]),
    INDEXES: (INT32, [0, 0, 0, 1]),
    SIZES: (INT32, [5, 5, 3, 4096]),
    MODES: (INT16, [0o100755, 0o100755, 0o120777, 0o040755]),
    TIMES: (INT32, [7, 7, 7, 7]),
    INODES: (INT32, [1, 1, 2, 3]),
    DEVICES: (INT32, [1, 1, 1, 1]),
}


def section(tags: dict[int, tuple[int, Any]], *, entries: int | None = None) -> bytes:
    index, data = b"", b""
    for tag, (kind, value) in tags.items():
        if kind in LETTERS:
            data += bytes(-len(data) % 8)
            raw, count = struct.pack(f">{len(value)}{LETTERS[kind]}", *value), len(value)
        elif kind == ARRAY:
            raw, count = b"".join(each + b"\0" for each in value), len(value)
        else:
            raw, count = value + b"\0", 1
        index += struct.pack(">IIII", tag, kind, len(data), count)
        data += raw
    intro = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", entries or len(tags), len(data))
    return intro + index + data


def package(tags: dict[int, tuple[int, Any]], payload: bytes = b"") -> bytes:
    signatures = section({1000: (STRING, b"odd")})
    signatures += bytes(-len(signatures) % 8)
    return rpm.MAGIC + bytes(92) + signatures + section(tags) + payload


def parsed(tags: dict[int, tuple[int, Any]]) -> rpm.Header:
    return rpm.header(Bytes(package(tags)))


def test_name_and_where_the_archive_begins() -> None:
    source = Bytes(package(NAMED, b"payload"))
    assert rpm.header(source).name == (b"app", b"1.2-3.fc40", b"x86_64")
    assert source.take(100) == b"payload"


def test_epoch() -> None:
    assert parsed(NAMED | {EPOCH: (INT32, [2])}).name[1] == b"2:1.2-3.fc40"


@pytest.mark.parametrize(
    "tags",
    [
        {},
        {NAME: (INT32, [5])},
        {NAME: (ARRAY, [b"app"])},
    ],
)
def test_no_name(tags: dict[int, tuple[int, Any]]) -> None:
    assert parsed(tags).name[0] == b""


def test_files() -> None:
    files = parsed(FILES).files()
    assert [member.name for member in files] == [
        b"/usr/bin/app",
        b"/usr/bin/app2",
        b"/usr/bin/link",
        b"/dir",
    ]
    app, app2, link, directory = files[0:4]
    assert app.link == app2.link is not None
    # The bytes are with the last name.
    assert (app.stored, app2.stored, app2.size) == (0, 5, 5)
    assert (app.mode, app.mtime_ns) == (0o755, 7 * 10**9)
    assert (link.type, link.stored, link.link) == (Type.OTHER, 3, None)
    assert (directory.type, directory.stored) == (Type.DIRECTORY, 0)


def test_files_of_more_than_4_gigabytes() -> None:
    tags = {tag: value for tag, value in FILES.items() if tag != SIZES}
    files = parsed(tags | {LONG_SIZES: (INT64, [1 << 33, 1 << 33, 3, 0])}).files()
    assert files[1].size == 1 << 33


def test_files_whose_times_and_links_are_not_told() -> None:
    tags = {tag: value for tag, value in FILES.items() if tag not in (TIMES, INODES, DEVICES)}
    files = parsed(tags).files()
    assert [member.link for member in files] == [None] * 4
    assert files[0].mtime_ns == 0


@pytest.mark.parametrize(
    "change",
    [
        {INDEXES: (INT32, [0, 0, 0, 2])},
        {INDEXES: (INT32, [0])},
        {SIZES: (INT32, [5])},
        {MODES: (INT32, [5])},
        {DIRECTORIES: (ARRAY, [])},
    ],
)
def test_lists_that_do_not_fit_together(change: dict[int, tuple[int, Any]]) -> None:
    with pytest.raises(Damaged, match="does not fit together"):
        parsed(FILES | change).files()


def test_names_too_long_to_be_installed() -> None:
    files = parsed(FILES | {DIRECTORIES: (ARRAY, [b"/" + b"d" * 5000, b"/"])}).files()
    assert files[3].name == b"/dir"
    with pytest.raises(Damaged, match="a name of"):
        files[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "middle of the lead"),
        (bytes(96), "not an rpm package"),
        (package(NAMED)[:90], "middle of the lead"),
        (package(NAMED)[:100], "middle of a header"),
        (package(NAMED)[:-1], "middle of the header"),
        (rpm.MAGIC + bytes(92) + bytes(16), "no header at 96"),
        (rpm.MAGIC + bytes(92) + section({}, entries=0x10000), "no header at 96"),
        (rpm.MAGIC + bytes(92) + section({}, entries=9), "middle of a member"),
    ],
)
def test_damage(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        rpm.header(Bytes(data))


def test_offsets_and_counts_that_lie() -> None:
    for kind in (INT16, INT32, INT64, STRING, ARRAY):
        for offset, count in ((0xFFFFFFFF, 1), (0, 0xFFFFFFFF), (3, 7), (4, 0)):
            index = b"".join(
                struct.pack(">IIII", tag, kind, offset, count) for tag in (*FILES, *NAMED)
            )
            intro = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", len(index) // 16, 5)
            raw = rpm.MAGIC + bytes(92) + section({}) + intro + index + b"abcde"
            header = rpm.header(Bytes(raw))
            assert header.name[0] == b""
            with contextlib.suppress(Damaged):
                assert list(header.files()) == []
