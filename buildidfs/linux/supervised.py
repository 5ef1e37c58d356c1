# SPDX-License-Identifier: Apache-2.0
"""`Supervised`: a program of this package behind a socket, which is started again after it ends.

The program sends one packet when it is ready, or when it cannot work, in the words of sd_notify(3).
After that its packets are those of its protocol.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from typing import Final

from buildidfs.backoff import Attempts, Backoff
from buildidfs.linux import child as child_process
from buildidfs.linux import sdnotify

_log = logging.getLogger(__name__)

RESTARTS: Final = Backoff(0.25, 5.0)
"""The delays before a program is started again on demand."""

START_S: Final = 20.0
"""The time in seconds after which a program that is not ready is killed."""

_PACKET: Final = 4096
_KILL_S: Final = 1.0


class Supervised:
    """A program of this package, started with the first call of `start`. Not thread-safe.

    ``module`` has the ``main`` of the program, whose arguments are the descriptor of its end of the
    socket, and ``words``. The first packet to it is ``introduction``, unless that is empty. For
    ``quiet`` and ``buffer`` see `child.start_with_socket`.
    """

    def __init__(
        self,
        module: str,
        *words: str,
        introduction: bytes = b"",
        restarts: Backoff = RESTARTS,
        quiet: bool = False,
        buffer: int = 0,
    ) -> None:
        self._command = module, words
        self._introduction = introduction
        self._quiet = quiet
        self._buffer = buffer
        self.restarts = Attempts(restarts)
        """The starts. The caller records in it that the program works, or has ended by itself."""
        self.process: child_process.Child | None = None
        self.channel: socket.socket | None = None
        """The socket of the running program."""
        self.status = ""
        """The text with which the program reported that it is ready."""

    @property
    def pid(self) -> int:
        """The process ID of the program, 0 if none runs."""
        return 0 if self.process is None else self.process.pid

    def start(self) -> socket.socket:
        """Return the socket of the program. If none runs, start it, and wait until it is ready.

        Raises OSError: BlockingIOError if the next start is not due yet, TimeoutError, and the
        reason of a program that cannot work.
        """
        if self.channel is not None:
            return self.channel
        if not self.restarts.is_due:
            raise BlockingIOError(errno.EAGAIN, "it failed, and is not started again yet")
        module, words = self._command
        try:
            self.process, self.channel = child_process.start_with_socket(
                module, *words, quiet=self._quiet, buffer=self._buffer
            )
            self._await_ready(self.channel)
        except OSError as error:
            _log.debug("%s: not started: %s", module, error.strerror)
            self.kill(_KILL_S)
            self.restarts.failed()
            raise
        _log.debug("%s: started, pid %d", module, self.pid)
        return self.channel

    def _await_ready(self, channel: socket.socket) -> None:
        channel.settimeout(START_S)
        try:
            if self._introduction:
                channel.send(self._introduction)
            report = sdnotify.decoded(channel.recv(_PACKET))
        except TimeoutError:
            raise TimeoutError(errno.ETIMEDOUT, f"not ready within {START_S:g} s") from None
        except ConnectionError:
            report = {}
        channel.settimeout(None)
        self.status = report.get("STATUS", "")
        if report.get("READY") == "1":
            return
        if report.get("ERRNO", "").isdecimal():
            raise OSError(int(report["ERRNO"]), self.status)
        raise OSError(errno.ECHILD, "it ended before it was ready")

    def close(self, seconds: float) -> bool:
        """Close the socket, so that the program ends. Kill it if it has not ended after a time;
        return False then. Safe to call twice.
        """
        self._close_channel()
        has_ended = self.process is None or self.process.wait(seconds) is not None
        if has_ended:
            _log.debug("%s: ended", self._command[0])
            self.process = None
        else:
            self.kill(seconds)
        return has_ended

    def kill(self, seconds: float) -> child_process.Child | None:
        """Kill the program; return its process if it has not ended after a time."""
        self._close_channel()
        process, self.process = self.process, None
        if process is not None:
            _log.debug("%s: killed, pid %d", self._command[0], process.pid)
        return None if process is None or process.end(seconds) else process

    def _close_channel(self) -> None:
        channel, self.channel = self.channel, None
        if channel is not None:
            with contextlib.suppress(OSError):
                # A thread may read another descriptor of it, which close() leaves open.
                channel.shutdown(socket.SHUT_RDWR)
            channel.close()


# --- in the program ------------------------------------------------------------------------------


def report_ready(channel: socket.socket, status: str = "") -> None:
    """Report on the socket of this program that it is ready. Raises OSError."""
    channel.send(sdnotify.encoded("READY=1", f"STATUS={status}"))


def report_failure(channel: socket.socket, number: int, reason: str) -> None:
    """Report on the socket of this program that it cannot work, with an error number."""
    with contextlib.suppress(OSError):  # the other end is closed
        channel.send(sdnotify.encoded(f"ERRNO={number}", f"STATUS={reason or os.strerror(number)}"))
