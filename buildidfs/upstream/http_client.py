# SPDX-License-Identifier: Apache-2.0
"""Downloads over HTTP, with limits of time, bytes and redirects.

A server has a limited time from the request to the end of the head of its answer, redirects and
further attempts included. Its body has a deadline, too: the same time, and again for each
`_PROGRESS_BYTES` that have come, up to `_MOST_BODY_S`. The library limits single reads only, so an
`_Alarm` closes the sockets of a late request. Each thread has connections of its own, because the
library does not tell which connection a request uses.

A body is complete if it has the length in a header of the server. A compressed body is unpacked
piece by piece, and its unpacked size counts.
"""

from __future__ import annotations

import contextlib
import email.utils
import logging
import os
import socket
import ssl
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any, Final

import httpx2
import msgspec

from buildidfs import __version__
from buildidfs.backoff import Backoff
from buildidfs.linux import file_ops
from buildidfs.upstream.options import NotThere, Unacceptable, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_ATTEMPTS: Final = 3
_PAUSES: Final = Backoff(0.25, 5.0, jitter=0.5)
_REDIRECTS: Final = 5
_RING_S: Final = 0.1
_PROGRESS_BYTES: Final = 100 << 10
_MOST_BODY_S: Final = 3600.0
_PACKED_MORE: Final = 1 << 20
"""Bytes by which a compressed body may be larger than its content."""
_UNPACKED_PIECE: Final = 1 << 20
_WHY_BYTES: Final = 80

_GONE: Final = frozenset((404, 410))
_FORBIDDEN: Final = frozenset((401, 403, 407))
_REDIRECTING: Final = frozenset((301, 302, 303, 307, 308))
_TOO_LARGE: Final = 406


class DownloadedBody(msgspec.Struct, frozen=True):
    """A body that was written to a file; ``modified_ns`` is 0 if unknown."""

    size: int
    modified_ns: int


class HttpClient:
    """Connections to servers. Thread-safe. ``headers`` go to each host in a URL of the operator."""

    def __init__(self, timeout_s: float, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._timeout_s = timeout_s
        self._headers = tuple(headers)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._every: list[_Connections] = []
        self._context: ssl.SSLContext | None = None
        self._closed = False
        # Operators do not want a log line with the URL of each request.
        logging.getLogger("httpx2").setLevel(logging.WARNING)

    def download(
        self,
        url: str,
        fd: int,
        most: int,
        headers: Sequence[tuple[str, str]] = (),
        progress: Callable[[int], None] = lambda count: None,
    ) -> DownloadedBody:
        """Download a URL to an empty file, ``most`` bytes at most.

        Temporary failures are tried again. Raises `NotThere`, `Unacceptable`, `Unavailable`, and
        OSError of the file.
        """
        until = time.monotonic() + self._timeout_s
        for attempt in range(_ATTEMPTS):
            try:
                request = _Request(self, url, (*headers,), self._timeout_s, until)
                return request.run(fd, most, progress)
            except Unavailable as error:
                is_hopeless = not error.transient or error.after > _PAUSES.most
                error.hangs |= time.monotonic() >= until
                if is_hopeless or error.hangs or attempt + 1 == _ATTEMPTS or self._closed:
                    raise
                time.sleep(max(_PAUSES.delay(attempt), error.after))
                os.ftruncate(fd, 0)
                os.lseek(fd, 0, os.SEEK_SET)
        raise AssertionError("the last attempt returns or raises")

    def connections(self) -> _Connections:
        """Return the connections of the calling thread. Raises `Unavailable` after `close`."""
        found: _Connections | None = getattr(self._local, "connections", None)
        if found is None:
            with self._lock:
                if self._closed:
                    raise _closed()
                if self._context is None:
                    self._context = httpx2.create_ssl_context()
                found = self._local.connections = _Connections(self._context, self._timeout_s)
                self._every.append(found)
        return found

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Return the headers for hosts in URLs of the operator."""
        return self._headers

    def close(self) -> None:
        """Close all connections, in use or not; requests raise `Unavailable` from now on."""
        with self._lock:
            self._closed = True
            every, self._every = self._every, []
        for each in every:
            each.end()


class _Connections:
    """The connections of one thread, which has one request at a time."""

    def __init__(self, context: ssl.SSLContext, timeout_s: float) -> None:
        self.client = httpx2.Client(
            verify=context,
            timeout=timeout_s,
            headers={"User-Agent": f"buildidfs/{__version__}", "Accept-Encoding": "identity"},
        )
        self._sockets: list[socket.socket] = []
        self.is_ended = False

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Record a new connection; called by the library."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            found = info["return_value"].get_extra_info("socket")
            if isinstance(found, socket.socket):
                self._sockets = [each for each in self._sockets if each.fileno() >= 0]
                self._sockets.append(found)
                if self.is_ended:  # while this connection was made
                    self.cut()

    def end(self) -> None:
        """End all requests for good, from another thread."""
        self.is_ended = True
        self.cut()
        self.client.close()

    def cut(self) -> None:
        """End all requests, from another thread: calls that wait for a socket fail at once."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                # The method of the class, because a TLS socket would lose its state while it is
                # read.
                socket.socket.shutdown(each, socket.SHUT_RDWR)


class _Alarm:
    """Calls ``ring`` in a thread at the time ``until``, which may be put off meanwhile, and again
    and again from then on; a context manager.
    """

    def __init__(self, ring: Callable[[], None], until: float) -> None:
        self._ring = ring
        self._is_over = threading.Event()
        self.until = until
        self.has_rung = False

    def __enter__(self) -> _Alarm:
        threading.Thread(target=self._run, name="buildidfs-alarm", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _run(self) -> None:
        least = 0.0
        while not self._is_over.wait(max(self.until - time.monotonic(), least)):
            if time.monotonic() >= self.until:
                self.has_rung, least = True, _RING_S
                self._ring()


class _Request:
    """One attempt at a request. The head of its answer must come before ``until``."""

    def __init__(
        self,
        owner: HttpClient,
        url: str,
        headers: Sequence[tuple[str, str]],
        timeout_s: float,
        until: float,
    ) -> None:
        self._owner = owner
        self._connections = owner.connections()
        try:
            self._url = httpx2.URL(url)
        except httpx2.InvalidURL as error:
            raise _failure(error) from error
        self._headers = headers
        self._timeout_s = timeout_s
        self._alarm = _Alarm(self._connections.cut, until)
        self._late = f"no answer within {timeout_s:g} s"

    def run(self, fd: int, most: int, progress: Callable[[int], None]) -> DownloadedBody:
        """Download. Raises the errors of `HttpClient.download`."""
        with self._alarm, self._translated(), self._closing(self._answer()) as response:
            self._check_alarm()  # it may have rung before there was a socket
            self._late = f"sends less than {_PROGRESS_BYTES >> 10} KiB in {self._timeout_s:g} s"
            self._alarm.until = time.monotonic() + self._timeout_s
            _check_status(response)
            return self._body(response, fd, most, progress)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Translate the failures of the block."""
        try:
            yield
        except httpx2.TimeoutException as error:
            raise Unavailable(self._late, hangs=True) from error
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, ValueError) as error:
            self._check_alarm()
            raise _failure(error) from error
        except RuntimeError as error:
            if not self._connections.is_ended:
                raise
            raise _closed() from error

    @contextlib.contextmanager
    def _closing(self, response: httpx2.Response) -> Iterator[httpx2.Response]:
        try:
            yield response
        finally:
            with contextlib.suppress(httpx2.HTTPError, OSError):
                response.close()

    def _check_alarm(self) -> None:
        """Raise `Unavailable` if the request was late and its sockets were closed."""
        if self._alarm.has_rung:
            raise Unavailable(self._late, hangs=True)

    def _answer(self) -> httpx2.Response:
        """Return the head of the answer, after all redirects."""
        client, url = self._connections.client, self._url
        for _ in range(_REDIRECTS + 1):
            own = self._owner.headers if _origin(url) == _origin(self._url) else ()
            request = client.build_request(
                "GET",
                url,
                headers=[*own, *self._headers],
                extensions={"trace": self._connections.trace},
            )
            response = client.send(request, stream=True, follow_redirects=False)
            if response.status_code not in _REDIRECTING:
                return response
            to = url.join(response.headers.get("location", ""))
            response.close()
            if to.scheme not in ("http", "https") or (url.scheme, to.scheme) == ("https", "http"):
                raise Unavailable(
                    f"redirects from {url.scheme} to {to.scheme[:20]}, which is not allowed",
                    lasting=True,
                )
            url = to
        raise Unavailable(f"more than {_REDIRECTS} redirects", lasting=True)

    def _body(
        self, response: httpx2.Response, fd: int, most: int, progress: Callable[[int], None]
    ) -> DownloadedBody:
        claimed = _number(response.headers.get("x-debuginfod-size", ""))
        packing = response.headers.get("content-encoding", "identity").lower()
        if packing == "identity" and claimed is None:
            claimed = _number(response.headers.get("content-length", ""))
        if claimed is not None and claimed > most:
            raise _too_large(claimed, most)
        pieces = self._pieces(response, most + _PACKED_MORE)
        # S3 sends an object in the encoding in which it was stored, although we request none.
        if packing in ("gzip", "x-gzip"):
            pieces = _unpacked(pieces)
        elif packing != "identity":
            raise Unacceptable(f"sent a content encoding that was not requested: {packing[:20]!r}")
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > most:
                raise _too_large(None, most)
            file_ops.write_fully(fd, piece)
            progress(len(piece))
        if claimed is not None and size != claimed:
            raise Unavailable(f"sent only {size} of {claimed} bytes", transient=True)
        return DownloadedBody(size, _time(response.headers.get("last-modified", "")))

    def _pieces(self, response: httpx2.Response, most: int) -> Iterator[bytes]:
        """Yield the body as it comes, until its deadline, up to ``most`` bytes."""
        began, total = self._alarm.until - self._timeout_s, 0
        # as it comes, because the library would wait for pieces of a fixed size
        for piece in response.iter_raw():
            total += len(piece)
            if total > most:
                raise _too_large(None, most)
            yield piece
            seconds = self._timeout_s * (1 + total // _PROGRESS_BYTES)
            if seconds > _MOST_BODY_S:
                seconds, self._late = _MOST_BODY_S, f"sends for more than {_MOST_BODY_S:g} s"
            self._alarm.until = began + seconds
        self._check_alarm()  # a body without a length ends where its connection was closed


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    """Return scheme, host and port: the scope of the operator's headers."""
    return url.scheme, url.host, url.port


def _check_status(response: httpx2.Response) -> None:
    status = response.status_code
    if status == 200:
        return
    if status in _GONE:
        raise NotThere
    if status == _TOO_LARGE:
        raise Unacceptable("says that the file is larger than max-size")
    if status in _FORBIDDEN:
        raise Unavailable(f"refuses us: {_status_text(response)}", lasting=True)
    after = _number(response.headers.get("retry-after", "")) or 0
    transient = status == 429 or status >= 500
    raise Unavailable(f"answers {_status_text(response)}", transient=transient, after=after)


def _status_text(response: httpx2.Response) -> str:
    phrase = "".join(filter(str.isprintable, response.reason_phrase))
    return f"{response.status_code} {phrase}"[:_WHY_BYTES].rstrip()


def _closed() -> Unavailable:
    return Unavailable("the connections are closed", lasting=True)


def _failure(error: Exception) -> Unavailable:
    """Translate a failure of the network or the protocol into `Unavailable`."""
    if isinstance(error, ValueError | httpx2.InvalidURL | httpx2.UnsupportedProtocol):
        return Unavailable(f"leads to an invalid URL: {error}"[:_WHY_BYTES], lasting=True)
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Unavailable(f"has a certificate that is not valid: {cause.verify_message}")
        if isinstance(cause, socket.gaierror):
            return Unavailable(f"has no known address: {cause.strerror}", transient=True)
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ssl.SSLError):
            return Unavailable(f"cannot be reached: {cause.strerror}", transient=True)
        cause = cause.__cause__ or cause.__context__
    message = str(error) or type(error).__name__
    return Unavailable(f"fails: {message}"[:_WHY_BYTES], transient=True)


def _too_large(size: int | None, most: int) -> Unacceptable:
    sent = "more bytes" if size is None else f"a file of {size} bytes, more"
    return Unacceptable(f"sends {sent} than the {most} that are allowed (max-size, or a full disk)")


def _number(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else None


def _time(text: str) -> int:
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        seconds = email.utils.parsedate_to_datetime(text).timestamp()
        return int(max(seconds, 0)) * 1_000_000_000
    return 0


def _unpacked(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the content of a gzip stream, in pieces of bounded size.

    Archives may have several streams in a row (`capture.archive.stream.plain`), a response has one.
    """
    decoder = zlib.decompressobj(16 + zlib.MAX_WBITS)
    try:
        for piece in pieces:
            rest = piece
            while rest and not decoder.eof:
                yield decoder.decompress(rest, _UNPACKED_PIECE)
                rest = decoder.unconsumed_tail
            if decoder.eof:
                return  # the server may send other data for ever
    except zlib.error as error:
        raise Unacceptable(f"sent a damaged gzip stream: {error}") from error
    if not decoder.eof:
        raise Unavailable("sent only part of a gzip stream", transient=True)
