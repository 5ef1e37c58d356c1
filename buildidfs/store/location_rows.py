# SPDX-License-Identifier: Apache-2.0
"""Rows of places: *origins*, *journal*, and the files of containers. See `schema`.

*containers*. Each container with captured files has a number, which is never reused. The names, the
image and the ID in its row are for people.

*labels*. The name of a container: `spelled` of its `label_of`. The same label may later mean
another container (inode numbers of namespaces are reused) or another image (tags are moved), and a
user who may make control groups or bundles can give a container any label. So the name of the later
one ends with ``~`` and a suffix that makes it unique.

*contents*. One row for each name in a directory. Directories have numbers within their container,
from 1; 0 is its root. The key has the hash of the name and not the name, so that a listing can
resume at a number. The value has the number of the directory that the name leads to, or 0 and the
artifact that was last seen there, which may have been removed since. Its kind has `PUBLIC_BIT` if
all users could read the file there, or a file below the directory. The stamp is the time of that
sighting in seconds, up to a minute early. A name that once led to a directory does so until the
directory is empty. A directory has a higher number than its parent.

A container has at most `MAX_ENTRIES` rows; further files are not recorded here. If there are more
than `MAX_CONTAINERS`, or more rows in total than `MAX_CONTENTS`, the owner with the most (see
`share_at`) loses the containers last seen longest ago; each transaction removes more rows than
it has added. A row without an owner was written by an older version. A container keeps its row, but
no directory in the mount, if a limit has removed all its files, because the journal names it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from buildidfs.model import (
    BuildId,
    ContainerNames,
    Digest,
    FileIdentity,
    NamespaceSet,
    Origin,
    Trust,
    bounded_ns,
    fingerprint,
)
from buildidfs.store import schema

TIMES: Final = Struct(">QQ")

#: Fingerprint of the path, mnt_ns_id, boot ID; then the fingerprint of the viewer.
_JOURNAL_PLACE: Final = Struct(">16sQ16s")


class OriginRow(msgspec.Struct, array_like=True):
    """The msgpack part of a row of *origins*. Texts are bytes in any encoding."""

    digest: bytes
    kinds: int
    path: bytes
    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    uid: int
    gid: int
    scope: bytes | None
    namespaces: tuple[int, int, int, int, int, int, int]
    mnt_ns_id: int
    cgroup: bytes
    container: bytes
    host: bytes
    trust: int
    scanner: bytes
    apart: int
    cgroup_id: int
    reach: int
    archive: bytes
    signature: bytes = b""
    owner: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OriginRow).decode


def dwz_name(path: bytes) -> bytes:
    """Return the key in *dwz* of a file that was seen at ``path``; empty if it has none."""
    _, found, name = path.rpartition(b"/.dwz/")
    return name if found and len(name) <= schema.MAX_DWZ_NAME else b""


def origin_key(ordinal: int, digest: Digest, origin: Origin) -> bytes:
    """Return the key of a row of *origins*; it depends on the place, not on the time."""
    place = (
        bytes(digest),  # msgpack knows no subclasses
        origin.path,
        _text(origin.host),
        _text(origin.container),
        origin.mnt_ns_id,
        origin.identity.dev,
        origin.identity.ino,
    )
    return schema.U64.pack(ordinal) + fingerprint(_encode(place))


def pack_origin(
    digest: Digest, kinds: int, origin: Origin, first: int, last: int, reach: int | None = None
) -> bytes:
    """Return a row of *origins*. ``reach`` is written in place of the reach in ``origin``."""
    row = OriginRow(
        bytes(digest),
        kinds,
        origin.path,
        *_fields(origin.identity),
        msgspec.structs.astuple(origin.namespaces),
        origin.mnt_ns_id,
        origin.cgroup,
        _text(origin.container),
        _text(origin.host),
        origin.trust,
        _text(origin.scanner),
        origin.apart,
        origin.cgroup_id,
        origin.reach if reach is None else reach,
        origin.archive,
        origin.signature,
        origin.owner,
    )
    return TIMES.pack(first, last) + _encode(row)


def origin_row(value: bytes) -> OriginRow:
    """Return the msgpack part of a row of *origins*. Raises the errors of decoding."""
    return _decode(memoryview(value)[TIMES.size :])


def reach_in(value: bytes) -> int:
    """Return the `Origin.reach` that a row of *origins* has."""
    return origin_row(value).reach


def unpack_origin(value: bytes) -> tuple[Digest, int, Origin, int, int]:
    """The inverse of `pack_origin`: digest, kinds, origin, first and last seen."""
    first, last = TIMES.unpack_from(value)
    row = origin_row(value)
    identity = (row.dev, row.ino, row.size, row.mtime_ns, row.ctime_ns, row.mode, row.uid, row.gid)
    origin = Origin(
        row.path,
        FileIdentity(*identity, row.scope),
        NamespaceSet(*row.namespaces),
        row.mnt_ns_id,
        row.cgroup,
        _string(row.container),
        _string(row.host),
        Trust(row.trust),
        _string(row.scanner),
        row.apart,
        row.cgroup_id,
        row.reach,
        row.archive,
        row.signature,
        owner=row.owner,
    )
    return Digest(row.digest), row.kinds, origin, first, last


def place_of(key: bytes, value: bytes) -> Digest | None:
    """Return the blob of a row of *origins*; None if the row has a wrong key.

    Raises the errors of decoding.
    """
    first, last = TIMES.unpack_from(value)
    row = origin_row(value)
    place = (row.digest, row.path, row.host, row.container, row.mnt_ns_id, row.dev, row.ino)
    Trust(row.trust)
    in_place = key[8:] == fingerprint(_encode(place)) and first <= last
    return Digest(row.digest) if in_place else None


class Removal(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a build ID that were removed at ``time`` (Unix time, s) to make room; or, if
    ``aged``, because they were unused for longer than max-age; or because they were ``damaged``.

    Bit ``1 << kind`` of ``kinds`` is set for each kind of artifact that the bytes were.
    """

    time: int
    kinds: int
    aged: bool = False
    damaged: bool = False

    def __or__(self, other: Removal | None) -> Removal:
        """Return the later removal with the kinds of both."""
        if other is None:
            return self
        later = max(self, other, key=lambda each: each.time)
        return msgspec.structs.replace(later, kinds=self.kinds | other.kinds)


class JournalRecord(msgspec.Struct, frozen=True):
    """A build ID seen at a path in one container, with the first and last time (Unix time, ns).

    A field with the name of a field of `Origin` has the same meaning. ``boot`` is the boot ID, 16
    bytes, or empty if unknown: ``mnt_ns_id`` is unambiguous only together with it. ``omitted``
    identifies a file for which the store had no room; it is None for other files. ``removed`` is
    the last removal of its bytes by a limit; the store may have captured them since. ``owner`` is 0
    in rows of earlier versions.
    """

    build_id: BuildId
    path: bytes
    namespaces: NamespaceSet
    apart: int
    mnt_ns_id: int
    cgroup: bytes
    container: str
    host: str
    boot: bytes
    scanner: str
    first_seen_ns: int
    last_seen_ns: int
    cgroup_id: int = 0
    omitted: FileIdentity | None = None
    removed: Removal | None = None
    owner: int = 0


class JournalRow(msgspec.Struct, array_like=True):
    """The msgpack part of a row of *journal*."""

    build_id: bytes
    path: bytes
    namespaces: tuple[int, int, int, int, int, int, int]
    apart: int
    cgroup: bytes
    container: bytes
    host: bytes
    scanner: bytes
    cgroup_id: int
    omitted: tuple[int, int, int, int, int, int, int, int, bytes | None] | None
    owner: int = 0


class RemovedRow(JournalRow, array_like=True):
    """A `JournalRow` whose bytes were removed by a limit."""

    removed: Removal | None = None


_decode_journal = msgspec.msgpack.Decoder(RemovedRow).decode
_FIELDS: Final = len(JournalRow.__struct_fields__)
_MSGPACK_ARRAY: Final = 0x90  # of less than 16 elements
_ID_AT: Final = TIMES.size + 3  # behind the heads of the array and of its first element


def journal_prefix(path: bytes, mnt_ns_id: int, boot: bytes | None = None) -> bytes:
    """Return the start of keys in *journal* for a path in a mount namespace; if ``boot`` is None,
    in any boot.
    """
    prefix = _JOURNAL_PLACE.pack(fingerprint(path), mnt_ns_id, boot or b"")
    return prefix if boot is not None else prefix[:-16]


def journal_key(origin: Origin, build_id: BuildId, boot: bytes, label: str | None) -> bytes:
    """Return the key of a row of *journal*; ``label`` is the container label in the
    control group.
    """
    who = (
        bytes(build_id),  # msgpack knows no subclasses
        _text(origin.container),
        None if label is None else _text(label),
        origin.namespaces,
        _text(origin.host),
    )
    place = _JOURNAL_PLACE.pack(fingerprint(origin.path), origin.mnt_ns_id, boot)
    return place + fingerprint(_encode(who))


def pack_journal(
    origin: Origin,
    build_id: BuildId,
    first: int,
    last: int,
    *,
    omitted: bool = False,
    removed: Removal | None = None,
) -> bytes:
    """Return a row of *journal*. ``omitted`` identifies a file that was not captured for lack of
    room, see `JournalRecord`.
    """
    fields = (
        bytes(build_id),
        origin.path,
        msgspec.structs.astuple(origin.namespaces),
        origin.apart,
        origin.cgroup,
        _text(origin.container),
        _text(origin.host),
        _text(origin.scanner),
        origin.cgroup_id,
        _fields(origin.identity) if omitted else None,
        origin.owner,
    )
    row = JournalRow(*fields) if removed is None else RemovedRow(*fields, removed)
    return TIMES.pack(first, last) + _encode(row)


def mark_removed(value: bytes, removed: Removal, omitted: FileIdentity | None) -> bytes:
    """Return a row of *journal* with a removal; ``omitted`` is a file of the host that has the
    bytes still.
    """
    old = _decode_journal(memoryview(value)[TIMES.size :])
    row = msgspec.structs.replace(
        old,
        omitted=old.omitted if omitted is None else _fields(omitted),
        removed=removed | old.removed,
    )
    return value[: TIMES.size] + _encode(row)


def is_omitted(value: bytes) -> bool:
    """Return True if a row of *journal* is for a file that was not captured for lack of room."""
    return _decode_journal(memoryview(value)[TIMES.size :]).omitted is not None


def removal_in(value: bytes) -> Removal | None:
    """Return the removal of a row of *journal*. A row without one is not decoded."""
    if value[TIMES.size] == _MSGPACK_ARRAY | _FIELDS:
        return None
    return _decode_journal(memoryview(value)[TIMES.size :]).removed


def build_id_in(value: bytes) -> bytes:
    """Return the build ID of a row of *journal* without decoding the row."""
    return value[_ID_AT : _ID_AT + value[_ID_AT - 1]]


def unpack_journal(key: bytes, value: bytes) -> JournalRecord:
    """The inverse of `journal_key` and `pack_journal`."""
    _, mnt_ns_id, boot = _JOURNAL_PLACE.unpack_from(key)
    first, last = TIMES.unpack_from(value)
    row = _decode_journal(memoryview(value)[TIMES.size :])
    return JournalRecord(
        BuildId(row.build_id),
        row.path,
        NamespaceSet(*row.namespaces),
        row.apart,
        mnt_ns_id,
        row.cgroup,
        _string(row.container),
        _string(row.host),
        boot if any(boot) else b"",
        _string(row.scanner),
        first,
        last,
        row.cgroup_id,
        None if row.omitted is None else FileIdentity(*row.omitted),
        row.removed,
        row.owner,
    )


def _fields(identity: FileIdentity) -> tuple[int, int, int, int, int, int, int, int, bytes | None]:
    times = bounded_ns(identity.mtime_ns), bounded_ns(identity.ctime_ns)
    owner = identity.mode, identity.uid, identity.gid, identity.scope
    return identity.dev, identity.ino, identity.size, *times, *owner


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _string(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


PUBLIC_BIT: Final = 0x80


KEY: Final = Struct(">IIQ")


VALUE: Final = Struct(">IQBHI")


class CapturedContainer(msgspec.Struct, frozen=True):
    """A container with captured files, an image or package, or a host of a bundle.

    ``name`` is its directory in `containers/`, ``label`` and ``token`` are `label_of` and
    `token_of` its places. ``called`` has its names and its image. ``id`` and each of these are
    empty if unknown. Times are in nanoseconds of Unix time. ``public`` is True if all users could
    read one of its files. ``owner`` is that of its share (`share_at`). ``is_empty`` is True if
    a limit has removed all its files.
    """

    number: int
    name: bytes
    label: str
    id: str
    called: ContainerNames
    host: str
    first_seen_ns: int
    last_seen_ns: int
    token: bytes = b""
    public: bool = False
    owner: str = ""
    is_empty: bool = False


class ContainerEntry(msgspec.Struct, frozen=True):
    """A name in a directory of a container.

    ``directory`` is the number of the directory that it leads to; 0 for a file, which is
    (``ordinal``, ``kind``, ``variant``). ``offset`` is the position of the entry in a listing.
    ``public`` is True if all users could read the file, or a file below the directory.
    """

    name: bytes
    offset: int
    directory: int
    ordinal: int
    kind: int
    variant: int
    public: bool = False


class ContainerRow(msgspec.Struct, array_like=True):
    """The msgpack part of a row of *containers*. Texts are bytes in any encoding."""

    name: bytes
    label: bytes
    id: bytes
    image: bytes
    host: bytes
    token: bytes
    next_directory: int = 1
    entries: int = 0
    public: bool = False
    called: bytes = b""
    pod: bytes = b""
    namespace: bytes = b""
    owner: bytes = b""

    @property
    def names(self) -> ContainerNames:
        """Return the user-given names of the container, and its image."""
        return ContainerNames(*map(_string, (self.called, self.pod, self.namespace, self.image)))


_decode_container = msgspec.msgpack.Decoder(ContainerRow).decode


def offset_of(name: bytes) -> int:
    """Return the number that stands for a name in a key and as an offset of listings, 1
    to 2**63-1.
    """
    return int.from_bytes(fingerprint(name, 8), "big") >> 1 or 1


def unpack_container(number: int, value: bytes) -> tuple[CapturedContainer, ContainerRow]:
    """Return a container and its row. Raises the errors of decoding."""
    first, last = TIMES.unpack_from(value)
    row = _decode_container(memoryview(value)[TIMES.size :])
    label, its_id, host, owner = map(_string, (row.label, row.id, row.host, row.owner))
    found = CapturedContainer(
        number, row.name, label, its_id, row.names, host, first, last, row.token, row.public, owner,
        not row.entries,
    )  # fmt: skip
    return found, row


def pack_entry(
    key: bytes, name: bytes, directory: int, artifact: tuple[int, int, int], stamp: int
) -> bytes:
    """Return a row of *contents*."""
    return schema.sealed(key, VALUE.pack(directory, *artifact, stamp) + name + b"\0")


def unpack_entry(key: bytes, value: bytes) -> ContainerEntry:
    """The inverse of `pack_entry`. Raises the errors of decoding."""
    row = schema.unsealed(key, value)
    directory, ordinal, kind, variant, _ = VALUE.unpack_from(row)
    name, offset = row[VALUE.size : -1], KEY.unpack(key)[2]
    public = bool(kind & PUBLIC_BIT)
    kind &= ~PUBLIC_BIT
    return ContainerEntry(name, offset, directory, ordinal, kind, variant, public)


def pack_container(first: int, last: int, row: ContainerRow) -> bytes:
    """The inverse of `unpack_container`; ``first`` and ``last`` are the times of the sightings."""
    return TIMES.pack(first, last) + _encode(row)
