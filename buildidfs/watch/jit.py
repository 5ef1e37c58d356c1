# SPDX-License-Identifier: Apache-2.0
"""Keep the names of generated code while its processes live, and once more when each ends.

The catcher reports the processes that have made anonymous memory executable; other processes cause
no work. `JitFollower` looks at each of them a few times soon, since a compiler makes its file
before or after the first mapping, and from then on once a minute. A pidfd reports the end of the
process; the open file still has all names then, even if its filesystem is gone.

No descriptor of the root directory of a process is kept: it would keep mounts busy, and would not
give access to files on other mounts of the namespace.
"""

from __future__ import annotations

import errno
import heapq
import logging
import os
import select
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from buildidfs.backoff import Backoff
from buildidfs.errors import BuildIdFsError
from buildidfs.names import printable
from buildidfs.shares import HOST, FairQueue, FairTable

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.process.jit_files import JitFile, JitFinder, JitOwner
    from buildidfs.model import Origin
    from buildidfs.shares import Share
    from buildidfs.store import Store
    from buildidfs.watch.state import WatchLimits

EACH_S: Final = 60.0
"""Seconds between two looks at a process."""

_FIRST_LOOKS_S: Final = (0.0, 0.02, 0.1, 0.5, 2.0, 10.0)
_MOST_REPORTED: Final = 4096
_HOSTS_PART: Final = 4  # one in so many of these is reserved for root of the host
_MOST_FILES: Final = 4  # of a process, which may run one program after another
# Limits for a minute: for a container, and for all together.
_MOST_BYTES_OF_A_SHARE: Final = 64 << 20
_MOST_BYTES: Final = 256 << 20
_END_S: Final = 5.0
_PAUSES: Final = Backoff(0.1, EACH_S)

_log = logging.getLogger(__name__)


class _Followed:
    """A process, the number of looks at it, and its open files."""

    __slots__ = ("files", "looks", "pid", "pidfd", "whose")

    def __init__(self, pid: int, pidfd: int, whose: JitOwner) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.whose = whose
        self.looks = 0
        self.files: dict[tuple[int, int], JitFile] = {}


class JitFollower:
    """Keeps the names of reported processes in ``store``, in a thread of its own.

    A file is kept if ``is_wanted`` returns True for its origin. A limited number of processes
    is followed at once. If there are more, the container or user with the most of them loses one,
    and ``refused`` is called. ``looked`` is called at each planned look at a process.
    """

    def __init__(
        self,
        store: Store,
        finder: JitFinder,
        limits: WatchLimits,
        is_wanted: Callable[[Origin], bool] = lambda origin: True,
        refused: Callable[[JitOwner], None] = lambda whose: None,
        looked: Callable[[int, Share], None] = lambda pid, share: None,
    ) -> None:
        self._store = store
        self._finder = finder
        self._is_wanted = is_wanted
        self._refused = refused
        self._looked = looked
        self._reported: FairQueue[int] = FairQueue(_MOST_REPORTED, _MOST_REPORTED // _HOSTS_PART)
        self._lock = threading.Lock()
        self._wake = -1
        # By process ID.
        self._followed: FairTable[int, _Followed] = FairTable(
            limits.jit_processes, limits.jit_processes // _HOSTS_PART, keep_first=True
        )
        self._by_fd: dict[int, _Followed] = {}
        self._bytes: Counter[str] = Counter()  # by owner
        self._minute = 0.0
        self._due: list[tuple[float, int, int]] = []  # time, process ID, pidfd
        self._ending = threading.Event()
        self._warned = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="buildidfs-jit")

    def start(self) -> None:
        """Start the thread."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread.start()
        if self._reported:
            self._notify()

    def report(self, pid: int, share: Share = HOST) -> None:
        """Report that a process has mapped memory without a file executable. Does not wait."""
        with self._lock:
            self._reported.put(share, pid)
        self._notify()

    def close(self) -> None:
        """Keep the new names of all processes, and end the thread. Safe to call twice."""
        self._ending.set()
        self._notify()
        if self._wake < 0:
            return
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            with self._lock:
                wake, self._wake = self._wake, -1
            os.close(wake)

    def _notify(self) -> None:
        with self._lock:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    # --- the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        failures = 0
        while not self._ending.is_set():
            try:
                self._turn()
                failures = 0
            except Exception:
                # The top of this thread: an error with one process must not end the work for the
                # others.
                _log.exception("names of generated code could not be kept")
                # A lasting error must not use a CPU and fill the log.
                self._ending.wait(_PAUSES.delay(failures))
                failures += 1
        for followed in self._followed.values():
            self._end(followed)
        self._epoll.close()

    def _turn(self) -> None:
        timeout = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
        for fd, _ in self._epoll.poll(timeout):
            if fd == self._wake:
                os.eventfd_read(self._wake)
            elif (followed := self._by_fd.get(fd)) is not None:
                self._end(followed)
            else:
                self._epoll.unregister(fd)
        while (pid := self._next_reported()) is not None:
            self._follow(pid)
        while self._due and self._due[0][0] <= time.monotonic() and not self._ending.is_set():
            _, pid, pidfd = heapq.heappop(self._due)
            followed = self._followed.get(pid)
            if followed is not None and followed.pidfd == pidfd:
                self._planned_look(followed)

    def _next_reported(self) -> int | None:
        with self._lock:
            return self._reported.pop()

    def _follow(self, pid: int) -> None:
        known = self._followed.get(pid)
        if known is not None:
            if not known.files and known.looks >= len(_FIRST_LOOKS_S):
                self._look(known)  # the process may run another program by now
            return
        try:
            whose = self._finder.whose(pid)
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                _log.info("names of generated code of process %d are not kept: %s", pid, error)
            return
        followed = self._by_fd[pidfd] = _Followed(pid, pidfd, whose)
        self._epoll.register(pidfd, select.EPOLLIN)
        surplus = self._followed.put(pid, whose.share, followed)
        if surplus is not None:
            self._end(surplus)
            self._refused(surplus.whose)
        if surplus is not followed:
            self._planned_look(followed)

    def _planned_look(self, followed: _Followed) -> None:
        self._looked(followed.pid, followed.whose.share)
        self._look(followed)
        if followed.pid not in self._followed:
            return
        looks = followed.looks
        soon = not followed.files and looks < len(_FIRST_LOOKS_S)
        wait = _FIRST_LOOKS_S[looks] if soon else EACH_S
        heapq.heappush(self._due, (time.monotonic() + wait, followed.pid, followed.pidfd))

    def _look(self, followed: _Followed) -> None:
        """Open the files of names that a process has by now, and keep the new names."""
        followed.looks += 1
        try:
            found = self._finder.find(followed.pid)
        except OSError:
            return  # the process is ending, which its pidfd reports
        for file in found:
            is_known = file.file in followed.files or len(followed.files) >= _MOST_FILES
            if is_known or not self._is_wanted(file.process.origin):
                file.close()
            else:
                followed.files[file.file] = file
        self._keep(followed)

    def _keep(self, followed: _Followed) -> None:
        now = time.monotonic()
        if now - self._minute >= EACH_S:
            self._minute = now
            self._bytes.clear()
        for file in followed.files.values():
            try:
                while (most := self._left(followed.whose.share)) > 0:
                    cost = file.read(self._store.jit_maps, most)
                    if not cost:
                        self._store.jit_maps.alive(file.process)
                        break
                    self._bytes[followed.whose.share.owner] += cost
            except (OSError, BuildIdFsError) as error:
                self._failed(file, error)

    def _left(self, share: Share) -> int:
        """Return the bytes that may still be read in this minute for a container or user: half of
        those that the others have left.
        """
        used = self._bytes[share.owner]
        left = (_MOST_BYTES - self._bytes.total() + used) // 2
        return min(_MOST_BYTES_OF_A_SHARE, left) - used

    def _failed(self, file: JitFile, error: Exception) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        path = printable(file.process.origin.path)
        _log.log(level, "names of generated code in %s are not kept: %s", path, error)

    def _end(self, followed: _Followed) -> None:
        """Keep the last names of an ended process, and close its files."""
        if self._followed.get(followed.pid) is followed:
            self._followed.pop(followed.pid)
        del self._by_fd[followed.pidfd]
        self._epoll.unregister(followed.pidfd)
        os.close(followed.pidfd)
        try:
            self._keep(followed)
        finally:
            for file in followed.files.values():
                file.close()
