# SPDX-License-Identifier: Apache-2.0
"""buildidfs.mount.open_files: one descriptor for all who open a file, and not too many beside."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.mount.limits import MountLimits
from buildidfs.mount.open_files import DirHandles, OpenFiles, is_text
from buildidfs.store import Store
from buildidfs.view import PUBLIC, View, nodes
from tests.support.harness.callers import Who, calling
from tests.support.harness.captures import capture
from tests.support.harness.children import needs_root

COUNT = 6


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"%d" % n, bytes([1, n])) for n in range(COUNT)])
        yield View(store)


def _nodes(view: View) -> list[int]:
    ids = [view.child(View.ROOT, b"01%02x" % n) for n in range(COUNT)]
    return [view.child(directory, b"elf") for directory in ids]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _bad(files: OpenFiles, handle: int) -> None:
    for call in (files.file, files.release):
        with pytest.raises(OSError, match=r".") as caught:
            call(handle)
        assert caught.value.errno == errno.EBADF


def test_all_who_open_a_file_share_it(view: View) -> None:
    files = OpenFiles(view, MountLimits(), 0)
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
    files = OpenFiles(view, MountLimits(idle_files=2), 0)
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
    files = OpenFiles(view, MountLimits(idle_files=0), 0)
    before = _descriptors()
    handle = files.open(_nodes(view)[0])
    files.release(handle)
    _bad(files, handle)
    assert _descriptors() == before


def test_texts_are_everybodys_own(view: View) -> None:
    files = OpenFiles(view, MountLimits(), 0)
    node = view.child(view.child(View.ROOT, b"0100"), b"path")
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
    files = OpenFiles(view, MountLimits(), 0)
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
    files = OpenFiles(view, MountLimits(), 0)
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
    files = OpenFiles(view, MountLimits(), 0)
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
    files = OpenFiles(view, MountLimits(idle_files=0), 5)
    text = view.child(view.child(View.ROOT, b"0100"), b"path")
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
    files = OpenFiles(view, MountLimits(idle_files=2), 0)
    nodes = _nodes(view)
    for _ in range(5):
        handles = [files.open(node, 7) for node in nodes[:2]]
        with pytest.raises(OSError, match="in system"):
            files.open(nodes[2], 7)
        for handle in handles:
            files.release(handle)
    files.close()


OWN = 1000
NODES = [nodes.ROOT, nodes.of_id(7, nodes.SLOT_VARIANTS), nodes.of_path(2**31 - 1),
         nodes.of_dwz(b"x"), nodes.of_perf_id(2**31 - 1, 2**31 - 1)]  # fmt: skip


def ctx(uid: int, gid: int = 5, pid: int | None = None) -> Any:
    """Somebody who asks; the process is ours unless it matters."""
    return SimpleNamespace(uid=uid, gid=gid, pid=os.getpid() if pid is None else pid)


@pytest.fixture
def listings() -> DirHandles:
    return DirHandles(MountLimits(), everything=False, own=OWN)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("uid", [0, OWN])
def test_nothing_is_kept_for_who_sees_everything(listings: DirHandles, node: int, uid: int) -> None:
    handle = listings.open(node, ctx(uid))
    assert handle == node
    assert listings.viewer_of(handle) == (node, None)
    listings.release(handle)
    assert len(listings) == 0
    everything = DirHandles(MountLimits(), everything=True, own=OWN)
    assert everything.open(node, None) == node  # type: ignore[arg-type]  # not looked at


@pytest.mark.parametrize("node", NODES)
def test_others_are_told_apart(listings: DirHandles, node: int) -> None:
    handles = [listings.open(node, ctx(uid, gid)) for uid, gid in ((7, 5), (7, 6), (8, 5))]
    assert len({*handles, node}) == 4
    assert max(handles) < 1 << 64
    for handle, (uid, gid) in zip(handles, ((7, 5), (7, 6), (8, 5)), strict=True):
        found, reader = listings.viewer_of(handle)
        assert found == node
        assert reader is not None
        assert (reader.uid, reader.groups) == (uid, frozenset((gid, *os.getgroups())))
    listings.release(handles[1])
    assert len(listings) == 2
    assert listings.viewer_of(handles[0])[0] == node


@needs_root("becomes another user")
def test_all_their_groups_are_known(listings: DirHandles) -> None:
    with calling(Who(7, 5, (11, 12))) as caller:
        _, reader = listings.viewer_of(listings.open(1, ctx(7, 5, caller.pid)))
    assert reader is not None
    assert reader.groups == frozenset((5, 11, 12))


@pytest.mark.parametrize("pid", [0, -1, 1 << 22, 1 << 40])
def test_groups_that_cannot_be_told(listings: DirHandles, pid: int) -> None:
    _, reader = listings.viewer_of(listings.open(1, ctx(7, 5, pid)))
    assert reader is not None
    assert (reader.uid, reader.groups) == (7, None)


@pytest.mark.parametrize("node", NODES)
def test_too_many_are_listed_what_everybody_may_read(node: int) -> None:
    listings = DirHandles(MountLimits(directories=6), everything=False, own=OWN)
    kept = [listings.open(node, ctx(7)) for _ in range(3)]
    handle = listings.open(node, ctx(7))
    assert listings.viewer_of(handle) == (node, PUBLIC)
    listings.release(handle)
    assert len(listings) == 3
    listings.release(kept[0])
    _, reader = listings.viewer_of(listings.open(node, ctx(7)))
    assert reader is not PUBLIC


def test_user_with_many_open_directories_leaves_others_theirs() -> None:
    listings = DirHandles(MountLimits(directories=100), everything=False, own=OWN)
    for _ in range(1000):
        listings.open(nodes.ROOT, ctx(7))
    for uid in (8, 9, 10):
        handles = [listings.open(nodes.ROOT, ctx(uid)) for _ in range(5)]
        assert all(listings.viewer_of(handle)[1] is not PUBLIC for handle in handles)


def test_closed_directory_has_no_viewer(listings: DirHandles) -> None:
    handle = listings.open(nodes.ROOT, ctx(7))
    listings.release(handle)
    listings.release(handle)
    assert listings.viewer_of(handle)[1] == PUBLIC


def test_handles_are_not_given_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildidfs.mount.open_files._LAST", 4)
    listings = DirHandles(MountLimits(directories=8), everything=False, own=OWN)
    handles = [listings.open(1, ctx(7)) for _ in range(3)]
    for _ in range(10):
        handle = listings.open(1, ctx(7))
        assert handle not in handles
        listings.release(handle)
    assert MountLimits().directories < 1 << 28, "there is always one left"
