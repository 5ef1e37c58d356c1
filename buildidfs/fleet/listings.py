# SPDX-License-Identifier: Apache-2.0
"""Pages of listings of S3, read within bounds.

obstore reads no page with a key such as ``a//b`` or ``a/../b``, and drops the slash at the end of
``a/``. Any host can create such keys, so pages are read here: obstore only signs the request.
"""

from __future__ import annotations

import datetime
import http.client
import ssl
import time
import urllib.parse
from typing import TYPE_CHECKING, Final, NamedTuple
from xml.parsers import expat

if TYPE_CHECKING:
    from buildidfs.fleet.link import RequestLimits

_MOST_PAGE: Final = 8 << 20
_MOST_ERROR: Final = 16 << 10
_CHUNK: Final = 64 << 10

Row = tuple[str, int, float]
"""A key, the size of the object, and the time of its write (Unix time, s)."""


class ListingPage(NamedTuple):
    """The rows of a page, and the token for the next one, empty for the last page."""

    rows: list[Row]
    token: str


def page(url: str, limits: RequestLimits) -> ListingPage:
    """Return the page at a signed address.

    Keys with characters outside of ASCII are left out. Raises OSError, ValueError.
    """
    deadline = time.monotonic() + limits.timeout_s
    parts = urllib.parse.urlsplit(url)
    connection = _connection(parts.scheme, parts.hostname or "", parts.port, limits.connect_s)
    try:
        connection.connect()
        connection.sock.settimeout(limits.timeout_s)
        connection.request(
            "GET", f"{parts.path}?{parts.query}", headers={"User-Agent": "buildidfs"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read(_MOST_ERROR).decode(errors="replace")
            raise OSError(f"status code: {answer.status} {text}")
        parser = _Parser()
        left = _MOST_PAGE
        while data := answer.read1(_CHUNK):
            left -= len(data)
            if left < 0 or time.monotonic() > deadline:
                raise OSError("a page of a listing timed out, or is too large")
            parser.feed(data)
        return parser.page()
    except http.client.HTTPException as error:
        raise OSError(type(error).__name__) from error
    finally:
        connection.close()


def _connection(
    scheme: str, host: str, port: int | None, seconds: float
) -> http.client.HTTPConnection:
    if scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
    return http.client.HTTPConnection(host, port, timeout=seconds)


class _Parser:
    """Reads the XML of a page."""

    def __init__(self) -> None:
        self._parser = expat.ParserCreate()
        self._parser.buffer_text = True
        self._parser.StartElementHandler = self._start
        self._parser.EndElementHandler = self._end
        self._parser.CharacterDataHandler = self._text
        self._parser.StartDoctypeDeclHandler = self._refuse
        self._names: list[str] = []
        self._value = ""
        self._row: dict[str, str] = {}
        self._found: dict[str, str] = {}
        self._rows: list[dict[str, str]] = []

    def feed(self, data: bytes) -> None:
        """Take bytes of the page. Raises ValueError."""
        try:
            self._parser.Parse(data)
        except expat.ExpatError as error:
            raise ValueError("not the XML of a listing") from error

    def page(self) -> ListingPage:
        """Return the page when all bytes were fed. Raises ValueError."""
        try:
            self._parser.Parse(b"", True)
        except expat.ExpatError as error:
            raise ValueError("not the XML of a listing") from error
        is_encoded = self._found.get("EncodingType") == "url"
        rows = []
        for row in self._rows:
            key = row.get("Key", "")
            key = urllib.parse.unquote_plus(key) if is_encoded else key
            if key.isascii():
                modified = datetime.datetime.fromisoformat(row.get("LastModified", ""))
                rows.append((key, int(row.get("Size", "")), modified.timestamp()))
        more = self._found.get("IsTruncated") == "true"
        return ListingPage(rows, self._found.get("NextContinuationToken", "") if more else "")

    def _refuse(self, *_: object) -> None:
        raise ValueError("a listing declares entities")

    def _start(self, name: str, _: dict[str, str]) -> None:
        self._names.append(name)
        self._value = ""
        if len(self._names) > 8:
            raise ValueError("a listing is nested")

    def _text(self, text: str) -> None:
        self._value += text

    def _end(self, name: str) -> None:
        outer = self._names[1:-1]
        self._names.pop()
        if outer == ["Contents"]:
            self._row[name] = self._value
        elif name == "Contents" and not outer:
            self._rows.append(self._row)
            self._row = {}
        elif not outer:
            self._found[name] = self._value
