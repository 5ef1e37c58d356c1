# SPDX-License-Identifier: Apache-2.0
"""The order in which blobs are evicted, and the blobs that are kept.

Recapturable blobs are evicted first: the host still has the same file, or the package file that
contains it. Then follow the blobs that were unused for the longest time. A pinned blob is kept,
with the debuginfo that dwz moved out of it. A blob that was used or captured a short while ago is
kept, too, unless it is recapturable.

No step reads the whole store. `Candidates.again` and `Candidates.oldest` follow *uses* from its old
end and keep their place, so that the kept blobs are not examined again for each capture. A blob may
be filed as recapturable although the host has lost the file. Once this is found, the blob moves to
the other class, so statx(2) is called only once for it.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.linux import machine, namespaces, statx
from buildidfs.model import Artifact, BuildId, Digest, Kind, NamespaceSet, Trust, archive_scope
from buildidfs.store import schema
from buildidfs.store.index.locations import Journal
from buildidfs.store.index.queries import Index
from buildidfs.store.retention.pins import Pins
from buildidfs.store.write.uses import CLASSES, UseWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.model import FileIdentity, Origin
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.values import OriginRecord

if TYPE_CHECKING:
    AltLinks = Callable[[Digest], BuildId | None]

#: The number of a blob's latest places at which statx(2) looks for its file.
_ASKED: Final = 16

#: Rows that are written in one transaction.
_AT_ONCE: Final = 1024

#: After this time the kept blobs are examined again.
_REMEMBERED_S: Final = 600

#: Seconds between the sighting of a file and the row that records it.
_WRITTEN_S: Final = 120

_PINNED: Final = "pinned"

#: Blobs of files that were just made, which are evicted after older ones.
_MOST_NEW: Final = 64

#: Permission bits by which users other than the owner can change a file.
_OTHERS_WRITE: Final = 0o022

#: The bit of `Origin.apart` for a mount namespace other than the host's.
_APART_MNT: Final = 1 << NamespaceSet.__struct_fields__.index("mnt")

#: A pinned build ID protects this many variants of a kind beside the served one, because containers
#: can make any number of them.
_PINNED_VARIANTS: Final = 16


class Candidate(msgspec.Struct, frozen=True):
    """A blob that may be evicted.

    ``size`` is in bytes on disk, ``used`` in seconds of Unix time. ``again`` is a place that still
    has the same bytes, if known. ``is_new`` is True if the file at this place was made a moment
    ago, and so may soon be deleted. If the blob must be kept, ``stays`` is the reason.
    """

    digest: Digest
    size: int
    used: int
    build_ids: tuple[BuildId, ...]
    kinds: tuple[Kind, ...]
    again: str = ""
    stays: str = ""
    is_new: bool = False

    @property
    def is_pinned(self) -> bool:
        """True if a pin protects the blob."""
        return self.stays.startswith(_PINNED)


class Candidates:
    """The blobs of a store in the order of eviction. For one thread at a time.

    ``min_age`` is in seconds; ``altlinks`` returns the build ID in the .gnu_debugaltlink of a debug
    file's blob.
    """

    def __init__(
        self, env: Environment, min_age: int = 0, altlinks: AltLinks = lambda digest: None
    ) -> None:
        self._env = env
        self._index = Index(env)
        self._pins = Pins(env)
        self._min_age = min_age
        self._altlinks = altlinks
        self._links: dict[Digest, BuildId | None] = {}
        self._needed: frozenset[BuildId] | None = None
        self.rewind()

    def refresh(self) -> None:
        """Return to the blobs with the oldest uses if the walks have not done so for a
        long time.
        """
        if time.monotonic() - self._since > _REMEMBERED_S:
            self.rewind()

    def rewind(self) -> None:
        """Return to the blobs with the oldest uses."""
        self._since = time.monotonic()
        self._needed = None
        self._again_after = b""
        self._oldest_after = [b""] * len(CLASSES)
        self.kept_pinned = 0
        self.kept_young = False
        self.stale: list[Digest] = []

    def again(self, before: int | None = None) -> Iterator[Candidate]:
        """Yield the recapturable blobs that may be evicted: oldest use first, blobs of new files
        last.

        Stops at blobs that were used at ``before`` or later. A blob that the host lost is put on
        `stale`, for `lower`.
        """
        new: deque[Candidate] = deque()
        for key, digest, used in self._uses(0, self._again_after):
            if before is not None and used >= before:
                break
            if self._is_settled(used):
                self._again_after = key
            candidate = self.look(digest, ask=True)
            if candidate is None:
                continue
            if candidate.is_new:
                new.append(candidate)
                if len(new) > _MOST_NEW:
                    yield new.popleft()
            elif candidate.again:
                yield candidate
            elif candidate.is_pinned:
                self.kept_pinned += 1
            else:
                self.stale.append(digest)
        yield from new

    def lower(self) -> None:
        """File the blobs on `stale` as not recapturable. Raises `StoreError`."""
        while batch := self.stale[:_AT_ONCE]:
            self._env.write(lambda txn, batch=batch: lower(self._env, txn, batch))  # type: ignore[misc]
            del self.stale[: len(batch)]

    def oldest(
        self, before: int | None = None, classes: Sequence[int] = CLASSES
    ) -> Iterator[Candidate]:
        """Yield the blobs that may be evicted, oldest use first, up to those used at ``before``."""
        walks = [self._uses(number, self._oldest_after[number]) for number in classes]
        for key, digest, used in heapq.merge(*walks, key=lambda use: use[0][1:]):
            if before is not None and used >= before:
                return
            if self._is_young(used):
                return
            if self._is_settled(used):
                self._oldest_after[key[0]] = key
            candidate = self.look(digest)
            if candidate is None:
                continue
            if candidate.stays:
                self.kept_pinned += 1
            else:
                yield candidate

    def everything(self) -> Iterator[Candidate]:
        """Yield every blob, oldest use first, with the reason if it must be kept."""
        walks = [self._uses(number, b"") for number in CLASSES]
        for _, digest, _ in heapq.merge(*walks, key=lambda use: use[0][1:]):
            candidate = self.look(digest)
            if candidate is not None:
                yield candidate

    def look(self, digest: Digest, *, ask: bool = False) -> Candidate | None:
        """Return one blob, or None if it is gone; with ``ask``, check that it is recapturable."""
        value = self._env.get(self._env.tables["digests"], digest)
        if value is None:
            return None
        row = schema.DigestRow.unpack(value)
        named = [self._index.build_id(number) for number in dict.fromkeys(r[0] for r in row.refs)]
        build_ids = tuple([build_id for build_id in named if build_id is not None])
        stays = ""
        stays = self._pinned(row)
        again, is_new = "", False
        if ask and not stays:
            origins = self._origins(digest, build_ids)
            again = had_again(origins)
            if again and not self._is_settled(row.used):
                is_new = not had_again([each for each in origins if not _is_new(each.origin)])
        if not stays and not again and self._age(row.used) < self._min_age:
            stays = "used within min-age"
        return Candidate(
            digest,
            row.taken,
            row.used,
            build_ids,
            tuple(sorted({Kind(ref[1]) for ref in row.refs})),
            again,
            stays,
            is_new,
        )

    def path(self, candidate: Candidate) -> bytes:
        """Return the path at which the bytes of a blob were last seen; empty if unknown."""
        last = self.place(candidate)
        return b"" if last is None else last.origin.path

    def place(self, candidate: Candidate) -> OriginRecord | None:
        """Return the place at which the bytes of a blob were last seen."""
        return next(iter(self.places(candidate)), None)

    def places(self, candidate: Candidate) -> list[OriginRecord]:
        """Return the places at which the bytes of a blob were seen, newest first, up to a limit."""
        origins = self._origins(candidate.digest, candidate.build_ids)
        return sorted(origins, key=lambda each: -each.last_seen_ns)[:_ASKED]

    def _origins(self, digest: Digest, build_ids: tuple[BuildId, ...]) -> list[OriginRecord]:
        ordinals = [self._index.ordinal(build_id) for build_id in build_ids]
        found = [self._index.origins(ordinal) for ordinal in ordinals if ordinal is not None]
        return [each for origins in found for each in origins if each.digest == digest]

    def _uses(self, number: int, after: bytes) -> Iterator[tuple[bytes, Digest, int]]:
        """Yield (key, digest, last use) of a class, in order of time, beyond the key ``after``."""
        table, prefix = self._env.tables["uses"], bytes([number])
        for key, _ in self._index.rows(table, prefix, after or None):
            _, used, digest = schema.USE.unpack(key)
            yield key, Digest(digest), used

    def _is_settled(self, used: int) -> bool:
        """Return True if nearly all uses that old have been recorded; recent ones are not yet."""
        return used < time.time() - _WRITTEN_S

    def _is_young(self, used: int) -> bool:
        if self._age(used) >= self._min_age:
            return False
        self.kept_young = True
        return True

    def _age(self, used: int) -> int:
        """Return the least possible number of seconds since the last use, whose time is known to
        the hour.
        """
        return int(time.time()) - used - (schema.USE_SLACK_S if self._min_age else 0)

    # --- pins ------------------------------------------------------------------------------

    def _pinned(self, row: schema.DigestRow) -> str:
        """Return a text about the pin that protects a blob; empty if it has no pin."""
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
        return ""

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


# --- recapturable blobs ---------------------------------------------------------------------------


def lower(env: Environment, txn: Txn, digests: Iterable[Digest]) -> None:
    """File blobs as not recapturable, until their files are seen again at a trusted place."""
    uses, table = UseWriter(env, txn), env.tables["digests"]
    for digest in digests:
        value = txn.get(digest, db=table)
        if value is not None:
            row = schema.DigestRow.unpack(value)
            uses.lower(digest, row)
            txn.put(digest, row.pack(), db=table)


def had_again(origins: list[OriginRecord]) -> str:
    """Return the place at which the host still has bytes that were seen at these places.

    The result is empty if no such place is known.
    """
    believed = [each.origin for each in origins if each.origin.trust >= Trust.PACKAGE]
    return next(filter(None, map(recapturable, believed[:_ASKED])), "")


def recapturable(origin: Origin) -> str:
    """Return the place at which the host has the file of an origin; empty if it may be gone.

    statx(2) is called for trusted places only, and no file is opened.
    """
    said = origin.identity
    # Symbols unpacked from an executable have its identity, except for these fields.
    is_part = said.scope is None and origin.trust is Trust.PACKAGE
    if origin.archive:
        now = _identity(origin.archive)
        if now is not None and (is_part or archive_scope(now) == said.scope):
            return "a package has it"
    elif origin.host == machine.host_name() and (
        origin.trust is Trust.HOST or (is_part and not origin.container)
    ):
        now = _identity(origin.path)
        if now is not None and is_part:
            now = msgspec.structs.replace(now, scope=None, mode=now.mode & ~0o111)
        return "this host has it" if now == said else ""
    return ""


def can_be_had(env: Environment, origin: Origin) -> str:
    """Return the place at which the host has the file of an origin; empty if it may be gone."""
    return recapturable(origin) or had_by_host(env, origin)


def had_by_host(env: Environment, origin: Origin) -> str:
    """Return the place at which the host has a file that was seen in another mount namespace.

    The result is empty if the journal has no row for the file. Services with a mount namespace of
    their own, and containers that were given directories of the host, run the host's files. A
    sighting in such a namespace is not believed. The path must have been seen in the host's own
    mount namespace and noted for lack of room, and statx(2) must find the same inode there.
    """
    seen = origin.identity
    if not origin.apart & _APART_MNT or origin.host != machine.host_name():
        return ""
    if seen.uid or seen.mode & _OTHERS_WRITE:
        return ""
    for row in Journal(env).at(_host_mnt_ns_id(), origin.path, statx.boot_id()):
        is_hosts = row.host == origin.host and not row.apart & _APART_MNT
        # The scope names the mount, and each namespace has mounts of its own.
        if row.noted is not None and is_hosts and _without_scope(row.noted) == _without_scope(seen):
            return "this host has it" if _identity(row.path) == row.noted else ""
    return ""


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
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            now = statx.identity_at(fd, path, follow=False, ask=False)
        finally:
            os.close(fd)
        if now.scope is not None:
            return now
    return None


_KEY: Final = b"evicted"

#: Losses that the row names; the journal has all of them.
_NAMED: Final = 32

#: Number of evicted blobs that a summary names.
_FOREMOST: Final = 10

#: Seconds for which the room of lost blobs is not given to recapturable ones.
_LATELY_S: Final = 86_400

#: A file in use that was made within this time may be gone in a moment: it may displace any
#: recapturable blob.
_FRESH_NS: Final = 3600 * 1_000_000_000

#: `Origin.scanner` of files that were found in a directory, and will mostly be there tomorrow. They
#: displace only blobs unused for a day. Otherwise a scan of more than fits would remove its own
#: captures, and begin anew each time.
AT_REST: Final = "tree"

_encode = msgspec.msgpack.Encoder().encode


def is_fresh(origin: Origin) -> bool:
    """Return True for a file that was seen in use within an hour after it was made."""
    age = time.time_ns() - origin.identity.ctime_ns
    return age < _FRESH_NS and origin.scanner != AT_REST


def _is_new(origin: Origin) -> bool:
    """Return True for a file of the host that was seen in use and made at most `_WRITTEN_S` ago."""
    age = time.time_ns() - origin.identity.ctime_ns
    is_young = age < _WRITTEN_S * 1_000_000_000
    return is_young and not origin.archive and origin.scanner != AT_REST


class Evicted(msgspec.Struct, frozen=True, array_like=True):
    """A blob that was removed to make room: its file, its bytes on disk, and the time (s).

    ``again`` is a place that had the same bytes at that time; it is empty if the bytes are lost.
    """

    build_id: bytes
    path: bytes
    size: int
    when: int
    again: str = ""


class Evictions(msgspec.Struct, array_like=True):
    """Counts of all evicted blobs: ``again`` of recapturable ones, ``losses`` of the others.

    ``last`` are the latest losses, newest first. Bytes are those on disk. ``noted`` counts the
    files that were only noted for lack of room. ``lost_lately`` is the number of bytes lost since
    ``lost_since`` (Unix time, s).
    """

    again: int = 0
    again_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0
    last: list[Evicted] = msgspec.field(default_factory=list)
    noted: int = 0
    lost_since: int = 0
    lost_lately: int = 0

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count removed blobs, and keep the latest losses by name."""
        now = int(time.time())
        for each in gone:
            if each.again:
                self.again += 1
                self.again_bytes += each.size
                continue
            self.losses += 1
            self.lost_bytes += each.size
            self.last = [each, *self.last][:_NAMED]
            if not 0 <= now - self.lost_since < _LATELY_S:
                self.lost_since, self.lost_lately = now, 0
            self.lost_lately += each.size

    def reserved(self) -> int:
        """Return the number of bytes in ``lost_lately``; 0 if ``lost_since`` is more than a day
        ago.
        """
        return self.lost_lately if 0 <= time.time() - self.lost_since < _LATELY_S else 0


_decode = msgspec.msgpack.Decoder(Evictions).decode


def load(env: Environment, txn: Txn) -> Evictions:
    """Return the stored counts; all are 0 if the row is missing or damaged."""
    value = txn.get(_KEY, db=env.tables["meta"])
    try:
        return Evictions() if value is None else _decode(value)
    except msgspec.MsgspecError:
        return Evictions()


def save(env: Environment, txn: Txn, row: Evictions) -> None:
    """Write the counts."""
    txn.put(_KEY, _encode(row), db=env.tables["meta"])


class Tally(msgspec.Struct):
    """Counts of the blobs that one process has removed; see `Evictions`.

    ``named`` has the most important losses and after them recapturable blobs, each group with the
    largest first. ``aged`` blobs were older than max-age. ``ids`` are the build IDs without a blob
    left.
    """

    again: int = 0
    again_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0
    aged: int = 0
    aged_bytes: int = 0
    ids: int = 0
    named: list[Evicted] = msgspec.field(default_factory=list)

    @property
    def blobs(self) -> int:
        """Return the number of all removed blobs."""
        return self.again + self.losses + self.aged

    @property
    def bytes(self) -> int:
        """Return the number of bytes that the removed blobs took on disk."""
        return self.again_bytes + self.lost_bytes + self.aged_bytes

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count the blobs that were removed to make room."""
        for each in gone:
            if each.again:
                self.again += 1
                self.again_bytes += each.size
            else:
                self.losses += 1
                self.lost_bytes += each.size
            self.named.append(each)
        self.named = _foremost(self.named)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in ("again", "again_bytes", "losses", "lost_bytes", "aged", "aged_bytes", "ids"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.named = _foremost([*self.named, *other.named])


def _foremost(named: list[Evicted]) -> list[Evicted]:
    return sorted(named, key=lambda each: (each.again != "", -each.size))[:_FOREMOST]
