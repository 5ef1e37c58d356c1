# SPDX-License-Identifier: Apache-2.0
"""Manifests: the files that a host has seen, in objects that are written once.

``host/<host>/<time>-<random>.jsonl.zst`` has a `Row` in each line. A host writes one at the end of
each push, with the files that are new or were seen again. The time in the key is from the clock of
the host, and for people only. Manifests are ordered by the time of the storage.
"""

from __future__ import annotations

import io
import logging
import re
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from buildidfs.errors import RemoteDamaged, RemoteError
from buildidfs.model import fingerprint
from buildidfs.remote.objects import HOSTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.model import Kind
    from buildidfs.remote.bucket import Bucket, Listed

_log = logging.getLogger(__name__)

_KEY: Final = re.compile(r"host/([\w.-]{1,64})/[\w-]+\.jsonl\.zst")
_FOREIGN: Final = re.compile(r"[^\w.-]")
_MOST_PACKED: Final = 16 << 20
_MOST_BYTES: Final = 512 << 20
_MOST_LINE: Final = 1 << 20
_READERS: Final = 8
_AHEAD: Final = 16

PUSHED: Final = "pushed"
VARIANT: Final = "variant"
PRIVATE: Final = "private"
"""The values of `Row.state`, in this order: the file is below ``buildid/``; it is below
``variant/``; it is in no bucket, because not all users could read it.
"""


Seconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 35)]
"""Unix time in seconds, limited to a thousand years."""


class Place(msgspec.Struct, frozen=True):
    """A place where all users could read a file; times are Unix time in seconds."""

    path: str
    container: str = ""
    first: Seconds = 0
    last: Seconds = 0


class Row(msgspec.Struct, frozen=True):
    """A file on a host."""

    id: str
    kind: str
    sha256: str
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    state: str
    places: tuple[Place, ...] = ()


def private(build_id: bytes, kind: Kind) -> Row:
    """Return the row of a file that not all users could read: it has only a hash of the build ID.

    It helps only readers who know the build ID.
    """
    return Row(f"~{fingerprint(build_id).hex()}", kind.name.lower(), "", 0, PRIVATE)


class Seen(msgspec.Struct, frozen=True):
    """A row, its host, and the time of its manifest (Unix time of the storage, s)."""

    host: str
    written: float
    row: Row


def host_name(name: str) -> str:
    """Return the name of a host as part of a key."""
    return _FOREIGN.sub("-", name)[:64].strip(".") or "unknown"


def write(bucket: Bucket, host: str, rows: Iterable[Row]) -> str:
    """Write a manifest; return its key. Raises `RemoteError`."""
    import zstandard

    data = io.BytesIO()
    with zstandard.ZstdCompressor().stream_writer(data, closefd=False) as stream:
        for row in rows:
            stream.write(msgspec.json.encode(row) + b"\n")
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    key = f"{HOSTS}/{host_name(host)}/{moment}-{secrets.token_hex(4)}.jsonl.zst"
    if not bucket.create(key, data.getvalue(), {}):
        raise RemoteError(f"{bucket.url}/{key} exists already")
    return key


def listed(bucket: Bucket) -> list[tuple[str, Listed]]:
    """Return host and object of each manifest, the oldest first. Raises `RemoteError`."""
    found = [
        (name[1], row)
        for row in bucket.list(HOSTS)
        if (name := _KEY.fullmatch(row.key)) is not None
    ]
    return sorted(found, key=lambda each: each[1].modified)


def read(bucket: Bucket) -> Iterator[Seen]:
    """Yield the rows of all manifests, the oldest manifest first.

    If a lifecycle rule removes a manifest meanwhile, it is left out. Rows after damage, or beyond
    the limit of size, are left out, and the log names the manifest. Raises `RemoteError`.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        every = []
        for host, row in listed(bucket):
            if row.size <= _MOST_PACKED:
                every.append((host, row))
            else:
                _log.warning("%s/%s is left out: %d bytes", bucket.url, row.key, row.size)
        for start in range(0, len(every), _AHEAD):
            some = every[start : start + _AHEAD]
            bodies = pool.map(lambda each: bucket.get(each[1].key, _MOST_BYTES), some)
            for (host, row), body in zip(some, bodies, strict=True):
                for line in _lines(body or b"", f"{bucket.url}/{row.key}"):
                    yield Seen(host, row.modified, line)


def _lines(body: bytes, name: str) -> Iterator[Row]:
    """Yield the rows of a manifest; rows after damage are left out and logged."""
    import zstandard

    decoder = msgspec.json.Decoder(Row)
    if not body:
        return
    reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(body)
    try:
        for line in _bounded(reader):
            yield decoder.decode(line)
    except (zstandard.ZstdError, msgspec.MsgspecError, RemoteDamaged) as error:
        _log.warning("%s is damaged, or of another program: %s", name, error)


def _bounded(reader: Any) -> Iterator[bytes]:
    """Yield lines of up to a megabyte each, and up to half a gigabyte in total.

    Raises `RemoteDamaged`.
    """
    text = io.BufferedReader(reader)
    left = _MOST_BYTES
    while left > 0:
        line = text.readline(_MOST_LINE)
        if not line:
            return
        if not line.endswith(b"\n"):
            raise RemoteDamaged("a line is cut off, or has more than a megabyte")
        left -= len(line)
        yield line
    raise RemoteDamaged("it has more than half a gigabyte")
