# SPDX-License-Identifier: Apache-2.0
"""The read-only tree of names over a store.

Its callers, the mount and the server, are its front doors; it knows neither FUSE nor HTTP.
"""

from buildidfs.view.attributes import Attributes, FileContent, NeedsReading, NeedsRequest, blank
from buildidfs.view.nodes import (
    is_alias,
    is_browsing,
    is_dwz,
    is_path_text,
    is_place,
    is_wanted,
    leads_to_wanted,
)
from buildidfs.view.permissions import PUBLIC, Viewer
from buildidfs.view.tiered import TieredView, view_of
from buildidfs.view.tree import View, is_alias_name

__all__ = [
    "PUBLIC",
    "Attributes",
    "FileContent",
    "NeedsReading",
    "NeedsRequest",
    "TieredView",
    "View",
    "Viewer",
    "blank",
    "is_alias",
    "is_alias_name",
    "is_browsing",
    "is_dwz",
    "is_path_text",
    "is_place",
    "is_wanted",
    "leads_to_wanted",
    "view_of",
]
