# SPDX-License-Identifier: Apache-2.0
"""Files on filesystems that may never answer: who serves them may do so on purpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.ingest import staging

if TYPE_CHECKING:
    from buildidfs.capture.live.pending_files import Pin
    from buildidfs.capture.unresponsive.file_helper import FileHelper
    from buildidfs.ingest.staging import Outcome
    from buildidfs.model import FileIdentity
    from buildidfs.store import Store


class Reluctant:
    """Stages copies of such files, which ``helper`` makes, and gives up each that takes too long.

    This process neither reads such a file nor asks for its attributes: see `FileHelper`.
    """

    def __init__(self, store: Store, helper: FileHelper) -> None:
        self._store = store
        self._helper = helper

    def capture(self, pin: Pin) -> Outcome:
        """As `staging.capture`, in bounded time; leaves the descriptor of the pin alone.

        The descriptor may be one that only names the file (O_PATH). Raises `StoreError`.
        """
        origin = pin.sighting.origin
        device = _device(origin.identity)
        try:
            # What the kernel had in memory when the file was caught may be old.
            identity = self._helper.look(device, pin.fd)
            identity, fd = self._helper.copy(device, pin.fd, identity.size)
        except OSError as error:
            return Unreadable(origin.path, error.strerror or str(error), error.errno or 0)
        sighting = staging.sighting_of(pin.sighting, identity)
        return staging.capture(self._store, PinnedFile(sighting, fd, is_copy=True))


def _device(identity: FileIdentity) -> tuple[int, int]:
    """The number of the mount, since device numbers are handed out again."""
    return identity.dev, int.from_bytes((identity.scope or b"")[-8:], "little")
