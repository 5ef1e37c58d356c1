# SPDX-License-Identifier: Apache-2.0
"""Which mappings are worth a look: the files that were sent already, and the shares of new ones.

`RecentFiles` recognises files by their identity and place, and forgets files that were not mapped
lately. `HostFiles` recognises files of the host by their path, without looking into the process. A
host mostly runs the same few files in places where only root can change files, and statx on a path
takes a fifth of the time of statx on a process that has just begun. If the inode is that of the
mapping, the path leads to the mapped file; if the times are the same, the file did not change.

`FairShare` is the rate at which new files are opened, divided among containers and users.
"""

from __future__ import annotations

import os
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Final

from buildidfs.model import fingerprint
from buildidfs.shares import Share

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped
    from buildidfs.model import FileIdentity


PER_SECOND: Final = 600.0
"""New files of all shares together that are opened per second.

This is less than two processors can process during a flood: a new file costs 2 ms of them, and 0.4
ms of the thread that receives it.
"""

BURST: Final = 1024
"""New files of one owner that are opened without a limit of the rate: more than a container maps at
its start. The number is divided by the number of active owners.
"""

_LEAST_BURST: Final = 128
_MOST_OWNERS: Final = 1024
_MOST_PLACES: Final = 8  # of an owner; all further ones are one place
_REST: Final = "(others)"
_REFILL_S: Final = 0.02
_PATH_BYTES: Final = 4096  # of the paths in one message


class DroppedMappings:
    """Mappings of one share that were not opened: their count, home and a few paths."""

    __slots__ = ("_room", "count", "home", "paths")

    def __init__(self, home: Home) -> None:
        self.home = home
        self.count = 0
        self.paths: list[bytes] = []
        self._room = _PATH_BYTES

    def add(self, path: bytes) -> None:
        """Count one more mapping."""
        self.count += 1
        if len(path) <= self._room:
            self._room -= len(path)
            self.paths.append(path)


class FairShare:
    """Admits new files of each owner at a bounded rate, so that none of them starves others.

    Each new file that a container maps costs the catcher ten system calls, and the watch a copy.
    Mappings beyond a share are counted and not opened. The places of an owner divide what it has.
    Files that root owns on the host have no limit, see `Lookout`. Thread-safe, in bounded memory.
    ``now`` is a time of ``time.monotonic()``, in seconds.
    """

    def __init__(self, per_second: float = PER_SECOND, burst: int = BURST) -> None:
        self._per_second = per_second
        self._burst = burst
        self._lock = threading.Lock()
        self._left: dict[Share, float] = {}
        self._places: Counter[str] = Counter()  # in `_left`, by owner
        self._dropped: dict[Share, DroppedMappings] = {}
        self._refilled = 0.0

    @property
    def is_pressed(self) -> bool:
        """Return True while a share is in use."""
        return bool(self._left)

    def is_exhausted(self, share: Share) -> bool:
        """Return True if no more files of this share may be opened now."""
        return self._left.get(share, 1.0) < 1.0

    def admit(self, share: Share, *, is_copy: bool = False) -> bool:
        """Take one new file from a share; return False if the share is used up.

        A file that was seen at another place before (``is_copy``) takes nothing of the second half
        of a share. So the libraries of a container runtime, which starts in each new mount
        namespace, leave room for the files of the containers.
        """
        with self._lock:
            left = self._left.get(share)
            if left is None:
                share, left = self._begun(share)
            if left - (self._full_of(share) / 2 if is_copy else 0.0) < 1.0:
                return False
            self._left[share] = left - 1.0
            return True

    def drop(self, share: Share, home: Home, path: bytes) -> None:
        """Count a mapping whose file was not opened."""
        with self._lock:
            if share not in self._dropped and len(self._dropped) >= _MOST_OWNERS:
                share = Share(share.owner, _REST)
                if share not in self._dropped and len(self._dropped) >= 2 * _MOST_OWNERS:
                    share = Share(_REST)
            dropped = self._dropped.get(share)
            if dropped is None:
                dropped = self._dropped[share] = DroppedMappings(home)
            dropped.add(path)

    def take_dropped(self) -> list[DroppedMappings]:
        """Return the mappings dropped since the last call, by share."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, {}
        return list(dropped.values())

    def refill(self, now: float) -> None:
        """Divide the allowance of the time since the last call among the shares in use."""
        passed = now - self._refilled
        if passed < _REFILL_S:
            return
        with self._lock:
            self._refilled = now
            if not self._left:
                return
            owners, places = len(self._places), self._places
            more = min(passed, 1.0) * self._per_second / owners
            self._left = {
                share: left + more / places[share.owner]
                for share, left in self._left.items()
                if left + more / places[share.owner] < self._full_of(share)
            }
            self._places = Counter(share.owner for share in self._left)

    def _begun(self, share: Share) -> tuple[Share, float]:
        """Return the row for a share without one, and what is left of it."""
        if share.owner not in self._places and len(self._places) >= _MOST_OWNERS:
            share = Share(_REST)
        elif self._places[share.owner] >= _MOST_PLACES:
            share = Share(share.owner, _REST)
        left = self._left.get(share)
        if left is None:
            full = self._full(max(len(self._places), 1))
            self._places[share.owner] += 1
            left = self._left[share] = full / self._places[share.owner]
        return share, left

    def _full_of(self, share: Share) -> float:
        return self._full(len(self._places)) / self._places[share.owner]

    def _full(self, owners: int) -> float:
        return max(self._burst / owners, _LEAST_BURST)


_REMEMBERED: Final = 1 << 14
_FILE: Final = struct.Struct("=QQQqqIII")
_PLACE: Final = struct.Struct("=Q")


def file_key(identity: FileIdentity) -> bytes:
    """Return a key of a file in its present state, independent of its place."""
    return _FILE.pack(*_state(identity)) + (identity.scope or b"")


def place_key(mnt_ns_id: int, file: bytes, path: bytes) -> bytes:
    """Return a key of a file (`file_key`) at a path in a mount namespace."""
    return fingerprint(_PLACE.pack(mnt_ns_id) + file + path)


class RecentFiles:
    """Keys of files that were sent, in two generations. When the younger one is full, the older
    one is forgotten.

    Lookups take no lock.
    """

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, key: bytes) -> bool:
        return key in self._young or key in self._old

    def add(self, key: bytes) -> None:
        """Remember a key."""
        if len(self._young) >= _REMEMBERED:
            self._old, self._young = self._young, set()
        self._young.add(key)

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove these keys, so that their files count as new."""
        for key in keys:
            self._young.discard(key)
            self._old.discard(key)


# Directories in which only root can mount a filesystem that does not answer.
_PLACES: Final = (b"/usr/", b"/lib/", b"/lib64/", b"/bin/", b"/sbin/")
_NOT_THERE: Final = b"/usr/local/"
_MOST: Final = 4096

_Key = tuple[tuple[int, int], int, int]
_CTIME: Final = 4  # in `_Seen`
_Seen = tuple[int, int, int, int, int, int, int, int]


class HostFiles:
    """Files of the host that were sent, by path.

    Several threads may use it. If a race of two threads loses an entry, its file is looked up
    again.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[_Key, _Seen, bytes]] = {}
        self._paths: dict[bytes, bytes] = {}

    def find(self, record: Mapped) -> tuple[int, bytes] | None:
        """Return the change time in ns and the `place_key` of a file that a process of the host has
        mapped, if the file is known and unchanged.
        """
        known = self._known.get(record.path)
        if known is None or known[0] != (record.dev, record.inode, record.generation):
            return None
        try:
            return (known[1][_CTIME], known[2]) if _stat(record.path) == known[1] else None
        except OSError:
            return None

    def add(self, record: Mapped, identity: FileIdentity, place: bytes) -> None:
        """Remember a file that a process of the host has mapped and that was sent.

        ``place`` is its `place_key`.
        """
        # Only filesystems on disks do not reuse device numbers.
        if identity.scope != b"" or not record.path.startswith(_PLACES):
            return
        if record.path.startswith(_NOT_THERE):
            return
        if len(self._known) >= _MOST or len(self._paths) >= 2 * _MOST:
            self._known.clear()
            self._paths.clear()
        key = (record.dev, record.inode, record.generation)
        self._known[record.path] = (key, _state(identity), place)
        self._paths[place] = record.path

    def forget(self, places: Iterable[bytes]) -> None:
        """Forget these files and no others, because a container can make its own files be
        forgotten.
        """
        for place in places:
            path = self._paths.pop(place, None)
            if path is not None:
                self._known.pop(path, None)


def _state(identity: FileIdentity) -> _Seen:
    return (  # in the order of `_stat`
        identity.dev,
        identity.ino,
        identity.size,
        identity.mtime_ns,
        identity.ctime_ns,
        identity.mode,
        identity.uid,
        identity.gid,
    )


def _stat(path: bytes) -> _Seen:
    found = os.stat(path)
    return (
        found.st_dev,
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_uid,
        found.st_gid,
    )
