# SPDX-License-Identifier: Apache-2.0
"""Check that the index agrees with itself and with the blobs, and the blobs with their digests.

A store in use changes all the time. So rows are read in many short transactions, each of which sees
a row and its related rows at one moment; a row with an apparent fault is read once more. Only
counting takes one transaction for all rows; while it lasts, LMDB cannot reuse pages.

A blob without a row is not a fault: a killed process leaves such blobs, and the next capture of the
same bytes takes them over.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final

from buildidfs.store import schema
from buildidfs.store.fsck.faults import Rows, StoreFault, faults_of
from buildidfs.store.fsck.rules import RULES, wrong_counts
from buildidfs.store.fsck.scrub import CHECK_MARK, SCRUB_MARK, Scrubber
from buildidfs.store.index.queries import prefixed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Digest
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.blobs.verify import VerifiedBlobs
    from buildidfs.store.index.environment import Environment

_ROWS: Final = 512


class Checker:
    """Looks for faults in one store. It writes only to the rows of blobs that it has read (see
    `scrub`), and writes nothing if the store is open for reading only.
    """

    def __init__(self, env: Environment, blobs: Blobs, verified: VerifiedBlobs) -> None:
        self.env = env
        self.blobs = blobs
        self.verified = verified

    def rows(self, progress: Callable[[int], None] = lambda count: None) -> Iterator[StoreFault]:
        """Yield the faults of rows and of their counts; ``progress`` is called with the number of
        further rows checked.
        """
        for table in RULES:
            for count, suspicious in self._batches(table):
                progress(count)
                for key in suspicious:
                    yield from self._recheck(table, key)
        with self.env.read() as txn:
            yield from list(wrong_counts(Rows(self.env, txn)))

    def count_rows(self) -> int:
        """Return the number of rows to check."""
        entries = self.env.entries()
        return sum(entries[table] for table in RULES if table in entries)

    def _batches(self, table: str) -> Iterator[tuple[int, list[bytes]]]:
        """Check a table in batches; for each batch yield the number of rows, and the keys of rows
        with an apparent fault.
        """
        if table not in self.env.tables:
            return  # a store of an earlier version that is open for reading
        start, rule = b"", RULES[table]
        while True:
            with self.env.read() as txn:
                moment, count, key, suspicious = Rows(self.env, txn), 0, b"", []
                for key, value in islice(prefixed(txn, self.env.tables[table], b"", start), _ROWS):
                    count += 1
                    if faults_of(rule, table, moment, key, value):
                        suspicious.append(key)
            yield count, suspicious
            if count < _ROWS:
                return
            start = key + b"\0"

    def _recheck(self, table: str, key: bytes) -> list[StoreFault]:
        """Check one row again, and return its faults."""
        with self.env.read() as txn:
            moment = Rows(self.env, txn)
            value = moment.get(table, key)
            return [] if value is None else faults_of(RULES[table], table, moment, key, value)

    def files(
        self,
        *,
        whole: bool,
        from_start: bool = True,
        progress: Callable[[int], None] = lambda size: None,
    ) -> Iterator[StoreFault]:
        """Yield the faults of blobs; with ``whole`` read all blobs, else only those whose files
        were touched.

        Continues where the last call was interrupted, unless ``from_start``. ``progress`` is called
        with the number of bytes read.
        """
        mark = CHECK_MARK if whole else b""
        scrubber = Scrubber(self.env, self.blobs, self.verified, progress, mark)
        return scrubber.all(whole=lambda row: whole, from_start=from_start)

    def scrub(
        self, pace: Callable[[int], None], is_due: Callable[[schema.DigestRow], bool]
    ) -> Iterator[StoreFault]:
        """Read the blobs that are due or were changed, and yield their faults. Continues where an
        earlier call stopped. ``pace`` is called with the number of bytes read, and may wait.
        """
        scrubber = Scrubber(self.env, self.blobs, self.verified, pace, SCRUB_MARK)
        return scrubber.all(whole=is_due)

    def damaged(self) -> list[Digest]:
        """Return the blobs that are known to be damaged or gone."""
        scrubber = Scrubber(self.env, self.blobs, self.verified)
        return [digest for digest, row in scrubber.digests() if schema.is_struck(row.pack())]

    def is_struck(self, digest: Digest) -> bool:
        """Return True if a blob is known to be damaged or gone."""
        value = self.env.get(self.env.tables["digests"], digest)
        return value is not None and schema.is_struck(value)

    def ordinals_of(self, digest: Digest) -> set[int]:
        """Return the ordinals of the build IDs that have a blob."""
        value = self.env.get(self.env.tables["digests"], digest)
        return set() if value is None else {ref[0] for ref in schema.DigestRow.unpack(value).refs}

    def unreferenced(self) -> int:
        """Return the number of blobs that no row refers to."""
        table = self.env.tables["digests"]
        return sum(1 for digest in self.blobs.names() if self.env.get(table, digest) is None)
