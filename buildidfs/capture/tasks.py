# SPDX-License-Identifier: Apache-2.0
"""Where the processes live that events speak of, without asking /proc each time.

Most processes live where their parent does, so all that do share one `Home`, which is looked at
once. The kernel reuses the numbers in the events as soon as a namespace is gone, but changes always
show: a process is born with those of its parent, or enters new ones while it still holds the old,
so a number that is the same means the same namespace.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Final

from buildidfs.capture.messages import Place
from buildidfs.formats import cgroup
from buildidfs.linux import cgroups, namespaces, procfs
from buildidfs.model import NamespaceSet

_MOST_PROCESSES: Final = 1 << 16
_NEIGHBOURS: Final = 4


class Home:
    """A set of namespaces, and some processes that were seen in it lately."""

    __slots__ = ("cgroup", "mnt_ns_id", "namespaces", "pids")

    def __init__(self, numbers: NamespaceSet | None = None) -> None:
        self.namespaces = numbers
        self.mnt_ns_id = 0
        self.cgroup = b""
        self.pids: deque[int] = deque(maxlen=_NEIGHBOURS)

    @property
    def is_known(self) -> bool:
        """Whether a process was looked at."""
        return self.mnt_ns_id != 0


class Tasks:
    """The homes of processes, kept up to date by the events; at most 65,536 are remembered."""

    def __init__(self) -> None:
        self._homes: dict[int, Home] = {}

    def forked(self, pid: int, parent: int) -> None:
        """A process began, in the namespaces of its parent unless `entered` follows."""
        home = self._homes.get(parent)
        if home is None:
            # Of before our time. Looked at now, since the child may go to other namespaces.
            home = self._remember(parent, Home())
            self.look(parent, home)
        # Of the few that are kept the parent is the one that will live longer than the others.
        if parent not in home.pids:
            home.pids.append(parent)
        home.pids.append(pid)
        self._homes[pid] = home

    def entered(self, pid: int, numbers: NamespaceSet) -> Home | None:
        """A process is in these namespaces; returns its home if its mount namespace is another
        one than before.
        """
        home = self._homes.get(pid)
        before = home.namespaces if home is not None else None
        if before == numbers:
            return None
        home = self._remember(pid, Home(numbers))
        home.pids.append(pid)
        return home if before is None or before.mnt != numbers.mnt else None

    def forget(self) -> None:
        """Events were lost: nothing is known for sure any more."""
        self._homes.clear()

    def exited(self, pid: int) -> None:
        """A process ended."""
        self._homes.pop(pid, None)

    def last_home(self, pid: int) -> Home:
        """Where a process lives, as far as that is known; nothing is asked for it."""
        home = self._homes.get(pid)
        return self._remember(pid, Home()) if home is None else home

    def home(self, pid: int) -> Home:
        """Where a process lives; looked up in /proc the first time, if it is still there."""
        home = self.last_home(pid)
        return home if home.is_known else self.look(pid, home)

    def look(self, pid: int, home: Home) -> Home:
        """Find out in /proc what is not known of the home of a process, if it is still there."""
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            return home
        try:
            seen = namespaces.of(pid_fd)
            number = namespaces.mnt_ns_id(pid_fd) or seen.mnt
            if namespaces.mnt(pid_fd) != seen.mnt:
                return home  # it moved between the two, and others must not get its new number
            if home.namespaces is not None and home.namespaces != seen:
                # It has moved on, and the event that says so is still to come.
                home = Home(seen)
            home.namespaces = seen
            home.mnt_ns_id = number
            home.cgroup = cgroup.path(procfs.cgroup(pid_fd))
        except OSError:
            pass
        finally:
            os.close(pid_fd)
        return home

    def _remember(self, pid: int, home: Home) -> Home:
        if len(self._homes) >= _MOST_PROCESSES:
            # Of events that were lost: processes are looked up again when they are met.
            self._homes.clear()
        self._homes[pid] = home
        return home


def place(pid: int, home: Home) -> Place:
    """Where a process lives, as exactly as can still be told. Not for each mapping: 30 us."""
    numbers = home.namespaces or NamespaceSet()
    its_cgroup, number, chrooted = home.cgroup, 0, False
    try:
        pid_fd = procfs.open_pid(pid)
        try:
            text = procfs.cgroup(pid_fd)
            its_cgroup, number = cgroup.path(text), cgroups.cgroup_id(cgroup.unified(text))
            chrooted = os.readlink(b"root", dir_fd=pid_fd) != b"/"
        finally:
            os.close(pid_fd)
    except OSError:
        pass
    return Place(numbers, home.mnt_ns_id, its_cgroup, number, chrooted)
