# SPDX-License-Identifier: Apache-2.0
"""Requests and responses as values, and the parts of HTTP that a parser does not handle.

Source: RFC 9110 (ranges, conditions, content codings), RFC 3986 (percent-encoding).
"""

from __future__ import annotations

import functools
import re
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote_to_bytes

import msgspec

from buildidfs.serve.content import Content

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_TARGET: Final = 13 << 10
"""The longest request target in bytes: PATH_MAX, all of it percent-encoded, and an ID."""

MAX_BODY: Final = 2 << 20
"""The longest request body in bytes: stacks of a hundred thousand frames."""

_ESCAPE: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_RANGE: Final = re.compile(rb"bytes=[ \t]*(\d{0,19})-(\d{0,19})[ \t]*")
_CODING: Final = re.compile(
    rb"[ \t]*([!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*(?:;[ \t]*q=([01](?:\.\d{0,3})?)[ \t]*)?"
)
_NUMBER: Final = re.compile(rb"\s*(\d{1,19})\s*")

REASONS: Final = {
    200: b"OK",
    204: b"No Content",
    206: b"Partial Content",
    302: b"Found",
    304: b"Not Modified",
    400: b"Bad Request",
    404: b"Not Found",
    405: b"Method Not Allowed",
    406: b"Not Acceptable",
    408: b"Request Timeout",
    413: b"Content Too Large",
    414: b"URI Too Long",
    415: b"Unsupported Media Type",
    416: b"Range Not Satisfiable",
    421: b"Misdirected Request",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}


class BadRequest(Exception):
    """An invalid request; the message is for the client."""


class Request(msgspec.Struct):
    """One request. Names of headers are in lower case; ``path`` is decoded, ``query`` is not.

    ``client`` is the client to which limits apply.
    """

    method: bytes
    target: bytes
    headers: dict[bytes, bytes]
    keep_alive: bool = True
    body: bytes = b""
    client: str = ""
    path: bytes = b""
    query: bytes = b""

    def header(self, name: bytes) -> bytes:
        """Return the value of a header; empty if there is none."""
        return self.headers.get(name, b"")


class Response(msgspec.Struct):
    """One answer. ``headers`` are whole lines (`lines`), without those that every answer has.

    ``content`` is the body; a response to HEAD has one as well, which is not sent. ``kind`` is the
    type of the request in metrics. Status `RESET` resets the connection, which no client takes for
    an answer.
    """

    status: int
    content: bytes | Content = b""
    headers: bytes = b""
    kind: str = ""


RESET: Final = 0


UPSTREAM, SYMBOLS, PAGES, SEARCHES = "upstream", "symbols", "pages", "searches"
"""The lanes of `Waiting`: for upstream servers, the symbolizer, pages, and work that
takes seconds.
"""


class Waiting:
    """A function that takes long to make a response, so clients take turns in a lane.

    ``kind`` is the type of the response that says that too many wait.
    """

    __slots__ = ("_work", "kind", "lane", "refusal")

    def __init__(
        self, work: Callable[[], Response], lane: str, kind: str, refusal: Response | None = None
    ) -> None:
        """`Site` sets the ``refusal``."""
        self._work = work
        self.lane = lane
        self.kind = kind
        self.refusal = refusal

    def __call__(self) -> Response:
        return self._work()


class NotNow(Exception):
    """Raised if the store lacks a file, and no server can say now if it has the file.

    ``str()`` is for the client.
    """


if TYPE_CHECKING:
    Answer = Response | Callable[[], Response]
    """A response; or a function that makes it, which may wait for a disk, or (`Waiting`) longer."""


def lines(*headers: tuple[bytes, bytes]) -> bytes:
    """Return headers in the form in which they are sent."""
    return b"".join([b"%s: %s\r\n" % pair for pair in headers])


_TEXT: Final = lines((b"Content-Type", b"text/plain; charset=utf-8"))


def text(status: int, message: str, headers: bytes = b"", kind: str = "") -> Response:
    """Return a response with a text."""
    return Response(status, message.encode() + b"\n", _TEXT + headers, kind)


def parse_target(target: bytes) -> tuple[bytes, bytes]:
    """Split a request target into path and query; the path is decoded, and begins with one slash.

    Raises `BadRequest`.
    """
    if target[:1] != b"/":
        raise BadRequest("the request target is not a path")
    path, _, query = target.partition(b"?")
    if b"%" in path:
        path = decode(path)
    elif b"\0" in path:
        raise BadRequest("the path contains a NUL")
    if path[:2] == b"//":  # clients append the path to a base that ends with a slash
        path = b"/" + path.lstrip(b"/")
    return path, query


def decode(text: bytes) -> bytes:
    """Remove percent-encoding. Raises `BadRequest`."""
    if _ESCAPE.search(text):
        raise BadRequest("a percent sign is not followed by two hexadecimal digits")
    plain = unquote_to_bytes(text)
    if b"\0" in plain:
        raise BadRequest("the path contains a NUL")
    return plain


def parse_query(query: bytes) -> dict[bytes, bytes]:
    """Return the parameters of a query, the first value of each. Raises `BadRequest`."""
    found: dict[bytes, bytes] = {}
    for part in query.split(b"&", 32)[:32]:
        name, _, value = part.replace(b"+", b" ").partition(b"=")
        found.setdefault(decode(name), decode(value))
    return found


def parse_range(value: bytes, size: int) -> tuple[int, int] | None:
    """Return first byte and length of the requested range; None if the whole body is to be sent.

    Several ranges, other units and malformed ranges mean the whole body, as RFC 9110 allows. If the
    range cannot be satisfied, the length is 0.
    """
    match = _RANGE.fullmatch(value)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        length = min(int(match[2]), size)
        return size - length, length
    first = int(match[1])
    last = min(int(match[2]), size - 1) if match[2] else size - 1
    if match[2] and int(match[2]) < first:
        return None  # malformed
    return (0, 0) if first >= size else (first, last - first + 1)


def accepts_zstd(value: bytes) -> bool:
    """Return True if an Accept-Encoding has ``zstd``, or ``*``, with a quality above 0."""
    anything = False
    for part in value.split(b",", 64)[:64]:
        match = _CODING.fullmatch(part)
        if match is None:
            continue
        wanted = match[2] is None or float(match[2]) > 0
        if match[1].lower() == b"zstd":
            return wanted
        if match[1] == b"*":
            anything = wanted
    return anything


def matches(value: bytes, tag: bytes, *, weak: bool = True) -> bool:
    """Return True if an If-None-Match (or, not ``weak``, If-Range) names an entity tag."""
    if value.strip() == b"*":
        return weak
    for part in value.split(b",", 256)[:256]:
        part = part.strip()
        if part == tag or (weak and part == b"W/" + tag):
            return True
    return False


def number(value: bytes) -> int | None:
    """Return the number in a header; None for anything else."""
    match = _NUMBER.fullmatch(value)
    return None if match is None else int(match[1])


def http_date(seconds: float) -> bytes:
    """Return a Unix time in the form of HTTP."""
    # Other programs refuse years without four digits.
    return formatdate(min(max(int(seconds), 0), 253_402_300_799), usegmt=True).encode()


@functools.lru_cache(maxsize=1)
def _date(seconds: int) -> bytes:
    return http_date(seconds)


def header_text(value: bytes) -> bytes:
    """Return bytes as the value of a header: bytes that end it, or control a terminal,
    are escaped.
    """
    return b"".join(
        byte if 0x20 <= byte[0] < 0x7F or byte[0] >= 0xA0 else b"\\x%02x" % byte[0]
        for byte in (value[i : i + 1] for i in range(len(value)))
    )


_STATUS_LINES: Final = {
    status: b"HTTP/1.1 %d %s\r\n" % (status, reason) for status, reason in REASONS.items()
}


def head(status: int, headers: bytes, length: int | None) -> bytes:
    """Return the head of a response; without a ``length`` it has no body."""
    end = b"Date: %s\r\n" % _date(int(time.time()))
    if length is not None:
        end += b"Content-Length: %d\r\n" % length
    return _STATUS_LINES[status] + headers + end + b"\r\n"


def path_of(request: Request) -> bytes:
    """Return the path of a request for the log. A query may have secrets."""
    return request.target.partition(b"?")[0][:200]
