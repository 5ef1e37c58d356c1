# SPDX-License-Identifier: Apache-2.0
"""Messages on their way to a receiver who may be slow, and the files that go with them."""

from __future__ import annotations

import errno
import os
import select
from collections import deque
from typing import TYPE_CHECKING, Final

from buildidfs.capture.live import protocol

if TYPE_CHECKING:
    import socket

    from buildidfs.capture.live.protocol import Message

_AT_ONCE: Final = 1024
_NO_ROOM: Final = frozenset((errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM))


class Outbox:
    """Sends over a non-blocking socket, and polls it for room with ``epoll`` when there is none.

    ``held`` counts the descriptors that wait. They are closed when they are sent; the receiver is
    to keep its copies for a moment, since the last to close a file may have to unmount its
    filesystem. `flush` raises BrokenPipeError when nobody listens any more.
    """

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        self._socket = sock
        self._epoll = epoll
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._is_blocked = False
        self.held = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, message: Message, fd: int = -1) -> None:
        """Queue a message, and with it a descriptor, which is closed when it is sent."""
        self._waiting.append((protocol.encode(message), fd))
        if fd >= 0:
            self.held += 1
        if len(self._waiting) > _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send what there is room for."""
        while self._waiting:
            data, fd = self._waiting[0]
            try:
                protocol.send(self._socket, data, fd)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) from error
                break
            self._waiting.popleft()
            if fd >= 0:
                self.held -= 1
                os.close(fd)
        if bool(self._waiting) != self._is_blocked:
            self._is_blocked = not self._is_blocked
            more = select.EPOLLOUT if self._is_blocked else 0
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN | more)
