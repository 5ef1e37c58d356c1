# SPDX-License-Identifier: Apache-2.0
"""The filter that says of nearly all absent files that the bucket does not have them.

Most look-ups of debuggers are for files that no host has. A reader keeps a fingerprint of 40 bits
for each (build ID, kind) in the bucket, and makes no request for one that is not among them.

    filter/<number>.json        the runs of that generation; created once, never changed
    filter/runs/<sha256>        a run: sorted fingerprints in 256 shards, by their first byte

A writer makes the next generation: conditional creation lets one of several writers have the
number, and the others begin anew with what that one wrote. So credentials that may only create
objects suffice, no clock counts, and a reader that knows generation N asks for N + 1. A generation
has few runs, because a run that is not twice as large as the next one is merged with it.

A fingerprint takes 4 bytes, since its shard is its first byte. With 50 million build IDs one in
22,000 look-ups of an absent file makes a request that is not needed.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import random
import struct
import sys
import time
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import RemoteError
from buildidfs.model import Kind, fingerprint
from buildidfs.remote.objects import BLOBS, parse_blob_key

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.remote.bucket import Bucket

_log = logging.getLogger(__name__)

_PREFIX: Final = "filter"
_MAGIC: Final = b"BIF1"
_OFFSETS: Final = struct.Struct("<257I")
_HEADER: Final = len(_MAGIC) + _OFFSETS.size
_WIDTH: Final = 4
_ATTEMPTS: Final = 20
_KEPT: Final = 16
_MOST_PAUSE_S: Final = 0.1
_MOST_RUN_BYTES: Final = 2 << 30
_MOST_GENERATIONS: Final = 10**8

Member = tuple[bytes, Kind]
"""A build ID, and the kind of a file of it."""


class RunName(msgspec.Struct, frozen=True):
    """The key of a run, and the number of its fingerprints."""

    key: str
    count: int


class Generation(msgspec.Struct, frozen=True):
    """The runs of a filter; ``made`` is Unix time in seconds, for people only."""

    number: int
    made: int
    runs: tuple[RunName, ...] = ()

    @property
    def key(self) -> str:
        """The key of the object that has this generation."""
        return _generation_key(self.number)


class Run:
    """A sorted array of fingerprints for each of 256 shards."""

    def __init__(self, offsets: tuple[int, ...], values: array[int]) -> None:
        self._offsets = offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def has(self, shard: int, value: int) -> bool:
        """Return True if a fingerprint is in the run."""
        low, high = self._offsets[shard], self._offsets[shard + 1]
        at = bisect_left(self.values, value, low, high)
        return at < high and self.values[at] == value

    def items(self) -> Iterable[int]:
        """The fingerprints with their shards, as numbers of 40 bits in order."""
        for shard in range(256):
            base = shard << 32
            for value in self.values[self._offsets[shard] : self._offsets[shard + 1]]:
                yield base | value

    @classmethod
    def of(cls, items: Iterable[int]) -> Run:
        """Make a run of sorted numbers of 40 bits; equal ones count once."""
        counts = [0] * 257
        values = array("I")
        last = -1
        for item in items:
            if item != last:
                last = item
                values.append(item & 0xFFFFFFFF)
                counts[(item >> 32) + 1] += 1
        for shard in range(256):
            counts[shard + 1] += counts[shard]
        return cls(tuple(counts), values)

    def pack(self) -> bytes:
        """The bytes of the run's object."""
        values = self.values
        if sys.byteorder == "big":
            values = array("I", values)
            values.byteswap()
        return _MAGIC + _OFFSETS.pack(*self._offsets) + values.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Run:
        """Return the run in the bytes of an object. Raises `RemoteError`."""
        values = array("I")
        if data[:4] != _MAGIC or len(data) < _HEADER or (len(data) - _HEADER) % _WIDTH:
            raise RemoteError("a run of the filter is damaged: buildidfs fleet filter --rebuild")
        offsets = _OFFSETS.unpack_from(data, len(_MAGIC))
        values.frombytes(memoryview(data)[_HEADER:])
        if sys.byteorder == "big":
            values.byteswap()
        if list(offsets) != sorted(offsets) or offsets[0] or offsets[-1] != len(values):
            raise RemoteError("a run of the filter is damaged: buildidfs fleet filter --rebuild")
        return cls(offsets, values)


class Filter:
    """The newest generation that a process knows of. `refresh` is for one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.generation: Generation | None = None
        self._runs: dict[str, Run] = {}

    def may_have(self, build_id: bytes, kind: Kind) -> bool:
        """Return False if the bucket does not have a file; True if it may, or there is no filter.

        Takes about two microseconds.
        """
        if self.generation is None:
            return True
        shard, value = divmod(_hash(build_id, kind), 1 << 32)
        return any(run.has(shard, value) for run in self._runs.values())

    @property
    def count(self) -> int:
        """The number of fingerprints."""
        return sum(map(len, self._runs.values()))

    def refresh(self) -> bool:
        """Take over the newest generation; True if it is another one. Raises `RemoteError`."""
        before = self.generation
        for attempt in range(_ATTEMPTS):
            newest = self._newest(self.generation)
            if newest is None:
                self.generation, self._runs = None, {}
            if newest is None or newest == before:
                return newest != before
            runs = {name.key: self._runs.get(name.key) or self._load(name) for name in newest.runs}
            if None not in runs.values():
                self._runs = {key: run for key, run in runs.items() if run is not None}
                self.generation = newest
                return True
            _log.debug("the filter has changed %d times while it was read", attempt + 1)
        raise RemoteError(
            f"{self._bucket.url}: its filter lacks a run: buildidfs fleet filter --rebuild"
        )

    def _newest(self, known: Generation | None) -> Generation | None:
        """The newest generation, which takes two requests if it is ``known``."""
        if known is None:
            return self._last_listed("")
        following = self._read(known.number + 1)
        if following is not None:
            return self._last_listed(following.key) or following
        if self._bucket.head(known.key) is not None:
            return known
        # It was deleted because there are many newer ones, or with all of the bucket.
        return self._last_listed("")

    def add(self, members: Iterable[Member]) -> int:
        """Add files that are in the bucket; returns how many the filter did not have.

        There must be a filter. Raises `RemoteError`, also where other writers are always faster.
        """
        wanted = {_hash(*member) for member in members}
        for _ in range(_ATTEMPTS):
            self.refresh()
            if self.generation is None:
                raise RemoteError(
                    f"{self._bucket.url} has no filter: buildidfs fleet filter --rebuild makes one"
                )
            new = sorted(each for each in wanted if not self._has(each))
            if not new:
                return 0
            if self._publish(self._merged(Run.of(new)), self.generation):
                return len(new)
            time.sleep(random.uniform(0, _MOST_PAUSE_S))
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    def rebuild(self) -> int:
        """Make a filter from a listing of the bucket, and return the number of files.

        What other hosts add meanwhile stays in it. Raises `RemoteError`.
        """
        self.refresh()
        known = set(self._runs)
        found = set()
        for row in self._bucket.list(BLOBS):
            parsed = parse_blob_key(row.key)
            if parsed is not None:
                found.add(_hash(*parsed))
        base = Run.of(sorted(found))
        for _ in range(_ATTEMPTS):
            self.refresh()
            later = [run for key, run in self._runs.items() if key not in known]
            merged = Run.of(heapq.merge(base.items(), *(run.items() for run in later)))
            if self._publish([merged], self.generation):
                return len(found)
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    # --- generations ---------------------------------------------------------------------------

    def _has(self, item: int) -> bool:
        shard, value = divmod(item, 1 << 32)
        return any(run.has(shard, value) for run in self._runs.values())

    def _merged(self, new: Run) -> list[Run]:
        """The runs of the next generation: each at least twice as large as the one behind it."""
        runs = sorted(self._runs.values(), key=len, reverse=True)
        while runs and len(runs[-1]) < 2 * len(new):
            new = Run.of(heapq.merge(runs.pop().items(), new.items()))
        return [*runs, new]

    def _publish(self, runs: list[Run], before: Generation | None) -> bool:
        """Write the next generation; False if another writer was faster."""
        known = {id(run): key for key, run in self._runs.items()}
        names = []
        for run in runs:
            key = known.get(id(run))
            if key is None:
                data = run.pack()
                key = f"{_PREFIX}/runs/{hashlib.sha256(data).hexdigest()[:32]}"
                self._bucket.create(key, data, {})
            names.append(RunName(key, len(run)))
        number = 1 if before is None else before.number + 1
        made = Generation(number, int(time.time()), tuple(names))
        if not self._bucket.create(made.key, msgspec.json.encode(made), {}):
            return False
        if before is not None and self._bucket.head(before.key) is None:
            # Others were faster by so many generations that they have deleted this one, too.
            self._bucket.delete(made.key)
            return False
        self._runs = {name.key: run for name, run in zip(names, runs, strict=True)}
        self.generation = made
        self._clear(number - _KEPT)
        return True

    def _clear(self, number: int) -> None:
        """Delete a generation, and its runs that the next one does not have, as far as this user
        may delete. A reader that still loads it finds that, and begins anew.
        """
        old, following = self._read(number), self._read(number + 1)
        if old is None or following is None or not self._bucket.delete(old.key):
            return
        kept = {name.key for name in following.runs} | self._runs.keys()
        for name in old.runs:
            if name.key not in kept:
                self._bucket.delete(name.key)

    def _last_listed(self, after: str) -> Generation | None:
        """The newest generation behind a key; runs are listed behind all generations."""
        found = None
        for row in self._bucket.list(_PREFIX, after):
            name = row.key.removeprefix(f"{_PREFIX}/")
            if not (name.endswith(".json") and name[:-5].isdigit()):
                break
            found = int(name[:-5])
        return None if found is None else self._read(found)

    def _read(self, number: int) -> Generation | None:
        if number < 1:
            return None
        if number > _MOST_GENERATIONS:
            raise RemoteError(f"{self._bucket.url}: the number {number} of its filter is damaged")
        data = self._bucket.get(_generation_key(number))
        if data is None:
            return None
        try:
            found = msgspec.json.decode(data, type=Generation)
        except msgspec.MsgspecError as error:
            raise RemoteError(f"{self._bucket.url}: its filter is damaged: {error}") from error
        return found if found.number == number else None

    def _load(self, name: RunName) -> Run | None:
        """Return a run; None if another writer has superseded it and deleted it."""
        data = self._bucket.get(name.key, _MOST_RUN_BYTES)
        return None if data is None else Run.unpack(data)


def _generation_key(number: int) -> str:
    return f"{_PREFIX}/{number:08d}.json"


def _hash(build_id: bytes, kind: Kind) -> int:
    return int.from_bytes(fingerprint(build_id + bytes((kind,)), 5), "big")
