# SPDX-License-Identifier: Apache-2.0
"""The owner's side of the catcher: start it, receive its messages in a thread, end it.

If the catcher ends by itself, `Watcher` calls its owner, who can start the catcher again, and find
the files that were mapped meanwhile with a scan.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from buildidfs.backoff import Backoff
from buildidfs.capture.live import protocol
from buildidfs.capture.live.protocol import CatcherFailed, Forget
from buildidfs.errors import BuildIdFsError, CapabilityError
from buildidfs.linux import procfs
from buildidfs.linux.child import Supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from buildidfs.capture.live.protocol import Message

_log = logging.getLogger(__name__)

_PROGRAM: Final = "buildidfs.capture.live.catcher"
_END_S: Final = 5.0
_PRIVILEGE: Final = frozenset((errno.EACCES, errno.EPERM))
_BUFFER: Final = 4 << 20
_RESTARTS: Final = Backoff(0.5, 60.0)
_KEYS: Final = 512  # in one message, which may have protocol.MAX_BYTES


class Watcher:
    """One catcher at a time.

    ``receive`` is called with each message and a descriptor to close (or -1), in a thread of its
    own. ``cgroup`` is the directory of the only control group to follow, with those below it;
    empty for all. ``ended`` is called in that thread if the catcher ends by itself.
    """

    def __init__(
        self,
        receive: Callable[[Message, int], None],
        ended: Callable[[str], None],
        cgroup: str = "",
    ) -> None:
        self._receive = receive
        self._ended = ended
        words = str(os.getpid()), cgroup
        self._program = Supervised(_PROGRAM, *words, restarts=_RESTARTS, buffer=_BUFFER)
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._since = 0.0

    def start(self) -> tuple[str, ...]:
        """Start the catcher; return as soon as it catches every mapping, with a sentence for each
        restriction.

        Raises `CapabilityError` if the kernel refuses events, `BuildIdFsError` for other reasons.
        """
        try:
            sock = self._program.start()
        except OSError as error:
            if error.errno in _PRIVILEGE:
                raise CapabilityError(f"cannot follow what is mapped: {error.strerror}") from error
            raise BuildIdFsError(f"the catcher did not start: {error.strerror}") from error
        self._thread = threading.Thread(target=self._hear, args=(sock,), name="buildidfs-hear")
        self._thread.start()
        return (self._program.status,) if self._program.status else ()

    @property
    def is_due(self) -> bool:
        """True if a catcher that ended by itself may be started again."""
        return self._program.restarts.is_due

    @property
    def pid(self) -> int:
        """Return the process ID of the catcher; 0 if there is none."""
        return self._program.pid

    @property
    def is_stopped(self) -> bool:
        """True while a signal keeps the catcher from working (SIGSTOP)."""
        pid = self._program.pid
        return pid > 0 and procfs.is_stopped(pid)

    @property
    def busy_s(self) -> float:
        """The time in seconds for which ``receive`` handles one message; 0 while it waits."""
        since = self._since
        return time.monotonic() - since if since else 0.0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Make the catcher send these files again when they are mapped again."""
        sock = self._program.channel
        if sock is not None:
            every = list(keys)
            with contextlib.suppress(OSError):  # the catcher is gone, and its memory with it
                for first in range(0, len(every), _KEYS):
                    part = tuple(every[first : first + _KEYS])
                    protocol.send(sock, protocol.encode(Forget(part)))

    def close(self) -> None:
        """End the catcher; safe to call twice, not from ``receive`` or ``ended``."""
        self._stopping = True
        if self._program.channel is not None:
            with contextlib.suppress(OSError):
                self._program.channel.shutdown(socket.SHUT_RDWR)
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._program.close(_END_S)
        self._stopping = False

    def _hear(self, sock: socket.socket) -> None:
        reason = "it was killed"
        while True:
            try:
                received = protocol.receive(sock)
            except OSError:
                break
            except ValueError as error:
                reason = str(error)
                break
            if received is None:
                break
            message, fd = received
            if isinstance(message, CatcherFailed):
                reason = message.reason
                continue
            self._since = time.monotonic()
            try:
                self._receive(message, fd)
            except Exception:
                # An error with one message must not end the handling of the next.
                _log.exception("a message of the catcher could not be dealt with")
            self._since = 0.0
        if not self._stopping:
            self._program.restarts.failed()
            self._ended(reason)
