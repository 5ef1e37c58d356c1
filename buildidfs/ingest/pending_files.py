# SPDX-License-Identifier: Apache-2.0
"""Open files that wait to be copied: bounded in time, bytes and number.

An open file keeps its filesystem alive, and a deleted one its disk space: while it waits here, the
device of an ended container cannot be detached. So each file has a time limit. If the limits of
bytes or number are exceeded, files are let go: closed without a copy, the largest first, because
one of them may have the bytes of a hundred others.

The size of a pending file is st_size. Its allocated size is no more trustworthy (a FUSE server may
report any) and says less about the time of copying, because holes are read and hashed as well. A
huge sparse file is let go first, so it harms no other user.

Closing a file may take long: the last file of a filesystem unmounts it, and a FUSE server is asked
first and may never answer. So one thread closes files, and another one closes those that may not
answer.
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
from buildidfs.shares import HOST, Share, Shares, Turns

if TYPE_CHECKING:
    from collections.abc import Iterator

# Descriptors that the process needs for other purposes: staged files of two batches, a copy for
# each file being copied, the index, sockets, files that are being closed.
_RESERVED: Final = 640
_FEWEST: Final = 64
# Each file holds an inode and its name in the kernel's memory, about 2 KiB.
_MOST: Final = 16_384
# One place in so many is for files on filesystems that may not answer.
_SLOW_SHARE: Final = 8
# A file that has waited for this part of its time goes before smaller ones.
_URGENT: Final = 0.75
# Seconds that close() waits for descriptors; the thread closes the remaining ones.
_CLOSING_S: Final = 5.0


class PendingFile(msgspec.Struct, eq=False):
    """A pinned file that was caught in use, and waits until it is copied.

    ``file`` has a sighting with the full origin; `PendingFiles` closes it. ``build_id`` is the one
    read at the catch, None if it was not read. ``key`` is the catcher's name of the file. ``since``
    is the ``time.monotonic()`` of the pin. ``slow`` is True if its filesystem may not answer.
    ``tries`` counts the attempts to copy it. ``share`` is `LiveSightings.share`.
    ``omitted`` is True if the store had no room for the file, and the file was recapturable.
    """

    file: PinnedFile
    build_id: BuildId | None
    key: bytes
    since: float
    slow: bool = False
    tries: int = 0
    share: Share = HOST
    omitted: bool = False

    @property
    def sighting(self) -> Sighting:
        """Return the sighting of the pinned file."""
        return self.file.sighting


class LetGo(msgspec.Struct, frozen=True):
    """A pending file that was closed without a copy, and the reason."""

    pending: PendingFile
    reason: str


class _Entry:
    __slots__ = ("after", "number", "overdue", "pending", "reason", "size")

    def __init__(self, pending: PendingFile, number: int, overdue: float) -> None:
        self.pending = pending
        self.number = number  # in order of arrival
        self.size = max(pending.sighting.origin.identity.size, 0)
        self.overdue = overdue  # the time at which it expires
        self.after = 0.0  # the time before which it is not taken
        self.reason = ""


class _Sorted:
    """Entries sorted by a number each, in a list: an insertion moves a few thousand of them in a
    microsecond.
    """

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


def _largest(files: _Sorted | None) -> int:
    last = None if files is None else files.last()
    return -1 if last is None else last.size


class _Waiting:
    """All waiting entries, sorted for each of the limits. ``bytes`` is the sum of their sizes.

    Files of the host count half if shares are compared.
    """

    def __init__(self) -> None:
        # Files whose filesystems may not answer are separate.
        self._by_size: dict[tuple[Share, bool], _Sorted] = {}
        self.most_files = Shares(others=2)
        self.most_slow = Shares(others=2)
        self.most_bytes = Shares(others=2)
        self.by_age = _Sorted()
        self.bytes = 0

    def add(self, entry: _Entry) -> None:
        key = entry.pending.share, entry.pending.slow
        self._by_size.setdefault(key, _Sorted()).add(entry.size, entry)
        self.by_age.add(entry.overdue, entry)
        self._count(entry, 1)

    def remove(self, entry: _Entry) -> None:
        key = entry.pending.share, entry.pending.slow
        files = self._by_size[key]
        files.remove(entry.size, entry)
        if not files:
            del self._by_size[key]
        self.by_age.remove(entry.overdue, entry)
        self._count(entry, -1)

    def _count(self, entry: _Entry, sign: int) -> None:
        share = entry.pending.share
        self.most_files.add(share, sign)
        if entry.pending.slow:
            self.most_slow.add(share, sign)
        # An empty file counts as a byte, so that the largest share always has a file to drop.
        self.most_bytes.add(share, sign * (entry.size + 1))
        self.bytes += sign * entry.size

    def biggest(self, shares: Shares) -> _Entry | None:
        """Return the largest file of the largest share: the entry to drop if a limit is
        exceeded.
        """
        share = shares.largest()
        if share is None:
            return None
        kinds = (True,) if shares is self.most_slow else (True, False)
        files = max((self._by_size.get((share, slow)) for slow in kinds), key=_largest)
        return None if files is None else files.last()


class _Queue:
    """The entries that can be taken now, by size and by age, and those that can only be taken
    later.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.turns = Turns()
        self._ready: dict[Share, _Sorted] = {}
        self._ready_by_age = _Sorted()
        self.later = _Sorted()
        self.changed = threading.Condition(lock)
        self._urgent: _Entry | None = None  # taken because of its age, and being copied

    def add(self, entry: _Entry) -> None:
        if entry.after:
            self.later.add(entry.after, entry)
        else:
            self._ripe(entry)
        self.changed.notify()

    def _ripe(self, entry: _Entry) -> None:
        self._ready.setdefault(entry.pending.share, _Sorted()).add(entry.size, entry)
        self.turns.add(entry.pending.share)
        self._ready_by_age.add(entry.overdue, entry)

    def remove(self, entry: _Entry) -> None:
        if entry.after:
            self.later.remove(entry.after, entry)
            return
        share = entry.pending.share
        files = self._ready[share]
        files.remove(entry.size, entry)
        if not files:
            del self._ready[share]
            self.turns.remove(share)
        self._ready_by_age.remove(entry.overdue, entry)

    def next(self, now: float, margin: float) -> _Entry | None:
        """Return the next entry; one at a time is taken out of turn if it expires within ``margin``
        seconds.
        """
        while (entry := self.later.first()) is not None and entry.after <= now:
            self.later.remove(entry.after, entry)
            entry.after = 0.0
            self._ripe(entry)
        oldest = self._ready_by_age.first()
        if self._urgent is None and oldest is not None and oldest.overdue - now <= margin:
            self._urgent = oldest
            return oldest
        share = HOST if HOST in self.turns else self.turns.next()
        return None if share is None else self._ready[share].first()

    def rested(self, entry: _Entry) -> None:
        """Mark an entry as no longer being copied."""
        if self._urgent is entry:
            self._urgent = None


class PendingFiles:
    """Keeps files open until they are copied, for ``seconds`` at most. Thread-safe.

    ``max_bytes`` limits the sum of their sizes, ``max_count`` their number (by default as many as
    the present RLIMIT_NOFILE allows). Files being copied count, too, but for at most half of the
    bytes.
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
        """Return the number of held files, including those being copied."""
        return len(self._entries)

    def held(self) -> list[PendingFile]:
        """Return the held files, including those being copied."""
        with self._lock:
            return list(self._entries)

    @property
    def held_bytes(self) -> int:
        """Return the sum of the sizes of all held files."""
        return self._bytes_in_work + self._waiting.bytes

    def lag_s(self) -> float:
        """Return the seconds since the pin of the file that has waited longest; 0 if none waits."""
        with self._lock:
            first = self._waiting.by_age.first()
            return 0.0 if first is None else max(time.monotonic() - first.pending.since, 0.0)

    @property
    def closed(self) -> bool:
        """True after `close` was called."""
        return self._closed

    @property
    def idle(self) -> bool:
        """True if no file can be taken now; slow files do not count."""
        return not self._queues[False].turns

    @property
    def at_rest(self) -> bool:
        """True if all held files were given back for a reason, and wait for their next attempt."""
        with self._lock:
            return len(self._waiting.by_age) == len(self._entries) and all(
                entry.reason for entry in self._entries.values()
            )

    def put(self, pending: PendingFile) -> list[LetGo]:
        """Take over a file; return the files that were dropped for it, perhaps the file itself."""
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
        """Return the next file to copy: the smallest of the share whose turn it is, or the oldest.

        The host's share has every turn. One file at a time is taken first because it expires soon.
        A file stays held until `done` or `give_back`. Returns None after ``timeout`` seconds (None:
        no limit), and after `close`. ``slow`` takes only files that may not answer.
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
        """Close files that are copied, or never will be."""
        with self._lock:
            for pending in files:
                self._forget(self._entries[pending])
                self._drop(pending, "")

    def give_back(self, pending: PendingFile, delay: float, reason: str = "") -> None:
        """Put a file back into the queue after its copy failed for a temporary ``reason``.

        It can be taken again after ``delay`` seconds, until it expires. Closes it if `close` was
        called.
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

    def recheck(self) -> None:
        """Make the omitted files available now: a file that was deleted meanwhile is not
        recapturable any more, and then gets room.
        """
        with self._lock:
            for line in self._queues:
                for entry in [each for each in line.later if each.pending.omitted]:
                    line.remove(entry)
                    entry.after, entry.reason = 0.0, ""
                    line.add(entry)

    def expire(self, timeout: float | None = 0.0) -> list[LetGo]:
        """Let go of expired files that are not being copied.

        Waits up to ``timeout`` seconds (None: no limit) for the first of them; returns none after
        `close`.
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
        """Let go of all waiting files and take no more; a thread in `take` gets None.

        A second call, when the files being copied are `done`, waits until all are closed.
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
        """Return an entry to drop, and the reason; None within the limits."""
        waiting = self._waiting
        if self._slow > max(self.max_count // _SLOW_SHARE, 1):
            reason = "too many files wait for filesystems that may not answer"
            if (entry := waiting.biggest(waiting.most_slow)) is not None:
                return entry, reason
        if len(self._entries) > self.max_count:
            reason = f"more than {self.max_count} files wait to be copied"
            if (entry := waiting.biggest(waiting.most_files)) is not None:
                return entry, reason
        room = max(self.max_bytes - self._bytes_in_work, self.max_bytes // 2)
        if waiting.bytes > room and (entry := waiting.biggest(waiting.most_bytes)) is not None:
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
    """Return the number of files that may wait, according to the limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return min(max(soft - _RESERVED, _FEWEST), _MOST)
