# SPDX-License-Identifier: Apache-2.0
"""What rows of *digests* and *artifacts* say, found out without decoding all of them.

For those who look at many rows, or at one each time somebody opens a file. See `schema`.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from buildidfs.store.schema import schema

_FILE: Final = Struct(">QQq")
_PLAIN_FILE: Final = Struct(">QQQq")
_REFS: Final = schema.DIGEST.size
_REF: Final = schema.ORDINAL_KIND_VARIANT.size


def is_file(value: bytes, stored: int, inode: int, ctime_ns: int) -> bool:
    """Whether a row of *digests* is of a file of which stat(2) says that."""
    return value[8:32] == _FILE.pack(stored, inode, ctime_ns)


def is_plain_file(value: bytes, size: int, inode: int, ctime_ns: int) -> bool:
    """Return True if that is so of a row of *digests*, and the content has the size of the file."""
    return value[:32] == _PLAIN_FILE.pack(size, size, inode, ctime_ns)


def is_struck(value: bytes) -> bool:
    """Whether a row of *digests* is of a blob that was found to be damaged, or gone."""
    return value[16:32] == bytes(16)


def is_digest_row(key: bytes, value: bytes) -> bool:
    """Whether a row of *digests* decodes."""
    refs = len(value) - _REFS
    return len(key) == 32 and refs >= 0 and refs % _REF in (0, schema.U32.size)


def size_in(value: bytes) -> int:
    """The size of the content, of a row of *digests*."""
    return int.from_bytes(value[:8], "big")


def has_ref(value: bytes, ref: bytes) -> bool:
    """Whether a row of *digests* has an artifact whose key begins like that."""
    return any(value.startswith(ref, at) for at in range(_REFS, len(value), _REF))


def is_variant(value: bytes | None, number: int, digest: bytes) -> bool:
    """Whether a row of *artifacts* or *variants* has that number, and that blob."""
    return value is not None and value[:34] == number.to_bytes(2, "big") + digest
