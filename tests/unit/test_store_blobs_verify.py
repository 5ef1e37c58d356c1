# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.blobs.verify: bytes that are not those that were captured are given to nobody."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.errors import IntegrityError
from buildidfs.model import Digest
from buildidfs.store import Store, schema
from buildidfs.store.blobs import files
from buildidfs.store.index import environment
from tests.support.harness import damages
from tests.support.harness.captures import capture, commit, read_blob

_GOOD, _OTHER = b"good bytes", b"other data"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        commit(made, capture(made, _GOOD, b"\x01\x01"), capture(made, _OTHER, b"\x02\x02"))
        yield made


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each file that was read as a whole."""
    read: list[int] = []
    real = files.content_digest

    def counted(fd: int, *arguments: object) -> Digest:
        read.append(fd)
        return real(fd, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "content_digest", counted)
    return read


def _digest(store: Store, content: bytes) -> Digest:
    digest = Digest(hashlib.sha256(content).digest())
    assert store.blobs.size(digest) is not None
    return digest


def _path(store: Store, content: bytes = _GOOD) -> Path:
    return Path(os.fsdecode(store.blobs.path(_digest(store, content))))


@pytest.mark.parametrize("damage", damages.TOUCHED, ids=damages.name_of)
def test_nobody_gets_other_bytes(store: Store, damage: damages.Damage, hashed: list[int]) -> None:
    digest = _digest(store, _GOOD)
    damage(_path(store), _path(store, _OTHER))
    assert store.open_blob_now(digest) is None
    assert hashed == []
    with pytest.raises(IntegrityError, match=f"blob {digest} of .* has not the bytes"):
        store.open_blob(digest)
    for call in (store.open_blob, store.open_blob_now):
        with pytest.raises(IntegrityError, match="has not the bytes"):
            call(digest)
    assert len(hashed) == 1, "it is read once"
    assert store.held(digest) is None


def test_a_file_that_is_put_right_is_read_again(store: Store) -> None:
    digest = _digest(store, _GOOD)
    damages.flip(_path(store), _path(store, _OTHER))
    with pytest.raises(IntegrityError):
        store.open_blob(digest)
    damages.overwrite(_path(store), _GOOD)
    assert read_blob(store, digest) == _GOOD


def test_bytes_that_are_as_captured_are_not_read(store: Store, hashed: list[int]) -> None:
    digest = _digest(store, _GOOD)
    for _ in range(3):
        assert read_blob(store, digest) == _GOOD
        blob = store.open_blob_now(digest)
        assert blob is not None
        blob.close()
    assert hashed == []


def test_a_store_that_was_restored_is_read_once(store: Store, hashed: list[int]) -> None:
    digest, path = _digest(store, _GOOD), _path(store)
    draft = path.with_suffix(".copy")
    draft.write_bytes(_GOOD)
    draft.rename(path)
    assert store.open_blob_now(digest) is None
    for _ in range(3):
        assert read_blob(store, digest) == _GOOD
    assert len(hashed) == 1
    blob = store.open_blob_now(digest)
    assert blob is not None
    blob.close()


def test_a_capture_of_the_same_bytes_writes_down_the_file(store: Store) -> None:
    digest, path = _digest(store, _GOOD), _path(store)
    draft = path.with_suffix(".copy")
    draft.write_bytes(_GOOD)
    draft.rename(path)
    assert store.held(digest) is None, "so that it is staged"
    commit(store, capture(store, _GOOD, b"\x01\x01"))
    assert store.held(digest) is not None
    with Store.open(store.path) as other:
        blob = other.open_blob_now(digest)
        assert blob is not None
        blob.close()


@pytest.mark.parametrize("damage", damages.TOUCHED, ids=damages.name_of)
def test_a_capture_of_the_same_bytes_heals(store: Store, damage: damages.Damage) -> None:
    digest = _digest(store, _GOOD)
    damage(_path(store), _path(store, _OTHER))
    damaged = _path(store).read_bytes()
    result = commit(store, capture(store, _GOOD, b"\x01\x01"), capture(store, _OTHER, b"\x02\x02"))
    assert result.bytes_added
    assert read_blob(store, digest) == _GOOD
    assert read_blob(store, _digest(store, _OTHER)) == _OTHER
    assert list(store.check(digests=True)) == []
    aside = Path(os.fsdecode(store.path), "quarantine", digest.hex())
    assert aside.read_bytes() == damaged


def test_a_capture_of_what_is_missing_heals(store: Store) -> None:
    digest = _digest(store, _GOOD)
    _path(store).unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        store.open_blob(digest)
    commit(store, capture(store, _GOOD, b"\x01\x01"))
    assert read_blob(store, digest) == _GOOD


def test_what_no_row_speaks_of_is_read(store: Store, hashed: list[int]) -> None:
    """A crash leaves blobs without a row, and anybody could."""
    digest = Digest(files.sha256().digest())
    path = Path(os.fsdecode(store.blobs.path(digest)))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"")
    store.open_blob(digest).close()
    assert len(hashed) == 1


def test_what_no_row_speaks_of_is_not_taken_over_unread(store: Store) -> None:
    content = b"new content"
    digest = Digest(hashlib.sha256(content).digest())
    path = Path(os.fsdecode(store.blobs.path(digest)))
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"old content")
    commit(store, capture(store, content, b"\x03\x03"))
    assert read_blob(store, digest) == content


def test_what_is_remembered_is_bounded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buildidfs.store.blobs.verify._MOST_REMEMBERED", 1)
    for content in (_GOOD, _OTHER):
        draft = _path(store, content).with_suffix(".copy")
        draft.write_bytes(content)
        draft.rename(_path(store, content))
    for content in (_GOOD, _OTHER, _GOOD):
        assert read_blob(store, _digest(store, content)) == content
    assert len(store.blobs._read) == 1


def test_a_row_of_the_file(store: Store) -> None:
    env = environment.acquire(store.path, read_only=False)
    try:
        value = env.get(env.tables["digests"], _digest(store, _GOOD))
    finally:
        environment.release(env)
    assert value is not None
    status = _path(store).stat()
    row = schema.DigestRow.unpack(value)
    assert (row.stored, row.inode, row.ctime_ns) == (
        status.st_size, status.st_ino, status.st_ctime_ns,
    )  # fmt: skip
    assert schema.is_file(value, row.stored, row.inode, row.ctime_ns)
    for other in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        changed = (row.stored + other[0], row.inode + other[1], row.ctime_ns + other[2])
        assert not schema.is_file(value, *changed)
