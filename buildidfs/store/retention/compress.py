# SPDX-License-Identifier: Apache-2.0
"""Compression of blobs that were unused for long, one after another, in the order of their last
use.

The file is replaced first, then its row. In between, a reader finds that the file is not that of
the row, reads all of it, and sees that it is right (`verify`). After a crash at this point the blob
stays in that state until it is next verified.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import IntegrityError
from buildidfs.model import Digest
from buildidfs.store import coordination, schema
from buildidfs.store.blobs import files
from buildidfs.store.blobs.zstd import compress
from buildidfs.store.index.queries import IndexRows, digest_row, rows_from

if TYPE_CHECKING:
    from buildidfs.store.blobs.files import Blobs, Staged
    from buildidfs.store.blobs.verify import VerifiedBlobs
    from buildidfs.store.index.environment import Environment, Txn

_CLASSES: Final = (1, 0)
# Compression does not reduce the number of blocks of a small file.
_MIN_BYTES: Final = 16 << 10
_WORTH_IT: Final = 0.9
_DONE_KEY: Final = b"compressed"


class Compressed(msgspec.Struct):
    """A compressed blob: the bytes it took on disk ``before`` and takes ``after``."""

    before: int
    after: int


class Compressor:
    """Compresses the blobs of one store."""

    def __init__(self, environment: Environment, blobs: Blobs, verified: VerifiedBlobs) -> None:
        self._env = environment
        self._blobs = blobs
        self._verified = verified

    def run(
        self, unused_since: int, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Digest, Compressed]]:
        """Compress the blobs that were last used before ``unused_since`` (Unix time, s); see
        `Store.compress`.

        Damaged blobs are skipped; `check` handles them.
        """
        for digest in self._unused(self._done(), unused_since):
            if enough():
                return
            try:
                done = self._compress(digest)
            except IntegrityError:
                continue
            if done is not None:
                yield digest, done
        self._env.write(lambda txn: self._note(txn, unused_since))

    def _done(self) -> int:
        """Return a time (Unix, s): all blobs last used before it have been examined."""
        value = self._env.get(self._env.tables["meta"], _DONE_KEY)
        return 0 if value is None else int.from_bytes(value, "big")

    def _note(self, txn: Txn, unused_since: int) -> None:
        txn.put(_DONE_KEY, schema.U32.pack(unused_since), db=self._env.tables["meta"])

    def _unused(self, begin: int, end: int) -> Iterator[Digest]:
        for number in _CLASSES:
            start, stop = schema.USE.pack(number, begin, b""), schema.USE.pack(number, end, b"")
            table = self._env.tables["uses"]
            for key, _ in rows_from(self._env, table, bytes([number]), start):
                if key >= stop:
                    break
                yield Digest(schema.USE.unpack(key)[2])

    def _row(self, digest: Digest) -> schema.DigestRow | None:
        """Return the row of a blob that can be compressed; None for any other."""
        row = digest_row(self._env, digest)
        return row if row is not None and row.form == schema.FORM_PLAIN else None

    def _compress(self, digest: Digest) -> Compressed | None:
        row = self._row(digest)
        if row is None or row.size < _MIN_BYTES:
            return None
        with self._blobs.draft() as draft:
            hasher = files.sha256()
            with self._verified.open(digest) as blob:
                compress(blob.fileno(), draft.fd, hasher)
            if hasher.digest() != digest:
                raise IntegrityError(f"blob {digest} has other bytes")
            size = os.fstat(draft.fd).st_size
            # The lock prevents a removal meanwhile, which would leave the file without a row.
            with coordination.naming(self._env.root):
                if self._row(digest) is None:
                    return None
                if size > row.size * _WORTH_IT:
                    self._env.write(lambda txn: self._note_dense(txn, digest))
                    return None
                files.sync_all([draft.fd])  # no other process waits for that
                self._env.write(lambda txn: self._replace(txn, digest, draft))
        return Compressed(row.stored, size)

    def _note_dense(self, txn: Txn, digest: Digest) -> None:
        rows = IndexRows(self._env, txn)
        if (row := rows.digest_row(digest)) is not None:
            row.form = schema.FORM_DENSE
            rows.put_digest_row(digest, row)

    def _replace(self, txn: Txn, digest: Digest, draft: Staged) -> None:
        """Replace the file and record the new one in one transaction, so that no other writer comes
        in between.
        """
        self._blobs.replace(digest, draft)
        rows = IndexRows(self._env, txn)
        row, file = rows.digest_row(digest), self._blobs.file(digest)
        if row is None or file is None or file.inode != os.fstat(draft.fd).st_ino:
            return
        rows.counters.stored_bytes += row.refer_to(file, self._blobs.disk_bytes(digest))
        row.form = schema.FORM_ZSTD
        rows.put_digest_row(digest, row)
        rows.put_counters()
