# SPDX-License-Identifier: Apache-2.0
"""Aliases of blobs in one write transaction, and the rows that follow from them.

A build ID turns out to be shared by unrelated programs. A debug file without a build ID belongs to
the binaries whose ``.gnu_debuglink`` has its name and checksum, and an unstripped program without
one to its stripped twin.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.model import Alias, AliasType, Digest, Kind
from buildidfs.store import schema
from buildidfs.store.index.queries import prefixed
from buildidfs.store.index.ranking import belief

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Artifact
    from buildidfs.store.index.environment import Environment, Txn

MOST_JOINED: Final = 8
"""So many files with one alias are joined at most."""

_SHARED_BY: Final = 3
_LOOKED_AT: Final = 16


class AliasWriter:
    """Reads and writes the aliases of blobs."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._identities = environment.tables["identities"]
        self._aliases = environment.tables["aliases"]

    def of(self, digest: bytes) -> tuple[Alias, ...]:
        """The aliases of a blob."""
        value = self._txn.get(digest, db=self._identities)
        return () if value is None else schema.unpack_aliases(digest, value)

    def value(self, digest: bytes, kind: AliasType) -> bytes:
        """The alias of one type that a blob has, empty if there is none."""
        return next((each.value for each in self.of(digest) if each.type is kind), b"")

    def put(self, digest: bytes, aliases: Iterable[Alias]) -> bool:
        """Give a blob more aliases; False if it has them all."""
        known = self.of(digest)
        new = [each for each in dict.fromkeys(aliases) if each not in known]
        if not new:
            return False
        self._txn.put(digest, schema.pack_aliases(digest, (*known, *new)), db=self._identities)
        for each in new:
            self._txn.put(schema.alias_prefix(each) + digest, b"", db=self._aliases)
        return True

    def blobs(self, alias: Alias) -> list[Digest]:
        """A few of the blobs that have an alias."""
        prefix = schema.alias_prefix(alias)
        rows = islice(prefixed(self._txn, self._aliases, prefix), MOST_JOINED)
        return [Digest(key[len(prefix) :]) for key, _ in rows]

    def drop(self, digest: bytes) -> None:
        """Remove the aliases of a blob."""
        value = self._txn.get(digest, db=self._identities)
        if value is None:
            return
        for each in schema.unpack_aliases(digest, value):
            self._txn.delete(schema.alias_prefix(each) + digest, db=self._aliases)
        self._txn.delete(digest, db=self._identities)


def is_shared_by(best: Artifact, others: Iterable[Artifact], aliases: AliasWriter) -> bool:
    """Return True if unrelated programs have the build ID of an executable.

    Three code hashes among files that are believed as much as the ``best`` make it so. Files that
    are believed less say nothing: a container could take a program of the host out of service.
    """
    codes = set()
    for each in (best, *islice(others, _LOOKED_AT)):
        if each.kind is Kind.EXECUTABLE and not each.truncated and belief(each) == belief(best):
            codes.add(aliases.value(each.digest, AliasType.CODE))
    return len(codes - {b""}) >= _SHARED_BY
