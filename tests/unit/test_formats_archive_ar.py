# SPDX-License-Identifier: Apache-2.0
"""The outer form of Debian packages."""

from __future__ import annotations

import pytest

from buildidfs.formats.archive import ar
from buildidfs.formats.archive.common import Damaged
from tests.support.sources import Bytes, ar_member


def read(data: bytes) -> list[tuple[bytes, bytes]]:
    source = Bytes(data)
    return [(name, source.take(size)) for name, size in ar.members(source)]


def test_members() -> None:
    data = ar.MAGIC + ar_member(b"debian-binary", b"2.0\n") + ar_member(b"odd/", b"xyz")
    data += ar_member(b"data.tar.xz", b"12345")
    assert read(data) == [
        (b"debian-binary", b"2.0\n"),
        (b"odd", b"xyz"),
        (b"data.tar.xz", b"12345"),
    ]
    assert read(data[:-1])[-1] == (b"data.tar.xz", b"12345"), "padding may be left out at the end"
    assert read(ar.MAGIC) == []


def test_what_is_not_taken_is_passed_over() -> None:
    source = Bytes(ar.MAGIC + ar_member(b"a", b"12345") + ar_member(b"b", b"6"))
    assert [name for name, _ in ar.members(source)] == [b"a", b"b"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an ar archive"),
        (b"!<thin>\n", "not an ar archive"),
        (ar.MAGIC + b"x" * 59, "no header at 8"),
        (ar.MAGIC + b"x" * 60, "no header at 8"),
        (ar.MAGIC + ar_member(b"a", b"", b"-1"), "no size at 8"),
        (ar.MAGIC + ar_member(b"a", b"", b""), "no size at 8"),
        (ar.MAGIC + ar_member(b"a", b"xy", b"9999999999"), "middle of a member"),
        (ar.MAGIC + ar_member(b"a", b"") * 65, "more than 64 members"),
    ],
)
def test_damage(data: bytes, message: str) -> None:
    with pytest.raises(Damaged, match=message):
        list(ar.members(Bytes(data)))
