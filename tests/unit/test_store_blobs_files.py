# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.blobs.files: bytes arrive whole, under their digest, or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import Digest
from buildidfs.store.blobs import files
from buildidfs.store.blobs.files import Blobs, BlobState, Staged, digest_of
from tests.support.clients.tools import run, tool, unmount

_MIB = 1 << 20
_CONTENT = array("I", range(700_000)).tobytes()  # not a round size


def _sha256(content: bytes) -> Digest:
    return Digest(hashlib.sha256(content).digest())


@pytest.fixture(params=["anonymous", "named"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Blobs]:
    """A blobs directory, as on a filesystem with and without O_TMPFILE."""
    (tmp_path / "blobs").mkdir()
    made = Blobs(os.fsencode(tmp_path), writable=True, anonymous=request.param == "anonymous")
    yield made
    made.close()
    assert list((tmp_path / "staging").glob("*")) == []


@contextlib.contextmanager
def _memfd(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("source")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def _stage(blobs: Blobs, content: bytes) -> Staged:
    with _memfd(content) as fd:
        return blobs.stage(fd)


def _standing(blobs: Blobs) -> Callable[[Staged], BlobState]:
    """What there is, told by its size."""

    def standing(staged: Staged) -> BlobState:
        size = blobs.size(staged.digest)
        if size is None:
            return BlobState.MISSING
        return BlobState.NEW if size == staged.size else BlobState.DAMAGED

    return standing


def _seal(blobs: Blobs, *batch: Staged) -> set[Digest]:
    added = blobs.seal(batch, _standing(blobs))
    for staged in batch:
        staged.close()
    return added


def _read(blobs: Blobs, digest: Digest) -> bytes:
    with open(blobs.open(digest), "rb") as blob:
        return blob.read()


@pytest.mark.parametrize("size", [0, 1, 4096, _MIB - 1, _MIB, _MIB + 1, len(_CONTENT)])
def test_bytes_get_their_digest_for_a_name(blobs: Blobs, size: int) -> None:
    content = _CONTENT[:size]
    with _stage(blobs, content) as staged:
        assert (staged.size, staged.digest) == (size, _sha256(content))
        assert os.pread(staged.fd, len(_CONTENT), 0) == content
        assert list(blobs.names()) == []
        assert blobs.seal([staged], _standing(blobs)) == {staged.digest}
    assert _read(blobs, _sha256(content)) == content
    assert list(blobs.names()) == [_sha256(content)]
    path = blobs.path(_sha256(content))
    assert path.endswith(b"/blobs/%b/%b" % (path[-64:-62], _sha256(content).hex().encode()))
    assert os.stat(path).st_mode & 0o777 == 0o400
    assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700


def test_what_is_not_sealed_leaves_nothing(blobs: Blobs, tmp_path: Path) -> None:
    staged = _stage(blobs, _CONTENT)
    staged.close()
    staged.close()
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


def test_hash_without_copy(blobs: Blobs) -> None:
    with _memfd(_CONTENT) as fd:
        assert digest_of(fd) == _sha256(_CONTENT)
        assert os.lseek(fd, 0, os.SEEK_CUR) == len(_CONTENT), "the offset is left alone"


def test_file_of_proc_claims_no_size_but_has_bytes(blobs: Blobs) -> None:
    expected = Path("/proc/self/maps").read_bytes().splitlines()[0]
    fd = os.open("/proc/self/maps", os.O_RDONLY)
    try:
        with blobs.stage(fd) as staged:
            assert os.pread(staged.fd, 1 << 16, 0).startswith(expected)
    finally:
        os.close(fd)


def test_no_more_than_the_limit_is_taken(blobs: Blobs) -> None:
    with _memfd(_CONTENT) as fd, blobs.stage(fd, 1000) as staged:
        assert (staged.size, staged.digest) == (1000, _sha256(_CONTENT[:1000]))


def test_a_file_that_never_stops_growing_is_taken_as_it_was(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with _memfd(_CONTENT) as fd:

        def growing(source: int, buffers: list[memoryview], offset: int) -> int:
            got = real(source, buffers, offset)
            os.pwrite(source, b"more", os.fstat(source).st_size)
            return got

        monkeypatch.setattr(os, "preadv", growing)
        with blobs.stage(fd) as staged:
            assert staged.size == len(_CONTENT)
            assert staged.digest == _sha256(_CONTENT)


def test_an_overwrite_during_the_copy_is_hashed_as_copied(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv
    with _memfd(_CONTENT) as fd:

        def overwriting(source: int, buffers: list[memoryview], offset: int) -> int:
            os.pwrite(source, b"overwritten in place", offset + 50)
            return real(source, buffers, offset)

        monkeypatch.setattr(os, "preadv", overwriting)
        with blobs.stage(fd) as staged:
            monkeypatch.undo()
            copied = os.pread(staged.fd, len(_CONTENT), 0)
            assert copied != _CONTENT
            assert staged.digest == _sha256(copied)


def test_holes_stay_holes(blobs: Blobs) -> None:
    with _memfd(b"start") as fd:
        os.ftruncate(fd, 64 * _MIB)
        with blobs.stage(fd) as staged:
            status = os.fstat(staged.fd)
            assert status.st_size == 64 * _MIB
            assert status.st_blocks * 512 <= 2 * _MIB
            assert staged.digest == digest_of(fd)


def test_unreadable_source_is_an_oserror_and_leaves_nothing(blobs: Blobs) -> None:
    before = set(os.listdir("/proc/self/fd"))
    directory = os.open("/", os.O_RDONLY)
    read_end, write_end = os.pipe()
    try:
        for fd in (directory, read_end):
            with pytest.raises(OSError, match=r"Is a directory|Illegal seek"):
                blobs.stage(fd)
    finally:
        for fd in (directory, read_end, write_end):
            os.close(fd)
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_blob_that_exists_is_left_alone(blobs: Blobs) -> None:
    _seal(blobs, _stage(blobs, b"same"))
    inode = os.stat(blobs.path(_sha256(b"same"))).st_ino
    assert _seal(blobs, _stage(blobs, b"same"), _stage(blobs, b"same")) == set()
    assert os.stat(blobs.path(_sha256(b"same"))).st_ino == inode


def test_a_blob_linked_in_between_is_left_alone(
    blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process captures the same bytes at the same time, and is faster."""
    faster, slower = _stage(blobs, b"same"), _stage(blobs, b"same")
    real = files.sync_all

    def overtaken(fds: list[int]) -> None:
        monkeypatch.setattr(files, "sync_all", real)
        _seal(blobs, faster)
        real(fds)

    monkeypatch.setattr(files, "sync_all", overtaken)
    _seal(blobs, slower)
    assert _read(blobs, _sha256(b"same")) == b"same"
    assert list(blobs.names()) == [_sha256(b"same")]


def test_a_blob_of_the_wrong_size_is_replaced(blobs: Blobs) -> None:
    _seal(blobs, _stage(blobs, b"whole"))
    path = blobs.path(_sha256(b"whole"))
    os.chmod(path, 0o600)
    os.truncate(path, 2)
    assert _seal(blobs, _stage(blobs, b"whole")) == {_sha256(b"whole")}
    assert _read(blobs, _sha256(b"whole")) == b"whole"


def test_missing_blob_is_an_integrity_error(blobs: Blobs) -> None:
    with pytest.raises(IntegrityError, match=f"blob {_sha256(b'').hex()} is missing"):
        blobs.open(_sha256(b""))
    assert blobs.size(_sha256(b"")) is None


def test_foreign_names_among_the_blobs_are_passed_over(blobs: Blobs, tmp_path: Path) -> None:
    _seal(blobs, _stage(blobs, b"x"))
    (tmp_path / "blobs" / "README").write_text("not a blob")
    (tmp_path / "blobs" / "zz").mkdir()
    (tmp_path / "blobs" / "zz" / "zz\udcff").write_text("nor this")
    assert list(blobs.names()) == [_sha256(b"x")]


def test_many_threads_stage_at_once(blobs: Blobs) -> None:
    contents = [_CONTENT[number : number + 300_000 + number] for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        batch = list(pool.map(lambda content: _stage(blobs, content), contents))
    assert [staged.digest for staged in batch] == [_sha256(content) for content in contents]
    assert len(_seal(blobs, *batch)) == len(contents)
    assert {_read(blobs, _sha256(content)) for content in contents} == set(contents)


def test_staging_is_swept_but_not_what_is_in_use(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "dead").write_bytes(b"left by a process that was killed")
    live = Blobs(os.fsencode(tmp_path), writable=True, anonymous=False)
    assert list((tmp_path / "staging").iterdir()) == []
    with _stage(live, b"in use") as staged:
        Blobs(os.fsencode(tmp_path), writable=True).close()
        assert len(list((tmp_path / "staging").iterdir())) == 1
        _seal(live, staged)
    assert _read(live, _sha256(b"in use")) == b"in use"
    live.close()


def test_a_reader_sweeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging" / "dead").touch()
    Blobs(os.fsencode(tmp_path), writable=False).close()
    assert (tmp_path / "staging" / "dead").exists()


def test_without_its_directory_the_store_is_damaged(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No such file or directory: the store is damaged"):
        Blobs(os.fsencode(tmp_path), writable=True)


@contextlib.contextmanager
def _loop_mount(tmp_path: Path, make: list[str], size: int) -> Iterator[Path]:
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    image, point = tmp_path / "image", tmp_path / "mnt"
    point.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    run([tool(make[0]), *make[1:], image], check=True)
    mounted = run([tool("mount"), "-o", "loop", image, point])
    if mounted.rc:
        pytest.skip(f"this kernel cannot mount it: {mounted.err.strip()}")
    try:
        yield point
    finally:
        unmount(point)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_a_filesystem_without_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """EOPNOTSUPP is what NFS, vfat and older FUSE answer; old kernels do not know the flag."""
    real = os.open

    def without(path: bytes, flags: int, *arguments: int, **names: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *arguments, **names)

    monkeypatch.setattr(os, "open", without)
    (tmp_path / "blobs").mkdir()
    blobs = Blobs(os.fsencode(tmp_path), writable=True)
    with _stage(blobs, _CONTENT) as staged:
        assert len(list((tmp_path / "staging").iterdir())) == 1
        _seal(blobs, staged)
    assert _read(blobs, _sha256(_CONTENT)) == _CONTENT
    assert os.listdir(tmp_path / "staging") == []
    blobs.close()


@pytest.mark.root
def test_extents_are_shared_where_the_filesystem_can(tmp_path: Path) -> None:
    with _loop_mount(tmp_path, ["mkfs.xfs", "-q", "-m", "reflink=1"], 320 << 20) as point:
        (point / "blobs").mkdir()
        (point / "source").write_bytes(_CONTENT)
        blobs = Blobs(os.fsencode(point), writable=True)
        os.sync()
        before = os.statvfs(point).f_bfree
        with open(point / "source", "r+b") as source, blobs.stage(source.fileno()) as staged:
            assert before - os.statvfs(point).f_bfree < len(_CONTENT) // 4096 // 2
            source.write(b"overwritten in place")
            source.flush()
            assert staged.digest == _sha256(_CONTENT)
            assert blobs.seal([staged], _standing(blobs)) == {staged.digest}
        assert _read(blobs, _sha256(_CONTENT)) == _CONTENT
        with _memfd(_CONTENT) as other, blobs.stage(other) as staged:
            assert staged.digest == _sha256(_CONTENT), "another filesystem is copied from"
        blobs.close()


def test_the_lock_of_a_staged_file_is_seen_by_others(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    blobs = Blobs(os.fsencode(tmp_path), writable=True, anonymous=False)
    with _stage(blobs, b"x"):
        (name,) = (tmp_path / "staging").iterdir()
        with name.open("rb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    blobs.close()
