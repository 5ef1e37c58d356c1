# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.blobs.files: bytes beside a blob, wherever the filesystem has room for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from buildidfs.store.blobs import files
from buildidfs.store.blobs.files import Blobs
from tests.support.clients.tools import run, tool, unmount
from tests.support.harness.captures import capture, commit

if TYPE_CHECKING:
    from buildidfs.model import Digest


@pytest.fixture(params=["tmpfs", "ext4", "ext4 of small inodes", "ramfs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A store on a filesystem with, and on one without, attributes."""
    point = tmp_path / "point"
    point.mkdir()
    if request.param in ("tmpfs", "ramfs"):
        run([tool("mount"), "-t", request.param, "store", point], check=True)
    else:
        if not Path("/dev/loop-control").exists():
            pytest.skip("this machine has no loop devices")
        with (tmp_path / "image").open("wb") as image:
            image.truncate(16 << 20)
        small = ["-I", "128"] if request.param != "ext4" else []
        run([tool("mkfs.ext4"), "-q", *small, tmp_path / "image"], check=True)
        run([tool("mount"), "-o", "loop", tmp_path / "image", point], check=True)
    try:
        with Store.create(point / "store") as made:
            yield made
    finally:
        unmount(point)


def _captured(store: Store) -> Digest:
    commit(store, capture(store, b"bytes"))
    (digest,) = store.blobs.names()
    return digest


@pytest.mark.root
def test_a_capture_has_something_beside_it(store: Store, request: pytest.FixtureRequest) -> None:
    digest = _captured(store)
    bucket = os.listdir(os.path.dirname(store.blobs.path(digest)))
    assert (len(bucket) == 2) == ("ramfs" in request.node.name), "a file of its own"
    assert b"\xab\xcd\xef\x01" in store.blobs.files.origin(digest)


@pytest.mark.root
@pytest.mark.parametrize("size", [10, 5_000, files.MAX_ORIGIN_BYTES], ids=str)
def test_any_size_finds_a_place(store: Store, size: int) -> None:
    blobs, digest = store.blobs.files, _captured(store)
    for data in (b"a" * size, b"short", b"b" * size):
        blobs.keep_origin(digest, data)
        assert blobs.origin(digest) == data
    assert list(blobs.names()) == [digest]
    assert os.stat(blobs.path(digest)).st_mode & 0o222 == 0
    staging = Path(os.fsdecode(store.path), "staging")
    assert not staging.exists() or list(staging.iterdir()) == []


@pytest.mark.root
def test_it_goes_with_the_blob(store: Store) -> None:
    blobs, digest = store.blobs.files, _captured(store)
    blobs.keep_origin(digest, b"x" * files.MAX_ORIGIN_BYTES)
    bucket = Path(os.fsdecode(os.path.dirname(blobs.path(digest))))
    blobs.unlink(digest)
    assert list(bucket.iterdir()) == []
    assert blobs.origin(digest) == b""
    blobs.unlink(digest)


@pytest.mark.root
def test_it_is_set_aside_with_the_blob(store: Store) -> None:
    blobs, digest = store.blobs.files, _captured(store)
    blobs.keep_origin(digest, b"x" * files.MAX_ORIGIN_BYTES)
    blobs.set_aside(digest)
    assert list(blobs.names()) == []
    aside = Path(os.fsdecode(store.path), "quarantine")
    assert (aside / digest.hex()).read_bytes() == b"bytes"
    other = Blobs(store.path, writable=False)
    try:
        fd = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
        try:
            assert files.read_origin(fd, digest.hex()) == b"x" * files.MAX_ORIGIN_BYTES
        finally:
            os.close(fd)
    finally:
        other.close()


@pytest.mark.root
def test_an_owner_who_is_not_root_may_attach(tmp_path: Path) -> None:
    """Nobody may write to a blob, and attributes ask who may."""
    path = tmp_path / "blob"
    path.write_bytes(b"bytes")
    path.chmod(0o400)
    os.chown(path, 65534, 65534)
    for parent in tmp_path.parents:
        if parent != Path("/") and parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o001)
    tmp_path.chmod(0o777)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            fd = os.open(path, os.O_RDONLY)
            code = 0 if files.attach_origin(fd, b"data") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert path.stat().st_mode & 0o777 == 0o400
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        assert files.read_origin(directory, "blob") == b"data"
        assert files.read_origin(directory, "none") == b""
    finally:
        os.close(directory)
