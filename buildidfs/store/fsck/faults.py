# SPDX-License-Identifier: Apache-2.0
"""Faults of an index, and the index as the rules see it (`rules`)."""

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

if TYPE_CHECKING:
    from buildidfs.store.index.environment import Environment, Txn


_KINDS: Final = tuple(int(kind) for kind in Kind)


class StoreFault(msgspec.Struct, frozen=True):
    """A fault in one line, with the build ID or blob that it affects, if known.

    A new index mends all faults of rows (`rebuild`); a new capture mends the fault of a blob.
    """

    text: str
    digest: Digest | None = None
    build_id: BuildId | None = None


class Rows:
    """The index as one transaction sees it, so that a commit cannot look like a fault."""

    def __init__(self, env: Environment, txn: Txn) -> None:
        self.env = env
        self.txn = txn
        self.tables = env.tables

    @cached_property
    def counters(self) -> schema.StoreCounters:
        """Return the counters as the index has them, right or wrong."""
        return load_counters(self.env, self.txn)

    def get(self, table: str, key: bytes) -> bytes | None:
        """Return the value of a row; None if there is none, or if the key is impossible."""
        try:
            return self.txn.get(key, db=self.tables[table])
        except lmdb.BadValsizeError:
            return None

    def having(self, table: str, prefix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """Yield the rows whose key begins with ``prefix``; none if a store of an earlier version
        lacks the table.
        """
        if table in self.tables:
            yield from prefixed(self.txn, self.tables[table], prefix)

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

    def is_marked(self, table: str, ordinal: int) -> bool:
        """Return True if *ambiguous* or *adopted* has a build ID."""
        return table in self.tables and self.get(table, schema.U64.pack(ordinal)) is not None

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


Rule = Callable[[Rows, bytes, bytes], Iterator[StoreFault]]
"""A rule yields the faults of a row, given its key and value. Raises the exceptions of decoding the
row.
"""


def faults_of(rule: Rule, table: str, rows: Rows, key: bytes, value: bytes) -> list[StoreFault]:
    """Return the faults that a rule finds; a row that does not decode is also a fault."""
    found = []
    try:
        for fault in rule(rows, key, value):
            found.append(fault)  # noqa: PERF402 - those before an exception count
    except (*DAMAGE, BuildIdFsError) as error:
        found.append(StoreFault(f"row {key.hex()} of {table} cannot be read: {error}"))
    return found
