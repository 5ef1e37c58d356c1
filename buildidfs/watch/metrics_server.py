# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for metrics, in one thread, that idle connections cannot hold up.

Servers of libraries give each connection a thread: without a limit of the threads, connections take
all memory, and with a limit, idle connections take all threads. Here a connection costs a
descriptor, and has two seconds. If there are too many, the client with the most of them loses its
oldest one. A scraper sends its request at once, so its connection is never the oldest for long,
even if idle ones come from the same address.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from typing import TYPE_CHECKING, Final

from buildidfs.http_limits import client_of
from buildidfs.shares import FairTable, Share

if TYPE_CHECKING:
    from collections.abc import Callable

CONNECTION_S: Final = 2.0
REQUEST_BYTES: Final = 8192
MOST_CONNECTIONS: Final = 128
BACKLOG: Final = 256
_ACCEPTED_AT_ONCE: Final = 64


class _Connection:
    """A client: its request so far, and the rest of the answer."""

    def __init__(self, client: socket.socket) -> None:
        self.socket = client
        self.deadline = time.monotonic() + CONNECTION_S
        self._request = b""
        self.answer: memoryview | None = None

    def read(self) -> bytes:
        """Return the request when it is complete, else nothing. Raises OSError at the end."""
        chunk = self.socket.recv(REQUEST_BYTES)
        self._request += chunk
        if b"\r\n\r\n" in self._request or len(self._request) >= REQUEST_BYTES:
            return self._request
        if not chunk:
            raise ConnectionResetError
        return b""

    def write(self) -> bool:
        """Send as much of the answer as there is room for; return True at its end. Raises
        OSError.
        """
        assert self.answer is not None
        self.answer = self.answer[self.socket.send(self.answer) :]
        return not self.answer


class MetricsServer:
    """Answers requests at ``listening`` with ``respond`` until ``wake`` is readable."""

    def __init__(
        self, listening: socket.socket, wake: int, respond: Callable[[bytes], bytes]
    ) -> None:
        self._listening = listening
        self._wake = wake
        self._respond = respond
        self._connections: FairTable[int, _Connection] = FairTable(MOST_CONNECTIONS)

    def run(self) -> None:
        """Work until ``wake`` is readable; closes all connections, but not ``listening``."""
        self._listening.setblocking(False)
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listening, selectors.EVENT_READ)
            self._selector.register(self._wake, selectors.EVENT_READ)
            while self._turn():
                pass
        for each in self._connections.values():
            each.socket.close()

    def _turn(self) -> bool:
        """Handle all events, requests first; return False at the end."""
        first = self._connections.first()
        timeout = None if first is None else max(first.deadline - time.monotonic(), 0.0)
        ready = {key.fd: key for key, _ in self._selector.select(timeout)}
        if self._wake in ready:
            return False
        is_new = ready.pop(self._listening.fileno(), None) is not None
        for fd in ready:
            if (connection := self._connections.get(fd)) is not None:
                self._continue(connection)
        now = time.monotonic()
        while (first := self._connections.first()) is not None and first.deadline <= now:
            self._close(first)
        if is_new:
            self._accept()
        return True

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                client, address = self._listening.accept()
            except OSError:  # there is none, or no descriptor for it
                return
            client.setblocking(False)
            connection, fd = _Connection(client), client.fileno()
            self._selector.register(client, selectors.EVENT_READ)
            surplus = self._connections.put(fd, Share(client_of(address[0])), connection)
            if surplus is not None:
                self._end(surplus)
            if surplus is not connection:
                self._continue(connection)

    def _continue(self, connection: _Connection) -> None:
        try:
            if connection.answer is None:
                request = connection.read()
                if not request:
                    return
                connection.answer = memoryview(self._respond(request))
                self._selector.modify(connection.socket, selectors.EVENT_WRITE)
            if connection.write():
                self._close(connection)
        except BlockingIOError:
            return
        except OSError:  # the client is gone
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._connections.pop(connection.socket.fileno())
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        with contextlib.suppress(OSError):
            connection.socket.close()
