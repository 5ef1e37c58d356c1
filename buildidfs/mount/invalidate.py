# SPDX-License-Identifier: Apache-2.0
"""Tell the kernel which names a commit has changed, before the committer goes on.

The kernel keeps names for a day, and names that do not exist for some minutes, without asking
again. A commit changes two things: names that were absent exist, and a name may lead to a
better variant, which is another inode. The store tells its listeners the ordinals; `View.spellings`
says which names hang on them; those are invalidated. When everything may have changed, all names
are (`FuseKernel.forget_names`).

Of absent names only those need it that the kernel was told of. `Absences` keeps them, and it is
bounded: when it is full, the kernel is told not to remember more.

All this happens in a thread of its own. An invalidation waits for lookups in the same directory
that are on their way, and those wait for the loop: on the loop it would be a deadlock.
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

    from buildidfs.store.coordination import Listener
    from buildidfs.view import View

log = logging.getLogger(__name__)

NEGATIVE_S = 300.0
MOST_ABSENCES = 32768

_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV, errno.ENOTCONN)

# A fuse_out_header with FUSE_NOTIFY_INC_EPOCH as its error: from now on every dentry is out of
# date. Linux 6.16, commit 2396356a945b; earlier kernels answer EINVAL.
_INC_EPOCH = struct.pack("<IiQ", 16, 8, 0)


class Absences:
    """The names that the kernel remembers as absent: (directory, name).

    Used by the loop and by the invalidating thread; each method is one step under the GIL where
    that matters. ``moment`` changes with every commit: a lookup that began before must be
    repeated, or the answer "absent" might arrive after the news that it exists.

    ``keeps_names``: `take_all` returns the names, which takes twice the memory; set it before there
    are any. Without it two names may share an entry, and the kernel is told of one in vain.
    """

    def __init__(self, most: int = MOST_ABSENCES, timeout_s: float = NEGATIVE_S) -> None:
        self.timeout_s = timeout_s
        self.moment = 0
        self.keeps_names = True
        self._most = most
        self._until: dict[tuple[int, bytes] | int, float] = {}

    def add(self, directory: int, name: bytes) -> bool:
        """Note a name that the kernel is told to be absent; False if it must not remember it."""
        now = time.monotonic()
        until = self._until
        if len(until) >= self._most:
            self._drop_expired(now)
            if len(until) >= self._most:
                return False
        key = (directory, name)
        # The kernel gets the answer later than this, so a second more.
        until[key if self.keeps_names else hash(key)] = now + self.timeout_s + 1
        return True

    def discard(self, directory: int, name: bytes) -> bool:
        """Forget a name; True if it was there."""
        key = (directory, name)
        return self._until.pop(key if self.keeps_names else hash(key), None) is not None

    def take_all(self) -> list[tuple[int, bytes]]:
        """Forget all names and return them, as far as they were kept."""
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
        # In order of time, except for names that were asked for twice: those wait for their turn.
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
        """Return True if the kernel has an inode for a directory; else it has none of its names."""
        try:
            pyfuse3.invalidate_inode(directory, attr_only=True)
        except OSError as error:
            return error.errno not in _GONE
        return True

    def forget_name(self, directory: int, name: bytes) -> None:
        """Look this name up again next time."""
        try:
            pyfuse3.invalidate_entry(directory, name)
        except OSError as error:
            # Mostly it had forgotten by itself, or never knew.
            if error.errno not in _GONE:
                log.warning("cannot invalidate a name in the kernel: %s", error.strerror)

    def forget_names(self, absent: Iterable[tuple[int, bytes]]) -> None:
        """Look every name up again.

        Without FUSE_NOTIFY_INC_EPOCH only absent names are told one by one: what exists is then
        found to be gone when it is opened.
        """
        if not self.forgets_all():
            for directory, name in absent:
                self.forget_name(directory, name)

    def forgets_all(self) -> bool:
        """Make the kernel look every name up again; False if it cannot without being told them."""
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
    """The thread that receives commits. A context manager: it runs within the block."""

    def __init__(
        self,
        view: View,
        absences: Absences,
        kernel: FuseKernel,
        listener: Listener,
        on_removed: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_removed`` is called, in the thread, when blobs may have been removed."""
        self._view = view
        self._on_removed = on_removed
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
        self._thread.join()
        os.close(self._stop)

    def _run(self) -> None:
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
                # The mount goes on answering, from the index, whatever the kernel remembers.
                log.exception("a commit may not be seen in the mount at once")
            finally:
                self._listener.acknowledge()

    def committed(self, ordinals: list[int]) -> None:
        """Make the kernel forget what these ordinals (an empty list: all) have changed."""
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
                # We come too late to be told its names: it is removed altogether.
                self._everything()
                return
            self._forget(spellings)
        if removed:
            self._on_removed()

    def _forget(self, spellings: list[tuple[int, bytes, bool]]) -> None:
        # Most build IDs that arrive were never looked up, so the kernel knows no directory of
        # theirs: it is asked once for each directory instead of told each name.
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
