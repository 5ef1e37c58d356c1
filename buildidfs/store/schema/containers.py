# SPDX-License-Identifier: Apache-2.0
"""Rows of *containers*, *labels* and *contents*: the files of each container, as it saw them.

Three tables, see `schema`:

*containers*. A number, which is never used again, to each container that files were captured of.
What stands in the row of
its names, its image and its ID is for people.

*labels*. Its name among the others: `spelled` of what `label_of` says. That may come to mean
another container (inode numbers of namespaces are used again) or another image (tags are moved),
and a user who may make control groups or bundles can give a container any label: the
later one has ``~`` and what tells them apart behind it.

*contents*. One row for each name in a directory. Directories have numbers within their container,
from 1; 0 is its root. The key has the hash of the name and not the name, so that a number says
where a listing was broken off. The value has the number of the directory that the name leads to,
or 0 and the artifact that was last seen there, which may have been removed since; its kind has
`PUBLIC_BIT` if everybody could read it there, or something below the directory. The stamp is the
time of that in seconds, up to a minute early. A name that once led to a directory does so until the
directory is empty. A directory has a higher number than the one that it is in.

A container has at most `MAX_ENTRIES` rows; of what it has beyond, nothing is said here. When there
are more than `MAX_CONTAINERS`, or rows of all together than `MAX_CONTENTS`, containers go that were
last seen longest ago, some rows with each transaction, and more than it has added.
"""

from __future__ import annotations

from struct import Struct
from typing import Final
from zlib import crc32

import msgspec

from buildidfs.model import ContainerNames, fingerprint
from buildidfs.store.schema import schema
from buildidfs.store.schema.locations import TIMES

PUBLIC_BIT: Final = 0x80


KEY: Final = Struct(">IIQ")


VALUE: Final = Struct(">IQBHI")


class Container(msgspec.Struct, frozen=True):
    """A container that files were captured of, an image or package, or a host that a bundle is of.

    ``name`` is what `containers/` has it under, ``label`` and ``token`` are `label_of` and
    `token_of` its places. ``called`` has its names and its image. ``id`` and each of these are
    empty where they are not known. Times are in nanoseconds of Unix time. ``public`` says that everybody could read one of its files.
    """

    number: int
    name: bytes
    label: str
    id: str
    called: ContainerNames
    host: str
    first_seen_ns: int
    last_seen_ns: int
    token: bytes = b""
    public: bool = False


class ContainerEntry(msgspec.Struct, frozen=True):
    """A name in a directory of a container: ``directory`` is its number, or 0 for a file, which is
    (``ordinal``, ``kind``, ``variant``). ``offset`` says where a listing goes on behind it.
    ``public`` says that everybody could read the file, or one below the directory.
    """

    name: bytes
    offset: int
    directory: int
    ordinal: int
    kind: int
    variant: int
    public: bool = False


class ContainerRow(msgspec.Struct, array_like=True):
    """The msgpack part of a row of *containers*. Texts are bytes, whatever encoding they have."""

    name: bytes
    label: bytes
    id: bytes
    image: bytes
    host: bytes
    token: bytes
    next_directory: int = 1
    entries: int = 0
    public: bool = False
    called: bytes = b""
    pod: bytes = b""
    namespace: bytes = b""


_encode = msgspec.msgpack.Encoder().encode


_decode = msgspec.msgpack.Decoder(ContainerRow).decode


def offset_of(name: bytes) -> int:
    """The number that stands for a name in the key of a row and in a listing, 1 to 2**63-1."""
    return int.from_bytes(fingerprint(name, 8), "big") >> 1 or 1


def unpack_container(number: int, value: bytes) -> tuple[Container, ContainerRow]:
    """A row of *containers*. Raises what decoding raises."""
    first, last = TIMES.unpack_from(value)
    row = _decode(memoryview(value)[TIMES.size :])
    label, its_id, host = map(_text, (row.label, row.id, row.host))
    called = ContainerNames(*map(_text, (row.called, row.pod, row.namespace, row.image)))
    public = row.public
    found = Container(number, row.name, label, its_id, called, host, first, last, row.token, public)
    return found, row


def pack_entry(
    key: bytes, name: bytes, directory: int, artifact: tuple[int, int, int], stamp: int
) -> bytes:
    """A row of *contents*."""
    row = VALUE.pack(directory, *artifact, stamp) + name + b"\0"
    return row + schema.CHECK.pack(crc32(row, crc32(key)))


def unpack_entry(key: bytes, value: bytes) -> ContainerEntry:
    """The inverse of `pack_entry`. Raises what decoding raises."""
    directory, ordinal, kind, variant, _ = VALUE.unpack_from(value)
    offset = KEY.unpack(key)[2]
    name, nul, check = value[VALUE.size :].partition(b"\0")
    row = value[: VALUE.size + len(name) + 1]
    if not nul or check != schema.CHECK.pack(crc32(row, crc32(key))):
        raise ValueError("it is not what was written for that name")
    public = bool(kind & PUBLIC_BIT)
    kind &= ~PUBLIC_BIT
    return ContainerEntry(name, offset, directory, ordinal, kind, variant, public)


def pack_container(first: int, last: int, row: ContainerRow) -> bytes:
    """The inverse of `unpack_container`; when it was first and last seen."""
    return TIMES.pack(first, last) + _encode(row)


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
