# SPDX-License-Identifier: Apache-2.0
"""Counts of a pipeline: `Summary` of a scan that has ended, `Counters` of a watch that goes on."""

from __future__ import annotations

from collections import Counter

import msgspec

from buildidfs.capture.base import Unreadable
from buildidfs.model import Absence
from buildidfs.store.retention.eviction import Tally


class Results(msgspec.Struct):
    """Counts that every pipeline keeps; each may be read at any time.

    ``captured`` counts files whose bytes are new to the store (``copied_bytes`` of them), ``held``
    files whose bytes it had, ``new_ids`` build IDs it did not know, ``noted`` files that there is
    no room for and that can be had again. ``journaled`` counts entries of the journal, and
    ``unjournaled`` those that had to be dropped.
    """

    captured: int = 0
    held: int = 0
    copied_bytes: int = 0
    new_ids: int = 0
    noted: int = 0
    journaled: int = 0
    unjournaled: int = 0


class Summary(Results):
    """Counts of one scan.

    ``files`` counts everything found. Each file is captured, held, ``absent`` (by reason), noted or
    ``unreadable``. ``noted_bytes`` were not written to the store. ``removed`` is what made room.
    """

    files: int = 0
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    unreadable: list[Unreadable] = msgspec.field(default_factory=list)
    noted_bytes: int = 0
    removed: Tally = msgspec.field(default_factory=Tally)

    def add(self, part: Summary) -> None:
        """Add the counts of another scan to these."""
        for field in msgspec.structs.fields(self):
            if field.type is int:
                total = getattr(self, field.name) + getattr(part, field.name)
                setattr(self, field.name, total)
        self.absent.update(part.absent)
        self.unreadable += part.unreadable
        self.removed.merge(part.removed)


class Counters(Results):
    """Counts of a watch since its start.

    ``absent`` counts files without a build ID, ``unreadable`` files that could not be read,
    ``let_go`` pending files that there was no time or room for, ``retried`` attempts that were put
    off. ``store_error`` says why the store cannot be written, and is empty when it can;
    ``store_full_since`` is Unix time in seconds, or 0.
    """

    absent: int = 0
    unreadable: int = 0
    let_go: int = 0
    retried: int = 0
    store_error: str = ""
    store_full_since: float = 0.0
