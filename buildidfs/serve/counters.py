# SPDX-License-Identifier: Apache-2.0
"""Counts of requests, shared by the workers of a server, and their text for Prometheus.

Each worker adds to a row of its own in memory that all of them map; a scrape by any of them adds
the rows up. A worker that is started again goes on in the row of the one before it.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

from buildidfs.serve.messages import REASONS, RESET

if TYPE_CHECKING:
    from collections.abc import Iterator

TYPES: Final = (
    "executable", "debuginfo", "section", "source", "metadata", "metrics", "/", "other", "page",
    "api", "symbolicate", "source/v1", "asm",
)  # fmt: skip
"""Types of requests, the first eight as debuginfod calls them."""

_CODES: Final = (RESET, *REASONS)
_CELLS: Final = {
    (kind, code): 3 * number
    for number, (kind, code) in enumerate((kind, code) for kind in TYPES for code in _CODES)
}
_ROW: Final = 3 * len(_CELLS)
_SIZE: Final = 8


class Counters:
    """The counts of one server. Make it before the workers are forked."""

    def __init__(self, workers: int = 1) -> None:
        self._workers = workers
        self._memory = mmap.mmap(-1, workers * _ROW * _SIZE)
        self._cells = memoryview(self._memory).cast("d")
        self._base = 0

    def choose(self, worker: int) -> None:
        """Count in the row of a worker, a number from 0."""
        self._base = worker * _ROW

    def response(self, kind: str, status: int, size: int, seconds: float) -> None:
        """Count a response with ``size`` bytes of body."""
        at = self._base + _CELLS[kind or "other", status]
        self._cells[at] += 1
        self._cells[at + 1] += size
        self._cells[at + 2] += seconds

    def text(self) -> Iterator[str]:
        """Lines of the exposition format of Prometheus, without the last newline."""
        totals = {
            cell: [
                sum(self._cells[worker * _ROW + at + i] for worker in range(self._workers))
                for i in range(3)
            ]
            for cell, at in _CELLS.items()
        }
        totals = {cell: values for cell, values in totals.items() if values[0]}
        yield "# TYPE http_requests_total counter"
        for kind in TYPES:
            count = sum(values[0] for cell, values in totals.items() if cell[0] == kind)
            if count:
                yield f'http_requests_total{{type="{kind}"}} {count:.0f}'
        yield "# TYPE http_responses_total counter"
        results = {"file": 0.0, "error": 0.0}
        for (kind, code), values in totals.items():
            if code in (200, 206) and kind in TYPES[:4]:
                results["file"] += values[0]
            elif code == RESET or code >= 400:
                results["error"] += values[0]
        for result, count in results.items():
            yield f'http_responses_total{{result="{result}"}} {count:.0f}'
        for name, number, scale in (
            ("http_responses_transfer_bytes", 1, 1.0),
            ("http_responses_duration_milliseconds", 2, 1000.0),
        ):
            yield f"# TYPE {name} summary"
            for (kind, code), values in totals.items():
                labels = f'{{code="{code or "reset"}",type="{kind}"}}'
                yield f"{name}_count{labels} {values[0]:.0f}"
                yield f"{name}_sum{labels} {values[number] * scale:.12g}"
