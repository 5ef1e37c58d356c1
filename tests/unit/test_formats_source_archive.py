# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.source_archive: files by path, and the paths themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from buildidfs.formats import source_archive
from tests.support.filesystems.filereader import FileReader

if TYPE_CHECKING:
    from buildidfs.model import ByteRange


def unpacked(data: bytes) -> dict[bytes, ByteRange] | None:
    return source_archive.unpack(FileReader(data), len(data))


def test_files_are_where_the_list_says() -> None:
    files = {b"/a.c": b"one", b"/dir/b.h": b"", b"/\xff": b"three" * 50}
    sizes = [(path, len(content)) for path, content in files.items()]
    data = source_archive.pack(sizes) + b"".join(files.values())
    found = unpacked(data)
    assert found is not None
    got = {path: data[each.offset : each.offset + each.size] for path, each in found.items()}
    assert got == files
    assert unpacked(data[:-1]) is None, "it is cut off"
    assert unpacked(b"x" + data) is None
    assert unpacked(b"") is None


@pytest.mark.parametrize(
    ("path", "normal"),
    [
        (b"/a/b.c", b"/a/b.c"),
        (b"a/b.c", b"/a/b.c"),
        (b"//a/./b/../c.c/", b"/a/c.c"),
        (b"/../../etc/passwd", b"/etc/passwd"),
        (b"", b"/"),
    ],
)
def test_path_has_no_dot_segments(path: bytes, normal: bytes) -> None:
    assert source_archive.normal(path) == normal
