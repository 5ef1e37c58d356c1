# SPDX-License-Identifier: Apache-2.0
"""A full disk or quota: one clear line, nothing lost, and all well once there is room."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest

from buildidfs.errors import StoreFull
from buildidfs.linux import file_ops
from buildidfs.model import Absence, Kind
from buildidfs.store import NewAbsence, Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.captures import NOW, capture, commit, identity, read_blob, sighting

_MIB = 1 << 20


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    point = tmp_path / "small"
    point.mkdir()
    if request.param == "tmpfs":
        run([tool("mount"), "-t", "tmpfs", "-o", "size=8m", "tmpfs", point], check=True)
    else:
        if not Path("/dev/loop-control").exists():
            pytest.skip("this machine has no loop devices")
        with (tmp_path / "image").open("wb") as image:
            image.truncate(8 * _MIB)
        # no journal: it would take half of the room; no blocks kept back for root
        make = [tool("mkfs.ext4"), "-q", "-m", "0", "-O", "^has_journal", tmp_path / "image"]
        run(make, check=True)
        run([tool("mount"), "-o", "loop", tmp_path / "image", point], check=True)
    yield point
    unmount(point)


def _fill(directory: Path, leave: int) -> Path:
    """Take all room of a filesystem but so many bytes."""
    ballast = directory / "ballast"
    with ballast.open("wb") as file, contextlib.suppress(OSError):  # no space left
        for size in (1 << 16, 1 << 12):
            while _room(directory) >= leave + size:
                file.write(os.urandom(size))
                file.flush()
                os.fsync(file.fileno())
    assert _room(directory) < leave + (1 << 14)
    return ballast


def _room(directory: Path) -> int:
    usage = os.statvfs(directory)
    return usage.f_bavail * usage.f_frsize


def _is_clear(error: StoreFull, store: Store) -> None:
    text = str(error)
    assert text.startswith(f"store {os.fsdecode(store.path)}: "), text
    assert "free some room" in text
    assert "\n" not in text


def _first(store: Store) -> None:
    """Something that must not be lost."""
    commit(store, capture(store, b"first" * 1000, b"\x01\x01", at=sighting(b"/first")))


def _sound(store: Store, *ids: bytes) -> None:
    assert list(store.check(digests=True)) == []
    assert [bytes(build_id) for _, build_id in store.index.build_ids_from()] == list(ids)
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact is not None
    assert read_blob(store, artifact.digest) == b"first" * 1000


@pytest.mark.root
def test_no_room_for_the_bytes(small: Path) -> None:
    with Store.create(small / "store") as store:
        _first(store)
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(StoreFull) as caught:
            store.commit([capture(store, os.urandom(16 * _MIB), b"\x02\x02")])
        _is_clear(caught.value, store)
        assert "no space left on its filesystem" in str(caught.value)
        assert set(os.listdir("/proc/self/fd")) == before
        _sound(store, b"\x01\x01")
        commit(store, capture(store, os.urandom(_MIB), b"\x03\x03"))
        _sound(store, b"\x01\x01", b"\x03\x03")
    with Store.open(small / "store") as store:
        _sound(store, b"\x01\x01", b"\x03\x03")


@pytest.mark.root
def test_no_room_for_the_index(small: Path) -> None:
    with Store.create(small / "store") as store:
        _first(store)
        ballast = _fill(small, 64 << 10)
        absent = [NewAbsence(identity(ino=n), NOW, Absence.NOT_ELF) for n in range(20_000)]
        for _ in range(3):
            with pytest.raises(StoreFull) as caught:
                store.remember(absent)
            _is_clear(caught.value, store)
        _sound(store, b"\x01\x01")
        ballast.unlink()
        store.remember(absent)
        assert store.stats().remembered == 20_000
        _sound(store, b"\x01\x01")
    with Store.open(small / "store") as store:
        _sound(store, b"\x01\x01")


def _commit_for_ever(store: Store, ids: list[bytes], size: int) -> None:
    """Commit files of a size one by one, and add the build IDs of those that were."""
    while True:
        build_id = b"number %d" % len(ids)
        store.commit([capture(store, os.urandom(size), build_id, at=sighting(b"/" + build_id))])
        ids.append(build_id)


@pytest.mark.root
def test_filled_to_the_last_byte(small: Path) -> None:
    """Whatever it is that finds no room: bytes, names, directories, pages of the index."""
    with Store.create(small / "store") as store:
        _first(store)
        ids = [b"\x01\x01"]
        for leave in (400 << 10, 200 << 10, 100 << 10, 50 << 10, 20 << 10, 0):
            ballast = _fill(small, leave)
            with pytest.raises(StoreFull) as caught:
                _commit_for_ever(store, ids, 5000)
            _is_clear(caught.value, store)
            _sound(store, *ids)
            ballast.unlink()
        commit(store, capture(store, b"room again", b"\xff\xff"))
        _sound(store, *ids, b"\xff\xff")
    with Store.open(small / "store") as store:
        _sound(store, *ids, b"\xff\xff")
        assert len(ids) > 20


@pytest.mark.root
def test_no_inodes_left(tmp_path: Path) -> None:
    point = tmp_path / "small"
    point.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "nr_inodes=40", "tmpfs", point], check=True)
    try:
        with Store.create(point / "store") as store:
            _first(store)
            ids = [b"\x01\x01"]
            with pytest.raises(StoreFull) as caught:
                _commit_for_ever(store, ids, 10)
            _is_clear(caught.value, store)
            _sound(store, *ids)
            assert len(ids) > 5
    finally:
        unmount(point)


@pytest.mark.root
def test_no_room_for_a_new_store(small: Path) -> None:
    ballast = _fill(small, 0)
    with pytest.raises(StoreFull, match="free some room"):
        Store.create(small / "store")
    ballast.unlink()
    with Store.create(small / "store") as store:
        _first(store)
        _sound(store, b"\x01\x01")


_CALLS = [
    (os, "pwrite"),
    (os, "ftruncate"),
    (os, "fsync"),
    (os, "mkdir"),
    (file_ops, "link_fd"),
    (file_ops, "reflink"),
]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["disk", "quota"])
@pytest.mark.parametrize(("module", "name"), _CALLS, ids=[name for _, name in _CALLS])
def test_any_call_may_find_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, name: str, code: int
) -> None:
    """Filesystems allocate late; which call is told depends on their kind."""

    def refuse(*arguments: object, **names: object) -> None:
        raise OSError(code, os.strerror(code))

    with Store.create(tmp_path / "store") as store:
        _first(store)
        before = set(os.listdir("/proc/self/fd"))
        content = os.urandom(_MIB) + bytes(_MIB)  # ends in a hole
        store.blobs.files._no_reflink.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(StoreFull) as caught:
                store.commit([capture(store, content, b"\x02\x02")])
        _is_clear(caught.value, store)
        assert ("quota exhausted" in str(caught.value)) == (code == errno.EDQUOT)
        assert set(os.listdir("/proc/self/fd")) == before
        _sound(store, b"\x01\x01")
        commit(store, capture(store, content, b"\x02\x02"))
        _sound(store, b"\x01\x01", b"\x02\x02")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_short_write_of_the_index_is_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """LMDB says EIO, which is also what a broken disk says."""

    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    error = lmdb.Error("mdb_txn_commit", errno.EIO)
    error.code = errno.EIO
    with Store.create(tmp_path / "store") as store:
        assert store._env is not None
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        found = store._env.failure(error)
    assert isinstance(found, StoreFull) == (code != errno.EIO)
    assert ("quota" in str(found)) == (code == errno.EDQUOT)
