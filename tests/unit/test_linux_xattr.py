# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.xattr on files that have an access control list, and on those that have none."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from buildidfs.linux import xattr
from tests.support.callers import ACL_USER, set_acl


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_PATH])
def test_list_of_an_open_file(tmp_path: Path, flags: int) -> None:
    file = tmp_path / "file"
    file.touch()
    fd = os.open(file, flags)
    try:
        assert xattr.access_list(fd) is None
        set_acl(file, 0o640, [(ACL_USER, 4, 1000)])
        assert xattr.access_list(fd) == os.getxattr(file, "system.posix_acl_access")
    finally:
        os.close(fd)


def test_filesystem_without_lists() -> None:
    fd = os.open("/proc", os.O_PATH)
    try:
        assert xattr.access_list(fd) is None
    finally:
        os.close(fd)


def test_descriptor_that_is_closed() -> None:
    with pytest.raises(OSError, match="No such file") as caught:
        xattr.access_list(1 << 20)
    assert caught.value.errno == errno.ENOENT
