# SPDX-License-Identifier: Apache-2.0
"""The file in which a store keeps the source files of one build ID.

    magic            16 bytes
    length           8 bytes, little-endian: bytes of the list
    list             msgpack: [[path, offset, size], ...]
    files            the files, each at its offset from here

A path is the one in the debug information, made absolute and without dot segments. A reader needs
only the beginning of the archive, and the wanted file.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.elf.header import ReadAt

_HEAD: Final = struct.Struct("<16sQ")
_MAGIC: Final = b"buildid sources\n"
_MOST_LIST: Final = 8 << 20
_MOST_PATH: Final = 4096

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[bytes, int, int]]).decode


def normal(path: bytes) -> bytes:
    """Return an absolute path without dot segments and double slashes; the filesystem
    is not used.
    """
    names: list[bytes] = []
    for name in path.split(b"/"):
        if name == b"..":
            del names[-1:]
        elif name not in (b"", b"."):
            names.append(name)
    return b"/" + b"/".join(names)


def pack(sizes: Iterable[tuple[bytes, int]]) -> bytes:
    """Return the beginning of an archive of files with these paths and sizes, which follow in
    order.
    """
    rows, at = [], 0
    for path, size in sizes:
        rows.append((path, at, size))
        at += size
    text = _encode(rows)
    return _HEAD.pack(_MAGIC, len(text)) + text


def unpack(read_at: ReadAt, size: int) -> dict[bytes, ByteRange] | None:
    """Return the extents of the files in an archive of ``size`` bytes; None for any other file."""
    head = read_at(0, _HEAD.size)
    if len(head) < _HEAD.size:
        return None
    magic, length = _HEAD.unpack(head)
    start = _HEAD.size + length
    if magic != _MAGIC or length > _MOST_LIST or start > size:
        return None
    try:
        rows = _decode(read_at(_HEAD.size, length))
    except (msgspec.MsgspecError, RecursionError):
        return None
    found = {}
    for path, offset, length in rows:
        if offset < 0 or length < 0 or start + offset + length > size or len(path) > _MOST_PATH:
            return None
        found[path] = ByteRange(start + offset, length)
    return found
