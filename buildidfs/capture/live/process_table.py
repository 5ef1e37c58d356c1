# SPDX-License-Identifier: Apache-2.0
"""The namespaces of processes in events, without a look into /proc for each of them.

Most processes are in the namespaces of their parent. They share one `Home`, which is looked up
once. The kernel reuses the number of a namespace that is gone, but a process leaves a namespace
only when it enters the next one, so the two have different numbers. If a record has the old number
of a process, the process is still in the same namespace.

The rings of the CPUs are read one after another. When a mapping is looked up, the table may already
know that the process entered another home later. Therefore the table keeps the previous home and
the time of the last change of each process, and keeps ended processes for a while.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Final

from buildidfs.capture.live.protocol import ProcessPlace
from buildidfs.capture.origin import container
from buildidfs.formats.container import cgroup
from buildidfs.linux import namespaces, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import NamespaceSet
from buildidfs.shares import Share

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
    home.owner = container.owner(pid_fd, home.namespaces.user, home.cgroup)
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
