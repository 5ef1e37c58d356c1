# SPDX-License-Identifier: Apache-2.0
"""Whose affair a refusal is; real FUSE filesystems are in tests/system/test_fuse_as_owner."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from buildidfs.capture.process.fuse_files import FuseFiles
from buildidfs.capture.process.process import Process, Ways
from buildidfs.capture.unresponsive.file_helper import FileHelper
from tests.support.children import copied_cat, needs_root
from tests.support.scans import Memory


@needs_root("others would be refused anyway")
@pytest.mark.parametrize("number", [errno.EACCES, errno.EOVERFLOW, errno.EIO, errno.EPERM])
def test_file_on_no_fuse_filesystem_is_left_alone(tmp_path: Path, number: int) -> None:
    path = tmp_path / "cat"
    with copied_cat(path) as child, Process(child.pid, Ways()) as process:
        (mapping,) = [
            mapping
            for mapping in process.executable_mappings()
            if mapping.path == os.fsencode(path)
        ]
        error = OSError(number, os.strerror(number))
        assert FuseFiles(Memory(), FileHelper()).take(process, mapping, error) is None


@needs_root("others would be refused anyway")
def test_process_that_is_gone(tmp_path: Path) -> None:
    with copied_cat(tmp_path / "cat") as child:
        process = Process(child.pid, Ways())
        mapping = process.executable_mappings()[0]
    with process:
        error = PermissionError(errno.EACCES, "Permission denied")
        assert FuseFiles(Memory(), FileHelper()).take(process, mapping, error) is None
