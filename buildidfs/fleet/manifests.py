# SPDX-License-Identifier: Apache-2.0
"""Manifests: the files that a host has seen, in objects that are written once.

``host/<host>/<time>-<random>.jsonl.zst`` has a `ManifestRow` in each line. A host writes one at the
end of each push, with the files that are new or were seen again. The time in the key is from the
clock of the host, and for people only. Manifests are ordered by the time of the storage.
"""

from __future__ import annotations

import io
import itertools
import logging
import re
import secrets
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec

from buildidfs.errors import RemoteDamaged, RemoteError
from buildidfs.fleet.objects import HOSTS, MOST_PATH
from buildidfs.model import fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.fleet.bucket import Bucket, Listed
    from buildidfs.model import Kind

_log = logging.getLogger(__name__)

_KEY: Final = re.compile(r"host/(?!\.\.?/)([\w.-]{1,64})/[\w-]+\.jsonl\.zst", re.ASCII)
_FOREIGN: Final = re.compile(r"[^\w.-]")
_MOST_PACKED: Final = 4 << 20
_MOST_BYTES: Final = 16 << 20
_MOST_LINE: Final = 1 << 20
_MOST_ROWS: Final = 10_000
_MOST_ALL_PLACES: Final = 32_000
_MOST_WINDOW: Final = 8 << 20
"""The bounds of a manifest: compressed, unpacked, a line of it, its rows, their places, and the
memory for unpacking. A push begins another manifest before one exceeds them.
"""
_MOST_OF_HOST: Final = 4096
"""The newest manifests of a host; older ones are not read."""
_READERS: Final = 4

PUSHED: Final = "pushed"
VARIANT: Final = "variant"
PRIVATE: Final = "private"
"""The values of `ManifestRow.state`, in this order: the file is below ``buildid/``; it is below
``variant/``; it is in no bucket, because not all users could read it.
"""


MOST_PLACES: Final = 64
"""The places of a row."""

Seconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 35)]
"""Unix time in seconds, limited to a thousand years."""


class ManifestPlace(msgspec.Struct, frozen=True):
    """A place where all users could read a file; times are Unix time in seconds."""

    path: Annotated[str, msgspec.Meta(max_length=MOST_PATH)]
    container: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    first: Seconds = 0
    last: Seconds = 0


class ManifestRow(msgspec.Struct, frozen=True):
    """A file on a host."""

    id: Annotated[str, msgspec.Meta(pattern=r"\A(([0-9a-f]{2}){2,120}|~[0-9a-f]{8,64})\Z")]
    kind: Annotated[str, msgspec.Meta(pattern=r"\A(executable|debuginfo|vdso|kallsyms)\Z")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
    size: Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
    state: Annotated[str, msgspec.Meta(pattern=r"\A(pushed|variant|private)\Z")]
    places: Annotated[tuple[ManifestPlace, ...], msgspec.Meta(max_length=MOST_PLACES)] = ()


def private(build_id: bytes, kind: Kind) -> ManifestRow:
    """Return the row of a file that not all users could read: it has only a hash of the build ID.

    It helps only readers who know the build ID.
    """
    return ManifestRow(f"~{fingerprint(build_id).hex()}", kind.name.lower(), "", 0, PRIVATE)


class Seen(msgspec.Struct, frozen=True):
    """A row, its host, and the time of its manifest (Unix time of the storage, s)."""

    host: str
    written: float
    row: ManifestRow


def host_name(name: str) -> str:
    """Return the name of a host as part of a key."""
    return _FOREIGN.sub("-", name)[:64].strip(".") or "unknown"


def write(bucket: Bucket, host: str, rows: Iterable[ManifestRow]) -> str:
    """Write rows as one manifest, or as several if they are too many; return the key of the last.

    Raises `RemoteError`.
    """
    key = ""
    lines: list[bytes] = []
    left, places = _MOST_BYTES, 0
    for row in rows:
        line = msgspec.json.encode(row) + b"\n"
        if len(line) > _MOST_LINE:
            line = msgspec.json.encode(msgspec.structs.replace(row, places=())) + b"\n"
        left -= len(line)
        places += len(row.places)
        if left < 0 or places > _MOST_ALL_PLACES or len(lines) == _MOST_ROWS:
            key = _write(bucket, host, lines)
            lines, left, places = [], _MOST_BYTES - len(line), len(row.places)
        lines.append(line)
    return _write(bucket, host, lines) if lines or not key else key


def _write(bucket: Bucket, host: str, lines: list[bytes]) -> str:
    import zstandard

    packed = zstandard.ZstdCompressor().compress(b"".join(lines))
    if len(packed) > _MOST_PACKED:  # random paths do not compress: half of them have half the size
        _write(bucket, host, lines[: len(lines) // 2])
        return _write(bucket, host, lines[len(lines) // 2 :])
    moment = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    key = f"{HOSTS}/{host_name(host)}/{moment}-{secrets.token_hex(4)}.jsonl.zst"
    if not bucket.create(key, packed, {}):
        raise RemoteError(f"{bucket.url}/{key} exists already")
    return key


def listed(bucket: Bucket) -> list[tuple[str, Listed]]:
    """Return host and object of each manifest, the oldest first. Raises `RemoteError`.

    Of a host with too many manifests, only the newest are returned.
    """
    hosts: dict[str, deque[Listed]] = {}
    for row in bucket.list(HOSTS):
        name = _KEY.fullmatch(row.key)
        if name is not None:
            hosts.setdefault(name[1], deque(maxlen=_MOST_OF_HOST)).append(row)
    found = [(host, row) for host, its in hosts.items() for row in its]
    return sorted(found, key=lambda each: each[1].modified)


def read(bucket: Bucket) -> Iterator[Seen]:
    """Yield the rows of all manifests, the oldest manifest first.

    If a lifecycle rule removes a manifest meanwhile, it is left out. Rows after damage, or beyond
    the bounds of a manifest, are left out, and the log names the manifest. Raises `RemoteError`.
    """
    with ThreadPoolExecutor(_READERS) as pool:
        every = []
        for host, row in listed(bucket):
            if row.size <= _MOST_PACKED:
                every.append((host, row))
            else:
                _log.warning("%s/%s is left out: %d bytes", bucket.url, row.key, row.size)
        for start in range(0, len(every), _READERS):
            some = every[start : start + _READERS]
            bodies = pool.map(lambda each: _body(bucket, each[1].key), some)
            for (host, row), body in zip(some, bodies, strict=True):
                for line in _lines(body, f"{bucket.url}/{row.key}"):
                    yield Seen(host, row.modified, line)


def _body(bucket: Bucket, key: str) -> bytes:
    """Return the bytes of a manifest; none if it is gone, or larger than it was listed."""
    try:
        return bucket.get(key, _MOST_PACKED) or b""
    except RemoteDamaged as error:
        _log.warning("%s", error)
        return b""


def _lines(body: bytes, name: str) -> Iterator[ManifestRow]:
    """Yield the rows of a manifest; rows after damage are left out and logged."""
    import zstandard

    decoder = msgspec.json.Decoder(ManifestRow)
    if not body:
        return
    reader = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).stream_reader(body)
    places = 0
    try:
        for line in _bounded(reader):
            row = decoder.decode(line)
            places += len(row.places)
            if places > _MOST_ALL_PLACES:
                raise RemoteDamaged("it has too many places")
            yield row
    except (zstandard.ZstdError, msgspec.MsgspecError, RecursionError, RemoteDamaged) as error:
        _log.warning("%s is damaged, or of another program: %s", name, error)


def _bounded(reader: Any) -> Iterator[bytes]:
    """Yield the lines of a manifest within its bounds. Raises `RemoteDamaged`."""
    text = io.BufferedReader(reader)
    left = _MOST_BYTES
    for row in itertools.count():
        line = text.readline(_MOST_LINE + 1)
        if not line:
            return
        left -= len(line)
        if row == _MOST_ROWS or left < 0 or not line.endswith(b"\n"):
            raise RemoteDamaged("it has too many rows, or a line is cut off or too long")
        yield line
