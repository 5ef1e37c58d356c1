# SPDX-License-Identifier: Apache-2.0
"""What a watch is told, and what it tells."""

from __future__ import annotations

import msgspec

from buildidfs.capture.messages import Counts
from buildidfs.ingest.counters import Counters
from buildidfs.model import BuildId, Sighting


class WatchOptions(msgspec.Struct, frozen=True):
    """One watch. ``containers`` are labels or beginnings of IDs, ``exclude`` globs of paths.

    ``pin_seconds`` and ``pin_bytes`` bound what is open and not copied yet; ``exec_wait`` is the
    longest, in seconds, that ``strict`` holds up an exec; ``scan`` is False to leave out what
    runs already.
    """

    strict: bool = False
    exec_wait: float = 0.2
    pin_seconds: float = 30.0
    pin_bytes: int = 2 << 30
    containers: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    scan: bool = True
    container_namespaces: tuple[str, ...] = ("mnt",)


class Event(msgspec.Struct, frozen=True):
    """Something happened to a file: ``captured``, or ``not captured`` for a ``reason``."""

    name: str
    sighting: Sighting
    build_id: BuildId | None = None
    reason: str = ""


class WatchState(msgspec.Struct):
    """How a watch is doing. ``mode`` is ``following``, ``polling`` or ``interrupted``.

    ``degraded`` says in words what is less than it could be, ``catcher`` and ``ingest`` count
    since the start; ``waiting`` files of ``waiting_bytes`` are open and not copied yet.
    """

    mode: str
    degraded: tuple[str, ...]
    catcher: Counts
    ingest: Counters
    waiting: int
    waiting_bytes: int
    scans: int
    restarts: int
    idle: bool


def added(one: Counts, other: Counts) -> Counts:
    """The sums of both."""
    return Counts(
        *(
            a + b
            for a, b in zip(
                msgspec.structs.astuple(one), msgspec.structs.astuple(other), strict=True
            )
        )
    )
