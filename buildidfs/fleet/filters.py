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

Each host can create any object below ``filter/``, and no host can replace or remove it. So a
generation with any fault (an odd value, a run that is absent or does not fit its key) is skipped:
readers use the newest generation without a fault, and a writer creates the first free number after
it. Numbers come in blocks of `_BLOCK`. A block counts if its first generation and those of all
blocks before it exist, with faults or without, and no writer deletes these. So a number far ahead
of the others is ignored, and cannot use up the numbers.

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
import mmap
import os
import random
import re
import secrets
import struct
import sys
import time
from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import msgspec

from buildidfs.errors import RemoteDamaged, RemoteError, RemoteUnavailable
from buildidfs.fleet.objects import BLOBS, parse_blob_key
from buildidfs.linux.file_ops import closing_fd, unnamed_file
from buildidfs.model import Kind, fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.fleet.bucket import Bucket

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
_NUMBER: Final = re.compile(r"([0-9]{8})\.json")
_BLOCK: Final = 1000
"""The first generation of each block is never deleted: the numbers 1, 1001, 2001 and so on."""
_MOST_GENERATIONS: Final = 10**8 - 1
_MOST_FAULTS: Final = 4096
"""The number of faulty generations that one `Filter.refresh` reads."""
_MOST_LISTED: Final = 1 << 20
"""The objects of a listing of generations."""
_MOST_CLAIMS: Final = 1 << 22
"""A rebuild drops claims without a file at once if there are more: no fleet uploads so many files
at a time.
"""
_MOST_HELD: Final = 1 << 20
"""The bytes of a run that is in memory; larger ones are in a file."""
_SCRATCH: Final = b"/var/tmp"
_CHUNK: Final = 1 << 20
_DOUBT_S: Final = 86_400.0

CLAIM_S: Final = 6 * 3600.0
"""Seconds for which a claim is valid. An upload that begins later makes it again."""

_REMEDY: Final = "buildidfs fleet filter --rebuild makes a new one"

RunKey = Annotated[str, msgspec.Meta(pattern=r"\Afilter/runs/[0-9a-f]{32}(-[0-9a-f]{1,16}){0,2}\Z")]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1 << 35)]
"""Unix time in seconds, limited to a thousand years."""

Member = tuple[bytes, Kind]
"""A build ID, and the kind of a file of it."""


class RunName(msgspec.Struct, frozen=True, omit_defaults=True):
    """The key of a run, and the number of its fingerprints.

    ``doubted`` is the Unix time (s, of the storage) at which a rebuild found no files for the
    fingerprints. It is 0 for other runs.
    """

    key: RunKey
    count: Annotated[int, msgspec.Meta(ge=0, le=_MOST_COUNT)]
    doubted: Seconds = 0.0


class Generation(msgspec.Struct, frozen=True):
    """The runs of a filter; ``made`` is Unix time in seconds, for people only."""

    number: Annotated[int, msgspec.Meta(ge=1, le=_MOST_GENERATIONS)]
    made: Annotated[int, msgspec.Meta(ge=0, le=1 << 35)]
    runs: Annotated[tuple[RunName, ...], msgspec.Meta(max_length=_MOST_RUNS)] = ()

    @property
    def key(self) -> str:
        """Return the key of the object with this generation."""
        return _generation_key(self.number)


Values: TypeAlias = "array[int] | memoryview[int]"


class Run:
    """A sorted array of fingerprints for each of 256 shards."""

    def __init__(self, offsets: tuple[int, ...], values: Values) -> None:
        self._offsets = offsets
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def has(self, shard: int, value: int) -> bool:
        """Return True if a fingerprint is in the run."""
        low, high = self._offsets[shard], self._offsets[shard + 1]
        at = bisect_left(self.values, value, low, high)
        return at < high and self.values[at] == value

    def has_item(self, item: int) -> bool:
        """Return True if a number of 40 bits is in the run."""
        return self.has(*divmod(item, 1 << 32))

    def items(self) -> Iterable[int]:
        """Return the fingerprints with their shards, as sorted numbers of 40 bits.

        The values of another host may be in any order.
        """
        for shard in range(256):
            base = shard << 32
            for value in sorted(self.values[self._offsets[shard] : self._offsets[shard + 1]]):
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
        values = array("I", self.values)
        if sys.byteorder == "big":
            values.byteswap()
        return _MAGIC + _OFFSETS.pack(*self._offsets) + values.tobytes()

    @classmethod
    def unpack(cls, data: bytes | mmap.mmap) -> Run:
        """Return the run in the bytes of an object. Raises `RemoteDamaged`."""
        if data[:4] != _MAGIC or len(data) < _HEADER or (len(data) - _HEADER) % _WIDTH:
            raise RemoteDamaged(f"a run of the filter is damaged: {_REMEDY}")
        offsets = _OFFSETS.unpack_from(data, len(_MAGIC))
        values: Values = memoryview(data)[_HEADER:].cast("I")
        if sys.byteorder == "big":
            values = array("I", values)
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
        self._faulty: dict[int, float] = {}
        """The numbers of generations with a fault, and the times of their objects."""
        self._loaded_bytes = 0
        self._is_gone = False

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
        """Load the newest generation without a fault; return True if it is another one than before.

        Raises `RemoteDamaged` if each generation has a fault; `RemoteError`.
        """
        before = self.generation
        if before is not None and self._is_newest(before):
            return False
        start = before.number if before is not None and self._exists(before) else 0
        faults = self._loaded_bytes = 0
        for _ in range(_ATTEMPTS):
            listed = self._listed(start)
            for number in sorted(listed, reverse=True):
                if self._faulty.get(number) == listed[number]:
                    continue
                if self._use(number):
                    return True
                self._faulty[number] = listed[number]
                faults += 1
                if faults > _MOST_FAULTS or self._loaded_bytes > _WIDTH * _MOST_COUNT:
                    raise self._damaged()  # the next call goes on
                if self._is_gone and self._listed(max(listed)):
                    break  # other writers were faster, and have deleted the generation or a run
            else:
                if start:
                    return False
                self.drop()
                if listed:
                    raise self._damaged()
                return before is not None
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    def _is_newest(self, known: Generation) -> bool:
        """Return True if no generation follows the known one. Takes two requests."""
        if self._bucket.head(_generation_key(self._next_number(known))) is not None:
            return False
        # The first generation of a block stays when newer ones have been deleted.
        is_last = not _is_kept(known.number) or not self._listed(known.number).keys() - self._faulty
        return is_last and self._exists(known)

    def _exists(self, known: Generation) -> bool:
        """Return False if a generation was deleted because there are many newer ones, or with the
        whole bucket, which may now have another generation of that number.
        """
        try:
            return self._read(known.number) == known
        except RemoteDamaged:
            return False

    def _next_number(self, known: Generation | None) -> int:
        """Return the first number after a generation that no faulty generation has."""
        number = 1 if known is None else known.number + 1
        while number in self._faulty:
            number += 1
        return number

    def _use(self, number: int) -> bool:
        """Load a generation and its runs; return False if it has a fault. Raises `RemoteError`."""
        self._is_gone = False
        try:
            found = self._read(number)
            runs = {} if found is None else {name.key: self._run(name) for name in found.runs}
        except RemoteDamaged as error:
            _log.debug("generation %d of the filter is skipped: %s", number, error)
            return False
        whole = {key: run for key, run in runs.items() if run is not None}
        if found is None or len(whole) < len(runs):
            self._is_gone = True
            return False
        self.generation, self._runs = found, whole
        return True

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
        base = self._listed_files()
        claims = Run.of(each for each in _items(known.values()) if not base.has_item(each))
        if len(claims) > _MOST_CLAIMS:
            claims = Run.of(())
        now = self._bucket.now() if self._runs else 0.0
        for _ in range(_ATTEMPTS):
            self._refresh_or_drop()
            sure, doubted = self._split()
            # Claims that were made since the listing are in runs that were unknown before it.
            runs = [run for key, run in sure.items() if key not in known]
            doubt = None
            if any(0 <= now - since < _DOUBT_S for since in self._doubts.values()):
                runs.append(claims)
            else:
                doubted = {}
                doubt = (claims, now) if len(claims) else None
            merged = Run.of(_items([base, *runs]))
            if self._publish([merged, *doubted.values()], doubt):
                return len(base)
        raise RemoteError(f"{self._bucket.url}: other hosts change the filter all the time")

    def _listed_files(self) -> Run:
        """Return the fingerprints of all files in the bucket."""
        shards = [array("I") for _ in range(256)]
        for row in self._bucket.list(BLOBS, most=_MOST_COUNT):
            parsed = parse_blob_key(row.key)
            if parsed is not None:
                shard, value = divmod(_hash(*parsed), 1 << 32)
                shards[shard].append(value)
        return Run.of(
            shard << 32 | value for shard, values in enumerate(shards) for value in sorted(values)
        )

    # --- generations ---------------------------------------------------------------------------

    def _refresh_or_drop(self) -> None:
        """Load the newest generation; forget the filter if each generation has a fault."""
        try:
            self.refresh()
        except RemoteDamaged:
            self.drop()

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
        number = self._next_number(before)
        if number > _MOST_GENERATIONS:
            raise RemoteDamaged(
                f"{self._bucket.url}: its filter has no number left: delete all objects below"
                f" {_PREFIX}/, then run buildidfs fleet filter --rebuild"
            )
        following = Generation(number, int(time.time()), tuple(made))
        if not self._bucket.create(following.key, msgspec.json.encode(following), {}):
            return False
        newer = self._listed(number)
        if any(each >= number + _KEPT and self._faulty.get(each) != newer[each] for each in newer):
            # Other writers were so many generations faster that they have deleted what follows
            # ``before``.
            if not _is_kept(number):
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
        key = _run_key(data) + suffix
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
        if old is None or following is None:
            return
        if not _is_kept(number) and not self._bucket.delete(old.key):
            return
        kept = {name.key for name in following.runs} | self._runs.keys()
        for name in old.runs:
            if name.key not in kept:
                self._bucket.delete(name.key)

    def _listed(self, after: int) -> dict[int, float]:
        """Return the numbers of generations after a number, which exists or is 0, with the times
        of their objects (Unix time of the storage, s). Numbers behind a missing block are left out.

        Raises `RemoteDamaged` if there are too many objects.
        """
        found: dict[int, float] = {}
        block = (after - 1) // _BLOCK
        start = _generation_key(after) if after else ""
        for row in self._bucket.list(_PREFIX, start, _MOST_LISTED):
            if row.key > _generation_key(_MOST_GENERATIONS):
                break
            name = _NUMBER.fullmatch(row.key.removeprefix(f"{_PREFIX}/"))
            number = 0 if name is None else int(name[1])
            its = (number - 1) // _BLOCK
            if its > block and not (its == block + 1 and _is_kept(number)):
                break
            if number:
                block = its
                found[number] = row.modified
        return found

    def _read(self, number: int) -> Generation | None:
        """Return a generation; None if there is none. Raises `RemoteDamaged`."""
        data = self._get(_generation_key(number), _MOST_JSON)
        if data is None:
            return None
        try:
            found = msgspec.json.decode(data, type=Generation)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise self._damaged() from error
        keys = {name.key for name in found.runs}
        if found.number != number or len(keys) < len(found.runs):
            raise self._damaged()
        if sum(name.count for name in found.runs) > _MOST_COUNT:
            raise self._damaged()
        return found

    def _run(self, name: RunName) -> Run | None:
        """Return a run; None if it does not exist. Raises `RemoteDamaged`."""
        known = self._runs.get(name.key)
        if known is not None:
            return known
        size = _HEADER + _WIDTH * name.count
        self._loaded_bytes += size
        data = self._get(name.key, size) if size <= _MOST_HELD else self._mapped(name.key, size)
        if data is None:
            return None
        if len(data) != size or not name.key.startswith(_run_key(data)):
            raise self._damaged()
        return Run.unpack(data)

    def _mapped(self, key: str, size: int) -> mmap.mmap | None:
        """Return the bytes of a large run in a file without a name. Raises `RemoteError`."""
        try:
            with closing_fd(unnamed_file(_SCRATCH)) as fd:
                return self._bucket.mapped(key, size, fd)
        except RemoteDamaged:
            raise self._damaged() from None
        except OSError as error:
            place = os.fsdecode(_SCRATCH)
            raise RemoteUnavailable(
                f"cannot keep the filter in {place}: {error.strerror}"
            ) from error

    def _get(self, key: str, most: int) -> bytes | None:
        try:
            return self._bucket.get(key, most)
        except RemoteDamaged:
            raise self._damaged() from None

    def _damaged(self) -> RemoteDamaged:
        return RemoteDamaged(f"{self._bucket.url}: its filter is damaged: {_REMEDY}")


def _is_kept(number: int) -> bool:
    """Return True if no writer deletes the generation with a number."""
    return number % _BLOCK == 1


def _has(runs: Iterable[Run], item: int) -> bool:
    return any(run.has_item(item) for run in runs)


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


def _run_key(data: bytes | mmap.mmap) -> str:
    digest = hashlib.sha256()
    for start in range(0, len(data), _CHUNK):
        digest.update(data[start : start + _CHUNK])
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)
    return f"{_PREFIX}/runs/{digest.hexdigest()[:32]}"


def _hash(build_id: bytes, kind: Kind) -> int:
    return int.from_bytes(fingerprint(build_id + bytes((kind,)), 5), "big")
