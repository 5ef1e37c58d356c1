# SPDX-License-Identifier: Apache-2.0
"""The format of a store, version 1. This file is its definition.

`location_rows` has the rows of places, of the journal and of containers. No other module packs
rows.

Directory, mode 0700:

    format       text, one line: "buildidfs store 1". Written last when a store is made, so a
                 directory without it is not a store. A reader refuses any other number; see
                 `rebuild` for a new index.
    index/       an LMDB environment (data.mdb, lock.mdb), the tables below
    blobs/ab/    one file for each blob, named by the 64 hex digits of its SHA-256; "ab" are the
                 first two. A blob gets its name after fsync, and before any row refers to it: a
                 row without a blob is damage, a blob without a row is left by a crash and
                 harmless. The origin of a blob is kept beside it: see `provenance`.
    lock         flock(2)ed, shared from the naming of a blob to the commit of its row, and
                 exclusively while blobs are removed
    quarantine/  files that were at the place of a blob and have other bytes, for inspection
    staging/     blobs being written, if the filesystem has no O_TMPFILE; flock(2)ed in use
    listeners/   one socket for each process that listens to commits (`coordination`)
    run/         one locked file for each long-running process (`run_files.Presence`); the files
                 that a watch has lost (`run_files.LossLog`); blobs that readers opened (`uses`)

Each row that leads to bytes can be verified. *ids* and *ordinals* lead to each other. *artifacts*,
*variants*, *dwz* and *contents* end with a check, the CRC-32 of the fields before it and of the key
(the fast path uses `_start`), so that one wrong bit never leads to the bytes of another build ID.
*digests* is compared with the file of the blob.

Integers are big-endian, so that keys sort by number; times are nanoseconds of Unix time. A key part
of variable length is the last one. "msgpack" values are arrays; later versions may append fields.

    table      key                                    value
    meta       "counters"                             `StoreCounters`
    ids        build ID (2 to 120 bytes)              ordinal u64
    ordinals   ordinal u64                            `OrdinalRow`, then the build ID
    artifacts  ordinal u64, kind u8                   `pack_artifact`: fields, scripts, trailer
    variants   ordinal u64, kind u8, variant u16      the same: variants that are not served
    digests    SHA-256 (32)                           `DigestRow`, then (ordinal u64, kind u8,
                                                      variant u16) for each artifact with it,
                                                      blocks u32
    uses       class u8, stamp u32, SHA-256           empty
    pins       length u8, build ID, name (to 390)     created u64
    gone       ordinal u64                            empty
    origins    ordinal u64, BLAKE2b-128 of the place  first seen u64, last seen u64, `OriginRow`
    names      parent path u32, name (1 to 255)       path u32, public
    paths      path u32                               parent path u32, name
    pathids    path u32, ordinal u64                  public
    nameids    path u32, ordinal u64                  count u16, public
    containers container u32                          first seen u64, last seen u64, `ContainerRow`
    labels     name of a container (1 to 255)         container u32
    contents   container u32, directory u32,          directory u32, ordinal u64, kind u8,
               hash of the name u64                   variant u16, stamp u32, name, NUL, check
    dwz        path below /.dwz/ (1 to 500)           `DwzRow`
    seen       BLAKE2b-128 of a file identity         stamp u32, tag u8, SHA-256 or nothing
    journal    BLAKE2b-128 of the path, mnt_ns_id     first seen u64, last seen u64, `JournalRow`
               u64, boot ID (16), BLAKE2b-128 of who
    recent     last seen u64, key in *journal*        owner (8), empty for root of the host
    identities SHA-256                                `pack_aliases`: the aliases of those bytes
    aliases    type u8, length u8, alias, SHA-256     belief u8
    adopted    ordinal u64                            empty
    ambiguous  ordinal u64                            empty
    history    time u64                               `HistoryRow`, check

**meta**. "counters": ``next_ordinal``, ``next_path`` and ``next_container`` only grow. Their
numbers are never reused, because inode numbers of a mount contain them. They stay below 2**31, the
last one below 2**28. ``announced`` counts the announced commits. "format": version of the rows,
u32, in case the file ``format`` has a lower one. "evicted": the blobs removed to make room, see
`Evictions`. "floor" and a build ID: trust u8, standing u8, check, see `pack_floor`. Debuginfo of
that build ID with less belief is withheld. The row is written for an executable of the host or of a
package that is evicted or omitted, and for debuginfo that names a dwz file by its build ID. It is
removed when the store gets an executable with as much belief, or when the operator removes the
files of the build ID. At most 2**18 rows: each further row replaces the lowest of a few.

**ids, ordinals**. One row each for a build ID. ``kinds`` has bit 1<<kind for each row in
*artifacts*; ``primary_path`` is the first path at which an executable was seen, preferably a public
one (0: none); ``origins`` and ``paths`` count its rows in *origins* and *pathids*; ``next_variant``
is, for kinds 1 to 4, the number the next variant gets.

**artifacts, variants**. The best variant of a (build ID, kind) is in *artifacts*, where one read
finds it; all others are in *variants*. `ranking.rank` says which is better. Debuginfo with less
belief than the served executable, or than the floor (`ranking.is_withheld`), is in *variants*
alone, and has no bit in *ordinals*. If a build ID has only such debuginfo, bit 0 of ``kinds`` is
set instead. Numbers from 2**15 on are reserved for files of the host, so that a container cannot
use up all numbers; from 2**10 on the owner with the most rows in *origins* gets none, root of the
host aside. Trust, standing, owner and mode belong to the bytes: a sighting of the same
bytes at a place with more belief raises trust and standing in every row with that digest, and a
sighting at a place where all users could read them (according to its mode and ``reach``) sets owner
and mode. ``mode`` has those bits of the original that the reach allows. The trailer has flags (1:
truncated, 2: adopted), standing, and the check, which starts with a number made from the key: if it
does not match, the row belongs to another build ID, or is damaged.

**digests, uses**. ``size`` is the number of bytes of content. ``stored`` (bytes), ``inode`` and
``ctime_ns`` identify the file, so that a reader sees if it is still the one that was written.
*blocks* is the number of 512-byte blocks that it takes on disk. ``form`` is the encoding of the
content: plain, zstd's seekable format, or plain because compression gains nothing. A blob that is
damaged or gone is struck: inode and change time are 0. ``used`` is the time at which the blob was
last opened, or seen at its origin, in seconds, up to an hour early; it is also the key in *uses*.
Class 0 has blobs of the host and of packages, class 1 all others. ``verified`` is the time at which
all of it was last read and found right.

**pins**. Build IDs whose files are never removed. The empty name is for pins by a user; other names
are those of a profile or core file that names the build ID. The store need not know the build ID.

**gone**. Build IDs with removed blobs. The row in *digests* has been removed; if it was the last
artifact (``kinds`` is 0 then), so have the row in *ids* and the names. The places of those blobs,
and all other rows without a reference, are removed after all mounts were informed.

**origins**. The place is digest, path, host, container, mnt_ns_id, dev, ino. At most 256 rows for a
build ID: a further row replaces the one last seen longest ago of the owner with the most (see
`share_at`), but never the very first; root of the host has a reserve. Last seen is kept to the
minute. A place is public if all users could read the file there: ``reach`` is 7, and
``mode`` has all three read bits. Other places are shown only to users who may read the file
according to ``uid``, ``gid``, and those bits of ``mode`` that ``reach`` allows.

"public" at the end of other rows is a byte 1 if one of their places was public, even if that place
is forgotten by now; otherwise there is no such byte. In *names* it covers everything below the
path. In *contents* it is bit 7 of the kind; for a directory it covers everything below it. In
*containers* it is a field of the row. For rows that are not public, *origins* decides which users
see them.

**names, paths, pathids**. A tree of the paths that files were seen at. Path 0 is the root and has
no row. Impossible names never get a row: empty, ".", "..", over 255 bytes, with "/" or NUL. Nor do
paths that a reader could not follow: over 3848 bytes, or below /.build-id. At most 1024 paths for a
build ID, a quarter of them only for root of the host; if there is no room, a new place that
replaces a row of *origins* may replace its path. The last name of each path is also a child of
"path" 2**32-1, and *nameids* counts the paths at which a build ID has it.

**containers, labels, contents**. The files of each container, as it saw them; see `location_rows`.

**dwz**. Files that .gnu_debugaltlink names by path. A row belongs to the latest new place with at
least the same trust and standing. A build ID with the maximum number of origins gets no new name.
If a row has a build ID, no file was seen under the name; debuginfo refers to that build ID by the
name.

**identities, aliases**. Other names of the bytes of a blob, of the types of `AliasType`: a row of
*identities* has type u8, length u8 and the bytes for each alias, and ends with a check. A row of
*aliases* leads from an alias to the blob, whose build IDs are in *digests*. An alias leads to eight
blobs of each belief (`ranking.belief`) at most, so that many files of containers hide none of the
host. The value is the belief for which the row counts; older rows have none. Blobs captured before
these tables existed have no row until `check --repair` makes it, or the file is captured again.

**adopted, ambiguous**. Build IDs that are the adopted ID of at least one variant; and build IDs
that unrelated programs share. All files of the latter are in *variants*, none in *artifacts*. A
build ID is ambiguous if three executables with the same belief have three different code hashes, or
if `model.is_shared` lists it.

**history**. The contents of the store at a time, and the captures since the row before, see
`index.history`. One row per minute is kept for a day, one per ten minutes for a week, one per hour
for 32 days, one per day for 400 days: older rows are merged. At most 2**12 rows.

These five tables are absent in stores of earlier versions until a process that writes opens them.

**seen**. Tag 0: the file has a build ID, and the value has the digest of its bytes. Other tags:
`ABSENCE_TAGS`. The stamp is the time of the last sighting in seconds, with an error of up to a day.
At most 2**20 rows: a new row replaces the oldest of a few. Writers also remove rows of blobs that
are gone, and any row may be removed at any time. The hash includes ``MEMO_EPOCH``: a version of the
program that identifies more files has a higher epoch, which makes every old row unreachable.

**journal, recent**. The build ID that a path had for a viewer at a time, even if the bytes were not
captured. *who* consists of build ID, container, the container label in the control group (empty if
all namespaces are the host's), namespaces and host. The boot ID is zeros if it is unknown. Last
seen is kept to the minute; the other fields are those of the last sighting written. If there was no
room for the bytes of a recapturable file, the row ends with the identity of the file. If a limit
has removed the bytes, the time and the kinds of the removed artifacts follow. *recent* has one row
for each of *journal*, in order of last seen, with a hash of the owner of its share
(`share_at`). At most 2**20 rows: a further row removes up to a 32nd of them, of the owners with
the most those last seen longest ago.
"""

from __future__ import annotations

import functools
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from buildidfs.model import (
    QUALITIES,
    STANDINGS,
    Absence,
    Alias,
    AliasType,
    Artifact,
    BuildId,
    ByteRange,
    Digest,
    FileIdentity,
    Kind,
    Standing,
    Trust,
    bounded_ns,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

FORMAT_VERSION: Final = 1
FORMAT_PREFIX: Final = b"buildidfs store "

TABLES: Final = (
    "meta", "ids", "ordinals", "artifacts", "variants", "digests", "origins", "names", "paths",
    "pathids", "nameids", "dwz", "seen", "journal", "recent", "uses", "pins", "gone",
    "containers", "labels", "contents", "identities", "aliases", "adopted", "ambiguous",
    "history",
)  # fmt: skip

ADDED_TABLES: Final = frozenset(("identities", "aliases", "adopted", "ambiguous", "history"))
"""Tables that stores of earlier versions lack."""

MAX_NUMBER: Final = 2**31 - 1
MAX_VARIANT: Final = 2**16 - 1
MAX_FOREIGN_VARIANT: Final = 2**15 - 1
UNDIVIDED_VARIANTS: Final = 2**10
MAX_ORIGINS: Final = 256
MAX_PATHS: Final = 1024
MAX_DWZ_NAME: Final = 500
MAX_SEEN: Final = 2**20
MAX_JOURNAL: Final = 2**20
MAX_CONTAINER: Final = 2**28 - 1
MAX_FLOORS: Final = 2**18
MAX_ALIAS: Final = 255
MAX_HISTORY: Final = 2**12
MAX_HISTORY_GROUPS: Final = 64
MAX_HISTORY_NAME: Final = 128

#: Bit of ``OrdinalRow.kinds``: the build ID has withheld debuginfo only.
WITHHELD: Final = 1

#: The time of the last sighting is kept to the minute, so that frequent scans write little.
LAST_SEEN_SLACK_NS: Final = 60_000_000_000

MEMO_EPOCH: Final = b"1"

ABSENCE_TAGS: Final = {
    Absence.EMPTY: 1, Absence.NOT_ELF: 2, Absence.MALFORMED: 4, Absence.NO_BUILD_ID: 7,
    Absence.BAD_BUILD_ID: 8, Absence.TRUNCATED: 9,
}  # fmt: skip
"""Tags 3, 5 and 6 were for programs that now get an adopted ID. Files with such a tag are read
again.
"""
FORM_PLAIN: Final = 0
FORM_ZSTD: Final = 1
FORM_DENSE: Final = 2
FORM_AT: Final = 32

ABSENCES: Final = {tag: absence for absence, tag in ABSENCE_TAGS.items()}

MAX_PIN_NAME: Final = 390


#: Seconds: a use is recorded only if it is so much later than the recorded one.
USE_SLACK_S: Final = 3600

COUNTERS_KEY: Final = b"counters"
FORMAT_KEY: Final = b"format"
FLOOR_PREFIX: Final = b"floor"
DERIVATION_PREFIX: Final = b"derive"

U16: Final = Struct(">H")
U32: Final = Struct(">I")
U64: Final = Struct(">Q")
ORDINAL_KIND: Final = Struct(">QB")
ORDINAL_KIND_VARIANT: Final = Struct(">QBH")
PATH_ORDINAL: Final = Struct(">IQ")
DWZ: Final = Struct(">QB")
CHECK: Final = U32
SEEN: Final = Struct(">IB")

USE: Final = Struct(">BI32s")

_COUNTERS: Final = Struct(">6Q4QQ")
_ORDINAL: Final = Struct(">BIHH4H")
_ARTIFACT: Final = Struct(">H32sQqHIIBBQQ")
NAME_AT: Final = _ORDINAL.size
DIGEST: Final = Struct(">QQQqBIBI")
_RANGE: Final = Struct(">QQ")
_TRAILER: Final = Struct(">BBI")
_WITHOUT_SCRIPTS: Final = Struct(">H32sQqHIIBBQQBBI")

_TRUNCATED: Final = 1
_ADOPTED: Final = 2

#: The last byte of rows with a public place.
PUBLIC: Final = b"\1"

_KINDS: Final = tuple(Kind)
_TRUSTS: Final = tuple(Trust)

#: The kinds in each of the 32 possible bitmasks.
KINDS_OF_MASK: Final = tuple(
    tuple(kind for kind in Kind if mask & 1 << kind) for mask in range(1 << (max(Kind) + 1))
)


def number_in(value: bytes) -> int:
    """Return the number in a row of *names*."""
    return int.from_bytes(value[:4], "big")


def mask_of(kinds: tuple[Kind, ...]) -> int:
    """Return the bitmask with 1<<kind for each of ``kinds``."""
    mask = 0
    for kind in kinds:
        mask |= 1 << kind
    return mask


class StoreCounters(msgspec.Struct):
    """The row "counters" of *meta*. ``artifacts`` counts rows of *artifacts*, kinds 1 to 4."""

    next_ordinal: int = 1
    next_path: int = 1
    announced: int = 0
    blobs: int = 0
    blob_bytes: int = 0
    stored_bytes: int = 0
    artifacts: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])
    next_container: int = 1

    def pack(self) -> bytes:
        """The value of the row."""
        *numbers, artifacts, container = msgspec.structs.astuple(self)
        every = (*numbers, *artifacts, container)
        # Damaged rows may have any number, which was subtracted from these.
        return _COUNTERS.pack(*(min(max(each, 0), 2**64 - 1) for each in every))

    @classmethod
    def unpack(cls, value: bytes) -> StoreCounters:
        """The inverse of `pack`."""
        ordinal, path, announced, blobs, size, stored, *rest = _COUNTERS.unpack_from(value)
        return cls(ordinal, path, announced, blobs, size, stored, rest[:4], rest[4])


class OrdinalRow(msgspec.Struct):
    """A row of *ordinals*; mutable, since a commit changes several of its numbers."""

    build_id: BuildId
    kinds: int = 0
    primary_path: int = 0
    origins: int = 0
    paths: int = 0
    next_variant: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0, 0])

    def pack(self) -> bytes:
        """The value of the row."""
        numbers = _ORDINAL.pack(
            self.kinds, self.primary_path, self.origins, self.paths, *self.next_variant
        )
        return numbers + self.build_id

    @classmethod
    def unpack(cls, value: bytes) -> OrdinalRow:
        """The inverse of `pack`."""
        kinds, primary_path, origins, paths, *next_variant = _ORDINAL.unpack_from(value)
        return cls(build_id_of(value), kinds, primary_path, origins, paths, next_variant)


def build_id_of(value: bytes) -> BuildId:
    """Return the build ID in a row of *ordinals*; raises ValueError if there is none."""
    raw = value[_ORDINAL.size :]
    if not BuildId.MIN_BYTES <= len(raw) <= BuildId.MAX_BYTES:
        raise ValueError(f"a build ID of {len(raw)} bytes")
    return bytes.__new__(BuildId, raw)


def is_named(value: bytes, build_id: bytes) -> bool:
    """Return True if a row of *ordinals* belongs to that build ID."""
    return value[NAME_AT:] == build_id


def primary_path_of(value: bytes) -> int:
    """Return the primary path in a row of *ordinals*, 0 for none."""
    return int.from_bytes(value[1:5], "big")


def pack_artifact(artifact: Artifact) -> bytes:
    """Return a row of *artifacts* and *variants*; ordinal and kind are in the key."""
    row = _ARTIFACT.pack(
        artifact.variant,
        artifact.digest,
        artifact.size,
        bounded_ns(artifact.mtime_ns),
        artifact.mode,
        artifact.uid,
        artifact.gid,
        artifact.quality.stored,
        artifact.trust,
        artifact.first_seen_ns,
        artifact.segments,
    )
    if artifact.scripts:
        row += b"".join(_RANGE.pack(extent.offset, extent.size) for extent in artifact.scripts)
    flags = (_TRUNCATED if artifact.truncated else 0) | (_ADOPTED if artifact.adopted else 0)
    row += bytes((flags, artifact.standing.stored))
    return row + U32.pack(crc32(row, _start(artifact.ordinal, artifact.kind)))


def _start(ordinal: int, kind: int) -> int:
    """Return the start of the CRC-32 of a row of *artifacts*; only its lower 32 bits count.

    The start differs between kinds of one ordinal, and between ordinals of one kind.
    """
    return ordinal << 2 ^ ordinal >> 30 ^ kind & 3


def unpack_artifact(ordinal: int, kind: int, value: bytes) -> Artifact:
    """The inverse of `pack_artifact`; raises ValueError if the row does not belong to the key."""
    scripts: tuple[ByteRange, ...] = ()
    if len(value) == _WITHOUT_SCRIPTS.size:  # true of most rows
        fields = _WITHOUT_SCRIPTS.unpack(value)
    else:
        fields, scripts = _ARTIFACT.unpack_from(value), _scripts_in(value)
        fields += _TRAILER.unpack(value[-_TRAILER.size :])
    (variant, digest, size, mtime, mode, uid, gid, quality, trust, seen, segments,
     flags, standing, check) = fields  # fmt: skip
    # `_start`, inlined, because each lookup of a file decodes such a row.
    if check != crc32(value[:-4], ordinal << 2 ^ ordinal >> 30 ^ kind & 3):
        raise ValueError("it is not what was written for that build ID")
    return Artifact(
        ordinal,
        _KINDS[kind - 1],
        variant,
        bytes.__new__(Digest, digest),
        size,
        mtime,
        mode,
        uid,
        gid,
        QUALITIES[quality],
        _TRUSTS[trust],
        seen,
        scripts,
        segments,
        flags & _TRUNCATED == _TRUNCATED,
        STANDINGS[standing],
        flags & _ADOPTED == _ADOPTED,
    )


def _scripts_in(value: bytes) -> tuple[ByteRange, ...]:
    """Return the extents in a row of *artifacts*."""
    pairs = _RANGE.iter_unpack(value[_ARTIFACT.size : -_TRAILER.size])
    return tuple(ByteRange(offset, length) for offset, length in pairs)


class DigestRow(msgspec.Struct):
    """A row of *digests*.

    ``refs`` are (ordinal, kind, variant) of the artifacts with the blob, ``rank`` is its class in
    *uses*. ``taken`` is the number of bytes that the file takes on disk, a multiple of 512.
    """

    size: int
    refs: list[tuple[int, int, int]] = msgspec.field(default_factory=list)
    stored: int = 0
    inode: int = 0
    ctime_ns: int = 0
    form: int = 0
    used: int = 0
    rank: int = 0
    verified: int = 0
    taken: int = 0

    def pack(self) -> bytes:
        """The value of the row."""
        size, _, *rest, taken = msgspec.structs.astuple(self)
        row = DIGEST.pack(size, *rest)
        row += b"".join(ORDINAL_KIND_VARIANT.pack(*ref) for ref in self.refs)
        return row + U32.pack(min(taken // 512, 2**32 - 1))

    def refer_to(self, file: tuple[int, int, int], taken: int) -> int:
        """Refer to a file (stored, inode, ctime_ns) that takes ``taken`` bytes on disk; return how
        many more these are than before.
        """
        before, self.taken = self.taken, taken
        self.stored, self.inode, self.ctime_ns = file
        return taken - before

    @classmethod
    def unpack(cls, value: bytes) -> DigestRow:
        """The inverse of `pack`."""
        size, *rest = DIGEST.unpack_from(value)
        end = _refs_end(value)
        taken = U32.unpack_from(value, end)[0] * 512
        refs = list(ORDINAL_KIND_VARIANT.iter_unpack(value[DIGEST.size : end]))
        row = cls(size, refs, *rest)
        row.taken = taken
        return row


def _refs_end(value: bytes) -> int:
    """Return the end of the references in a row of *digests*. Raises ValueError if damaged."""
    end = len(value) - U32.size
    if end < DIGEST.size or (end - DIGEST.size) % ORDINAL_KIND_VARIANT.size:
        raise ValueError(f"a row of {len(value)} bytes")
    return end


def ordinal_in(value: bytes) -> bytes | None:
    """Return the key in *ordinals* of the first build ID in a row of *digests*; None if there is
    none.
    """
    end = DIGEST.size + ORDINAL_KIND_VARIANT.size
    return value[DIGEST.size : DIGEST.size + 8] if len(value) >= end else None


class DwzRow(msgspec.Struct, frozen=True):
    """A row of *dwz*: ordinal u64, standing and trust u8, public u8, build ID, check.

    The upper half of the byte for standing and trust is one more than the standing, the lower half
    is the trust. ``referred`` is empty if a file was seen under the name.
    """

    ordinal: int
    trust: Trust
    standing: Standing
    public: bool = False
    referred: bytes = b""

    @property
    def place(self) -> tuple[Trust, Standing]:
        """Return trust and standing of the place from which the name comes."""
        return self.trust, self.standing

    def pack(self, name: bytes) -> bytes:
        """The value of the row with the key ``name``."""
        believed = (self.standing.stored + 1) << 4 | self.trust
        return sealed(
            name, DWZ.pack(self.ordinal, believed) + bytes((self.public,)) + self.referred
        )

    @classmethod
    def unpack(cls, name: bytes, value: bytes) -> DwzRow:
        """The inverse of `pack`. Raises ValueError if the row does not belong to the name."""
        row = unsealed(name, value)
        ordinal, believed = DWZ.unpack_from(row)
        if not believed >> 4:
            raise ValueError("it has no standing")
        trust, standing = _TRUSTS[believed & 15], STANDINGS[(believed >> 4) - 1]
        public, referred = row[DWZ.size : DWZ.size + 1] == PUBLIC, row[DWZ.size + 1 :]
        return cls(ordinal, trust, standing, public, referred)


def sealed(key: bytes, row: bytes) -> bytes:
    """Return a row with its check at the end."""
    return row + CHECK.pack(crc32(row, crc32(key)))


def unsealed(key: bytes, value: bytes) -> bytes:
    """Return a row without its check; raises ValueError if the row does not belong to the key."""
    row = value[: -CHECK.size]
    if value != sealed(key, row):
        raise ValueError("it is not what was written for that key")
    return row


def derivation_key(digest: bytes) -> bytes:
    """Return the key of a row of *meta* that requests a debug file made from a blob."""
    return DERIVATION_PREFIX + digest


def pack_derivation(key: bytes, build_id: bytes) -> bytes:
    """Return the row of *meta* with that key. ``build_id`` is the ID of the debug file to
    be made.
    """
    return sealed(key, build_id)


def unpack_derivation(key: bytes, value: bytes) -> tuple[Digest, BuildId]:
    """The inverse of `pack_derivation`; raises ValueError if the row does not belong to the key."""
    build_id = unsealed(key, value)
    return Digest(key.removeprefix(DERIVATION_PREFIX)), BuildId(build_id)


def floor_key(build_id: bytes) -> bytes:
    """Return the key in *meta* of a floor: debuginfo with less belief than it is withheld."""
    return FLOOR_PREFIX + build_id


def pack_floor(key: bytes, trust: Trust, standing: Standing) -> bytes:
    """Return the row of *meta* with that key."""
    return sealed(key, bytes((trust, standing.stored)))


def unpack_floor(key: bytes, value: bytes) -> tuple[Trust, Standing]:
    """The inverse of `pack_floor`; raises ValueError if the row does not belong to the key."""
    trust, standing = unsealed(key, value)
    return Trust(trust), Standing.of_stored(standing)


def pack_aliases(digest: bytes, aliases: Iterable[Alias]) -> bytes:
    """Return a row of *identities*."""
    return sealed(digest, b"".join(map(alias_prefix, aliases)))


@functools.lru_cache(maxsize=64)  # a capture reads the same row six times
def unpack_aliases(digest: bytes, value: bytes) -> tuple[Alias, ...]:
    """The inverse of `pack_aliases`; raises ValueError if the row does not belong to the key."""
    row, found, at = unsealed(digest, value), [], 0
    while at < len(row):
        kind, size = row[at], row[at + 1]
        found.append(Alias(AliasType(kind), row[at + 2 : at + 2 + size]))
        at += 2 + size
    return tuple(found)


def alias_prefix(alias: Alias) -> bytes:
    """Return the part of a key in *aliases* that contains the alias."""
    return bytes((alias.type, len(alias.value))) + alias.value


def alias_of(key: bytes) -> tuple[Alias, Digest]:
    """Return alias and blob in a key of *aliases*; raises ValueError if it does not decode."""
    end = 2 + key[1]
    return Alias(AliasType(key[0]), key[2:end]), Digest(key[end:])


class HistoryGroup(msgspec.Struct, frozen=True, array_like=True):
    """A container (``kind`` 0) or an image (1), and its build IDs as in `HistoryRow`."""

    kind: int
    name: str
    build_ids: int
    executable: int
    symbols: int
    debuginfo: int


class HistoryRow(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a store at ``time_ns`` (Unix), and the events since the row before.

    ``counted`` is the number of build IDs that were counted, 0 if none were. Of these,
    ``executable`` have an executable, ``symbols`` have symbols, and ``debuginfo`` have debuginfo.
    ``captured`` and ``lost`` count files since the row before. ``lag_ms`` is the longest time that
    a file had waited to be copied. Sizes are in bytes. There are at most `MAX_HISTORY_GROUPS` of
    ``groups``.
    """

    time_ns: int
    build_ids: int = 0
    blobs: int = 0
    stored_bytes: int = 0
    index_bytes: int = 0
    free_bytes: int = 0
    counted: int = 0
    executable: int = 0
    symbols: int = 0
    debuginfo: int = 0
    captured: int = 0
    lost: int = 0
    lag_ms: int = 0
    groups: tuple[HistoryGroup, ...] = ()


_decode_history = msgspec.msgpack.Decoder(HistoryRow).decode


def pack_history(row: HistoryRow) -> tuple[bytes, bytes]:
    """Return key and value of a row of *history*."""
    key = U64.pack(row.time_ns)
    return key, sealed(key, _encode(row))


def unpack_history(key: bytes, value: bytes) -> HistoryRow:
    """The inverse of `pack_history`. Raises the errors of decoding."""
    row = _decode_history(unsealed(key, value))
    if U64.pack(row.time_ns) != key:
        raise ValueError("it is of another time")
    return row


def pin_key(build_id: BuildId, name: bytes) -> bytes:
    """Return the key of a row of *pins*."""
    return bytes([len(build_id)]) + build_id + name


def pin_of(key: bytes) -> tuple[BuildId, bytes]:
    """The inverse of `pin_key`."""
    end = 1 + key[0]
    return BuildId(key[1:end]), key[end:]


_encode = msgspec.msgpack.Encoder().encode


def seen_key(identity: FileIdentity) -> bytes | None:
    """Return the key of a row of *seen*; None if another file may get the same identity later."""
    if identity.scope is None:
        return None
    fields = (
        MEMO_EPOCH,
        identity.scope,
        identity.dev,
        identity.ino,
        identity.size,
        bounded_ns(identity.mtime_ns),
        bounded_ns(identity.ctime_ns),
        identity.mode,
        identity.uid,
        identity.gid,
    )
    return fingerprint(_encode(fields))


def stamp_of(ns: int) -> int:
    """Return a time in seconds, limited to 32 bits."""
    return min(max(ns // 1_000_000_000, 0), 2**32 - 1)


_FILE: Final = Struct(">QQq")
_PLAIN_FILE: Final = Struct(">QQQq")


def is_file(value: bytes, stored: int, inode: int, ctime_ns: int) -> bool:
    """Return True if a row of *digests* belongs to the file with that stat(2) result."""
    return value[8:32] == _FILE.pack(stored, inode, ctime_ns)


def is_plain_file(value: bytes, size: int, inode: int, ctime_ns: int) -> bool:
    """Return True if `is_file`, and the content has the size of the file."""
    return value[:32] == _PLAIN_FILE.pack(size, size, inode, ctime_ns)


def is_struck(value: bytes) -> bool:
    """Return True if a row of *digests* belongs to a blob that was found to be damaged or gone."""
    return value[16:32] == bytes(16)


def is_digest_row(key: bytes, value: bytes) -> bool:
    """Return True if a row of *digests* decodes."""
    try:
        _refs_end(value)
    except ValueError:
        return False
    return len(key) == 32


def size_in(value: bytes) -> int:
    """Return the size of the content from a row of *digests*."""
    return int.from_bytes(value[:8], "big")


def has_ref(value: bytes, ref: bytes) -> bool:
    """Return True if a row of *digests* refers to an artifact whose key begins with ``ref``."""
    return any(
        value.startswith(ref, at)
        for at in range(DIGEST.size, len(value), ORDINAL_KIND_VARIANT.size)
    )


def is_variant(value: bytes | None, number: int, digest: bytes) -> bool:
    """Return True if a row of *artifacts* or *variants* has that number and that blob."""
    return value is not None and value[:34] == number.to_bytes(2, "big") + digest
