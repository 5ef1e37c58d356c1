# SPDX-License-Identifier: Apache-2.0
"""`Bucket`: requests to S3-compatible object storage, with time limits and errors of ours.

Another process makes the requests (`link`). obstore takes the usual variables of AWS clients from
the environment there (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION,
AWS_ENDPOINT_URL), or asks the metadata service of the machine. The file of credentials is read
here, because obstore does not read it.

A request blocks the calling thread for `RequestLimits.timeout_s` at most, times its attempts.
Messages contain only the server's error code, not its text, which may contain keys.
"""

from __future__ import annotations

import configparser
import contextlib
import copy
import hashlib
import importlib.util
import logging
import mmap
import os
import re
import urllib.parse
import uuid
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec

from buildidfs.errors import (
    RemoteDamaged,
    RemoteDenied,
    RemoteUnavailable,
    UsageError,
    needs_extra,
)
from buildidfs.fleet.link import (
    CHANGED,
    DENIED,
    EXISTS,
    INLINE,
    MISSING,
    NO_ROOM,
    TOO_LARGE,
    BucketRequest,
    Introduction,
    Link,
    LinkDown,
    Reply,
    RequestLimits,
)
from buildidfs.linux.file_ops import closing_fd, read_fully, write_fully_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_log = logging.getLogger(__name__)

with needs_extra("remote"):
    if importlib.util.find_spec("obstore") is None:
        raise ModuleNotFoundError(name="obstore")

MARKER: Final = "buildidfs.json"
"""The object with the ID of the bucket: its content changes if the bucket is made anew."""

MOST_LISTED: Final = 1 << 18
"""The number of objects of a listing, unless its reader allows another."""

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_URL: Final = re.compile(r"(\w+)://([\w.@-]+)(/[\w.=/-]*)?")
_MOST_MARKER: Final = 4096
_MOST_KEY: Final = 1024
_MOST_SIZE: Final = 1 << 60

PATIENT: Final = RequestLimits()
"""For requests without a waiting reader."""

INTERACTIVE: Final = RequestLimits(timeout_s=5.0, connect_s=2.0, retries=1)
"""For requests with a waiting reader."""


class Head(NamedTuple):
    """The facts about an object: size in bytes, user metadata, and time of the write (Unix time,
    s).
    """

    size: int
    metadata: dict[str, str]
    modified: float
    etag: str


class Listed(msgspec.Struct, frozen=True, array_like=True):
    """An object in a listing."""

    key: Annotated[str, msgspec.Meta(max_length=_MOST_KEY)]
    size: Annotated[int, msgspec.Meta(ge=0, le=_MOST_SIZE)]
    modified: float


class _Marker(msgspec.Struct):
    bucket: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    format: int = 1


class Bucket:
    """A bucket, or the part of one below a prefix. May be used from several threads."""

    def __init__(self, url: str, limits: RequestLimits = PATIENT) -> None:
        """``url`` is ``s3://BUCKET/PREFIX``, gs or az. Makes no request. Raises `UsageError`."""
        found = _URL.fullmatch(url)
        if found is None or found[1] not in _SCHEMES:
            raise UsageError(f"not the URL of a bucket: {_shown(url)!r}; try s3://BUCKET/PREFIX")
        self.url = url.rstrip("/")
        self._limits = limits
        self._link = Link(Introduction(self.url, _options(self.url, os.environ)))

    def limited(self, limits: RequestLimits) -> Bucket:
        """Return the same bucket with other limits; both share a process."""
        other = copy.copy(self)
        other._limits = limits
        return other

    def __repr__(self) -> str:
        return f"Bucket({self.url})"

    # --- the bucket as a whole ---------------------------------------------------------------

    def identity(self, *, create: bool = False) -> str:
        """Return the ID of the bucket; a bucket that was made anew has another one.

        With ``create`` the marker is written if there is none; otherwise the ID of a bucket without
        a marker is empty. The storage reports a missing bucket like a missing object, so each user
        of a bucket calls this first. Raises `RemoteDenied` for a missing bucket and for rejected
        keys, `RemoteUnavailable`.
        """
        found = self.peek(MARKER, _MOST_MARKER)
        if found is None and create:
            self.create(MARKER, msgspec.json.encode(_Marker(uuid.uuid4().hex)), {})
            found = self.peek(MARKER, _MOST_MARKER)
        if found is None:
            return ""
        head, data = found
        try:
            return msgspec.json.decode(data, type=_Marker).bucket
        except (msgspec.MsgspecError, RecursionError):
            # Any host could be the first to write it. It is not written again, so it identifies
            # the bucket all the same.
            return hashlib.sha256(f"{head.size} {head.etag} ".encode() + data).hexdigest()

    # --- objects -------------------------------------------------------------------------------

    def head(self, key: str) -> Head | None:
        """Return the facts about an object; None if the object does not exist."""
        return _head_of(self._ask(BucketRequest("head", key, self._limits)))

    def get(self, key: str, most: int = 256 << 20) -> bytes | None:
        """Return the bytes of an object; None if the object does not exist.

        Raises `RemoteDamaged` if it has more than ``most`` bytes.
        """
        found = self._read(BucketRequest("get", key, self._limits, most))
        return None if found is None else found[1]

    def mapped(self, key: str, most: int, fd: int) -> mmap.mmap | None:
        """Write the bytes of an object to a file, and return them as a map of it; None if the
        object does not exist. The kernel can drop such bytes from memory.

        Raises as `get`, and OSError.
        """
        reply = self._ask(BucketRequest("get", key, self._limits, most), fd)
        if reply.failure:
            return None
        if not reply.count:
            raise RemoteDamaged(f"{self.url}/{key} is empty")
        return mmap.mmap(fd, reply.count, mmap.MAP_SHARED, mmap.PROT_READ)

    def peek(self, key: str, most: int) -> tuple[Head, bytes] | None:
        """Return the facts about an object and its first ``most`` bytes; None if it does
        not exist.
        """
        return self._read(BucketRequest("get", key, self._limits, most, is_range=True))

    def get_range(self, key: str, offset: int, size: int, etag: str = "", fd: int = -1) -> bytes:
        """Return ``size`` bytes of an object from ``offset``. With ``fd``, write them to the same
        place of that file instead, and return nothing.

        With ``etag``, only that version of the object is read. Raises FileNotFoundError if the
        object is gone or is another version, and `RemoteError` if the answer is short.
        """
        request = BucketRequest("get", key, self._limits, size, offset, True, offset, etag)
        if fd < 0 and size > INLINE:
            with closing_fd(os.memfd_create("buildidfs-object")) as copy_fd:
                self.get_range(key, offset, size, etag, copy_fd)
                return read_fully(copy_fd, size, offset)
        reply = self._ask(request, fd)
        if reply.failure:
            raise FileNotFoundError(key)
        if reply.count != size:
            raise RemoteUnavailable(f"{self.url}: {reply.count} bytes came, and not {size}")
        return reply.data

    def _read(self, request: BucketRequest) -> tuple[Head, bytes] | None:
        """Return the facts about an object, and bytes of it."""
        if request.size <= INLINE:
            reply = self._ask(request)
            head = _head_of(reply)
            return None if head is None else (head, reply.data)
        with closing_fd(os.memfd_create("buildidfs-object")) as fd:
            reply = self._ask(request, fd)
            head = _head_of(reply)
            return None if head is None else (head, read_fully(fd, reply.count, 0))

    def create(self, key: str, data: bytes, metadata: Mapping[str, str]) -> bool:
        """Write an object if no object has the key; return False if one has.

        If several clients try at once, one succeeds.
        """
        request = BucketRequest("create", key, self._limits, len(data), metadata=dict(metadata))
        if len(data) <= INLINE:
            return not self._ask(msgspec.structs.replace(request, data=data)).failure
        with closing_fd(os.memfd_create("buildidfs-object")) as fd:
            write_fully_at(fd, data, 0)
            return not self._ask(request, fd).failure

    def upload(self, key: str, chunks: Iterable[bytes], metadata: Mapping[str, str]) -> None:
        """Write a large object in parts. It appears when all parts have arrived, and replaces an
        object with the same key.
        """
        request = BucketRequest("upload", key, self._limits, metadata=dict(metadata))
        with self._reported():
            self._checked(request, self._link.write(request, chunks))

    def touch(self, key: str) -> bool:
        """Give an object a new modification time; return False if there is none.

        Object storage refuses to copy an object onto itself unchanged, so the object is copied to
        ``touch/`` and back. The data do not leave the storage.
        """
        for source, target in ((key, f"touch/{key}"), (f"touch/{key}", key)):
            if self._ask(BucketRequest("copy", source, self._limits, etag=target)).failure:
                return False
        self.delete(f"touch/{key}")
        return True

    def delete(self, key: str) -> bool:
        """Delete an object; return False if this user may not."""
        try:
            self._ask(BucketRequest("delete", key, self._limits))
        except RemoteDenied:
            return False
        return True

    def now(self) -> float:
        """Return the time by the clock of the storage (Unix time, s)."""
        probe = f"touch/clock-{uuid.uuid4().hex}"
        self.create(probe, b"", {})
        found = self.head(probe)
        self.delete(probe)
        if found is None:
            raise RemoteUnavailable(f"{self.url}/{probe} was removed a moment ago")
        return found.modified

    def list(self, prefix: str, after: str = "", most: int = MOST_LISTED) -> Iterator[Listed]:
        """Yield the objects below a prefix in order of their keys, behind the key ``after``.

        Raises `RemoteDamaged` if there are more than ``most``, or the keys do not ascend.
        """
        left, last = most, after
        for row in self._rows(prefix, after):
            if not left or row.key <= last or not row.key.startswith(f"{prefix}/"):
                why = "is out of order" if left else f"has more than {most} objects"
                raise RemoteDamaged(f"{self.url}: the listing of {prefix}/ {why}")
            left -= 1
            last = row.key
            yield row

    def _rows(self, prefix: str, after: str) -> Iterator[Listed]:
        request = BucketRequest("list", prefix, self._limits, etag=after)
        with self._reported():
            for line in self._link.rows(request):
                if isinstance(line, Reply):
                    self._checked(request, line)
                    return
                yield _listed.decode(line)

    # --- errors --------------------------------------------------------------------------------

    def _ask(self, request: BucketRequest, fd: int = -1) -> Reply:
        with self._reported():
            reply = self._link.ask(request, fd)
        answer = reply.failure or "done"
        _log.debug("%s: %s %s: %s", self.url, request.op, request.key, answer)
        return self._checked(request, reply)

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (LinkDown, msgspec.MsgspecError) as error:
            raise RemoteUnavailable(f"{self.url}: {error}") from error

    def _checked(self, request: BucketRequest, reply: Reply) -> Reply:
        """Return a reply; raise the error in it unless it is about a single object."""
        if reply.failure in ("", MISSING, CHANGED, EXISTS):
            return reply
        if reply.failure == TOO_LARGE:
            raise RemoteDamaged(
                f"{self.url}/{request.key} has {reply.why} bytes, and not {request.size} at most"
            )
        if reply.failure == NO_ROOM:
            raise OSError(int(reply.why), os.strerror(int(reply.why)))
        if reply.failure == DENIED and not reply.why:
            raise RemoteDenied(f"{self.url}: there is no such bucket; create it, or correct url")
        if reply.failure == DENIED:
            raise RemoteDenied(
                f"{self.url}/{request.key}: access denied ({reply.why}): check AWS_ACCESS_KEY_ID,"
                " AWS_SECRET_ACCESS_KEY and the policy of the bucket"
            )
        raise RemoteUnavailable(f"{self.url}: {reply.why}")


_listed = msgspec.json.Decoder(Listed)


def _head_of(reply: Reply) -> Head | None:
    if reply.failure:
        return None
    return Head(reply.size, reply.metadata, reply.modified, reply.etag)


def _shown(url: str) -> str:
    """Return a URL without a possible password."""
    return re.sub(r"//[^/@]*@", "//...@", url[:200])


def _options(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the options that obstore does not take from the environment. Raises `UsageError`."""
    if not url.startswith("s3"):
        return {}
    options = _from_files(environ)
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
    if endpoint:
        options["endpoint"] = endpoint
    _check_endpoint(options.get("endpoint", ""))
    _check_keys(environ)
    return options


def _check_endpoint(endpoint: str) -> None:
    """Raise `UsageError` for an invalid address. The library would end the process at such an
    address.
    """
    if not endpoint:
        return
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or not endpoint.isascii() or not endpoint.isprintable() or " " in endpoint:
        raise UsageError(
            f"AWS_ENDPOINT_URL is not the address of a server: {_shown(endpoint)!r}; try"
            " https://HOST:PORT"
        )
    if parts.username is not None:
        raise UsageError("AWS_ENDPOINT_URL has a user in it: keys go into AWS_ACCESS_KEY_ID")


def _check_keys(environ: Mapping[str, str]) -> None:
    """Raise `UsageError` if only one of the two variables for the keys is set."""
    pair = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name, other in (pair, pair[::-1]):
        if environ.get(name) and not environ.get(other):
            raise UsageError(f"{name} is set, and {other} is not: set both, or none")


def _from_files(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the credentials and the region from the files of AWS clients, as far as the
    environment lacks them.

    Raises `UsageError` if the requested profile is in no file.
    """
    profile = environ.get("AWS_PROFILE", "")
    if environ.get("AWS_ACCESS_KEY_ID") and not profile:
        return {}
    home = environ.get("HOME") or "/root"
    section = profile or "default"
    found: dict[str, str] = {}
    for variable, default, spelled in (
        ("AWS_CONFIG_FILE", f"{home}/.aws/config", f"profile {section}"),
        ("AWS_SHARED_CREDENTIALS_FILE", f"{home}/.aws/credentials", section),
    ):
        parser = configparser.RawConfigParser()
        try:
            parser.read(environ.get(variable) or default, encoding="utf-8")
        except (configparser.Error, OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read {environ.get(variable) or default}: {type(error).__name__}"
            ) from None
        for name in (spelled, section):
            if parser.has_section(name):
                found |= dict(parser.items(name))
                break
    if profile and not found:
        raise UsageError(f"no file of credentials has the profile {profile!r} (AWS_PROFILE)")
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
        "region": "region",
        "endpoint_url": "endpoint",
    }
    if environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    return {names[name]: value for name, value in found.items() if name in names}
