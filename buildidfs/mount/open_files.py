# SPDX-License-Identifier: Apache-2.0
"""The table of open files, with a few idle ones that may be opened again.

A node means the same bytes for ever, so all processes of a user that open it share one descriptor.
A process that opens it a moment later gets the same descriptor, which saves a sixth of the cost of
opening a file whose name the kernel has cached. The table has an entry for each open file, and for
a limited number of idle ones.

Each descriptor counts for the user for whom it was opened. A user may have half of the number that
other users leave (`Quota`). So users do not share descriptors: the user who opened a file first may
close it before others do. A quarter of all descriptors is reserved for root and the user who
mounted.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import resource
from typing import TYPE_CHECKING, Final

from buildidfs.linux import procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.log import log_once
from buildidfs.shares import Quota
from buildidfs.view import PUBLIC, Viewer

if TYPE_CHECKING:
    from pyfuse3 import RequestContext

    from buildidfs.mount.limits import MountLimits
    from buildidfs.view import FileContent, View


log = logging.getLogger(__name__)

_NO_DESCRIPTOR = 1 << 32
"""Handles of texts start here; handles of plain blobs are their descriptors."""

_COMPRESSED = 1 << 40
"""Handles of compressed blobs and of sections start here."""


class OpenFile:
    """A node that a user has open. ``user`` is (node, user ID)."""

    __slots__ = ("content", "user", "users")

    def __init__(self, user: tuple[int, int], content: FileContent) -> None:
        self.user = user
        self.content = content
        self.users = 1


class OpenFiles:
    """The table of handles. For the thread of the loop only.

    Root and the user ``own``, who share their descriptors, have no limit of their own.
    """

    def __init__(self, view: View, limits: MountLimits, own: int) -> None:
        self._view = view
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_idle = min(limits.idle_files, limit // 4)
        self._own = own
        self._quota = Quota((limit - self._most_idle) * 3 // 4)
        self._texts = itertools.count(_NO_DESCRIPTOR)
        self._compressed = itertools.count(_COMPRESSED)
        self._by_handle: dict[int, OpenFile] = {}
        # By node and user ID. User 0 here stands for root and the mounter, who have no quota.
        self._by_user: dict[tuple[int, int], int] = {}
        self._idle: dict[int, None] = {}  # handles without users, the latest last
        self.doubtful: set[int] = set()
        """Nodes of which the kernel may have cached other bytes, because their files
        were touched.
        """

    def open(self, node: int, uid: int = 0) -> int:
        """Return a handle for a file; raises the errors of `View.open`, and OSError(ENFILE)."""
        handle = self.open_now(node, uid)
        return self.add(node, self._view.open(node), uid) if handle is None else handle

    def open_now(self, node: int, uid: int = 0) -> int | None:
        """Return a handle for a file; None if the caller must call `View.open` and pass the result
        to `add`.

        Raises OSError(ENFILE) if the user ``uid`` has too many files open.
        """
        user = node, 0 if uid == self._own else uid
        handle = self._shared(user)
        if handle is not None:
            return handle
        content = self._view.open_now(node)
        return None if content is None else self._add(user, content)

    def add(self, node: int, content: FileContent, uid: int = 0) -> int:
        """Return a handle for a file that was just opened. If there is no room, close it and raise
        OSError(ENFILE).
        """
        user = node, 0 if uid == self._own else uid
        handle = self._shared(user)
        if handle is not None:  # another request was faster
            content.close()
            return handle
        return self._add(user, content)

    def _add(self, user: tuple[int, int], content: FileContent) -> int:
        """Return a handle for a file that the user does not have open. Raises OSError(ENFILE)."""
        uid = user[1]
        if uid and not self._quota.take(uid):
            content.close()
            raise _too_many(uid)
        blob = content.blob
        if blob is not None and blob.is_plain:
            handle = blob.fd
            self._by_user[user] = handle
        else:
            # A text may change until the next open, so each open has its own.
            handle = next(self._texts if blob is None else self._compressed)
        self._by_handle[handle] = OpenFile(user, content)
        return handle

    def _shared(self, user: tuple[int, int]) -> int | None:
        """Return the handle of a file that a user has open, or has closed a moment ago.

        Returns None if the file must be opened again. Raises OSError(ENFILE).
        """
        handle = self._by_user.get(user)
        if handle is None:
            return None
        file = self._by_handle[handle]
        blob = file.content.blob
        if blob is None or os.fstat(handle).st_ctime_ns != blob.status.st_ctime_ns:
            # It may have been written to: its users keep it, later ones get another.
            self.doubtful.add(user[0])
            if file.users:
                del self._by_user[user]
            else:
                self._close(handle)
            return None
        if not file.users:
            uid = user[1]
            if uid and not self._quota.take(uid):
                raise _too_many(uid)
            del self._idle[handle]
        file.users += 1
        return handle

    def file(self, handle: int) -> OpenFile:
        """Return the open file of a handle; raises OSError(EBADF) for an unknown one."""
        try:
            return self._by_handle[handle]
        except KeyError:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF)) from None

    def release(self, handle: int) -> None:
        """Record that one of the users of a handle has closed it. Raises OSError(EBADF) for an
        unknown one.
        """
        file = self._by_handle.get(handle)
        if file is None or not file.users:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        file.users -= 1
        if file.users:
            return
        uid = file.user[1]
        if uid:
            self._quota.give_back(uid)
        if handle >= _NO_DESCRIPTOR:
            del self._by_handle[handle]
            file.content.close()
            return
        self._idle[handle] = None
        if len(self._idle) > self._most_idle:
            self._close(next(iter(self._idle)))

    def close_idle(self) -> None:
        """Close idle files: their blobs may be deleted, and an open descriptor keeps the space
        occupied.
        """
        while self._idle:
            self._close(next(iter(self._idle)))

    def close(self) -> None:
        """Close everything."""
        for file in self._by_handle.values():
            file.content.close()
        self._by_handle.clear()
        self._by_user.clear()
        self._idle.clear()

    def _close(self, handle: int) -> None:
        del self._idle[handle]
        file = self._by_handle.pop(handle)
        if self._by_user.get(file.user) == handle:
            del self._by_user[file.user]
        file.content.close()


def _too_many(uid: int) -> OSError:
    log_once(
        log,
        logging.WARNING,
        f"user {uid} has as many files of the mount open as one user may, and gets ENFILE for more",
    )
    return OSError(errno.ENFILE, os.strerror(errno.ENFILE))


def is_text(handle: int) -> bool:
    """Return True for the handle of a text, which may differ at the next open."""
    return _NO_DESCRIPTOR <= handle < _COMPRESSED


# Nodes are below 2**63, and handles may have 64 bits. No node has the first of these numbers.
_OF_VIEWER: Final = 1 << 63
_ROW: Final = _OF_VIEWER | 1 << 32
_NODE: Final = _OF_VIEWER - 1
_LAST: Final = 1 << 28


class DirHandles:
    """The handles of directories, which identify the viewer of each listing.

    A listing leaves out entries that its viewer may not read. The kernel names the caller when a
    directory is opened, not when it is read. The handle of a viewer who sees everything is the
    node. Other viewers have an entry until they close the directory. A user with too many entries,
    or with unknown groups, gets the public names only.

    With ``everything`` each caller sees all names; else only root and the user ``own`` do.
    """

    def __init__(self, limits: MountLimits, *, everything: bool, own: int) -> None:
        self._everything = everything
        self._own = own
        self._quota = Quota(limits.directories)
        self._next = 0
        self._rows: dict[int, tuple[int, Viewer]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def viewer(self, ctx: RequestContext) -> Viewer | None:
        """Return the viewer of a caller; None for root and the server's user, who may see all."""
        return None if ctx.uid in (0, self._own) else Viewer(ctx.uid, _groups(ctx))

    def sees_all(self, ctx: RequestContext) -> bool:
        """Return True if a caller sees every name."""
        return self._everything or ctx.uid in (0, self._own)

    def open(self, node: int, ctx: RequestContext) -> int:
        """Open a directory for the caller ``ctx``; return the handle."""
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
        """Return the node and the viewer of a handle; the viewer None sees everything."""
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
    """Return all groups of a caller, None if they are unknown."""
    try:
        # The calling thread; 0 if its PID namespace is not below ours.
        with closing_fd(procfs.open_pid(ctx.pid)) as pid_fd:
            return frozenset((ctx.gid, *procfs.groups(pid_fd)))
    except OSError:
        return None
