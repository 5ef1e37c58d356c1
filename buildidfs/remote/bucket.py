# SPDX-License-Identifier: Apache-2.0
"""`Bucket`: requests to S3-compatible object storage, with time limits and errors of ours.

obstore takes the usual variables of AWS clients from the environment (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL), or asks the metadata
service of the machine. The file of credentials is read here, because obstore does not read it.

A request blocks the calling thread for `Limits.timeout_s` at most, times its attempts. Messages
contain only the server's error code, not its text, which may contain keys.

A process must not fork after its first request: the child would wait for ever.
"""

from __future__ import annotations

import configparser
import contextlib
import datetime
import hashlib
import os
import re
import urllib.parse
import uuid
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec

from buildidfs.errors import (
    RemoteDamaged,
    RemoteDenied,
    RemoteError,
    RemoteUnavailable,
    UsageError,
    needs_extra,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from obstore.store import ObjectStore

with needs_extra("remote"):
    import obstore
    from obstore import exceptions as failures
    from obstore import store as stores

MARKER: Final = "buildidfs.json"
"""The object with the ID of the bucket: its content changes if the bucket is made anew."""

_SCHEMES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_URL: Final = re.compile(r"(\w+)://([\w.@-]+)(/[\w.=/-]*)?")
_CODE: Final = re.compile(r"<Code>(\w{1,64})</Code>")
_STATUS: Final = re.compile(r"status code: (\d{3})")
_REFUSALS: Final = frozenset((301, 400, 401, 403, 405, 501))
_EMPTY: Final = "InvalidRange"
"""The error code for a range of an empty object."""
_MOST_MARKER: Final = 4096
_LIST_ROWS: Final = 1000
MOST_LISTED: Final = 1 << 18
"""The number of objects of a listing, unless its reader allows another."""
_PART_BYTES: Final = 16 << 20
_PARTS_AT_ONCE: Final = 4


class Limits(NamedTuple):
    """Limits of requests: seconds for an attempt, seconds for a connection, and the number of
    retries.
    """

    timeout_s: float = 60.0
    connect_s: float = 5.0
    retries: int = 2


PATIENT: Final = Limits()
"""For requests without a waiting reader."""

INTERACTIVE: Final = Limits(timeout_s=5.0, connect_s=2.0, retries=1)
"""For requests with a waiting reader."""


class Head(NamedTuple):
    """The facts about an object: size in bytes, user metadata, and time of the write (Unix time,
    s).
    """

    size: int
    metadata: dict[str, str]
    modified: float
    etag: str


class Listed(NamedTuple):
    """An object in a listing."""

    key: str
    size: int
    modified: float


class _Marker(msgspec.Struct):
    bucket: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    format: int = 1


class Bucket:
    """A bucket, or the part of one below a prefix. May be used from several threads."""

    def __init__(
        self, url: str, limits: Limits = PATIENT, environ: Mapping[str, str] | None = None
    ) -> None:
        """``url`` is ``s3://BUCKET/PREFIX``, gs or az. Makes no request. Raises `UsageError`."""
        found = _URL.fullmatch(url)
        if found is None or found[1] not in _SCHEMES:
            raise UsageError(f"not the URL of a bucket: {_shown(url)!r}; try s3://BUCKET/PREFIX")
        self.url = url.rstrip("/")
        self._store = _opened(self.url, limits, os.environ if environ is None else environ)

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
        with self._told(key):
            try:
                found = obstore.get(self._store, key, options={"head": True})
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None
            return _head_of(found)

    def get(self, key: str, most: int = 256 << 20) -> bytes | None:
        """Return the bytes of an object; None if the object does not exist.

        Raises `RemoteDamaged` if it has more than ``most`` bytes.
        """
        with self._told(key):
            try:
                found = obstore.get(self._store, key)
                if found.meta["size"] > most:
                    raise RemoteDamaged(
                        f"{self.url}/{key} has {found.meta['size']} bytes, and not {most} at most"
                    )
                return bytes(found.bytes())
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None

    def peek(self, key: str, most: int) -> tuple[Head, bytes] | None:
        """Return the facts about an object and its first ``most`` bytes; None if it does
        not exist.
        """
        with self._told(key):
            try:
                found = obstore.get(self._store, key, options={"range": (0, most)})
                return _head_of(found), bytes(found.bytes())
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return None
            except failures.BaseError as error:
                if _EMPTY not in str(error):
                    raise
        empty = self.head(key)
        return None if empty is None else (empty, b"")

    def get_range(self, key: str, offset: int, size: int, etag: str = "") -> bytes:
        """Return ``size`` bytes of an object from ``offset``.

        With ``etag``, only that version of the object is read. Raises FileNotFoundError if the
        object is gone or is another version, and `RemoteError` if the answer is short.
        """
        options: dict[str, Any] = {"range": (offset, offset + size)}
        if etag:
            options["if_match"] = etag
        with self._told(key):
            try:
                data = bytes(obstore.get(self._store, key, options=options).bytes())  # type: ignore[arg-type]
            except failures.PreconditionError as error:
                raise FileNotFoundError(key) from error
        if len(data) != size:
            raise RemoteUnavailable(f"{self.url}: {len(data)} bytes came, and not {size}")
        return data

    def create(self, key: str, data: bytes, metadata: Mapping[str, str]) -> bool:
        """Write an object if no object has the key; return False if one has.

        If several clients try at once, one succeeds.
        """
        with self._told(key):
            try:
                obstore.put(self._store, key, data, mode="create", attributes=_attributes(metadata))
            except failures.AlreadyExistsError:
                return False
        return True

    def upload(self, key: str, chunks: Iterable[bytes], metadata: Mapping[str, str]) -> None:
        """Write a large object in parts. It appears when all parts have arrived, and replaces an
        object with the same key.
        """
        with self._told(key):
            obstore.put(
                self._store,
                key,
                iter(chunks),
                attributes=_attributes(metadata),
                use_multipart=True,
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )

    def touch(self, key: str) -> bool:
        """Give an object a new modification time; return False if there is none.

        Object storage refuses to copy an object onto itself unchanged, so the object is copied to
        ``touch/`` and back. The data do not leave the storage.
        """
        with self._told(key):
            try:
                obstore.copy(self._store, key, f"touch/{key}")
                obstore.copy(self._store, f"touch/{key}", key)
            except FileNotFoundError as error:
                self._refuse_missing_bucket(error)
                return False
        self.delete(f"touch/{key}")
        return True

    def delete(self, key: str) -> bool:
        """Delete an object; return False if this user may not."""
        try:
            with self._told(key), contextlib.suppress(FileNotFoundError):
                obstore.delete(self._store, key)
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
        with self._told(prefix):
            stream = obstore.list(self._store, prefix, offset=after or None, chunk_size=_LIST_ROWS)
            for rows in stream:
                for row in rows:
                    yield Listed(row["path"], row["size"], row["last_modified"].timestamp())

    # --- errors --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _told(self, key: str) -> Iterator[None]:
        """Translate errors of obstore into errors of ours; FileNotFoundError is passed on."""
        try:
            yield
        except FileNotFoundError as error:
            self._refuse_missing_bucket(error)
            raise
        except (failures.BaseError, OSError, ValueError) as error:
            raise self._failure(error, key) from None

    def _refuse_missing_bucket(self, error: Exception) -> None:
        if "NoSuchBucket" in str(error):
            raise RemoteDenied(f"{self.url}: there is no such bucket; create it, or correct url")

    def _failure(self, error: Exception, key: str) -> RemoteError:
        text = str(error)
        self._refuse_missing_bucket(error)
        code = _CODE.search(text)
        status = _STATUS.search(text)
        why = code[1] if code is not None else f"status {status[1]}" if status is not None else ""
        is_refused = isinstance(
            error, failures.PermissionDeniedError | failures.UnauthenticatedError
        )
        if is_refused or (status is not None and int(status[1]) in _REFUSALS):
            return RemoteDenied(
                f"{self.url}/{key}: access denied ({why or 'no credentials'}): check"
                " AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and the policy of the bucket"
            )
        if not why:
            lowered = text.lower()
            why = next(
                (said for word, said in _REASONS.items() if word in lowered), "no usable answer"
            )
        return RemoteUnavailable(f"{self.url}: {why}")


_REASONS: Final = {
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


def _attributes(metadata: Mapping[str, str]) -> Any:
    return {"Content-Type": "application/octet-stream", **metadata}


def _head_of(found: Any) -> Head:
    metadata = {
        str(name).lower(): str(value)
        for name, value in found.attributes.items()
        if not str(name).startswith("Content-")
    }
    meta = found.meta
    return Head(meta["size"], metadata, meta["last_modified"].timestamp(), meta["e_tag"] or "")


def _shown(url: str) -> str:
    """Return a URL without a possible password."""
    return re.sub(r"//[^/@]*@", "//...@", url[:200])


def _opened(url: str, limits: Limits, environ: Mapping[str, str]) -> ObjectStore:
    options: dict[str, Any] = {}
    if url.startswith("s3"):
        options = _from_files(environ)
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL", "")
        if endpoint:
            options["endpoint"] = endpoint
        _check_endpoint(options.get("endpoint", ""))
        _check_keys(environ)
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
        raise UsageError(f"cannot use {_shown(url)}: {type(error).__name__}") from error
    return made


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
