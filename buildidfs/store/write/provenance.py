# SPDX-License-Identifier: Apache-2.0
"""The origins of a blob, kept beside it, from which a lost index can be rebuilt.

An extended attribute of the blob holds it, written before the blob gets its name
(`blobs.files.attach_origin`). msgpack: an array of the version of this format and an array of
claims, see `Claim`; then an array of aliases, each an array of type and bytes, which blobs of
earlier versions lack.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import Alias, AliasType, Kind
from buildidfs.store import location_rows, schema
from buildidfs.store.blobs import files
from buildidfs.store.index.queries import DAMAGE, prefixed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Artifact, BuildId, Digest
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.values import NewCapture

_VERSION: Final = 1
_MAX_CLAIMS: Final = 16


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """The artifacts of a blob under one build ID, and a row of *origins* that it was seen at.

    Fields are those of `Artifact`; ``kinds`` is a bitmask as in *ordinals*. The origin is the first
    of those believed most, of the public ones if there are any, and empty if all were forgotten.
    """

    build_id: bytes
    kinds: int
    quality: int
    scripts: tuple[tuple[int, int], ...]
    segments: int
    trust: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    first_seen_ns: int
    origin: bytes
    truncated: bool
    standing: int


class _Provenance(msgspec.Struct, array_like=True):
    version: int
    claims: tuple[Claim, ...]
    aliases: tuple[tuple[int, bytes], ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Provenance)


def pack(claims: Iterable[Claim], aliases: Iterable[Alias] = ()) -> bytes:
    """Pack the aliases and as many claims as fit, the most trusted first."""
    named = tuple((int(each.type), each.value) for each in dict.fromkeys(aliases))
    chosen = sorted(claims, key=lambda claim: (-claim.trust, claim.first_seen_ns, claim.build_id))
    chosen = chosen[:_MAX_CLAIMS]
    while True:
        data = _encode(_Provenance(_VERSION, tuple(chosen), named))
        if len(data) <= files.MAX_ORIGIN_BYTES:
            return data
        chosen.pop()


def unpack(data: bytes) -> tuple[Claim, ...]:
    """Return the claims in packed data; none if it is damaged or of a later version."""
    try:
        found = _decoder.decode(data)
    except msgspec.MsgspecError:
        return ()
    return found.claims if found.version == _VERSION else ()


def aliases_in(data: bytes) -> tuple[Alias, ...]:
    """Return the aliases in packed data; none if it is damaged or of another type."""
    try:
        found = _decoder.decode(data)
        aliases = tuple(Alias(AliasType(kind), value) for kind, value in found.aliases)
    except (msgspec.MsgspecError, ValueError):
        return ()
    sizes = all(0 < len(each.value) <= schema.MAX_ALIAS for each in aliases)
    return aliases if found.version == _VERSION and sizes else ()


def of_captures(captures: Iterable[NewCapture], digest: Digest) -> bytes:
    """Return the claims of a blob from its captures."""
    claims: dict[BuildId, Claim] = {}
    aliases: dict[Alias, None] = {}
    for new in captures:
        aliases.update(dict.fromkeys(new.aliases))
        origin, kinds = new.sighting.origin, schema.mask_of(new.kinds)
        before = claims.get(new.build_id)
        believed = (origin.trust, origin.standing)
        if before is not None and (before.trust, before.standing) >= believed:
            continue
        claims[new.build_id] = Claim(
            bytes(new.build_id),
            kinds,
            new.quality.stored,
            tuple((extent.offset, extent.size) for extent in new.scripts),
            new.segments,
            origin.trust,
            origin.shown_mode,
            origin.identity.uid,
            origin.identity.gid,
            schema.clamped(origin.identity.mtime_ns),
            new.sighting.seen_ns,
            location_rows.pack_origin(
                digest, kinds, origin, new.sighting.seen_ns, new.sighting.seen_ns
            ),
            new.truncated,
            origin.standing.stored,
        )
    return pack(claims.values(), aliases)


def of_rows(env: Environment, txn: Txn, digest: Digest, row: schema.DigestRow) -> bytes:
    """Return the claims of a blob from its rows."""
    kinds: dict[int, int] = {}
    artifacts: dict[int, Artifact] = {}
    for ordinal, kind, variant in row.refs:
        artifact = _artifact(env, txn, ordinal, kind, variant)
        if artifact is not None:
            kinds[ordinal] = kinds.get(ordinal, 0) | 1 << kind
            artifacts.setdefault(ordinal, artifact)
    claims = []
    for ordinal, artifact in artifacts.items():
        named = txn.get(schema.U64.pack(ordinal), db=env.tables["ordinals"])
        if named is None:
            continue
        claims.append(
            Claim(
                bytes(schema.build_id_of(named)),
                kinds[ordinal],
                artifact.quality.stored,
                tuple((extent.offset, extent.size) for extent in artifact.scripts),
                artifact.segments,
                artifact.trust,
                artifact.mode,
                artifact.uid,
                artifact.gid,
                artifact.mtime_ns,
                artifact.first_seen_ns,
                _origin(env, txn, ordinal, digest),
                artifact.truncated,
                artifact.standing.stored,
            )
        )
    value = txn.get(digest, db=env.tables["identities"])
    return pack(claims, () if value is None else schema.unpack_aliases(digest, value))


def _artifact(env: Environment, txn: Txn, ordinal: int, kind: int, variant: int) -> Artifact | None:
    value = txn.get(schema.ORDINAL_KIND.pack(ordinal, kind), db=env.tables["artifacts"])
    if value is None or value[:2] != variant.to_bytes(2, "big"):
        key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
        value = txn.get(key, db=env.tables["variants"])
    return None if value is None else schema.unpack_artifact(ordinal, Kind(kind), value)


def _origin(env: Environment, txn: Txn, ordinal: int, digest: Digest) -> bytes:
    """Return the row of the most trusted place; among equals a public one, then the first seen."""
    best, chosen = (0, False, 0), b""
    for _, value in prefixed(txn, env.tables["origins"], schema.U64.pack(ordinal)):
        try:
            of, _, origin, first, _ = location_rows.unpack_origin(value)
        except DAMAGE:
            continue
        rank = (origin.trust, origin.is_public, -first)
        if of == digest and (not chosen or rank > best):
            best, chosen = rank, value
    return chosen
