# SPDX-License-Identifier: Apache-2.0
"""Members as files: in memory or not, sparse or not, and never too many at a time."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.archive import spool
from buildidfs.capture.archive.spool import Ended, Spool
from buildidfs.model import FileIdentity, Origin, Sighting
from tests.support.scans import open_descriptors

SIGHTING = Sighting(Origin(b"/x", FileIdentity(0, 1, 0, 0, 0, 0, 0, 0, b"s")), 1)


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() == before


def is_in_memory(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 26, 0)


def test_small_files_are_in_memory_and_large_ones_in_the_directory(tmp_path: Path) -> None:
    files = Spool(os.fsencode(tmp_path))
    with files.pin(SIGHTING, 5, [b"ab", memoryview(b"cde")]) as small:
        assert is_in_memory(small.fd)
        assert content(small.fd) == b"abcde"
    size = spool.MEMORY_BYTES + 1
    with files.pin(SIGHTING, size, [b"x" * size]) as large:
        assert not is_in_memory(large.fd)
        assert os.fstat(large.fd).st_dev == tmp_path.stat().st_dev
        assert os.fstat(large.fd).st_nlink == 0
        assert content(large.fd) == b"x" * size
        assert list(tmp_path.iterdir()) == []
    assert large.fd == -1


def test_directory_whose_filesystem_knows_no_unnamed_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refusing(path: bytes, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not on this one")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)
    size = spool.MEMORY_BYTES + 1
    with Spool(os.fsencode(tmp_path)).pin(SIGHTING, size, [b"x" * size]) as large:
        assert content(large.fd) == b"x" * size
        assert list(tmp_path.iterdir()) == []


def test_directory_that_is_none(tmp_path: Path) -> None:
    size = spool.MEMORY_BYTES + 1
    with pytest.raises(FileNotFoundError):
        Spool(os.fsencode(tmp_path / "missing")).pin(SIGHTING, size, [b"x" * size])


@pytest.mark.parametrize("size", [5000, spool.MEMORY_BYTES + 5000])
def test_holes(tmp_path: Path, size: int) -> None:
    pieces = [b"abc", b"", b"defg", b"hij"]
    extents = ((0, 2), (100, 6), (200, 0), (size - 2, 2))
    with Spool(os.fsencode(tmp_path)).pin(SIGHTING, size, pieces, extents) as file:
        expected = bytearray(size)
        expected[:2], expected[100:106], expected[-2:] = b"ab", b"cdefgh", b"ij"
        assert content(file.fd) == expected


def test_pieces_that_fail_leave_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.EIO, "broken")

    files = Spool(os.fsencode(tmp_path), open_bytes=10)
    for _ in range(3):  # its room is given back, too
        with pytest.raises(OSError, match="broken"):
            files.pin(SIGHTING, 10, failing())


def test_room_is_waited_for() -> None:
    files = Spool(open_bytes=10)
    first = files.pin(SIGHTING, 6, [b"123456"])
    second = files.pin(SIGHTING, 4, [b"1234"])
    events: list[str] = []

    def pieces() -> Iterator[bytes]:
        events.append("third is written")
        yield b"x" * 50

    def add() -> None:
        # What is larger than all the room is made when there is nothing else.
        files.pin(SIGHTING, 50, pieces()).close()

    thread = threading.Thread(target=add)
    thread.start()
    first.close()
    first.close()  # counts once
    with files.pin(SIGHTING, 6, [b"123456"]):
        pass
    events.append("second is closed")
    second.close()
    thread.join()
    assert events == ["second is closed", "third is written"]


def test_who_has_all_the_room_and_closes_nothing_is_given_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is short of room in the store is held until there are others to be done with."""
    monkeypatch.setattr(spool, "_PATIENCE_S", 0.01)
    files = Spool(open_bytes=1)
    with files.pin(SIGHTING, 1, [b"x"]), files.pin(SIGHTING, 1, [b"y"]) as second:
        assert content(second.fd) == b"y"


def test_nobody_waits_when_it_has_ended() -> None:
    files = Spool(open_bytes=1)
    first = files.pin(SIGHTING, 1, [b"x"])
    ended: list[bool] = []

    def wait() -> None:
        with pytest.raises(Ended):
            files.pin(SIGHTING, 1, [b"x"])
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    files.end()
    thread.join()
    assert ended == [True]
    first.close()
