# SPDX-License-Identifier: Apache-2.0
"""When blobs were last of use, within one write transaction, and in what order they can go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from buildidfs.model import Trust
from buildidfs.store.schema import schema

if TYPE_CHECKING:
    from buildidfs.model import Digest
    from buildidfs.store.index.environment import Environment, Txn


#: Classes in *uses*: what can probably be had again, everything else.
CLASSES: Final = (0, 1)


class UseWriter:
    """Keeps *uses* in step with the rows of *digests*, which the caller writes."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._table = environment.tables["uses"]

    def add(self, digest: Digest, row: schema.DigestRow, stamp: int, trust: Trust) -> None:
        """Give a new row its place."""
        row.used, row.rank = stamp, _class_of(trust)
        self._put(digest, row)

    def note(self, digest: Digest, row: schema.DigestRow, stamp: int, trust: Trust) -> bool:
        """Somebody used the blob, or it was seen at a place believed that much.

        True when the row is another one now.
        """
        used, rank = row.used, min(row.rank, _class_of(trust))
        # In another class it must not be behind what a walk through that class has passed.
        if stamp > used + schema.USE_SLACK_S or (rank != row.rank and stamp > used):
            used = stamp
        if (used, rank) == (row.used, row.rank):
            return False
        self.remove(digest, row)
        row.used, row.rank = used, rank
        self._put(digest, row)
        return True

    def lower(self, digest: Digest, row: schema.DigestRow) -> None:
        """File a blob as one that cannot be had again, until it is seen where it can."""
        self.remove(digest, row)
        row.rank = max(CLASSES)
        self._put(digest, row)

    def remove(self, digest: Digest, row: schema.DigestRow) -> None:
        """Take a row's place away."""
        self._txn.delete(schema.USE.pack(row.rank, row.used, digest), db=self._table)

    def _put(self, digest: Digest, row: schema.DigestRow) -> None:
        self._txn.put(schema.USE.pack(row.rank, row.used, digest), b"", db=self._table)


def _class_of(trust: Trust) -> int:
    """0 for what can probably be had again: the host or a package has it."""
    return 0 if trust >= Trust.PACKAGE else 1
