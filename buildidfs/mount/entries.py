# SPDX-License-Identifier: Apache-2.0
"""Replies to the kernel about nodes: number and attributes, or names only, and for how long.

pyfuse3 answers every listing with READDIRPLUS: name, type and all attributes, and the kernel makes
an inode and a dentry of each entry. For a directory that is listed and not walked through that is
most of the time, and about a kilobyte of the kernel's memory for each build ID.

The protocol has a way to give less: an entry whose node ID is 0 has a name, a type and an inode
number, but is not looked up. pyfuse3 sets both numbers of an entry at once and has no way to set
one of them, so `NamesOnly` reaches into its object: `fuse_entry_param` follows the object's header,
and its first field is the node ID. `NamesOnly.probe` tries that before it is used.

Source: fs/fuse/readdir.c fuse_direntplus_link ("zero nodeid does not mean ENOENT").
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import TYPE_CHECKING

import pyfuse3

from buildidfs.errors import BuildIdFsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pyfuse3 import EntryAttributes, ReaddirToken

    from buildidfs.view import Attributes, View

FOREVER_S = 24 * 3600.0
"""How long the kernel may keep a name that only a commit can change: the mount tells it those."""

VOLATILE_S = 1.0

FLEETING_S = 1.0
"""How long it may keep names in the trees for people, whose changes it is not told."""


class Replies:
    """Two reply objects, filled anew for each node; `operations` tells why that is safe."""

    def __init__(self, view: View, keep_name_s: float) -> None:
        """``keep_name_s`` is how long the kernel may keep a name that leads to a node."""
        self._view = view
        self._entry, self._other = pyfuse3.EntryAttributes(), pyfuse3.EntryAttributes()
        self._entry.entry_timeout = self._other.entry_timeout = keep_name_s
        self._last: Attributes | None = None
        self._before: Attributes | None = None

    def of(self, node: int) -> EntryAttributes:
        """The reply for a node; raises what `View.attributes` raises."""
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


log = logging.getLogger(__name__)

_PROBE = 0x0123456789ABCDEF
_PROBE_AT = 0
_HEADER = object.__basicsize__


class NamesOnly:
    """A reply object for entries with name, type and number only."""

    def __init__(self, entry: pyfuse3.EntryAttributes, node_id: ctypes.c_uint64) -> None:
        self._entry = entry
        self._node_id = node_id

    @classmethod
    def probe(cls) -> NamesOnly | None:
        """Return a `NamesOnly`, or None if pyfuse3 keeps the node ID at another place."""
        entry = pyfuse3.EntryAttributes()
        words = (type(entry).__basicsize__ - _HEADER) // 8
        if sys.implementation.name != "cpython" or words < 2:
            return None
        inside = (ctypes.c_uint64 * words).from_address(id(entry) + _HEADER)
        entry.st_ino = _PROBE
        # twice: the node ID, and the inode number in struct stat
        if inside[_PROBE_AT] != _PROBE or list(inside).count(_PROBE) != 2:
            log.info("this pyfuse3 is not built as expected: listings will be slower")
            return None
        return cls(entry, ctypes.c_uint64.from_address(id(entry) + _HEADER + 8 * _PROBE_AT))

    def list(
        self,
        token: pyfuse3.ReaddirToken,
        entries: Iterable[tuple[bytes, int, int]],
        type_of: Callable[[int], int],
    ) -> None:
        """Reply with as many of (name, node, offset) as fit."""
        entry, node_id, reply = self._entry, self._node_id, pyfuse3.readdir_reply
        for name, node, offset in entries:
            entry.st_ino = node
            entry.st_mode = type_of(node)
            node_id.value = 0
            if not reply(token, name, entry, offset):
                return
