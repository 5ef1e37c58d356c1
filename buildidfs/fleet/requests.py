# SPDX-License-Identifier: Apache-2.0
"""The program that makes the requests to one bucket, in a process with a limit of memory.

obstore reads errors, listings and headers as a whole, so a hostile server can make it take any
amount of memory. So the process that asks (`link`) survives the end of this one. The bytes of
objects go to a descriptor as they arrive, and the rest of an answer is not read if it has more
bytes than were requested.

The program gets its settings in the first packet on the socket of its command line. Each further
packet has a channel, a socket for one request after the other, which gets a thread.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import mmap
import os
import re
import resource
import signal
import socket
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Final

import msgspec
import obstore
from obstore import exceptions as failures
from obstore import store as stores

from buildidfs.backoff import Backoff
from buildidfs.fleet import listings
from buildidfs.fleet.link import (
    CHANGED,
    DENIED,
    EXISTS,
    INLINE,
    MISSING,
    NO_ROOM,
    PACKET,
    TOO_LARGE,
    UNAVAILABLE,
    BucketRequest,
    Introduction,
    Reply,
    RequestLimits,
)
from buildidfs.linux import child
from buildidfs.linux.file_ops import close_fds, write_fully_at

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from obstore.store import ObjectStore

    from buildidfs.fleet.listings import ListingPage, Row

_MOST_MEMORY: Final = 192 << 20
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_REFUSALS: Final = frozenset((301, 400, 401, 403, 405, 501))
_EMPTY: Final = "InvalidRange"
"""The error code for a range of an empty object."""
_LIST_ROWS: Final = 1000
_MOST_EMPTY: Final = 100
_SIGNED: Final = datetime.timedelta(minutes=15)
_PAUSES: Final = Backoff(0.1, 1.0)
_CHUNK: Final = 1 << 20
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 4
_MOST_CODES: Final = 1 << 16
"""The characters of an error that are searched."""

_REASONS: Final = {
    "name or service": "its host name cannot be resolved",
    "dns error": "its host name cannot be resolved",
    "certificate": "its certificate is not accepted",
    "timed out": "no answer in time",
    "timeout": "no answer in time",
    "connection refused": "connection refused",
    "connection reset": "connection reset",
    "metadata": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "169.254.169.254": "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "error sending request": "cannot connect",
}


class _Refused(Exception):
    """A request failed for a reason that has a code of `Reply`."""

    def __init__(self, failure: str, why: str = "") -> None:
        super().__init__(failure)
        self.failure = failure
        self.why = why


class _Requests:
    """Makes the requests. Thread-safe."""

    def __init__(self, introduction: Introduction) -> None:
        self._url = introduction.url
        self._options = introduction.options
        self._stores: dict[RequestLimits, ObjectStore] = {}
        self._work: dict[str, Callable[[BucketRequest, int], Reply]] = {
            "head": self._head,
            "get": self._get,
            "create": self._create,
            "upload": self._upload,
            "copy": self._copy,
            "delete": self._delete,
            "list": self._list,
        }

    def answer(self, request: BucketRequest, fd: int) -> Reply:
        """Make a request; ``fd`` is for its bytes or those of the answer, or -1."""
        try:
            return self._work[request.op](request, fd)
        except _Refused as error:
            return Reply(error.failure, error.why)
        except FileNotFoundError as error:
            return Reply(*_missing(error))
        except BrokenPipeError:
            return Reply(UNAVAILABLE)  # the reader of the answer is gone
        except (failures.BaseError, OSError, ValueError, OverflowError) as error:
            return Reply(*_failure(error))

    def _store(self, limits: RequestLimits) -> ObjectStore:
        if limits not in self._stores:
            self._stores[limits] = _opened(self._url, limits, self._options)
        return self._stores[limits]

    def _head(self, request: BucketRequest, _: int) -> Reply:
        found = obstore.get(self._store(request.limits), request.key, options={"head": True})
        return _reply_of(found)

    def _get(self, request: BucketRequest, fd: int) -> Reply:
        options: dict[str, Any] = {}
        if request.is_range:
            options["range"] = (request.offset, request.offset + request.size)
        if request.etag:
            options["if_match"] = request.etag
        try:
            found = obstore.get(self._store(request.limits), request.key, options=options)  # type: ignore[arg-type]  # a TypedDict
        except failures.PreconditionError:
            return Reply(CHANGED)
        except failures.BaseError as error:
            if request.is_range and _EMPTY in str(error)[:_MOST_CODES]:
                return self._head(request, -1)
            raise
        reply = _reply_of(found)
        if not request.is_range and reply.size > request.size:
            return Reply(TOO_LARGE, str(reply.size))
        most = min(request.size, reply.size)
        parts: list[bytes] = []
        at = 0
        for chunk in found.stream(min_chunk_size=min(max(most, 1), _CHUNK)):
            part = chunk[: request.size - at]
            if fd >= 0:
                _write(fd, part, request.at + at)
            else:
                parts.append(part)
            at += len(part)
            if at >= request.size:
                break
        return msgspec.structs.replace(reply, data=b"".join(parts), count=at)

    def _create(self, request: BucketRequest, fd: int) -> Reply:
        store = self._store(request.limits)
        attributes: Any = {"Content-Type": "application/octet-stream", **request.metadata}
        try:
            if fd < 0:
                obstore.put(store, request.key, request.data, mode="create", attributes=attributes)
            else:
                with mmap.mmap(fd, request.size, access=mmap.ACCESS_READ) as data:
                    obstore.put(store, request.key, data, mode="create", attributes=attributes)
        except failures.AlreadyExistsError:
            return Reply(EXISTS)
        return Reply()

    def _upload(self, request: BucketRequest, fd: int) -> Reply:
        attributes: Any = {"Content-Type": "application/octet-stream", **request.metadata}
        with open(fd, "rb", closefd=False) as pipe:
            obstore.put(
                self._store(request.limits),
                request.key,
                _chunks(pipe),
                attributes=attributes,
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        return Reply()

    def _copy(self, request: BucketRequest, _: int) -> Reply:
        obstore.copy(self._store(request.limits), request.key, request.etag)
        return Reply()

    def _delete(self, request: BucketRequest, _: int) -> Reply:
        obstore.delete(self._store(request.limits), request.key)
        return Reply()

    def _list(self, request: BucketRequest, fd: int) -> Reply:
        pages = self._s3_pages if self._url.startswith("s3") else self._other_pages
        with open(fd, "wb", closefd=False) as pipe:
            for rows in pages(request):
                for row in rows:
                    pipe.write(msgspec.json.encode(row) + b"\n")
                pipe.flush()
        return Reply()

    def _other_pages(self, request: BucketRequest) -> Iterator[Iterable[Row]]:
        for rows in obstore.list(
            self._store(request.limits),
            request.key,
            offset=request.etag or None,
            chunk_size=_LIST_ROWS,
        ):
            yield ((row["path"], row["size"], row["last_modified"].timestamp()) for row in rows)

    def _s3_pages(self, request: BucketRequest) -> Iterator[Iterable[Row]]:
        bucket, _, root = self._url.partition("://")[2].partition("/")
        root = f"{root}/" if root else ""
        query = {"list-type": "2", "encoding-type": "url", "prefix": f"{root}{request.key}/"}
        if request.etag:
            query["start-after"] = root + request.etag
        empty = 0
        while empty < _MOST_EMPTY:
            page = self._page(bucket, query, request.limits)
            yield ((key.removeprefix(root), size, modified) for key, size, modified in page.rows)
            if not page.token:
                return
            empty = 0 if page.rows else empty + 1
            query["continuation-token"] = page.token
        raise _Refused(UNAVAILABLE, "a listing has too many empty pages")

    def _page(self, bucket: str, query: dict[str, str], limits: RequestLimits) -> ListingPage:
        """Return a page of a listing of S3. obstore signs the request as one for the object
        ``x=/a`` in the query of the bucket's address.
        """
        words = urllib.parse.urlencode(query, quote_via=urllib.parse.quote)
        address = f"{_address(bucket, self._options)}?{words}"
        if not _is_on("AWS_SKIP_SIGNATURE"):
            options = {
                **self._options,
                "endpoint": f"{address}&x=",
                "virtual_hosted_style_request": "true",
            }
            signer: Any = _opened(f"s3://{bucket}", limits, options)
            address = obstore.sign(signer, "GET", "a", _SIGNED)
        for attempt in itertools.count():
            try:
                return listings.page(address, limits)
            except OSError as error:
                if attempt == limits.retries or not _is_passing(error):
                    raise
                time.sleep(_PAUSES.delay(attempt))
        raise AssertionError


def _chunks(pipe: Any) -> Iterator[bytes]:
    """Yield the chunks of an upload; each has its length before it, and the last one is empty."""
    while True:
        size = int.from_bytes(pipe.read(4))
        data = pipe.read(size)
        if len(data) < size or (not size and pipe.read(1) != b"."):
            raise _Refused(UNAVAILABLE)  # the upload must not be completed
        if not size:
            return
        yield data


def _write(fd: int, data: bytes, offset: int) -> None:
    try:
        write_fully_at(fd, data, offset)
    except OSError as error:
        raise _Refused(NO_ROOM, str(error.errno)) from error


def _reply_of(found: Any) -> Reply:
    metadata = {
        str(name).lower(): str(value)
        for name, value in found.attributes.items()
        if not str(name).startswith("Content-")
    }
    meta = found.meta
    size, modified = meta["size"], meta["last_modified"].timestamp()
    if sum(map(len, metadata.values())) + sum(map(len, metadata)) > INLINE // 4:
        raise _Refused(UNAVAILABLE, "an object has too much metadata")
    return Reply("", "", size, metadata, modified, (meta["e_tag"] or "")[:1024])


def _missing(error: Exception) -> tuple[str, str]:
    if "NoSuchBucket" in str(error)[:_MOST_CODES]:
        return DENIED, ""
    return MISSING, ""


def _failure(error: Exception) -> tuple[str, str]:
    """Return the code and the reason of an error, without the text of the server."""
    text = str(error)[:_MOST_CODES]
    if "NoSuchBucket" in text:
        return DENIED, ""
    code = _CODE.search(text)
    status = _STATUS.search(text)
    why = code[1] if code is not None else f"status {status[1]}" if status is not None else ""
    is_refused = isinstance(error, failures.PermissionDeniedError | failures.UnauthenticatedError)
    if is_refused or (status is not None and int(status[1]) in _REFUSALS):
        return DENIED, why or "no credentials"
    lowered = text.lower()
    return UNAVAILABLE, why or next(
        (reason for word, reason in _REASONS.items() if word in lowered), "no usable answer"
    )


def _is_passing(error: OSError) -> bool:
    """Return True for an error that may be gone at the next attempt."""
    found = _STATUS.search(str(error)[:_MOST_CODES])
    return found is None or int(found[1]) >= 500


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() in ("1", "true", "yes")


def _address(bucket: str, options: dict[str, str]) -> str:
    """Return the address of a bucket of S3, as obstore makes it."""
    environ = os.environ
    endpoint = options.get("endpoint", "").rstrip("/")
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    region = options.get("region", region)
    if _is_on("AWS_VIRTUAL_HOSTED_STYLE_REQUEST"):
        return endpoint or f"https://{bucket}.s3.{region}.amazonaws.com"
    return f"{endpoint or f'https://s3.{region}.amazonaws.com'}/{bucket}"


def _opened(url: str, limits: RequestLimits, options: dict[str, str]) -> ObjectStore:
    second = datetime.timedelta(seconds=1)
    client: dict[str, Any] = {
        "timeout": limits.timeout_s * second,
        "connect_timeout": limits.connect_s * second,
        "allow_http": options.get("endpoint", "").startswith("http://"),
        "user_agent": "buildidfs",
    }
    retry: dict[str, Any] = {
        "max_retries": limits.retries,
        "retry_timeout": limits.timeout_s * (limits.retries + 1) * second,
    }
    make: Any = stores.from_url
    try:
        made: ObjectStore = make(url, client_options=client, retry_config=retry, **options)
    except (failures.BaseError, ValueError) as error:
        raise _Refused(UNAVAILABLE, f"cannot be used: {type(error).__name__}") from error
    return made


def main(words: Sequence[str]) -> None:
    """Make requests until the socket of the command line is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # ^C goes to all processes of the program
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.excepthook = lambda _: os._exit(1)  # the thread lacks memory
    with contextlib.suppress(ConnectionError), socket.socket(fileno=int(words[0])) as control:
        requests = _Requests(msgspec.msgpack.decode(control.recv(PACKET), type=Introduction))
        child.report_ready(control)
        while True:
            data, fds, _, _ = socket.recv_fds(control, PACKET, 1)
            if not data:
                break
            for fd in fds:
                threading.Thread(target=_serve, args=(fd, requests), daemon=True).start()
    os._exit(0)  # threads may wait for a server


def _serve(channel_fd: int, requests: _Requests) -> None:
    """Answer the requests of a channel until it is closed."""
    with contextlib.suppress(ConnectionError), socket.socket(fileno=channel_fd) as channel:
        while True:
            data, fds, _, _ = socket.recv_fds(channel, PACKET, 1)
            if not data:
                return
            try:
                request = msgspec.msgpack.decode(data, type=BucketRequest)
                reply = requests.answer(request, fds[0] if fds else -1)
            finally:
                close_fds(*fds)
            channel.send(msgspec.msgpack.encode(reply))
