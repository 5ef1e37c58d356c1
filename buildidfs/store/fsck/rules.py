# SPDX-License-Identifier: Apache-2.0
"""The rules of the rows of an index, one for each table, and the index as the rules see it.

The docstring of a rule is the statement that must be true of each row. A rule finds the first fault
of a row and mends none: any fault leads to a new index (`rebuild`), so one is enough.

Why two checks of a row, these and those of the readers? A reader (`index.queries`) must not return
the file of another build ID, so it checks what one answer depends on. A row may still be lost, or
counted wrongly, which only a comparison with all other rows shows.
"""

from __future__ import annotations

import contextlib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Final

import lmdb
import msgspec

from buildidfs.errors import BuildIdFsError
from buildidfs.model import Artifact, BuildId, Digest
from buildidfs.store import location_rows, schema
from buildidfs.store.index.locations import MAX_LABEL, NAMES, ROOT, link_key
from buildidfs.store.index.queries import DAMAGE, IndexRows, prefixed
from buildidfs.store.index.ranking import executable_in, executable_key, is_withheld, rank
from buildidfs.store.location_rows import (
    ContainerRow,
    JournalRecord,
    offset_of,
    unpack_container,
    unpack_entry,
)


class StoreFault(msgspec.Struct, frozen=True):
    """A fault in one line. If it is one of a blob, the fault has the digest, and the build ID if
    known.

    A new index mends all faults of rows (`rebuild`); a new capture mends the fault of a blob.
    """

    text: str
    digest: Digest | None = None
    build_id: BuildId | None = None


class Rows(IndexRows):
    """The index as one transaction sees it, so that a commit cannot look like a fault. A row that
    does not decode counts as missing.
    """

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of a row; None if there is none, or if the key is impossible."""
        try:
            return super().get(table, key)
        except lmdb.BadValsizeError:
            return None

    def having(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key begins with ``prefix``; none if a store of an earlier version
        lacks the table.
        """
        if table in self.tables:
            yield from prefixed(self.txn, self.tables[table], prefix)

    def named(self, ordinal: int) -> schema.OrdinalRow | None:
        with contextlib.suppress(*DAMAGE):
            return super().named(ordinal)
        return None

    def digest_row(self, digest: bytes) -> schema.DigestRow | None:
        with contextlib.suppress(*DAMAGE):
            return super().digest_row(digest)
        return None

    def variant(self, ordinal: int, kind: int, number: int) -> Artifact | None:
        with contextlib.suppress(*DAMAGE):
            found = super().variant(ordinal, kind, number)
            return found if found is not None and found.variant == number else None
        return None

    def has_variant(self, ref: tuple[int, int, int], digest: bytes) -> bool:
        """Return True if a variant, served or not, has the blob."""
        return schema.is_variant(self.raw_variant(*ref), ref[2], digest)

    def floor(self, ordinal: int) -> int:
        with contextlib.suppress(*DAMAGE):
            return super().floor(ordinal)
        return 0

    def is_there(self, ordinal: bytes) -> bool:
        """Return True if rows may refer to an ordinal: its build ID has artifacts, or is being
        removed.
        """
        return self.get("ordinals", ordinal) is not None


Rule = Callable[[Rows, bytes, bytes], str | None]
"""A rule returns the first fault of a row in words, given its key and value; None if the row is
right. Raises the exceptions of decoding the row.
"""


def fault_of(rule: Rule, table: str, rows: Rows, key: bytes, value: bytes) -> StoreFault | None:
    """Return the fault that a rule finds; a row that does not decode is also a fault."""
    try:
        text = rule(rows, key, value)
    except (*DAMAGE, BuildIdFsError) as error:
        text = f"row {key.hex()} of {table} cannot be read: {error}"
    return None if text is None else StoreFault(text)


_FORMS: Final = (schema.FORM_PLAIN, schema.FORM_ZSTD, schema.FORM_DENSE)
_CLASSES: Final = (0, 1)
_MEMO_HEAD: Final = schema.SEEN.size
_DIGEST_BYTES: Final = 32

# --- rows that are right if they decode ----------------------------------------------------------

# A new index keeps the rows that these functions take (`rebuild`).


def read_meta(key: bytes, value: bytes) -> None:
    """Decode a floor or a derivation. Other rows are checked by the code that reads them."""
    if key.startswith(schema.FLOOR_PREFIX):
        schema.unpack_floor(key, value)
    elif key.startswith(schema.DERIVATION_PREFIX):
        schema.unpack_derivation(key, value)


def read_pin(key: bytes, value: bytes) -> None:
    """Decode a pin."""
    _, name = schema.pin_of(key)
    schema.U64.unpack(value)
    if len(name) > schema.MAX_PIN_NAME:
        raise ValueError("a name that is too long")


def read_journal(key: bytes, value: bytes) -> JournalRecord:
    """Decode a row of the journal, which was last seen after it was first seen, or then."""
    record = location_rows.unpack_journal(key, value)
    if record.last_seen_ns < record.first_seen_ns:
        raise ValueError("it was last seen before it was first seen")
    return record


def _read_memo(key: bytes, value: bytes) -> None:
    """Decode a row of the memo, which has the length that belongs to its tag."""
    _, tag = schema.SEEN.unpack_from(value)
    if len(key) != 16 or len(value) - _MEMO_HEAD != (0 if tag else _DIGEST_BYTES):
        raise ValueError("of another length")


def _decodes(read: Callable[[bytes, bytes], object]) -> Rule:
    """Return the rule that ``read`` can decode a row."""

    def rule(rows: Rows, key: bytes, value: bytes) -> None:
        read(key, value)

    return rule


# --- build IDs, artifacts and blobs --------------------------------------------------------------


def _ids(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A build ID leads to an ordinal, and the row of the ordinal has this build ID."""
    (ordinal,) = schema.U64.unpack(value)
    build_id, named = BuildId(key), rows.named(ordinal)
    if named is None or named.build_id != key:
        return f"build ID {build_id} has no ordinal that knows of it"
    return None if named.kinds else f"build ID {build_id} has no artifact"


def _ordinals(rows: Rows, key: bytes, value: bytes) -> str | None:
    """The row of an ordinal matches the kinds and the first path of its build ID."""
    (ordinal,) = schema.U64.unpack(key)
    if not 0 < ordinal <= schema.MAX_NUMBER:
        raise ValueError("there is no such number")
    row = schema.OrdinalRow.unpack(value)
    build_id, kinds = row.build_id, rows.kinds(ordinal)
    if ordinal >= rows.counters.next_ordinal:
        return f"the next ordinal would be {rows.counters.next_ordinal}, but {ordinal} is used"
    if row.kinds != kinds:
        return f"the kinds of {build_id} are not those that there are"
    if kinds and rows.get("ids", build_id) != key:
        return f"build ID {build_id} does not lead to its number {ordinal}"
    if not kinds and rows.get("gone", key) is None:
        return f"build ID number {ordinal} has no artifact"
    if row.primary_path != ROOT and rows.get("paths", schema.U32.pack(row.primary_path)) is None:
        return f"the first path of {build_id} does not exist"
    return None


def _artifacts(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A served variant belongs to a build ID, and may be served."""
    ordinal, kind = schema.ORDINAL_KIND.unpack(key)
    artifact = schema.unpack_artifact(ordinal, kind, value)
    if rows.is_marked("ambiguous", ordinal):
        return f"artifact {ordinal}/{kind} is of a build ID that programs share, and is served"
    if is_withheld(artifact, _executable(rows, artifact), rows.floor(ordinal)):
        spelled = f"{ordinal}/{kind}/{artifact.variant}"
        return f"debuginfo {spelled} is believed less than its executable, and is served"
    return _artifact(rows, artifact)


def _variants(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A variant that is not served belongs to an artifact with a better variant."""
    ordinal, kind, number = schema.ORDINAL_KIND_VARIANT.unpack(key)
    variant = schema.unpack_artifact(ordinal, kind, value)
    if variant.variant != number:
        return f"variant {ordinal}/{kind}/{number} says that it is another"
    served = rows.get("artifacts", key[: schema.ORDINAL_KIND.size])
    if served is None:
        is_kept_back = rows.is_marked("ambiguous", ordinal) or is_withheld(
            variant, _executable(rows, variant), rows.floor(ordinal)
        )
        if not is_kept_back:
            return f"there are variants of {ordinal}/{kind} of which none is served"
    elif served[:2] == value[:2]:
        return f"variant {number} of {ordinal}/{kind} is there twice"
    elif _is_better(rows, variant, served):
        return f"variant {number} of {ordinal}/{kind} should be served"
    return _artifact(rows, variant)


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


def _artifact(rows: Rows, artifact: Artifact) -> str | None:
    """Apply the rules for all variants, served or not."""
    ordinal, kind, number = artifact.ordinal, int(artifact.kind), artifact.variant
    spelled = f"{ordinal}/{kind}/{number}"
    named = rows.named(ordinal)
    if named is None:
        return f"artifact {spelled} is not known to its build ID"
    row = rows.get("digests", artifact.digest)
    ref = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, number)
    if row is None or not schema.has_ref(row, ref):
        return f"artifact {spelled} has no blob"
    if (size := schema.size_in(row)) != artifact.size:
        return f"artifact {spelled} has {artifact.size} bytes, and its blob {size}"
    if named.next_variant[kind - 1] <= number < schema.MAX_VARIANT:
        return f"the next variant of {ordinal}/{kind} would be one that there is"
    if artifact.adopted and not rows.is_marked("adopted", ordinal):
        return f"build ID {named.build_id} is an adopted one, and is not marked"
    return None


def _digests(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A blob has at least one artifact, and a row in the order of uses. `Scrubber` checks its
    file.
    """
    digest, row = Digest(key), schema.DigestRow.unpack(value)
    for ref in row.refs:
        if not rows.has_variant(ref, key):
            return f"blob {digest} has no artifact {'/'.join(map(str, ref))}"
    if not row.refs:
        return f"blob {digest} has no artifact"
    if len(set(row.refs)) != len(row.refs):
        return f"blob {digest} has an artifact twice"
    if row.form not in _FORMS:
        return f"blob {digest} has a form that there is not: {row.form}"
    if row.rank not in _CLASSES:
        return f"blob {digest} has a class that there is not: {row.rank}"
    if rows.get("uses", schema.USE.pack(row.rank, row.used, digest)) is None:
        return f"blob {digest} has no place in the order of uses"
    return None


def _uses(rows: Rows, key: bytes, value: bytes) -> str | None:
    """Each row in the order of uses has the blob whose use it records."""
    number, used, digest = schema.USE.unpack(key)
    row = rows.digest_row(digest)
    if row is None or (row.rank, row.used) != (number, used):
        return f"the order of uses has a place for blob {digest.hex()} that is not its own"
    return None


def _identities(rows: Rows, key: bytes, value: bytes) -> str | None:
    """Aliases of a blob have rows in *aliases*: those that lead to a few of the blobs with each."""
    digest = Digest(key)
    if rows.get("digests", key) is None:
        return f"blob {digest} has aliases, and is gone"
    aliases = schema.unpack_aliases(key, value)
    if aliases and not any(
        next(rows.having("aliases", schema.alias_prefix(each)), None) for each in aliases
    ):
        return f"no alias of blob {digest} leads to it: {aliases[0].value.hex()}"
    return None


def _aliases(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A row of *aliases* leads to a blob that has the alias."""
    alias, digest = schema.alias_of(key)
    kept = rows.get("identities", digest)
    if kept is None or alias not in schema.unpack_aliases(digest, kept):
        return f"blob {digest} does not have the alias {alias.value.hex()} that leads to it"
    return None


def _marked(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A build ID in *adopted* or *ambiguous* exists."""
    (ordinal,) = schema.U64.unpack(key)
    if rows.named(ordinal) is None:
        return f"build ID number {ordinal} is marked, and does not exist"
    return None


def _gone(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A build ID in *gone* has a row in *ordinals*."""
    (ordinal,) = schema.U64.unpack(key)
    if not rows.is_there(key):
        return f"build ID number {ordinal} is going, and was never there"
    return None


# --- places, journal and containers --------------------------------------------------------------


def _origins(rows: Rows, key: bytes, value: bytes) -> str | None:
    """The build ID of an origin exists and has, or had, its blob; the key is right for the row."""
    digest = location_rows.place_of(key, value)
    if not rows.is_there(key[:8]):
        return f"origin {key.hex()} is of an unknown build ID"
    if digest is None:
        return f"origin {key.hex()} is not where it should be"
    row = rows.get("digests", digest)
    known = row is not None and schema.has_ref(row, key[:8])
    if not known and rows.get("gone", key[:8]) is None:
        return f"origin {key.hex()} is of a blob that its build ID does not have"
    return None


def _names(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A name in a directory leads to a path, and this path has the name."""
    if value[4:] not in (b"", schema.PUBLIC):
        raise ValueError("of another length")
    if rows.get("paths", value[:4]) != key:
        return f"name {key.hex()} leads to a path that has another"
    return None


def _paths(rows: Rows, key: bytes, value: bytes) -> str | None:
    """The parent of a path exists, and lists the path."""
    (number,) = schema.U32.unpack(key)
    if not 0 < number <= schema.MAX_NUMBER:
        raise ValueError("there is no such number")
    (parent,) = schema.U32.unpack_from(value)
    if number >= rows.counters.next_path:
        return f"the next path would be {rows.counters.next_path}, but {number} is used"
    is_orphan = parent >= number or (parent != ROOT and rows.get("paths", value[:4]) is None)
    if is_orphan and parent != NAMES:
        return f"path {number} has no parent"
    if (rows.get("names", value) or b"")[:4] != key:
        return f"path {number} is not in its parent"
    return None


def _pathids(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A path and a build ID that was seen there both exist."""
    if value not in (b"", schema.PUBLIC):
        raise ValueError("of another length")
    number, ordinal = schema.PATH_ORDINAL.unpack(key)
    if rows.get("paths", key[:4]) is None:
        return f"path {number} does not exist, and build ID number {ordinal} hangs from it"
    if not rows.is_there(key[4:]):
        return f"an unknown build ID number {ordinal} hangs from path {number}"
    return None


def _nameids(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A file name and a build ID that has it both exist; `wrong_counts` checks their number."""
    schema.U16.unpack_from(value)
    fault = _pathids(rows, key, value[schema.U16.size :])
    if fault is None and not (rows.get("paths", key[:4]) or b"").startswith(schema.U32.pack(NAMES)):
        return f"build IDs of the file name {key[:4].hex()}, which is the number of a path"
    return fault


def _dwz(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A name below /.dwz/ belongs to a build ID."""
    referred = schema.DwzRow.unpack(key, value).referred
    is_id = not referred or BuildId.MIN_BYTES <= len(referred) <= BuildId.MAX_BYTES
    if not rows.is_there(value[:8]) or not is_id:
        return f"/.dwz/ name {key!r} is of an unknown build ID"
    return None


def _journal(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A row of the journal has its row in *recent*."""
    record = read_journal(key, value)
    if rows.get("recent", schema.U64.pack(record.last_seen_ns) + key) is None:
        return f"journal row {key.hex()} has no place in the order of time"
    return None


def _recent(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A row of *recent* leads to a row of the journal."""
    row = rows.get("journal", key[8:])
    if row is None or row[8:16] != key[:8]:
        return f"the order of time has a place for journal row {key[8:].hex()} that is not its own"
    return None


def _containers(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A container has a name, and the name leads to the container."""
    (number,) = schema.U32.unpack(key)
    container, _ = unpack_container(number, value)
    if not 0 < number <= schema.MAX_CONTAINER or not 0 < len(container.name) <= MAX_LABEL:
        raise ValueError("no number, or no name, of a container")
    if container.first_seen_ns > container.last_seen_ns:
        return f"container {number} was last seen before it was first seen"
    there = rows.get("labels", container.name)
    if there != key:
        other = None if there is None else _container_row(rows, there)
        if other is None or other.name != container.name:
            return f"container {number} is not found under its name"
        return f"container {number} has the name of another"
    if number >= rows.counters.next_container:
        return f"the next container would be {rows.counters.next_container}, but {number} is used"
    return None


def _container_row(rows: Rows, key: bytes) -> ContainerRow | None:
    """Return the row of a container; None if it is missing or does not decode."""
    value = rows.get("containers", key)
    try:
        return None if value is None else unpack_container(0, value)[1]
    except DAMAGE:
        return None


def _labels(rows: Rows, key: bytes, value: bytes) -> str | None:
    """A name of a container leads to a container that has this name."""
    schema.U32.unpack(value)
    row = _container_row(rows, value)
    if row is None or key not in (row.name, link_key(row.names)):
        return f"name {key!r} leads to a container that there is not, or has another"
    return None


def _contents(rows: Rows, key: bytes, value: bytes) -> str | None:
    """An entry of a container has the key of its name. Its artifact may be gone."""
    entry, container = unpack_entry(key, value), _container_row(rows, key[:4])
    below = int.from_bytes(key[4:8], "big")
    if (
        container is None
        or entry.offset != offset_of(entry.name)
        or 0 < entry.directory <= below  # numbers are given from the root down
        or entry.directory > schema.MAX_CONTAINER
    ):
        return f"row {key.hex()} of contents is of no container, or not where its name belongs"
    if max(entry.directory, below) >= container.next_directory:
        return f"the next directory of container {key[:4].hex()} would be one that it has"
    return None


RULES: Final[dict[str, Rule]] = {
    "meta": _decodes(read_meta),
    "ids": _ids,
    "ordinals": _ordinals,
    "variants": _variants,
    "artifacts": _artifacts,
    "digests": _digests,
    "uses": _uses,
    "gone": _gone,
    "pins": _decodes(read_pin),
    "identities": _identities,
    "aliases": _aliases,
    "adopted": _marked,
    "ambiguous": _marked,
    "origins": _origins,
    "names": _names,
    "paths": _paths,
    "pathids": _pathids,
    "nameids": _nameids,
    "dwz": _dwz,
    "seen": _decodes(_read_memo),
    "journal": _journal,
    "recent": _recent,
    "containers": _containers,
    "labels": _labels,
    "contents": _contents,
    "history": _decodes(schema.unpack_history),
}

# --- counts --------------------------------------------------------------------------------------

_NUMBERS: Final = (
    ("next_ordinal", schema.MAX_NUMBER),
    ("next_path", schema.MAX_NUMBER),
    ("next_container", schema.MAX_CONTAINER),
)
"""Counters that only grow, with the highest possible number."""


def wrong_counts(rows: Rows) -> Iterator[str]:
    """Yield the faults of all counts at one moment, in words."""
    for what, counted, there in _totals(rows):
        if counted != there:
            yield f"{there} {what} are counted as {counted}"
    for field, most in _NUMBERS:
        number = getattr(rows.counters, field)
        if not 0 < number <= most + 1:
            yield f"the next {field.removeprefix('next_')} would be {number}"
    for build_id, field in _wrong_numbers(rows):
        yield f"{field} of {build_id} are counted wrongly"
    if _names_differ(rows):
        yield "file names of paths are counted wrongly"
    for number in _wrong_entries(rows):
        yield f"rows of container {number} are counted wrongly"


def _totals(rows: Rows) -> Iterator[tuple[str, int, int]]:
    """Yield each total of the store, as the counters have it and as it is."""
    counters, found = rows.counters, schema.StoreCounters()
    for key in _keys(rows, "artifacts"):
        if 0 < key[-1] <= len(found.artifacts):
            found.artifacts[key[-1] - 1] += 1
    for _, value in rows.having("digests"):
        try:
            row = schema.DigestRow.unpack(value)
        except DAMAGE:
            continue
        found.blobs += 1
        found.blob_bytes += row.size
        found.stored_bytes += row.taken
    for kind, pair in enumerate(zip(counters.artifacts, found.artifacts, strict=True), 1):
        yield (f"artifacts of kind {kind}", *pair)
    yield "blobs", counters.blobs, found.blobs
    yield "bytes of blobs", counters.blob_bytes, found.blob_bytes
    yield "bytes of files of blobs", counters.stored_bytes, found.stored_bytes


def _wrong_numbers(rows: Rows) -> Iterator[tuple[BuildId, str]]:
    """Yield the build IDs with a wrong count of origins or paths, and what is counted wrongly."""
    known = array("Q", (int.from_bytes(key[:8], "big") for key in _keys(rows, "ordinals")))
    origins, paths = (array("I", bytes(4 * len(known))) for _ in range(2))
    for found, table, begin in ((origins, "origins", 0), (paths, "pathids", 4)):
        for key in _keys(rows, table):
            ordinal = int.from_bytes(key[begin : begin + 8], "big")
            at = bisect_left(known, ordinal)
            if at < len(known) and known[at] == ordinal:
                found[at] += 1
    for (key, value), *there in zip(rows.having("ordinals"), origins, paths, strict=True):
        try:
            row = schema.OrdinalRow.unpack(value)
        except DAMAGE:
            continue
        if len(key) != schema.U64.size:
            continue  # a row without a build ID, which is the fault of another rule
        for field, count in zip(("origins", "paths"), there, strict=True):
            if getattr(row, field) != count:
                yield row.build_id, field


def _names_differ(rows: Rows) -> bool:
    """Return True if a path lacks its file name, or the numbers of names and paths differ."""
    names = paths = 0
    for _, value in rows.having("nameids"):
        names += int.from_bytes(value[:2], "big")
    prefix = schema.U32.pack(NAMES)
    for number, group in groupby(rows.having("pathids"), lambda row: row[0][:4]):
        path = rows.get("paths", number)
        name = None if path is None else rows.get("names", prefix + path[4:])
        for key, _ in group:
            paths += 1
            if path is not None and (
                name is None or rows.get("nameids", name[:4] + key[4:]) is None
            ):
                return True
    return names != paths


def _wrong_entries(rows: Rows) -> Iterator[int]:
    """Yield the numbers of containers with a wrong count of entries."""
    there = {
        number: sum(1 for _ in group)
        for number, group in groupby(rows.having("contents"), lambda row: row[0][:4])
    }
    for key, value in rows.having("containers"):
        try:
            row = unpack_container(0, value)[1]
        except DAMAGE:
            continue  # the fault of another rule
        if row.entries != there.get(key, 0):
            yield int.from_bytes(key, "big")


def _keys(rows: Rows, table: str) -> Iterator[bytes]:
    with rows.txn.cursor(rows.tables[table]) as cursor:
        yield from cursor.iternext(keys=True, values=False)
