# SPDX-License-Identifier: Apache-2.0
"""The read-only tree of names over a store, defined once for every front door: no FUSE, no HTTP."""

from buildidfs.view.attributes import Attributes, Content, NeedsReading, blank
from buildidfs.view.nodes import is_browsing, is_dwz, is_path_text, is_place
from buildidfs.view.permissions import PUBLIC, Reader
from buildidfs.view.tree import View

__all__ = [
    "PUBLIC",
    "Attributes",
    "Content",
    "NeedsReading",
    "Reader",
    "View",
    "blank",
    "is_browsing",
    "is_dwz",
    "is_path_text",
    "is_place",
]
