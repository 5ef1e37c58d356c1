# SPDX-License-Identifier: Apache-2.0
"""What is kept can be taken by number or name, and is closed when it is too old or too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.closer import Closer
from buildidfs.capture.stash import Stash


@pytest.fixture
def closer() -> Iterator[Closer]:
    it = Closer()
    yield it
    assert it.finish(20)


def file(directory: Path, name: str) -> int:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
    return os.open(path, os.O_RDONLY)


def number(fd: int) -> int:
    return os.fstat(fd).st_ino


def is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_by_inode_of_the_process_that_opened_it(tmp_path: Path, closer: Closer) -> None:
    stash = Stash(closer)
    one, two, other = (file(tmp_path, name) for name in ("one", "two", "other"))
    stash.put(1, one)
    stash.put(1, two)
    stash.put(2, other)
    assert stash.take(2, number(one), b"/one") is None
    assert stash.take(1, number(one), b"/whatever") == one
    assert stash.take(1, number(one), b"/one") is None
    assert stash.take(1, number(two), b"/two") == two
    os.close(one)
    os.close(two)
    stash.clear()
    assert closer.finish(20)
    assert not is_open(other)


def test_by_name_where_numbers_differ(tmp_path: Path, closer: Closer) -> None:
    stash = Stash(closer)
    one, two = file(tmp_path, "a/one"), file(tmp_path, "a/two")
    stash.put(1, one)
    stash.put(1, two)
    os.unlink(tmp_path / "a/one")
    assert stash.take(1, 0, b"/container/three") is None
    assert stash.take(1, 0, b"/container/one") == one
    os.close(one)
    again = file(tmp_path, "b/two")
    stash.put(1, again)
    assert stash.take(1, 0, b"/container/two") is None, "there are two"
    stash.clear()


def test_a_file_opened_twice_is_kept_once(tmp_path: Path, closer: Closer) -> None:
    stash = Stash(closer)
    one = file(tmp_path, "one")
    same = os.dup(one)
    stash.put(1, one)
    stash.put(1, same)
    assert len(stash) == 1
    assert stash.take(1, number(one), b"/one") == one
    os.close(one)
    assert closer.finish(20)
    assert not is_open(same)


def test_of_too_many_the_oldest_goes(tmp_path: Path, closer: Closer) -> None:
    stash = Stash(closer, most=3)
    fds = [file(tmp_path, str(each)) for each in range(5)]
    for pid, fd in enumerate(fds):
        stash.put(pid, fd)
    assert len(stash) == 3
    assert closer.finish(20)
    assert [is_open(fd) for fd in fds] == [False, False, True, True, True]
    for fd in fds[2:]:
        assert stash.take(fds.index(fd), number(fd), b"") == fd
        os.close(fd)


def test_what_is_old_and_what_is_not_needed(tmp_path: Path, closer: Closer) -> None:
    kept, fleeting = Stash(closer, seconds=3600), Stash(closer, seconds=0)
    one, two, three = (file(tmp_path, name) for name in ("one", "two", "three"))
    kept.put(1, one)
    kept.put(2, two)
    fleeting.put(1, three)
    kept.expire()
    fleeting.expire()
    kept.drop(1)
    kept.drop(7)
    assert (len(kept), len(fleeting)) == (1, 0)
    assert closer.finish(20)
    assert [is_open(fd) for fd in (one, two, three)] == [False, True, False]
    assert kept.take(2, number(two), b"") == two
    os.close(two)
