# SPDX-License-Identifier: Apache-2.0
"""What the catcher caught, as sightings: in which container, and how far it is believed."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from buildidfs.capture import container
from buildidfs.capture.owners import Owners
from buildidfs.linux import mounts, namespaces, openat2, statx
from buildidfs.model import NamespaceSet, Origin, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Collection

    from buildidfs.capture.messages import Caught

_OWNERS_S = 60.0


class LiveSightings:
    """Makes sightings of what is caught on this host. Raises OSError.

    ``container_namespaces`` says what a container is; ``host`` and ``initial`` are by default the
    machine we run on and its namespaces.
    """

    def __init__(
        self,
        container_namespaces: Collection[str] = ("mnt",),
        host: str | None = None,
        initial: NamespaceSet | None = None,
    ) -> None:
        self._container_namespaces = tuple(container_namespaces)
        self._host = os.uname().nodename if host is None else host
        self._initial = initial or namespaces.initial()
        self._owners = Owners(mounts.initial_mountinfo)
        self._owners_since = time.monotonic()

    def of(self, caught: Caught, fd: int) -> Sighting:
        """The sighting of a file that is open at ``fd`` (O_PATH will do; -1 if it is not)."""
        place = caught.place
        numbers = place.namespaces
        apart = container.apart(numbers, self._initial)
        label = ""
        if container.in_container(apart, self._container_namespaces):
            label = container.label(place.cgroup, numbers, self._container_namespaces)
        origin = Origin(
            caught.path,
            caught.identity,
            numbers,
            place.mnt_ns_id,
            place.cgroup,
            label,
            self._host,
            self._trust(caught, fd),
            "watch",
            apart=apart,
            cgroup_id=place.cgroup_id,
        )
        return Sighting(origin, caught.seen_ns)

    def _trust(self, caught: Caught, fd: int) -> Trust:
        mnt, initial = caught.place.namespaces.mnt, self._initial.mnt
        trust = container.trust(caught.identity, mnt, initial)
        if trust is Trust.HOST and not self._is_believed(caught, fd):
            trust = container.trust(caught.identity, mnt, initial, owners_believed=False)
        return trust

    def _is_believed(self, caught: Caught, fd: int) -> bool:
        # What is root's in a chroot came with whatever was unpacked there.
        if fd < 0 or (caught.place.chrooted and not _is_ours(caught.path, fd)):
            return False
        # Mounts can be remounted: what was learned of them is not kept for ever.
        if time.monotonic() - self._owners_since > _OWNERS_S:
            self._owners = Owners(mounts.initial_mountinfo)
            self._owners_since = time.monotonic()
        try:
            return self._owners.believed(caught.path, fd)
        except OSError:
            return False


def _is_ours(path: bytes, fd: int) -> bool:
    """Whether from our root, too, a path leads to an open file. No filesystem is asked."""
    fds: list[int] = []
    try:
        fds.append(os.open(b"/", os.O_PATH | os.O_CLOEXEC))
        fds.append(openat2.open_cached_in_root(fds[0], path))
        found, wanted = statx.identity(fds[1], ask=False), statx.identity(fd, ask=False)
    except OSError:
        return False
    finally:
        for one in fds:
            os.close(one)
    return (found.dev, found.ino) == (wanted.dev, wanted.ino)
