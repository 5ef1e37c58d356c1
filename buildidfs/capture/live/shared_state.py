# SPDX-License-Identifier: Apache-2.0
"""What the threads of a catcher share, and the lock for it."""

from __future__ import annotations

import resource
import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from buildidfs.capture.live import process_table
from buildidfs.capture.live.fair_share import FairShare
from buildidfs.capture.live.fd_closer import Closer
from buildidfs.capture.live.find_unmapped import Elsewhere
from buildidfs.capture.live.host_files import HostFiles
from buildidfs.capture.live.process_table import Home
from buildidfs.capture.live.protocol import Counts, Lost
from buildidfs.formats.perf.ring_records import Entered, Exited, Forked, Mapped
from buildidfs.formats.perf.ring_records import Lost as LostRecords
from buildidfs.linux import namespaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.live.event_rings import Rings
    from buildidfs.capture.live.recent_files import Met
    from buildidfs.capture.live.sender import Outbox
    from buildidfs.formats.perf.ring_records import Record


# A mapping, where its process lives, and an O_PATH descriptor of the file, or why there is none.
Grip = tuple[Mapped, Home, int, OSError | None]


_OPEN_FILES: Final = 1024
_WAITING: Final = 8192
_SPARE_FILES: Final = 256


class State:
    """Everything is used with ``lock`` held only, but for ``closer``, ``host``, ``grips`` (what was
    got hold of, and None at the end), ``files``, ``shares``, lookups in ``met``, and what says so.

    ``host`` is the mount namespace of the host. At most ``most_held`` files are open until they are
    sent, and at most ``most_waiting`` wait for that.
    """

    def __init__(self, rings: Rings, outbox: Outbox, met: Met) -> None:
        self.lock = threading.Lock()
        self.rings = rings
        self.outbox = outbox
        self.met = met
        self.host = namespaces.initial().mnt
        # The rest is for what is looked at and for the rings.
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self.most_held = max(min(_OPEN_FILES, (limit - _SPARE_FILES) // 4), 1)
        self.most_waiting = max(min(_WAITING, (limit - _SPARE_FILES) // 2), 1)
        self.grips: SimpleQueue[Grip | None] = SimpleQueue()
        self.closer = Closer(urgent=True)
        self.elsewhere = Elsewhere(self.host)
        self.files = HostFiles()
        self.shares = FairShare()
        self.tasks = process_table.Tasks()
        self.counts = Counts()
        self.ended = False

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
        elif isinstance(record, Entered):
            self.tasks.entered(record.pid, record.namespaces, record.time)
        elif isinstance(record, LostRecords):
            self.counts.lost += record.count
            self.tasks.forget()
            self.outbox.put(Lost(record.count, "events came faster than they could be read"))
        else:
            assert isinstance(record, Mapped)

    def look_around(self, close: Callable[[int], None]) -> None:
        """Find out what takes system calls; without the lock."""
        if not self.tasks.has_strangers:
            return
        with self.lock:
            strangers = self.tasks.strangers()
        for pid, home in strangers:
            process_table.look(pid, home, close)
