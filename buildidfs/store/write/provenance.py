# SPDX-License-Identifier: Apache-2.0
"""The origins of a blob, kept beside it, from which a lost index can be rebuilt.

They are in an extended attribute of the blob, which is written before the blob gets its name
(`blobs.files.attach_origin`). Its msgpack value is an array of the format version, an array of
claims (see `Claim`), an array of aliases (each an array of type and bytes), and an array of further
places (see `OtherOrigin`). Blobs of earlier versions lack the last two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.model import NO_NAMES, Alias, AliasType, ContainerNames, Standing, Trust, bounded_ns
from buildidfs.store import location_rows, schema
from buildidfs.store.blobs import files
from buildidfs.store.index.locations import as_bytes, label_of, token_of
from buildidfs.store.index.queries import DAMAGE, IndexRows, prefixed
from buildidfs.store.index.ranking import believed
from buildidfs.store.write.containers import NOTHING_CALLED, row_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from buildidfs.model import Artifact, BuildId, Digest, Origin
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.values import NewCapture

_VERSION: Final = 1
_MAX_CLAIMS: Final = 16

#: The number of other containers that are kept beside a blob. The data is rewritten for each
#: container in which the blob is the first file, and a shell may be the first file of any number.
_MAX_PLACES: Final = 8

#: The number of other places, those last seen, that are examined.
_LOOKED_AT: Final = 64

_Names = tuple[bytes, bytes, bytes, bytes]
_UNNAMED: Final[_Names] = (b"", b"", b"", b"")


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """The artifacts of a blob under one build ID, and a row of *origins* of the blob.

    Fields are those of `Artifact`; ``kinds`` is a bitmask as in *ordinals*. The origin is the first
    one with the highest belief, preferably public; it is empty if all origins were forgotten.
    ``called`` has the fields of the `ContainerNames` of its container.
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
    called: _Names = _UNNAMED


class OtherOrigin(msgspec.Struct, frozen=True, array_like=True):
    """A row of *origins* of a blob in another container than its claim, and the names of that
    container.
    """

    build_id: bytes
    origin: bytes
    called: _Names = _UNNAMED


class _Provenance(msgspec.Struct, array_like=True):
    version: int
    claims: tuple[Claim, ...]
    aliases: tuple[tuple[int, bytes], ...] = ()
    places: tuple[OtherOrigin, ...] = ()


class _Seen(NamedTuple):
    """A row of *origins*: packed and unpacked, with the first and last time."""

    row: bytes
    origin: Origin
    first: int
    last: int


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(_Provenance)


def pack(
    claims: Iterable[Claim], aliases: Iterable[Alias] = (), places: Iterable[OtherOrigin] = ()
) -> bytes:
    """Pack the aliases, then as many claims as fit, the most trusted first, and then as many
    places as fit.
    """
    named = tuple((int(each.type), each.value) for each in dict.fromkeys(aliases))
    chosen = sorted(claims, key=lambda claim: (claim.first_seen_ns, claim.build_id))
    chosen.sort(key=_of_claim, reverse=True)
    chosen, others = chosen[:_MAX_CLAIMS], list(places)
    while True:
        data = _encode(_Provenance(_VERSION, tuple(chosen), named, tuple(others)))
        if len(data) <= files.MAX_ORIGIN_BYTES:
            return data
        (others or chosen).pop()


def unpack(data: bytes) -> tuple[Claim, ...]:
    """Return the claims in packed data; none if it is damaged or of a later version."""
    return _decoded(data).claims


def places_in(data: bytes) -> tuple[OtherOrigin, ...]:
    """Return the further places in packed data; none if it is damaged or of a later version."""
    return _decoded(data).places


def names_of(record: Claim | OtherOrigin) -> ContainerNames:
    """Return the names of the container of a claim or place."""
    return ContainerNames(*(text.decode("utf-8", "surrogateescape") for text in record.called))


def _decoded(data: bytes) -> _Provenance:
    try:
        found = _decoder.decode(data)
    except msgspec.MsgspecError:
        return _Provenance(_VERSION, ())
    return found if found.version == _VERSION else _Provenance(_VERSION, ())


def aliases_in(data: bytes) -> tuple[Alias, ...]:
    """Return the aliases in packed data; none if it is damaged or of another type."""
    try:
        aliases = tuple(Alias(AliasType(kind), value) for kind, value in _decoded(data).aliases)
    except ValueError:
        return ()
    return aliases if all(0 < len(each.value) <= schema.MAX_ALIAS for each in aliases) else ()


def of_captures(
    captures: Iterable[NewCapture],
    digest: Digest,
    called: Mapping[tuple[bytes, str], ContainerNames] = NOTHING_CALLED,
) -> bytes:
    """Return the claims of a blob from its captures; ``called`` is as for `ContainerWriter`."""
    claims: dict[BuildId, Claim] = {}
    aliases: dict[Alias, None] = {}
    for new in captures:
        aliases.update(dict.fromkeys(new.aliases))
        origin, kinds = new.sighting.origin, schema.mask_of(new.kinds)
        before = claims.get(new.build_id)
        if before is not None and _of_claim(before) >= believed((origin.trust, origin.standing)):
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
            bounded_ns(origin.identity.mtime_ns),
            new.sighting.seen_ns,
            location_rows.pack_origin(
                digest, kinds, origin, new.sighting.seen_ns, new.sighting.seen_ns
            ),
            new.truncated,
            origin.standing.stored,
            _packed(called.get((origin.cgroup, origin.container), NO_NAMES)),
        )
    return pack(claims.values(), aliases)


def of_rows(env: Environment, txn: Txn, digest: Digest, row: schema.DigestRow) -> bytes:
    """Return the claims and places of a blob from its rows."""
    rows = IndexRows(env, txn)
    kinds: dict[int, int] = {}
    artifacts: dict[int, Artifact] = {}
    for ordinal, kind, variant in row.refs:
        artifact = rows.variant(ordinal, kind, variant)
        if artifact is not None:
            kinds[ordinal] = kinds.get(ordinal, 0) | 1 << kind
            artifacts.setdefault(ordinal, artifact)
    claims: list[Claim] = []
    others: list[tuple[int, bytes, _Seen]] = []
    for ordinal, artifact in artifacts.items():
        named = rows.named(ordinal)
        if named is None:
            continue
        build_id = bytes(named.build_id)
        seen = _seen_at(env, txn, ordinal, digest)
        best = max(seen, key=_rank, default=None)
        here = None if best is None else _container(best.origin)
        others += [(each.last, build_id, each) for each in seen if _container(each.origin) != here]
        claims.append(
            Claim(
                build_id,
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
                b"" if best is None else best.row,
                artifact.truncated,
                artifact.standing.stored,
                _UNNAMED if best is None else _names(env, txn, best.origin),
            )
        )
    value = txn.get(digest, db=env.tables["identities"])
    aliases = () if value is None else schema.unpack_aliases(digest, value)
    return pack(claims, aliases, _places(env, txn, others))


def _seen_at(env: Environment, txn: Txn, ordinal: int, digest: Digest) -> list[_Seen]:
    """Return the places of a blob under a build ID."""
    found = []
    for _, value in prefixed(txn, env.tables["origins"], schema.U64.pack(ordinal)):
        try:
            of, _, origin, first, last = location_rows.unpack_origin(value)
        except DAMAGE:
            continue
        if of == digest:
            found.append(_Seen(value, origin, first, last))
    return found


def _of_claim(claim: Claim) -> tuple[int, int]:
    return believed((Trust(claim.trust), Standing.of_stored(claim.standing)))


def _rank(seen: _Seen) -> tuple[tuple[int, int], bool, int]:
    """Return a sort key: the most believed places last; among equals a public place, then the first
    seen.
    """
    return believed((seen.origin.trust, seen.origin.standing)), seen.origin.is_public, -seen.first


def _container(origin: Origin) -> tuple[str, bytes]:
    return label_of(origin), token_of(origin)


def _places(env: Environment, txn: Txn, seen: list[tuple[int, bytes, _Seen]]) -> list[OtherOrigin]:
    """Return one place in each of the named containers that were last seen."""
    found: dict[tuple[str, bytes], OtherOrigin] = {}
    for _, build_id, each in sorted(seen, key=lambda of: of[:2], reverse=True)[:_LOOKED_AT]:
        key = _container(each.origin)
        names = _UNNAMED if key in found else _names(env, txn, each.origin)
        if names != _UNNAMED:
            found[key] = OtherOrigin(build_id, each.row, names)
    return list(found.values())[:_MAX_PLACES]


def _names(env: Environment, txn: Txn, origin: Origin) -> _Names:
    row = row_of(env, txn, origin) if label_of(origin) else None
    return _UNNAMED if row is None else (row.called, row.pod, row.namespace, row.image)


def _packed(names: ContainerNames) -> _Names:
    texts = names.name, names.pod, names.namespace, names.image
    name, pod, namespace, image = map(as_bytes, texts)
    return name, pod, namespace, image
