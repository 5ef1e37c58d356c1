# SPDX-License-Identifier: Apache-2.0
"""Files that wait, open, until they are copied: bounded in time, bytes and number.

An open file keeps its filesystem alive, and a deleted one its room: as long as it waits here the
device of a container that has ended cannot be detached. So each has its time, and what there is
too much of is let go, the biggest first: for the bytes of one of those a hundred others are kept.

The size of a pending file is the one it claims. What it takes on the disk would be nearer to what
waiting costs, but is no more to be believed (FUSE says what it likes, and often nothing) and says
less of how long copying takes, since holes are read and hashed like everything else. A user with a
huge file of holes has that let go first, and harms no others.

To close a file may take long: the last one of a filesystem unmounts it, and a FUSE server is asked
first and may never answer. So a thread of its own closes, and another one what may not answer.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import resource
import threading
import time
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture.base import PinnedFile
from buildidfs.linux.threads import Closer
from buildidfs.model import BuildId, Sighting

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST: Final = ""
"""The share of what only root can have put into the host's own mount namespace."""

# What the rest of the process has open: staged files of two batches, a copy of the descriptor of
# each file in work, the index, sockets, descriptors on their way to be closed.
_RESERVED: Final = 640
_FEWEST: Final = 64
# Each holds an inode and its name in the kernel's memory, about 2 KiB.
_MOST: Final = 16_384
# Of all places those that files may take which may not answer.
_SLOW_SHARE: Final = 8
# A file that has waited for this part of its time goes before smaller ones.
_URGENT: Final = 0.75
# What close() waits for descriptors to be closed; those that take longer are left to the thread.
_CLOSING_S: Final = 5.0


class PendingFile(msgspec.Struct, eq=False):
    """A pinned file that was caught in use, and waits until it is copied.

    ``file`` has a sighting with its origin in full; `PendingFiles` closes it. ``build_id`` is that
    of the file when it was caught, None if nothing looked. ``key`` is the catcher's name of the
    file. ``since`` is the time of ``time.monotonic()`` at which it was pinned. ``slow`` says that
    its filesystem may not answer. ``tries`` counts the attempts to copy it. ``share`` says whose
    file it is, ``noted`` that there was no room for it while it could be had again.
    """

    file: PinnedFile
    build_id: BuildId | None
    key: bytes
    since: float
    slow: bool = False
    tries: int = 0
    share: str = HOST
    noted: bool = False

    @property
    def sighting(self) -> Sighting:
        """The sighting of the pinned file."""
        return self.file.sighting


class LetGo(msgspec.Struct, frozen=True):
    """A pending file that was closed without having been copied, and why, for a person."""

    pending: PendingFile
    reason: str


_Share = tuple[str, bool]  # of those whose filesystems may not answer apart


class _Entry:
    __slots__ = ("after", "number", "overdue", "pending", "reason", "share", "size")

    def __init__(self, pending: PendingFile, number: int, overdue: float) -> None:
        self.pending = pending
        self.share: _Share = (pending.share, pending.slow)
        self.number = number  # in order of arrival
        self.size = max(pending.sighting.origin.identity.size, 0)
        self.overdue = overdue  # when its time is over
        self.after = 0.0  # not to be taken before
        self.reason = ""


class _Sorted:
    """Entries in the order of a number each; a few thousand move in a microsecond."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, int, _Entry]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[_Entry]:
        return (entry for _, _, entry in self._rows)

    def add(self, value: float, entry: _Entry) -> None:
        bisect.insort(self._rows, (value, entry.number, entry))

    def remove(self, value: float, entry: _Entry) -> None:
        del self._rows[bisect.bisect_left(self._rows, (value, entry.number, entry))]

    def first(self) -> _Entry | None:
        return self._rows[0][2] if self._rows else None

    def last(self) -> _Entry | None:
        return self._rows[-1][2] if self._rows else None


class _Ranking:
    """Shares in the order of a number each."""

    def __init__(self) -> None:
        self._values: dict[_Share, int] = {}
        self._rows: list[tuple[int, _Share]] = []

    def add(self, share: _Share, value: int) -> None:
        """Change the number of a share, which is 0 at first."""
        old = self._values.get(share, 0)
        if old:
            del self._rows[bisect.bisect_left(self._rows, (old, share))]
        if new := old + value:
            self._values[share] = new
            bisect.insort(self._rows, (new, share))
        else:
            self._values.pop(share, None)

    def largest(self) -> _Share | None:
        """The share with the largest number."""
        return self._rows[-1][1] if self._rows else None


class _Waiting:
    """All entries that wait, by what they may be let go for. ``bytes`` is the sum of their sizes.

    Those of the host count half where shares are compared.
    """

    def __init__(self) -> None:
        self._by_size: dict[_Share, _Sorted] = {}
        self._most_files = _Ranking()
        self._most_slow = _Ranking()
        self._most_bytes = _Ranking()
        self.by_age = _Sorted()
        self.bytes = 0

    def add(self, entry: _Entry) -> None:
        self._by_size.setdefault(entry.share, _Sorted()).add(entry.size, entry)
        self.by_age.add(entry.overdue, entry)
        self._count(entry, 1)

    def remove(self, entry: _Entry) -> None:
        files = self._by_size[entry.share]
        files.remove(entry.size, entry)
        if not files:
            del self._by_size[entry.share]
        self.by_age.remove(entry.overdue, entry)
        self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        weight = sign * (1 if entry.pending.share == HOST else 2)
        self._most_files.add(entry.share, weight)
        if entry.pending.slow:
            self._most_slow.add(entry.share, weight)
        # A file counts for a byte at least, so that the largest share has one to let go.
        self._most_bytes.add(entry.share, weight * (entry.size + 1))
        self.bytes += sign * entry.size

    def of_most_files(self) -> _Entry | None:
        """The one to let go when there are too many files."""
        return self._biggest(self._most_files)

    def of_most_slow(self) -> _Entry | None:
        """The one to let go when too many are of filesystems that may not answer."""
        return self._biggest(self._most_slow)

    def of_most_bytes(self) -> _Entry | None:
        """The one to let go when they have too many bytes."""
        return self._biggest(self._most_bytes)

    def _biggest(self, ranking: _Ranking) -> _Entry | None:
        share = ranking.largest()
        return None if share is None else self._by_size[share].last()


class _Queue:
    """Those that may be taken now, by size and by age, and those that may be later."""

    def __init__(self, lock: threading.Lock) -> None:
        self.ready: dict[str, _Sorted] = {}  # by share, in the order of their turns
        self._ready_by_age = _Sorted()
        self.later = _Sorted()
        self.changed = threading.Condition(lock)
        self._urgent: _Entry | None = None  # taken because of its age, and still in work

    def add(self, entry: _Entry) -> None:
        if entry.after:
            self.later.add(entry.after, entry)
        else:
            self._ripe(entry)
        self.changed.notify()

    def _ripe(self, entry: _Entry) -> None:
        self.ready.setdefault(entry.pending.share, _Sorted()).add(entry.size, entry)
        self._ready_by_age.add(entry.overdue, entry)

    def remove(self, entry: _Entry) -> None:
        if entry.after:
            self.later.remove(entry.after, entry)
            return
        files = self.ready[entry.pending.share]
        files.remove(entry.size, entry)
        if not files:
            del self.ready[entry.pending.share]
        self._ready_by_age.remove(entry.overdue, entry)

    def next(self, now: float, margin: float) -> _Entry | None:
        """The one to take; one at a time out of turn, if its time is over in ``margin`` s."""
        while (entry := self.later.first()) is not None and entry.after <= now:
            self.later.remove(entry.after, entry)
            entry.after = 0.0
            self._ripe(entry)
        oldest = self._ready_by_age.first()
        if self._urgent is None and oldest is not None and oldest.overdue - now <= margin:
            self._urgent = oldest
            return oldest
        if not self.ready:
            return None
        share = HOST if HOST in self.ready else next(iter(self.ready))
        files = self.ready[share] = self.ready.pop(share)  # its next turn is after all others
        return files.first()

    def rested(self, entry: _Entry) -> None:
        """It is not in work any more."""
        if self._urgent is entry:
            self._urgent = None


class PendingFiles:
    """Keeps files open until they are copied, ``seconds`` at most. Thread-safe.

    ``max_bytes`` bounds the sum of their sizes, ``max_count`` their number; the default is what
    the limit of open files (RLIMIT_NOFILE, as it is now) allows. Those in work count, too, but
    always leave half of the bytes to the others.
    """

    def __init__(
        self, seconds: float = 30.0, max_bytes: int = 2 << 30, max_count: int | None = None
    ) -> None:
        self.seconds = seconds
        self.max_bytes = max_bytes
        self.max_count = _places() if max_count is None else max_count
        self._lock = threading.Lock()
        self._queues = (_Queue(self._lock), _Queue(self._lock))  # by PendingFile.slow
        self._aged = threading.Condition(self._lock)
        self._entries: dict[PendingFile, _Entry] = {}
        self._waiting = _Waiting()
        self._bytes_in_work = 0
        self._slow = 0
        self._number = 0
        self._closed = False
        self._closers: dict[bool, Closer] = {}  # by PendingFile.slow, from the first one on
        self._finished = False

    def __len__(self) -> int:
        """How many are held, with those in work."""
        return len(self._entries)

    @property
    def held_bytes(self) -> int:
        """The sizes of all that are held."""
        return self._bytes_in_work + self._waiting.bytes

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self._closed

    @property
    def idle(self) -> bool:
        """True if nothing could be taken now; slow files do not count."""
        return not self._queues[False].ready

    @property
    def at_rest(self) -> bool:
        """True if all held files were given back for a reason, and wait for their next try."""
        with self._lock:
            return len(self._waiting.by_age) == len(self._entries) and all(
                entry.reason for entry in self._entries.values()
            )

    def put(self, pending: PendingFile) -> list[LetGo]:
        """Take over a file; returns what had to be let go for it, be it the file itself."""
        with self._lock:
            if self._closed:
                return [self._drop(pending, "the recorder is ending")]
            self._number += 1
            entry = _Entry(pending, self._number, pending.since + self.seconds)
            self._entries[pending] = entry
            self._slow += pending.slow
            self._wait(entry)
            gone = []
            while (excess := self._excess()) is not None:
                gone.append(self._let_go(*excess))
            return gone

    def take(self, timeout: float | None = None, *, slow: bool = False) -> PendingFile | None:
        """The file to copy next: of the share whose turn it is the smallest, of several the oldest.

        The host's share has each turn. One at a time goes first because its time is nearly over.
        It stays held until `done` or `give_back`. None after ``timeout`` seconds (None: no limit),
        and when closed. ``slow`` asks for those, and only those, whose filesystem may not answer.
        """
        line = self._queues[slow]
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while not self._closed:
                now = time.monotonic()
                if (entry := line.next(now, self.seconds * (1 - _URGENT))) is not None:
                    line.remove(entry)
                    self._work(entry)
                    return entry.pending
                ends = [] if until is None else [until]
                if (later := line.later.first()) is not None:
                    ends.append(later.after)
                wait = min(ends) - now if ends else None
                if until is not None and until <= now:
                    return None
                line.changed.wait(wait)
        return None

    def done(self, *files: PendingFile) -> None:
        """These are copied, or never will be: close them."""
        with self._lock:
            for pending in files:
                self._forget(self._entries[pending])
                self._drop(pending, "")

    def give_back(self, pending: PendingFile, delay: float, reason: str = "") -> None:
        """Copying failed for a ``reason`` that may pass: let it wait again until its time is over.

        It can be taken after ``delay`` seconds. When closed meanwhile it is closed.
        """
        with self._lock:
            entry = self._entries[pending]
            if self._closed:
                self._forget(entry)
                self._drop(pending, "")
                return
            self._rest(entry)
            entry.after = time.monotonic() + delay if delay > 0 else 0.0
            entry.reason = reason or entry.reason
            self._wait(entry)

    def look_again(self) -> None:
        """Let those that there was no room for be taken now: they may have been deleted."""
        with self._lock:
            for line in self._queues:
                for entry in [each for each in line.later if each.pending.noted]:
                    line.remove(entry)
                    entry.after, entry.reason = 0.0, ""
                    line.add(entry)

    def expire(self, timeout: float | None = 0.0) -> list[LetGo]:
        """Let go of those whose time is over, but not of those in work.

        Waits so many seconds (None: no limit) until there is one; returns none when closed.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                now = time.monotonic()
                gone = []
                while (
                    oldest := self._waiting.by_age.first()
                ) is not None and oldest.overdue <= now:
                    reason = oldest.reason or f"not copied within {self.seconds:g} s"
                    gone.append(self._let_go(oldest, reason))
                if gone or self._closed or (until is not None and until <= now):
                    return gone
                ends = [] if until is None else [until]
                if oldest is not None:
                    ends.append(oldest.overdue)
                self._aged.wait(min(ends) - now if ends else None)

    def close(self) -> list[LetGo]:
        """Let go of all that wait and take no more; a thread that waits in `take` gets None.

        Call it again when those in work are `done`: then it waits until all are closed.
        """
        with self._lock:
            self._closed = True
            gone = []
            while (entry := self._waiting.by_age.first()) is not None:
                gone.append(self._let_go(entry, "the recorder is ending"))
            for line in self._queues:
                line.changed.notify_all()
            self._aged.notify_all()
            self._finished = not self._entries
            closers = tuple(self._closers.values()) if self._finished else ()
        for closer in closers:
            closer.finish(_CLOSING_S)
        return gone

    # --- with the lock held ----------------------------------------------------------------

    def _excess(self) -> tuple[_Entry, str] | None:
        """One to let go, and why; None if there are not too many."""
        waiting = self._waiting
        if self._slow > max(self.max_count // _SLOW_SHARE, 1):
            reason = "too many files wait for filesystems that may not answer"
            if (entry := waiting.of_most_slow()) is not None:
                return entry, reason
        if len(self._entries) > self.max_count:
            reason = f"more than {self.max_count} files wait to be copied"
            if (entry := waiting.of_most_files()) is not None:
                return entry, reason
        room = max(self.max_bytes - self._bytes_in_work, self.max_bytes // 2)
        if waiting.bytes > room and (entry := waiting.of_most_bytes()) is not None:
            return entry, f"more than {self.max_bytes >> 20} MiB wait to be copied"
        return None

    def _wait(self, entry: _Entry) -> None:
        first = self._waiting.by_age.first()
        self._waiting.add(entry)
        self._queues[entry.pending.slow].add(entry)
        if first is None or entry.overdue < first.overdue:
            self._aged.notify()

    def _work(self, entry: _Entry) -> None:
        self._waiting.remove(entry)
        self._bytes_in_work += entry.size

    def _rest(self, entry: _Entry) -> None:
        self._bytes_in_work -= entry.size
        self._queues[entry.pending.slow].rested(entry)

    def _forget(self, entry: _Entry) -> None:
        self._rest(entry)
        self._slow -= entry.pending.slow
        del self._entries[entry.pending]

    def _let_go(self, entry: _Entry, reason: str) -> LetGo:
        self._queues[entry.pending.slow].remove(entry)
        self._work(entry)
        self._forget(entry)
        return self._drop(entry.pending, reason)

    def _drop(self, pending: PendingFile, reason: str) -> LetGo:
        fd, pending.file.fd = pending.file.fd, -1
        if self._finished:
            with contextlib.suppress(OSError):  # as in `Closer`
                os.close(fd)
            return LetGo(pending, reason)
        if pending.slow not in self._closers:
            self._closers[pending.slow] = Closer()
        self._closers[pending.slow].close((fd,))
        return LetGo(pending, reason)


def _places() -> int:
    """How many files may wait, by the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return min(max(soft - _RESERVED, _FEWEST), _MOST)
