# SPDX-License-Identifier: Apache-2.0
"""The shares of the places at which files were seen, for all tables of the store that are divided
(`buildidfs.shares`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from buildidfs.formats.container import cgroup
from buildidfs.model import NamespaceSet
from buildidfs.shares import Share, of_user
from buildidfs.store.index.locations import BUNDLE, as_bytes, is_namespace

if TYPE_CHECKING:
    from buildidfs.model import Origin
    from buildidfs.store.location_rows import OriginRow

APART_MNT: Final = 1 << NamespaceSet.__struct_fields__.index("mnt")
"""The bit of the mount namespace in `Origin.apart`."""

UNKNOWN: Final = Share("unknown places")

_BUNDLE: Final = BUNDLE.encode()
_BUNDLES: Final = Share("bundles")
_NAMESPACES: Final = Share("mount namespaces without a container")


@functools.lru_cache(maxsize=4096)
def _share_of(
    group: bytes, container: bytes, uid: int, owner: int, *, apart: bool, bundled: bool
) -> Share:
    """Return the share of a file that was seen in the control group ``group``.

    More places give no user a larger share of the store. A control group in a container
    belongs to the container, and all containers and mount namespaces that a user has made are one
    place. The other mount namespaces without a container are one place, and so are the claims in
    bundles. A label proves nothing, so two containers with one label are two places. ``container``
    is the label of the file, ``apart`` is True in another mount namespace than the host's. ``uid``
    owns the file, ``owner`` is `Origin.owner`.
    """
    if bundled:
        return _BUNDLES
    label = container.decode("utf-8", "replace")
    named = "" if is_namespace(label) else label
    if not apart:  # the label is that of an image, a package or a server
        return Share(named) if named and not group else of_user(owner or uid)
    if user := owner or cgroup.user_id(group):
        return of_user(user)
    if outer := cgroup.outermost(group):
        return Share(outer.decode("utf-8", "surrogateescape"))
    return Share(named) if named else _NAMESPACES


def share_at(origin: Origin) -> Share:
    """Return the share of a file at a place."""
    return _share_of(
        origin.cgroup,
        as_bytes(origin.container),
        origin.identity.uid,
        origin.owner,
        apart=bool(origin.apart & APART_MNT),
        bundled=origin.scanner == BUNDLE,
    )


def share_in(row: OriginRow) -> Share:
    """Return the share of a file whose place has that row. It is called for each row."""
    return _share_of(
        row.cgroup,
        row.container,
        row.uid,
        row.owner,
        apart=bool(row.apart & APART_MNT),
        bundled=row.scanner == _BUNDLE,
    )
