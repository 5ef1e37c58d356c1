# SPDX-License-Identifier: Apache-2.0
"""Object storage with the interface of S3, in memory, that counts and can be made to fail.

It does what `buildidfs.fleet` asks of it: conditional PUT, GET and HEAD with ranges and
conditions, copies, uploads in parts, listings, deletion. Signatures are not checked, only the name
of the key in them. Tests against Ceph show that the real thing agrees.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import re
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from xml.sax.saxutils import escape

KEY, SECRET = "key-of-a-test", "secret-of-a-test"

_CREDENTIAL = re.compile(r"Credential=([^/]+)/")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


FLOODS = ("range", "whole", "chunked", "missing", "failing", "listing", "pages", "headers")
_FLOOD_BYTES = 6 << 30


class Stored(NamedTuple):
    """An object."""

    data: bytes
    metadata: dict[str, str]
    modified: datetime.datetime
    etag: str


class Asked(NamedTuple):
    """A request: method, key, and the number of bytes of the answer's body."""

    method: str
    key: str
    size: int


class ObjectStorage(ThreadingHTTPServer):
    """A server of buckets on a port of its own. ``buckets`` may be changed at any time.

    ``listing`` names further rows of a listing. ``fault`` is asked before each request: a status to
    answer with, -1 to drop the connection, 0 to go on. ``requests`` has what was answered. Without
    a key anybody may read, if ``public``. ``flood`` is asked, too, and names an answer without end:
    one of `FLOODS`, or an empty text for the usual answer.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *buckets: str, address: str = "127.0.0.1") -> None:
        super().__init__((address, 0), _Handler)
        self.buckets: dict[str, dict[str, Stored]] = {name: {} for name in buckets}
        self.parts: dict[str, tuple[dict[int, bytes], dict[str, str]]] = {}
        self.fault: Callable[[str, str], int] = lambda method, key: 0
        self.requests: list[Asked] = []
        self.public = True
        self.flood: Callable[[str, str], str] = lambda method, key: ""
        self.listing: Callable[[str], list[str]] = lambda prefix: []
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """Report a fault, unless a client was killed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def environ(self) -> dict[str, str]:
        """The environment of a client."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def count(self, method: str, prefix: str = "") -> int:
        """The number of requests with a method for keys that begin so."""
        return sum(each.method == method and each.key.startswith(prefix) for each in self.requests)

    def sent(self, prefix: str = "") -> int:
        """The number of bytes that were sent of objects whose keys begin so."""
        return sum(each.size for each in self.requests if each.key.startswith(prefix))


@contextlib.contextmanager
def object_storage(*buckets: str, address: str = "127.0.0.1") -> Iterator[ObjectStorage]:
    """Serve buckets while the block runs."""
    server = ObjectStorage(*buckets, address=address)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ObjectStorage

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        name, _, self.key = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.key)
        if fault < 0:
            self.close_connection = True
            return
        if fault:
            self._fail(fault, "Fault")
            return
        flood = self.server.flood(self.command, self.key)
        if flood:
            self._flood(flood)
            return
        given = _CREDENTIAL.search(self.headers.get("Authorization", ""))
        if given is None and not (self.server.public and self.command in ("GET", "HEAD")):
            self._fail(403, "AccessDenied")
        elif given is not None and given[1] != KEY:
            self._fail(403, "InvalidAccessKeyId")
        elif name not in self.server.buckets:
            self._fail(404, "NoSuchBucket")
        else:
            self.objects = self.server.buckets[name]
            getattr(self, f"_{self.command.lower()}")()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    # --- reading -----------------------------------------------------------------------------

    def _get(self) -> None:
        if not self.key:
            self._list()
            return
        found = self.objects.get(self.key)
        if found is None:
            self._fail(404, "NoSuchKey")
            return
        if self.headers.get("If-Match", found.etag) != found.etag:
            self._fail(412, "PreconditionFailed")
            return
        headers = {
            "ETag": found.etag,
            "Last-Modified": found.modified.strftime("%a, %d %b %Y %H:%M:%S GMT"),
            "Accept-Ranges": "bytes",
            **{f"x-amz-meta-{name}": value for name, value in found.metadata.items()},
        }
        part = _RANGE.fullmatch(self.headers.get("Range", ""))
        if part is None:
            self._answer(200, found.data, headers)
            return
        first = int(part[1])
        last = min(int(part[2] or len(found.data)), len(found.data) - 1)
        if first > last:
            self._fail(416, "InvalidRange")
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(found.data)}"
        self._answer(206, found.data[first : last + 1], headers)

    _head = _get

    def _list(self) -> None:
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        prefix, most = self.query.get("prefix", ""), int(self.query.get("max-keys", 1000))
        keys = sorted(key for key in [*self.objects] if key.startswith(prefix) and key > after)
        named = [(key, self.objects[key]) for key in keys[:most]]
        named += [(key, _stored(b"", {})) for key in self.server.listing(prefix)]
        rows = [
            f"<Contents><Key>{escape(key)}</Key>"
            f"<LastModified>{stored.modified.isoformat()}Z</LastModified>"
            f"<ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{len(stored.data)}</Size></Contents>"
            for key, stored in named
        ]
        more = len(keys) > most
        token = escape(keys[most - 1]) if more else ""
        text = (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"<NextContinuationToken>{token}</NextContinuationToken>"
            f"{''.join(rows)}</ListBucketResult>"
        )
        self._answer(200, text.encode())

    # --- writing -----------------------------------------------------------------------------

    def _put(self) -> None:
        metadata = {
            name[11:].lower(): value
            for name, value in self.headers.items()
            if name.lower().startswith("x-amz-meta-")
        }
        data = self.body
        if "uploadId" in self.query:
            number = int(self.query["partNumber"])
            self.server.parts[self.query["uploadId"]][0][number] = data
            self._answer(200, headers={"ETag": _etag(data)})
            return
        source = urllib.parse.unquote(self.headers.get("x-amz-copy-source", ""))
        with self.server.lock:
            if source:
                name, _, key = source.lstrip("/").partition("/")
                original = self.server.buckets.get(name, {}).get(key)
                if original is None:
                    self._fail(404, "NoSuchKey")
                    return
                if key == self.key:
                    self._fail(400, "InvalidRequest")
                    return
                data, metadata = original.data, original.metadata
            if self.headers.get("If-None-Match") == "*" and self.key in self.objects:
                self._fail(412, "PreconditionFailed")
                return
            self.objects[self.key] = _stored(data, metadata)
        text = f"<CopyObjectResult><ETag>{escape(_etag(data))}</ETag></CopyObjectResult>"
        self._answer(200, text.encode() if source else b"", {"ETag": _etag(data)})

    def _post(self) -> None:
        if "delete" in self.query:
            keys = re.findall(r"<Key>([^<]+)</Key>", self.body.decode())
            for key in keys:
                self.objects.pop(key, None)
            rows = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{rows}</DeleteResult>".encode())
        elif "uploads" in self.query:
            upload = uuid.uuid4().hex
            metadata = {
                name[11:].lower(): value
                for name, value in self.headers.items()
                if name.lower().startswith("x-amz-meta-")
            }
            self.server.parts[upload] = ({}, metadata)
            text = (
                "<InitiateMultipartUploadResult>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            )
            self._answer(200, text.encode())
        else:
            parts, metadata = self.server.parts.pop(self.query["uploadId"])
            data = b"".join(parts[number] for number in sorted(parts))
            self.objects[self.key] = _stored(data, metadata, f'"{uuid.uuid4().hex}-{len(parts)}"')
            etag = escape(self.objects[self.key].etag)
            name = "CompleteMultipartUploadResult"
            self._answer(200, f"<{name}><ETag>{etag}</ETag></{name}>".encode())

    def _delete(self) -> None:
        self.objects.pop(self.key, None)
        self._answer(204)

    # --- answers without end -----------------------------------------------------------------

    def _flood(self, kind: str) -> None:
        self.close_connection = True
        first = self.headers.get("Range", "bytes=0-").partition("=")[2].partition("-")[0]
        with contextlib.suppress(OSError):  # the client has enough
            if kind == "pages":
                self._empty_page()
                return
            statuses = {"range": 206, "missing": 404, "failing": 500}
            self.send_response(statuses.get(kind, 200))
            self.send_header("ETag", '"flood"')
            self.send_header("Last-Modified", "Mon, 01 Jan 2024 00:00:00 GMT")
            if kind == "headers":
                for number in itertools.count():
                    self.send_header(f"x-amz-meta-{number}", "x" * 60_000)
                    self.flush_headers()
            if kind == "range":
                last = int(first) + _FLOOD_BYTES - 1
                self.send_header("Content-Range", f"bytes {first}-{last}/{last + 1}")
            if kind == "chunked":
                self.send_header("Transfer-Encoding", "chunked")
            else:
                self.send_header("Content-Length", str(_FLOOD_BYTES))
            self.end_headers()
            self._send_forever(kind)

    def _send_forever(self, kind: str) -> None:
        block = bytes(1 << 20)
        if kind == "listing":
            self.wfile.write(b"<ListBucketResult><IsTruncated>true</IsTruncated>")
            block = b"<Contents><Key>buildid/a</Key><Size>1</Size></Contents>" * 20_000
        if kind == "chunked":
            block = b"100000\r\n" + block + b"\r\n"
        for _ in range(_FLOOD_BYTES >> 20):
            self.wfile.write(block)

    def _empty_page(self) -> None:
        self._answer(
            200,
            b"<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%d"
            b"</NextContinuationToken></ListBucketResult>" % time.monotonic_ns(),
        )

    # --- answers -----------------------------------------------------------------------------

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code></Error>".encode())

    def _answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        size = len(body) if self.command != "HEAD" else 0
        self.server.requests.append(Asked(self.command, self.key, size))
        with contextlib.suppress(OSError):  # the client was killed
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if size:
                self.wfile.write(body)


def _stored(data: bytes, metadata: dict[str, str], etag: str = "") -> Stored:
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return Stored(data, metadata, now, etag or _etag(data))


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
