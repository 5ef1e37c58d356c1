# SPDX-License-Identifier: Apache-2.0
"""Rows that tell of places: those of *origins*. `schema` describes them."""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from buildidfs.model import Digest, FileIdentity, NamespaceSet, Origin, Trust, fingerprint
from buildidfs.store import schema

TIMES: Final = Struct(">QQ")

_TRUSTS: Final = tuple(Trust)


class OriginRow(msgspec.Struct, array_like=True):
    """The msgpack part of a row of *origins*. Texts are bytes, whatever encoding they have."""

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
    apart: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(OriginRow).decode


def origin_key(ordinal: int, digest: Digest, origin: Origin) -> bytes:
    """Key of a row of *origins*: the same for the same place, whenever it was seen."""
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


def pack_origin(digest: Digest, kinds: int, origin: Origin, first: int, last: int) -> bytes:
    """A row of *origins*."""
    identity, spaces = origin.identity, origin.namespaces
    row = OriginRow(
        bytes(digest),
        kinds,
        origin.path,
        identity.dev,
        identity.ino,
        identity.size,
        schema.clamped(identity.mtime_ns),
        schema.clamped(identity.ctime_ns),
        identity.mode,
        identity.uid,
        identity.gid,
        identity.scope,
        (spaces.net, spaces.uts, spaces.ipc, spaces.pid, spaces.user, spaces.mnt, spaces.cgroup),
        origin.mnt_ns_id,
        origin.cgroup,
        _text(origin.container),
        _text(origin.host),
        origin.trust,
        _text(origin.scanner),
        origin.apart,
    )
    return TIMES.pack(first, last) + _encode(row)


def unpack_origin(value: bytes) -> tuple[Digest, int, Origin, int, int]:
    """The inverse of `pack_origin`: digest, kinds, origin, first and last seen."""
    first, last = TIMES.unpack_from(value)
    row = _decode(memoryview(value)[TIMES.size :])
    identity = FileIdentity(
        row.dev,
        row.ino,
        row.size,
        row.mtime_ns,
        row.ctime_ns,
        row.mode,
        row.uid,
        row.gid,
        row.scope,
    )
    origin = Origin(
        row.path,
        identity,
        NamespaceSet(*row.namespaces),
        row.mnt_ns_id,
        row.cgroup,
        row.container.decode("utf-8", "surrogateescape"),
        row.host.decode("utf-8", "surrogateescape"),
        _TRUSTS[row.trust],
        row.scanner.decode("utf-8", "surrogateescape"),
        row.apart,
    )
    return Digest(row.digest), row.kinds, origin, first, last


def _text(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
