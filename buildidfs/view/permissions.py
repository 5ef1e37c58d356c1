# SPDX-License-Identifier: Apache-2.0
"""Who asks, and what the permissions of a file say to that: no system is asked.

In a mount the kernel decides who may open a file, by the same rules (`default_permissions`). These
here decide what is listed, and what is served where there is no kernel in between.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from buildidfs.model import Origin

_OWNER: Final = 0o400
_GROUP: Final = 0o040
_OTHERS: Final = 0o004
_EVERYBODY: Final = _OWNER | _GROUP | _OTHERS


class Reader(msgspec.Struct, frozen=True):
    """Somebody without privileges, by user ID and all of their groups.

    What is None is not known: then they may read only what they may whoever that is.
    """

    uid: int | None
    groups: frozenset[int] | None

    def may_read(self, mode: int, uid: int, gid: int) -> bool:
        """Whether they may read a file with that mode, owner and group.

        The first class that they are in decides, even if another one has more rights. Source:
        path_resolution(7), acl_permission_check() of fs/namei.c.
        """
        if self.uid is None:
            return mode & _EVERYBODY == _EVERYBODY
        if self.uid == uid:
            return bool(mode & _OWNER)
        if self.groups is None:
            return mode & (_GROUP | _OTHERS) == _GROUP | _OTHERS
        return bool(mode & (_GROUP if gid in self.groups else _OTHERS))


def may_see(reader: Reader | None, origin: Origin) -> bool:
    """Whether a reader could have read the file there, and so may know of the place; None: root."""
    identity = origin.identity
    return reader is None or reader.may_read(origin.shown_mode, identity.uid, identity.gid)


PUBLIC: Final = Reader(None, None)
"""Nobody in particular: what they may read everybody may."""


def openness(mode: int) -> tuple[bool, bool, bool, bool]:
    """A sort key: of two modes of which one lets in all that the other does it has the greater."""
    return (
        mode & _EVERYBODY == _EVERYBODY,
        bool(mode & _OTHERS),
        bool(mode & _GROUP),
        bool(mode & _OWNER),
    )
