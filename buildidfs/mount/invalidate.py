# SPDX-License-Identifier: Apache-2.0
"""Tell the kernel which names a commit has changed, before the committer continues.

The kernel keeps names for a day, and names that do not exist for some minutes, without asking
again. A commit changes two things: names that were absent exist, and a name may lead to a better
variant, which is another inode. The store announces the ordinals; `View.spellings` returns the
names of their nodes, and these are invalidated. If everything may have changed, all names are
invalidated (`FuseKernel.forget_names`).

An absent name needs an invalidation only if the kernel may have cached it. `Absences` records these
names, up to a limit: beyond it the kernel may not cache further absent names.

Invalidations run in a thread of their own. An invalidation waits for pending lookups in the same
directory, and those wait for the loop, so on the loop it would be a deadlock.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import struct
import threading
import time
from typing import TYPE_CHECKING

import pyfuse3

from buildidfs.errors import BuildIdFsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.mount.limits import MountLimits
    from buildidfs.store.coordination import ChangeListener
    from buildidfs.view import View

log = logging.getLogger(__name__)

# The time that the thread has to finish an invalidation when the mount ends.
_END_S = 2.0
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN)

# A fuse_out_header with FUSE_NOTIFY_INC_EPOCH as its error invalidates every dentry. Linux 6.16,
# commit 2396356a945b; earlier kernels answer EINVAL.
_INC_EPOCH = struct.pack("<IiQ", 16, 8, 0)


class Absences:
    """The names that the kernel caches as absent: (directory, name).

    The loop and the invalidating thread both use it; where it matters, a method is one step under
    the GIL. ``moment`` changes with every commit: a lookup that began before a commit must be
    repeated. Else its answer "absent" might arrive after the invalidation.

    With ``keeps_names``, `take_all` returns the names, which takes twice the memory. Without it two
    names may share an entry, so some invalidations are unnecessary.
    """

    def __init__(self, limits: MountLimits) -> None:
        self.limits = limits
        self.moment = 0
        self.keeps_names = True
        self._until: dict[tuple[int, bytes] | int, float] = {}

    def add(self, directory: int, name: bytes) -> bool:
        """Record a name that the kernel gets as absent; return False if the kernel must not cache
        it.
        """
        now = time.monotonic()
        until = self._until
        if len(until) >= self.limits.absences:
            self._drop_expired(now)
            if len(until) >= self.limits.absences:
                return False
        key = (directory, name)
        # The kernel gets the answer later than this, hence one more second.
        until[key if self.keeps_names else hash(key)] = now + self.limits.absence_s + 1
        return True

    def discard(self, directory: int, name: bytes) -> bool:
        """Forget a name; return True if it was recorded."""
        key = (directory, name)
        found = self._until.pop(key, None), self._until.pop(hash(key), None)
        return found != (None, None)

    def take_all(self) -> list[tuple[int, bytes]]:
        """Forget all names and return them, if they were kept."""
        taken = []
        with contextlib.suppress(KeyError):
            while True:
                key, _ = self._until.popitem()
                if not isinstance(key, int):
                    taken.append(key)
        return taken

    def __len__(self) -> int:
        return len(self._until)

    def _drop_expired(self, now: float) -> None:
        # In order of time, except for names that were looked up again: these keep their place, and
        # the names behind them are dropped later.
        until = self._until
        try:
            while until:
                key = next(iter(until))
                if until[key] > now:
                    return
                del until[key]
        except (KeyError, RuntimeError, StopIteration):
            return  # the other thread took some at the same moment


class FuseKernel:
    """The kernel at the other end of pyfuse3's session."""

    def knows(self, directory: int) -> bool:
        """Return True if the kernel has an inode for a directory. If not, it has none of the names
        in it.
        """
        try:
            pyfuse3.invalidate_inode(directory, attr_only=True)
        except OSError as error:
            return error.errno not in _GONE
        return True

    def forget_name(self, directory: int, name: bytes) -> None:
        """Make the kernel look this name up again."""
        try:
            pyfuse3.invalidate_entry(directory, name)
        except OSError as error:
            # Mostly the kernel had dropped the name itself, or never had it.
            if error.errno not in _GONE:
                log.warning("cannot invalidate a name in the kernel: %s", error.strerror)

    def forget_names(self, absent: Iterable[tuple[int, bytes]]) -> None:
        """Make the kernel look every name up again.

        Without FUSE_NOTIFY_INC_EPOCH only absent names are invalidated, one by one: other names are
        found to be gone when they are opened.
        """
        if not self.forgets_all():
            for directory, name in absent:
                self.forget_name(directory, name)

    def forgets_all(self) -> bool:
        """Make the kernel look every name up again; return False if it can do so only name
        by name.
        """
        try:
            os.write(_fuse_descriptor(), _INC_EPOCH)
        except OSError:
            return False
        return True


def _fuse_descriptor() -> int:
    """Find pyfuse3's descriptor of /dev/fuse; raises OSError."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/fuse":
                return int(name)
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), "/dev/fuse")


class Invalidator:
    """The thread that receives commits. A context manager: the thread runs within the block."""

    def __init__(
        self,
        view: View,
        absences: Absences,
        kernel: FuseKernel,
        listener: ChangeListener,
        on_removed: Callable[[], None] = lambda: None,
        begin: Callable[[], object] = lambda: None,
    ) -> None:
        """``on_removed`` is called in the thread if blobs may have been removed. ``begin`` returns
        when the kernel and libfuse have agreed on a protocol: before, each invalidation fails with
        ENOSYS.
        """
        self._view = view
        self._on_removed = on_removed
        self._begin = begin
        self._absences = absences
        self._kernel = kernel
        self._listener = listener
        self._stop = -1
        self._thread = threading.Thread(target=self._run, name="invalidate", daemon=True)

    def __enter__(self) -> Invalidator:
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        os.eventfd_write(self._stop, 1)
        # The kernel may let the thread wait for a client that waits for an answer. Both get an
        # error when the session is closed, which comes next.
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            os.close(self._stop)

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # the session has ended already
            self._begin()
        self._absences.keeps_names = not self._kernel.forgets_all()
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._stop in ready:
                return
            try:
                ordinals = self._listener.receive()
                if ordinals is not None:
                    self.committed(ordinals)
            except Exception:
                # The mount continues to answer from the index, whatever the kernel has cached.
                log.exception("a commit may not be seen in the mount at once")
            finally:
                self._listener.acknowledge()

    def committed(self, ordinals: list[int]) -> None:
        """Make the kernel drop the names that these ordinals (an empty list: all) have changed."""
        self._absences.moment += 1
        if not ordinals:
            self._everything()
            return
        removed = False
        for ordinal in ordinals:
            try:
                spellings = list(self._view.spellings(ordinal))
                removed = removed or self._view.has_lost(ordinal)
            except BuildIdFsError as error:
                log.warning("build ID number %d: %s", ordinal, error)
                continue
            if not spellings:
                # It is too late to find its names: the build ID was removed completely.
                self._everything()
                return
            self._forget(spellings)
        if removed:
            self._on_removed()

    def _forget(self, spellings: list[tuple[int, bytes, bool]]) -> None:
        # The kernel knows no directory of a build ID that was never looked up, as most new ones. So
        # one question for each directory saves the invalidations of all its names.
        asked, known = 0, False
        for directory, name, replaceable in spellings:
            if self._absences.discard(directory, name):
                self._kernel.forget_name(directory, name)
            elif replaceable:
                if directory != asked:
                    asked, known = directory, self._kernel.knows(directory)
                if known:
                    self._kernel.forget_name(directory, name)

    def _everything(self) -> None:
        self._view.forget()
        self._kernel.forget_names(self._absences.take_all())
        self._on_removed()
