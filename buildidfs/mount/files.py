# SPDX-License-Identifier: Apache-2.0
"""Files that somebody has open, and a few that nobody has open any more.

A node is the same bytes for ever, so all who open it can share one descriptor, and who opens it
again a moment later can have the one that is still there: that saves a sixth of what opening a
file costs whose name the kernel knows. What is kept is one entry for each file that is open, and of
those that were, so many descriptors as `IDLE` says.
"""

from __future__ import annotations

import errno
import itertools
import os
import resource
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from buildidfs.view import Content, View

IDLE = 1024
"""As many files as a debugger or a profiler comes back to; fewer where descriptors are few."""

_NO_DESCRIPTOR = 1 << 32
"""Handles of files that are texts start here; those of others are their descriptors."""


class OpenFile:
    """What a handle stands for."""

    __slots__ = ("content", "node", "users")

    def __init__(self, node: int, content: Content) -> None:
        self.node = node
        self.content = content
        self.users = 1


class OpenFiles:
    """The table of handles. For the thread of the loop only."""

    def __init__(self, view: View, idle: int = IDLE) -> None:
        self._view = view
        self._most_idle = min(idle, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        self._texts = itertools.count(_NO_DESCRIPTOR)
        self._by_handle: dict[int, OpenFile] = {}
        self._by_node: dict[int, int] = {}
        self._idle: dict[int, None] = {}  # handles without users, the latest last

    def open(self, node: int) -> int:
        """A handle for a file; raises what `View.open` raises."""
        handle = self._by_node.get(node)
        if handle is not None:
            file = self._by_handle[handle]
            if not file.users:
                del self._idle[handle]
            file.users += 1
            return handle
        content = self._view.open(node)
        if content.fd < 0:
            # A text may be another the next time, so everybody gets his own.
            handle = next(self._texts)
        else:
            handle = content.fd
            self._by_node[node] = handle
        self._by_handle[handle] = OpenFile(node, content)
        return handle

    def content(self, handle: int) -> Content:
        """What is in it; raises OSError(EBADF) for a handle that nobody has."""
        try:
            return self._by_handle[handle].content
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def release(self, handle: int) -> None:
        """One user less. Raises OSError(EBADF) for a handle that nobody has."""
        file = self._by_handle.get(handle)
        if file is None or not file.users:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        file.users -= 1
        if file.users:
            return
        if handle >= _NO_DESCRIPTOR:
            del self._by_handle[handle]
            return
        self._idle[handle] = None
        if len(self._idle) > self._most_idle:
            self._close(next(iter(self._idle)))

    def close_idle(self) -> None:
        """Close what nobody uses: it may be of blobs that are deleted, and hold their space."""
        while self._idle:
            self._close(next(iter(self._idle)))

    def close(self) -> None:
        """Close everything."""
        for file in self._by_handle.values():
            file.content.close()
        self._by_handle.clear()
        self._by_node.clear()
        self._idle.clear()

    def _close(self, handle: int) -> None:
        del self._idle[handle]
        file = self._by_handle.pop(handle)
        del self._by_node[file.node]
        file.content.close()


def is_text(handle: int) -> bool:
    """Whether it is of a file whose size and bytes may be others the next time."""
    return handle >= _NO_DESCRIPTOR
