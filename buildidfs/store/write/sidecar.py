# SPDX-License-Identifier: Apache-2.0
"""A few bytes kept beside a blob: in an extended attribute of its file, or in a file of their own.

The attribute is ``user.buildidfs`` (xattr(7)): it comes and goes with the file, and costs a block
at most. Where the filesystem has no such attributes, or too little room for them, a file with the
name of the blob and `SUFFIX` does. Should both be there, the file is the later one.
"""

from __future__ import annotations

import errno
import os
from typing import Final

ATTRIBUTE: Final = b"user.buildidfs"
SUFFIX: Final = ".origin"

MAX_BYTES: Final = 64 << 10
"""No filesystem has larger attributes (XATTR_SIZE_MAX); files are not made larger either."""

_NO_ROOM: Final = frozenset(
    (errno.EOPNOTSUPP, errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EPERM)
)


def attach(fd: int, data: bytes) -> bool:
    """Keep it in the attribute of a file of ours; False when that cannot be. Raises OSError."""
    try:
        try:
            os.setxattr(fd, ATTRIBUTE, data)
        except PermissionError as error:
            if error.errno != errno.EACCES:
                raise
            # Nobody may write to a blob, and who is not root has to be able to.
            os.fchmod(fd, 0o600)
            try:
                os.setxattr(fd, ATTRIBUTE, data)
            finally:
                os.fchmod(fd, 0o400)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return False
        raise
    return True


def read(directory: int, name: str) -> bytes:
    """What is kept beside the file ``name`` of an open directory; nothing if nothing is."""
    try:
        fd = os.open(name + SUFFIX, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return _attached(directory, name)
    with open(fd, "rb") as file:
        return file.read(MAX_BYTES)


def _attached(directory: int, name: str) -> bytes:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return b""
    try:
        return os.getxattr(fd, ATTRIBUTE)
    except OSError:
        return b""
    finally:
        os.close(fd)
