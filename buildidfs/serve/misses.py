# SPDX-License-Identifier: Apache-2.0
"""The build IDs that clients asked for in vain, of all workers of a server together.

Each worker writes its list into a part of memory that all of them map, with a checksum: a reader
that finds half of a new list keeps the last whole one. A worker that is started again goes on with
the list of the one before it.
"""

from __future__ import annotations

import heapq
import mmap
import struct
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.view.layouts.browse import Miss

MOST: Final = 500
_PART: Final = 128 << 10
_HEAD: Final = struct.Struct("=II")  # length and CRC-32 of the list


class Asked(msgspec.Struct, array_like=True):
    """A missing build ID, as `view.layouts.browse.Miss` has it without the clients."""

    build_id: bytes
    wanted: int
    count: int
    first: float
    last: float


class Misses:
    """The lists of all workers. Make it before the workers are forked."""

    def __init__(self, workers: int = 1) -> None:
        self._memory = mmap.mmap(-1, workers * _PART)
        self._last: list[list[Asked]] = [[] for _ in range(workers)]
        self._worker = 0
        self._before: list[Asked] = []
        self._own: Callable[[], Iterable[Miss]] = list

    def choose(self, worker: int, own: Callable[[], Iterable[Miss]]) -> None:
        """Begin as a worker, a number from 0; ``own`` returns what it was asked for in vain."""
        self._worker = worker
        self._own = own
        self._before = self._read(worker)

    def publish(self) -> None:
        """Write the list of this worker: the most frequent build IDs, the latest first."""
        rows = heapq.nlargest(MOST, self._mine(), key=lambda each: (each.count, each.last))
        data = msgspec.msgpack.encode(rows)
        while len(data) > _PART - _HEAD.size:
            del rows[len(rows) // 2 :]
            data = msgspec.msgpack.encode(rows)
        at = self._worker * _PART
        begin = at + _HEAD.size
        self._memory[begin : begin + len(data)] = data
        self._memory[at:begin] = _HEAD.pack(len(data), zlib.crc32(data))

    def every(self) -> list[Asked]:
        """All of them, those of other workers as they were published last."""
        others = [self._read(each) for each in range(len(self._last)) if each != self._worker]
        return _together(self._mine(), *others)

    def _mine(self) -> list[Asked]:
        own = [
            Asked(bytes(each.build_id), each.wanted, each.count, each.first, each.last)
            for each in self._own()
        ]
        return _together(self._before, own)

    def _read(self, worker: int) -> list[Asked]:
        at = worker * _PART
        size, checksum = _HEAD.unpack_from(self._memory, at)
        data = self._memory[at + _HEAD.size : at + _HEAD.size + min(size, _PART - _HEAD.size)]
        if data and zlib.crc32(data) == checksum:
            self._last[worker] = msgspec.msgpack.decode(data, type=list[Asked])
        return self._last[worker]


def _together(*lists: Iterable[Asked]) -> list[Asked]:
    """The rows of several lists, one for each build ID."""
    found: dict[bytes, Asked] = {}
    for row in (row for rows in lists for row in rows):
        known = found.get(row.build_id)
        if known is None:
            found[row.build_id] = row
        else:
            found[row.build_id] = Asked(
                row.build_id,
                known.wanted | row.wanted,
                known.count + row.count,
                min(known.first, row.first),
                max(known.last, row.last),
            )
    return list(found.values())
