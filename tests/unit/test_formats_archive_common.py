# SPDX-License-Identifier: Apache-2.0
"""Paths of members, compression of files, and bounds of numbers."""

from __future__ import annotations

import bz2
import gzip
import lzma

import pytest
import zstandard

from buildidfs.formats.archive import common
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
