# SPDX-License-Identifier: Apache-2.0
"""The lists of a Debian mirror: ``Release`` with the hashes of lists, and ``Packages``.

Both come from a mirror, piece by piece. The decoders keep only one line of bounded length and the
fields of one package, and skip malformed parts.

Source: deb822(5), https://wiki.debian.org/DebianRepository/Format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LINE_MAX: Final = 8 << 20
"""The longest line in bytes; a kernel's package names 4,000 build IDs in one, of 41 bytes each."""

_FIELD_MAX: Final = 4096
_HASHES: Final = b"sha256"
_WANTED: Final = frozenset((b"filename", b"size", b"sha256"))
_IDS: Final = b"build-ids"
_SHA256_DIGITS: Final = 64


class ListedFile(msgspec.Struct, frozen=True, gc=False):
    """A file of a mirror: its SHA-256 and size according to a list."""

    sha256: bytes
    size: int


class ListedPackage(msgspec.Struct, frozen=True, gc=False):
    """A package with debug files: its path on the mirror, its hash, and its build IDs."""

    path: bytes
    sha256: bytes
    size: int
    build_ids: tuple[bytes, ...]


def lines(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Yield the lines of a text that comes in pieces; a line that is too long is skipped."""
    rest, is_long = bytearray(), False
    for piece in pieces:
        first, *others = bytes(piece).split(b"\n")
        if not is_long:
            rest += first
            is_long = len(rest) > LINE_MAX
        if is_long:
            rest.clear()
        if others:
            if not is_long:
                yield bytes(rest)
            last = others.pop()
            yield from (each for each in others if len(each) <= LINE_MAX)
            is_long = len(last) > LINE_MAX
            rest = bytearray() if is_long else bytearray(last)
    if rest:
        yield bytes(rest)


def release(text: Iterable[bytes | memoryview]) -> dict[bytes, ListedFile]:
    """Return the files with SHA-256 hashes in a ``Release`` or ``InRelease`` file, by path."""
    found: dict[bytes, ListedFile] = {}
    in_hashes = False
    for line in lines(text):
        if line[:1] not in (b" ", b"\t"):
            in_hashes = line.partition(b":")[0].strip().lower() == _HASHES
            continue
        words = line.split(None, 3) if in_hashes else []
        if len(words) == 3:
            digest, size = _digest(words[0]), _number(words[1])
            if digest and size is not None and len(words[2]) <= _FIELD_MAX:
                found[words[2]] = ListedFile(digest, size)
    return found


def packages(text: Iterable[bytes | memoryview]) -> Iterator[ListedPackage]:
    """Yield the packages of a ``Packages`` file that have build IDs, in their order."""
    fields: dict[bytes, bytes] = {}
    for line in lines(text):
        if not line or line.isspace():
            if fields:
                yield from _package(fields)
                fields = {}
        elif line[:1] not in (b" ", b"\t"):
            name, colon, value = line.partition(b":")
            name = name.strip().lower()
            if colon and (name == _IDS or (name in _WANTED and len(value) <= _FIELD_MAX)):
                fields.setdefault(name, value.strip())
    yield from _package(fields)


def _package(fields: dict[bytes, bytes]) -> Iterator[ListedPackage]:
    """Yield the package with these fields, if it has all of them."""
    ids = tuple(filter(None, map(_build_id, fields.get(_IDS, b"").split())))
    digest, size = _digest(fields.get(b"sha256", b"")), _number(fields.get(b"size", b""))
    path = fields.get(b"filename", b"")
    if ids and digest and size is not None and path:
        yield ListedPackage(path, digest, size, ids)


def _build_id(text: bytes) -> bytes:
    """Return a build ID of at least two bytes; empty for other text."""
    return _hex(text) if 4 <= len(text) <= 240 else b""


def _digest(text: bytes) -> bytes:
    """Return a SHA-256; empty for other text."""
    return _hex(text) if len(text) == _SHA256_DIGITS else b""


def _hex(text: bytes) -> bytes:
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() and len(text) < 19 else None
