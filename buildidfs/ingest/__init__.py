# SPDX-License-Identifier: Apache-2.0
"""The pipeline of a file into the store: stage its bytes, identify the staged bytes, commit in
batches.

One `pipeline` serves both uses. `Ingest` runs a scanner to its end and returns a `ScanSummary`;
`watch.pipeline` serves a watch until it is closed, and takes the files from the catcher. A hostile
process may overwrite the source of a file at any moment, so `staging` records only facts that it
reads from the staged copy. Nothing here knows the command line, or the process that follows the
kernel's events.
"""

from __future__ import annotations

from buildidfs.ingest.committer import ScanSummary
from buildidfs.ingest.pipeline import Ingest, StoreMemo, interrupted

__all__ = ["Ingest", "ScanSummary", "StoreMemo", "interrupted"]
