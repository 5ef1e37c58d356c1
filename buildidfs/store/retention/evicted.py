# SPDX-License-Identifier: Apache-2.0
"""What was removed to make room, and what was not copied for lack of it: a row of *meta*.

The row counts since the store was made and names the losses: the last blobs that went although
nobody can have them again. It is written in the transaction that removes the blobs, so that
`Evictions.losses` tells a commit whether anything was lost since its bytes were staged.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Origin
    from buildidfs.store.index.environment import Environment, Txn

_KEY: Final = b"evicted"

#: Losses that the row names; all are in the journal.
_NAMED: Final = 32

#: Evicted blobs that a summary names.
_FOREMOST: Final = 10

#: Room that was taken from what is gone for good is not given to what is not, for so long.
_LATELY_S: Final = 86_400

#: A file that is in use, and was made this lately, may be gone in a moment: it takes the place of
#: whatever can be had again.
_FRESH_NS: Final = 3600 * 1_000_000_000

#: `Origin.scanner` of files that were found in a directory, and will mostly be there tomorrow. They
#: take the place only of what nobody has used for a day: else a scan of more than there is room for
#: would remove what it has captured itself, and begin anew each time.
AT_REST: Final = "tree"

_encode = msgspec.msgpack.Encoder().encode


def is_fresh(origin: Origin) -> bool:
    """True for a file that was seen in use within an hour after it was made."""
    age = time.time_ns() - origin.identity.ctime_ns
    return age < _FRESH_NS and origin.scanner != AT_REST


class Evicted(msgspec.Struct, frozen=True, array_like=True):
    """One blob that was removed to make room: what it was, its bytes on the disk, and when (s).

    ``again`` says where it could be had at that time, and is empty for a loss.
    """

    build_id: bytes
    path: bytes
    size: int
    when: int
    again: str = ""


class Evictions(msgspec.Struct, array_like=True):
    """What was evicted in all: ``again`` could be had elsewhere, ``losses`` could not.

    ``last`` are the latest losses, newest first. Bytes are those on the disk. ``noted`` counts the
    files that were only noted, since there was no room. ``lost_since`` (Unix time, s) and
    ``lost_lately`` belong together.
    """

    again: int = 0
    again_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0
    last: list[Evicted] = msgspec.field(default_factory=list)
    noted: int = 0
    lost_since: int = 0
    lost_lately: int = 0

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count what was removed, and name the losses."""
        now = int(time.time())
        for each in gone:
            if each.again:
                self.again += 1
                self.again_bytes += each.size
                continue
            self.losses += 1
            self.lost_bytes += each.size
            self.last = [each, *self.last][:_NAMED]
            if not 0 <= now - self.lost_since < _LATELY_S:
                self.lost_since, self.lost_lately = now, 0
            self.lost_lately += each.size

    def reserved(self) -> int:
        """Bytes that were taken from losses within the day."""
        return self.lost_lately if 0 <= time.time() - self.lost_since < _LATELY_S else 0


_decode = msgspec.msgpack.Decoder(Evictions).decode


def load(env: Environment, txn: Txn) -> Evictions:
    """The row; an empty one where there is none, or one that is damaged."""
    value = txn.get(_KEY, db=env.tables["meta"])
    try:
        return Evictions() if value is None else _decode(value)
    except msgspec.MsgspecError:
        return Evictions()


def save(env: Environment, txn: Txn, row: Evictions) -> None:
    """Write the row."""
    txn.put(_KEY, _encode(row), db=env.tables["meta"])


class Tally(msgspec.Struct):
    """What one process has removed, or not copied, so far; see `Evictions`.

    ``named`` are the losses, and after them what could be had again, each largest first, as many
    as are worth a line. ``aged`` blobs were older than max-age. ``ids`` are those that nothing is
    left of.
    """

    again: int = 0
    again_bytes: int = 0
    losses: int = 0
    lost_bytes: int = 0
    aged: int = 0
    aged_bytes: int = 0
    ids: int = 0
    named: list[Evicted] = msgspec.field(default_factory=list)

    @property
    def blobs(self) -> int:
        """Blobs that were removed, for whatever reason."""
        return self.again + self.losses + self.aged

    @property
    def bytes(self) -> int:
        """Their bytes on the disk."""
        return self.again_bytes + self.lost_bytes + self.aged_bytes

    def add(self, gone: Iterable[Evicted]) -> None:
        """Count what was removed to make room."""
        for each in gone:
            if each.again:
                self.again += 1
                self.again_bytes += each.size
            else:
                self.losses += 1
                self.lost_bytes += each.size
            self.named.append(each)
        self.named = _foremost(self.named)

    def merge(self, other: Tally) -> None:
        """Add what somebody else counted."""
        for name in ("again", "again_bytes", "losses", "lost_bytes", "aged", "aged_bytes", "ids"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.named = _foremost([*self.named, *other.named])


def _foremost(named: list[Evicted]) -> list[Evicted]:
    return sorted(named, key=lambda each: (each.again != "", -each.size))[:_FOREMOST]
