# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.copy: every way to copy gives the same bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux import copy
from tests.support.children import needs_root
from tests.support.clients import run, tool

_CONTENT = b"".join(number.to_bytes(4, "little") for number in range(700_000))  # not a round size


@pytest.fixture
def source(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "source").write_bytes(_CONTENT)
    fd = os.open(tmp_path / "source", os.O_RDONLY)
    yield fd
    os.close(fd)


@pytest.fixture
def unnamed(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    yield fd
    os.close(fd)


def _read(fd: int) -> bytes:
    return os.pread(fd, 2 * len(_CONTENT), 0)


@pytest.fixture(params=["kernel", "EXDEV", "EOPNOTSUPP", "ENOSYS", "EPERM", "short", "nothing"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """copy_file_range as it is, and as other kernels and filesystems answer it."""
    real = os.copy_file_range
    way = str(request.param)

    def answer(src: int, dst: int, count: int, offset_src: int, offset_dst: int) -> int:
        if way == "nothing":
            return 0
        if way == "short":
            # A piece, and then it is no longer supported.
            if offset_src:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(src, dst, min(count, 1000), offset_src, offset_dst)
        number = getattr(errno, way)
        raise OSError(number, os.strerror(number))

    if way != "kernel":
        monkeypatch.setattr(os, "copy_file_range", answer)
    return way


def test_reflink_gives_all_or_says_no(source: int, unnamed: int) -> None:
    if copy.reflink(source, unnamed):
        assert _read(unnamed) == _CONTENT
    else:
        assert _read(unnamed) == b""


def test_all_bytes_whether_they_can_be_shared_or_not(source: int, unnamed: int) -> None:
    copy.content(source, unnamed)
    assert _read(unnamed) == _CONTENT
    memfd = os.memfd_create("target")
    try:
        copy.content(source, memfd)
        assert _read(memfd) == _CONTENT
    finally:
        os.close(memfd)


def test_no_reflink_across_filesystems(source: int) -> None:
    memfd = os.memfd_create("target")
    try:
        assert copy.reflink(source, memfd) is False
        assert os.fstat(memfd).st_size == 0
    finally:
        os.close(memfd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        copy.reflink(source, source)


@pytest.mark.root
@needs_root("mounts a filesystem that can reflink")
def test_a_reflink_is_a_snapshot(tmp_path: Path) -> None:
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    image, mountpoint = tmp_path / "image", tmp_path / "mnt"
    mountpoint.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    run([tool("mkfs.xfs"), "-q", "-m", "reflink=1", image], check=True)
    mounted = run([tool("mount"), "-t", "xfs", "-o", "loop", image, mountpoint])
    if mounted.rc:
        pytest.skip(f"this kernel cannot mount xfs: {mounted.err.strip()}")
    try:
        path = mountpoint / "source"
        path.write_bytes(_CONTENT)
        with path.open("r+b") as source, (mountpoint / "target").open("w+b") as target:
            before = os.statvfs(mountpoint).f_bfree
            assert copy.reflink(source.fileno(), target.fileno()) is True
            assert before - os.statvfs(mountpoint).f_bfree < len(_CONTENT) // 4096 // 2
            os.pwrite(source.fileno(), b"overwritten in place", 0)
            assert _read(target.fileno()) == _CONTENT
    finally:
        run([tool("umount"), mountpoint], check=True)


def test_a_file_without_a_name_gets_one(tmp_path: Path, unnamed: int) -> None:
    (tmp_path / "blobs").mkdir()
    directory = os.open(tmp_path / "blobs", os.O_RDONLY)
    try:
        os.write(unnamed, b"bytes")
        copy.link_fd(unnamed, directory, b"name\xff")
        assert os.listdir(os.fsencode(tmp_path / "blobs")) == [b"name\xff"]
        assert (tmp_path / "blobs" / os.fsdecode(b"name\xff")).read_bytes() == b"bytes"
        assert os.fstat(unnamed).st_nlink == 1
        with pytest.raises(FileExistsError):
            copy.link_fd(unnamed, directory, b"name\xff")
    finally:
        os.close(directory)


def test_writeback_can_be_started(unnamed: int) -> None:
    os.write(unnamed, _CONTENT)
    copy.start_writeback(unnamed)
    copy.start_writeback(unnamed, 4096, 8192)
    assert _read(unnamed) == _CONTENT
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            copy.start_writeback(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
