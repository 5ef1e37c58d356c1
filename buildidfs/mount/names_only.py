# SPDX-License-Identifier: Apache-2.0
"""Replies to readdir that are names only.

pyfuse3 answers every listing with READDIRPLUS: name, type and all attributes, and the kernel makes
an inode and a dentry of each entry. For a directory that is listed and not walked through that is
most of the time, and about a kilobyte of the kernel's memory for each build ID there is.

The protocol has a way to give less: an entry whose node ID is 0 has a name, a type and an inode
number, but is not looked up. pyfuse3 sets both numbers of an entry at once and has no way to set
one of them, so this reaches into its object: `fuse_entry_param` follows the object's header, and
its first field is the node ID. Whether that is so is tried out before it is used (`probe`).

Source: fs/fuse/readdir.c fuse_direntplus_link ("zero nodeid does not mean ENOENT").
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import TYPE_CHECKING

import pyfuse3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

log = logging.getLogger(__name__)

_PROBE = 0x0123456789ABCDEF
_PROBE_AT = 0
_HEADER = object.__basicsize__


class NamesOnly:
    """An entry that shows name, type and number; used again for each reply."""

    def __init__(self, entry: pyfuse3.EntryAttributes, node_id: ctypes.c_uint64) -> None:
        self._entry = entry
        self._node_id = node_id

    @classmethod
    def probe(cls) -> NamesOnly | None:
        """Such an entry, or None where a node ID is not where it is looked for."""
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
