# SPDX-License-Identifier: Apache-2.0
"""The table *seen* in one write transaction: files that need not be read again."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Final

from buildidfs.store.schema import schema

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity
    from buildidfs.store.index.environment import Environment, Txn

#: A file changed this shortly before it was looked at may change again within the same tick of
#: the filesystem's clock, and then looks unchanged; git calls such a file racily clean.
_RACY_NS: Final = 2_000_000_000

#: Rows of which the oldest goes when the table is full.
_CANDIDATES: Final = 8

#: Rows that are looked at for each new one, and go if their blob is gone: then nobody can be told
#: of it. So not more than a third of all are in vain, however much is captured and removed.
_LOOKED_AT: Final = 4


class MemoWriter:
    """Adds rows, as many as there may be."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._seen = environment.tables["seen"]
        self._digests = environment.tables["digests"]

    def put(self, identity: FileIdentity, seen_ns: int, tag: int, digest: bytes) -> None:
        """Remember what a file is: tag 0 and a digest, or why it has no build ID."""
        key = schema.seen_key(identity)
        if key is None or seen_ns - identity.ctime_ns < _RACY_NS:
            return
        value = schema.SEEN.pack(schema.stamp_of(seen_ns), tag) + digest
        self._txn.put(key, value, db=self._seen)
        if not tag:
            self._forget_gone(key[::-1])
        if self._txn.stat(self._seen)["entries"] > schema.MAX_SEEN:
            self._forget_near(key[::-1])

    def forget(self, identity: FileIdentity) -> None:
        """Drop the row of a file that can change without a trace in its identity."""
        key = schema.seen_key(identity)
        if key is not None:
            self._txn.delete(key, db=self._seen)

    def _forget_gone(self, place: bytes) -> None:
        """Drop those of a few rows that are of blobs which were removed."""
        with self._txn.cursor(self._seen) as cursor:
            found = cursor.set_range(place) or cursor.first()
            rows = list(itertools.islice(cursor, _LOOKED_AT)) if found else []
        for key, value in rows:
            digest = value[schema.SEEN.size :]
            if digest and self._txn.get(digest, db=self._digests) is None:
                self._txn.delete(key, db=self._seen)

    def _forget_near(self, place: bytes) -> None:
        """Drop the oldest of a few rows at a place that is as good as random: keys are hashes."""
        with self._txn.cursor(self._seen) as cursor:
            rows = []
            if cursor.set_range(place) or cursor.first():
                for key, value in itertools.islice(cursor, _CANDIDATES):
                    rows.append((value[:4], key))
        self._txn.delete(min(rows)[1], db=self._seen)
