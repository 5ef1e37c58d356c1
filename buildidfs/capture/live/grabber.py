# SPDX-License-Identifier: Apache-2.0
"""Getting hold of what is mapped on one CPU, while the process that has mapped it is still there.

One system call to see what is mapped, one to pin it, and on to the next. What exactly it is, and
where its process lives, takes ten more, and is found out by somebody else (`settler`).

No lock is held during a system call that may wait, be it for a process that is ending or for
somebody who unmounts: the other CPUs go on.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING

from buildidfs.capture.live import find_unmapped, process_table
from buildidfs.capture.live.recent_files import file_key, place_key
from buildidfs.formats.perf.ring_records import Mapped
from buildidfs.linux import statx, syscalls

if TYPE_CHECKING:
    from buildidfs.capture.live.process_table import Home
    from buildidfs.capture.live.shared_state import State


class Lookout:
    """For one CPU; belongs to one thread. What all of them share is in ``state``."""

    def __init__(self, state: State, cpu: int) -> None:
        self._state = state
        self._cpu = cpu
        self._done: list[int] = []

    def work(self) -> None:
        """Get hold of all that was mapped since the last time."""
        state = self._state
        # As long as nobody takes what we have, the ring is the only place for more.
        if state.waiting() >= state.most_waiting:
            return
        records = state.rings.mappings(self._cpu)
        if not records and not state.rings.is_pressed(self._cpu):
            return
        found: list[tuple[Mapped, Home]] = []
        with state.lock:
            state.follow()
            state.counts.records += len(records)
            for record in records:
                if isinstance(record, Mapped):
                    found.append((record, state.tasks.home_at(record.pid, record.time)))
                else:
                    state.apply(record)
        if state.shares.is_pressed:
            state.shares.refill(time.monotonic())
        for record, home in found:
            self._grab(record, home)
        state.look_around(self._done.append)
        if self._done:
            state.closer.close(self._done)
            self._done.clear()

    def _grab(self, record: Mapped, home: Home) -> None:
        """Get hold of what was mapped, unless it is known."""
        state = self._state
        if home.mnt == state.host:
            if home.is_known and state.files.has(record):
                return
        elif state.shares.is_pressed:
            if not home.mnt:  # events were lost: it has to be told from the one that floods
                home = process_table.look(record.pid, home, self._done.append)
            if state.shares.is_exhausted(home.share) and home.mnt != state.host:
                state.shares.drop(home.share, home, record.path)
                return
        try:
            # By the thread, since the first one of its process may be gone; by the process, since
            # the thread may be.
            try:
                fd = self._open(record, home, record.tid or record.pid, record.end)
            except FileNotFoundError:
                if not self._admits(record, home, 0):  # to look for it elsewhere takes longest
                    return
                end = find_unmapped.end_now(record)
                if not end:
                    raise
                fd = self._open(record, home, record.pid, end)
        except OSError as error:
            state.grips.put((record, home, -1, error))
        else:
            if fd >= 0:
                state.grips.put((record, home, fd, None))

    def _open(self, record: Mapped, home: Home, pid: int, end: int) -> int:
        """An O_PATH descriptor of what ``pid`` has mapped from ``record.start`` to ``end``.

        -1 if it is known, or not what the record is about, or too much for its share. Raises
        OSError.
        """
        link = b"/proc/%d/map_files/%x-%x" % (pid, record.start, end)
        identity = statx.identity_at(syscalls.AT_FDCWD, link, ask=False)
        if not stat.S_ISREG(identity.mode):
            return -1
        if home.is_known:
            key = place_key(home.mnt_ns_id, file_key(identity), record.path)
            if key in self._state.met:
                if home.mnt == self._state.host:
                    self._state.files.add(record, identity, key)
                return -1
        if not self._admits(record, home, identity.uid):
            return -1
        fd = os.open(link, os.O_PATH | os.O_CLOEXEC)
        # Filesystems made of others may show one inode number here and another there. If it is
        # something else that is mapped there by now, there is another record about that.
        try:
            is_it = statx.identity(fd, ask=False).ino == record.inode
        except BaseException:
            self._done.append(fd)
            raise
        if is_it or _is_same_name(link, record):
            return fd
        self._done.append(fd)
        return -1

    def _admits(self, record: Mapped, home: Home, uid: int) -> bool:
        """Return True if there is something left of the share that a new file counts for.

        On the host that is its owner's. Root's own is not bounded: nobody else can make such files.
        """
        shares = self._state.shares
        share = home.share if home.mnt != self._state.host else -uid
        if not share or shares.admit(share):
            return True
        shares.drop(share, home, record.path)
        return False


def _is_same_name(link: bytes, record: Mapped) -> bool:
    try:
        return os.path.basename(os.readlink(link)) == os.path.basename(record.path)
    except OSError:
        return False
