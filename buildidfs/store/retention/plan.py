# SPDX-License-Identifier: Apache-2.0
"""The plan of a removal: which blobs make room, in order. `prune --dry-run` prints it, and the
store follows it.

1. Blobs that the host can give back go first, the longest unused first.
2. Then the others, from the place with the most bytes, the longest unused first.
3. Pinned blobs are kept, with the debuginfo that dwz moved out of them. So are blobs that were used
   a short while ago, except those that the host can give back.

Step 1 follows *uses* from its old end. A blob may be filed there as recapturable although the host
has lost the file; it is then treated as one of the others, and `Planner.lower` files it as such, so
statx(2) is called only once for it. Step 2 reads all of the others, because it compares places. A
caller that makes more room than it needs at the moment makes this rare.

Why not `shares.Shares`? It divides whole entries of one owner. A blob belongs to several shares in
equal parts, and bytes and inodes are two measures.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import time
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.formats.container import cgroup
from buildidfs.linux import inodes, machine, namespaces
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Artifact, BuildId, Digest, Kind, Trust, archive_scope
from buildidfs.store import location_rows, schema
from buildidfs.store.index.locations import APART_MNT, UNKNOWN, Journal, is_recent, share_in
from buildidfs.store.index.queries import (
    DAMAGE,
    Index,
    IndexRows,
    Pins,
    digest_row,
    prefixed,
    rows_from,
)
from buildidfs.store.values import NO_ROOM, Room
from buildidfs.store.write.uses import CLASSES, UseWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from buildidfs.model import FileIdentity, Origin
    from buildidfs.shares import Share
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.values import OriginRecord

    AltLinks = Callable[[Digest], BuildId | None]


#: The number of a blob's latest places at which statx(2) looks for its file.
MOST_PLACES: Final = 16

#: Permission bits by which users other than the owner can change a file.
_OTHERS_WRITE: Final = 0o022

#: A blob of a file in use that was made within this time does not count as recapturable: builds run
#: programs and delete them, and the blob of such a program would make room while its file is there.
_NEW_NS: Final = 120 * 1_000_000_000


def recapturable_at(places: list[OriginRecord]) -> str | None:
    """Return the place at which the host still has bytes that were seen at these places.

    The result is None if no such place is known, or if a file was just made at all of them.
    """
    believed = [each.origin for each in places if each.origin.trust >= Trust.PACKAGE]
    lasting = (origin for origin in believed[:MOST_PLACES] if not is_recent(origin, _NEW_NS))
    return next(filter(None, map(recapturable, lasting)), None)


def recapturable(origin: Origin) -> str | None:
    """Return the place at which the host has the file of an origin; None if it may be gone.

    statx(2) is called for trusted places only, and no file is opened.
    """
    seen = origin.identity
    # Symbols unpacked from an executable have its identity, except for these fields.
    is_part = seen.scope is None and origin.trust is Trust.PACKAGE
    if origin.archive:
        now = _identity(origin.archive)
        if now is not None and (is_part or archive_scope(now) == seen.scope):
            return "a package has it"
    elif origin.host == machine.host_name() and (
        origin.trust is Trust.HOST or (is_part and not origin.container)
    ):
        now = _identity(origin.path)
        if now is not None and is_part:
            now = msgspec.structs.replace(now, scope=None, mode=now.mode & ~0o111)
        return "this host has it" if now == seen else None
    return None


def recapturable_place(env: Environment, origin: Origin) -> str | None:
    """Return the place at which the host has the file of an origin; None if it may be gone."""
    return recapturable(origin) or _in_another_namespace(env, origin)


def is_spare(env: Environment, origin: Origin) -> bool:
    """Return True if the host has the file of an origin, and did not just make it."""
    return not is_recent(origin, _NEW_NS) and bool(recapturable_place(env, origin))


def _in_another_namespace(env: Environment, origin: Origin) -> str | None:
    """Return the place at which the host has a file that was seen in another mount namespace.

    The result is None if the journal has no row for the file. Services with a mount namespace of
    their own, and containers that were given directories of the host, run the host's files. A
    sighting in such a namespace is not believed. The path must have been seen in the host's own
    mount namespace and omitted for lack of room, and statx(2) must find the same inode there.
    """
    seen = origin.identity
    if not origin.apart & APART_MNT or origin.host != machine.host_name():
        return None
    if seen.uid or seen.mode & _OTHERS_WRITE:
        return None
    for row in Journal(env).at(_host_mnt_ns_id(), origin.path, inodes.boot_id()):
        is_hosts = row.host == origin.host and not row.apart & APART_MNT
        # Scopes are not compared: a scope names the mount, and each namespace has its own mounts.
        if (
            row.omitted is not None
            and is_hosts
            and _without_scope(row.omitted) == _without_scope(seen)
        ):
            return "this host has it" if _identity(row.path) == row.omitted else None
    return None


def _without_scope(identity: FileIdentity) -> FileIdentity:
    return msgspec.structs.replace(identity, scope=None)


@functools.cache
def _host_mnt_ns_id() -> int:
    """Return `Origin.mnt_ns_id` of the host's mount namespace; 0 if unknown."""
    try:
        fd, number = namespaces.open_initial_root()
    except OSError:
        return 0
    os.close(fd)
    return number


def _identity(path: bytes) -> FileIdentity | None:
    """Return the identity of the file at a path of the host, if it is unambiguous."""
    with contextlib.suppress(OSError, ValueError):
        # Network filesystems are not asked: one that does not answer must not delay captures.
        with closing_fd(os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
            now = inodes.identity_at(fd, path, follow=False)
        if now.scope is not None:
            return now
    return None


#: Rows that are read or written in one transaction.
_AT_ONCE: Final = 1024

_PINNED: Final = "pinned"

#: A pinned build ID protects this many variants of a kind beside the served one, because containers
#: can make any number of them.
_PINNED_VARIANTS: Final = 16


class RemovableBlob(msgspec.Struct, frozen=True):
    """A blob that may be removed.

    ``size`` is in bytes on disk, ``used`` in seconds of Unix time. ``copy_at`` is a place that
    still has the same bytes, if known. If the blob must be kept, ``why_kept`` is the reason.
    """

    digest: Digest
    size: int
    used: int
    build_ids: tuple[BuildId, ...]
    kinds: tuple[Kind, ...]
    copy_at: str | None = None
    why_kept: str | None = None

    @property
    def room(self) -> Room:
        """Return the room that the blob takes."""
        return Room(self.size, 1)

    @property
    def is_pinned(self) -> bool:
        """True if a pin protects the blob."""
        return (self.why_kept or "").startswith(_PINNED)


class Choice(msgspec.Struct, frozen=True):
    """A blob that a plan removes or keeps: the path at which it was last seen, True if it is
    removed, and the reason. ``aged`` is True if it was unused for longer than max-age.
    """

    candidate: RemovableBlob
    path: bytes
    is_evicted: bool
    why: str
    aged: bool = False

    @property
    def is_loss(self) -> bool:
        """Return True if the removed blob makes room, and cannot be captured again."""
        return self.is_evicted and not self.aged and not self.candidate.copy_at


def _shown(share: Share) -> str:
    """Return a share as text for people."""
    label = cgroup.container_label(share.owner.encode("utf-8", "surrogateescape"))
    return label or share.owner or "root of the host"


class _Group:
    """Blobs that the same shares have: the ``room`` that all take, and the ``oldest`` that may be
    removed.
    """

    def __init__(self) -> None:
        self.room = NO_ROOM
        self.removable = NO_ROOM
        self.oldest: list[tuple[int, Digest, int]] = []

    def add(self, used: int, digest: Digest, size: int, wanted: Room, *, removable: bool) -> None:
        """Add a blob, which is later than all before it."""
        self.room += Room(size, 1)
        if removable and not (wanted - self.removable).is_none:
            self.removable += Room(size, 1)
            self.oldest.append((used, digest, size))


def _largest_first(
    groups: dict[frozenset[Share], _Group], wanted: Room, staged: Mapping[Share, int]
) -> Iterator[tuple[Digest, Share]]:
    """Yield blobs until ``wanted`` is free: always the oldest of the share that has the most.

    The bytes of a blob that several have count in equal parts, together with the bytes that are
    being ``staged``. The blob goes with the smallest of them, so a container cannot have a file of
    another removed by running a copy of it. If inodes are lacking, the share with the most files is
    the largest.
    """
    totals: dict[Share, list[float]] = {share: [size, 0] for share, size in staged.items()}
    for shares, group in groups.items():
        for share in shares:
            total = totals.setdefault(share, [0, 0])
            for unit, room in enumerate(group.room):
                total[unit] += room / len(shares)
    blobs: dict[Share, list[tuple[int, Digest, int, int]]] = {share: [] for share in totals}
    for shares, group in groups.items():
        owner = min(shares, key=lambda share: (totals[share], share))
        blobs[owner] += [(*blob, len(shares)) for blob in group.oldest]
    for of_share in blobs.values():
        of_share.sort(reverse=True)
    for unit in range(len(wanted)):
        heap = [(-total[unit], share) for share, total in totals.items()]
        heapq.heapify(heap)
        while heap and wanted[unit] > 0:
            _, share = heapq.heappop(heap)
            if blobs[share]:
                _, digest, size, parts = blobs[share].pop()
                totals[share][0] -= size / parts
                totals[share][1] -= 1 / parts
                wanted -= Room(size, 1)
                heapq.heappush(heap, (-totals[share][unit], share))
                yield digest, share


# --- the plan -------------------------------------------------------------------------------------


class Planner:
    """Plans removals from one store. For one thread at a time.

    ``min_age`` and ``max_age`` are in seconds; ``altlinks`` returns the build ID in the
    .gnu_debugaltlink of a debug file's blob. ``kept_pinned`` counts the pinned blobs that the last
    plan met, ``kept_young`` is True if it met blobs that are too young, ``found_too_little`` if the
    others would not free enough.
    """

    def __init__(
        self,
        env: Environment,
        *,
        min_age: int = 0,
        max_age: int | None = None,
        altlinks: AltLinks = lambda digest: None,
    ) -> None:
        self._env = env
        self._index = Index(env)
        self._pins = Pins(env)
        self._min_age = min_age
        self._max_age = max_age
        self._altlinks = altlinks
        self._links: dict[Digest, BuildId | None] = {}
        self._begin()

    def _begin(self) -> None:
        self._has_pins = next(self._pins.every(), None) is not None
        self._needed: frozenset[BuildId] | None = None
        self._chosen: set[Digest] = set()
        self._stale: list[tuple[int, Digest]] = []
        self._pinned_class_0: set[Digest] = set()
        self.kept_pinned = 0
        self.kept_young = False
        self.found_too_little = False

    def plan(
        self,
        lack: Room,
        beyond: Room = NO_ROOM,
        *,
        limit: str = "",
        in_part: bool = False,
        recapturable_only: bool = False,
        staged: Mapping[Share, int] = MappingProxyType({}),
    ) -> Iterator[Choice]:
        """Yield the blobs to remove so that ``lack`` becomes free, in order.

        While one goes, so many go that ``beyond`` becomes free as well. If all of the blobs do not
        free ``lack``, only recapturable ones are yielded, unless ``in_part``. ``limit`` is the name
        of the limit for the reasons. ``staged`` are the bytes of each share that are not in the
        store yet. The caller may remove each blob when it gets it.
        """
        self._begin()
        for candidate in self._aged():
            lack -= candidate.room
            yield self._choice(candidate, "max-age", aged=True)
        if lack.is_none:
            return
        for candidate in self._recapturable():
            lack -= candidate.room
            yield self._choice(candidate, f"{limit}; {candidate.copy_at}")
            if (lack + beyond).is_none:
                return
        if lack.is_none or recapturable_only:
            return
        for candidate, share in self._losses(lack, lack + beyond, in_part, staged):
            yield self._choice(candidate, f"{limit}; the most bytes belong to {_shown(share)}")

    def recapturable(self, before: int | None = None) -> Iterator[Choice]:
        """Yield the recapturable blobs that may be removed, up to those used at ``before``."""
        self._begin()
        for candidate in self._recapturable(before):
            yield self._choice(candidate, candidate.copy_at or "")

    def _recapturable(self, before: int | None = None) -> Iterator[RemovableBlob]:
        for used, digest in self._uses(0):
            if before is not None and used >= before:
                return
            candidate = self.look(digest, ask=True)
            if candidate is None or digest in self._chosen:
                continue
            if candidate.copy_at:
                self._chosen.add(digest)
                yield candidate
            elif candidate.is_pinned:
                self.kept_pinned += 1
                self._pinned_class_0.add(digest)
            else:
                self._stale.append((used, digest))

    def is_complete(self) -> bool:
        """Return True if no blob has been filed as recapturable since the plan examined them."""
        known = self._chosen | self._pinned_class_0 | {digest for _, digest in self._stale}
        return all(digest in known for _, digest in self._uses(0))

    def lower(self) -> None:
        """Record that blobs whose files the host has lost are not recapturable. Raises
        `StoreError`.
        """
        while batch := [digest for _, digest in self._stale[:_AT_ONCE]]:
            self._env.write(functools.partial(_lower, self._env, batch))
            del self._stale[: len(batch)]

    def kept(self) -> Iterator[Choice]:
        """Yield every blob that the last plan has not chosen, oldest use first."""
        for _, digest in heapq.merge(*map(self._uses, CLASSES)):
            candidate = self.look(digest) if digest not in self._chosen else None
            if candidate is not None:
                why = candidate.why_kept or "within the limits"
                yield Choice(candidate, self._path(candidate), False, why)

    def look(self, digest: Digest, *, ask: bool = False) -> RemovableBlob | None:
        """Return one blob, or None if it is gone; with ``ask``, check that it is recapturable."""
        row = digest_row(self._env, digest)
        if row is None:
            return None
        named = [self._index.build_id(number) for number in dict.fromkeys(r[0] for r in row.refs)]
        build_ids = tuple(build_id for build_id in named if build_id is not None)
        why_kept, copy_at = self._pinned(row), None
        if ask and not why_kept:
            copy_at = recapturable_at(self._origins(digest, build_ids))
        if not why_kept and not copy_at and self._is_young(row.used):
            why_kept = "used within min-age"
        kinds = tuple(sorted({Kind(ref[1]) for ref in row.refs}))
        return RemovableBlob(digest, row.taken, row.used, build_ids, kinds, copy_at, why_kept)

    def unplanned(self, candidate: RemovableBlob) -> Choice:
        """Return the choice of a blob that no limit removes."""
        return Choice(candidate, self._path(candidate), True, "damaged")

    def _choice(self, candidate: RemovableBlob, why: str, *, aged: bool = False) -> Choice:
        self._chosen.add(candidate.digest)
        return Choice(candidate, self._path(candidate), True, why, aged)

    def _path(self, candidate: RemovableBlob) -> bytes:
        origins = self._origins(candidate.digest, candidate.build_ids)
        last = max(origins, key=lambda each: each.last_seen_ns, default=None)
        return b"" if last is None else last.origin.path

    def _origins(self, digest: Digest, build_ids: tuple[BuildId, ...]) -> list[OriginRecord]:
        ordinals = [self._index.ordinal(build_id) for build_id in build_ids]
        found = [self._index.origins(ordinal) for ordinal in ordinals if ordinal is not None]
        return [each for origins in found for each in origins if each.digest == digest]

    def _uses(self, number: int) -> Iterator[tuple[int, Digest]]:
        """Yield (last use, digest) of a class, in order of time."""
        for key, _ in rows_from(self._env, self._env.tables["uses"], bytes([number])):
            _, used, digest = schema.USE.unpack(key)
            yield used, Digest(digest)

    def _is_young(self, used: int) -> bool:
        # The time of the last use is known to the hour.
        return bool(self._min_age) and time.time() - used < self._min_age + schema.USE_SLACK_S

    def _aged(self) -> Iterator[RemovableBlob]:
        """Yield the blobs that were unused for longer than max-age."""
        if self._max_age is None:
            return
        before = int(time.time()) - self._max_age - schema.USE_SLACK_S
        for used, digest in heapq.merge(*map(self._uses, CLASSES)):
            if used >= before or self._is_young(used):
                return
            candidate = self.look(digest)
            if candidate is not None and not candidate.why_kept:
                yield candidate

    def _losses(
        self, lack: Room, wanted: Room, in_part: bool, staged: Mapping[Share, int]
    ) -> Iterator[tuple[RemovableBlob, Share]]:
        """Yield blobs that are not recapturable, which together free ``wanted``, or all of them.

        Yields none if they do not free ``lack``, unless ``in_part``.
        """
        groups = self._grouped(wanted)
        removable = sum((group.removable for group in groups.values()), NO_ROOM)
        if not in_part and not (lack - removable).is_none:
            self.found_too_little = removable != NO_ROOM
            return
        for digest, share in _largest_first(groups, wanted, staged):
            candidate = self.look(digest)
            if candidate is not None and not candidate.why_kept:
                yield candidate, share

    def _grouped(self, wanted: Room) -> dict[frozenset[Share], _Group]:
        """Return the blobs that are neither recapturable nor pinned, by the shares that have
        them.
        """
        groups: dict[frozenset[Share], _Group] = {}
        blobs = heapq.merge(self._stale, self._uses(1))
        while batch := list(islice(blobs, _AT_ONCE)):
            for used, digest, row, shares in self._shared(batch):
                if self._pinned(row):
                    self.kept_pinned += 1
                    continue
                young = self._is_young(used)
                self.kept_young |= young
                group = groups.setdefault(shares, _Group())
                group.add(used, digest, row.taken, wanted, removable=not young)
        return groups

    def _shared(
        self, blobs: Sequence[tuple[int, Digest]]
    ) -> list[tuple[int, Digest, schema.DigestRow, frozenset[Share]]]:
        """Return the blobs that are not chosen, with their rows and shares."""
        found = []
        with self._env.read() as txn:
            rows = IndexRows(self._env, txn)
            for used, digest in blobs:
                row = rows.digest_row(digest) if digest not in self._chosen else None
                if row is not None:
                    found.append((used, digest, row, self._shares(txn, digest, row)))
        return found

    def _shares(self, txn: Txn, digest: Digest, row: schema.DigestRow) -> frozenset[Share]:
        found = set()
        for ordinal in {ref[0] for ref in row.refs}:
            prefix = schema.U64.pack(ordinal)
            for _, value in prefixed(txn, self._env.tables["origins"], prefix):
                with contextlib.suppress(*DAMAGE):  # `check` reports such a row
                    seen = location_rows.origin_row(value)
                    if seen.digest == digest:
                        found.add(share_in(seen))
        return frozenset(found) or frozenset((UNKNOWN,))

    # --- pins ------------------------------------------------------------------------------

    def _pinned(self, row: schema.DigestRow) -> str | None:
        """Return a text about the pin that protects a blob; None if it has no pin."""
        if not self._has_pins:
            return None
        for ordinal, kind, variant in row.refs:
            build_id = self._index.build_id(ordinal)
            if build_id is None:
                continue
            found = self._pins.of(names.kept_for(build_id))
            if found and self._is_protected(ordinal, kind, variant):
                name = found[0].name
                return f"{_PINNED}: {os.fsdecode(name)}" if name else _PINNED
            if kind == Kind.DEBUGINFO and build_id in self._needed_by_pins():
                return f"{_PINNED}: dwz file of what is pinned"
        return None

    def _is_protected(self, ordinal: int, kind: int, variant: int) -> bool:
        if variant < _PINNED_VARIANTS:
            return True
        served = self._index.artifact(ordinal, kind)
        return served is not None and served.variant == variant

    def _needed_by_pins(self) -> frozenset[BuildId]:
        """Return the build IDs of the dwz files that pinned debuginfo refers to."""
        if self._needed is None:
            self._needed = frozenset(self._all_needed())
        return self._needed

    def _all_needed(self) -> Iterator[BuildId]:
        for pin in self._pins.every():
            ordinal = self._index.ordinal(pin.build_id)
            if ordinal is None:
                continue
            for kind in (Kind.EXECUTABLE, Kind.DEBUGINFO):
                artifact = self._index.artifact(ordinal, kind)
                link = None if artifact is None else self._altlink(artifact)
                if link is not None:
                    yield link

    def _altlink(self, artifact: Artifact) -> BuildId | None:
        if artifact.digest not in self._links:
            self._links[artifact.digest] = self._altlinks(artifact.digest)
        return self._links[artifact.digest]


def _lower(env: Environment, digests: Iterable[Digest], txn: Txn) -> None:
    """Record blobs as not recapturable, until their files are seen again at a trusted place."""
    uses, rows = UseWriter(env, txn), IndexRows(env, txn)
    for digest in digests:
        if (row := rows.digest_row(digest)) is not None:
            uses.lower(digest, row)
            rows.put_digest_row(digest, row)
