# SPDX-License-Identifier: Apache-2.0
"""The directory on disk: blobs by digest, an LMDB index, and how others hear of commits."""

from __future__ import annotations

from buildidfs.store.blobs.files import Staged
from buildidfs.store.blobs.verify import Blob
from buildidfs.store.index.containers import is_of
from buildidfs.store.index.ranking import is_withheld
from buildidfs.store.records import (
    CommitResult,
    Held,
    NewAbsence,
    NewCapture,
    NewSeen,
    OriginRecord,
    Outcome,
    Pin,
    Remembered,
    StoreStats,
)
from buildidfs.store.schema.containers import Container, ContainerEntry
from buildidfs.store.schema.locations import JournalRecord
from buildidfs.store.store import Store

__all__ = [
    "Blob",
    "CommitResult",
    "Container",
    "ContainerEntry",
    "Held",
    "JournalRecord",
    "NewAbsence",
    "NewCapture",
    "NewSeen",
    "OriginRecord",
    "Outcome",
    "Pin",
    "Remembered",
    "Staged",
    "Store",
    "StoreStats",
    "is_of",
    "is_withheld",
]
