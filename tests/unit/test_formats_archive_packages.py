# SPDX-License-Identifier: Apache-2.0
"""Packages: headers of rpm, its cpio archives, ar, and names."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest

from buildidfs.formats.archive import packages
from buildidfs.formats.archive.common import Damaged, Member, Type
from tests.support.filesystems.sources import Bytes, ar_member, contents

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


def package(
    tags: dict[int, tuple[int, Any]], payload: bytes = b"", signed: tuple[int, Any] | None = None
) -> bytes:
    signatures = section({1000: (STRING, b"odd"), **({} if signed is None else {274: signed})})
    signatures += bytes(-len(signatures) % 8)
    return packages.RPM_MAGIC + bytes(92) + signatures + section(tags) + payload


def parsed(tags: dict[int, tuple[int, Any]]) -> packages.RpmHeader:
    return packages.rpm_header(Bytes(package(tags)))


def test_name_and_where_the_archive_begins() -> None:
    source = Bytes(package(NAMED, b"payload"))
    assert packages.rpm_header(source).name == (b"app", b"1.2-3.fc40", b"x86_64")
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


def test_signatures_of_files() -> None:
    texts = [b"0302", b"", b"no", b"00" * 1025]
    header = packages.rpm_header(Bytes(package({**NAMED, **FILES}, signed=(ARRAY, texts))))
    assert header.signatures() == {b"/usr/bin/app": b"\3\2"}
    assert header.name[0] == b"app"
    assert parsed({**NAMED, **FILES}).signatures() == {}
    for tags in (NAMED, {**FILES, INDEXES: (INT32, [9, 9, 9, 9])}):
        odd = packages.rpm_header(Bytes(package(tags, signed=(ARRAY, [b"0302"] * 9))))
        assert odd.signatures() == {}


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
        (packages.RPM_MAGIC + bytes(92) + bytes(16), "no header at 96"),
        (packages.RPM_MAGIC + bytes(92) + section({}, entries=0x10000), "no header at 96"),
        (packages.RPM_MAGIC + bytes(92) + section({}, entries=9), "middle of the signatures"),
    ],
)
def test_damaged_rpm_header(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        packages.rpm_header(Bytes(data))


def test_offsets_and_counts_that_lie() -> None:
    for kind in (INT16, INT32, INT64, STRING, ARRAY):
        for offset, count in ((0xFFFFFFFF, 1), (0, 0xFFFFFFFF), (3, 7), (4, 0)):
            index = b"".join(
                struct.pack(">IIII", tag, kind, offset, count) for tag in (*FILES, *NAMED)
            )
            intro = struct.pack(">4s4xII", b"\x8e\xad\xe8\x01", len(index) // 16, 5)
            raw = packages.RPM_MAGIC + bytes(92) + section({}) + intro + index + b"abcde"
            header = packages.rpm_header(Bytes(raw))
            assert header.name[0] == b""
            with contextlib.suppress(Damaged):
                assert list(header.files()) == []


# --- cpio ----------------------------------------------------------------------------------------


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


def read_cpio(data: bytes, listed: list[Member] | None = None) -> list[tuple[Member, bytes]]:
    source = Bytes(data)
    return list(contents(packages.cpio_members(source, lambda: listed or []), source))


def test_cpio_members() -> None:
    data = (
        newc(b"./usr", mode=0o040755)
        + newc(b"./usr/app", b"12345")
        + newc(b"./l", b"app", mode=0o120777)
    )
    found = read_cpio(data + END + b"more")
    assert [(member.type, content) for member, content in found] == [
        (Type.DIRECTORY, b""), (Type.FILE, b"12345"), (Type.OTHER, b"app"),
    ]  # fmt: skip
    assert found[1][0] == Member(b"./usr/app", Type.FILE, 5, 5, 0o755, 5, 6, 1_700_000_000 * 10**9)


def test_several_names_of_a_file() -> None:
    data = newc(b"a", links=2) + newc(b"b", b"content", links=2) + newc(b"c", b"x", inode=2)
    first, second, third = (member for member, _ in read_cpio(data + END))
    assert first.link == second.link is not None
    assert (first.stored, second.stored) == (0, 7)
    assert third.link is None


def test_short_form() -> None:
    listed = [Member(b"/a", Type.FILE, 3, 3), Member(b"/b", Type.FILE, 5, 5)]
    assert read_cpio(short(1, b"12345") + short(0, b"abc") + END, listed) == [
        (listed[1], b"12345"), (listed[0], b"abc"),
    ]  # fmt: skip


def test_list_is_asked_for_only_if_it_is_needed() -> None:
    def never() -> list[Member]:
        raise AssertionError("asked for")

    source = Bytes(newc(b"a", b"x") + END)
    assert len(list(packages.cpio_members(source, never))) == 1
    with pytest.raises(AssertionError, match="asked for"):
        list(packages.cpio_members(Bytes(short(0)), never))


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
def test_damaged_cpio(data: bytes, message: str) -> None:
    source = Bytes(data)
    with pytest.raises(Damaged, match=message):
        list(packages.cpio_members(source))


def test_a_name_of_no_bytes() -> None:
    raw = bytearray(newc(b"a"))
    raw[6 + 8 * 11 : 6 + 8 * 12] = b"0" * 8
    with pytest.raises(Damaged, match="a name of 0 bytes"):
        read_cpio(bytes(raw))


# --- ar ------------------------------------------------------------------------------------------


def read_ar(data: bytes) -> list[tuple[bytes, bytes]]:
    source = Bytes(data)
    return [(name, source.take(size)) for name, size in packages.ar_members(source)]


def test_ar_members() -> None:
    data = packages.AR_MAGIC + ar_member(b"debian-binary", b"2.0\n") + ar_member(b"odd/", b"xyz")
    data += ar_member(b"data.tar.xz", b"12345")
    assert read_ar(data) == [
        (b"debian-binary", b"2.0\n"),
        (b"odd", b"xyz"),
        (b"data.tar.xz", b"12345"),
    ]
    assert read_ar(data[:-1])[-1] == (b"data.tar.xz", b"12345"), (
        "padding may be left out at the end"
    )
    assert read_ar(packages.AR_MAGIC) == []


def test_ar_content_not_taken_is_skipped() -> None:
    source = Bytes(packages.AR_MAGIC + ar_member(b"a", b"12345") + ar_member(b"b", b"6"))
    assert [name for name, _ in packages.ar_members(source)] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an ar archive"),
        (b"!<thin>\n", "not an ar archive"),
        (packages.AR_MAGIC + b"x" * 59, "no header at 8"),
        (packages.AR_MAGIC + b"x" * 60, "no header at 8"),
        (packages.AR_MAGIC + ar_member(b"a", b"", b"-1"), "no size at 8"),
        (packages.AR_MAGIC + ar_member(b"a", b"", b""), "no size at 8"),
        (packages.AR_MAGIC + ar_member(b"a", b"xy", b"9999999999"), "middle of a member"),
        (packages.AR_MAGIC + ar_member(b"a", b"") * 65, "more than 64 members"),
    ],
)
def test_damaged_ar(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        list(packages.ar_members(Bytes(data)))


# --- names ---------------------------------------------------------------------------------------


def test_name_of_a_debian_package() -> None:
    control = (
        b"Package: zlib1g\nSource: zlib\nVersion: 1:1.2.13.dfsg-1\nArchitecture: amd64\n"
        b"Description: compression library\n Version: of no meaning here\n"
    )
    name = packages.debian(control)
    assert name == (b"zlib1g", b"1:1.2.13.dfsg-1", b"amd64")
    assert name.text == "zlib1g-1:1.2.13.dfsg-1.amd64"


def test_name_in_pkginfo() -> None:
    text = b"# Generated\npkgname = gtk+3.0\npkgver = 3.24.43-r0\nsize = 1\narch = x86_64\n"
    assert packages.pkginfo(text).text == "gtk+3.0-3.24.43-r0.x86_64"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"", ""),
        (b"Version: 1\n", ""),
        (b"Package: a\n", "a"),
        (b"Package: a\x1b[31m\n", "a??31m"),
        (b"Package: \xff/..\n", "??.."),
        (b"Package: " + b"n" * 1000, "n" * 128),
        (b"no fields at all", ""),
    ],
)
def test_hostile_names_of_packages(text: bytes, shown: str) -> None:
    assert packages.debian(text).text == shown


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        (b".PKGINFO", True),
        (b"./.PKGINFO", True),
        (b".SIGN.RSA.builder.rsa.pub", True),
        (b".MTREE", True),
        (b"usr/.PKGINFO", False),
        (b".profile", False),
        (b"", False),
    ],
)
def test_metadata_of_packages(name: bytes, is_one: bool) -> None:
    assert packages.is_metadata(name) is is_one
