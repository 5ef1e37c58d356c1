# SPDX-License-Identifier: Apache-2.0
"""Pending files, as a watch would make them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from buildidfs.capture import base
from buildidfs.capture.base import PinnedFile
from buildidfs.ingest.pending_files import PendingFile
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Origin, Sighting, Trust


def pinned(path: Path, *, slow: bool = False, mnt_ns_id: int = 7) -> PendingFile:
    """A file, open; one that is ``slow`` was not looked at."""
    fd = os.open(path, os.O_RDONLY)
    found = None if slow else base.identify(fd)
    origin = Origin(
        os.fsencode(path),
        inodes.identity(fd),
        mnt_ns_id=mnt_ns_id,
        host="here",
        trust=Trust.HOST,
        scanner="watch",
    )
    hint = found if isinstance(found, BuildId) else None
    sighting = Sighting(origin, time.time_ns())
    return PendingFile(PinnedFile(sighting, fd), hint, os.urandom(16), time.monotonic(), slow)
