# SPDX-License-Identifier: Apache-2.0
"""The namespaces of processes in events, without a look into /proc for each of them.

Most processes are in the namespaces of their parent. They share one `Home`, which is looked up
once. The kernel reuses the number of a namespace that is gone, but a process leaves a namespace
only when it enters the next one, so the two have different numbers. If a record has the old number
of a process, the process is still in the same namespace.

The rings of the CPUs are read one after another. When a mapping is looked up, the table may already
know that the process entered another home later. Therefore the table keeps the previous home and
the time of the last change of each process, and keeps ended processes for a while.

A static program may live for 0.1 ms, and an idle CPU takes half of that to wake a thread. The file
is then looked up by its path in the mount namespace of the process. The kernel destroys this
namespace with its last process. So the catcher holds each mount namespace open for a moment after
it was made, and after each mapping in it: `HeldNamespaces`. It waits for no filesystem:
`open_cached_in_root` fails if the kernel would have to ask it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from buildidfs.capture.live.protocol import ProcessPlace
from buildidfs.capture.origin import builder
from buildidfs.formats import proc_text
from buildidfs.formats.container import cgroup
from buildidfs.linux import inodes, namespaces, procfs
from buildidfs.linux.file_ops import Fd, closing_fd
from buildidfs.model import NamespaceSet
from buildidfs.shares import FairTable, Share

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.formats.perf.records import Mapped


_MOST_PROCESSES: Final = 1 << 16
_NEIGHBOURS: Final = 4
_MOST_NEWCOMERS: Final = 1024
_REMEMBERED_NS: Final = 1_000_000_000

Close = Callable[[int], None]

_NEW: Final = Share("user namespaces that were not looked up")
"""Any user can make user namespaces without end, so those share until their owner is known."""


class Home:
    """A set of namespaces, and some processes that were recently seen in it.

    ``share`` is that of its files, unless it is the host.
    """

    __slots__ = ("cgroup", "cgroup_id", "mnt_ns_id", "namespaces", "owner", "pids", "share")

    def __init__(self, numbers: NamespaceSet | None = None) -> None:
        self.namespaces = numbers
        self.mnt_ns_id = 0
        self.cgroup = b""
        self.cgroup_id = 0
        self.owner = 0
        self.share = _first_share(numbers)
        self.pids: deque[int] = deque(maxlen=_NEIGHBOURS)

    @property
    def is_known(self) -> bool:
        """True if one of its processes was looked up in /proc."""
        return self.mnt_ns_id != 0

    @property
    def mnt(self) -> int:
        """Return the number of the mount namespace, 0 if unknown."""
        return self.namespaces.mnt if self.namespaces is not None else 0

    def neighbours(self, pid: int) -> list[int]:
        """Return the processes recently seen here, without ``pid``; the latest is the last."""
        # A copy, because other threads may add to the original meanwhile.
        return [each for each in list(self.pids) if each != pid]


def _first_share(numbers: NamespaceSet | None) -> Share:
    """Return the share of a home that was not looked up; only root can make mount namespaces in
    our user namespace.
    """
    if numbers is None or numbers.user in (0, namespaces.own_user()):
        return Share(f"mnt:{0 if numbers is None else numbers.mnt}")
    return _NEW


class _Process:
    """A process: its home, the time since which it has been there, and its previous home; times in
    nanoseconds.
    """

    __slots__ = ("before", "ended", "home", "since")

    def __init__(self, home: Home, since: int, before: Home | None) -> None:
        self.home = home
        self.since = since
        self.before = before
        self.ended = 0


class Tasks:
    """The homes of processes, kept up to date by events; at most 65,536 are remembered."""

    def __init__(self) -> None:
        self._processes: dict[int, _Process] = {}
        self._ended: deque[tuple[int, int]] = deque()
        self._strangers: dict[int, Home] = {}
        self._newcomers: list[tuple[int, Home]] = []

    def __len__(self) -> int:
        return len(self._processes)

    def home_at(self, pid: int, time: int) -> Home:
        """Return the home of a process at a time, as far as the table knows it; makes no system
        call.
        """
        process = self._processes.get(pid)
        if process is None:
            return self._move(pid, Home(), 0)
        if time < process.since and process.before is not None:
            return process.before
        return process.home

    def forked(self, pid: int, parent: int, time: int) -> None:
        """Record a new process, in the namespaces of its parent unless `entered` follows.

        The ring of mappings has a copy of each record of a fork, and is read at another time.
        """
        if self._is_known_since(pid, time):
            return
        process = self._processes.get(parent)
        if process is None:
            # A process from before the start: look it up soon, because its next children share its
            # home.
            home = self._strangers[parent] = self._move(parent, Home(), 0)
        elif time < process.since and process.before is not None:
            home = process.before
        else:
            home = process.home
        # The parent is likely to live longest of the few kept processes.
        if parent in home.pids:
            home.pids.remove(parent)
        home.pids.append(parent)
        home.pids.append(pid)
        self._move(pid, home, time)

    def entered(self, pid: int, numbers: NamespaceSet, time: int) -> None:
        """Record the new namespaces of a process."""
        if self._is_known_since(pid, time + 1):
            return
        process = self._processes.get(pid)
        if process is None or process.home.namespaces != numbers:
            home = self._move(pid, Home(numbers), time)
            home.pids.append(pid)
            if len(self._newcomers) < _MOST_NEWCOMERS:
                self._newcomers.append((pid, home))

    def exited(self, pid: int, time: int, now: int) -> None:
        """Record the end of a process, which is remembered for a second after ``now``."""
        process = self._processes.get(pid)
        if process is not None and process.since <= time:
            process.ended = now
            self._ended.append((now, pid))
            self.tidy(now, 2)

    @property
    def has_strangers(self) -> bool:
        """True if `strangers` would return a process."""
        return bool(self._strangers)

    def strangers(self) -> list[tuple[int, Home]]:
        """Return the processes whose homes `look` should look up, each once."""
        strangers, self._strangers = self._strangers, {}
        return list(strangers.items())

    @property
    def has_newcomers(self) -> bool:
        """True if `newcomers` would return a process."""
        return bool(self._newcomers)

    def newcomers(self) -> list[tuple[int, Home]]:
        """Return the processes that have entered a home since the last call, with that home."""
        newcomers, self._newcomers = self._newcomers, []
        return newcomers

    def tidy(self, now: int, most: int) -> None:
        """Forget at most that many of the processes whose end was told more than a second before
        ``now``.
        """
        for _ in range(most):
            if not self._ended or self._ended[0][0] >= now - _REMEMBERED_NS:
                return
            ended_ns, pid = self._ended.popleft()
            process = self._processes.get(pid)
            if process is not None and process.ended == ended_ns:
                del self._processes[pid]

    def forget(self) -> None:
        """Forget all homes, because events were lost."""
        self._processes.clear()
        self._ended.clear()
        self._strangers.clear()
        self._newcomers.clear()

    def _is_known_since(self, pid: int, time: int) -> bool:
        """Return True if a record of the process from ``time`` or later was applied. An older one
        changes nothing.

        The number of an ended process may be reused, by a process with a later time.
        """
        process = self._processes.get(pid)
        return process is not None and process.since >= time

    def _move(self, pid: int, home: Home, time: int) -> Home:
        if len(self._processes) >= _MOST_PROCESSES:
            # After lost events: processes are looked up again at their next event.
            self.forget()
        before = self._processes.get(pid)
        self._processes[pid] = _Process(home, time, None if before is None else before.home)
        return home


def look(pid: int, home: Home, close: Close = os.close) -> Home:
    """Complete the home of a process from /proc, if the process still exists.

    Returns another home if the process has entered it and the event has not been read yet.
    ``close`` is called with a descriptor to close, which may be the last one of a mount namespace.
    """
    try:
        with closing_fd(procfs.open_pid(pid)) as pid_fd:
            return _found(pid_fd, home, close)
    except OSError:
        return home


def _found(pid_fd: int, home: Home, close: Close) -> Home:
    fd = namespaces.open_mnt(pid_fd)
    try:
        mnt = os.fstat(fd).st_ino
        number = namespaces.mnt_ns_id_of(fd) or mnt
    finally:
        close(fd)
    numbers = home.namespaces
    if numbers is None or numbers.mnt != mnt:
        seen = namespaces.of(pid_fd)
        if seen.mnt != mnt:
            return home  # the process moved between both reads; its new number must not spread
        if numbers is not None:
            home = Home()
        home.namespaces = seen
    home.cgroup, home.cgroup_id = _cgroup(pid_fd)
    assert home.namespaces is not None
    home.owner = builder.owner(pid_fd, home.namespaces.user, home.cgroup)
    home.share = cgroup.share(home.cgroup, mnt, home.owner)
    home.mnt_ns_id = number  # last, because other threads may read it from now on
    return home


def place(pid: int, home: Home, host: int, user: int = 0) -> ProcessPlace:
    """Return the place of a process. ``host`` is the host's mount namespace, in which the file
    counts for ``user``.

    On the host, each process may have a control group of its own. In another mount namespace, all
    processes get the control group that was seen first.
    """
    numbers = home.namespaces or NamespaceSet()
    # If a process is gone, it is unknown to which root its paths were relative.
    its_cgroup, number, chrooted = home.cgroup, home.cgroup_id, True
    try:
        with closing_fd(procfs.open_pid(pid)) as pid_fd:
            chrooted = os.readlink(b"root", dir_fd=pid_fd) != b"/"
            if numbers.mnt == host:
                its_cgroup, number = _cgroup(pid_fd)
    except OSError:
        pass
    owner = user if numbers.mnt == host else home.owner
    return ProcessPlace(numbers, home.mnt_ns_id, its_cgroup, number, chrooted, owner)


def known_place(home: Home) -> ProcessPlace:
    """Return the place of the processes of a home, as far as it is known without a system call."""
    numbers = home.namespaces or NamespaceSet()
    return ProcessPlace(
        numbers, home.mnt_ns_id, home.cgroup, home.cgroup_id, chrooted=True, owner=home.owner
    )


def _cgroup(pid_fd: int) -> tuple[bytes, int]:
    text = procfs.cgroup(pid_fd)
    return cgroup.path(text), namespaces.cgroup_id(cgroup.unified(text))


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
        # Without CAP_SYS_ADMIN no namespace can be visited; the file may still be found in the root
        # of another process in that namespace.
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
                    yield inodes.open_cached_in_root(root_fd, mount.mount_point)


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
        with Fd(inodes.open_cached_in_root(root_fd, record.path)) as found:
            identity = inodes.identity(found.fd, ask=False)
            if identity.ino == record.inode and stat.S_ISREG(identity.mode):
                return found.release()
    except OSError:
        pass
    return -1
