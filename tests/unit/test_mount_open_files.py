# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.open_files: one descriptor for all who open a file, and not too many beside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.mount.open_files import OpenFiles, Quota, is_text
from buildidfs.store import Store
from buildidfs.view import View
from tests.support.captures import capture

COUNT = 6


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"%d" % n, bytes([1, n])) for n in range(COUNT)])
        yield View(store)


def _nodes(view: View) -> list[int]:
    ids = [view.lookup(View.ROOT, b"01%02x" % n) for n in range(COUNT)]
    return [view.lookup(directory, b"elf") for directory in ids]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _bad(files: OpenFiles, handle: int) -> None:
    for call in (files.file, files.release):
        with pytest.raises(OSError, match=r".") as caught:
            call(handle)
        assert caught.value.errno == errno.EBADF


def test_all_who_open_a_file_share_it(view: View) -> None:
    files = OpenFiles(view)
    node = _nodes(view)[2]
    before = _descriptors()
    handles = {files.open(node) for _ in range(5)}
    assert len(handles) == 1
    (handle,) = handles
    assert _descriptors() == before + 1
    for _ in range(4):
        files.release(handle)
    assert os.pread(files.file(handle).content.blob.fd, 10, 0) == b"2"
    files.release(handle)
    with pytest.raises(OSError, match=r"."):
        files.release(handle)
    assert files.open(node) == handle
    files.close()
    assert _descriptors() == before


def test_only_so_many_are_kept(view: View) -> None:
    files = OpenFiles(view, idle=2)
    nodes = _nodes(view)
    before = _descriptors()
    handles = [files.open(node) for node in nodes]
    assert _descriptors() == before + COUNT, "who is in use stays"
    for handle in handles:
        files.release(handle)
    assert _descriptors() == before + 2
    for handle in handles[:-2]:
        _bad(files, handle)
    assert [files.open(node) for node in nodes[-2:]] == handles[-2:]
    files.close_idle()
    assert _descriptors() == before + 2, "they are in use again"
    for handle in handles[-2:]:
        files.release(handle)
    files.close_idle()
    assert _descriptors() == before
    assert os.pread(files.file(files.open(nodes[0])).content.blob.fd, 10, 0) == b"0"
    files.close()


def test_none_may_be_kept(view: View) -> None:
    files = OpenFiles(view, idle=0)
    before = _descriptors()
    handle = files.open(_nodes(view)[0])
    files.release(handle)
    _bad(files, handle)
    assert _descriptors() == before


def test_texts_are_everybodys_own(view: View) -> None:
    files = OpenFiles(view)
    node = view.lookup(view.lookup(View.ROOT, b"0100"), b"path")
    first, second = files.open(node), files.open(node)
    assert first != second
    assert is_text(first)
    assert not is_text(files.open(_nodes(view)[0]))
    assert files.file(first).content.text == b"/usr/bin/app\n"
    files.release(first)
    _bad(files, first)
    files.release(second)
    files.close()


def test_failed_open_leaves_nothing(view: View) -> None:
    files = OpenFiles(view)
    before = _descriptors()
    with pytest.raises(IsADirectoryError):
        files.open(View.ROOT)
    _bad(files, 5)
    assert _descriptors() == before


def _blob(store: Store, view: View, node: int) -> Path:
    """The file of the blob behind a node."""
    content = view.open(node)
    try:
        name = os.readlink(f"/proc/self/fd/{content.blob.fd}")
    finally:
        content.close()
    return Path(name)


def test_written_file_is_not_shared(view: View, tmp_path: Path) -> None:
    """Its users keep their bytes; later ones get the right bytes, or none."""
    files = OpenFiles(view)
    node = _nodes(view)[3]
    handle = files.open(node)
    blob = _blob(view._store, view, node)
    before = _descriptors()
    blob.chmod(0o600)
    assert files.open_now(node) is None, "all of it has to be read"
    other = files.open(node)
    assert other != handle
    assert files.open_now(node) == other
    for each in (handle, other, other):
        files.release(each)
    files.close_idle()
    assert _descriptors() == before - 1
    idle = files.open(node)
    files.release(idle)
    blob.write_bytes(b"!")
    with pytest.raises(IntegrityError):
        files.open(node)
    _bad(files, idle)
    files.close()


def test_two_who_waited_for_the_same_file_share_it(view: View) -> None:
    files = OpenFiles(view)
    node = _nodes(view)[0]
    contents = [view.open(node), view.open(node)]
    before = _descriptors()
    first, second = [files.add(node, content) for content in contents]
    assert first == second
    assert _descriptors() == before - 1
    files.close()


def test_user_with_many_open_files_leaves_others_theirs(
    view: View, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 40
    monkeypatch.setattr(
        "buildidfs.mount.open_files.resource.getrlimit", lambda which: (limit, limit)
    )
    files = OpenFiles(view, idle=0, own=5)
    text = view.lookup(view.lookup(View.ROOT, b"0100"), b"path")
    handles = [files.open(text, 7) for _ in range(15)]  # half of three quarters
    with pytest.raises(OSError, match="in system") as caught:
        files.open(text, 7)
    assert caught.value.errno == errno.ENFILE
    before = _descriptors()
    for node in _nodes(view):
        with pytest.raises(OSError, match="in system"):
            files.open(node, 7)
    assert _descriptors() == before, "what was opened in vain is closed"
    files.release(handles.pop())
    files.open(_nodes(view)[1], 7)
    assert len({files.open(_nodes(view)[0], uid) for uid in (0, 5)}) == 1, "theirs is one"
    assert len({files.open(_nodes(view)[0], uid) for uid in (0, 8, 9)}) == 3
    files.close()


def test_idle_file_counts_for_no_user(view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildidfs.mount.open_files.resource.getrlimit", lambda which: (8, 8))
    files = OpenFiles(view, idle=2)
    nodes = _nodes(view)
    for _ in range(5):
        handles = [files.open(node, 7) for node in nodes[:2]]
        with pytest.raises(OSError, match="in system"):
            files.open(nodes[2], 7)
        for handle in handles:
            files.release(handle)
    files.close()


# --- places divided among users -------------------------------------------------------------------


def taken(quota: Quota, uid: int) -> int:
    count = 0
    while count < 10_000 and quota.take(uid):
        count += 1
    return count


def test_each_user_has_half_of_what_others_leave() -> None:
    quota = Quota(1000)
    assert [taken(quota, uid) for uid in (7, 8, 9)] == [500, 250, 125]


def test_place_given_back_can_be_taken_again() -> None:
    quota = Quota(10)
    assert taken(quota, 7) == 5
    quota.give_back(7)
    assert quota.take(7)
    assert not quota.take(7)
    assert taken(quota, 8) == 2
    for _ in range(9):
        quota.give_back(7)
    assert taken(quota, 8) == 3, "a user cannot give back more than they have"
    for _ in range(5):
        quota.give_back(8)
    assert quota._held == {}
