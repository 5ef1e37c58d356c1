# SPDX-License-Identifier: Apache-2.0
"""Identify pinned files, and send them to the owner of the catcher."""

from __future__ import annotations

import errno
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from buildidfs.capture import base
from buildidfs.capture.live import process_table
from buildidfs.capture.live.admission import file_key, place_key
from buildidfs.capture.live.process_table import Finder
from buildidfs.capture.live.protocol import Caught, Missed
from buildidfs.capture.origin.path_access import NOBODY
from buildidfs.capture.unresponsive.filesystems import SlowMounts
from buildidfs.linux import inodes
from buildidfs.model import BuildId
from buildidfs.shares import of_user

if TYPE_CHECKING:
    from buildidfs.capture.live.grabber import CatcherState, Grip
    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped
    from buildidfs.model import FileIdentity

_log = logging.getLogger(__name__)
_NOT_SENT: Final = "%s: too many files wait, and it has no build ID: not sent, pid %d"
_REMEMBERED: Final = 1024
_AT_ONCE: Final = 1024
_MOST_HELD: Final = 256
_MOST_VANISHED: Final = 8192
_DELETED: Final = b" (deleted)"
# Errors of a process that is gone, or does not answer.
_GONE: Final = frozenset((errno.ENOENT, errno.ESRCH, errno.ETIMEDOUT))


class Settler:
    """Identifies and sends files, in one thread that is less urgent than those that pin them."""

    def __init__(self, state: CatcherState) -> None:
        self._state = state
        self._slow = SlowMounts()
        # Files that are no longer mapped: those with the mount namespace in which they were seen,
        # and those that can be looked up through any process of their namespace, at any time.
        self._held: deque[Grip] = deque()
        self._vanished: deque[Grip] = deque()
        self._done: list[int] = []
        self._missed: set[tuple[int, int, bytes]] = set()
        self._since = 0.0

    @property
    def busy_s(self) -> float:
        """The time in seconds for which the thread works on one file; 0 while it waits for one."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def run(self) -> None:
        """Work until the end. Raises BrokenPipeError if the other end is closed."""
        self._finder = Finder(self._state.host)
        try:
            self._work()
        finally:
            self._finder.close()

    def _work(self) -> None:
        state = self._state
        while not state.ended:
            grip = self._next()
            if grip is None:
                return
            if grip[3] is not None and not state.grips.empty() and self._postpone(grip):
                continue
            self._since = time.monotonic()
            self._settle(*grip)
            self._since = 0.0
            if state.grips.empty() or len(state.outbox) > _AT_ONCE:
                self._flush()

    def _next(self) -> Grip | None:
        """Take the first file, but vanished files last, because the search for them
        takes longer.
        """
        if self._state.grips.empty():
            for postponed in (self._held, self._vanished):
                if postponed:
                    return postponed.popleft()
        return self._state.grips.get()

    def _postpone(self, grip: Grip) -> bool:
        """Queue a vanished file for later; return False if too many would wait."""
        queue, most = (self._vanished, _MOST_VANISHED) if grip[2] < 0 else (self._held, _MOST_HELD)
        if len(queue) >= most:
            return False
        queue.append(grip)
        return True

    def _flush(self) -> None:
        self._state.outbox.flush()
        if self._done:
            self._state.closer.close(self._done)
            self._done.clear()

    def _settle(self, record: Mapped, home: Home, fd: int, error: OSError | None) -> None:
        """Find identity and place of a mapped file, and send it."""
        if not home.is_known:
            home = process_table.look(record.pid, home, self._done.append)
        if error is not None:
            fd = self._find(record, home, fd, error)
            if fd < 0:
                self._miss(record, home, error)
                return
        try:
            identity = inodes.identity(fd, ask=False)
        except OSError as failed:
            self._done.append(fd)
            self._miss(record, home, failed)
            return
        key = place_key(home.mnt_ns_id, file_key(identity), record.path)
        if key in self._state.recent:
            _log.debug("%s: known, pid %d", record.path, record.pid)
            self._done.append(fd)
        else:
            self._send(record, home, identity, fd, key)

    def _find(self, record: Mapped, home: Home, namespace_fd: int, error: OSError) -> int:
        """Return a descriptor of a file that is no longer mapped, or -1.

        Takes over ``namespace_fd``, the mount namespace of the process or -1.
        """
        try:
            if error.errno not in _GONE:
                return -1
            is_silent = error.errno == errno.ETIMEDOUT
            return self._finder.find(record, home, namespace_fd, is_silent=is_silent)
        finally:
            self._done.append(namespace_fd)

    def _send(
        self,
        record: Mapped,
        home: Home,
        identity: FileIdentity,
        fd: int,
        key: bytes,
    ) -> None:
        """Send a file, or only its build ID if too many files wait. Takes over the descriptor."""
        state = self._state
        build_id = None
        user, share = 0, home.share
        if home.mnt == state.host:
            user = self._user(fd, identity, record.pid)
            share = of_user(user)
        is_pinned = state.outbox.hold(share)
        if not is_pinned:
            build_id = self._build_id(fd, identity, home)
            self._done.append(fd)
            fd = -1
        message = Caught(
            key,
            record.pid,
            time.time_ns(),
            record.path.removesuffix(_DELETED),
            identity,
            process_table.place(record.pid, home, state.host, user),
            build_id,
        )
        with state.lock:
            if is_pinned:
                state.sent.add(file_key(identity))
                # An unknown mount namespace cannot be recognised later.
                if home.is_known:
                    state.recent.add(key)
            else:
                state.counts.unpinned += 1
                if build_id is None:
                    _log.debug(_NOT_SENT, record.path, record.pid)
                    return
            state.counts.caught += 1
        what = "sent" if is_pinned else "too many files wait, so only its build ID is sent"
        _log.debug("%s: %s, pid %d", record.path, what, record.pid)
        state.outbox.put(message, fd, share)

    def _user(self, fd: int, identity: FileIdentity, pid: int) -> int:
        try:
            return self._state.users.of(fd, identity, pid)
        except OSError:
            return NOBODY

    def _build_id(self, fd: int, identity: FileIdentity, home: Home) -> BuildId | None:
        """Return the build ID of a file that cannot stay open; None if reading the file
        could hang.
        """
        user = home.namespaces.user if home.namespaces is not None else 0
        if self._slow.is_slow(fd, identity, home.mnt_ns_id, user):
            return None
        try:
            readable = inodes.reopen_regular(fd)
        except OSError:
            return None
        try:
            found = base.identify(readable)
        except OSError:
            return None
        finally:
            self._done.append(readable)
        return found if isinstance(found, BuildId) else None

    def _miss(self, record: Mapped, home: Home, error: OSError) -> None:
        """Report a missed file only once for each process, because the process may map it again and
        again.
        """
        what = (record.pid, record.inode, record.path)
        if what in self._missed:
            return
        if len(self._missed) >= _REMEMBERED:
            self._missed.clear()
        self._missed.add(what)
        reason = error.strerror or str(error)
        _log.debug("%s: missed, pid %d: %s", record.path, record.pid, reason)
        message = Missed(
            record.pid, record.path, reason, error.errno or 0, process_table.known_place(home)
        )
        with self._state.lock:
            self._state.counts.missed += 1
        self._state.outbox.put(message)
