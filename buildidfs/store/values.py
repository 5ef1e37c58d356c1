# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of the store, apart from those in `model`, and the counts of its losses.

`schema` defines their form on disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import msgspec

from buildidfs.model import (
    Absence,
    Alias,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
)
from buildidfs.store.blobs.files import Staged
from buildidfs.store.location_rows import Removal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.store.index.environment import Environment, Txn


_New = TypeVar("_New", "NewCapture", "NewSeen")


def claimed(sighting: Sighting, now_ns: int) -> Sighting:
    """Return a sighting with a time from 0 to ``now_ns``; the time may be a claim.

    All sightings pass through here before they are recorded. A stranger's bundle, or a clock that
    was ahead for a while, could otherwise protect files in the store for a century.
    """
    seen_ns = min(max(sighting.seen_ns, 0), now_ns)
    return sighting if seen_ns == sighting.seen_ns else Sighting(sighting.origin, seen_ns)


def timed(new: _New, now_ns: int) -> _New:
    """Return a capture or journal entry whose sighting has passed through `claimed`."""
    sighting = claimed(new.sighting, now_ns)
    return new if sighting is new.sighting else msgspec.structs.replace(new, sighting=sighting)


class NewCapture(msgspec.Struct, frozen=True):
    """One identified file to be committed: its bytes, their description, and their place.

    ``content`` is the result of `Store.stage`, or the digest of bytes that the store holds already
    (`Store.held`). A file that is both executable and debuginfo has both kinds. ``remember`` is
    False for a file that may change without a trace in its identity: the next scan reads it again.
    ``supplement`` is the name and the build ID of the dwz file that debuginfo refers to, None if
    unknown. ``aliases`` are other names of the bytes; ``codes`` are aliases of other blobs: those
    with the same build ID that had no alias of that type. If files share the build ID in the file
    by mistake, ``shared`` is this ID, and ``build_id`` another one. ``derive`` requests a debug
    file made from the bytes, see `Store.derivations`.
    """

    sighting: Sighting
    content: Staged | Digest
    build_id: BuildId
    kinds: tuple[Kind, ...]
    quality: Quality = Quality.NONE
    scripts: tuple[ByteRange, ...] = ()
    segments: int = 0
    remember: bool = True
    supplement: tuple[bytes, BuildId] | None = None
    truncated: bool = False
    aliases: tuple[Alias, ...] = ()
    codes: tuple[tuple[Digest, Alias], ...] = ()
    shared: BuildId | None = None
    derive: bool = False


class NewAbsence(msgspec.Struct, frozen=True):
    """A file without a build ID, recorded so that it is not read again; ``remember`` as in
    `NewCapture`.
    """

    identity: FileIdentity
    seen_ns: int
    absence: Absence
    remember: bool = True


class NewSeen(msgspec.Struct, frozen=True):
    """A journal entry: a file with this build ID was seen. The store need not have its bytes.

    ``boot`` is the boot ID (16 bytes) of the system on which the file was seen; None for the
    running one. ``omitted`` is True if there was no room for the bytes, and the file is
    recapturable. ``removed`` is the removal of its bytes by a limit.
    """

    sighting: Sighting
    build_id: BuildId
    boot: bytes | None = None
    omitted: bool = False
    removed: Removal | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The result of committing one `NewCapture`.

    ``refused`` is the reason if nothing was recorded, or empty. ``omitted`` is True if its bytes
    were dropped for lack of room, because the file is recapturable. ``gone`` is True if the content
    was given as a digest, but the store has removed those bytes meanwhile. Then nothing was
    recorded, and the file has to be read again.
    """

    ordinal: int
    new_id: bool = False
    new_variant: bool = False
    new_blob: bool = False
    refused: str = ""
    gone: bool = False
    omitted: bool = False


class CommitResult(msgspec.Struct, frozen=True):
    """The result of a commit; ``outcomes`` is in the order of the captures given.

    ``changed`` are the announced ordinals: their names or served bytes changed.
    """

    outcomes: tuple[Outcome, ...] = ()
    changed: tuple[int, ...] = ()
    bytes_added: int = 0


class Pin(msgspec.Struct, frozen=True):
    """A pin of a build ID, with its name and the time of its creation (Unix time, ns)."""

    build_id: BuildId
    name: bytes
    created_ns: int


class OriginRecord(msgspec.Struct, frozen=True):
    """One place where bytes of a build ID were seen, with the first and last time (Unix time, ns).

    ``kinds`` are the kinds under which those bytes are served.
    """

    origin: Origin
    kinds: tuple[Kind, ...]
    digest: Digest
    first_seen_ns: int
    last_seen_ns: int


class Held(msgspec.Struct, frozen=True):
    """The facts about bytes that the store holds."""

    digest: Digest
    size: int
    ordinal: int
    build_id: BuildId
    kinds: tuple[Kind, ...]
    quality: Quality
    scripts: tuple[ByteRange, ...]
    segments: int = 0
    truncated: bool = False

    def capture(self, sighting: Sighting, aliases: tuple[Alias, ...] = ()) -> NewCapture:
        """Return the capture of a further file with these bytes."""
        return NewCapture(
            sighting,
            self.digest,
            self.build_id,
            self.kinds,
            self.quality,
            self.scripts,
            self.segments,
            truncated=self.truncated,
            aliases=aliases,
        )


class Remembered(msgspec.Struct, frozen=True):
    """The result of an earlier read of exactly this file.

    ``build_id`` is None if the file had none; ``absence`` is then the reason.
    """

    build_id: BuildId | None = None
    absence: Absence | None = None


class StoreStats(msgspec.Struct, frozen=True):
    """Counts and sizes of a store. Sizes in bytes; ``artifacts`` counts (build ID, kind) by kind.

    ``variants`` counts files that are kept but not served, ``remembered`` the files that are
    recognised without being read. ``free_bytes`` is the room for an unprivileged writer,
    ``journal`` the number of rows of the journal, ``stored_bytes`` the bytes of the files of blobs,
    ``pins`` the number of pins. ``adopted`` and ``ambiguous`` count build IDs, see
    `Artifact.adopted` and `Aliases.is_ambiguous`.
    """

    ids: int
    artifacts: dict[Kind, int]
    variants: int
    blobs: int
    blob_bytes: int
    origins: int
    paths: int
    remembered: int
    index_bytes: int
    free_bytes: int
    journal: int = 0
    stored_bytes: int = 0
    pins: int = 0
    adopted: int = 0
    ambiguous: int = 0


_KEY: Final = b"evicted"

#: Losses that the row names; the journal has all of them.
_NAMED: Final = 32

#: Number of evicted blobs that a summary names.
_FOREMOST: Final = 10

_encode = msgspec.msgpack.Encoder().encode


class Evicted(msgspec.Struct, frozen=True, array_like=True):
    """A blob that was removed to make room: its file, its bytes on disk, and the time (s).

    ``copy_at`` is a place that had the same bytes at that time; it is empty if the bytes are lost.
    ``damaged`` is True if the bytes were lost because the blob was damaged.
    """

    build_id: bytes
    path: bytes
    size: int
    when: int
    copy_at: str = ""
    damaged: bool = False


class _Counts(msgspec.Struct):
    """Counts of blobs removed to make room: ``recapturable`` of such ones, ``losses`` of the
    others. Bytes are those on disk.
    """

    recapturable: int = 0
    recapturable_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0

    def _count(self, each: Evicted) -> None:
        if each.copy_at:
            self.recapturable += 1
            self.recapturable_bytes += each.size
        else:
            self.losses += 1
            self.lost_bytes += each.size


class Evictions(_Counts, array_like=True):
    """Counts for the life of a store.

    ``last`` are the latest losses, newest first. ``omitted`` counts the files that were omitted
    for lack of room. Stores of earlier versions have two more numbers.
    """

    last: list[Evicted] = msgspec.field(default_factory=list)
    omitted: int = 0

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count removed blobs, and keep the latest losses by name."""
        for each in gone:
            self._count(each)
            if not each.copy_at:
                self.last = [each, *self.last][:_NAMED]

    @staticmethod
    def load(env: Environment, txn: Txn) -> Evictions:
        """Return the stored counts; all are 0 if the row is missing or damaged."""
        value = txn.get(_KEY, db=env.tables["meta"])
        try:
            return Evictions() if value is None else _decode(value)
        except msgspec.MsgspecError:
            return Evictions()

    def save(self, env: Environment, txn: Txn) -> None:
        """Write the counts."""
        txn.put(_KEY, _encode(self), db=env.tables["meta"])


_decode = msgspec.msgpack.Decoder(Evictions).decode


class Tally(_Counts):
    """Counts of the blobs that one process has removed.

    ``named`` has the most important losses and after them recapturable blobs, each group with the
    largest first. ``aged`` blobs were older than max-age. ``ids`` are the build IDs without a blob
    left.
    """

    aged: int = 0
    aged_bytes: int = 0
    ids: int = 0
    named: list[Evicted] = msgspec.field(default_factory=list)

    @property
    def blobs(self) -> int:
        """Return the number of all removed blobs."""
        return self.recapturable + self.losses + self.aged

    @property
    def bytes(self) -> int:
        """Return the number of bytes that the removed blobs took on disk."""
        return self.recapturable_bytes + self.lost_bytes + self.aged_bytes

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count the blobs that were removed to make room."""
        for each in gone:
            self._count(each)
            self.named.append(each)
        self.named = _foremost(self.named)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in set(self.__struct_fields__) - {"named"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.named = _foremost([*self.named, *other.named])


def _foremost(named: list[Evicted]) -> list[Evicted]:
    return sorted(named, key=lambda each: (each.copy_at != "", -each.size))[:_FOREMOST]


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


NO_ROOM: Final = Room(0, 0)
