# SPDX-License-Identifier: Apache-2.0
"""The filter that recognises nearly all files that the bucket does not have.

Most look-ups of debuggers are for files that no host has. A reader keeps a fingerprint of 40 bits
for each (build ID, kind) in the bucket, and makes no request for a file whose fingerprint is not
among them.

    filter/<number>.json        the runs of that generation; created once, never changed
    filter/runs/<sha256>        a run: sorted fingerprints in 256 shards, by their first byte

A writer makes the next generation. If several writers try, conditional creation gives the number to
one of them, and the others start again from its generation. So credentials that may only create
objects suffice, no clock matters, and a reader that knows generation N asks for N + 1. A generation
has few runs: runs are merged until each is at least twice as large as the next one.

A fingerprint is a claim that the bucket has a file, or will have it soon: a writer adds it before
it uploads the file. So no filter denies a file in the bucket, even if the writer is killed. For
that reason `Filter.rebuild` does not drop a claim without a file at once. It puts the claim into a
run of doubted claims, which a `rebuild` after a day or more drops. If a claim is doubted or older
than `CLAIM_S`, a writer makes it again, so no writer relies on a claim that is dropped.

A fingerprint takes 4 bytes, because its shard is its first byte. With 50 million build IDs one in
22,000 look-ups of an absent file makes an unnecessary request.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import random
import re
import secrets
import struct
import sys
import time
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import RemoteDamaged, RemoteError
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
_MOST_RUNS: Final = 64
_MOST_COUNT: Final = 1 << 28
"""The maximum number of fingerprints of a filter. They take 1 GiB of memory of each reader."""
_MOST_JSON: Final = 64 << 10
_NUMBER: Final = re.compile(r"[0-9]{8}\.json")
_MOST_GENERATIONS: Final = 10**8 - 1
_DOUBT_S: Final = 86_400.0

CLAIM_S: Final = 6 * 3600.0
"""Seconds for which a claim is valid. An upload that begins later makes it again."""

_REMEDY: Final = "buildidfs fleet filter --rebuild makes a new one"

Member = tuple[bytes, Kind]
"""A build ID, and the kind of a file of it."""


class RunName(msgspec.Struct, frozen=True, omit_defaults=True):
    """The key of a run, and the number of its fingerprints.

    ``doubted`` is the Unix time (s, of the storage) at which a rebuild found no files for the
    fingerprints. It is 0 for other runs.
    """

    key: str
    count: int
    doubted: float = 0.0


class Generation(msgspec.Struct, frozen=True):
    """The runs of a filter; ``made`` is Unix time in seconds, for people only."""

    number: int
    made: int
    runs: tuple[RunName, ...] = ()

    @property
    def key(self) -> str:
        """Return the key of the object with this generation."""
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
        """Return the fingerprints with their shards, as sorted numbers of 40 bits."""
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
        """Return the bytes of the run's object."""
        values = self.values
        if sys.byteorder == "big":
            values = array("I", values)
            values.byteswap()
        return _MAGIC + _OFFSETS.pack(*self._offsets) + values.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> Run:
        """Return the run in the bytes of an object. Raises `RemoteDamaged`."""
        values = array("I")
        if data[:4] != _MAGIC or len(data) < _HEADER or (len(data) - _HEADER) % _WIDTH:
            raise RemoteDamaged(f"a run of the filter is damaged: {_REMEDY}")
        offsets = _OFFSETS.unpack_from(data, len(_MAGIC))
        values.frombytes(memoryview(data)[_HEADER:])
        if sys.byteorder == "big":
            values.byteswap()
        if list(offsets) != sorted(offsets) or offsets[0] or offsets[-1] != len(values):
            raise RemoteDamaged(f"a run of the filter is damaged: {_REMEDY}")
        return cls(offsets, values)


class Filter:
    """The newest generation that a process knows. `refresh` may run in one thread at a time."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.generation: Generation | None = None
        self._runs: dict[str, Run] = {}

    def may_have(self, build_id: bytes, kind: Kind) -> bool:
        """Return False if the bucket does not have a file; True if it may have it, or if there is
        no filter.

        Takes about two microseconds.
        """
        if self.generation is None:
            return True
        shard, value = divmod(_hash(build_id, kind), 1 << 32)
        return any(run.has(shard, value) for run in self._runs.values())

    def drop(self) -> None:
        """Forget the filter until the next `refresh`."""
        self.generation, self._runs = None, {}

    @property
    def count(self) -> int:
        """Return the number of fingerprints."""
        return sum(map(len, self._runs.values()))

    def refresh(self) -> bool:
        """Load the newest generation; return True if it is another one than before.

        Raises `RemoteDamaged`, `RemoteError`.
        """
        before = self.generation
        for attempt in range(_ATTEMPTS):
            newest = self._newest(self.generation)
            if newest is None:
                self.drop()
            if newest is None or newest == before:
                return newest != before
            runs = {
                name.key: self._runs[name.key] if name.key in self._runs else self._load(name)
                for name in newest.runs
            }
            if None not in runs.values():
                self._runs = {key: run for key, run in runs.items() if run is not None}
                self.generation = newest
                return True
            _log.debug("the filter has changed %d times while it was read", attempt + 1)
        raise RemoteDamaged(f"{self._bucket.url}: its filter lacks a run: {_REMEDY}")

    def _newest(self, known: Generation | None) -> Generation | None:
        """Return the newest generation; this takes two requests if it is ``known``."""
        if known is None:
            return self._last_listed("")
        following = self._read(known.number + 1)
        if following is not None:
            return self._last_listed(following.key) or following
        if self._read(known.number) == known:
            return known
        # It was deleted because there are many newer ones, or with the whole bucket, which may now
        # have another generation of that number.
        return self._last_listed("")

    def add(self, members: Iterable[Member]) -> int:
        """Claim that the bucket has files, or will have them within `CLAIM_S`.

        Returns the number of claims that were new or doubted. The bucket must have a filter. Raises
        `RemoteError`, also if other writers are always faster.
        """
        wanted = {_hash(*member) for member in members}
        for _ in range(_ATTEMPTS):
            self.refresh()
            if self.generation is None:
                raise RemoteError(f"{self._bucket.url} has no filter: {_REMEDY}")
            sure, doubted = self._split()
            new = sorted(each for each in wanted if not _has(sure.values(), each))
            if not new:
                return 0
            if self._publish([*_merged(sure.values(), Run.of(new)), *doubted.values()]):
                return len(new)
            time.sleep(random.uniform(0, _MOST_PAUSE_S))
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    def rebuild(self) -> int:
        """Make a filter from a listing of the bucket, and return the number of files.

        Claims without a file are doubted at first, and dropped by a call after a day or more. A
        damaged filter counts as absent. Raises `RemoteError`.
        """
        self._refresh_or_drop()
        known, _ = self._split()
        files = set()
        for row in self._bucket.list(BLOBS):
            parsed = parse_blob_key(row.key)
            if parsed is not None:
                files.add(_hash(*parsed))
        base = sorted(files)
        claims = Run.of(each for each in _items(known.values()) if each not in files)
        now = self._bucket.now() if self._runs else 0.0
        for _ in range(_ATTEMPTS):
            self._refresh_or_drop()
            sure, doubted = self._split()
            # Claims that were made since the listing are in runs that were unknown before it.
            runs = [run for key, run in sure.items() if key not in known]
            doubt = None
            if any(now - since < _DOUBT_S for since in self._doubts.values()):
                runs.append(claims)
            else:
                doubted = {}
                doubt = (claims, now) if len(claims) else None
            merged = Run.of(heapq.merge(base, _items(runs)))
            if self._publish([merged, *doubted.values()], doubt):
                return len(base)
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    # --- generations ---------------------------------------------------------------------------

    def _refresh_or_drop(self) -> None:
        """Load the newest generation; if it is damaged, keep only its number."""
        try:
            self.refresh()
        except RemoteDamaged:
            number = self._last_number("") or 0
            if number >= _MOST_GENERATIONS:
                raise
            self.generation, self._runs = Generation(number, 0) if number else None, {}

    def _split(self) -> tuple[dict[str, Run], dict[str, Run]]:
        """Return the runs without doubts, and the doubted ones, by their keys."""
        doubts = self._doubts
        sure = {key: run for key, run in self._runs.items() if key not in doubts}
        return sure, {key: run for key, run in self._runs.items() if key in doubts}

    @property
    def _doubts(self) -> dict[str, float]:
        """Return the keys of the doubted runs, each with the time of the doubt."""
        runs = () if self.generation is None else self.generation.runs
        return {name.key: name.doubted for name in runs if name.doubted}

    def _publish(self, runs: Iterable[Run], doubt: tuple[Run, float] | None = None) -> bool:
        """Write the generation that follows the known one; return False if another writer was
        faster.

        Doubted runs stay doubted. ``doubt`` is one more doubted run, with its time (`RunName`).
        """
        before, since = self.generation, self._doubts
        made: dict[RunName, Run] = {}
        for run in runs:
            key = self._key(run)
            made[RunName(key, len(run), since.get(key, 0.0))] = run
        if doubt is not None:
            run, now = doubt
            made[RunName(self._key(run, f"-{now:.0f}"), len(run), now)] = run
        number = 1 if before is None else before.number + 1
        following = Generation(number, int(time.time()), tuple(made))
        if not self._bucket.create(following.key, msgspec.json.encode(following), {}):
            return False
        if before is not None and self._bucket.head(before.key) is None:
            # Other writers were so many generations faster that they have deleted this one, too.
            self._bucket.delete(following.key)
            return False
        self._runs = {name.key: run for name, run in made.items()}
        self.generation = following
        self._clear(number - _KEPT)
        return True

    def _key(self, run: Run, suffix: str = "") -> str:
        """Return the key of a run; write the run unless the known generation has it."""
        for key, known in self._runs.items():
            if known is run:
                return key
        data = run.pack()
        key = f"{_PREFIX}/runs/{hashlib.sha256(data).hexdigest()[:32]}{suffix}"
        if not self._bucket.create(key, data, {}) and not self._holds(key, data):
            key += f"-{secrets.token_hex(8)}"
            self._bucket.create(key, data, {})
        return key

    def _holds(self, key: str, data: bytes) -> bool:
        """Return False if the existing object of a run is damaged."""
        try:
            return self._get(key, len(data)) == data
        except RemoteDamaged:
            return False

    def _clear(self, number: int) -> None:
        """Delete a generation, and its runs that the next one lacks, as far as this user may
        delete.

        A reader that is still loading the generation notices this, and starts again.
        """
        if number < 1:
            return
        try:
            old, following = self._read(number), self._read(number + 1)
        except RemoteDamaged:
            return
        if old is None or following is None or not self._bucket.delete(old.key):
            return
        kept = {name.key for name in following.runs} | self._runs.keys()
        for name in old.runs:
            if name.key not in kept:
                self._bucket.delete(name.key)

    def _last_listed(self, after: str) -> Generation | None:
        """Return the newest generation whose key comes after a key."""
        number = self._last_number(after)
        return None if number is None else self._read(number)

    def _last_number(self, after: str) -> int | None:
        """Return the number of the newest generation whose key comes after a key.

        The keys of runs come after those of all generations.
        """
        found = None
        for row in self._bucket.list(_PREFIX, after):
            name = row.key.removeprefix(f"{_PREFIX}/")
            if _NUMBER.fullmatch(name) is None:
                break
            found = int(name[:8])
        return found

    def _read(self, number: int) -> Generation | None:
        """Return a generation; None if there is none. Raises `RemoteDamaged`."""
        if not 0 < number <= _MOST_GENERATIONS:
            raise RemoteDamaged(
                f"{self._bucket.url}: its filter has no number left: delete all objects below"
                f" {_PREFIX}/, then run buildidfs fleet filter --rebuild"
            )
        data = self._get(_generation_key(number), _MOST_JSON)
        if data is None:
            return None
        try:
            found = msgspec.json.decode(data, type=Generation)
        except msgspec.MsgspecError as error:
            raise self._damaged() from error
        if found.number != number or any(_is_odd(name) for name in found.runs):
            raise self._damaged()
        if len(found.runs) > _MOST_RUNS or sum(name.count for name in found.runs) > _MOST_COUNT:
            raise self._damaged()
        return found

    def _load(self, name: RunName) -> Run | None:
        """Return a run; None if another writer has superseded and deleted it."""
        data = self._get(name.key, _HEADER + _WIDTH * name.count)
        return None if data is None else Run.unpack(data)

    def _get(self, key: str, most: int) -> bytes | None:
        try:
            return self._bucket.get(key, most)
        except RemoteDamaged:
            raise self._damaged() from None

    def _damaged(self) -> RemoteDamaged:
        return RemoteDamaged(f"{self._bucket.url}: its filter is damaged: {_REMEDY}")


def _is_odd(name: RunName) -> bool:
    return name.count < 0 or not name.key.startswith(f"{_PREFIX}/runs/")


def _has(runs: Iterable[Run], item: int) -> bool:
    shard, value = divmod(item, 1 << 32)
    return any(run.has(shard, value) for run in runs)


def _items(runs: Iterable[Run]) -> Iterable[int]:
    return heapq.merge(*(run.items() for run in runs))


def _merged(known: Iterable[Run], new: Run) -> list[Run]:
    """Merge another run into the runs, so that each is at least twice as large as the next one."""
    runs = sorted(known, key=len, reverse=True)
    while runs and len(runs[-1]) < 2 * len(new):
        new = Run.of(heapq.merge(runs.pop().items(), new.items()))
    return [*runs, new]


def _generation_key(number: int) -> str:
    return f"{_PREFIX}/{number:08d}.json"


def _hash(build_id: bytes, kind: Kind) -> int:
    return int.from_bytes(fingerprint(build_id + bytes((kind,)), 5), "big")
