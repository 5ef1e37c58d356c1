# SPDX-License-Identifier: Apache-2.0
"""The reports that processes of a store put into their run files, and read there."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, UnsetType

if TYPE_CHECKING:
    from typing import Self

    from buildidfs.store.retention.eviction import Policy


class Limits(msgspec.Struct, frozen=True):
    """The limits of a store in bytes and seconds; None is no limit."""

    max_size: int | None
    keep_free: int
    max_age: int | None
    min_age: int

    @classmethod
    def of(cls, policy: Policy) -> Self:
        """Return the limits of a policy."""
        return cls(policy.max_size, policy.keep_free, policy.max_age, policy.min_age)


class SourceFacts(msgspec.Struct, frozen=True):
    """The captured files of one container, by its label; ``last`` is the time of the last one."""

    container: str = ""
    captured: int = 0
    bytes: int = 0
    last: float = 0.0


class LossFacts(msgspec.Struct, frozen=True):
    """The lost files of one container for one reason, and those of the last ten minutes."""

    reason: str = ""
    container: str = ""
    count: int = 0
    recent: int = 0
    last: float = 0.0


class UnreadableFact(msgspec.Struct, frozen=True):
    """A file or process that a scan of a watch could not read."""

    path: str = ""
    reason: str = ""


class WatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The report of a watch in its run file, and a line of ``watch --json``: see buildidfs-json(5).

    A watch of an earlier version may lack some of the fields.
    """

    mode: str = "starting"
    degraded: list[str] = []
    every_mapping: str = ""
    captured: int = 0
    copied_bytes: int = 0
    new_build_ids: int = 0
    held: int = 0
    absent: int = 0
    unreadable: int = 0
    unreadable_last: list[UnreadableFact] = []
    waiting: int = 0
    waiting_bytes: int = 0
    let_go: int = 0
    omitted: int = 0
    evicted: int = 0
    evicted_for_good: int = 0
    unpinned: int = 0
    retried: int = 0
    journaled: int = 0
    unjournaled: int = 0
    store_error: str = ""
    records: int = 0
    records_lost: int = 0
    caught: int = 0
    missed: int = 0
    dropped: int = 0
    scans: int = 0
    restarts: int = 0
    idle: bool = False
    lag: float = 0.0
    sources: list[SourceFacts] = []
    losses: list[LossFacts] = []
    events_lost: int = 0
    limits: Limits | UnsetType = UNSET


def watch_facts(facts: dict[str, Any]) -> WatchFacts | None:
    """Return the report of a watch in the facts of its run file; None if there is none."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(facts, WatchFacts) if facts else None
    return None
