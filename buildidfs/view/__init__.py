# SPDX-License-Identifier: Apache-2.0
"""The read-only tree of names over a store.

Its callers, the mount and the server, are its front doors; it knows neither FUSE nor HTTP.
"""

from buildidfs.store.permissions import PUBLIC, Viewer
from buildidfs.view.attributes import Attributes, FileContent, NeedsReading, NeedsRequest, blank
from buildidfs.view.nodes import (
    is_path_text,
    is_place,
    is_wanted,
)
from buildidfs.view.tiered import view_of
from buildidfs.view.tree import Keep, View

__all__ = [
    "PUBLIC",
    "Attributes",
    "FileContent",
    "Keep",
    "NeedsReading",
    "NeedsRequest",
    "View",
    "Viewer",
    "blank",
    "is_path_text",
    "is_place",
    "is_wanted",
    "view_of",
]
