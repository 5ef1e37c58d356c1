# SPDX-License-Identifier: Apache-2.0
"""What a layer hides of those below it."""

from __future__ import annotations

import pytest

from buildidfs.formats.archive.common import Damaged
from buildidfs.formats.container.whiteouts import LayerNames


def layer(*paths: bytes) -> LayerNames:
    """A layer with these members; directories end with a slash."""
    names = LayerNames()
    for path in paths:
        names.note(path.rstrip(b"/") or b"/", path.endswith(b"/"))
    return names


@pytest.mark.parametrize(
    ("members", "hidden", "seen"),
    [
        ([b"/a/file"], [b"/a/file", b"/a/file/below"], [b"/a/other", b"/a", b"/file"]),
        ([b"/a/"], [b"/a"], [b"/a/file"]),
        ([b"/a/", b"/a/b/", b"/a/b/c"], [b"/a/b/c", b"/a/b"], [b"/a/b/d"]),
        ([b"/a/.wh.file"], [b"/a/file", b"/a/file/below"], [b"/a/.wh.file", b"/a/file2", b"/a"]),
        ([b"/.wh.a"], [b"/a", b"/a/b/c"], [b"/b"]),
        ([b"/a/", b"/a/.wh..wh..opq"], [b"/a/x", b"/a/b/c", b"/a"], [b"/b", b"/ab/x"]),
        ([b"/.wh..wh..opq"], [b"/a", b"/a/b"], []),
        ([b"/.wh..wh.plnk/1.2", b"/.wh..wh.aufs"], [], [b"/.wh..wh.plnk/1.2", b"/1.2", b"/plnk"]),
        ([], [], [b"/a"]),
    ],
)
def test_hides(members: list[bytes], hidden: list[bytes], seen: list[bytes]) -> None:
    names = layer(*members)
    assert [path for path in hidden if not names.hides(path)] == []
    assert [path for path in seen if names.hides(path)] == []


@pytest.mark.parametrize(
    ("path", "there"),
    [
        (b"/a/file", True),
        (b"/a/.wh.file", False),
        (b"/a/.wh..wh..opq", False),
        (b"/.wh..wh.plnk/1.2", False),
        (b"/.wh", True),
        (b"/a.wh.b", True),
    ],
)
def test_whiteouts_are_not_there(path: bytes, there: bool) -> None:
    assert LayerNames().note(path, False) is there


def test_overlays_have_other_ways_to_say_it() -> None:
    names = LayerNames()
    names.remove(b"/a/gone")
    names.clear(b"/b")
    assert names.hides(b"/a/gone/below")
    assert names.hides(b"/b/x")
    assert not names.hides(b"/a/there")


def test_what_is_remembered_is_bounded() -> None:
    names = LayerNames(1000)
    names.note(b"/" + b"n" * 500, False)
    assert names.size > 500
    with pytest.raises(Damaged, match="too many names"):
        names.note(b"/" + b"m" * 500, True)
