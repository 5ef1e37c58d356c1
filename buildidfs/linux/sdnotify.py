# SPDX-License-Identifier: Apache-2.0
"""The protocol of systemd with which a process reports its state to its supervisor.

A message is one datagram of ``NAME=VALUE`` lines to the socket that ``NOTIFY_SOCKET`` names.
Source: sd_notify(3); the names of sockets: unix(7).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Mapping

_PATIENCE_S = 1.0
_MOST_BYTES = 4096
_UCRED = struct.Struct("iII")  # pid, uid, gid; credentials(7)


def encoded(*assignments: str) -> bytes:
    """Return the message with some assignments ``NAME=VALUE``."""
    lines = "\n".join(" ".join(each.split("\n")) for each in assignments)
    return lines.encode("utf-8", "replace")[:_MOST_BYTES]


def decoded(message: bytes) -> dict[str, str]:
    """Return the values in a message, by name."""
    lines = message.decode("utf-8", "replace").split("\n")
    return {name: text for name, _, text in (each.partition("=") for each in lines)}


class Notifier:
    """The side of the service. Without a ``NOTIFY_SOCKET`` its methods do nothing.

    Methods never fail, and wait for a second at most.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        name = os.fsencode(environ.get("NOTIFY_SOCKET", ""))
        self._address = b"\0" + name[1:] if name.startswith(b"@") else name
        self._status: str | None = None  # the last one that arrived
        self.watchdog_s = _watchdog(environ)
        """The time in seconds within which `alive` must be called; None without a watchdog."""

    def ready(self, status: str = "") -> None:
        """Report that this process is ready, so that dependent units may start."""
        if self._send("READY=1", f"STATUS={status}"):
            self._status = status

    def status(self, text: str) -> None:
        """Report the present activity in one line for people, if it has changed: each message wakes
        its reader.
        """
        if text != self._status and self._send(f"STATUS={text}"):
            self._status = text

    def alive(self) -> None:
        """Report that the process does not hang: see ``watchdog_s``."""
        self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the process is about to end."""
        self._send("STOPPING=1")

    def _send(self, *assignments: str) -> bool:
        """Send a message; return False if it did not arrive."""
        if not self._address:
            return False
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sender:
            sender.settimeout(_PATIENCE_S)
            sender.sendto(encoded(*assignments), self._address)
            return True
        return False


class Inbox:
    """The side of the supervisor. Poll `fileno`, then `receive`."""

    def __init__(self) -> None:
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._socket = socket.socket(socket.AF_UNIX, kind)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind("")  # the kernel chooses a name

    @property
    def name(self) -> str:
        """Return the value of ``NOTIFY_SOCKET`` for the reporting processes."""
        return "@" + os.fsdecode(self._socket.getsockname()[1:])

    def fileno(self) -> int:
        """Return a descriptor that is readable if there is something to `receive`."""
        return self._socket.fileno()

    def receive(self) -> dict[str, str] | None:
        """Return the assignments of one message; None if there is none.

        All processes in the network namespace can reach the socket: messages of users other than
        root and our own are ignored.
        """
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                _MOST_BYTES, socket.CMSG_SPACE(_UCRED.size)
            )
        except OSError:
            return None
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                _, uid, _ = _UCRED.unpack(payload)
                if uid in (0, os.geteuid()):
                    return decoded(data)
        return {}

    def close(self) -> None:
        """Close the socket; safe to call twice."""
        self._socket.close()


def _watchdog(environ: Mapping[str, str]) -> float | None:
    """Return half of the time allowed between two calls of `alive`, as sd_watchdog_enabled(3)
    advises.
    """
    allowed = environ.get("WATCHDOG_USEC", "")
    if environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(allowed) / 2e6 if allowed.isdecimal() and int(allowed) else None
