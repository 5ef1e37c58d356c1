# SPDX-License-Identifier: Apache-2.0
"""Faults of an index and their repair: the tools of the rules in `id_rules` and `location_rules`.

A rule reads one row and its related rows within one transaction, so that a commit cannot look like
a fault. To mend faults, the same rules run in a write transaction: each fault carries its own
repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Final

import lmdb
import msgspec

from buildidfs.errors import BuildIdFsError
from buildidfs.model import Artifact, BuildId, Digest, Kind
from buildidfs.store import schema
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.queries import DAMAGE, floor_of, prefixed
from buildidfs.store.write.uses import UseWriter
from buildidfs.store.write.variants import VariantWriter

if TYPE_CHECKING:
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.index.environment import Environment, Txn


_KINDS: Final = tuple(int(kind) for kind in Kind)


class Fault(msgspec.Struct, frozen=True):
    """A fault in one line, with the build ID or blob that it affects, if known.

    ``mend`` corrects or removes the row; it is None if the index alone is not enough for that.
    """

    text: str
    digest: Digest | None = None
    build_id: BuildId | None = None
    mend: Callable[[Mending], object] | None = None


def stray(text: str, table: str, key: bytes, *, digest: Digest | None = None) -> Fault:
    """Return the fault of a row that must not be there; the repair removes it."""
    return Fault(text, digest, mend=lambda mending: mending.delete(table, key))


def lacking(
    text: str, table: str, key: bytes, value: bytes, *, digest: Digest | None = None
) -> Fault:
    """Return the fault of a row that is missing or wrong; the repair writes it."""
    return Fault(text, digest, mend=lambda mending: mending.put(table, key, value))


class Rows:
    """The index as one transaction sees it."""

    def __init__(self, env: Environment, txn: Txn, blobs: Blobs) -> None:
        self.env = env
        self.txn = txn
        self.blobs = blobs
        self.tables = env.tables

    @cached_property
    def said(self) -> schema.Counters:
        """Return the counters as the index has them, right or wrong."""
        return load_counters(self.env, self.txn)

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of a row; None if there is none, or if the key is impossible."""
        try:
            return self.txn.get(key, db=self.tables[table])
        except lmdb.BadValsizeError:
            return None

    def having(self, table: str, prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key begins with ``prefix``."""
        return prefixed(self.txn, self.tables[table], prefix)

    def named(self, ordinal: int) -> schema.OrdinalRow | None:
        """Return a row of *ordinals*; None if it is missing or does not decode."""
        value = self.get("ordinals", schema.U64.pack(ordinal))
        try:
            return None if value is None else schema.OrdinalRow.unpack(value)
        except DAMAGE:
            return None

    def digest_row(self, digest: bytes) -> schema.DigestRow | None:
        """Return a row of *digests*; None if it is missing or does not decode."""
        value = self.get("digests", digest)
        try:
            return None if value is None else schema.DigestRow.unpack(value)
        except DAMAGE:
            return None

    def variant(self, ordinal: int, kind: int, number: int) -> Artifact | None:
        """Return a variant, served or not; None if its row is missing or does not decode."""
        wanted = number.to_bytes(2, "big")
        value = self.get("artifacts", schema.ORDINAL_KIND.pack(ordinal, kind))
        if value is None or value[:2] != wanted:
            key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, number)
            value = self.get("variants", key)
        try:
            if value is None or value[:2] != wanted:
                return None
            return schema.unpack_artifact(ordinal, kind, value)
        except DAMAGE:
            return None

    def has_variant(self, ref: tuple[int, int, int], digest: bytes) -> bool:
        """Return True if a variant, served or not, has the blob."""
        ordinal, kind, number = ref
        value = self.get("artifacts", schema.ORDINAL_KIND.pack(ordinal, kind))
        if schema.is_variant(value, number, digest):
            return True
        value = self.get("variants", schema.ORDINAL_KIND_VARIANT.pack(*ref))
        return schema.is_variant(value, number, digest)

    def kinds(self, ordinal: int) -> int:
        """Return the kinds that have an artifact, as a bitmask."""
        mask, get, table = 0, self.txn.get, self.tables["artifacts"]
        for kind in _KINDS:
            if get(schema.ORDINAL_KIND.pack(ordinal, kind), db=table) is not None:
                mask |= 1 << kind
        if not mask and next(self.having("variants", schema.U64.pack(ordinal)), None) is not None:
            return schema.WITHHELD
        return mask

    def is_ambiguous(self, ordinal: int) -> bool:
        """Return True if no file of a build ID may be served."""
        return self._has("ambiguous", ordinal)

    def is_adopted(self, ordinal: int) -> bool:
        """Return True if a build ID is marked as adopted."""
        return self._has("adopted", ordinal)

    def _has(self, table: str, ordinal: int) -> bool:
        if table not in self.tables:
            return False
        return self.get(table, schema.U64.pack(ordinal)) is not None

    def floor(self, ordinal: int) -> int:
        """Return the belief below which debuginfo is withheld; 0 if there is none or its row is
        damaged.
        """
        try:
            return floor_of(self.txn, self.tables["ordinals"], self.tables["meta"], ordinal)
        except (*DAMAGE, lmdb.BadValsizeError):
            return 0

    def is_there(self, ordinal: bytes) -> bool:
        """Return True if rows may refer to an ordinal: its build ID has artifacts, or is being
        removed.
        """
        return self.get("ordinals", ordinal) is not None


class Mending(Rows):
    """The index during a repair, within one write transaction; call `finish` last."""

    def __init__(self, env: Environment, txn: Txn, blobs: Blobs) -> None:
        super().__init__(env, txn, blobs)
        self.counters = load_counters(env, txn)
        self.changed: set[int] = set()
        self.variants = VariantWriter(env, txn, self.counters, self.changed)
        self.uses = UseWriter(env, txn)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row."""
        self.txn.put(key, value, db=self.tables[table])

    def delete(self, table: str, key: bytes) -> None:
        """Remove a row."""
        self.txn.delete(key, db=self.tables[table])

    def change_named(self, ordinal: int, **fields: object) -> None:
        """Change fields of a row of *ordinals*."""
        row = self.named(ordinal)
        if row is not None:
            row = msgspec.structs.replace(row, **fields)
            self.put("ordinals", schema.U64.pack(ordinal), row.pack())
            self.changed.add(ordinal)

    def count_up(self, **numbers: int) -> None:
        """Raise each named counter to at least the given number."""
        for field, number in numbers.items():
            setattr(self.counters, field, max(getattr(self.counters, field), number))

    def finish(self) -> None:
        """Write the counters."""
        self.counters.announced += bool(self.changed)
        self.put("meta", schema.COUNTERS_KEY, self.counters.pack())


Rule = Callable[[Rows, bytes, bytes], Iterator[Fault]]
"""A rule yields the faults of a row, given its key and value. Raises the exceptions of decoding the
row.
"""


def faults_of(rule: Rule, table: str, rows: Rows, key: bytes, value: bytes) -> list[Fault]:
    """Return the faults that a rule finds; a row that does not decode is also a fault."""
    found = []
    try:
        for fault in rule(rows, key, value):
            found.append(fault)  # noqa: PERF402 - those before an exception count
    except (*DAMAGE, BuildIdFsError) as error:
        text = f"row {key.hex()} of {table} cannot be read: {error}"
        found.append(Fault(text, mend=lambda mending: mending.delete(table, key)))
    return found
