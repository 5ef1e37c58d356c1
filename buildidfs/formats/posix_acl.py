# SPDX-License-Identifier: Apache-2.0
"""POSIX access control lists in the kernel's format, reduced to the bits of a mode.

If a file has such a list, the group bits of st_mode are its mask: an upper bound for all users and
groups that the list names, and not the rights of the owning group. Source: acl(5),
linux/posix_acl_xattr.h, posix_acl_permission() of fs/posix_acl.c.
"""

from __future__ import annotations

import struct
from typing import Final

_VERSION: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")  # kind, rights, named user or group
_MAX_BYTES: Final = 1 << 16  # XATTR_SIZE_MAX

_OWNER: Final = 0x01
_USER: Final = 0x02
_OWNING_GROUP: Final = 0x04
_GROUP: Final = 0x08
_MASK: Final = 0x10
_OTHER: Final = 0x20
_ALL: Final = 7
_WRITE: Final = 2


def certain_bits(value: bytes) -> int:
    """Return the permission bits (0o777) that all members of a class certainly have.

    ``value`` is the value of the attribute system.posix_acl_access. A user whom the list names may
    or may not be in the owning group. So a right that one of these users lacks is certain neither
    for the group nor for the others. A member of the owning group who is also in a named group has
    the rights of both groups; any other user in a named group has only the rights of the named
    group. Raises ValueError for an invalid list.
    """
    entries, mask = _entries(value)
    owner = owning_group = other = 0
    users = groups = _ALL
    for kind, rights, _ in entries:
        if kind == _OWNER:
            owner = rights & _ALL
        elif kind == _USER:
            users &= rights & mask
        elif kind == _OWNING_GROUP:
            owning_group = rights & mask & _ALL
        elif kind == _GROUP:
            groups &= rights & mask
        elif kind == _OTHER:
            other = rights & _ALL
        elif kind != _MASK:
            raise ValueError(f"an entry of unknown kind {kind:#x}")
    return owner << 6 | (owning_group & users) << 3 | other & users & groups


def writers(value: bytes) -> tuple[list[int], list[int]]:
    """Return the users and the groups whom the list names, and who may write.

    ``value`` is as in `certain_bits`. Raises ValueError for an invalid list.
    """
    entries, mask = _entries(value)
    may = [(kind, named) for kind, rights, named in entries if rights & mask & _WRITE]
    return (
        [named for kind, named in may if kind == _USER],
        [named for kind, named in may if kind == _GROUP],
    )


def _entries(value: bytes) -> tuple[list[tuple[int, int, int]], int]:
    """Return kind, rights and ID of all entries, and the mask. Raises ValueError."""
    if not value.startswith(_VERSION) or len(value) > _MAX_BYTES or len(value) % _ENTRY.size != 4:
        raise ValueError("not an access control list of version 2")
    entries = list(_ENTRY.iter_unpack(value[len(_VERSION) :]))
    return entries, next((rights for kind, rights, _ in entries if kind == _MASK), _ALL)
