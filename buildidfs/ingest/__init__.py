# SPDX-License-Identifier: Apache-2.0
"""The way of a file into the store: stage its bytes, identify what was staged, commit in batches.

One `pipeline` serves both uses. `Ingest` runs a scanner to its end and returns a `Summary`; `live`
serves a watch until it is closed, with `caught` for what the catcher has sent. The source of a file
may be overwritten at any moment by a hostile process, so `staging` records only what the bytes in
the store's hands say. Nothing here knows the command line, or who follows the kernel's events.
"""

from __future__ import annotations

from buildidfs.ingest.results import Summary
from buildidfs.ingest.scan import Ingest, StoreMemo

__all__ = ["Ingest", "StoreMemo", "Summary"]
