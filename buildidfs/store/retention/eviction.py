# SPDX-License-Identifier: Apache-2.0
"""The size limits of a store: make room for captures by removing the least valuable blobs.

`plan` has the order, `Evictor` decides how much, and when. At the limit (the high watermark) it
removes blobs until there is a margin below the limit (the low watermark), so that plans are rare. A
recapturable file never displaces one that is not: it is copied only below the low watermark. So it
cannot take the room that a loss has made.

Sizes are bytes on disk; inodes are counted as well.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from buildidfs.errors import Recapturable, StoreFull
from buildidfs.model import BuildId, Digest, Sighting
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.locations import Journal, is_recent, share_at
from buildidfs.store.index.queries import Index
from buildidfs.store.location_rows import Removal
from buildidfs.store.retention import removal
from buildidfs.store.retention.plan import (
    Choice,
    Planner,
    is_spare,
    recapturable_place,
)
from buildidfs.store.values import NO_ROOM, Evicted, Evictions, NewSeen, OriginRecord, Room, Tally
from buildidfs.store.write import uses
from buildidfs.store.write.locations import JournalWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from buildidfs.model import Origin
    from buildidfs.shares import Share
    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.retention.plan import AltLinks

T = TypeVar("T")

#: Attempts to write after making room. Other processes may be filling the filesystem.
_TRIES: Final = 8

#: Blobs removed before the free room is measured again.
_AT_ONCE: Final = 256

_FOLD_S: Final = 60

#: Seconds before the next plan if the last one freed too little. If nearly all blobs of a large
#: store are pinned, each capture would otherwise look at all of them.
_IN_VAIN_S: Final = 5

#: Bytes of a blob besides its content: rows, directory entry, attributes.
_EACH_BYTES: Final = 12 << 10

#: The part of these for its rows, which are written at the commit.
_INDEX_BYTES: Final = 6 << 10

#: The low watermark lies 1/32 of the store below the limit. So the cost of plans for each capture
#: does not grow with the store.
_MARGIN: Final = 32
_LEAST_MARGIN: Final = 1 << 20

_MOST_STAGED: Final = 1 << 30

#: Bytes of a row without content, such as one for a file without a build ID.
_ROW_BYTES: Final = 128

#: Bytes of a row of the journal.
_NOTE_BYTES: Final = 512

#: A recapturable file replaces only recapturable blobs that were unused for this many seconds.
#: Otherwise a scan of more than fits would remove its own captures, and begin anew each time.
_IDLE_S: Final = 86_400

#: Seconds to wait for recapturable files in other threads, before a blob is lost for them.
_STAGED_S: Final = 0.5

#: Seconds to wait for a filesystem to report removed blocks as free.
_FREED_S: Final = 0.1

#: The lack of a store without a limit.
_ANY_ROOM: Final = -(1 << 62)

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


KEEP_FREE: Final = "keep-free"
INODES: Final = "keep-free (inodes)"
"""The name of the limit that is not in bytes."""


class _Limits:
    """The limits of a policy for a store on a filesystem; ``usage`` is its first measurement."""

    def __init__(self, policy: Policy, usage: Usage) -> None:
        self._max_size = policy.max_size
        inodes_kept = usage.total.inodes * policy.keep_free // max(usage.total.bytes, 1)
        self._free_bytes = _FreeLimit(policy.keep_free, policy.yields)
        self.free_inodes = _FreeLimit(inodes_kept, policy.yields)

    def exceeded(self, usage: Usage, new: Room = NO_ROOM) -> dict[str, int]:
        """Return by how much each limit would be exceeded with ``new`` more, in bytes or inodes, by
        the name of the limit. A negative number is room.
        """
        taken, free = usage.taken, usage.free
        found = {}
        if self._free_bytes.keep:
            found[KEEP_FREE] = self._free_bytes.lack(taken.bytes, free.bytes, new.bytes)
            if usage.counts_inodes:
                found[INODES] = self.free_inodes.lack(taken.inodes, free.inodes, new.inodes)
        if self._max_size is not None:
            found["max-size"] = taken.bytes + new.bytes - self._max_size
        return found


def _lack(exceeded: dict[str, int]) -> Room:
    """Return the room that a store lacks for all limits."""
    sizes = [size for name, size in exceeded.items() if name != INODES]
    return Room(max(sizes, default=_ANY_ROOM), exceeded.get(INODES, _ANY_ROOM))


class Evictor:
    """Keeps a store within a policy. May be used from any thread; one thread at a time
    makes room.
    """

    def __init__(self, env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks) -> None:
        self.policy = policy
        self._env = env
        self._blobs = blobs
        self._lock = threading.Lock()
        self._planner = _planner(env, policy, altlinks)
        self._folded = -math.inf
        self._in_vain = (-math.inf, NO_ROOM)
        self._why_in_vain = ""
        self._staged = NO_ROOM
        self._staged_by: Counter[Share] = Counter()
        self._staged_at: dict[Staged, Origin] = {}
        self._counting = threading.Lock()
        self._limits = _Limits(policy, look(env, blobs))
        self._lack(NO_ROOM)
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
        requested = size

        def more(extra: int) -> None:
            nonlocal requested
            requested += extra
            self._admit(origin, extra, size=requested)

        self._admit(origin, size, size=size)
        staged = self._repeated(lambda: work(more), lambda: self._make_room_on_disk(origin, size))
        self._count(staged, origin)
        return staged

    def writing(
        self, work: Callable[[], T], staged: Sequence[Staged], drop: Callable[[], None]
    ) -> T:
        """Run ``work``, which commits staged bytes, after making room for their rows.

        If the store has no recapturable blob to remove, ``drop`` drops the recapturable files that
        were staged; only then are others removed. Raises the errors of ``work``, and `StoreFull` if
        no blob may be removed.
        """
        lack = self._lack_of_commit()
        if not lack.is_none:
            with self._lock:
                self._prepare()
                self._follow(self._planner.plan(lack, recapturable_only=True))
            if not self._lack_of_commit().is_none:
                drop()
                self._make_room(NO_ROOM)
        return self._repeated(work, lambda: self._make_room_on_disk(None, 0), staged)

    def settle(self, staged: Sequence[Staged]) -> None:
        """Stop counting staged bytes, because the index counts them now."""
        for each in staged:
            each.uncount()

    def has_room_for_rows(self, count: int, *, of_journal: bool = False) -> bool:
        """Return True if there is room for that many rows for which no blob has to go."""
        size = count * (_NOTE_BYTES if of_journal else _ROW_BYTES)
        return self._lack(Room(self._env.bytes_used() + size, 0)).is_none

    def take_tally(self) -> Tally:
        """Return the tally, and begin a new one."""
        with self._counting:
            taken, self._tally = self._tally, Tally()
        return taken

    @property
    def tally(self) -> Tally:
        """The removals since `take_tally` was called."""
        return self._tally

    def _repeated(
        self, work: Callable[[], T], make_room: Callable[[], bool], staged: Sequence[Staged] = ()
    ) -> T:
        """Run ``work``, and ``make_room`` whenever the filesystem is full."""
        for _ in range(_TRIES):
            try:
                return work()
            except Recapturable:
                raise
            except StoreFull as error:
                if any(each.doubtful for each in staged):
                    raise
                if not make_room():
                    raise self._hopeless(error) from error
        return work()

    def _make_room_on_disk(self, origin: Origin | None, size: int) -> bool:
        """Make room for a file of an origin on a full filesystem; return False if that is
        impossible. Raises `Recapturable`.

        Files that were admitted one by one may not fit together.
        """
        lack = Room(size, 1)
        if origin is not None and recapturable_place(self._env, origin):
            if not self._replace(lack, 0 if is_recent(origin) else _IDLE_S):
                raise Recapturable(f"no room for {size} bytes that can be captured again")
            return True
        if self._spare_losses(lack):
            return True
        with self._lock:
            return self._evict(lack)

    def enforce(self) -> Tally:
        """Remove blobs that are too old, and blobs beyond the limits; return the present
        `tally`.
        """
        with self._lock:
            self._prepare()
            self._follow(self._planner.plan(self._lack(NO_ROOM), in_part=True))
        return self._tally

    @property
    def most_staged(self) -> int:
        """Return the maximum number of staged bytes that should wait for a commit: eviction cannot
        free them.
        """
        return min(self._margin(look(self._env, self._blobs)).bytes, _MOST_STAGED)

    # --- limits ----------------------------------------------------------------------------

    def _admit(self, origin: Origin | None, new: int, *, size: int) -> None:
        """Make room for ``new`` bytes of a file of ``size`` bytes."""
        wanted = Room(new + _EACH_BYTES, 1)
        usage = look(self._env, self._blobs)
        lack = self._lack(wanted, usage)
        # A transaction rewrites each page of the index that it touches, perhaps most of them.
        margin = self._margin(usage) + Room(self._env.bytes_used(), 0)
        if (lack + margin).is_none:
            return
        if origin is not None and recapturable_place(self._env, origin):
            if not self._replace(lack + margin, 0 if is_recent(origin) else _IDLE_S):
                raise Recapturable(f"no room for {size} bytes that can be captured again")
        elif not lack.is_none:
            self._refuse_giant(size, usage)
            self._make_room(wanted)

    def _margin(self, usage: Usage) -> Room:
        """Return the room between the watermarks."""
        most = usage.taken.bytes + max(usage.free.bytes - self.policy.keep_free, 0)
        if self.policy.max_size is not None:
            most = min(most, self.policy.max_size)
        return Room(max(most // _MARGIN, _LEAST_MARGIN), usage.taken.inodes // _MARGIN)

    def _make_room(self, wanted: Room) -> None:
        """Make room by removing blobs. Raises `StoreFull`."""
        while not (lack := self._lack(wanted)).is_none and self._spare_losses(lack):
            pass
        if lack.is_none:
            return
        with self._lock:
            for _ in range(_TRIES):  # other processes write meanwhile
                lack = self._lack(wanted)
                if lack.is_none:
                    return
                if not self._evict(lack):
                    raise self._hopeless(None)

    def _spare_losses(self, lack: Room) -> bool:
        """Free room without a loss, while recapturable files are staged; return False if that is
        impossible.

        The blobs of other files would have to go for those that are in the hands of other threads.
        """
        until = time.monotonic() + _STAGED_S
        while self._staged_at:
            before = self._staged
            with self._counting:
                staged = list(self._staged_at.items())
            spare = [each for each, origin in staged if is_spare(self._env, origin)]
            if not spare:
                return False
            with self._lock:
                self._prepare()
                freed, _ = self._follow(self._planner.plan(lack, recapturable_only=True))
            taken_back = [each for each in spare if each.take_back()]
            if freed != NO_ROOM or taken_back or self._staged.bytes < before.bytes:
                return True
            if time.monotonic() > until:
                return False
            time.sleep(_STAGED_S / 100)
        return False

    def _lack(self, new: Room, usage: Usage | None = None) -> Room:
        """Return by how much the limits would be exceeded with ``new`` more; negative numbers are
        room.
        """
        usage = usage or look(self._env, self._blobs)
        staged, rows = self._staged, Room(self._staged.inodes * _INDEX_BYTES, 0)
        taken, free = usage.taken + staged + rows, usage.free - rows
        return _lack(self._limits.exceeded(usage._replace(taken=taken, free=free), new))

    def _lack_of_commit(self) -> Room:
        """Return by how much the limits are exceeded, or the filesystem lacks free space for the
        pages of the index that a transaction rewrites before it frees the old ones.
        """
        usage = look(self._env, self._blobs)
        lack = self._lack(NO_ROOM, usage)
        pages = min(self._env.bytes_used(), _LEAST_MARGIN)
        return Room(max(lack.bytes, pages - usage.free.bytes), lack.inodes)

    def _count(self, staged: Staged, origin: Origin | None) -> None:
        """Count staged bytes until they are committed or dropped."""
        size = staged.disk_bytes()
        share = None if origin is None else share_at(origin)
        self._add_staged(share, Room(size, 1))
        if origin is not None:
            self._staged_at[staged] = origin

        def uncount() -> None:
            self._staged_at.pop(staged, None)
            self._add_staged(share, Room(-size, -1))

        staged.counted = uncount

    def _add_staged(self, share: Share | None, room: Room) -> None:
        with self._counting:
            self._staged += room
            if share is not None:
                self._staged_by[share] += room.bytes
            if not self._staged.inodes:
                self._staged_by.clear()

    def _refuse_giant(self, size: int, usage: Usage) -> None:
        """Refuse a file that would not fit after any removal. Raises OSError (EFBIG)."""
        policy = self.policy
        most = usage.total.bytes - policy.keep_free
        if policy.max_size is not None:
            most = min(most, policy.max_size - self._env.bytes_used())
        if size > max(most, 0):
            raise OSError(errno.EFBIG, f"its {size} bytes are more than the store may ever take")

    def _hopeless(self, error: StoreFull | None) -> StoreFull:
        """Return the error for a store that has no room and cannot make any."""
        why = self._why_in_vain
        if error is not None:
            return StoreFull(f"{error}; {why}")
        store, usage = f"store {printable(self._env.root)}", look(self._env, self._blobs)
        if self.policy.max_size is not None:
            over = usage.taken.bytes + self._staged.bytes - self.policy.max_size
            if over + _EACH_BYTES > 0 or usage.free.bytes > self.policy.keep_free:
                return StoreFull(f"{store} is as large as it may be: {why}")
        what = "space"
        if usage.counts_inodes and usage.free.inodes <= self._limits.free_inodes.keep:
            what = "inodes"
        return StoreFull(f"{store}: no {what} left on its filesystem: {why}")

    # --- removing --------------------------------------------------------------------------

    def _prepare(self) -> None:
        if time.monotonic() - self._folded > _FOLD_S:
            uses.fold(self._env)
            self._folded = time.monotonic()

    def _evict(self, lack: Room) -> bool:
        """Remove blobs that take at least ``lack``; return False if that is impossible.

        Blobs that other processes remove at the same time count as well.
        """
        since, least = self._in_vain
        is_more = lack.bytes >= least.bytes and lack.inodes >= least.inodes
        if is_more and time.monotonic() - since < _IN_VAIN_S:
            return False
        self._prepare()
        margin = self._margin(look(self._env, self._blobs))
        margin = Room(margin.bytes * (lack.bytes > 0), margin.inodes * (lack.inodes > 0))
        with self._counting:
            staged = dict(self._staged_by)
        freed, is_valid = self._follow(self._planner.plan(lack, margin, staged=staged))
        if freed == NO_ROOM and is_valid:
            self._in_vain = time.monotonic(), lack
            self._why_in_vain = _in_vain(self._planner)
        return freed != NO_ROOM or not is_valid

    def _replace(self, lack: Room, idle_s: int) -> bool:
        """Remove recapturable blobs that were unused for ``idle_s`` seconds; return False if that
        cannot free ``lack``.
        """
        with self._lock:
            before = int(time.time()) - idle_s - schema.USE_SLACK_S if idle_s else None
            chosen: list[Choice] = []
            for choice in self._planner.recapturable(before):
                chosen.append(choice)
                lack -= choice.candidate.room
                if lack.is_none:
                    self._follow(iter(chosen))
                    return True
            self._planner.lower()
            return False

    def _follow(self, plan: Iterator[Choice]) -> tuple[Room, bool]:
        """Remove the blobs of a plan; return the room that they took, and False if the plan became
        invalid.

        A plan with losses is invalid as soon as another process has committed a recapturable blob.
        """
        before, freed, is_valid = self._blobs.free_bytes(), NO_ROOM, True
        while is_valid and (batch := list(itertools.islice(plan, _AT_ONCE))):
            has_losses = any(each.is_loss for each in batch)
            done = self._remove(batch, self._planner.is_complete if has_losses else None)
            is_valid = done is not None
            freed += done or NO_ROOM
        self._planner.lower()
        self._wait_until_freed(before, freed.bytes)
        return freed, is_valid

    def _remove(self, chosen: Sequence[Choice], check: Callable[[], bool] | None) -> Room | None:
        """Remove blobs to make room; return the room that they took, None if ``check`` forbids it.

        ``check`` runs while no process commits.
        """
        now = int(time.time())
        gone = {each.candidate.digest: _evicted(each, now) for each in chosen if not each.aged}
        entries = _journal_entries(self._env, chosen, now)
        write_down = functools.partial(_write_down, self._env, gone, entries)
        digests = [each.candidate.digest for each in chosen]
        done = removal.remove(self._env, self._blobs, digests, write_down=write_down, check=check)
        removed = [gone[Digest(digest)] for digest in done.digests if Digest(digest) in gone]
        with self._counting:
            self._tally.add(removed)
            self._tally.ids += done.ids
            self._tally.aged += done.blobs - len(removed)
            self._tally.aged_bytes += done.bytes - sum(each.size for each in removed)
        _trace(chosen, done)
        if done.blobs > len(removed):
            _log.info("removed %d blobs by max-age", done.blobs - len(removed))
        _log_removed(removed)
        return None if done.forbidden else Room(done.bytes, done.blobs)

    def _wait_until_freed(self, before: int, size: int) -> None:
        """Wait a little until the filesystem has freed the space of removed files.

        Some filesystems free it later. Without the wait, more blobs than necessary would be
        removed.
        """
        until = time.monotonic() + _FREED_S
        while self._blobs.free_bytes() < before + size * 3 // 4 and time.monotonic() < until:
            time.sleep(_FREED_S / 20)


def remove_chosen(
    env: Environment, blobs: Blobs, chosen: Sequence[Choice]
) -> removal.RemovalResult:
    """Remove the blobs of a plan, and write the journal entries. Raises `StoreError`."""
    write_down = functools.partial(
        _write_down, env, {}, _journal_entries(env, chosen, int(time.time()))
    )
    digests = [each.candidate.digest for each in chosen]
    done = removal.remove(env, blobs, digests, write_down=write_down)
    _trace(chosen, done)
    return done


def set_aside(env: Environment, blobs: Blobs, digests: Iterable[Digest]) -> removal.RemovalResult:
    """Remove damaged blobs, move their files to quarantine, and count them as losses. Raises
    `StoreError`.
    """
    planner, now = Planner(env), int(time.time())
    chosen = [planner.unplanned(each) for each in map(planner.look, digests) if each is not None]
    gone = {
        each.candidate.digest: msgspec.structs.replace(_evicted(each, now), damaged=True)
        for each in chosen
    }
    entries = _journal_entries(env, chosen, now, damaged=True)
    write_down = functools.partial(_write_down, env, gone, entries)
    return removal.remove(env, blobs, list(gone), quarantine=True, write_down=write_down)


def _write_down(
    env: Environment,
    gone: Mapping[Digest, Evicted],
    entries: Mapping[Digest, Sequence[NewSeen]],
    txn: Txn,
    removed: Sequence[Digest],
) -> None:
    """Count removed blobs, and write their journal entries."""
    journal = JournalWriter(env, txn)
    for digest in removed:
        journal.add(entries.get(digest, ()))
    row = Evictions.load(env, txn)
    row.add(gone[digest] for digest in removed if digest in gone)
    row.omitted += journal.omitted
    row.save(env, txn)


def _evicted(choice: Choice, now: int) -> Evicted:
    """Describe a blob that makes room."""
    each = choice.candidate
    build_id = bytes(each.build_ids[0]) if each.build_ids else b""
    return Evicted(build_id, choice.path, each.size, now, each.copy_at or "")


def _journal_entries(
    env: Environment, chosen: Sequence[Choice], now: int, *, damaged: bool = False
) -> dict[Digest, list[NewSeen]]:
    """Return the journal entries for the blobs of a plan: one for each place of a blob. The places
    of a recapturable blob are omitted.
    """
    index, journal = Index(env), Journal(env)
    entries: dict[Digest, list[NewSeen]] = {}
    for choice in chosen:
        each = choice.candidate
        removed = Removal(now, sum({1 << kind for kind in each.kinds}), choice.aged, damaged)
        entries[each.digest] = [
            _entry(journal, place, build_id, removed, bool(each.copy_at))
            for build_id in each.build_ids
            for place in index.origins(index.ordinal(build_id) or 0)
            if place.digest == each.digest
        ]
    return entries


def _entry(
    journal: Journal, place: OriginRecord, build_id: BuildId, removed: Removal, omitted: bool
) -> NewSeen:
    """Return the journal entry for a blob that was seen at a place: the one that exists, or a new
    one.
    """
    origin, boot = place.origin, b""
    for row in journal.at(origin.mnt_ns_id, origin.path, None):
        if row.build_id == build_id:
            boot = row.boot
            origin = msgspec.structs.replace(
                origin,
                container=row.container,
                namespaces=row.namespaces,
                apart=row.apart,
                cgroup=row.cgroup,
                host=row.host,
            )
            break
    sighting = Sighting(origin, place.last_seen_ns)
    return NewSeen(sighting, build_id, boot=boot, omitted=omitted, removed=removed)


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


def exceeded(env: Environment, blobs: Blobs, policy: Policy) -> dict[str, int]:
    """Return by how much each limit is exceeded now: see `_Limits.exceeded`."""
    usage = look(env, blobs)
    return _Limits(policy, usage).exceeded(usage)


def _planner(env: Environment, policy: Policy, altlinks: AltLinks) -> Planner:
    return Planner(env, min_age=policy.min_age, max_age=policy.max_age, altlinks=altlinks)


def plan(
    env: Environment, blobs: Blobs, policy: Policy, altlinks: AltLinks, *, with_kept: bool
) -> Iterator[Choice]:
    """Yield the blobs a policy removes now, in the order in which `Evictor.enforce` does; then,
    with ``with_kept``, those that it keeps.
    """
    found = exceeded(env, blobs, policy)
    limit = max(found, key=found.__getitem__, default=KEEP_FREE)
    planner = _planner(env, policy, altlinks)
    yield from planner.plan(_lack(found), limit=limit, in_part=True)
    if with_kept:
        yield from planner.kept()


def _in_vain(planner: Planner) -> str:
    """Return the reason why no room can be made."""
    kept = []
    if pinned := planner.kept_pinned:
        kept.append(f"{pinned} blob{' is' if pinned == 1 else 's are'} pinned")
    if planner.kept_young:
        kept.append("the others were used within min-age")
    if planner.found_too_little:
        why = "all that may be removed is too little"
        return f"{why}; {', '.join(kept)}" if kept else why
    return f"nothing may be removed ({', '.join(kept) or 'there is nothing else in it'})"


def _log_removed(gone: Sequence[Evicted]) -> None:
    """Name the losses in the log, and count the rest."""
    recapturable = [each for each in gone if each.copy_at]
    if recapturable:
        size = sum(each.size for each in recapturable)
        _log.info("removed %d blobs, %d bytes, that can be captured again", len(recapturable), size)
    for each in gone:
        if not each.copy_at:
            what = (each.build_id.hex(), printable(each.path), each.size)
            _log.info("removed %s %s, %d bytes, which cannot be captured again", *what)


def _trace(chosen: Sequence[Choice], done: removal.RemovalResult) -> None:
    """Log each removed blob of a plan with the rule."""
    if not _log.isEnabledFor(logging.DEBUG):
        return
    digests = set(map(bytes, done.digests))
    for each in chosen:
        if bytes(each.candidate.digest) in digests:
            build_id = next(iter(each.candidate.build_ids), "without a build ID")
            _log.debug("%s: evicted, build ID %s, by %s", each.path, build_id, each.why)
