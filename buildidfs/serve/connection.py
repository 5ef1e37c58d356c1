# SPDX-License-Identifier: Apache-2.0
"""One client's connection: its limits, the way of each answer, and the sending of files.

aiohttp reads requests (with llhttp, the parser of Node.js), queues them, and keeps connections
open. This class makes an answer of each request, bounds what a client may send and how slowly it
may receive, and resets a connection instead of an answer that is not authoritative.

Small answers go through the transport. For a file the connection uses its socket directly: a thread
sends as much as the socket takes, and the loop waits until it takes more. `Connection.check` is
called every other second, and ends slow connections, so that requests need no timers.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
import time
from typing import TYPE_CHECKING, Any, Final, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD

from buildidfs.client_limits import is_own
from buildidfs.errors import BuildIdFsError
from buildidfs.serve import messages
from buildidfs.serve.content import LAST_PIECE
from buildidfs.serve.messages import RESET, Request, Response, Waiting
from buildidfs.shares import Quota

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping
    from concurrent.futures import Executor

    from aiohttp.streams import StreamReader

    from buildidfs.client_limits import Lane, Places, Rate
    from buildidfs.serve.content import Content
    from buildidfs.serve.site import Site

T = TypeVar("T")

log = logging.getLogger(__name__)

_MOST_HEAD: Final = 32 << 10
_MOST_HEADERS: Final = 100

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

_OPTIONS: Final[dict[str, Any]] = {
    "keepalive_timeout": IDLE_S,
    "lingering_time": _LINGER_S,
    "max_line_size": messages.MAX_TARGET,
    "max_headers": _MOST_HEADERS,
    "max_field_size": _MOST_HEAD,
    "auto_decompress": False,
    "logger": log,
    "access_log": None,
}

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


_CLOSE: Final = b"Connection: close\r\n"


class _Sent(web.StreamResponse):
    """Reports to aiohttp that the connection has sent the answer itself."""

    def __init__(self, *, keep_alive: bool) -> None:
        super().__init__()
        self._keep_alive = keep_alive

    async def prepare(self, request: web.BaseRequest) -> None:
        """Do nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Do nothing."""


_SENT: Final = {keep_alive: _Sent(keep_alive=keep_alive) for keep_alive in (False, True)}


class _Refusal(_Sent):
    """The answer to a request that aiohttp cannot read."""

    def __init__(
        self, connection: Connection, status: int, message: str, target: bytes = b""
    ) -> None:
        super().__init__(keep_alive=False)
        self._refuse = connection.refuse(status, message, target)

    async def prepare(self, request: web.BaseRequest) -> None:
        await self._refuse


class _Refused(Exception):
    """Raised for a request whose body is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


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
        self._most = most

    def admit(self, client: str) -> bool:
        """Return True if the client may have a further connection.

        A proxy in front of a Unix socket has no limit of its own.
        """
        return not client or self._most.take(client)

    def leave(self, client: str) -> None:
        """Stop counting an admitted connection."""
        if client:
            self._most.give_back(client)


class HttpServer(web.Server):
    """Makes the connections of a listening socket."""

    def __init__(
        self,
        shared: Shared,
        client_of: Callable[[asyncio.BaseTransport], str],
        hosts: frozenset[str] | None = None,
    ) -> None:
        """``client_of`` returns the client of a transport; "" means that the last proxy
        names it. With ``hosts``, a request must be for one of these names (`is_own`).
        """
        super().__init__(_answer)
        self.shared = shared
        self.client_of = client_of
        self.hosts = hosts

    def __call__(self) -> Connection:
        return Connection(self)

    def check(self, now: float) -> None:
        """End slow connections; ``now`` is the time of the loop."""
        for connection in self.connections:
            assert isinstance(connection, Connection)
            connection.check(now)


async def _answer(request: web.BaseRequest) -> web.StreamResponse:
    connection = request.protocol
    assert isinstance(connection, Connection)
    return await connection.answer(request)


class Connection(web.RequestHandler):
    """One client's connection."""

    def __init__(self, server: HttpServer) -> None:
        self._shared = server.shared
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self._server = server
        self._has_all = False
        """True if the client has ended its side."""
        self._is_refused = False
        self._room: asyncio.Future[None] | None = None
        self._place: asyncio.Future[bool] | None = None
        self._sending = -1
        self._sent = 0
        self._since = self._loop.time()
        self._began = 0.0
        self._progress = 0
        self._head_bytes = 0
        """The number of bytes that belong to no request yet, and to no body."""
        self._body: StreamReader = EMPTY_PAYLOAD
        """The body of the last request, perhaps still incomplete."""
        self._admitted = False
        self._unsent = 0
        self._unsent_of = ""
        self.client = ""

    # --- calls of the transport ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.client = self._server.client_of(transport)
        super().connection_made(transport)
        self._admitted = self._shared.admit(self.client)
        if not self._admitted:
            self.reset()

    def connection_lost(self, error: BaseException | None) -> None:
        super().connection_lost(error)
        if self._admitted:
            self._shared.leave(self.client)
        self._release()
        if self._place is not None and self._shared.places.forget(self):
            self._place.set_result(False)
        self._wake()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._head_bytes and self._is_idle:
            self._since = self._loop.time()
        before = self._request_count, self._body.total_bytes
        super().data_received(data)
        if self._messages:
            self._body = self._messages[-1][1]
        if before != (self._request_count, self._body.total_bytes):
            self._head_bytes = 0
            return
        self._head_bytes += len(data)
        if self._head_bytes > _MOST_HEAD:
            self._refuse_now(431, "the head of the request is too long")

    @property
    def _is_idle(self) -> bool:
        """True if no request waits for an answer."""
        return self._waiter is not None and not self._waiter.done()

    def eof_received(self) -> Any:
        """Keep the connection of a client that has ended its side, until all its requests are
        answered.
        """
        self._has_all = True
        if self._is_refused:
            self._wake()
        if self._is_idle or not self._body.is_eof():
            return False
        if not self._messages:
            self.close()  # when the answer that is being made is sent
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._progress_made()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._release()
        self._wake()

    def _wake(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    async def _wait(self) -> None:
        """Wait for a call of `_wake`."""
        self._room = self._loop.create_future()
        try:
            await self._room
        finally:
            self._room = None

    @property
    def _lost(self) -> bool:
        return self.transport is None

    # --- requests ----------------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Refuse a request that aiohttp cannot read; the connection ends after any other error."""
        if isinstance(exc, LineTooLong):
            begin, limit = exc.args[:2]
            if str(limit) == str(messages.MAX_TARGET):
                return _Refusal(self, 414, "the request target is too long", bytes(begin))
            return _Refusal(self, 431, "the head of the request is too long")
        if isinstance(exc, HttpProcessingError):
            if "Too many headers" in exc.message:
                return _Refusal(self, 431, "the request has too many headers")
            return _Refusal(self, 400, "this is not HTTP/1.1")
        log.error("a fault of this program", exc_info=exc)
        self.reset()
        return _SENT[False]

    async def answer(self, message: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, and report to aiohttp that it is answered."""
        self._began = time.perf_counter()
        headers: dict[bytes, bytes] = {}
        for name, value in message.raw_headers:
            name = name.lower()
            known = headers.get(name)
            headers[name] = value if known is None else known + b", " + value
        client = self.client or _last_proxy(headers) or "local"
        method, keep = message.method.encode(), message.keep_alive
        request = Request(
            method, message.path_qs.encode("utf-8", "surrogateescape"), headers, keep, b"", client
        )
        try:
            response = await self._response(request, message)
            if response is not None:
                await self._respond(request, message, response)
        finally:
            self._shared.bodies.give_back(client, len(request.body))
            self._since = self._loop.time()
        if self._has_all and not self._messages:
            request.keep_alive = False
        return _SENT[request.keep_alive]

    async def _response(self, request: Request, message: web.BaseRequest) -> Response | None:
        """Return the response to a request; None if the connection is lost."""
        delay = self._shared.rate.delay(request.client)
        if delay:
            await self._while_paused(asyncio.sleep(delay))
        try:
            self._check_host(request)
            await self._read_body(request, message)
        except _Refused as error:
            request.keep_alive = False
            return self._shared.site.refusal(request.target, error.status, str(error))
        answer = self._shared.site.answer(request)
        if isinstance(answer, Response):
            return answer
        response = await self._while_paused(self._made(request, answer))
        if self._lost and response is not None and not isinstance(response.content, bytes):
            response.content.close()
        return None if self._lost else response

    async def _while_paused(self, work: Coroutine[Any, Any, T]) -> T:
        """Read nothing from the client until ``work`` is done."""
        if self.transport is not None:
            self.transport.pause_reading()
        try:
            return await work
        finally:
            if self.transport is not None and not self._buffer_paused:
                self.transport.resume_reading()

    def _check_host(self, request: Request) -> None:
        hosts = self._server.hosts
        if hosts is not None and not is_own(request.header(b"host"), hosts):
            raise _Refused(
                421, "this server is not known by that name; see hosts in buildidfs.toml"
            )

    async def _read_body(self, request: Request, message: web.BaseRequest) -> None:
        """Read the body of a request. Raises `_Refused`."""
        content = message.content
        if not message.body_exists:
            return
        site, bodies = self._shared.site, self._shared.bodies
        most = site.most_body(request.target) if request.method == b"POST" else 0
        if not most:
            raise _Refused(413, "no request has a body here")
        body = bytearray()

        def make_room(more: int) -> None:
            if len(body) + more > most:
                raise _Refused(413, f"the body is longer than {most} bytes")
            if not bodies.has(request.client, more):
                raise _Refused(503, "too many requests at once")

        make_room(messages.number(request.header(b"content-length")) or 0)
        if request.header(b"expect").lower() == b"100-continue" and self.transport is not None:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        try:
            async with asyncio.timeout(self._shared.timeout):
                while data := await content.readany():
                    make_room(len(data))
                    bodies.take(request.client, len(data))
                    body += data
            request.body = bytes(body)
        except (ConnectionError, web.RequestPayloadError):
            raise _Refused(400, "this is not HTTP/1.1") from None
        except TimeoutError:
            raise _Refused(408, "the request did not arrive in time") from None
        finally:
            if not request.body:
                bodies.give_back(request.client, len(body))

    async def _made(self, request: Request, work: Callable[[], Response]) -> Response | None:
        """Run ``work``, which makes the response, in a thread when it is the client's turn."""
        self._progress_made()
        if not isinstance(work, Waiting):
            return await self._loop.run_in_executor(self._shared.executor, work)
        lane = self._shared.lanes[work.lane]
        turn: asyncio.Future[bool] = self._loop.create_future()

        def begin() -> bool:
            turn.set_result(not self._lost)
            return not self._lost

        if not lane.enter(request.client, begin):
            return work.refusal
        if not await turn:
            return None
        try:
            return await self._loop.run_in_executor(lane.executor, work)
        finally:
            lane.leave(request.client)

    # --- answers -----------------------------------------------------------------------------

    async def _respond(
        self, request: Request, message: web.BaseRequest, response: Response
    ) -> None:
        content = response.content
        if isinstance(content, bytes) and not self._hold(request.client, len(content)):
            response = self._shared.site.overload(request)
            content = response.content
        log.debug("%s: answered with %d", messages.path_of(request), response.status)
        if response.status == RESET:
            self._count(response, 0)
            self.reset()
            return
        size = len(content) if isinstance(content, bytes) else content.size
        head = _head(message, request, response, size)
        if request.method == b"HEAD" or response.status in (204, 304):
            if not isinstance(content, bytes):
                content.close()
            content = b""
        if isinstance(content, bytes):
            await self._write(response, head, content)
        elif size > LAST_PIECE:
            await self._while_paused(self._send(request.client, response, head, content))
        else:
            await self._read(response, head, content)

    async def _write(self, response: Response, head: bytes, body: bytes) -> None:
        while self.writing_paused and not self._lost:
            await self._while_paused(self._wait())
        if self.transport is not None:
            self.transport.write(head + body)
            self._count(response, len(body))
        self._release()

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
        transport = self.transport
        if self._unsent and (transport is None or transport.get_write_buffer_size() < _UNIT):
            self._shared.unsent.give_back(self._unsent_of, self._unsent)
            self._unsent = 0

    async def _read(self, response: Response, head: bytes, content: Content) -> None:
        """Answer with a small file. If the file is not in memory, a thread reads it."""
        try:
            try:
                data = content.read_now()
            except OSError:
                data = None  # a read reports what is wrong
            if data is None:
                data = await self._loop.run_in_executor(self._shared.executor, content.read)
        except (OSError, BuildIdFsError) as error:
            self._cut_off(error)
            return
        finally:
            content.close()
        await self._write(response, head, data)

    def _count(self, response: Response, size: int) -> None:
        seconds = time.perf_counter() - self._began
        self._shared.site.counters.response(response.kind, response.status, size, seconds)

    # --- files -------------------------------------------------------------------------------

    async def _send(self, client: str, response: Response, head: bytes, content: Content) -> None:
        """Send a file when the client gets a download place."""
        done = 0
        try:
            if not await self._take_place(client):
                return
            try:
                done = await self._send_file(head, content)
            finally:
                self._shared.places.give_back(client)
                self._count(response, done)
        except ConnectionError:
            self.reset()  # the client has all it wanted, or is gone
        except (OSError, BuildIdFsError) as error:
            self._cut_off(error)
        finally:
            content.close()

    async def _take_place(self, client: str) -> bool:
        """Wait for a download place; return False if the connection is lost."""
        place: asyncio.Future[bool] = self._loop.create_future()
        self._place = place
        self._shared.places.take(client, self, lambda: place.set_result(True))
        try:
            return await place
        finally:
            self._place = None

    async def _send_file(self, head: bytes, content: Content) -> int:
        """Send head and body; return the number of sent bytes of the body."""
        transport = self.transport
        if transport is None:
            return 0
        transport.set_write_buffer_limits(0)
        while transport.get_write_buffer_size() and not self._lost:
            await self._wait()
        if self._lost:
            return 0
        transport.set_write_buffer_limits()
        with transport.get_extra_info("socket").dup() as sock:
            self._sending = sock.fileno()
            self._sent = done = 0
            self._progress_made()
            try:
                while head and not self._lost:
                    try:
                        head = head[sock.send(head, socket.MSG_MORE | socket.MSG_NOSIGNAL) :]
                    except BlockingIOError:
                        await self._writable(self._sending)
                while done < content.size and not self._lost:
                    done = await self._loop.run_in_executor(
                        self._shared.executor, content.send, self._sending, done
                    )
                    self._sent = done
                    if done < content.size:
                        await self._writable(self._sending)
            finally:
                self._sending = -1
        return done

    async def _writable(self, fd: int) -> None:
        """Wait until the socket takes more bytes, or the connection is lost."""
        if self._lost:
            return
        self._loop.add_writer(fd, self._wake)
        try:
            await self._wait()
        finally:
            self._loop.remove_writer(fd)

    def _cut_off(self, error: Exception) -> None:
        log.warning("a download was cut off: %s", error)
        self.reset()

    # --- the end -----------------------------------------------------------------------------

    def check(self, now: float) -> None:
        """End the connection if the client is too slow; ``now`` is the time of the loop."""
        age, timeout = now - self._since, self._shared.timeout
        self._release()
        if self._is_refused or self._lost:
            return
        if self.writing_paused or self._sending >= 0:
            if age > timeout:
                taken = self._taken()
                if taken - self._progress < _PROGRESS_RATE * timeout:
                    self.reset()
                else:
                    self._since, self._progress = now, taken
        elif self._is_idle and self._head_bytes and age > min(HEAD_S, timeout):
            self._refuse_now(408, "the request did not arrive in time")

    def _progress_made(self) -> None:
        self._since = self._loop.time()
        self._progress = self._taken()

    def _taken(self) -> int:
        """Return the number of bytes of the body that the client has acknowledged, as far as the
        socket shows.
        """
        fd = self._sending
        if fd < 0:
            return 0 if self.transport is None else -self.transport.get_write_buffer_size()
        left = array.array("i", [0])
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, termios.TIOCOUTQ, left)
        return self._sent - left[0]

    def _refuse_now(self, status: int, message: str) -> None:
        """Refuse a request that aiohttp still reads, if no answer is being made."""
        if not self._is_idle:
            self.reset()
            return
        task = self._loop.create_task(self.refuse(status, message))
        task.add_done_callback(lambda _: self.force_close())

    async def refuse(self, status: int, message: str, target: bytes = b"") -> None:
        """Answer a request that is not read to its end, and end our side of the connection.

        If a socket is closed with unread bytes, the kernel resets the connection, and the answer is
        lost. So bytes of the client are read and dropped for a while.
        """
        self._is_refused = True
        self._began = time.perf_counter()
        refusal = self._shared.site.refusal(target, status, message)
        assert isinstance(refusal.content, bytes)
        length = len(refusal.content)
        head = messages.head(status, refusal.headers + _CLOSE, length)
        await self._write(refusal, head, refusal.content)
        if self.transport is None or self._has_all:
            return
        with contextlib.suppress(OSError, RuntimeError):
            self.transport.write_eof()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                await self._wait()

    def reset(self) -> None:
        """End the connection so that no client takes the answer as complete, or as an absence."""
        transport = self.transport
        if transport is None:
            return
        sock = transport.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()
        self.force_close()
        self._wake()


def _head(message: web.BaseRequest, request: Request, response: Response, size: int) -> bytes:
    headers = response.headers
    if not request.keep_alive:
        headers += _CLOSE
    elif message.version.minor == 0:
        headers += b"Connection: keep-alive\r\n"
    length = None if response.status in (204, 304) else size
    return messages.head(response.status, headers, length)


def _last_proxy(headers: Mapping[bytes, bytes]) -> str:
    """Return the client that is named by the last proxy, the one in front of a Unix socket."""
    value = headers.get(b"x-forwarded-for", b"").rpartition(b",")[2].strip()[:64]
    return value.decode("ascii", "replace")
