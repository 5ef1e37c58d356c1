# SPDX-License-Identifier: Apache-2.0
"""What is a package is told by its content: its name and where its members are."""

from __future__ import annotations

import gzip
import lzma
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.archive.package_file import NotAPackage, open_package
from buildidfs.capture.archive.stream import Limits
from buildidfs.capture.elf_file import memory_file
from buildidfs.formats.archive.common import Damaged
from tests.support.scans import open_descriptors
from tests.support.sources import ar_member, deb, tar

DATA = tar([("./usr/bin/app", b"content"), ("./usr/bin/other", b"more")])


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def read(data: bytes) -> tuple[str, dict[bytes, bytes]]:
    """The name of a package, and the content of its members."""
    fd = memory_file(b"package", data)
    with open(fd, "rb"):
        package = open_package(fd, len(data), Limits())
        return package.name, {
            member.name: package.stream.take(member.stored) for member in package.members
        }


CONTENT = {b"./usr/bin/app": b"content", b"./usr/bin/other": b"more"}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["none", "gz", "xz"])
def test_debian(pack: type[bytes]) -> None:
    assert read(deb(pack(DATA))) == ("app-1-2.all", CONTENT)


@pytest.mark.parametrize(
    "control", [b"", b"x" * 5_000_000, b"Package:\n"], ids=["empty", "long", "nameless"]
)
def test_debian_without_a_name(control: bytes) -> None:
    assert read(deb(DATA, control)) == ("", CONTENT)


def test_debian_whose_control_archive_is_damaged() -> None:
    for damaged in (b"", b"x" * 1000, gzip.compress(b"x")[:-3], lzma.compress(bytes(20 << 20))):
        parts = [(b"debian-binary", b"2.0\n"), (b"control.tar.gz", damaged), (b"data.tar", DATA)]
        data = b"!<arch>\n" + b"".join(ar_member(*part) for part in parts)
        assert read(data) == ("", CONTENT)


def test_debian_without_data() -> None:
    with pytest.raises(Damaged, match="without data"):
        read(b"!<arch>\n" + ar_member(b"debian-binary", b"2.0\n"))


def test_static_library() -> None:
    with pytest.raises(NotAPackage):
        read(b"!<arch>\n" + ar_member(b"/", b"symbols") + ar_member(b"a.o/", b"\x7fELF"))
    with pytest.raises(NotAPackage):
        read(b"!<arch>\n")


def apk_parts() -> list[bytes]:
    info = b"pkgname = app\npkgver = 1-r2\narch = x86_64\n"
    return [
        tar([(".SIGN.RSA.key.rsa.pub", b"signature")], end=False),
        tar([(".PKGINFO", info), (".pre-install", b"#!/bin/sh\n")], end=False),
        DATA,
    ]


@pytest.mark.parametrize("ended", [False, True], ids=["cut", "whole"])
def test_alpine(ended: bool) -> None:
    signature, control, data = apk_parts()
    end = bytes(1024) if ended else b""
    packed = b"".join(gzip.compress(part) for part in (signature + end, control + end, data))
    assert read(packed) == ("app-1-r2.x86_64", CONTENT)


def test_alpine_without_a_signature() -> None:
    packed = b"".join(gzip.compress(part) for part in apk_parts()[1:])
    assert read(packed)[0] == "app-1-r2.x86_64"


def test_alpines_third_format_is_named() -> None:
    with pytest.raises(Damaged, match="third format"):
        read(b"ADBd" + bytes(100))


def test_arch() -> None:
    members = [(".BUILDINFO", b""), (".MTREE", b""), (".PKGINFO", b"pkgname = app\n")]
    data = tar([*members, ("usr/bin/app", b"content")])
    for pack in (bytes, gzip.compress, lzma.compress):
        assert read(pack(data)) == ("app", {b"usr/bin/app": b"content"})


def test_name_that_comes_too_late() -> None:
    data = tar([(".MTREE", b""), ("usr/bin/app", b"content"), (".PKGINFO", b"pkgname = app\n")])
    assert read(data)[0] == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF" + bytes(1000),
        b"text",
        DATA,
        gzip.compress(DATA),
        gzip.compress(b"text"),
        gzip.compress(DATA)[:50],
        gzip.compress(b""),
        tar([(".profile", b"x")]),
        tar([]),
        b"BZh, as a text may begin",
    ],
    ids=range(11),
)
def test_what_is_none(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(NotAPackage):
        read(data)
