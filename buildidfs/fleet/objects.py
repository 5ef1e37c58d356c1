# SPDX-License-Identifier: Apache-2.0
"""The keys of objects in a bucket, and the metadata of an object.

    buildidfs.json                       which bucket this is
    buildid/<id>/executable|debuginfo|vdso|kallsyms
                                         written once; the first writer wins
    variant/<id>/<kind>/<sha256>         other files with the same build ID and kind
    upload/<id>/<kind>                   a host is uploading a large file there
    host/<host>/<time>-<random>.jsonl.zst
                                        files that a host has seen, see `manifests`
    filter/...                           see `filters`
    touch/...                            copies that a lifecycle rule may remove at once

``buildid/`` is the path in requests of debuginfod clients, so a bucket that they may read works as
a debuginfod. Objects are not compressed, because readers request ranges of them.
"""

from __future__ import annotations

import itertools
import re
import urllib.parse
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.model import BuildId, ByteRange, Digest, Kind, Quality, Trust

if TYPE_CHECKING:
    from collections.abc import Mapping

E = TypeVar("E", bound=IntEnum)

BLOBS: Final = "buildid"
VARIANTS: Final = "variant"
LEASES: Final = "upload"
HOSTS: Final = "host"

NO_BUCKET: Final = "no bucket is configured: set [remote] url in buildidfs.toml(5)"

FIRST_ORDINAL: Final = 1 << 30
"""The first number for build IDs that the store does not have. Such numbers are valid for the life
of the process.
"""
VARIANT: Final = (1 << 14) - 1
"""The variant number of each remote file that is the first of its build ID."""
MOST_VARIANTS: Final = 15
"""The other executables of a build ID that are read; their variant numbers are those below
`VARIANT`.
"""

_KEY: Final = re.compile(r"buildid/([0-9a-f]{4,240})/(executable|debuginfo|vdso|kallsyms)")
_EXTENT: Final = re.compile(r"(\d{1,15})\+(\d{1,15})")
_MOST_SCRIPTS: Final = 16
_MOST_HOST: Final = 255
_MOST_PATH: Final = 1024
MOST_PATH: Final = 4 << 10
"""The characters of a path, as in Linux."""


def blob_key(build_id: bytes, kind: Kind) -> str:
    """Return the key of the served file of a build ID."""
    return f"{BLOBS}/{build_id.hex()}/{kind.name.lower()}"


def variant_key(build_id: bytes, kind: Kind, digest: Digest) -> str:
    """Return the key of another file with the same build ID."""
    return f"{variants_prefix(build_id, kind)}/{digest.hex()}"


def variants_prefix(build_id: bytes, kind: Kind) -> str:
    """Return the prefix of the keys of all other files with the same build ID."""
    return f"{VARIANTS}/{build_id.hex()}/{kind.name.lower()}"


def lease_key(build_id: bytes, kind: Kind) -> str:
    """Return the key of the object that marks the upload of a large file."""
    return f"{LEASES}/{build_id.hex()}/{kind.name.lower()}"


def parse_blob_key(key: str) -> tuple[BuildId, Kind] | None:
    """Return the build ID and the kind in a `blob_key`; None for another key."""
    found = _KEY.fullmatch(key)
    if found is None or len(found[1]) % 2:
        return None
    return BuildId.from_hex(found[1]), Kind[found[2].upper()]


class Described(msgspec.Struct, frozen=True):
    """The description of a file by the host that uploaded it: a claim, which a reader verifies.

    ``digest`` is None for an object that another program has uploaded. ``path`` is a place where
    all users could read the file, empty if there is none. Times are Unix time in nanoseconds.
    """

    digest: Digest | None
    quality: Quality = Quality.NONE
    trust: Trust = Trust.UNKNOWN
    scripts: tuple[ByteRange, ...] = ()
    segments: int = 0
    truncated: bool = False
    executable: bool = True
    mtime_ns: int = 0
    first_seen_ns: int = 0
    path: bytes = b""
    host: str = ""

    def metadata(self) -> dict[str, str]:
        """Return the user metadata of the object: ASCII, and less than the 2 KB that S3 allows."""
        assert self.digest is not None
        path = urllib.parse.quote_from_bytes(self.path)
        found = {
            "sha256": self.digest.hex(),
            "quality": self.quality.name.lower(),
            "trust": self.trust.name.lower(),
            "segments": f"{self.segments:x}",
            "mode": "555" if self.executable else "444",
            "mtime": str(self.mtime_ns),
            "first-seen": str(self.first_seen_ns),
            "host": urllib.parse.quote(self.host)[:_MOST_HOST],
        }
        if path and len(path) <= _MOST_PATH:
            found["path"] = path
        if self.truncated:
            found["truncated"] = "1"
        if 0 < len(self.scripts) <= _MOST_SCRIPTS:
            found["scripts"] = ",".join(f"{each.offset}+{each.size}" for each in self.scripts)
        return found


def described(metadata: Mapping[str, str]) -> Described:
    """Decode the metadata of an object. Damaged values count as absent."""
    digest = metadata.get("sha256", "")
    return Described(
        Digest(bytes.fromhex(digest)) if re.fullmatch(r"[0-9a-f]{64}", digest) else None,
        _named(Quality, metadata.get("quality", ""), Quality.NONE),
        _named(Trust, metadata.get("trust", ""), Trust.UNKNOWN),
        tuple(
            ByteRange(int(found[1]), int(found[2]))
            for found in itertools.islice(
                _EXTENT.finditer(metadata.get("scripts", "")), _MOST_SCRIPTS
            )
        ),
        _number(metadata.get("segments", ""), 16),
        metadata.get("truncated") == "1",
        metadata.get("mode") != "444",
        _number(metadata.get("mtime", "")),
        _number(metadata.get("first-seen", "")),
        _path(metadata.get("path", "")),
        _host(metadata.get("host", "")),
    )


def _path(text: str) -> bytes:
    """Return a path if a file can have it; else an empty one."""
    path = urllib.parse.unquote_to_bytes(text[:MOST_PATH])
    parts = path.split(b"/")[1:]
    is_whole = path.startswith(b"/") and all(part not in (b"", b".", b"..") for part in parts)
    return path if is_whole and b"\0" not in path else b""


def _host(text: str) -> str:
    """Return the name of a host without the characters that a terminal interprets."""
    return "".join(filter(str.isprintable, urllib.parse.unquote(text[:_MOST_HOST])))


def _named(kind: type[E], name: str, default: E) -> E:
    try:
        return kind[name.upper()]
    except KeyError:
        return default


def _number(text: str, base: int = 10) -> int:
    if not re.fullmatch(r"[0-9a-f]{1,20}", text):
        return 0
    try:
        return min(int(text, base), 2**63 - 1)
    except ValueError:
        return 0
