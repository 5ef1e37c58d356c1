# SPDX-License-Identifier: Apache-2.0
"""Files are looked at by another process, which is left behind when there is no answer."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.capture.unresponsive import file_helper
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.linux import child, inodes
from buildidfs.shares import HOST, of_user
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems import halffs
from tests.support.harness.children import needs_root
from tests.support.harness.scans import open_descriptors
from tests.support.harness.waiting import until

DEVICE = (1, 2)


@pytest.fixture
def helper() -> Iterator[FileHelper]:
    before = open_descriptors()
    with FileHelper(1.0) as made:
        yield made
    assert open_descriptors() <= before


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(3_000_000))
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_PATH)
    yield descriptor
    os.close(descriptor)


def test_file_is_pinned_looked_at_and_copied(helper: FileHelper, file: Path, fd: int) -> None:
    root = os.open(file.parent, os.O_PATH)
    pinned, identity = helper.open(DEVICE, root, b"/file")
    assert identity == inodes.identity(fd) == helper.look(DEVICE, pinned)
    same, copy = helper.copy(DEVICE, pinned, identity.size)
    assert same == identity
    assert os.pread(copy, 4_000_000, 0) == file.read_bytes()
    with pytest.raises(OSError, match=r".") as caught:
        os.write(copy, b"x")
    assert caught.value.errno == errno.EBADF
    for each in (root, pinned, copy):
        os.close(each)


def test_mapped_file_is_identified(helper: FileHelper, tmp_path: Path) -> None:
    path = tmp_path / "mapped.so"
    path.write_bytes(elf_file(build_id=bytes(range(20))))
    with path.open("rb") as file:
        code = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
    with code, PinnedProcess(os.getpid(), Ways()) as process:
        mappings = process.executable_mappings()
        (mapping,) = [each for each in mappings if each.path == os.fsencode(path)]
        assert helper.build_id(DEVICE, os.getpid(), mapping) == bytes(range(20))


def test_errors_are_those_of_the_file(helper: FileHelper, tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_PATH)
    try:
        with pytest.raises(FileNotFoundError):
            helper.open(DEVICE, root, b"/none")
        with pytest.raises(OSError, match="not a regular file"):
            helper.copy(DEVICE, root, 0)
        with pytest.raises(OSError, match="too large") as caught:
            helper.copy(DEVICE, root, file_helper.MAX_BYTES + 1)
        assert caught.value.errno == errno.EFBIG
    finally:
        os.close(root)


def test_helper_that_was_killed_is_started_again(helper: FileHelper, fd: int) -> None:
    helper.look(DEVICE, fd)
    assert helper._program.process is not None
    helper._program.process.send(signal.SIGKILL)
    helper._program.process.wait(30)
    with pytest.raises(OSError, match="was ended"):
        helper.look(DEVICE, fd)
    assert helper.look(DEVICE, fd) == inodes.identity(fd)


@pytest.mark.fuse
@needs_root("mounts a filesystem")
def test_silence_is_waited_for_once_and_its_helper_left(
    helper: FileHelper, file: Path, fd: int, tmp_path: Path
) -> None:
    with halffs.served(tmp_path / "mnt", file) as server:
        silent = os.open(tmp_path / "mnt/app", os.O_PATH)
        identity, copy = helper.copy(DEVICE, silent, file.stat().st_size)
        os.close(copy)
        server.fall_silent()
        assert helper.look(DEVICE, silent).size == identity.size
        with pytest.raises(TimeoutError, match="does not answer"):
            helper.copy(DEVICE, silent, identity.size)
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match="does not answer"):
            helper.look(DEVICE, silent)
        assert time.monotonic() - begun < 0.5
        left = child._left_behind[-1]
        assert left.poll() is None, "not even SIGKILL ends it"
        assert helper.look((3, 4), fd) == inodes.identity(fd), "others are asked all the same"
        os.close(silent)
    until(lambda: left.poll() is not None, "its end with the server's")


@pytest.mark.fuse
@needs_root("mounts a filesystem")
def test_owner_of_silent_filesystems_keeps_no_other_from_being_read(
    file: Path, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = file_helper.LeftBehind(4, hosts=1)
    monkeypatch.setattr(file_helper, "_left_behind", left)
    mallory, alice = of_user(1001), of_user(1002)
    with halffs.served(tmp_path / "mnt", file) as server, FileHelper(0.2) as helper:
        silent = os.open(tmp_path / "mnt/app", os.O_PATH)
        server.fall_silent()
        for number in range(4):
            with pytest.raises(TimeoutError):
                helper.copy((number, 0), silent, 0, mallory)
        with pytest.raises(TimeoutError, match="too many"):
            helper.look(DEVICE, fd, mallory)
        for share in (alice, HOST):
            assert helper.look(DEVICE, fd, share) == inodes.identity(fd)
            with pytest.raises(TimeoutError):
                helper.copy((5, len(share.owner)), silent, 0, share)
            with pytest.raises(TimeoutError, match="too many"):
                helper.look(DEVICE, fd, share)
        os.close(silent)
    until(lambda: all(map(left.has_room, (mallory, alice, HOST))), "their ends")


@pytest.mark.fuse
@needs_root("mounts a filesystem")
def test_closing_does_not_wait_for_an_answer(file: Path, tmp_path: Path) -> None:
    with halffs.served(tmp_path / "mnt", file) as server:
        silent = os.open(tmp_path / "mnt/app", os.O_PATH)
        server.fall_silent()
        helper = FileHelper(600.0)
        failures: list[OSError] = []

        def ask() -> None:
            try:
                helper.copy(DEVICE, silent, 0)
            except OSError as error:
                failures.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        until(lambda: helper._program.process is not None, "a question")
        begun = time.monotonic()
        helper.close()
        thread.join(30)
        assert time.monotonic() - begun < 10
        assert len(failures) == 1
        with pytest.raises(OSError, match="ending"):
            helper.look(DEVICE, silent)
        os.close(silent)


def test_start_of_the_program_is_no_silence(file: Path, fd: int) -> None:
    with FileHelper(0.02) as helper:  # less than a Python takes to start
        assert helper.look(DEVICE, fd) == inodes.identity(fd)


def test_program_that_cannot_start_is_told(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_LOGGING_MAIN", "raise SystemExit(3)")
    with FileHelper() as helper, pytest.raises(OSError, match="did not start"):
        helper.look(DEVICE, fd)
