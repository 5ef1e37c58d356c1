# SPDX-License-Identifier: Apache-2.0
"""Who has a file open for writing, as the kernel knows it."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.linux.leases import has_no_writer, has_writer
from tests.support.children import cat_program, needs_root, running
from tests.support.mapped import SharedMapping, overlay
from tests.support.scans import without_privileges


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def fd(file: Path) -> Iterator[int]:
    descriptor = os.open(file, os.O_RDONLY)
    yield descriptor
    # Nobody who wants to write later has to wait for us.
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


def test_what_has_no_leases_tells_nothing() -> None:
    reading, writing = os.pipe()
    try:
        assert has_writer(reading) is None
    finally:
        os.close(reading)
        os.close(writing)


@needs_root("is another user for a moment")
def test_file_of_somebody_else_tells_nothing(fd: int) -> None:
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
