# SPDX-License-Identifier: Apache-2.0
"""Last uses of blobs in one write transaction, and the order of eviction."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from typing import TYPE_CHECKING, Final

from buildidfs.model import Digest, Trust
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.index.queries import IndexRows

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.store.index.environment import Environment, Txn

#: Classes in *uses*: probably recapturable, all others.
CLASSES: Final = (0, 1)


class UseWriter:
    """Keeps *uses* in step with the rows of *digests*, which the caller writes."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._table = environment.tables["uses"]

    def add(self, digest: Digest, row: schema.DigestRow, stamp: int, trust: Trust) -> None:
        """Add a new row to the order."""
        row.used, row.rank = stamp, _class_of(trust)
        self._put(digest, row)

    def note(self, digest: Digest, row: schema.DigestRow, stamp: int, trust: Trust) -> bool:
        """Record a use of the blob, or a sighting with that trust; return True if the
        row changed.
        """
        used, rank = row.used, min(row.rank, _class_of(trust))
        # In its new class the row must be ahead of a running walk through that class.
        if stamp > used + schema.USE_SLACK_S or (rank != row.rank and stamp > used):
            used = stamp
        if (used, rank) == (row.used, row.rank):
            return False
        self.remove(digest, row)
        row.used, row.rank = used, rank
        self._put(digest, row)
        return True

    def lower(self, digest: Digest, row: schema.DigestRow) -> None:
        """File a blob as not recapturable, until it is seen at a trusted place."""
        self.remove(digest, row)
        row.rank = max(CLASSES)
        self._put(digest, row)

    def remove(self, digest: Digest, row: schema.DigestRow) -> None:
        """Remove a row from the order."""
        self._txn.delete(schema.USE.pack(row.rank, row.used, digest), db=self._table)

    def _put(self, digest: Digest, row: schema.DigestRow) -> None:
        self._txn.put(schema.USE.pack(row.rank, row.used, digest), b"", db=self._table)


def _class_of(trust: Trust) -> int:
    """Return 0 for a blob that is probably recapturable: the host or a package has it."""
    return 0 if trust >= Trust.PACKAGE else 1


_DIRECTORY: Final = b"run"
_PREFIX: Final = b"uses-"
_DRAFT: Final = b".draft"
_HEAD: Final = b"buildidfs uses 1\n"

#: The most digests in a file, which are more than a reader remembers.
_MOST_DIGESTS: Final = 1 << 17

#: The largest number of files of readers: a store without a writer needs no more.
_MOST_FILES: Final = 64

_BATCH: Final = 1024


def leave(root: bytes, digests: Iterable[Digest]) -> None:
    """Write a file that tells the next writer which blobs were opened; raises no errors."""
    directory = os.path.join(root, _DIRECTORY)
    name = b"%s%d-%d" % (_PREFIX, os.getpid(), time.time_ns())
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        if len(_files(root)) < _MOST_FILES:
            _write(os.path.join(directory, name), digests)
    except OSError as error:
        # The store may be on a read-only filesystem, or the filesystem may be full.
        import logging  # short commands never need it

        logging.getLogger(__name__).debug("what was used is not recorded: %s", error.strerror)


def _write(path: bytes, digests: Iterable[Digest]) -> None:
    draft = path + _DRAFT
    stamp = schema.U32.pack(schema.stamp_of(time.time_ns()))
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(_HEAD + stamp + b"".join(digests))
        os.rename(draft, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def fold(env: Environment) -> int:
    """Record the uses in the files that readers have left, and remove the files; return the number
    of new uses.
    """
    stamps: dict[Digest, int] = {}
    names = _files(env.root)
    for name in names:
        stamp, digests = _read(name)
        for digest in digests:
            stamps[digest] = max(stamp, stamps.get(digest, 0))
    recorded = 0
    items = iter(stamps.items())
    while batch := list(itertools.islice(items, _BATCH)):
        recorded += env.write(functools.partial(_note, env, batch))
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)
    return recorded


def drafts(root: bytes) -> list[bytes]:
    """Return files that a process left unfinished."""
    return [name for name in _listed(root) if name.endswith(_DRAFT)]


def _note(env: Environment, batch: list[tuple[Digest, int]], txn: Txn) -> int:
    uses, rows, recorded = UseWriter(env, txn), IndexRows(env, txn), 0
    for digest, stamp in batch:
        row = rows.digest_row(digest)
        if row is not None and uses.note(digest, row, stamp, Trust.UNKNOWN):
            rows.put_digest_row(digest, row)
            recorded += 1
    return recorded


def _listed(root: bytes) -> list[bytes]:
    directory = os.path.join(root, _DIRECTORY)
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return [os.path.join(directory, name) for name in names if name.startswith(_PREFIX)]


def _files(root: bytes) -> list[bytes]:
    return [name for name in _listed(root) if not name.endswith(_DRAFT)]


def _read(path: bytes) -> tuple[int, list[Digest]]:
    """Return stamp and digests in a file; no digests if another program wrote the file."""
    start = len(_HEAD) + schema.U32.size
    try:
        with open(path, "rb") as file:
            data = file.read(start + 32 * _MOST_DIGESTS + 1)
    except OSError:
        return 0, []
    if not data.startswith(_HEAD) or (len(data) - start) % 32:
        import logging

        logging.getLogger(__name__).warning(
            "%s is not a record of uses: passed over", printable(path)
        )
        return 0, []
    (stamp,) = schema.U32.unpack_from(data, len(_HEAD))
    # Otherwise a clock that was ahead for a while would protect them for ever.
    stamp = min(stamp, schema.stamp_of(time.time_ns()))
    return stamp, [Digest(data[at : at + 32]) for at in range(start, len(data), 32)]
