# SPDX-License-Identifier: Apache-2.0
"""Tar archives as tarfile, GNU tar and bsdtar write them, and damaged ones."""

from __future__ import annotations

import struct
import subprocess
import tarfile
from pathlib import Path

import pytest

from buildidfs.formats.archive.common import NAME_MAX_BYTES, Damaged, Member, Type
from buildidfs.formats.archive.tar import BLOCK, is_header, members
from tests.support.clients.tools import tool
from tests.support.filesystems.sources import Bytes, contents, entry, tar

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)


def read(data: bytes, *, concatenated: bool = False) -> list[tuple[Member, bytes]]:
    source = Bytes(data)
    return list(contents(members(source, concatenated=concatenated), source))


def header(data: bytes, **fields: bytes) -> bytes:
    """The first header of an archive with other bytes in some places, and a checksum to fit."""
    places = {"size": 124, "type": 156, "mode": 100, "mtime": 136, "uid": 108, "name": 0}
    raw = bytearray(data[:BLOCK])
    for name, value in fields.items():
        raw[places[name] : places[name] + len(value)] = value
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw) + data[BLOCK:]


@pytest.mark.parametrize("format_", FORMATS)
def test_type_of_member(format_: int) -> None:
    file = entry("usr/bin/app", mode=0o4755, uid=7, gid=8, mtime=1_700_000_000)
    data = tar(
        [
            (entry("usr", tarfile.DIRTYPE, mode=0o750), b""),
            (file, b"content" * 100),
            (entry("usr/bin/other", tarfile.LNKTYPE, "usr/bin/app"), b""),
            (entry("usr/bin/soft", tarfile.SYMTYPE, "app"), b""),
            (entry("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
            ("empty", b""),
        ],
        format_=format_,
    )
    found = read(data)
    assert [(member.name.rstrip(b"/"), member.type) for member, _ in found] == [
        (b"usr", Type.DIRECTORY),
        (b"usr/bin/app", Type.FILE),
        (b"usr/bin/other", Type.HARD_LINK),
        (b"usr/bin/soft", Type.OTHER),
        (b"dev/null", Type.OTHER),
        (b"empty", Type.FILE),
    ]
    (directory, _), (app, content), (link, _), *_ = found
    assert directory.mode == 0o750
    assert app == Member(b"usr/bin/app", Type.FILE, 700, 700, 0o4755, 7, 8, 1_700_000_000 * 10**9)
    assert content == b"content" * 100
    assert (link.target, link.stored) == (b"usr/bin/app", 0)


@pytest.mark.parametrize("format_", FORMATS[1:])
def test_long_names(format_: int) -> None:
    name, target = "d" * 90 + "/" + "n" * 200, "t" * 300
    data = tar(
        [(name, b"x"), (entry("l", tarfile.LNKTYPE, target), b""), ("s", b"y")], format_=format_
    )
    found = read(data)
    assert [(member.name, member.target) for member, _ in found] == [
        (name.encode(), b""), (b"l", target.encode()), (b"s", b""),
    ]  # fmt: skip
    assert [content for _, content in found] == [b"x", b"", b"y"]


def test_prefix_of_ustar() -> None:
    name = "p" * 120 + "/" + "n" * 90
    ((member, _),) = read(tar([(name, b"")], format_=tarfile.USTAR_FORMAT))
    assert member.name == name.encode()


def test_names_that_are_not_text() -> None:
    raw = b"d\xff\xfe/\x1b[31m\n"
    data = tar([(raw.decode("utf-8", "surrogateescape"), b"x")])
    ((member, _),) = read(data)
    assert member.name == raw


def test_numbers_that_do_not_fit_octal_digits() -> None:
    file = entry("f", uid=3_000_000, gid=4_000_000, mtime=-5)
    ((member, _),) = read(tar([(file, b"")]))
    assert (member.uid, member.gid, member.mtime_ns) == (3_000_000, 4_000_000, -5 * 10**9)
    pax = entry("f", mtime=1)
    pax.mtime = 12.25
    pax.pax_headers = {"uid": "99999999999"}
    ((member, _),) = read(tar([(pax, b"")], format_=tarfile.PAX_FORMAT))
    assert member.mtime_ns == 12_250_000_000
    assert member.uid == 65534, "an impossible ID becomes 65534"
    pax.pax_headers = {"mtime": "9" * 19, "size": "no number"}
    ((member, _),) = read(tar([(pax, b"abc")], format_=tarfile.PAX_FORMAT))
    assert member.mtime_ns == 2**63 - 1
    assert member.size == 3


def test_type_of_the_first_tar_programs() -> None:
    data = header(tar([("f", b"x"), ("d/", b"")]), type=b"\0")
    assert [member.type for member, _ in read(data)] == [Type.FILE, Type.DIRECTORY]


def test_content_not_taken_is_skipped() -> None:
    data = tar([(f"f{number}", bytes([number]) * 5000) for number in range(5)])
    source = Bytes(data)
    for number, member in enumerate(members(source)):
        assert member.name == b"f%d" % number
        assert source.take(3 * number) == bytes([number]) * 3 * number


def test_end() -> None:
    data = tar([("a", b"x")], end=False)
    assert len(read(data)) == 1, "the end may be missing"
    assert read(data[: BLOCK + 1]) == read(data[:-1]) == read(data), "the padding before it, too"
    more = data + tar([("b", b"y")])
    assert [member.name for member, _ in read(more)] == [b"a", b"b"]
    ended = tar([("a", b"x")]) + more
    assert [member.name for member, _ in read(ended)] == [b"a"]
    assert [member.name for member, _ in read(ended, concatenated=True)] == [b"a", b"a", b"b"]
    assert read(tar([("a", b"x")]) + b"garbage" * 100) == read(tar([("a", b"x")]))
    assert read(b"") == read(bytes(1024)) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x", "middle of a header"),
        (b"x" * BLOCK, "no header at 0"),
        (tar([("a", b"x" * 2000)])[:1500], "middle of a member"),
        (tar([("a", b"x")], end=False) + bytes(BLOCK) + b"x" * BLOCK, "no header at 1536"),
        (header(tar([("a", b"")]), size=b"\xff" * 12), "a member of -1 bytes"),
        (header(tar([("a", b"")]), size=b"\xbf" + b"\xff" * 11), "a member of"),
        (header(tar([("a", b"")]), size=b"77777777777\0"), "middle of a member"),
        (header(tar([("a", b"")]), type=b"L", size=b"00077777777\0"), "a header of 16777215"),
        (header(tar([("a", b"")]), type=b"x", size=b"00003000000\0"), "middle of a header"),
        (tar([("n" * (NAME_MAX_BYTES + 1), b"")]), "a name of 4097 bytes"),
    ],
)
def test_damage(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        read(data)


def test_damage_ends_what_was_sound_before() -> None:
    source = Bytes(tar([("a", b"x")], end=False) + b"\1" * BLOCK)
    found = members(source)
    assert next(found).name == b"a"
    with pytest.raises(Damaged):
        next(found)


def test_a_signed_checksum_is_right_too() -> None:
    raw = bytearray(tar([("f\udcff\udcfe", b"")]))
    signed = sum(
        byte - 256 if byte > 127 else byte for byte in raw[:148] + b" " * 8 + raw[156:BLOCK]
    )
    raw[148:156] = b"%06o\0 " % signed
    assert [member.name for member, _ in read(bytes(raw))] == [b"f\xff\xfe"]


def test_is_header() -> None:
    assert is_header(tar([("a", b"")])[:BLOCK])
    assert not is_header(tar([("a", b"")])[: BLOCK - 1])
    assert not is_header(bytes(BLOCK))
    assert not is_header(b"\x7fELF" + bytes(BLOCK - 4))


# --- sparse files --------------------------------------------------------------------------------


def expanded(member: Member, stored: bytes) -> bytes:
    """The file that a sparse member is."""
    if member.extents is None:
        return stored
    whole = bytearray(member.size)
    for offset, size in member.extents:
        whole[offset : offset + size] = stored[:size]
        stored = stored[size:]
    assert not stored
    return bytes(whole)


def sparse(path: Path, pieces: int) -> bytes:
    """A file with holes, and what is in it."""
    with path.open("wb") as file:
        for number in range(pieces):
            file.seek(number * 65536)
            file.write(b"%06d" % number * 100)
        file.truncate(pieces * 65536 + 5)
    return path.read_bytes()


@pytest.mark.parametrize("pieces", [1, 3, 30])
@pytest.mark.parametrize(
    "command",
    [
        ["tar", "--format=gnu", "-S"],
        ["tar", "--format=posix", "-S", "--sparse-version=0.0"],
        ["tar", "--format=posix", "-S", "--sparse-version=0.1"],
        ["tar", "--format=posix", "-S", "--sparse-version=1.0"],
        ["bsdtar", "--format=pax"],
    ],
    ids=lambda words: "-".join(words[:1] + words[-1:]),
)
def test_sparse_files(tmp_path: Path, command: list[str], pieces: int) -> None:
    content = sparse(tmp_path / "sparse", pieces)
    (tmp_path / "after").write_bytes(b"after")
    argv = [tool(command[0]), *command[1:], "-cf", "-", "-C", tmp_path, "sparse", "after"]
    data = subprocess.run(argv, capture_output=True, check=True).stdout
    assert len(data) < len(content), "the archive has no holes, so this tests nothing"
    (first, stored), (second, after) = read(data)
    assert (first.name, second.name, after) == (b"sparse", b"after", b"after")
    assert first.stored < first.size == len(content)
    assert expanded(first, stored) == content


def pax(records: dict[str, str], content: bytes = b"") -> bytes:
    info = entry("f")
    info.pax_headers = records
    return tar([(info, content)], format_=tarfile.PAX_FORMAT)


@pytest.mark.parametrize(
    ("records", "content", "message"),
    [
        ({"GNU.sparse.map": "0,3", "GNU.sparse.size": "2"}, b"abc", "not all of it"),
        ({"GNU.sparse.map": "0,3"}, b"abc", "not all of it"),
        ({"GNU.sparse.map": "0,2", "GNU.sparse.size": "9"}, b"abc", "not all of it"),
        ({"GNU.sparse.map": "5,1,0,2", "GNU.sparse.size": "9"}, b"abc", "not in order"),
        ({"GNU.sparse.map": "x,3", "GNU.sparse.size": "9"}, b"abc", "not in order"),
        ({"GNU.sparse.major": "1"}, b"", "without a list"),
        ({"GNU.sparse.major": "1"}, b"9" * BLOCK, "without a list"),
        ({"GNU.sparse.major": "1"}, b"9\n" * (BLOCK // 2), "not in order|not all of it"),
        ({"GNU.sparse.major": "1"}, b"99999999\n".ljust(BLOCK), "too many pieces"),
        ({"GNU.sparse.major": "1"}, b"9999\n".ljust(BLOCK), "without a list"),
    ],
)
def test_sparse_files_that_lie(records: dict[str, str], content: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        read(pax(records, content))


def test_oldest_sparse_files_that_lie() -> None:
    plain = tar([("f", b"abc")])
    raw = bytearray(header(plain, type=b"S"))
    raw[386:410] = b"00000000000\x0000000000003\0"
    raw[483:495] = b"00000000002\0"
    with pytest.raises(Damaged, match="not all of it"):
        read(header(bytes(raw)))
    raw[482] = 1
    endless = (
        header(bytes(raw))[:BLOCK]
        + (
            (struct.pack("12s12s", b"00000000000", b"00000000000") * 21).ljust(504, b"\0")
            + b"\1" * 8
        )
        * 4000
    )
    with pytest.raises(Damaged, match="too many pieces"):
        read(endless)
