# SPDX-License-Identifier: Apache-2.0
"""Where members are installed, how files are compressed, and what packages are called."""

from __future__ import annotations

import bz2
import gzip
import lzma

import pytest
import zstandard

from buildidfs.formats.archive import common, packages
from buildidfs.formats.archive.common import Packing


@pytest.mark.parametrize(
    ("name", "path"),
    [
        (b"./usr/bin/app", b"/usr/bin/app"),
        (b"usr//bin/./app/", b"/usr/bin/app"),
        (b"/absolute", b"/absolute"),
        (b"../../etc/shadow", b"/etc/shadow"),
        (b"a/../../b/../c", b"/c"),
        (b"..", b"/"),
        (b"", b"/"),
        (b"./", b"/"),
        (b"\xff\xfe", b"/\xff\xfe"),
        (b"a\0b", b"/a"),
        (b"...", b"/..."),
    ],
)
def test_installed(name: bytes, path: bytes) -> None:
    assert common.installed(name) == path


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (gzip.compress(b"x", mtime=0), Packing.GZIP),
        (lzma.compress(b"x"), Packing.XZ),
        (lzma.compress(b"x", lzma.FORMAT_ALONE), Packing.LZMA),
        (zstandard.compress(b"x"), Packing.ZSTD),
        (b"\x5a\x2a\x4d\x18" + bytes(8), Packing.ZSTD),  # begins with a frame to be skipped
        (bz2.compress(b"x"), Packing.BZIP2),
        (b"", None),
        (b"\x1f\x8b", None),
        (b"\x7fELF\2\1", None),
    ],
)
def test_packing(data: bytes, kind: Packing | None) -> None:
    assert common.packing(data[: common.PACKING_HEAD]) is kind


def test_numbers_are_bounded() -> None:
    assert common.bounded_id(2**32 - 1) == 2**32 - 1
    assert common.bounded_id(2**32) == common.bounded_id(-1) == 65534
    assert common.bounded_time(5, 7) == 5_000_000_007
    assert common.bounded_time(2**70) == 2**63 - 1
    assert common.bounded_time(-(2**70)) == -(2**63 - 1)


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
        (b".SIGN.RSA.somebody.rsa.pub", True),
        (b".MTREE", True),
        (b"usr/.PKGINFO", False),
        (b".profile", False),
        (b"", False),
    ],
)
def test_metadata_of_packages(name: bytes, is_one: bool) -> None:
    assert packages.is_metadata(name) is is_one
