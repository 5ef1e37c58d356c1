# SPDX-License-Identifier: Apache-2.0
"""Files on filesystems that may never answer: who serves them may do so on purpose."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import PinnedFile, Unreadable
from buildidfs.capture.patience import Patience
from buildidfs.ingest import staging
from buildidfs.ingest.batch import discard
from buildidfs.store import NewCapture, Store

if TYPE_CHECKING:
    from buildidfs.capture.pins import Pin
    from buildidfs.ingest.staging import Outcome
    from buildidfs.model import FileIdentity

_ANSWER_S: Final = 10.0
# A filesystem that did not answer is left alone for so long.
_SILENT_FOR_S: Final = 3600.0
# Threads that hang in the kernel because of one; each new mount may cost another.
_MOST_ASKING: Final = 16
_ASKING: Final = "buildidfs-ask"


class Reluctant:
    """Stages such files, one at a time, and gives up each when it takes too long.

    An answer to the first question is waited for 10 s, or ``seconds`` if that is less. For the
    bytes there are ``seconds``: who is only slow is asked again the next time.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._patience = Patience(min(_ANSWER_S, seconds))
        self._patient_since = time.monotonic()

    def capture(self, pin: Pin) -> Outcome:
        """As `staging.capture`, in bounded time; leaves the descriptor of the pin alone.

        The descriptor may be one that only names the file (O_PATH). Raises `StoreError`.
        """
        path = pin.sighting.origin.path
        try:
            fd = self._opened(pin)
            patience = Patience(self._seconds)
            pinned = PinnedFile(pin.sighting, fd)
            device = _device(pin.sighting.origin.identity)
            return patience.ask(device, lambda: staging.capture(self._store, pinned), _discard)
        except OSError as error:
            return Unreadable(path, error.strerror or str(error), error.errno or 0)

    def _opened(self, pin: Pin) -> int:
        """A descriptor of its own, of a file that can be read now. Raises OSError."""
        now = time.monotonic()
        if now - self._patient_since > _SILENT_FOR_S:
            self._patience, self._patient_since = Patience(min(_ANSWER_S, self._seconds)), now
        if sum(thread.name == _ASKING for thread in threading.enumerate()) >= _MOST_ASKING:
            raise TimeoutError("too many filesystems do not answer")
        # Whoever asks may be left behind, and then has a descriptor that nobody else closes.
        owned = [os.dup(pin.fd)]

        def question() -> int:
            named = owned.pop()
            try:
                # O_NONBLOCK: should it be a pipe by now.
                fd = os.open(f"/proc/self/fd/{named}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            finally:
                os.close(named)
            try:
                os.pread(fd, 1, 0)
            except BaseException:
                os.close(fd)
                raise
            return fd

        try:
            return self._patience.ask(_device(pin.sighting.origin.identity), question, os.close)
        finally:
            if owned:  # it was not even asked
                os.close(owned.pop())


def _device(identity: FileIdentity) -> tuple[int, int]:
    """What stands for a filesystem: the mount, since device numbers are handed out again."""
    return identity.dev, int.from_bytes((identity.scope or b"")[-8:], "little")


def _discard(outcome: Outcome) -> None:
    if isinstance(outcome, NewCapture):
        discard(outcome)
