# SPDX-License-Identifier: Apache-2.0
"""The size limits of a store: make room for captures by removing the least valuable blobs.

`Keeper` makes room before a write that would exceed a limit, and also if the filesystem is
unexpectedly full. A recapturable file never displaces a file that is not recapturable: it is copied
only while there is room, and all recapturable blobs are removed before any other. The capture of
any other file fails only if no blob may be removed.

Sizes are bytes on disk; inodes are counted as well.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from buildidfs.errors import Recapturable, StoreFull
from buildidfs.model import BuildId, Digest, Sighting
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.locations import Journal
from buildidfs.store.retention import eviction_order, removal
from buildidfs.store.retention.eviction_order import (
    Candidate,
    Candidates,
    Evicted,
    Tally,
    can_be_had,
    had_by_host,
    recapturable,
)
from buildidfs.store.values import NewSeen, OriginRecord
from buildidfs.store.write import uses
from buildidfs.store.write.locations import JournalWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.model import Origin
    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.retention.eviction_order import AltLinks

T = TypeVar("T")

#: Attempts to write after making room. Other processes may be filling the filesystem.
_TRIES: Final = 8

#: Blobs removed before the free room is measured again.
_AT_ONCE: Final = 256

_FOLD_S: Final = 60

#: Seconds before the next search for removable blobs if the last one found none.
_IN_VAIN_S: Final = 5

#: Bytes of a blob besides its content: rows, directory entry, attributes.
_EACH_BYTES: Final = 12 << 10

#: The part of these for its rows, which are written at the commit.
_INDEX_BYTES: Final = 6 << 10

#: 1/32 of a store is reserved for files that are not recapturable, within these limits.
_HEADROOM: Final = 32
_LEAST_HEADROOM: Final = 1 << 20
_MOST_HEADROOM: Final = 1 << 30

#: A noted file is copied after a day, or if 1/2 of the store is free.
_AMPLE: Final = 2

#: Bytes of a row without content, such as one for a file without a build ID.
_ROW_BYTES: Final = 128

#: Bytes of a row of the journal.
_NOTE_BYTES: Final = 512

#: A recapturable file may displace a recapturable blob that was unused for this many seconds.
_DISPLACED_S: Final = 86_400

#: Seconds to wait for a filesystem to report removed blocks as free.
_FREED_S: Final = 0.1

_log = logging.getLogger(__name__)


class Policy(msgspec.Struct, frozen=True):
    """Limits of a store. Sizes in bytes, ages in seconds; None is no limit.

    ``max_size`` covers blobs, directories, index and names of generated code. ``keep_free`` is the
    number of bytes to leave free on the filesystem; the same share of its inodes stays free, too.
    If less is free, the store removes blobs if ``yields`` is true, and else stops growing. Blobs
    unused for ``max_age`` are always removed; blobs used or captured within ``min_age`` are kept
    unless they are recapturable.
    """

    max_size: int | None = None
    keep_free: int = 0
    yields: bool = True
    max_age: int | None = None
    min_age: int = 0


class Choice(msgspec.Struct, frozen=True):
    """A blob that a policy removes or keeps: the path at which it was last seen, True if it is
    removed, and the reason.
    """

    candidate: Candidate
    path: bytes
    goes: bool
    why: str


class Room(NamedTuple):
    """An amount of room: bytes, and inodes."""

    bytes: int
    inodes: int

    def __add__(self, other: object) -> Room:
        assert isinstance(other, Room)
        return Room(self.bytes + other.bytes, self.inodes + other.inodes)

    def __sub__(self, other: Room) -> Room:
        return Room(self.bytes - other.bytes, self.inodes - other.inodes)

    @property
    def is_none(self) -> bool:
        """True if neither a byte nor an inode remains."""
        return self.bytes <= 0 and self.inodes <= 0


_LONG_AGO: Final = (-math.inf, Room(0, 0))


class Usage(NamedTuple):
    """The room that a store takes, the free room of its filesystem, and the total."""

    taken: Room
    free: Room
    total: Room

    @property
    def counts_inodes(self) -> bool:
        """True if the filesystem has a limit of inodes."""
        return self.total.inodes > 0


class _FreeLimit:
    """A limit of bytes or inodes that stay free."""

    def __init__(self, keep: int, yields: bool) -> None:
        self.keep = keep
        self._yields = yields
        self._floor: int | None = None

    def lack(self, taken: int, free: int, new: int) -> int:
        """Return by how much the limit would be exceeded with ``new`` more; a negative number is
        room.

        A store that does not yield may keep the size that it had when enough was last free, or at
        the first call: it need not make up for space that other programs have taken since.
        """
        spare = free - self.keep
        if self._yields:
            return new - spare
        if spare >= 0 or self._floor is None:
            self._floor = taken
        return new - max(spare, self._floor - taken)


class Keeper:
    """Keeps a store within a policy. May be used from any thread; one thread at a time
    makes room.
    """

    def __init__(self, env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks) -> None:
        self.policy = policy
        self._env = env
        self._blobs = blobs
        self._lock = threading.Lock()
        self._candidates = Candidates(env, policy.min_age, altlinks)
        self._displaced = Candidates(env, policy.min_age, altlinks)
        self._displaced_in_vain: dict[int, tuple[float, Room]] = {}
        self._found: Candidate | None = None
        self._folded = -math.inf
        self._in_vain: dict[int, tuple[float, Room]] = {}
        self._why_in_vain = ""
        self._staged = Room(0, 0)
        self._counting = threading.Lock()
        usage = look(env, blobs)
        self._free_bytes = _FreeLimit(policy.keep_free, policy.yields)
        self._free_inodes = _FreeLimit(_inodes_kept(policy, usage), policy.yields)
        self._lack(Room(0, 0))
        self._tally = Tally()

    # --- for writers -----------------------------------------------------------------------

    def staging(
        self, origin: Origin | None, size: int, work: Callable[[Callable[[int], None]], Staged]
    ) -> Staged:
        """Run ``work``, which writes a file of about ``size`` bytes, after making room for it.

        ``work`` gets a function with which it requests further bytes. Raises the errors of
        ``work``; OSError (EFBIG) for a file larger than the store may become; `Recapturable` if
        there is no room, but the file still exists at ``origin``; `StoreFull` if no blob may be
        removed.
        """
        asked = size

        def more(extra: int) -> None:
            nonlocal asked
            asked += extra
            self._admit(origin, extra, size=asked)

        self._admit(origin, size, size=size)
        losses = self.losses()
        staged = self._repeated(size, lambda: work(more), ())
        staged.losses = losses
        self._count(staged)
        return staged

    def writing(
        self, work: Callable[[], T], staged: Sequence[Staged], drop: Callable[[], bool]
    ) -> T:
        """Run ``work``, which commits staged bytes, after making room for their rows.

        ``drop`` drops the recapturable files, and returns True if there were any. Raises the errors
        of ``work``, and `StoreFull` if no blob may be removed.
        """
        lack = self._lack(Room(0, 0))
        if not lack.is_none:
            with self._lock:
                self._prepare()
                lack -= self._remove_recapturable(lack)
            if lack.is_none or not drop() or not self._lack(Room(0, 0)).is_none:
                self._make_room(Room(0, 0))
        return self._repeated(0, work, staged)

    def settle(self, staged: Sequence[Staged]) -> None:
        """Stop counting staged bytes, because the index counts them now."""
        for each in staged:
            each.uncount()

    def has_room_for_rows(self, count: int) -> bool:
        """Return True if there is room for that many rows that are not essential."""
        return self._lack(Room(self._env.bytes_used() + count * _ROW_BYTES, 0)).is_none

    def has_room_for_notes(self, count: int) -> bool:
        """Return True if there is room for so many journal entries, or a recapturable blob to evict
        for them.
        """
        lack = self._lack(Room(self._env.bytes_used() + count * _NOTE_BYTES, 0))
        if lack.is_none:
            return True
        with self._lock:
            self._displaced.rewind()
            return (lack - _sum(list(_worth(self._displaced.again(), lack)))).is_none

    def losses(self) -> int:
        """The number of evicted blobs that were not recapturable, since the store was made."""
        with self._env.read() as txn:
            return eviction_order.load(self._env, txn).losses

    def take_tally(self) -> Tally:
        """Return the tally, and begin a new one."""
        with self._counting:
            tally, self._tally = self._tally, Tally()
        return tally

    @property
    def tally(self) -> Tally:
        """The removals since `take_tally` was called."""
        return self._tally

    def _repeated(self, size: int, work: Callable[[], T], staged: Sequence[Staged]) -> T:
        for _ in range(_TRIES):
            try:
                return work()
            except Recapturable:
                raise
            except StoreFull as error:
                if any(each.doubtful for each in staged):
                    raise
                if not self._shrink(size):
                    raise self._hopeless(error) from error
        return work()

    def _shrink(self, size: int) -> bool:
        """Make room for ``size`` bytes on a full filesystem; return False if no blob may be
        removed.
        """
        with self._lock:
            return self._evict(Room(size, 1))

    def enforce(self) -> Tally:
        """Remove blobs that are too old, and blobs beyond the limits; return the present
        `tally`.
        """
        with self._lock:
            self._prepare()
            self._expire()
            lack = self._lack(Room(0, 0))
            if not lack.is_none:
                self._evict(lack, in_part=True)
        return self._tally

    @property
    def most_staged(self) -> int:
        """Return the maximum number of staged bytes that should wait for a commit: eviction cannot
        free them.
        """
        return self._headroom(look(self._env, self._blobs)).bytes

    # --- limits ----------------------------------------------------------------------------

    def _admit(self, origin: Origin | None, new: int, *, size: int) -> None:
        """Make room for ``new`` bytes of a file of ``size`` bytes."""
        wanted = Room(new + _EACH_BYTES, 1)
        usage = look(self._env, self._blobs)
        lack = self._lack(wanted, usage)
        with self._env.read() as txn:
            row = eviction_order.load(self._env, txn)
        headroom = self._headroom(usage) + Room(row.reserved(), 0)
        if (lack + headroom).is_none:
            ample = Room(self._most(usage) // _AMPLE, 0)
            if not row.noted or (lack + ample).is_none or not self._stays_noted(origin):
                return
            raise Recapturable("there was no room when it was seen before")
        if origin is not None and can_be_had(self._env, origin):
            idle_s = 0 if eviction_order.is_fresh(origin) else _DISPLACED_S
            if not self._displace(lack + headroom, idle_s):
                raise Recapturable(f"no room for {size} bytes that can be captured again")
        elif not lack.is_none:
            self._refuse_giant(size, usage)
            at_rest = origin is not None and origin.scanner == eviction_order.AT_REST
            self._make_room(wanted, idle_s=_DISPLACED_S if at_rest else 0)

    def _stays_noted(self, origin: Origin | None) -> bool:
        """Return True for a file that was noted within a day and is still on the host.

        A repeated scan must end in the same state, even if the removal of a large blob left room.
        """
        if origin is None:
            return False
        if had_by_host(self._env, origin):
            return True
        rows = Journal(self._env).at(origin.mnt_ns_id, origin.path, None)
        since = time.time_ns() - _DISPLACED_S * 1_000_000_000
        is_noted = any(row.noted == origin.identity and row.first_seen_ns >= since for row in rows)
        return is_noted and bool(recapturable(origin))

    def _most(self, usage: Usage) -> int:
        """Return the number of bytes that the store may take."""
        most = usage.taken.bytes + max(usage.free.bytes - self.policy.keep_free, 0)
        return most if self.policy.max_size is None else min(most, self.policy.max_size)

    def _headroom(self, usage: Usage) -> Room:
        """Return the room reserved for files that are not recapturable, and for growth of the
        index.

        A transaction rewrites each page of the index that it touches, perhaps most of them.
        """
        share = self._most(usage) // _HEADROOM
        share = min(max(share, _LEAST_HEADROOM), _MOST_HEADROOM) + self._env.bytes_used()
        inodes = max(usage.free.inodes - self._free_inodes.keep, 0) // _HEADROOM
        return Room(share, inodes)

    def _make_room(self, wanted: Room, idle_s: int = 0) -> None:
        """Make room by removing blobs unused for ``idle_s`` seconds."""
        if self._lack(wanted).is_none:
            return
        with self._lock:
            for _ in range(_TRIES):  # other processes write meanwhile
                lack = self._lack(wanted)
                if lack.is_none:
                    return
                if not self._evict(lack, idle_s):
                    raise self._hopeless(None, idle_s)

    def _lack(self, new: Room, usage: Usage | None = None) -> Room:
        """Return by how much the limits would be exceeded with ``new`` more; negative numbers are
        room.
        """
        usage = usage or look(self._env, self._blobs)
        rows = self._staged.inodes * _INDEX_BYTES
        policy, taken = self.policy, usage.taken + self._staged + Room(rows, 0)
        free = usage.free - Room(rows, 0)
        lack, inodes = -(1 << 62), -(1 << 62)
        if policy.keep_free:
            lack = self._free_bytes.lack(taken.bytes, free.bytes, new.bytes)
            if usage.counts_inodes:
                inodes = self._free_inodes.lack(taken.inodes, usage.free.inodes, new.inodes)
        if policy.max_size is not None:
            lack = max(lack, taken.bytes + new.bytes - policy.max_size)
        return Room(lack, inodes)

    def _count(self, staged: Staged) -> None:
        """Count staged bytes until they are committed or dropped."""
        room = Room(staged.disk_bytes(), 1)
        with self._counting:
            self._staged += room

        def uncount() -> None:
            with self._counting:
                self._staged -= room

        staged.counted = uncount

    def _refuse_giant(self, size: int, usage: Usage) -> None:
        """Refuse a file that would not fit after any removal. Raises OSError (EFBIG)."""
        policy = self.policy
        most = usage.total.bytes - policy.keep_free
        if policy.max_size is not None:
            most = min(most, policy.max_size - self._env.bytes_used())
        if size > max(most, 0):
            raise OSError(errno.EFBIG, f"its {size} bytes are more than the store may ever take")

    def _hopeless(self, error: StoreFull | None, idle_s: int = 0) -> StoreFull:
        """Return the error for a store that has no room and cannot make any."""
        why = self._why_in_vain
        if idle_s:
            why = "what was used within a day does not make room for a file in a directory"
        if error is not None:
            return StoreFull(f"{error}; {why}")
        store, usage = f"store {printable(self._env.root)}", look(self._env, self._blobs)
        if self.policy.max_size is not None:
            over = usage.taken.bytes + self._staged.bytes - self.policy.max_size
            if over + _EACH_BYTES > 0 or usage.free.bytes > self.policy.keep_free:
                return StoreFull(f"{store} is as large as it may be: {why}")
        what = "space"
        if usage.counts_inodes and usage.free.inodes <= self._free_inodes.keep:
            what = "inodes"
        return StoreFull(f"{store}: no {what} left on its filesystem: {why}")

    # --- removing --------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._candidates.refresh()
        if time.monotonic() - self._folded > _FOLD_S:
            uses.fold(self._env)
            self._folded = time.monotonic()

    def _expire(self) -> None:
        if self.policy.max_age is None:
            return
        rest = self._candidates.oldest(expiry(self.policy.max_age))
        while batch := list(itertools.islice(rest, _AT_ONCE)):
            done = removal.remove(self._env, self._blobs, [each.digest for each in batch])
            self._tally.aged += done.blobs
            self._tally.aged_bytes += done.bytes
            self._tally.ids += done.ids
            _log.info("removed %d blobs, %d bytes, by max-age", done.blobs, done.bytes)

    def _evict(self, lack: Room, idle_s: int = 0, *, in_part: bool = False) -> bool:
        """Remove blobs that take at least ``lack``; return False if nothing was removed.

        Blobs used within the last ``idle_s`` seconds are kept, except recapturable ones. If the
        evictable blobs take less than ``lack``, none of those that are not recapturable is removed,
        unless ``in_part``. Blobs that other processes remove at the same time count as well.
        """
        self._prepare()
        free = self._blobs.free_bytes()
        beyond = self._headroom(look(self._env, self._blobs))
        freed = self._remove_recapturable(lack + beyond)
        if not (lack - freed).is_none:
            lost = self._remove_losses(lack - freed, idle_s, in_part)
            if lost is None:
                return freed.inodes > 0
            freed += lost
        self._wait_until_freed(free, freed.bytes)
        return True

    def _remove_recapturable(self, wanted: Room) -> Room:
        """Remove recapturable blobs until ``wanted`` is free; return the room that they took."""
        freed = Room(0, 0)
        found, self._found = self._found, None
        walk = itertools.chain([found] if found else [], self._candidates.again())
        while batch := list(itertools.islice(_worth(walk, wanted - freed), _AT_ONCE)):
            freed += self._remove(batch)
        self._candidates.lower()
        return freed

    def _remove_losses(self, lack: Room, idle_s: int, in_part: bool) -> Room | None:
        """Remove blobs that are not recapturable, if that frees enough; return the room that they
        took.

        Returns None if it does not free enough. Nothing is removed if the store has a recapturable
        blob at that moment, because another process has just committed one.
        """
        chosen = self._chosen(lack, idle_s, in_part)
        if chosen is None:
            return None

        def nothing_else() -> bool:
            self._found = next(self._candidates.again(), None)
            return self._found is None

        return self._remove(chosen, nothing_else)

    def _chosen(self, lack: Room, idle_s: int, in_part: bool) -> list[Candidate] | None:
        """Return the evictable blobs with the oldest uses that free enough room; None if all of
        them together do not.
        """
        since, least = self._in_vain.get(idle_s, _LONG_AGO)
        if time.monotonic() - since < _IN_VAIN_S and (
            lack.bytes >= least.bytes and lack.inodes >= least.inodes
        ):
            return None
        for _ in range(2):
            before = int(time.time()) - idle_s - schema.USE_SLACK_S if idle_s else None
            walk = _worth(self._candidates.oldest(before, classes=(1,)), lack)
            chosen = list(walk)
            if (lack - _sum(chosen)).is_none:
                return chosen
            # The walk has passed a file that was seen long ago and recorded just now.
            pinned, young = self._candidates.kept_pinned, self._candidates.kept_young
            self._candidates.rewind()
            if (found := next(self._candidates.again(), None)) is not None:
                self._found = found
                return []  # such a blob is evicted before any of them
        if in_part:
            return chosen
        self._in_vain[idle_s] = time.monotonic(), lack
        if idle_s:
            return None
        self._why_in_vain = _in_vain(_sum(chosen).bytes, pinned, young)
        return None

    def _displace(self, lack: Room, idle_s: int) -> bool:
        """Remove recapturable blobs unused for ``idle_s`` seconds; return False if that cannot free
        enough.
        """
        since, least = self._displaced_in_vain.get(idle_s, _LONG_AGO)
        if time.monotonic() - since < _FOLD_S and lack.bytes >= least.bytes:
            return False
        with self._lock:
            self._displaced.rewind()
            before = int(time.time()) - idle_s - schema.USE_SLACK_S if idle_s else None
            chosen = list(_worth(self._displaced.again(before), lack))
            self._displaced.lower()
            if not (lack - _sum(chosen)).is_none:
                self._displaced_in_vain[idle_s] = time.monotonic(), lack
                return False
            free = self._blobs.free_bytes()
            self._wait_until_freed(free, self._remove(chosen).bytes)
            return True

    def _remove(self, chosen: Sequence[Candidate], check: Callable[[], bool] | None = None) -> Room:
        """Remove blobs to make room; return the room that they took.

        ``check`` runs while no process commits, and may forbid the removal.
        """
        gone, entries = self._described(chosen)

        def write_down(txn: Txn, removed: Sequence[Digest]) -> None:
            journal = JournalWriter(self._env, txn)
            for digest in removed:
                journal.add(entries.get(digest, ()))
            row = eviction_order.load(self._env, txn)
            row.add(gone[digest] for digest in removed)
            row.noted += journal.noted
            eviction_order.save(self._env, txn, row)

        freed = Room(0, 0)
        for start in range(0, len(chosen), _AT_ONCE):
            batch = [each.digest for each in chosen[start : start + _AT_ONCE]]
            done = removal.remove(self._env, self._blobs, batch, write_down=write_down, check=check)
            freed += Room(done.bytes, done.blobs)
            removed = [gone[Digest(digest)] for digest in done.digests]
            with self._counting:
                self._tally.add(removed)
                self._tally.ids += done.ids
            _tell(removed)
        return freed

    def _described(
        self, chosen: Sequence[Candidate]
    ) -> tuple[dict[Digest, Evicted], dict[Digest, list[NewSeen]]]:
        """Describe blobs and make journal entries.

        A recapturable blob gets an entry for each of its places, which are noted from then on.
        """
        now = int(time.time())
        gone: dict[Digest, Evicted] = {}
        entries: dict[Digest, list[NewSeen]] = {}
        for each in chosen:
            places = self._candidates.places(each)
            path = places[0].origin.path if places else b""
            build_id = each.build_ids[0] if each.build_ids else None
            gone[each.digest] = Evicted(bytes(build_id or b""), path, each.size, now, each.again)
            if build_id is not None:
                named = places if each.again else places[:1]
                found = (self._entry(place, build_id, bool(each.again)) for place in named)
                entries[each.digest] = [entry for entry in found if entry is not None]
        return gone, entries

    def _entry(self, place: OriginRecord, build_id: BuildId, noted: bool) -> NewSeen | None:
        """Return a journal entry for a blob that was seen at a place; None if the journal has it
        already.
        """
        origin = place.origin
        known = Journal(self._env).at(origin.mnt_ns_id, origin.path, None)
        if any(row.build_id == build_id and (row.noted or not noted) for row in known):
            return None
        return NewSeen(Sighting(origin, place.last_seen_ns), build_id, boot=b"", noted=noted)

    def _wait_until_freed(self, before: int, size: int) -> None:
        """Wait a little until the filesystem has freed the space of removed files.

        Some filesystems free it later. Without the wait, more blobs than necessary would be
        removed.
        """
        until = time.monotonic() + _FREED_S
        while self._blobs.free_bytes() < before + size * 3 // 4 and time.monotonic() < until:
            time.sleep(_FREED_S / 20)


def look(env: Environment, blobs: Blobs) -> Usage:
    """Measure a store and its filesystem."""
    with env.read() as txn:
        counters = load_counters(env, txn)
    usage = blobs.filesystem()
    return Usage(
        Room(counters.stored_bytes + env.bytes_used() + blobs.other_bytes(), counters.blobs),
        Room(usage.f_bavail * usage.f_frsize, usage.f_favail),
        Room(usage.f_blocks * usage.f_frsize, usage.f_files),
    )


def _inodes_kept(policy: Policy, usage: Usage) -> int:
    """Return the number of inodes to keep free: the same share as that of the bytes."""
    return usage.total.inodes * policy.keep_free // max(usage.total.bytes, 1)


def lacks(env: Environment, blobs: Blobs, policy: Policy) -> dict[str, int]:
    """Return by how much each limit is exceeded, in bytes or inodes, by the name of the limit.

    A negative number is room.
    """
    usage = look(env, blobs)
    found = {"keep-free": -1}
    if policy.keep_free and policy.yields:
        found["keep-free"] = policy.keep_free - usage.free.bytes
        if usage.counts_inodes:
            found[INODES] = _inodes_kept(policy, usage) - usage.free.inodes
    if policy.max_size is not None:
        found["max-size"] = usage.taken.bytes - policy.max_size
    return found


INODES: Final = "keep-free (inodes)"
"""The name of the limit of `lacks` that is not in bytes."""


def expiry(max_age: int) -> int:
    """Return the time (Unix, s) before which last uses are too old; uses are known to the hour."""
    return int(time.time()) - max_age - schema.USE_SLACK_S


def plan(
    env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks, *, stays: bool
) -> Iterator[Choice]:
    """Yield the blobs that a policy removes now, in this order; then, with ``stays``, those that it
    keeps.
    """
    candidates = Candidates(env, policy.min_age, altlinks)
    chosen: set[Digest] = set()
    lack = lacks(env, blobs, policy)

    def limit() -> str:
        return max(lack, key=lambda name: lack[name])

    def going(candidate: Candidate, why: str) -> Choice:
        for name in lack:
            lack[name] -= 1 if name == INODES else candidate.size
        chosen.add(candidate.digest)
        return Choice(candidate, candidates.path(candidate), True, why)

    if policy.max_age is not None:
        for candidate in candidates.oldest(expiry(policy.max_age)):
            yield going(candidate, "max-age")
    for walk in (candidates.again(), candidates.oldest()):
        for candidate in walk if lack[limit()] > 0 else ():
            if candidate.digest not in chosen:
                yield going(candidate, f"{limit()}; {candidate.again or 'oldest use'}")
            if lack[limit()] <= 0:
                break
    if stays:
        for candidate in Candidates(env, policy.min_age, altlinks).everything():
            if candidate.digest not in chosen:
                why = candidate.stays or "within the limits"
                yield Choice(candidate, candidates.path(candidate), False, why)


def _worth(candidates: Iterable[Candidate], wanted: Room) -> Iterator[Candidate]:
    """Yield the first blobs that together free the room, each blob once."""
    seen: set[Digest] = set()
    for candidate in candidates if not wanted.is_none else ():
        if candidate.digest not in seen:
            seen.add(candidate.digest)
            wanted -= Room(candidate.size, 1)
            yield candidate
        if wanted.is_none:  # before the next blob is fetched, which would count as examined
            return


def _sum(candidates: Sequence[Candidate]) -> Room:
    return Room(sum(each.size for each in candidates), len(candidates))


def _in_vain(size: int, pinned: int, young: bool) -> str:
    """Return the reason why no room can be made."""
    kept = []
    if pinned:
        kept.append(f"{pinned} blob{' is' if pinned == 1 else 's are'} pinned")
    if young:
        kept.append("the others were used within min-age")
    if size:
        why = "all that may be removed is too little"
        return f"{why}; {', '.join(kept)}" if kept else why
    return f"nothing may be removed ({', '.join(kept) or 'there is nothing else in it'})"


def _tell(gone: Sequence[Evicted]) -> None:
    """Name the losses in the log, and count the rest."""
    again = [each for each in gone if each.again]
    if again:
        size = sum(each.size for each in again)
        _log.info("removed %d blobs, %d bytes, that can be captured again", len(again), size)
    for each in gone:
        if not each.again:
            what = (each.build_id.hex(), printable(each.path), each.size)
            _log.info("removed %s %s, %d bytes, which cannot be captured again", *what)
