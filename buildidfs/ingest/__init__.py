# SPDX-License-Identifier: Apache-2.0
"""From pinned file to capture: stage the bytes, identify what was staged, commit in batches.

The source may be overwritten at any moment by somebody hostile, so nothing that is said about it
counts: build ID, kinds and script sections recorded are those of the bytes in the store's hands.
"""

from __future__ import annotations

from buildidfs.ingest.scan import Ingest, StoreMemo, Summary

__all__ = ["Ingest", "StoreMemo", "Summary"]
