# SPDX-License-Identifier: Apache-2.0
"""Rules for rows about build IDs, artifacts and blobs; see `faults`.

The docstring of a rule is the statement that must be true of each row.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import BuildId, Digest
from buildidfs.store import schema
from buildidfs.store.fsck.faults import Fault, Mending, Rows, lacking, stray
from buildidfs.store.index.locations import ROOT
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.index.ranking import executable_in, executable_key, is_withheld, rank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import Artifact
    from buildidfs.store.fsck.faults import Rule

_FORMS: Final = (schema.FORM_PLAIN, schema.FORM_ZSTD, schema.FORM_DENSE)
_CLASSES: Final = (0, 1)


def ids(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A build ID leads to an ordinal, and the row of the ordinal has this build ID."""
    (ordinal,) = schema.U64.unpack(value)
    named = rows.named(ordinal)
    if named is None or named.build_id != key:
        yield Fault(
            f"build ID {key.hex()} has no ordinal that knows of it",
            build_id=BuildId(key),
            mend=lambda mending: _name_again(mending, key, ordinal),
        )
    elif not named.kinds:
        yield Fault(
            f"build ID {key.hex()} has no artifact",
            build_id=BuildId(key),
            mend=lambda mending: mending.delete("ids", key),
        )


def _name_again(mending: Mending, build_id: bytes, ordinal: int) -> None:
    """Write the lost row of an ordinal again, from the artifacts of its build ID."""
    if mending.named(ordinal) is not None or not mending.kinds(ordinal):
        mending.delete("ids", build_id)
        return
    row = schema.OrdinalRow(BuildId(build_id), mending.kinds(ordinal))
    row.origins = sum(1 for _ in mending.having("origins", schema.U64.pack(ordinal)))
    for kind in schema.KINDS_OF_MASK[row.kinds]:
        row.next_variant[kind - 1] = _next_variant(mending, ordinal, kind)
    mending.put("ordinals", schema.U64.pack(ordinal), row.pack())
    mending.changed.add(ordinal)


def _next_variant(rows: Rows, ordinal: int, kind: int) -> int:
    prefix = schema.ORDINAL_KIND.pack(ordinal, kind)
    values = [value for _, value in rows.having("variants", prefix)]
    values.append(rows.get("artifacts", prefix) or bytes(2))
    return min(max(int.from_bytes(value[:2], "big") for value in values) + 1, schema.MAX_VARIANT)


def ordinals(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """The row of an ordinal matches the kinds, origins and paths of its build ID."""
    (ordinal,) = schema.U64.unpack(key)
    if not 0 < ordinal <= schema.MAX_NUMBER:
        raise ValueError("there is no such number")
    row = schema.OrdinalRow.unpack(value)
    build_id = BuildId(row.build_id)
    kinds = rows.kinds(ordinal)
    if ordinal >= rows.said.next_ordinal:
        yield Fault(
            f"the next ordinal would be {rows.said.next_ordinal}, but {ordinal} is used",
            mend=lambda mending: mending.count_up(next_ordinal=ordinal + 1),
        )
    if row.kinds != kinds:
        yield Fault(
            f"the kinds of {build_id} are not those that there are",
            build_id=build_id,
            mend=lambda mending: mending.change_named(ordinal, kinds=kinds),
        )
    if kinds and rows.get("ids", build_id) != key:
        yield Fault(
            f"build ID {build_id} does not lead to its number {ordinal}",
            build_id=build_id,
            mend=lambda mending: _lead_to(mending, build_id, ordinal),
        )
    if not kinds and rows.get("gone", key) is None:
        yield Fault(
            f"build ID number {ordinal} has no artifact",
            build_id=build_id,
            mend=lambda mending: mending.put("gone", key, b""),
        )
    path = schema.U32.pack(row.primary_path)
    if row.primary_path != ROOT and rows.get("paths", path) is None:
        yield Fault(
            f"the first path of {build_id} does not exist",
            build_id=build_id,
            mend=lambda mending: mending.change_named(ordinal, primary_path=ROOT),
        )


def _lead_to(mending: Mending, build_id: BuildId, ordinal: int) -> None:
    other = mending.get("ids", build_id)
    if other is not None and len(other) == 8:
        named = mending.named(int.from_bytes(other, "big"))
        if named is not None and named.build_id == build_id:
            # Two numbers for one build ID: nothing leads to this one, so its artifacts go.
            for table in ("artifacts", "variants"):
                for key, _ in list(mending.having(table, schema.U64.pack(ordinal))):
                    mending.delete(table, key)
            return
    mending.put("ids", build_id, schema.U64.pack(ordinal))
    mending.changed.add(ordinal)


def artifacts(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A served variant belongs to a build ID."""
    ordinal, kind = schema.ORDINAL_KIND.unpack(key)
    artifact = schema.unpack_artifact(ordinal, kind, value)
    if rows.is_ambiguous(ordinal):
        yield Fault(
            f"artifact {ordinal}/{kind} is of a build ID that programs share, and is served",
            mend=lambda mending: mending.variants.choose(ordinal, kind),
        )
    elif is_withheld(artifact, _executable(rows, artifact), rows.floor(ordinal)):
        yield Fault(
            f"debuginfo {ordinal}/{kind}/{artifact.variant} is believed less than its executable,"
            " and is served",
            mend=lambda mending: mending.variants.choose(ordinal, kind),
        )
    yield from _artifact(rows, artifact)


def variants(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A variant that is not served belongs to an artifact with a better variant."""
    ordinal, kind, number = schema.ORDINAL_KIND_VARIANT.unpack(key)
    variant = schema.unpack_artifact(ordinal, kind, value)
    if variant.variant != number:
        text = f"variant {ordinal}/{kind}/{number} says that it is another"
        yield stray(text, "variants", key)
        return
    served = rows.get("artifacts", key[: schema.ORDINAL_KIND.size])
    if served is None:
        is_kept_back = rows.is_ambiguous(ordinal) or is_withheld(
            variant, _executable(rows, variant), rows.floor(ordinal)
        )
        if not is_kept_back:
            yield Fault(
                f"there are variants of {ordinal}/{kind} of which none is served",
                mend=lambda mending: mending.variants.choose(ordinal, kind),
            )
    elif served[:2] == value[:2]:
        text = f"variant {number} of {ordinal}/{kind} is there twice"
        yield stray(text, "variants", key)
        return
    elif _is_better(rows, variant, served):
        yield Fault(
            f"variant {number} of {ordinal}/{kind} should be served",
            mend=lambda mending: mending.variants.choose(ordinal, kind),
        )
    yield from _artifact(rows, variant)


def _is_better(rows: Rows, variant: Artifact, served: bytes) -> bool:
    try:
        best = schema.unpack_artifact(variant.ordinal, variant.kind, served)
    except DAMAGE:
        return False  # the fault of another row
    executable, floor = _executable(rows, variant), rows.floor(variant.ordinal)
    return rank(variant, executable, floor) < rank(best, executable, floor)


def _executable(rows: Rows, artifact: Artifact) -> Artifact | None:
    """Return the executable that is served for the same build ID; None if its row is damaged."""
    value = rows.get("artifacts", executable_key(artifact.ordinal))
    try:
        return executable_in(artifact.ordinal, value)
    except DAMAGE:
        return None


def _artifact(rows: Rows, artifact: Artifact) -> Iterator[Fault]:
    """Apply the rules for all variants, served or not."""
    ordinal, kind, number = artifact.ordinal, artifact.kind, artifact.variant
    spelled = f"{ordinal}/{int(kind)}/{number}"
    named = rows.named(ordinal)
    if named is None:
        yield Fault(
            f"artifact {spelled} is not known to its build ID",
            artifact.digest,
            mend=lambda mending: _drop(mending, artifact),
        )
        return
    if named.next_variant[kind - 1] <= number < schema.MAX_VARIANT:
        following = [*named.next_variant]
        following[kind - 1] = number + 1
        yield Fault(
            f"the next variant of {ordinal}/{int(kind)} would be one that there is",
            artifact.digest,
            named.build_id,
            lambda mending: mending.change_named(ordinal, next_variant=following),
        )
    if artifact.adopted and not rows.is_adopted(ordinal):
        yield Fault(
            f"build ID {named.build_id} is an adopted one, and is not said to be",
            build_id=named.build_id,
            mend=lambda mending: mending.put("adopted", schema.U64.pack(ordinal), b""),
        )
    row = rows.get("digests", artifact.digest)
    ref = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, number)
    if row is None or not schema.has_ref(row, ref):
        yield Fault(
            f"artifact {spelled} has no blob",
            artifact.digest,
            named.build_id,
            lambda mending: _refer(mending, artifact),
        )
    elif (size := schema.size_in(row)) != artifact.size:
        yield Fault(
            f"artifact {spelled} has {artifact.size} bytes, and its blob {size}",
            artifact.digest,
            named.build_id,
            lambda mending: _resize(mending, artifact, size),
        )


def _drop(mending: Mending, artifact: Artifact) -> None:
    """Remove a variant that no other row refers to."""
    key = schema.ORDINAL_KIND.pack(artifact.ordinal, artifact.kind)
    mending.delete("variants", key + artifact.variant.to_bytes(2, "big"))
    value = mending.get("artifacts", key)
    if value is not None and value[:2] == artifact.variant.to_bytes(2, "big"):
        mending.delete("artifacts", key)
        mending.variants.choose(artifact.ordinal, artifact.kind)
    mending.changed.add(artifact.ordinal)


def _refer(mending: Mending, artifact: Artifact) -> None:
    """Make the row of a blob refer to its artifact, if the blob exists."""
    digest = artifact.digest
    row = mending.digest_row(digest)
    if row is None:
        file = mending.blobs.file(digest)
        if file is None:
            _drop(mending, artifact)
            return
        # The scrubber finds out to which file the row belongs by reading it.
        taken = mending.blobs.disk_bytes(digest)
        row = schema.DigestRow(artifact.size, stored=file.stored, taken=taken)
        if file.stored != artifact.size:
            row.form = schema.FORM_ZSTD
        mending.uses.add(digest, row, schema.stamp_of(artifact.first_seen_ns), artifact.trust)
    row.refs.append((artifact.ordinal, artifact.kind, artifact.variant))
    mending.put("digests", digest, row.pack())


def _resize(mending: Mending, artifact: Artifact, size: int) -> None:
    mending.variants.change(msgspec.structs.replace(artifact, size=size))


def digests(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A blob has at least one artifact, and a row in the order of uses; `scrub` checks its file."""
    digest = Digest(key)
    row = schema.DigestRow.unpack(value)
    lost = []
    for ref in row.refs:
        if not rows.has_variant(ref, key):
            lost.append(ref)
            spelled = "/".join(map(str, ref))
            yield Fault(f"blob {digest} has no artifact {spelled}", digest)
    if lost or not row.refs:
        kept = [ref for ref in row.refs if ref not in lost]
        text = f"blob {digest} is said to have {len(row.refs)} artifacts, and has {len(kept)}"
        yield Fault(text, digest, mend=lambda mending: _keep_refs(mending, digest, kept))
        return
    if len(set(row.refs)) != len(row.refs):
        once = sorted(set(row.refs))
        text = f"blob {digest} has an artifact twice"
        yield Fault(text, digest, mend=lambda mending: _keep_refs(mending, digest, once))
    if row.form not in _FORMS:
        text = f"blob {digest} has a form that there is not: {row.form}"
        yield Fault(text, digest, mend=lambda mending: _make_plain(mending, digest))
    place = schema.USE.pack(row.rank, row.used, digest)
    if row.rank not in _CLASSES:
        yield Fault(
            f"blob {digest} has a class that there is not: {row.rank}",
            digest,
            mend=lambda mending: _reclass(mending, digest),
        )
    elif rows.get("uses", place) is None:
        yield lacking(
            f"blob {digest} has no place in the order of uses", "uses", place, b"", digest=digest
        )


def _keep_refs(mending: Mending, digest: Digest, refs: list[tuple[int, int, int]]) -> None:
    row = mending.digest_row(digest)
    if row is not None and refs:
        row.refs = refs
        mending.put("digests", digest, row.pack())
    elif row is not None:
        mending.uses.remove(digest, row)
        mending.delete("digests", digest)


def _make_plain(mending: Mending, digest: Digest) -> None:
    """Record the content as plain and the file as unknown; the next read of the blob finds the
    right values.
    """
    row = mending.digest_row(digest)
    if row is not None:
        row.form, row.inode, row.ctime_ns = schema.FORM_PLAIN, 0, 0
        mending.put("digests", digest, row.pack())


def _reclass(mending: Mending, digest: Digest) -> None:
    row = mending.digest_row(digest)
    if row is not None:
        row.rank = max(_CLASSES)
        mending.put("digests", digest, row.pack())
        mending.put("uses", schema.USE.pack(row.rank, row.used, digest), b"")


def identities(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """Each alias of a blob has a row in *aliases* that leads to the blob."""
    digest = Digest(key)
    if rows.get("digests", key) is None:
        yield stray(f"blob {digest} has aliases, and is gone", "identities", key, digest=digest)
        return
    for alias in schema.unpack_aliases(key, value):
        place = schema.alias_prefix(alias) + key
        if rows.get("aliases", place) is None:
            yield Fault(
                f"an alias of blob {digest} does not lead to it: {alias.value.hex()}",
                digest,
                mend=partial(_put_alias, place=place),
            )


def _put_alias(mending: Mending, place: bytes) -> None:
    mending.put("aliases", place, b"")


def aliases(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A row of *aliases* leads to a blob that has the alias."""
    alias, digest = schema.alias_of(key)
    kept = rows.get("identities", digest)
    if kept is None or alias not in schema.unpack_aliases(digest, kept):
        yield stray(
            f"blob {digest} does not have the alias {alias.value.hex()} that leads to it",
            "aliases",
            key,
            digest=digest,
        )


def marks(table: str) -> Rule:
    """Return the rule for a table of ordinals."""

    def rule(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
        """A build ID that the table marks exists."""
        (ordinal,) = schema.U64.unpack(key)
        if rows.named(ordinal) is None:
            yield stray(f"build ID number {ordinal} is {table}, and is not there", table, key)

    return rule


def uses(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """Each row in the order of uses has the blob whose use it records."""
    number, used, digest = schema.USE.unpack(key)
    row = rows.digest_row(digest)
    if row is None or (row.rank, row.used) != (number, used):
        yield stray(
            f"the order of uses has a place for blob {digest.hex()} that is not its own",
            "uses",
            key,
            digest=Digest(digest),
        )


def gone(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A build ID in *gone* has a row in *ordinals*."""
    (ordinal,) = schema.U64.unpack(key)
    if not rows.is_there(key):
        yield stray(f"build ID number {ordinal} is going, and was never there", "gone", key)


def pins(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A pin can be read."""
    _, name = schema.pin_of(key)
    schema.U64.unpack(value)
    if len(name) > schema.MAX_PIN_NAME:
        raise ValueError("a name that is too long")
    yield from ()


def meta(rows: Rows, key: bytes, value: bytes) -> Iterator[Fault]:
    """A floor or a derivation can be decoded. Other rows are checked by the code that
    reads them.
    """
    if key.startswith(schema.FLOOR_PREFIX):
        schema.unpack_floor(key, value)
    elif key.startswith(schema.DERIVATION_PREFIX):
        schema.unpack_derivation(key, value)
    yield from ()


RULES: Final[dict[str, Rule]] = {
    "meta": meta,
    "ids": ids,
    "ordinals": ordinals,
    "variants": variants,
    "artifacts": artifacts,
    "digests": digests,
    "uses": uses,
    "gone": gone,
    "pins": pins,
    "identities": identities,
    "aliases": aliases,
    "adopted": marks("adopted"),
    "ambiguous": marks("ambiguous"),
}
