# SPDX-License-Identifier: Apache-2.0
"""Find files whose mapping is gone, because the process ended before a thread looked at it.

A static program may live for 0.1 ms, and an idle CPU takes half of that to wake a thread. The file
is then looked up by its path in the mount namespace of the process. The kernel destroys this
namespace with its last process. So the catcher holds each mount namespace open for a moment after
it was made, and after each mapping in it: `HeldNamespaces`.

Nothing here waits for a filesystem: `open_cached_in_root` fails if the kernel would have to ask it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.formats import proc_text
from buildidfs.linux import namespaces, openat2, procfs, statx
from buildidfs.linux.file_ops import Fd, closing_fd
from buildidfs.shares import FairTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.capture.live.process_table import Home
    from buildidfs.formats.perf.records import Mapped

HOLD_S: Final = 0.2
"""Seconds for which a mount namespace is held: longer than a file waits for its lookup."""

_MOST_MOUNTS: Final = 8
_MOST_TEXT: Final = 64 << 10


class HeldNamespaces:
    """Descriptors of mount namespaces in recent use, at most ``most``. Thread-safe.

    ``close`` takes over a descriptor: closing the last descriptor destroys the namespace. This
    takes milliseconds, or longer if a filesystem is slow to unmount.
    """

    def __init__(self, close: Callable[[Iterable[int]], None], most: int) -> None:
        self._close = close
        self._lock = threading.Lock()
        # In the order of their last use.
        self._held: FairTable[Home, tuple[Home, int, float]] = FairTable(most)

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, home: Home, pid: int) -> None:
        """Hold the mount namespace of a home from now on for `HOLD_S`; ``pid`` was seen in it."""
        if self._is_renewed(home):
            return
        fd = self._open(home, pid)
        if fd < 0:
            return
        with self._lock:
            surplus = [
                self._held.pop(home),
                self._held.put(home, home.share, (home, fd, time.monotonic())),
            ]
        self._close([each[1] for each in surplus if each is not None])

    def borrow(self, home: Home) -> int:
        """Return a new descriptor of the namespace of a home, -1 if it is not held."""
        with self._lock:
            held = self._held.get(home)
            if held is not None:
                with contextlib.suppress(OSError):  # the limit of descriptors is reached
                    return os.dup(held[1])
            return -1

    def expire(self) -> None:
        """Close the namespaces that were not used for `HOLD_S`."""
        if not self._held:
            return
        before = time.monotonic() - HOLD_S
        expired = []
        with self._lock:
            while (oldest := self._held.first()) is not None and oldest[2] <= before:
                self._held.pop(oldest[0])
                expired.append(oldest[1])
        self._close(expired)

    def _open(self, home: Home, pid: int) -> int:
        """Open the mount namespace of a home through one of its processes; -1 if all are gone."""
        for each in (pid, *reversed(home.neighbours(pid))):
            try:
                with closing_fd(procfs.open_pid(each)) as pid_fd:
                    fd = namespaces.open_mnt(pid_fd)
            except OSError:
                continue
            if os.fstat(fd).st_ino == home.mnt:
                return fd
            self._close([fd])  # the process has moved on
        return -1

    def _is_renewed(self, home: Home) -> bool:
        with self._lock:
            held = self._held.get(home)
            return held is not None and self._held.renew(home, (home, held[1], time.monotonic()))


class Finder:
    """Looks files up by path; ``host`` is the mount namespace of the host.

    A path alone proves nothing, so the inode must be that of the mapping. (The device need not
    match: overlayfs and btrfs show one in mappings and another one to stat(2).) Belongs to one
    thread.
    """

    def __init__(self, host: int) -> None:
        self._host = host
        self._visitor: namespaces.Visitor | None = None
        # Without the capability, files are still found beside other processes.
        with contextlib.suppress(OSError):
            self._visitor = namespaces.Visitor()

    def close(self) -> None:
        """Close all descriptors; safe to call twice."""
        if self._visitor is not None:
            self._visitor.close()
            self._visitor = None

    def find(
        self, record: Mapped, home: Home, namespace_fd: int = -1, *, is_silent: bool = False
    ) -> int:
        """Return an O_PATH descriptor of the file that was mapped, or -1.

        ``namespace_fd`` is the mount namespace of the process, or -1 if it is not held. A process
        that ``is_silent`` lives, so its own root is tried, too.
        """
        for root_fd in self._roots(record, home, namespace_fd, is_silent):
            with closing_fd(root_fd):
                fd = _look_up(root_fd, record)
            if fd >= 0:
                return fd
        return -1

    def _roots(
        self, record: Mapped, home: Home, namespace_fd: int, is_silent: bool
    ) -> Iterator[int]:
        """Yield the directories that may have been the root of the process; the caller
        closes them.
        """
        if namespace_fd >= 0 and self._visitor is not None:
            yield from self._roots_in(record, namespace_fd)
        if home.namespaces is None:
            return
        pids = home.neighbours(record.pid)
        if home.mnt == self._host:
            pids.append(os.getpid())
        if is_silent:
            pids.append(record.pid)
        for pid in reversed(pids):
            with contextlib.suppress(OSError):
                yield _root_of(pid, home.mnt)

    def _roots_in(self, record: Mapped, namespace_fd: int) -> Iterator[int]:
        """Yield the root of a mount namespace, then the mount points of the file's filesystem.

        If the process called chroot(2), the path is relative to one of these mount points.
        """
        assert self._visitor is not None
        try:
            root_fd = self._visitor.open_root(namespace_fd)
        except OSError:
            return
        with closing_fd(root_fd):
            with contextlib.suppress(OSError):
                yield os.dup(root_fd)
            text = self._visitor.mountinfo(namespace_fd, _MOST_TEXT)
            mounts = [each for each in proc_text.mounts_in(text) if each.dev == record.dev]
            for mount in mounts[:_MOST_MOUNTS]:
                with contextlib.suppress(OSError):
                    yield openat2.open_cached_in_root(root_fd, mount.mount_point)


def found_here(record: Mapped, host: int) -> int:
    """Return an O_PATH descriptor of the file that was mapped, by its path from our own root, or
    -1. Our mount namespace has to be ``host``.
    """
    try:
        root_fd = _root_of(os.getpid(), host)
    except OSError:
        return -1
    with closing_fd(root_fd):
        return _look_up(root_fd, record)


def _root_of(pid: int, mnt: int) -> int:
    """Open the root of a process, which has to be in the mount namespace ``mnt``."""
    with closing_fd(procfs.open_pid(pid)) as pid_fd:
        if namespaces.mnt(pid_fd) != mnt:
            raise ProcessLookupError
        return procfs.open_root(pid_fd)


def _look_up(root_fd: int, record: Mapped) -> int:
    """Return an O_PATH descriptor of the file of a record below a root, or -1."""
    try:
        with Fd(openat2.open_cached_in_root(root_fd, record.path)) as found:
            identity = statx.identity(found.fd, ask=False)
            if identity.ino == record.inode and stat.S_ISREG(identity.mode):
                return found.release()
    except OSError:
        pass
    return -1
