# SPDX-License-Identifier: Apache-2.0
"""One client's connection: it reads requests, answers them in order, and lets the kernel send
files.

httptools parses (llhttp, the parser of Node.js); this class limits the input of the parser. Small
answers go through the transport. For a file the connection uses its socket directly: a thread sends
as much as the socket takes, and the loop waits until it takes more. Meanwhile nothing is read from
the client.

`Connection.check` is called every other second, and ends slow connections, so that requests need no
timers.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
import termios
import time
from collections import deque
from typing import TYPE_CHECKING, Final, cast

import httptools

from buildidfs.errors import BuildIdFsError
from buildidfs.serve import messages
from buildidfs.serve.content import LAST_PIECE
from buildidfs.serve.hosts import is_own
from buildidfs.serve.messages import RESET, Request, Response, Waiting
from buildidfs.shares import Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Executor

    from buildidfs.serve.content import Content
    from buildidfs.serve.limits import Lane, Places, Rate
    from buildidfs.serve.site import Site

log = logging.getLogger(__name__)

_MOST_HEAD: Final = 32 << 10
_MOST_HEADERS: Final = 100
_MOST_QUEUED: Final = 64

_MOST_BODIES: Final = 64 << 20
"""The maximum number of bytes of request bodies that wait for answers, in all connections
together.
"""

_UNIT: Final = 64 << 10
_MOST_UNSENT: Final = (64 << 20) // _UNIT
"""The maximum number of bytes of answers in memory that clients have not taken yet, in all
connections together; in units.
"""

# Seconds.
HEAD_S: Final = 10.0
IDLE_S: Final = 75.0
_LINGER_S: Final = 2.0

_PROGRESS_RATE: Final = 1 << 10
"""The least number of bytes per second of an answer that a client has to take."""

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class Shared:
    """The parts that all connections of a process use."""

    def __init__(
        self,
        site: Site,
        rate: Rate,
        places: Places,
        most: Quota,
        executor: Executor,
        lanes: Mapping[str, Lane],
        timeout: float,
    ) -> None:
        """``most`` divides the number of connections among the clients; ``lanes`` are the queues of
        `messages.Waiting`.
        """
        self.lanes = lanes
        self.timeout = timeout
        """Seconds that a client has to send the body of a request, and to take some of an answer.

        The head of a request has `HEAD_S` at most.
        """
        self.site = site
        self.rate = rate
        self.places = places
        self.executor = executor
        self.unsent = Quota(_MOST_UNSENT)
        self.bodies = Quota(_MOST_BODIES)
        self.connections: set[Connection] = set()
        self._most = most

    def admit(self, connection: Connection) -> bool:
        """Return True if the client may have a further connection.

        A proxy in front of a Unix socket has no limit of its own.
        """
        self.connections.add(connection)
        return not connection.client or self._most.take(connection.client)

    def leave(self, connection: Connection, *, admitted: bool) -> None:
        """Stop counting a connection."""
        self.connections.discard(connection)
        if admitted and connection.client:
            self._most.give_back(connection.client)


class _Refused(Exception):
    """Raised for a request that is refused; the rest of the request is not read."""


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(
        self,
        shared: Shared,
        client_of: Callable[[asyncio.Transport], str],
        hosts: frozenset[str] | None = None,
    ) -> None:
        """``client_of`` returns the client of a transport; "" means that the last proxy
        names it. With ``hosts``, a request must be for one of these names (`is_own`).
        """
        self._shared = shared
        self._hosts = hosts
        self._client_of = client_of
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Request] = deque()
        self._busy = False
        self._full = False
        self._lost = False
        self._ended = False
        """True if no more requests are read: the client has ended its side, or we close ours."""
        self._has_all = False
        """True if the client has ended its side."""
        self._room: asyncio.Future[None] | None = None
        self._sending = -1
        self._sent = 0
        self._read_paused = False
        self._lingering = False
        self._since = self._loop.time()
        self._began = 0.0
        self._progress = 0
        self._waiting: Content | None = None
        self._refusal = Response(400)
        self._admitted = False
        self._unsent = 0
        self._unsent_of = ""
        self.client = ""
        self._begin()

    # --- calls of the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # transports of uvloop have no such base
        self._transport = cast("asyncio.Transport", transport)
        self.client = self._client_of(self._transport)
        self._admitted = self._shared.admit(self)
        if not self._admitted:
            self._reset()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._shared.leave(self, admitted=self._admitted)
        for request in self._queue:
            self._forget_body(request)
        self._queue.clear()
        self._drop_body()
        self._release()
        if self._waiting is not None and self._shared.places.forget(self):
            self._waiting.close()
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        if not self._head_bytes and not self._is_head and not self._is_body:
            self._since = self._loop.time()
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._ended = True  # the request itself is answered, as HTTP/1.1
            if self._queue:
                self._queue[-1].keep_alive = False
        except httptools.HttpParserCallbackError as error:
            if not isinstance(error.__context__, _Refused):
                raise
        except httptools.HttpParserError:
            self._refuse(400, "this is not HTTP/1.1")
        if (self._is_head or self._is_body) and self._head_bytes > _MOST_HEAD:
            self._refuse(431, "the head of the request is too long")
        self._advance()

    def eof_received(self) -> bool:
        """Keep the connection of a client that has ended its side, until all its requests are
        answered.
        """
        self._drop_body()
        self._ended = self._has_all = True
        self._advance()
        return not self._lingering

    def pause_writing(self) -> None:
        self._full = True
        self._progress_made()

    def resume_writing(self) -> None:
        self._full = False
        self._release()
        self._wake()
        self._advance()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    # --- calls of the parser ----------------------------------------------------------------

    def _begin(self) -> None:
        self._is_head = False
        self._head_bytes = 0
        """The number of bytes since the beginning of the head; after the last piece of the body,
        the number of bytes of trailers.
        """
        self._is_body = False
        self._body = bytearray()
        self._most_body = 0
        self._sender = ""
        self._target = b""
        self._headers: dict[bytes, bytes] = {}

    def on_message_begin(self) -> None:
        self._is_head = True

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > messages.MAX_TARGET:
            self._refuse(414, "the request target is too long")
            raise _Refused

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_head:
            return  # a trailer
        if len(self._headers) >= _MOST_HEADERS:
            self._refuse(431, "the request has too many headers")
            raise _Refused
        name = name.lower()
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        self._is_head = False
        self._sender = self.client or _last_proxy(self._headers) or "local"
        if self._hosts is not None and not is_own(self._headers.get(b"host", b""), self._hosts):
            self._refuse(421, "this server is not known by that name; see hosts in buildidfs.toml")
            raise _Refused
        length = self._headers.get(b"content-length", b"0")
        if length == b"0" and b"transfer-encoding" not in self._headers:
            return
        is_post = self._parser.get_method() == b"POST"
        self._most_body = self._shared.site.most_body(self._target) if is_post else 0
        if not self._most_body:
            self._refuse(413, "no request has a body here")
            raise _Refused
        self._make_room(messages.number(length) or 0)
        self._is_body = True
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._make_room(len(body))
        self._body += body
        self._head_bytes = 0
        self._shared.bodies.take(self._sender, len(body))

    def _make_room(self, more: int) -> None:
        """Refuse the request if there is no room for ``more`` bytes of its body."""
        if len(self._body) + more > self._most_body:
            self._refuse(413, f"the body is longer than {self._most_body} bytes")
            raise _Refused
        if not self._shared.bodies.has(self._sender, more):
            self._refuse(503, "too many requests at once")
            raise _Refused

    def _drop_body(self) -> None:
        """Forget a body that will not be read to its end."""
        self._shared.bodies.give_back(self._sender, len(self._body))
        self._body.clear()

    def _forget_body(self, request: Request) -> None:
        """Stop counting the body of a request."""
        self._shared.bodies.give_back(request.client, len(request.body))

    def on_message_complete(self) -> None:
        parser = self._parser
        keep = parser.should_keep_alive()
        body = bytes(self._body)
        method = parser.get_method()
        request = Request(method, self._target, self._headers, keep, body, self._sender)
        self._queue.append(request)
        self._begin()
        if not keep or len(self._queue) >= _MOST_QUEUED:
            # Pipelined requests may stay unanswered.
            self._queue[-1].keep_alive = False
            self._ended = True
            raise _Refused

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that is not read to its end, after the requests before it."""
        self._refusal = self._shared.site.refusal(self._target, status, message)
        self._drop_body()
        self._begin()
        self._ended = True
        client = self.client or "local"
        self._queue.append(Request(b"", b"", {}, keep_alive=False, client=client))

    # --- answers -----------------------------------------------------------------------------

    def _advance(self) -> None:
        """Answer requests until an answer takes longer."""
        while self._queue and not self._busy and not self._full and not self._lost:
            request = self._queue.popleft()
            delay = self._shared.rate.delay(request.client)
            if delay:
                self._busy = True
                self._loop.call_later(delay, self._answer_later, request)
            else:
                self._answer(request)
        if self._lost or self._lingering:
            return
        if not self._queue and not self._busy and self._ended:
            self._close()
        elif (self._busy or self._full) != self._read_paused:
            self._read_paused = not self._read_paused
            if self._read_paused:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _answer_later(self, request: Request) -> None:
        self._busy = False
        if self._lost:
            self._forget_body(request)
            return
        self._answer(request)
        self._advance()

    def _answer(self, request: Request) -> None:
        self._began = time.perf_counter()
        if not request.method:
            self._respond(request, self._refusal)
            return
        answer = self._shared.site.answer(request)
        if isinstance(answer, Response):
            self._forget_body(request)
            self._respond(request, answer)
            return
        self._busy = True
        self._progress_made()
        if not isinstance(answer, Waiting):
            self._work(request, answer, self._shared.executor)
            return
        lane = self._shared.lanes[answer.lane]

        def begin() -> bool:
            if self._lost:
                self._forget_body(request)
            else:
                self._work(request, answer, lane.executor, lane)
            return not self._lost

        if not lane.enter(request.client, begin):
            assert answer.refusal is not None
            self._busy = False
            self._forget_body(request)
            self._respond(request, answer.refusal)

    def _work(
        self,
        request: Request,
        work: Callable[[], Response],
        executor: Executor,
        lane: Lane | None = None,
    ) -> None:
        """Run ``work`` in a thread, which makes the response."""
        future = self._loop.run_in_executor(executor, work)
        future.add_done_callback(lambda done: self._answered(request, done, lane))

    def _answered(
        self, request: Request, done: asyncio.Future[Response], lane: Lane | None
    ) -> None:
        if lane is not None:
            lane.leave(request.client)
        self._busy = False
        self._forget_body(request)
        self._since = self._loop.time()
        response = done.result()
        if self._lost:
            if not isinstance(response.content, bytes):
                response.content.close()
            return
        self._respond(request, response)
        self._advance()

    def _respond(self, request: Request, response: Response) -> None:
        content = response.content
        if isinstance(content, bytes) and not self._hold(request.client, len(content)):
            response = self._shared.site.overload(request)
            content = response.content
        status = response.status
        if status == RESET:
            self._count(response, 0)
            self._reset()
            return
        if not request.keep_alive:
            self._ended = True
        size = len(content) if isinstance(content, bytes) else content.size
        head = self._head(request, response, size)
        if request.method == b"HEAD" or status in (204, 304):
            if not isinstance(content, bytes):
                content.close()
            content = b""
        if isinstance(content, bytes):
            self._write(response, head, content)
        elif size > LAST_PIECE:
            self._stream(request, response, head, content)
        else:
            self._read(response, head, content)

    def _write(self, response: Response, head: bytes, body: bytes) -> None:
        self._transport.write(head + body)
        self._release()
        self._count(response, len(body))

    def _hold(self, client: str, size: int) -> bool:
        """Return True if there is room for an answer that the client may be slow to take."""
        units = size // _UNIT
        if units and not self._shared.unsent.take(client, units):
            return False
        self._unsent += units
        self._unsent_of = client
        return True

    def _release(self) -> None:
        """Stop counting an answer that was sent, or is given up."""
        if self._unsent and (self._lost or self._transport.get_write_buffer_size() < _UNIT):
            self._shared.unsent.give_back(self._unsent_of, self._unsent)
            self._unsent = 0

    def _read(self, response: Response, head: bytes, content: Content) -> None:
        """Answer with a small file. If the file is not in memory, a thread reads it."""
        try:
            data = content.read_now()
        except OSError:
            data = None  # a read reports what is wrong
        if data is not None:
            content.close()
            self._write(response, head, data)
            return
        self._busy = True
        future = self._loop.run_in_executor(self._shared.executor, content.read)

        def has_read(done: asyncio.Future[bytes]) -> None:
            content.close()
            self._busy = False
            try:
                data = done.result()
            except (OSError, BuildIdFsError) as error:
                self._cut_off(error)
                return
            if not self._lost:
                self._write(response, head, data)
                self._advance()

        future.add_done_callback(has_read)

    def _head(self, request: Request, response: Response, size: int) -> bytes:
        headers = response.headers
        if not request.keep_alive:
            headers += b"Connection: close\r\n"
        elif self._parser.get_http_version() == "1.0":
            headers += b"Connection: keep-alive\r\n"
        length = None if response.status in (204, 304) else size
        return messages.head(response.status, headers, length)

    def _count(self, response: Response, size: int) -> None:
        seconds = time.perf_counter() - self._began
        self._shared.site.counters.response(response.kind, response.status, size, seconds)

    # --- files -------------------------------------------------------------------------------

    def _stream(self, request: Request, response: Response, head: bytes, content: Content) -> None:
        """Send a file when the client gets a download place."""
        self._busy = True
        self._waiting = content
        client = request.client

        def go() -> None:
            self._waiting = None
            task = self._loop.create_task(self._send(client, response, head, content))
            task.add_done_callback(self._streamed)

        self._shared.places.take(client, self, go)

    def _streamed(self, task: asyncio.Task[None]) -> None:
        self._busy = False
        self._since = self._loop.time()
        task.result()
        self._advance()

    async def _send(self, client: str, response: Response, head: bytes, content: Content) -> None:
        done = 0
        try:
            await self._flushed()
            if not self._lost:
                self._sending = os.dup(self._transport.get_extra_info("socket").fileno())
                self._sent = 0
                self._progress_made()
                done = await self._send_file(self._sending, head, content)
        except (BrokenPipeError, ConnectionError):
            self._reset()  # the client has all it wanted, or is gone
        except (OSError, BuildIdFsError) as error:
            self._cut_off(error)
        finally:
            content.close()
            fd, self._sending = self._sending, -1
            if fd >= 0:
                os.close(fd)
            self._shared.places.give_back(client)
            self._count(response, done)

    async def _send_file(self, fd: int, head: bytes, content: Content) -> int:
        """Send head and body; return the number of sent bytes of the body."""
        with socket.socket(fileno=os.dup(fd)) as sock:
            while head and not self._lost:
                try:
                    head = head[sock.send(head, socket.MSG_MORE | socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    await self._writable(fd)
        done = 0
        while done < content.size and not self._lost:
            done = await self._loop.run_in_executor(self._shared.executor, content.send, fd, done)
            self._sent = done
            if done < content.size:
                await self._writable(fd)
        return done

    def _cut_off(self, error: Exception) -> None:
        log.warning("a download was cut off: %s", error)
        self._reset()

    async def _flushed(self) -> None:
        """Wait until the transport has sent all its bytes, or the connection is lost."""
        if self._transport.get_write_buffer_size():
            self._transport.set_write_buffer_limits(0)
            while self._transport.get_write_buffer_size() and not self._lost:
                self._room = self._loop.create_future()
                await self._room
            self._room = None
            self._transport.set_write_buffer_limits()

    async def _writable(self, fd: int) -> None:
        """Wait until the socket takes more bytes, or the connection is lost."""
        self._room = self._loop.create_future()
        self._loop.add_writer(fd, self._wake)
        try:
            await self._room
        finally:
            self._room = None
            self._loop.remove_writer(fd)

    # --- the end -----------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End the connection if the client is too slow; ``now`` is the time of the loop."""
        age, timeout = now - self._since, self._shared.timeout
        self._release()
        if self._lingering:
            if age > _LINGER_S:
                self._transport.abort()
        elif self._busy or self._full:
            if age > timeout and (self._full or self._sending >= 0):
                taken = self._taken()
                if taken - self._progress < _PROGRESS_RATE * timeout:
                    self._reset()
                else:
                    self._since, self._progress = now, taken
        elif (self._is_head and age > min(HEAD_S, timeout)) or (self._is_body and age > timeout):
            self._refuse(408, "the request did not arrive in time")
            self._advance()
        elif age > IDLE_S:
            self._transport.abort()

    def _progress_made(self) -> None:
        self._since = self._loop.time()
        self._progress = self._taken()

    def _taken(self) -> int:
        """Return the number of bytes of the body that the client has acknowledged, as far as the
        socket shows.
        """
        fd = self._sending
        if fd < 0:
            return -self._transport.get_write_buffer_size()
        left = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, termios.TIOCOUTQ, left)
        return self._sent - left[0]

    def end_when_idle(self) -> None:
        """Read no more requests; close after the requests that were read are answered."""
        self._ended = True
        self._advance()

    def abort(self) -> None:
        """End the connection now."""
        self._reset()

    def _close(self) -> None:
        """Close the connection so that the client gets the last answer.

        If a socket is closed with unread bytes, the kernel resets the connection, and the answer is
        lost.
        """
        if self._transport.is_closing():
            return
        self._lingering = True
        self._since = self._loop.time()
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        try:
            if self._has_all:
                self._transport.close()
            else:
                self._transport.write_eof()
        except (OSError, RuntimeError):
            self._transport.abort()

    def _reset(self) -> None:
        """End the connection so that no client takes the answer as complete, or as an absence."""
        self._ended = True
        if self._lost:
            return
        sock = self._transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._lost = True  # a download ends before it sends more
        self._transport.abort()
        self._wake()


def _last_proxy(headers: Mapping[bytes, bytes]) -> str:
    """Return the client that is named by the last proxy, the one in front of a Unix socket."""
    value = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()[:64]
    return value.decode("ascii", "replace")
