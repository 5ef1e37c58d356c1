# SPDX-License-Identifier: Apache-2.0
"""What the kernel is told of nodes: number and attributes, and how long it may keep them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyfuse3

from buildidfs.errors import BuildIdFsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyfuse3 import EntryAttributes, ReaddirToken

    from buildidfs.view import Attributes, View

FOREVER_S = 24 * 3600.0
"""How long the kernel may keep what only a commit can change; commits are told to it."""

VOLATILE_S = 1.0

FLEETING_S = 1.0
"""How long it may keep names in the trees for people: it is not told of what changes there."""


class Shown:
    """Two entries that are used again for each node; see `operations` for why that is safe."""

    def __init__(self, view: View, keep_name_s: float) -> None:
        """``keep_name_s`` is how long the kernel may keep a name that leads to a node."""
        self._view = view
        self._entry, self._other = pyfuse3.EntryAttributes(), pyfuse3.EntryAttributes()
        self._entry.entry_timeout = self._other.entry_timeout = keep_name_s
        self._last: Attributes | None = None
        self._before: Attributes | None = None

    def of(self, node: int) -> EntryAttributes:
        """A node; raises what `View.attributes` raises."""
        attributes = self._view.attributes(node)
        if attributes is not self._last:
            # Directories, which all have the same attributes, and files take turns.
            self._last, self._before = self._before, self._last
            self._entry, self._other = self._other, self._entry
            if attributes is not self._last:
                self._fill(attributes)
        self._entry.st_ino = node
        return self._entry

    def list(self, entries: Iterable[tuple[bytes, int, int]], token: ReaddirToken) -> bool:
        """List entries with their attributes; False if one did not fit."""
        reply = pyfuse3.readdir_reply
        for name, node, offset in entries:
            try:
                entry = self.of(node)
            except (OSError, BuildIdFsError):
                continue  # gone since it was listed, or damaged: the rest is still there
            if not reply(token, name, entry, offset):
                return False
        return True

    def _fill(self, attributes: Attributes) -> None:
        entry = self._entry
        size, mtime = attributes.size, attributes.mtime_ns
        entry.st_mode = attributes.mode
        entry.st_uid = attributes.uid
        entry.st_gid = attributes.gid
        entry.st_size = size
        entry.st_blocks = (size + 511) // 512
        entry.st_mtime_ns = mtime
        entry.st_ctime_ns = mtime
        entry.st_atime_ns = mtime
        entry.attr_timeout = VOLATILE_S if attributes.volatile else FOREVER_S
        self._last = attributes
