# SPDX-License-Identifier: Apache-2.0
"""Files that the catcher has sent: known ones are recognised, new ones wait to be copied."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture import elf_file
from buildidfs.capture.base import PinnedFile, seen_again
from buildidfs.capture.live.pending_files import PendingFile
from buildidfs.capture.unresponsive.timeouts import Patience
from buildidfs.ingest.scan import StoreMemo
from buildidfs.linux import openat2
from buildidfs.linux.fd_closer import Closer
from buildidfs.model import BuildId

if TYPE_CHECKING:
    from buildidfs.capture.live.pending_files import PendingFiles
    from buildidfs.capture.live.protocol import Caught
    from buildidfs.capture.live.sightings import LiveSightings
    from buildidfs.capture.unresponsive.filesystems import SlowMounts
    from buildidfs.ingest.live import Listener, Live
    from buildidfs.model import Sighting
    from buildidfs.store import Store

DENIED: Final = frozenset((errno.EPERM, errno.EACCES))
"""Errors of a file that a scan of its process may open in another way."""

# For the first page of a file whose filesystem is made of others.
_FIRST_LOOK_S: Final = 1.0
# The catcher closes its copies first, see `protocol.Outbox`.
_CLOSE_AFTER_S: Final = 0.5
_CLOSING_S: Final = 10.0


class CaughtFiles:
    """Takes caught files into ``pending``, for ``live``, whose ``listener`` hears of them.

    Belongs to one thread. ``sightings`` says where they were seen, ``slow`` is what is known of
    mounts.
    """

    def __init__(
        self,
        store: Store,
        live: Live,
        pending: PendingFiles,
        listener: Listener,
        sightings: LiveSightings,
        slow: SlowMounts,
    ) -> None:
        self._memo = StoreMemo(store)
        self._live = live
        self._pending = pending
        self._listener = listener
        self._sightings = sightings
        self._slow = slow
        self._patience = Patience(_FIRST_LOOK_S)
        self._closer = Closer(delay=_CLOSE_AFTER_S)

    def take(self, caught: Caught, fd: int) -> None:
        """Take over one file, which is open at ``fd`` (O_PATH), or only known of (-1)."""
        sighting = self._sightings.of(caught, fd)
        if not self._listener.is_wanted(sighting):
            self._closer.close([fd])
        elif caught.build_id is not None:
            self._live.note(sighting, caught.build_id)
            self._listener.unpinned(sighting, caught.build_id)
            self._listener.forget(caught.key)
        elif fd < 0:
            # We had no descriptor left to receive it with.
            self._not_opened(caught, sighting, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
        elif not self._is_known(caught, sighting, fd):
            self._take_new(caught, self._sightings.reached(sighting, caught, fd), fd)

    def close(self) -> None:
        """Close what is left; safe to call twice."""
        self._closer.finish(_CLOSING_S)

    def _is_known(self, caught: Caught, sighting: Sighting, fd: int) -> bool:
        """Record the sighting of a file that the store knows; False if it does not."""
        known = self._memo.recall(caught.identity)
        if known is None:
            return False
        if known.build_id is not None:
            again = seen_again(
                self._memo, sighting, known, lambda each: self._sightings.reached(each, caught, fd)
            )
            self._live.seen(again.sighting, known.build_id)
        self._closer.close([fd])
        return True

    def _take_new(self, caught: Caught, sighting: Sighting, fd: int) -> None:
        place = caught.place
        build_id = None
        slow = self._slow.is_slow(fd, caught.identity, place.mnt_ns_id, place.namespaces.user)
        if not slow:
            try:
                readable, build_id = self._first_look(caught, fd)
            except TimeoutError:
                slow = True
            except OSError as error:
                self._closer.close([fd])
                self._not_opened(caught, sighting, error)
                return
            else:
                self._closer.close([fd])
                fd = readable
        share = self._sightings.share(sighting.origin)
        now = time.monotonic()
        file = PendingFile(
            PinnedFile(sighting, fd), build_id, caught.key, now, slow=slow, share=share
        )
        self._live.let_go(self._pending.put(file))
        self._listener.look_at(caught.pid, share)

    def _first_look(self, caught: Caught, path_fd: int) -> tuple[int, BuildId | None]:
        """Return a descriptor to read a file from, and the build ID on its first page.

        Raises OSError: TimeoutError if what its filesystem is made of does not answer.
        """
        if not self._slow.is_stacked(path_fd):
            return _opened(path_fd)
        own = os.dup(path_fd)  # the thread that asks may be left behind with it

        def question() -> tuple[int, BuildId | None]:
            try:
                return _opened(own)
            finally:
                os.close(own)

        identity = caught.identity
        device = identity.dev, int.from_bytes((identity.scope or b"")[-8:], "little")
        if self._patience.is_silent(device):
            os.close(own)
            raise TimeoutError
        return self._patience.ask(device, question, lambda found: os.close(found[0]))

    def _not_opened(self, caught: Caught, sighting: Sighting, error: OSError) -> None:
        self._listener.forget(caught.key)
        if error.errno in DENIED:
            # A scan knows other ways.
            self._listener.look_at(caught.pid, self._sightings.share(sighting.origin))
        else:
            self._listener.failed(sighting, error.strerror or str(error))


def _opened(path_fd: int) -> tuple[int, BuildId | None]:
    fd = openat2.reopen_regular(path_fd)
    try:
        found = elf_file.identify(fd)
    except BaseException:
        os.close(fd)
        raise
    return fd, found if isinstance(found, BuildId) else None
