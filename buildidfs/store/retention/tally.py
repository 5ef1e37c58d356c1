# SPDX-License-Identifier: Apache-2.0
"""Counts and names of the blobs that were removed to make room: of a store, of a process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.store.index.environment import Environment, Txn

_KEY: Final = b"evicted"

#: Losses that the row names; the journal has all of them.
_NAMED: Final = 32

#: Number of evicted blobs that a summary names.
_FOREMOST: Final = 10

_SUMMED: Final = (
    *("recapturable", "recapturable_bytes", "losses", "lost_bytes", "aged", "aged_bytes"),
    "ids",
)

_encode = msgspec.msgpack.Encoder().encode


class Evicted(msgspec.Struct, frozen=True, array_like=True):
    """A blob that was removed to make room: its file, its bytes on disk, and the time (s).

    ``copy_at`` is a place that had the same bytes at that time; it is empty if the bytes are lost.
    ``damaged`` is True if the bytes were lost because the blob was damaged.
    """

    build_id: bytes
    path: bytes
    size: int
    when: int
    copy_at: str = ""
    damaged: bool = False


class _Counts(msgspec.Struct):
    """Counts of blobs removed to make room: ``recapturable`` of such ones, ``losses`` of the
    others. Bytes are those on disk.
    """

    recapturable: int = 0
    recapturable_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0

    def _count(self, each: Evicted) -> None:
        if each.copy_at:
            self.recapturable += 1
            self.recapturable_bytes += each.size
        else:
            self.losses += 1
            self.lost_bytes += each.size


class Evictions(_Counts, array_like=True):
    """Counts for the life of a store.

    ``last`` are the latest losses, newest first. ``omitted`` counts the files that were omitted
    for lack of room. Stores of earlier versions have two more numbers.
    """

    last: list[Evicted] = msgspec.field(default_factory=list)
    omitted: int = 0

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count removed blobs, and keep the latest losses by name."""
        for each in gone:
            self._count(each)
            if not each.copy_at:
                self.last = [each, *self.last][:_NAMED]


_decode = msgspec.msgpack.Decoder(Evictions).decode


def load(env: Environment, txn: Txn) -> Evictions:
    """Return the stored counts; all are 0 if the row is missing or damaged."""
    value = txn.get(_KEY, db=env.tables["meta"])
    try:
        return Evictions() if value is None else _decode(value)
    except msgspec.MsgspecError:
        return Evictions()


def save(env: Environment, txn: Txn, row: Evictions) -> None:
    """Write the counts."""
    txn.put(_KEY, _encode(row), db=env.tables["meta"])


class Tally(_Counts):
    """Counts of the blobs that one process has removed.

    ``named`` has the most important losses and after them recapturable blobs, each group with the
    largest first. ``aged`` blobs were older than max-age. ``ids`` are the build IDs without a blob
    left.
    """

    aged: int = 0
    aged_bytes: int = 0
    ids: int = 0
    named: list[Evicted] = msgspec.field(default_factory=list)

    @property
    def blobs(self) -> int:
        """Return the number of all removed blobs."""
        return self.recapturable + self.losses + self.aged

    @property
    def bytes(self) -> int:
        """Return the number of bytes that the removed blobs took on disk."""
        return self.recapturable_bytes + self.lost_bytes + self.aged_bytes

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count the blobs that were removed to make room."""
        for each in gone:
            self._count(each)
            self.named.append(each)
        self.named = _foremost(self.named)

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in (
            "recapturable",
            "recapturable_bytes",
            "losses",
            "lost_bytes",
            "aged",
            "aged_bytes",
            "ids",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.named = _foremost([*self.named, *other.named])


def _foremost(named: list[Evicted]) -> list[Evicted]:
    return sorted(named, key=lambda each: (each.copy_at != "", -each.size))[:_FOREMOST]
