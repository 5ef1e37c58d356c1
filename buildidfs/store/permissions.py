# SPDX-License-Identifier: Apache-2.0
"""The files and places that a user may see, decided without the kernel.

In a mount the kernel decides who may open a file (`default_permissions`). This module applies the
same rules where the kernel does not decide: for listings, for the places of a file, and in the
server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from typing import TypeGuard

    from buildidfs.model import Artifact, Origin

_OWNER: Final = 0o400
_GROUP: Final = 0o040
_OTHERS: Final = 0o004
_EVERYBODY: Final = _OWNER | _GROUP | _OTHERS


class Viewer(msgspec.Struct, frozen=True):
    """A user without privileges, by user ID and all groups.

    If both are None, the user is unknown, and may read only files that every user may read.
    """

    uid: int | None
    groups: frozenset[int] | None

    def may_read(self, mode: int, uid: int, gid: int) -> bool:
        """Return True if the viewer may read a file with that mode, owner and group.

        The first class that contains the viewer decides, even if another one has more rights.
        Source: path_resolution(7), acl_permission_check() of fs/namei.c.
        """
        if self.uid is None:
            return mode & _EVERYBODY == _EVERYBODY
        if self.uid == uid:
            return bool(mode & _OWNER)
        if self.groups is None:
            return mode & (_GROUP | _OTHERS) == _GROUP | _OTHERS
        return bool(mode & (_GROUP if gid in self.groups else _OTHERS))


def may_see(viewer: Viewer | None, origin: Origin) -> bool:
    """Return True if the viewer could have read the file at ``origin``, and so may know the place.

    The viewer None is root, who may know all places.
    """
    identity = origin.identity
    return viewer is None or viewer.may_read(origin.shown_mode, identity.uid, identity.gid)


def may_open(artifact: Artifact | None, viewer: Viewer | None) -> TypeGuard[Artifact]:
    """Return True if there is a file, and the viewer may read it. The viewer None is root."""
    return artifact is not None and (
        viewer is None or viewer.may_read(artifact.mode, artifact.uid, artifact.gid)
    )


PUBLIC: Final = Viewer(None, None)
"""An unknown user, who may read only files that all users may read."""


def is_public(artifact: Artifact | None) -> TypeGuard[Artifact]:
    """Return True if there is a file, and all users may read it."""
    return artifact is not None and PUBLIC.may_read(artifact.mode, artifact.uid, artifact.gid)


def openness(mode: int) -> tuple[bool, bool, bool, bool]:
    """Return a sort key for modes: the more users may read a file, the larger its key."""
    return (
        mode & _EVERYBODY == _EVERYBODY,
        bool(mode & _OTHERS),
        bool(mode & _GROUP),
        bool(mode & _OWNER),
    )
