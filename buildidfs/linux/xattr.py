# SPDX-License-Identifier: Apache-2.0
"""What a filesystem keeps beside the mode of a file: its access control list. Source: xattr(7)."""

from __future__ import annotations

import errno
import os
from typing import Final

_ACCESS: Final = b"system.posix_acl_access"
_NONE: Final = frozenset((errno.ENODATA, errno.EOPNOTSUPP))


def access_list(fd: int) -> bytes | None:
    """The access control list of an open file or directory (O_PATH will do), None if it has none.

    For `formats.posix_acl`. A server may be asked. Raises OSError.
    """
    try:
        # By its link: a descriptor opened with O_PATH is refused.
        return os.getxattr(b"/proc/self/fd/%d" % fd, _ACCESS)
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise
