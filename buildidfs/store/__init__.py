# SPDX-License-Identifier: Apache-2.0
"""The directory on disk: blobs by digest, an LMDB index, and announcements of commits.

Outsiders open a `Store` and use its parts and the values listed here; `bundle`, `export`,
`placement`, `run_files` and `fsck` are imported by the few modules that need them. Imports point
down within the store:

    bundle, export, placement -> store -> fsck -> commit -> retention -> write
    -> index, blobs, values -> coordination, run_files -> location_rows -> schema -> errors

The store knows nothing of scanners, mounts or commands.
"""

from __future__ import annotations

from buildidfs.store.blobs.files import Staged
from buildidfs.store.blobs.verify import Blob
from buildidfs.store.index.locations import is_of, link_key
from buildidfs.store.index.ranking import belief, belief_in, chosen, is_withheld, naming_belief
from buildidfs.store.location_rows import CapturedContainer, ContainerEntry, JournalRecord
from buildidfs.store.store import Store
from buildidfs.store.values import (
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

__all__ = [
    "Blob",
    "CapturedContainer",
    "CommitResult",
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
    "belief",
    "belief_in",
    "chosen",
    "is_of",
    "is_withheld",
    "link_key",
    "naming_belief",
]
