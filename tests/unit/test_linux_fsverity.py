# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.fsverity: the kernel vouches for files, where it offers that; else it says so."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux import fsverity
from buildidfs.model import Trust
from buildidfs.store import Store
from tests.support.captures import capture, sighting
from tests.support.clients import run, tool
from tests.support.elfwriter import TEXT, Section, elf_file

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
        run([tool("umount"), point], check=True)


@pytest.mark.root
def test_a_file(point: tuple[Path, bool]) -> None:
    """With or without it: the answer is that of the kernel at hand."""
    path, offered = point[0] / "file", point[1]
    path.write_bytes(b"bytes" * 10_000)
    with _opened(path) as fd:
        assert fsverity.measure(fd) is None
        assert fsverity.enable(fd) is offered
        assert fsverity.enable(fd) is offered, "twice is as good as once"
        measured = fsverity.measure(fd)
    assert (measured is None) is not offered
    if offered:
        assert measured is not None
        assert len(measured) == 32
        with pytest.raises(PermissionError):
            path.open("r+b")
    else:
        path.open("r+b").close()


@pytest.mark.root
def test_what_changes_below_cannot_be_read(point: tuple[Path, bool], tmp_path: Path) -> None:
    mounted, offered = point
    path = mounted / "file"
    content = os.urandom(20_000)
    path.write_bytes(content)
    with _opened(path) as fd:
        assert fsverity.enable(fd) is offered
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
        assert path.read_bytes() != content, "nobody notices"


@pytest.mark.root
def test_blobs_that_are_read_get_it(point: tuple[Path, bool]) -> None:
    mounted, offered = point
    content = elf_file([TEXT, Section(b".comment", bytes(9000))], build_id=b"\x01\x02")
    with Store.create(mounted / "store") as store:
        store.commit([capture(store, content, b"\x01\x02")])
        (digest,) = store.blob_names()
        assert list(store.check(digests=True)) == []
        with _opened(Path(os.fsdecode(store.blob_path(digest)))) as fd:
            assert (fsverity.measure(fd) is not None) is offered
        assert store._verified.is_untouched(digest)
        better = sighting(b"/better", trust=Trust.HOST)
        store.commit([capture(store, digest, b"\x01\x02", at=better)])
        assert b"/better" in store._blobs.origin(digest)
        assert store._verified.is_untouched(digest), "what is beside it may still change"
        assert list(store.check(digests=True)) == []


def test_what_is_not_a_file(tmp_path: Path) -> None:
    with _opened(Path("/proc/self/status")) as fd:
        assert fsverity.measure(fd) is None
        assert not fsverity.enable(fd)
