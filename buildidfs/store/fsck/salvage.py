# SPDX-License-Identifier: Apache-2.0
"""The rows of an old index that a new index keeps: those that still decode.

The data beside each blob (`provenance`) decides which build IDs, trust and readers a blob has. The
old index adds the rows that no blob has: pins, journal, history, further places, and the order of
uses. A row that does not decode is dropped. A wrong bit may change a place, but gives no user more
rights: the place gets at most the trust and the readers that the blob has already.
"""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import lmdb
import msgspec

from buildidfs.errors import BuildIdFsError
from buildidfs.model import EVERYBODY, NO_NAMES, OWNER, BuildId, Digest, Sighting
from buildidfs.store import location_rows, schema
from buildidfs.store.fsck.faults import Rows
from buildidfs.store.fsck.scrub import CHECK_MARK, SCRUB_MARK
from buildidfs.store.index.locations import label_of
from buildidfs.store.index.queries import DAMAGE
from buildidfs.store.values import NewCapture, claimed
from buildidfs.store.write.containers import row_of
from buildidfs.store.write.transaction import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import ContainerNames, Origin
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.index.environment import Environment, Txn

_BATCH: Final = 256
_OWN_ROWS: Final = frozenset((schema.COUNTERS_KEY, schema.FORMAT_KEY, CHECK_MARK, SCRUB_MARK))
"""Rows of *meta* that are right for one index only."""

T = TypeVar("T")

_Row = tuple[bytes, bytes]


class _Place(NamedTuple):
    """A place of a blob under a build ID, with its times and the names of its container."""

    digest: Digest
    build_id: BuildId
    origin: Origin
    first_ns: int
    last_ns: int
    names: ContainerNames


class OldIndex:
    """An index that can be read, although its rows may have faults; ``env`` None is an empty
    one.
    """

    def __init__(self, env: Environment | None) -> None:
        self._env = env

    def used(self, digest: Digest) -> int | None:
        """Return the time of the last use of a blob (Unix time, s); None if it is unknown."""
        if self._env is None:
            return None
        with self._env.read() as txn:
            row = Rows(self._env, txn).digest_row(digest)
        return None if row is None else row.used

    def keep(self, new: Environment, blobs: Blobs) -> None:
        """Write the rows that still decode into a new index that has all blobs."""
        for table, decode in (("pins", _pin), ("history", _history), ("meta", _meta)):
            for rows in _batches(self._rows(table, decode)):
                new.write(partial(_put, new, table, rows))
        for rows in _batches(self._rows("journal", _journal)):
            new.write(partial(_put_journal, new, rows))
        for places in _batches(self._places()):
            new.write(partial(_see, new, blobs, places))

    def _rows(self, table: str, decode: Callable[[bytes, bytes], object]) -> Iterator[_Row]:
        """Yield the rows of a table that ``decode`` takes."""
        if self._env is None:
            return
        try:
            with self._env.read() as txn:
                for key, value in Rows(self._env, txn).having(table):
                    try:
                        decode(key, value)
                    except (*DAMAGE, BuildIdFsError):
                        continue
                    yield key, value
        except (lmdb.Error, BuildIdFsError):
            return  # the rest of the table cannot be read

    def _places(self) -> Iterator[_Place]:
        for key, value in self._rows("origins", location_rows.place_of):
            place = self._place(key, value)
            if place is not None:
                yield place

    def _place(self, key: bytes, value: bytes) -> _Place | None:
        assert self._env is not None
        if location_rows.place_of(key, value) is None:
            return None
        digest, _, origin, first, last = location_rows.unpack_origin(value)
        with self._env.read() as txn:
            named = Rows(self._env, txn).named(int.from_bytes(key[:8], "big"))
        names = self._names(origin) if label_of(origin) else NO_NAMES
        return None if named is None else _Place(digest, named.build_id, origin, first, last, names)

    def _names(self, origin: Origin) -> ContainerNames:
        """Return the names of the container of a place, as far as its row can be read."""
        assert self._env is not None
        try:
            with self._env.read() as txn:
                row = row_of(self._env, txn, origin)
            return NO_NAMES if row is None else row.names
        except (*DAMAGE, BuildIdFsError):
            return NO_NAMES


def _batches(items: Iterable[T]) -> Iterator[list[T]]:
    each = iter(items)
    while batch := list(islice(each, _BATCH)):
        yield batch


def _pin(key: bytes, value: bytes) -> None:
    schema.pin_of(key)
    schema.U64.unpack(value)


def _history(key: bytes, value: bytes) -> None:
    schema.unpack_history(key, value)


def _meta(key: bytes, value: bytes) -> None:
    if key.startswith(schema.FLOOR_PREFIX):
        schema.unpack_floor(key, value)
    elif key in _OWN_ROWS or key.startswith(schema.DERIVATION_PREFIX):
        raise ValueError("of the old index only")


def _journal(key: bytes, value: bytes) -> None:
    record = location_rows.unpack_journal(key, value)
    if record.last_seen_ns < record.first_seen_ns:
        raise ValueError("last seen before it was first seen")


def _put(new: Environment, table: str, rows: list[_Row], txn: Txn) -> None:
    for key, value in rows:
        txn.put(key, value, db=new.tables[table])


def _put_journal(new: Environment, rows: list[_Row], txn: Txn) -> None:
    for key, value in rows:
        txn.put(key, value, db=new.tables["journal"])
        txn.put(value[8:16] + key, b"", db=new.tables["recent"])


def _see(new: Environment, blobs: Blobs, places: list[_Place], txn: Txn) -> None:
    """Record places of blobs that the new index has under the same build IDs."""
    called = {(each.origin.cgroup, each.origin.container): each.names for each in places}
    called = {key: names for key, names in called.items() if names != NO_NAMES}
    recorder, rows = Recorder(new, txn, blobs, called=called), Rows(new, txn)
    for each in places:
        row, number = rows.digest_row(each.digest), rows.get("ids", each.build_id)
        if row is None or number is None:
            continue
        ordinal = int.from_bytes(number, "big")
        refs = (rows.variant(*ref) for ref in row.refs if ref[0] == ordinal)
        kept = [artifact for artifact in refs if artifact is not None]
        if not kept:
            continue
        origin = msgspec.structs.replace(
            each.origin,
            trust=min(each.origin.trust, kept[0].trust),
            reach=each.origin.reach & (EVERYBODY if kept[0].mode & 0o444 == 0o444 else OWNER),
        )
        kinds = tuple(artifact.kind for artifact in kept)
        for when in dict.fromkeys((each.first_ns, each.last_ns)):
            sighting = claimed(Sighting(origin, when), time.time_ns())
            recorder.capture(
                NewCapture(sighting, each.digest, each.build_id, kinds, remember=False)
            )
    recorder.finish()
