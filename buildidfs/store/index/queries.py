# SPDX-License-Identifier: Apache-2.0
"""Reads of build IDs and artifacts from the tables of `schema`.

A listing is a generator that reads some rows, closes the transaction, and continues beyond the last
key, so no transaction is open while the caller works. Rows that are committed meanwhile may be
missing; no row comes twice, and no older row is left out.

Why two, `Index` and `IndexRows`? `Index` answers readers: a lookup of one row must cost a
microsecond, so it has no transaction to share, and each answer checks what it returns. `IndexRows`
has the rows of one transaction for writers, removals and `check`, which change or compare several.
"""

from __future__ import annotations

import heapq
import struct
import time
from collections.abc import Iterator
from functools import cached_property, wraps
from itertools import chain, islice, repeat, takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

import lmdb
import msgspec

from buildidfs.errors import ArtifactMissing, IntegrityError, InvalidBuildId, UsageError
from buildidfs.model import Artifact, BuildId, Digest, FileIdentity, Kind, Origin
from buildidfs.store import location_rows, schema
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.ranking import (
    belief,
    belief_in,
    executable_in,
    executable_key,
    is_withheld,
    rank,
)
from buildidfs.store.values import Held, OriginRecord, Pin, Remembered
from buildidfs.wording import only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.store.index.environment import Environment, Table, Txn

P = ParamSpec("P")
R = TypeVar("R")

#: Rows read in one transaction of a listing: few at first, since a directory is read in pages.
_FIRST_ROWS, _MOST_ROWS = 64, 2048
_MOST_FLOORS: Final = 64
_KINDS: Final = tuple(map(int, Kind))
_NAME_AT: Final = schema.NAME_AT  # the most frequent key is first
_name_in: Final = itemgetter(slice(_NAME_AT, None))


#: Exceptions raised by decoding a damaged row.
DAMAGE = (
    struct.error,
    msgspec.MsgspecError,
    IndexError,
    ValueError,
    InvalidBuildId,
    RecursionError,
)


def damaged(error: Exception) -> IntegrityError:
    """Return the error for a row that does not decode."""
    return IntegrityError(f"a row of the index is damaged ({error})")


def _crossed(what: str) -> IntegrityError:
    """Return the error for two rows that should refer to each other but do not."""
    return IntegrityError(
        f"the index is damaged: {what} leads to another one: run buildidfs check --repair"
    )


def whole(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method so that it raises `IntegrityError` for rows that do not decode."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except DAMAGE as error:
            raise damaged(error) from error

    return checked


class Index:
    """Queries of the index in an `Environment`; each sees the index at the moment of its call."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        tables = environment.tables
        self._ids = tables["ids"]
        self._ordinals = tables["ordinals"]
        self._artifacts = tables["artifacts"]
        self._variants = tables["variants"]
        self._digests = tables["digests"]
        self._origins = tables["origins"]
        self._dwz = tables["dwz"]
        self._seen = tables["seen"]
        self._gone = tables["gone"]
        self._meta = tables["meta"]

    # --- one row ---------------------------------------------------------------------------

    def ordinal(self, build_id: bytes) -> int | None:
        """Return the number of a build ID."""
        if not 0 < len(build_id) <= BuildId.MAX_BYTES:
            return None
        value, named = self._env.get_by(self._ids, build_id, self._ordinals)
        if value is None:
            return None
        if named is None or named[_NAME_AT:] != build_id:
            raise _crossed(f"build ID {build_id.hex()}")
        return int.from_bytes(value)

    def build_id(self, ordinal: int) -> BuildId | None:
        """Return the build ID with that number."""
        key = schema.U64.pack(ordinal)
        value, back = self._env.get_by(self._ordinals, key, self._ids, schema.NAME_AT)
        if value is None:
            return None
        try:
            build_id = schema.build_id_of(value)
        except DAMAGE as error:
            raise damaged(error) from error
        # A build ID in removal has no kinds, and no row leads to it.
        if value[0] and back != key:
            raise _crossed(f"build ID number {ordinal}")
        return build_id

    def kinds(self, ordinal: int) -> int:
        """Return the kinds with an artifact as bits 1<<kind; 0 for an unknown ordinal."""
        value = self._env.get(self._ordinals, schema.U64.pack(ordinal))
        return value[0] if value else 0

    def is_going(self, ordinal: int) -> bool:
        """Return True if blobs of a build ID were removed while some of its rows are left."""
        return self._env.get(self._gone, schema.U64.pack(ordinal)) is not None

    @whole
    def floor(self, build_id: bytes) -> int:
        """Return the `belief` below which debuginfo of a build ID is always withheld."""
        key = schema.floor_key(build_id)
        return floor_in(key, self._env.get(self._meta, key))

    def belief(self, ordinal: int) -> int:
        """Return the highest `belief` in the served files of a build ID; 0 if there are none."""
        served = (self.artifact(ordinal, kind) for kind in Kind)
        return max((belief(each) for each in served if each is not None), default=0)

    def most_believed(self, ordinals: Iterable[int], most: int) -> list[tuple[int, int]]:
        """Return belief and ordinal of the ``most`` build IDs whose files are believed most, best
        first. Reads all of them.
        """
        claims = ((self.belief(ordinal), ordinal) for ordinal in ordinals)
        return heapq.nlargest(most, claims, key=lambda claim: claim[0])

    @whole
    def highest_floor(self, start: bytes) -> int:
        """Return the highest `floor` of a few build IDs that begin with ``start``."""
        with self._env.read() as txn:
            rows = prefixed(txn, self._meta, schema.floor_key(start))
            return max((floor_in(*row) for row in islice(rows, _MOST_FLOORS)), default=0)

    def companion(self, ordinal: int, build_id: bytes | None) -> Artifact | None:
        """Return the file for debuggers that is kept under another ``build_id`` beside a program:
        its sources, or its split DWARF.

        Returns None if it is believed less than the program or its debuginfo.
        """
        other = None if build_id is None else self.ordinal(build_id)
        found = None if other is None else self.artifact(other, Kind.DEBUGINFO)
        named = self.build_id(ordinal)
        if found is None or named is None:
            return None
        debuginfo = self.artifact(ordinal, Kind.DEBUGINFO)
        floor = max(self.floor(named), 0 if debuginfo is None else belief(debuginfo))
        executable = self.artifact(ordinal, Kind.EXECUTABLE)
        return None if is_withheld(found, executable, floor) else found

    def primary_path(self, ordinal: int) -> int | None:
        """Return the number of the first path of the executable."""
        value = self._env.get(self._ordinals, schema.U64.pack(ordinal))
        return (schema.primary_path_of(value) or None) if value else None

    def artifact(self, ordinal: int, kind: int) -> Artifact | None:
        """Return the served variant."""
        value = self._env.get(self._artifacts, schema.ORDINAL_KIND.pack(ordinal, kind))
        if value is None:
            return None
        try:
            return schema.unpack_artifact(ordinal, kind, value)
        except DAMAGE as error:
            raise damaged(error) from error

    @whole
    def artifact_variant(self, ordinal: int, kind: int, variant: int) -> Artifact | None:
        """Return a variant, served or not."""
        best = self.artifact(ordinal, kind)
        if best is not None and best.variant == variant:
            return best
        key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
        value = self._env.get(self._variants, key)
        found = None if value is None else schema.unpack_artifact(ordinal, kind, value)
        if found is not None and found.variant != variant:
            raise ValueError("it is that of another variant")
        return found

    @whole
    def supplementary(self, name: bytes) -> int | None:
        """Return the ordinal of the file recorded under ``/.dwz/`` as ``name``."""
        if not 0 < len(name) <= schema.MAX_DWZ_NAME:
            return None
        value = self._env.get(self._dwz, name)
        return None if value is None else self._supplement_in(name, value)

    def _supplement_in(self, name: bytes, value: bytes) -> int | None:
        """Return the ordinal in a row of *dwz*; None if the build ID was never captured."""
        row = schema.DwzRow.unpack(name, value)
        return self.ordinal(row.referred) if row.referred else row.ordinal

    def is_public_supplementary(self, name: bytes) -> bool:
        """Return True if all users could read the file recorded under ``/.dwz/`` as ``name``."""
        value = self._env.get(self._dwz, name)
        try:
            return value is not None and schema.DwzRow.unpack(name, value).public
        except DAMAGE as error:
            raise damaged(error) from error

    # --- several rows ----------------------------------------------------------------------

    @whole
    def variants(self, ordinal: int, kind: int) -> list[Artifact]:
        """Return all variants, best first."""
        prefix = schema.ORDINAL_KIND.pack(ordinal, kind)
        with self._env.read() as txn:
            value = txn.get(prefix, db=self._artifacts)
            rows = [row for _, row in prefixed(txn, self._variants, prefix)]
            if value is not None:
                rows.append(value)
            executable = executable_in(
                ordinal, txn.get(executable_key(ordinal), db=self._artifacts)
            )
            floor = IndexRows(self._env, txn).floor(ordinal)
        found = [schema.unpack_artifact(ordinal, kind, row) for row in rows]
        return sorted(found, key=lambda artifact: rank(artifact, executable, floor))

    def variants_after(self, ordinal: int, kind: int, after: int = -1) -> Iterator[Artifact]:
        """Yield all variants in order of their numbers, beyond ``after`` (-1: from the start)."""
        best = self.artifact(ordinal, kind)
        prefix = schema.ORDINAL_KIND.pack(ordinal, kind)
        start = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, max(after, 0))
        for _, value in rows_from(self._env, self._variants, prefix, start):
            try:
                artifact = schema.unpack_artifact(ordinal, kind, value)
            except DAMAGE as error:
                raise damaged(error) from error
            if best is not None and after < best.variant < artifact.variant:
                yield best
                after = best.variant
            if artifact.variant > after:
                yield artifact
                after = artifact.variant
        if best is not None and best.variant > after:
            yield best

    def conflicts(self) -> Iterator[tuple[int, int]]:
        """Yield (ordinal, kind) of all artifacts that have several variants, in order."""
        start = b""
        while True:
            with self._env.read() as txn:
                found = next(prefixed(txn, self._variants, b"", start), None)
            if found is None:
                return
            try:
                ordinal, kind, _ = schema.ORDINAL_KIND_VARIANT.unpack(found[0])
            except DAMAGE as error:
                raise damaged(error) from error
            yield ordinal, kind
            # Continue beyond the last possible key; there may be thousands of variants.
            start = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, schema.MAX_VARIANT) + b"\0"

    @whole
    def variants_with(self, digest: Digest, ordinal: int) -> list[tuple[int, int]]:
        """Return (kind, variant) of each variant of a build ID with those bytes."""
        value = self._env.get(self._digests, digest)
        if value is None:
            return []
        return [ref[1:] for ref in schema.DigestRow.unpack(value).refs if ref[0] == ordinal]

    @whole
    def origins(self, ordinal: int) -> list[OriginRecord]:
        """Return the origins of a build ID, newest first."""
        with self._env.read() as txn:
            rows = [row for _, row in prefixed(txn, self._origins, schema.U64.pack(ordinal))]
        records = []
        for row in rows:
            digest, kinds, origin, first, last = location_rows.unpack_origin(row)
            records.append(OriginRecord(origin, schema.KINDS_OF_MASK[kinds], digest, first, last))
        records.sort(key=lambda record: (-record.last_seen_ns, -record.first_seen_ns))
        return records

    @whole
    def held(self, digest: Digest) -> Held | None:
        """Return the row of a blob; None if the index has none."""
        with self._env.read() as txn:
            value = txn.get(digest, db=self._digests)
            if value is None:
                return None
            row = schema.DigestRow.unpack(value)
            if not row.refs:
                return None
            ordinal = row.refs[0][0]
            refs = [ref for ref in row.refs if ref[0] == ordinal]
            artifact = IndexRows(self._env, txn).variant(*refs[0])
            named = txn.get(schema.U64.pack(ordinal), db=self._ordinals)
        if artifact is None or named is None:
            raise IntegrityError(f"the index has no artifact for blob {digest}")
        return Held(
            digest,
            row.size,
            ordinal,
            schema.build_id_of(named),
            tuple(Kind(kind) for _, kind, _ in sorted(refs)),
            artifact.quality,
            artifact.scripts,
            artifact.segments,
            artifact.truncated,
        )

    @whole
    def last_use(self, digest: Digest) -> int:
        """Return the last use of a blob in Unix seconds; 0 if there is no such blob."""
        value = self._env.get(self._digests, digest)
        return 0 if value is None else schema.DigestRow.unpack(value).used

    @whole
    def recall(self, identity: FileIdentity) -> Remembered | None:
        """Return the earlier result for an unchanged file; None if it has to be read."""
        key = schema.seen_key(identity)
        if key is None:
            return None
        # Three single reads cost less than a transaction; a missing row only causes another read.
        value = self._env.get(self._seen, key)
        if value is None:
            return None
        _, tag = schema.SEEN.unpack_from(value)
        if tag:
            absence = schema.ABSENCES.get(tag)
            return None if absence is None else Remembered(absence=absence)
        row = self._env.get(self._digests, value[schema.SEEN.size :])
        # A file whose blob is damaged has to be read again.
        ordinal = None if row is None or schema.is_struck(row) else schema.ordinal_in(row)
        named = None if ordinal is None else self._env.get(self._ordinals, ordinal)
        return None if named is None else Remembered(build_id=schema.build_id_of(named))

    @whole
    def knows_place(self, origin: Origin) -> bool:
        """Return True if the index has the place of an unchanged file, and knows who can reach it
        there.
        """
        key = schema.seen_key(origin.identity)
        value = None if key is None else self._env.get(self._seen, key)
        if value is None or len(value) == schema.SEEN.size:
            return False
        digest = Digest(value[schema.SEEN.size :])
        row = self._env.get(self._digests, digest)
        ordinal = None if row is None else schema.ordinal_in(row)
        if ordinal is None:
            return False
        place = location_rows.origin_key(int.from_bytes(ordinal, "big"), digest, origin)
        found = self._env.get(self._origins, place)
        return found is not None and location_rows.reach_in(found) != 0

    # --- listings --------------------------------------------------------------------------

    def build_ids_from(self, after: int = 0) -> Iterator[tuple[int, BuildId]]:
        """Yield (ordinal, build ID) in order of ordinals, beyond ``after`` (0: from the start)."""
        for ordinal, raw in self.raw_ids_from(after):
            try:
                yield ordinal, BuildId(raw)
            except InvalidBuildId as error:
                raise damaged(error) from error

    def raw_ids_from(self, after: int = 0) -> Iterator[tuple[int, bytes]]:
        """Do as `build_ids_from` with the bytes of build IDs, in half the time."""
        start = schema.U64.pack(after) + b"\0"
        number = int.from_bytes
        for rows in self._linked(self._ordinals, b"", start, _name_in, self._ids):
            for (key, value), (raw, back) in rows:
                if not value[0]:
                    continue  # removed; its other rows will be removed later
                if back != key:
                    raise _crossed(f"build ID number {number(key, 'big')}")
                yield number(key, "big"), raw

    def build_ids_with_prefix(
        self, prefix: bytes, after: bytes | None = None
    ) -> Iterator[tuple[BuildId, int]]:
        """Yield (build ID, ordinal) in order of build IDs that start with ``prefix``."""
        start = _beyond(prefix, after)
        linked = self._linked(self._ids, prefix, start, lambda value: value, self._ordinals)
        for (key, _), (value, back) in chain.from_iterable(linked):
            try:
                build_id = BuildId(key)
            except InvalidBuildId as error:
                raise damaged(error) from error
            if back is None or not schema.is_named(back, build_id):
                raise _crossed(f"build ID {build_id}")
            yield build_id, int.from_bytes(value, "big")

    def supplementaries(
        self, prefix: bytes = b"", after: bytes | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """Yield (name, ordinal) of the files under ``/.dwz/``."""
        for key, value in rows_after(self._env, self._dwz, prefix, after):
            try:
                ordinal = self._supplement_in(key, value)
            except DAMAGE as error:
                raise damaged(error) from error
            if ordinal is not None:
                yield key, ordinal

    def match(self, text: str) -> BuildId:
        """Return the only build ID whose hex digits start with ``text`` or equal it.

        Raises `InvalidBuildId`, `AmbiguousBuildId`, `ArtifactMissing`.
        """
        digits = text.lower()
        if not digits or any(digit not in "0123456789abcdef" for digit in digits):
            raise InvalidBuildId(f"not a build ID nor the start of one: {text!r}")
        prefix = bytes.fromhex(digits[: len(digits) // 2 * 2])
        start = bytes.fromhex(digits + "0" * (len(digits) % 2))
        found: list[str] = []
        for key, _ in rows_from(self._env, self._ids, prefix, start):
            spelled = key.hex()
            if spelled == digits:
                return BuildId(key)
            if spelled.startswith(digits):
                found.append(spelled)
            if len(found) > 3 or not spelled.startswith(digits):
                break
        if not found:
            raise ArtifactMissing(f"nothing is known of build ID {digits}")
        return BuildId.from_hex(only(digits, found))

    def _linked(
        self,
        table: Table,
        prefix: bytes,
        start: bytes,
        link: Callable[[bytes], bytes],
        other: Table,
    ) -> Iterator[Iterator[tuple[tuple[bytes, bytes], tuple[bytes, bytes | None]]]]:
        """Yield the rows of `rows_from` in batches, each with a key of another table that ``link``
        derives from its value, and the value of this key.
        """

        def back(txn: Txn, rows: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes | None]]:
            try:
                links = [link(value) for _, value in rows]
                found = map(txn.get, links, repeat(None), repeat(other))
                return list(zip(links, found, strict=True))
            except (*DAMAGE, lmdb.BadValsizeError) as error:
                raise damaged(error) from error

        for rows, found in batches(self._env, table, prefix, start, back):
            yield zip(rows, found, strict=True)


def rows_from(
    env: Environment, table: Table, prefix: bytes = b"", start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows whose key starts with ``prefix``, from the key ``start`` on, in order of keys.

    No transaction is open while the caller works.
    """
    for rows, _ in batches(env, table, prefix, start, lambda txn, rows: None):
        yield from rows


def rows_after(
    env: Environment, table: Table, prefix: bytes, after: bytes | None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows whose key starts with ``prefix``, beyond the key ``after``, as `rows_from`."""
    return rows_from(env, table, prefix, _beyond(prefix, after))


def _beyond(prefix: bytes, after: bytes | None) -> bytes:
    """Return the first key with a prefix that comes after a key; None is before all keys."""
    return prefix if after is None or after < prefix else after + b"\0"


def batches(
    env: Environment,
    table: Table,
    prefix: bytes,
    start: bytes,
    more: Callable[[Txn, list[tuple[bytes, bytes]]], R],
) -> Iterator[tuple[list[tuple[bytes, bytes]], R]]:
    """Yield the rows of `rows_from` in lists, one per transaction, which is faster than one
    transaction per row; and the result of ``more`` in the same transaction.
    """
    count = _FIRST_ROWS
    while True:
        with env.read() as txn:
            rows = list(islice(prefixed(txn, table, prefix, start), count))
            found = more(txn, rows)
        yield rows, found
        if len(rows) < count:
            return
        start, count = rows[-1][0] + b"\0", min(count * 2, _MOST_ROWS)


def prefixed(
    txn: Txn, table: Table, prefix: bytes, start: bytes | None = None
) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows whose key starts with ``prefix``, from ``start``; only while ``txn`` lives."""
    with txn.cursor(table) as cursor:
        if not (cursor.set_range(start or prefix) if start or prefix else cursor.first()):
            return
        if prefix:
            yield from takewhile(lambda row: row[0].startswith(prefix), cursor)
        else:
            yield from cursor


class IndexRows:
    """The rows of one transaction. Raises the errors of decoding."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self.env = environment
        self.txn = txn
        self.tables = environment.tables

    @cached_property
    def counters(self) -> schema.StoreCounters:
        """The counters of the store, right or wrong; `put_counters` writes what has changed."""
        return load_counters(self.env, self.txn)

    def put_counters(self) -> None:
        """Write the counters, if they have changed."""
        value = self.counters.pack()
        if value != self.get("meta", schema.COUNTERS_KEY):
            self.txn.put(schema.COUNTERS_KEY, value, db=self.tables["meta"])

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of a row; None if there is none."""
        return self.txn.get(key, db=self.tables[table])

    def digest_row(self, digest: bytes) -> schema.DigestRow | None:
        """Return a row of *digests*; None if it is missing."""
        value = self.get("digests", digest)
        return None if value is None else schema.DigestRow.unpack(value)

    def named(self, ordinal: int) -> schema.OrdinalRow | None:
        """Return a row of *ordinals*; None if it is missing."""
        value = self.get("ordinals", schema.U64.pack(ordinal))
        return None if value is None else schema.OrdinalRow.unpack(value)

    def put_digest_row(self, digest: bytes, row: schema.DigestRow) -> None:
        """Write a row of *digests*."""
        self.txn.put(digest, row.pack(), db=self.tables["digests"])

    def put_named(self, ordinal: int, named: schema.OrdinalRow) -> None:
        """Write a row of *ordinals*."""
        self.txn.put(schema.U64.pack(ordinal), named.pack(), db=self.tables["ordinals"])

    def raw_variant(self, ordinal: int, kind: int, number: int) -> bytes | None:
        """Return the row of a variant, served or not; None if it is missing."""
        value = self.get("artifacts", schema.ORDINAL_KIND.pack(ordinal, kind))
        if value is None or value[:2] != number.to_bytes(2, "big"):
            value = self.get("variants", schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, number))
        return value

    def variant(self, ordinal: int, kind: int, number: int) -> Artifact | None:
        """Return a variant, served or not; None if its row is missing."""
        value = self.raw_variant(ordinal, kind, number)
        return None if value is None else schema.unpack_artifact(ordinal, kind, value)

    def kinds(self, ordinal: int) -> int:
        """Return the kinds that are served as a bitmask, as in a row of *ordinals*."""
        mask, get, table = 0, self.txn.get, self.tables["artifacts"]
        for kind in _KINDS:
            if get(schema.ORDINAL_KIND.pack(ordinal, kind), db=table) is not None:
                mask |= 1 << kind
        if not mask and has_any(self.txn, self.tables["variants"], schema.U64.pack(ordinal)):
            return schema.WITHHELD
        return mask

    def is_marked(self, table: str, ordinal: int) -> bool:
        """Return True if *ambiguous* or *adopted* has a build ID. A store of an earlier version
        that is open for reading only lacks both tables.
        """
        return table in self.tables and self.get(table, schema.U64.pack(ordinal)) is not None

    def floor(self, ordinal: int) -> int:
        """Return the `Index.floor` of an ordinal."""
        named = self.get("ordinals", schema.U64.pack(ordinal))
        if named is None:
            return 0
        key = schema.floor_key(named[_NAME_AT:])
        return floor_in(key, self.get("meta", key))


def digest_row(env: Environment, digest: bytes) -> schema.DigestRow | None:
    """Return a row of *digests*; None if it is missing."""
    value = env.get(env.tables["digests"], digest)
    return None if value is None else schema.DigestRow.unpack(value)


def has_any(txn: Txn, table: Table, prefix: bytes) -> bool:
    """Return True if a key of a table starts with ``prefix``."""
    return next(prefixed(txn, table, prefix), None) is not None


def floor_in(key: bytes, value: bytes | None) -> int:
    """Return the `belief` in a "floor" row of *meta*; 0 if there is none."""
    return 0 if value is None else belief_in(*schema.unpack_floor(key, value))


@whole
def derivations(env: Environment, most: int) -> list[tuple[Digest, BuildId]]:
    """Return some blobs that debug files are to be made from, each with its build ID.

    See `schema.derivation_key`. Raises `IntegrityError`.
    """
    with env.read() as txn:
        rows = prefixed(txn, env.tables["meta"], schema.DERIVATION_PREFIX)
        return [schema.unpack_derivation(*row) for row in islice(rows, most)]


def derived(env: Environment, digest: Digest) -> None:
    """Record that a debug file was made from a blob, or cannot be made. Raises `StoreError`."""
    key = schema.derivation_key(digest)
    env.write(lambda txn: txn.delete(key, db=env.tables["meta"]))


class Pins:
    """The pins. A pin keeps a build ID, captured or not, whatever the size limits say; a pin of the
    user has the empty name. A build ID may have many pins.
    """

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._table = environment.tables["pins"]

    def every(self, name: bytes | None = None) -> Iterator[Pin]:
        """Yield all pins, or those with one name, by length and value of the build IDs."""
        for key, value in rows_from(self._env, self._table):
            pin = _pin(key, value)
            if name is None or pin.name == name:
                yield pin

    @whole
    def of(self, build_id: BuildId) -> list[Pin]:
        """Return the pins of one build ID."""
        with self._env.read() as txn:
            return [_pin(*row) for row in prefixed(txn, self._table, schema.pin_key(build_id, b""))]

    def add(self, build_ids: Iterable[BuildId], name: bytes) -> int:
        """Pin build IDs under a name, and return the number of new pins.

        Raises `UsageError` for a name that is too long, and `StoreError`.
        """
        if len(name) > schema.MAX_PIN_NAME:
            raise UsageError(
                f"a name of {len(name)} bytes is too long for a pin: --name gives it another"
                f" ({schema.MAX_PIN_NAME} at most)"
            )
        keys = [schema.pin_key(build_id, name) for build_id in build_ids]
        created = schema.U64.pack(time.time_ns())
        return self._env.write(
            lambda txn: sum(txn.put(key, created, overwrite=False, db=self._table) for key in keys)
        )

    def remove(self, build_ids: Iterable[BuildId], name: bytes = b"") -> int:
        """Remove the pins with a name from build IDs, and return the number removed."""
        keys = [schema.pin_key(build_id, name) for build_id in build_ids]
        return self._env.write(lambda txn: sum(txn.delete(key, db=self._table) for key in keys))


def _pin(key: bytes, value: bytes) -> Pin:
    build_id, name = schema.pin_of(key)
    return Pin(build_id, name, int.from_bytes(value, "big"))
