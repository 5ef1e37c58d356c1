# SPDX-License-Identifier: Apache-2.0
"""Files whose bytes the kernel vouches for: what was changed below it reads as an error.

fs-verity keeps a hash of each block beside a file, which can never be written to from then on.
Offered by ext4 (made with ``-O verity``), f2fs and btrfs. Source: Documentation/filesystems/
fsverity.rst, include/uapi/linux/fsverity.h; Linux 5.4.
"""

from __future__ import annotations

import errno
import fcntl
from struct import Struct
from typing import Final

FS_IOC_ENABLE_VERITY: Final = 0x40806685  # _IOW('f', 133, struct fsverity_enable_arg)
FS_IOC_MEASURE_VERITY: Final = 0xC0046686  # _IOWR('f', 134, struct fsverity_digest)

_HASH_SHA256: Final = 1
_BLOCK_BYTES: Final = 4096
_DIGEST_BYTES: Final = 64

# version, algorithm, block size, salt size, salt, signature size, reserved, signature, reserved
_ENABLE: Final = Struct("=IIIIQIIQ88x")
_MEASURED: Final = Struct("=HH")

_NOT_OFFERED: Final = frozenset((errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EINVAL))


def enable(fd: int) -> bool:
    """Have the kernel vouch for a file that nobody has open for writing, from now on.

    ``fd`` is open for reading only, by the owner. All of the file is read. False where that is not
    offered: by the kernel, the filesystem, or for its size of blocks. Nothing happens when it was
    done before. Raises OSError: ETXTBSY if somebody may write to it, EACCES for files of others.
    """
    argument = bytearray(_ENABLE.pack(1, _HASH_SHA256, _BLOCK_BYTES, 0, 0, 0, 0, 0))
    try:
        fcntl.ioctl(fd, FS_IOC_ENABLE_VERITY, argument)
    except OSError as error:
        if error.errno == errno.EEXIST:
            return True
        if error.errno in _NOT_OFFERED:
            return False
        raise
    return True


def measure(fd: int) -> bytes | None:
    """The root hash that the kernel holds a file to, SHA-256; None if it does not vouch for it.

    Raises OSError.
    """
    argument = bytearray(_MEASURED.pack(0, _DIGEST_BYTES) + bytes(_DIGEST_BYTES))
    try:
        fcntl.ioctl(fd, FS_IOC_MEASURE_VERITY, argument)
    except OSError as error:
        if error.errno == errno.ENODATA or error.errno in _NOT_OFFERED:
            return None
        raise
    _, size = _MEASURED.unpack_from(argument)
    return bytes(argument[_MEASURED.size : _MEASURED.size + size])
