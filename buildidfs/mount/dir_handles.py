# SPDX-License-Identifier: Apache-2.0
"""Handles of open directories, which say whose listing each is.

A listing leaves out entries that its viewer may not read, and the kernel tells who asks when a
directory is opened, not when it is read. The handle of a viewer who sees everything is the node,
and no row is kept. Other viewers have a row until they close the directory. A user who has too many
rows, or whose groups cannot be told, gets the entries that everybody may read, for which the node
is handle enough.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from buildidfs.linux import procfs
from buildidfs.mount.open_files import Quota
from buildidfs.view import PUBLIC, Viewer

if TYPE_CHECKING:
    from pyfuse3 import RequestContext

MOST: Final = 4096
"""The most directories open at once by viewers who are told apart."""

# Nodes are below 2**63, and handles may have 64 bits. There is no node with the first of these.
_OF_VIEWER: Final = 1 << 63
_ROW: Final = _OF_VIEWER | 1 << 32
_NODE: Final = _OF_VIEWER - 1
_LAST: Final = 1 << 28


class DirHandles:
    """The handles of directories.

    With ``everything`` each caller sees all entries; else root and the user ``own`` do.
    """

    def __init__(self, *, everything: bool, own: int, most: int = MOST) -> None:
        self._everything = everything
        self._own = own
        self._quota = Quota(most)
        self._next = 0
        self._rows: dict[int, tuple[int, Viewer]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def viewer(self, ctx: RequestContext) -> Viewer | None:
        """The viewer that a caller is; None for root and the server's user, who may see all."""
        return None if ctx.uid in (0, self._own) else Viewer(ctx.uid, _groups(ctx))

    def sees_all(self, ctx: RequestContext) -> bool:
        """Return True if a caller is shown every name."""
        return self._everything or ctx.uid in (0, self._own)

    def open(self, node: int, ctx: RequestContext) -> int:
        """Open a directory for the caller that ``ctx`` names; returns the handle."""
        if self.sees_all(ctx):
            return node
        if not self._quota.take(ctx.uid):
            return _OF_VIEWER | node
        handle = _ROW | self._next
        while handle in self._rows:
            self._next = (self._next + 1) % _LAST
            handle = _ROW | self._next
        self._next = (self._next + 1) % _LAST
        self._rows[handle] = (node, Viewer(ctx.uid, _groups(ctx)))
        return handle

    def viewer_of(self, handle: int) -> tuple[int, Viewer | None]:
        """The node of a handle, and its viewer; None for one who sees everything."""
        if handle < _OF_VIEWER:
            return handle, None
        return self._rows.get(handle) or (handle & _NODE, PUBLIC)

    def release(self, handle: int) -> None:
        """Forget a handle that the caller has closed."""
        if handle >= _OF_VIEWER:
            row = self._rows.pop(handle, None)
            if row is not None and row[1].uid is not None:
                self._quota.give_back(row[1].uid)


def _groups(ctx: RequestContext) -> frozenset[int] | None:
    """All groups of a caller, None if they cannot be told."""
    try:
        # The thread that asks; 0 in a PID namespace that is none of ours.
        pid_fd = procfs.open_pid(ctx.pid)
        try:
            return frozenset((ctx.gid, *procfs.groups(pid_fd)))
        finally:
            os.close(pid_fd)
    except OSError:
        return None
