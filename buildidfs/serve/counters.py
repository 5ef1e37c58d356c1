# SPDX-License-Identifier: Apache-2.0
"""Counts that the workers of a server share: requests, and missing build IDs that were requested.

Each worker writes to a part of its own in shared memory, and any worker can add the parts up. A
restarted worker continues in the part of its predecessor.

`ServerCounters` has the requests, as text for Prometheus. `SharedMisses` has the build IDs, with a
checksum: a reader that finds a half-written list keeps the last complete one.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.serve.messages import REASONS, RESET
from buildidfs.shares import Share, fair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.view.layouts.browse import Miss

TYPES: Final = (
    "executable", "debuginfo", "section", "source", "metadata", "metrics", "/", "other", "page",
    "api", "symbolicate", "source/v1", "asm",
)  # fmt: skip
"""Types of requests, the first eight with the names of debuginfod."""

_CODES: Final = (RESET, *REASONS)
_CELLS: Final = {
    (kind, code): 3 * number
    for number, (kind, code) in enumerate((kind, code) for kind in TYPES for code in _CODES)
}
_ROW: Final = 3 * len(_CELLS)
_SIZE: Final = 8

MOST: Final = 500
_PART: Final = 128 << 10
_HEAD: Final = struct.Struct("=II")  # length and CRC-32 of the list


class ServerCounters:
    """The counts of one server. Make it before the workers are forked."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._memory = mmap.mmap(-1, workers * _ROW * _SIZE)
        self._cells = memoryview(self._memory).cast("d")
        self._base = 0

    def choose(self, worker: int) -> None:
        """Choose the row in which this worker counts from now on; ``worker`` is its number,
        from 0.
        """
        self._base = worker * _ROW

    def response(self, kind: str, status: int, size: int, seconds: float) -> None:
        """Count a response with ``size`` bytes of body."""
        at = self._base + _CELLS[kind or "other", status]
        self._cells[at] += 1
        self._cells[at + 1] += size
        self._cells[at + 2] += seconds

    def text(self) -> Iterator[str]:
        """Yield lines of the exposition format of Prometheus, without the last newline."""
        totals = {
            cell: [
                sum(self._cells[worker * _ROW + at + i] for worker in range(self._workers))
                for i in range(3)
            ]
            for cell, at in _CELLS.items()
        }
        totals = {cell: values for cell, values in totals.items() if values[0]}
        yield "# HELP http_requests_total Requests by type."
        yield "# TYPE http_requests_total counter"
        for kind in TYPES:
            count = sum(values[0] for cell, values in totals.items() if cell[0] == kind)
            if count:
                yield f'http_requests_total{{type="{kind}"}} {count:.0f}'
        yield "# HELP http_responses_total Responses with a file, and with an error."
        yield "# TYPE http_responses_total counter"
        results = {"file": 0.0, "error": 0.0}
        for (kind, code), values in totals.items():
            if code in (200, 206) and kind in TYPES[:4]:
                results["file"] += values[0]
            elif code == RESET or code >= 400:
                results["error"] += values[0]
        for result, count in results.items():
            yield f'http_responses_total{{result="{result}"}} {count:.0f}'
        for name, number, text in (
            ("http_responses_transfer_bytes", 1, "Bytes of the bodies of responses."),
            ("http_responses_duration_seconds", 2, "Time from the request to its response."),
        ):
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} summary"
            for (kind, code), values in totals.items():
                labels = f'{{code="{code or "reset"}",type="{kind}"}}'
                yield f"{name}_count{labels} {values[0]:.0f}"
                yield f"{name}_sum{labels} {values[number]:.12g}"


class MissedId(msgspec.Struct, array_like=True):
    """A missing build ID, with the fields of `view.layouts.browse.Miss` except for the clients.

    ``client`` is the owner of the share for which it counts.
    """

    build_id: bytes
    wanted: int
    count: int
    first: float
    last: float
    client: str = ""


class SharedMisses:
    """The lists of all workers. Make it before the workers are forked."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * _PART)
        self._last: list[list[MissedId]] = [[] for _ in range(workers)]
        self._worker = 0
        self._before: list[MissedId] = []
        self._own: Callable[[], Iterable[Miss]] = list

    def choose(self, worker: int, own: Callable[[], Iterable[Miss]]) -> None:
        """Start as a worker, a number from 0; ``own`` returns its missing build IDs."""
        self._worker = worker
        self._own = own
        self._before = self._read(worker)

    def publish(self) -> None:
        """Write the list of this worker."""
        most, data = MOST, b""
        while not data or len(data) > _PART - _HEAD.size:
            data = msgspec.msgpack.encode(most_frequent(self._mine(), most))
            most //= 2
        at = self._worker * _PART
        begin = at + _HEAD.size
        self._memory[begin : begin + len(data)] = data
        self._memory[at:begin] = _HEAD.pack(len(data), zlib.crc32(data))

    def every(self) -> list[MissedId]:
        """Return the lists of all workers, merged; other workers' lists are those that they last
        published.
        """
        others = [self._read(each) for each in range(len(self._last)) if each != self._worker]
        return _together(self._mine(), *others)

    def _mine(self) -> list[MissedId]:
        own = [
            MissedId(
                bytes(each.build_id),
                each.wanted,
                each.count,
                each.first,
                each.last,
                each.share.owner,
            )
            for each in self._own()
        ]
        return _together(self._before, own)

    def _read(self, worker: int) -> list[MissedId]:
        at = worker * _PART
        size, checksum = _HEAD.unpack_from(self._memory, at)
        data = self._memory[at + _HEAD.size : at + _HEAD.size + min(size, _PART - _HEAD.size)]
        if data and zlib.crc32(data) == checksum:
            self._last[worker] = msgspec.msgpack.decode(data, type=list[MissedId])
        return self._last[worker]


def _together(*lists: Iterable[MissedId]) -> list[MissedId]:
    """Merge the rows of several lists, one for each build ID."""
    found: dict[bytes, MissedId] = {}
    for row in (row for rows in lists for row in rows):
        known = found.get(row.build_id)
        if known is None:
            found[row.build_id] = row
        else:
            found[row.build_id] = MissedId(
                row.build_id,
                known.wanted | row.wanted,
                known.count + row.count,
                min(known.first, row.first),
                max(known.last, row.last),
                known.client,
            )
    return list(found.values())


def most_frequent(rows: Iterable[MissedId], most: int) -> list[MissedId]:
    """Return at most ``most`` rows, in shares of the clients: of each the most frequent build IDs,
    the latest first.
    """
    order = sorted(rows, key=lambda each: (-each.count, -each.last))
    return fair(order, most, lambda each: Share(each.client))
