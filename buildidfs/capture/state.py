# SPDX-License-Identifier: Apache-2.0
"""What the threads of a catcher share, and the lock for it."""

from __future__ import annotations

import resource
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from buildidfs.capture import tasks
from buildidfs.capture.closer import Closer
from buildidfs.capture.elsewhere import Elsewhere
from buildidfs.capture.fair_share import FairShare
from buildidfs.capture.hostfiles import HostFiles
from buildidfs.capture.messages import Counts, Lost
from buildidfs.capture.tasks import Home
from buildidfs.formats.perfrecords import Entered, Exited, Forked, Mapped
from buildidfs.formats.perfrecords import Lost as LostRecords
from buildidfs.linux import namespaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.met import Met
    from buildidfs.capture.outbox import Outbox
    from buildidfs.capture.rings import Rings
    from buildidfs.capture.strict import Strict
    from buildidfs.formats.perfrecords import Record


# A mapping, where its process lives, and an O_PATH descriptor of the file, or why there is none.
Grip = tuple[Mapped, Home, int, OSError | None]


_OPEN_FILES: Final = 1024
_WAITING: Final = 8192
_SPARE_FILES: Final = 256


class State:
    """Everything is used with ``lock`` held only, but for ``closer``, ``host``, ``grips`` (what was
    got hold of, and None at the end), ``files``, ``shares``, lookups in ``met``, and what says so.

    ``strict`` has a lock of its own, since what it does takes longer; it comes first where both
    are taken. ``host`` is the mount namespace of the host; so many files are held until they are
    sent, and so many are waiting for that, at most.
    """

    def __init__(self, rings: Rings, outbox: Outbox, met: Met, strict: Strict | None) -> None:
        self.lock = threading.Lock()
        self.strict_lock = threading.Lock()
        self.rings = rings
        self.outbox = outbox
        self.met = met
        self.strict = strict
        self.host = namespaces.initial().mnt
        # Some are kept free: with strict watching, who execs a file that we have no descriptor
        # for is refused.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_held = max(min(_OPEN_FILES, (limit - _SPARE_FILES) // 4), 1)
        self.most_waiting = max(min(_WAITING, (limit - _SPARE_FILES) // 2), 1)
        self.grips: SimpleQueue[Grip | None] = SimpleQueue()
        self.closer = Closer(urgent=True)
        self.elsewhere = Elsewhere(self.host)
        self.files = HostFiles()
        self.shares = FairShare()
        self.tasks = tasks.Tasks()
        self.counts = Counts()
        self.ended = False
        self._entered: list[int] = []
        self._exited: list[int] = []
        self._exited_before: list[int] = []

    def waiting(self) -> int:
        """How many files were got hold of and are not handed on; without the lock."""
        return len(self.outbox) + self.grips.qsize()

    def follow(self) -> None:
        """Take in what has become of processes."""
        for record in self.rings.changes():
            self.apply(record)

    def apply(self, record: Record) -> None:
        """Take in one record that is not about a mapping."""
        if isinstance(record, Forked):
            self.tasks.forked(record.pid, record.parent, record.time)
        elif isinstance(record, Exited):
            self.tasks.exited(record.pid, record.time)
            if self.strict is not None:
                self._exited.append(record.pid)
        elif isinstance(record, Entered):
            is_new = self.tasks.entered(record.pid, record.namespaces, record.time)
            if is_new and self.strict is not None and record.namespaces.mnt != self.host:
                self._entered.append(record.pid)
        elif isinstance(record, LostRecords):
            self.counts.lost += record.count
            self.tasks.forget()
            self.outbox.put(Lost(record.count, "events came faster than they could be read"))
        else:
            assert isinstance(record, Mapped)

    def look_around(self, close: Callable[[int], None]) -> None:
        """Find out what takes system calls; without the lock."""
        if not self._entered and not self.tasks.has_strangers:
            return
        with self.lock:
            strangers = self.tasks.strangers()
            entered, self._entered = self._entered, []
        for pid, home in strangers:
            tasks.look(pid, home, close)
        if self.strict is not None and entered:
            with self.strict_lock:
                for pid in entered:
                    self.strict.namespace_seen(pid)

    def kept(self, record: Mapped) -> int | None:
        """A descriptor of a file that its process has opened, if there is one; without the lock."""
        if self.strict is None:
            return None
        with self.strict_lock:
            return self.strict.take(record.pid, record.inode, record.path)

    def drop_exited(self) -> None:
        """Let go of what was kept for those gone since the time before the last; with the lock of
        ``strict`` only.

        Not at once: what they have mapped may still wait to be looked at.
        """
        with self.lock:
            exited, self._exited_before, self._exited = self._exited_before, self._exited, []
        if self.strict is not None:
            for pid in exited:
                self.strict.drop(pid)
