# SPDX-License-Identifier: Apache-2.0
"""Copies, leases, fs-verity and access lists, against the kernel."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import has_no_writer, has_writer
from buildidfs.model import Trust
from buildidfs.store import Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.filesystems.mapped import SharedMapping, overlay
from tests.support.harness.callers import ACL_USER, set_acl
from tests.support.harness.captures import capture, sighting
from tests.support.harness.children import cat_program, needs_root, running
from tests.support.harness.scans import without_privileges

_MEASURE_VERITY = 0xC0046686  # _IOWR('f', 134, struct fsverity_digest)

_CONTENT = array("I", range(700_000)).tobytes()  # not a round size


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


def test_only_some_filesystems_have_files_without_a_name(tmp_path: Path) -> None:
    with file_ops.closing_fd(file_ops.unnamed_file(os.fsencode(tmp_path))) as fd:
        assert os.fstat(fd).st_nlink == 0
        assert not os.get_inheritable(fd)
    assert file_ops.open_unnamed(b"/proc") is None
    with pytest.raises(OSError, match="No such file"):
        file_ops.unnamed_file(os.fsencode(tmp_path / "missing"))


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
    if file_ops.reflink(source, unnamed):
        assert _read(unnamed) == _CONTENT
    else:
        assert _read(unnamed) == b""


def test_all_bytes_whether_they_can_be_shared_or_not(source: int, unnamed: int) -> None:
    file_ops.copy(source, unnamed)
    assert _read(unnamed) == _CONTENT
    memfd = os.memfd_create("target")
    try:
        file_ops.copy(source, memfd)
        assert _read(memfd) == _CONTENT
    finally:
        os.close(memfd)


def test_no_reflink_across_filesystems(source: int) -> None:
    memfd = os.memfd_create("target")
    try:
        assert file_ops.reflink(source, memfd) is False
        assert os.fstat(memfd).st_size == 0
    finally:
        os.close(memfd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_ops.reflink(source, source)


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
            assert file_ops.reflink(source.fileno(), target.fileno()) is True
            assert before - os.statvfs(mountpoint).f_bfree < len(_CONTENT) // 4096 // 2
            os.pwrite(source.fileno(), b"overwritten in place", 0)
            assert _read(target.fileno()) == _CONTENT
    finally:
        unmount(mountpoint)


def test_a_file_without_a_name_gets_one(tmp_path: Path, unnamed: int) -> None:
    (tmp_path / "blobs").mkdir()
    directory = os.open(tmp_path / "blobs", os.O_RDONLY)
    try:
        os.write(unnamed, b"bytes")
        file_ops.link_fd(unnamed, directory, b"name\xff")
        assert os.listdir(os.fsencode(tmp_path / "blobs")) == [b"name\xff"]
        assert (tmp_path / "blobs" / os.fsdecode(b"name\xff")).read_bytes() == b"bytes"
        assert os.fstat(unnamed).st_nlink == 1
        with pytest.raises(FileExistsError):
            file_ops.link_fd(unnamed, directory, b"name\xff")
    finally:
        os.close(directory)


def test_writeback_can_be_started(unnamed: int) -> None:
    os.write(unnamed, _CONTENT)
    file_ops.start_writeback(unnamed)
    assert _read(unnamed) == _CONTENT
    read_end, write_end = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            file_ops.start_writeback(write_end)
    finally:
        os.close(read_end)
        os.close(write_end)


# --- Who has a file open for writing, as the kernel knows it


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    yield descriptor
    # No later writer has to wait for us.
    assert fcntl.fcntl(descriptor, fcntl.F_GETLEASE) == fcntl.F_UNLCK
    os.close(descriptor)


def test_as_long_as_it_is_open_for_writing(file: Path, fd: int) -> None:
    assert has_writer(fd) is False
    with file.open("r+b"), file.open("rb"):
        assert has_writer(fd) is True
    with file.open("rb"):
        assert has_writer(fd) is False


def test_shared_mapping_that_outlives_its_descriptor(file: Path, fd: int) -> None:
    with file.open("r+b") as writable:
        shared = mmap.mmap(writable.fileno(), 0)
    with shared:
        assert has_writer(fd) is True
    with mmap.mmap(fd, 0, mmap.MAP_PRIVATE):  # its own pages it may write to
        assert has_writer(fd) is False


def test_program_that_runs_is_not_written_to(tmp_path: Path) -> None:
    path = tmp_path / "cat"
    path.write_bytes(cat_program().read_bytes())
    path.chmod(0o755)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with running([path]):
            assert has_writer(descriptor) is False
    finally:
        os.close(descriptor)


def test_own_descriptor_for_writing_tells_nothing(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        assert has_writer(descriptor) is None
    finally:
        os.close(descriptor)


def test_filesystem_without_leases_tells_nothing() -> None:
    reading, writing = os.pipe()
    try:
        assert has_writer(reading) is None
    finally:
        os.close(reading)
        os.close(writing)


@needs_root("is another user for a moment")
def test_file_of_another_user_tells_nothing(fd: int) -> None:
    assert has_writer(fd) is False
    with without_privileges():
        assert has_writer(fd) is None


def test_only_files_without_a_writer_are_said_to_have_none(file: Path, fd: int) -> None:
    assert has_no_writer(fd) is True
    with SharedMapping(file):
        assert has_no_writer(fd) is False
    assert has_no_writer(fd) is True


@needs_root("mounts an overlay")
def test_overlay_does_not_count_mappings_and_is_not_believed(tmp_path: Path) -> None:
    with overlay(tmp_path / "place") as merged:
        file = merged / "file"
        file.write_bytes(bytes(4096))
        descriptor = os.open(file, os.O_RDONLY)
        try:
            assert has_no_writer(descriptor) is None
            with file.open("r+b"):
                assert has_no_writer(descriptor) is False
            with SharedMapping(file):
                assert has_no_writer(descriptor) is not True
        finally:
            os.close(descriptor)


# --- buildidfs.linux.fsverity: the kernel vouches for files, where it offers that; el


#: The kernel names what its ext4 can do.
OFFERED = Path("/sys/fs/ext4/features/verity").exists()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.fixture(params=["plain", "verity"])
def point(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, bool]]:
    """An ext4 filesystem of either kind, and whether files on it can be vouched for."""
    point, image = tmp_path / "point", tmp_path / "image"
    point.mkdir()
    if not Path("/dev/loop-control").exists():
        pytest.skip("this machine has no loop devices")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    wanted = request.param == "verity" and OFFERED
    options = ["-O", "verity"] if wanted else []
    run([tool("mkfs.ext4"), "-q", "-b", "4096", *options, image], check=True)
    run([tool("mount"), "-o", "loop", image, point], check=True)
    try:
        yield point, wanted
    finally:
        unmount(point)


def _measured(fd: int) -> bytes | None:
    """Return the SHA-256 root hash that fs-verity holds a file to; None if it is not enabled."""
    digest = bytearray(struct.pack("=HH", 0, 64)) + bytes(64)  # algorithm and size, then the digest
    try:
        fcntl.ioctl(fd, _MEASURE_VERITY, digest)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP, errno.ENOTTY, errno.EINVAL):
            raise
        return None
    return bytes(digest[4 : 4 + int.from_bytes(digest[2:4], sys.byteorder)])


@pytest.mark.root
def test_a_file(point: tuple[Path, bool]) -> None:
    """With or without it: the answer is that of the kernel at hand."""
    path, offered = point[0] / "file", point[1]
    path.write_bytes(b"bytes" * 10_000)
    with _opened(path) as fd:
        assert _measured(fd) is None
        assert file_ops.enable_verity(fd) is offered
        assert file_ops.enable_verity(fd) is offered, "twice is as good as once"
        measured = _measured(fd)
    assert (measured is None) is not offered
    if offered:
        assert measured is not None
        assert len(measured) == 32
        with pytest.raises(PermissionError):
            path.open("r+b")
    else:
        path.open("r+b").close()


@pytest.mark.root
def test_changed_bytes_cannot_be_read(point: tuple[Path, bool], tmp_path: Path) -> None:
    mounted, offered = point
    path = mounted / "file"
    content = os.urandom(20_000)
    path.write_bytes(content)
    with _opened(path) as fd:
        assert file_ops.enable_verity(fd) is offered
    run(["sync"], check=True)
    with (tmp_path / "image").open("r+b") as image:
        at = image.read().find(content[4096:8192])
        assert at > 0
        image.seek(at)
        image.write(bytes(4096))
        os.fsync(image.fileno())
    Path("/proc/sys/vm/drop_caches").write_text("3")
    if offered:
        with pytest.raises(OSError, match=r".") as caught:
            path.read_bytes()
        assert caught.value.errno == errno.EIO
    else:
        assert path.read_bytes() != content, "plain files give changed bytes"


@pytest.mark.root
def test_blobs_that_are_read_get_it(point: tuple[Path, bool]) -> None:
    mounted, offered = point
    content = elf_file([TEXT, Section(b".comment", bytes(9000))], build_id=b"\x01\x02")
    with Store.create(mounted / "store") as store:
        store.commit([capture(store, content, b"\x01\x02")])
        (digest,) = store.blobs.names()
        assert list(store.check(digests=True)) == []
        with _opened(Path(os.fsdecode(store.blobs.path(digest)))) as fd:
            assert (_measured(fd) is not None) is offered
        assert store.blobs.is_untouched(digest)
        better = sighting(b"/better", trust=Trust.HOST)
        store.commit([capture(store, digest, b"\x01\x02", at=better)])
        assert b"/better" in store.blobs.files.origin(digest)
        assert store.blobs.is_untouched(digest), "what is beside it may still change"
        assert list(store.check(digests=True)) == []


def test_verity_of_a_directory(tmp_path: Path) -> None:
    with _opened(Path("/proc/self/status")) as fd:
        assert _measured(fd) is None
        assert not file_ops.enable_verity(fd)


# --- buildidfs.linux.xattr on files that have an access control list, and on those th


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_list_of_an_open_file(tmp_path: Path, flags: int) -> None:
    file = tmp_path / "file"
    file.touch()
    fd = os.open(file, flags)
    try:
        assert file_ops.access_list(fd) is None
        set_acl(file, 0o640, [(ACL_USER, 4, 1000)])
        assert file_ops.access_list(fd) == os.getxattr(file, "system.posix_acl_access")
    finally:
        os.close(fd)


def test_filesystem_without_lists() -> None:
    fd = os.open("/proc", os.O_PATH)
    try:
        assert file_ops.access_list(fd) is None
    finally:
        os.close(fd)


def test_descriptor_that_is_closed() -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        file_ops.access_list(1 << 20)
    assert caught.value.errno == errno.ENOENT
