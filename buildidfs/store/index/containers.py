# SPDX-License-Identifier: Apache-2.0
"""The files of each container, as it saw them: a tree for each, to be browsed when it is gone.

Three tables, see `schema`:

*containers*. A number, which is never used again, to each container that files were captured of.
What stands in the row of its image and its ID is for people.

*labels*. Its name among the others: `spelled` of what `label_of` says. That may come to mean
another container (inode numbers of namespaces are used again) or another image (tags are moved),
and who may make control groups or bundles can give a container the label of somebody else's: the
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

import re
from struct import Struct
from typing import TYPE_CHECKING, Final
from zlib import crc32

import msgspec

from buildidfs.formats.container import cgroup
from buildidfs.model import NamespaceSet, Origin, fingerprint
from buildidfs.store.index.queries import DAMAGE, damaged, whole
from buildidfs.store.schema import schema
from buildidfs.store.schema.locations import TIMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store.index.environment import Environment
    from buildidfs.store.index.queries import Index

ROOT: Final = 0
MAX_CONTAINERS: Final = 8192
MAX_ENTRIES: Final = 65_536
MAX_CONTENTS: Final = 2**21
MAX_LABEL: Final = 255

PUBLIC_BIT: Final = 0x80

_SUFFIX: Final = 24
"""Bytes kept free behind a label for what tells two with the same one apart."""

KEY: Final = Struct(">IIQ")
VALUE: Final = Struct(">IQBHI")

#: What a directory entry cannot have, and what a terminal would obey; "%" is what marks them, and
#: "~" what stands before that which tells two with the same label apart.
_UNFIT: Final = re.compile(rb"[\x00-\x1f/%~\x7f]|\xc2[\x80-\x9f]|\A\.")
_OF_NAMESPACE: Final = tuple(f"{name}:" for name in NamespaceSet.__struct_fields__)
_BUNDLE: Final = "bundle"
_IMAGE_DIGEST: Final = re.compile(r"\A[a-z0-9+._-]+:[0-9a-f]{32,128}(?=/)", re.ASCII)


class Container(msgspec.Struct, frozen=True):
    """A container that files were captured of, an image or package, or a host that a bundle is of.

    ``name`` is what `containers/` has it under, ``label`` and ``token`` are `label_of` and
    `token_of` its places. ``id`` and ``image`` are empty where they are not known. Times are in
    nanoseconds of Unix time. ``public`` says that everybody could read one of its files.
    """

    number: int
    name: bytes
    label: str
    id: str
    image: str
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


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ContainerRow).decode


def spelled(label: str) -> bytes:
    """A label as a directory entry, by which nobody can be misled."""
    name = _UNFIT.sub(_escaped, as_bytes(label))
    if len(name) <= MAX_LABEL - _SUFFIX:
        return name
    return name[: MAX_LABEL - _SUFFIX - 17] + b"~" + fingerprint(name)[:8].hex().encode()


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"".join(b"%%%02X" % byte for byte in found[0])


def offset_of(name: bytes) -> int:
    """What stands for a name in the key of a row, and in a listing: 1 to 2**63-1."""
    return int.from_bytes(fingerprint(name, 8), "big") >> 1 or 1


def unpack_container(number: int, value: bytes) -> tuple[Container, ContainerRow]:
    """A row of *containers*. Raises what decoding raises."""
    first, last = TIMES.unpack_from(value)
    row = _decode(memoryview(value)[TIMES.size :])
    label, its_id, image, host = map(_text, (row.label, row.id, row.image, row.host))
    public = row.public
    found = Container(number, row.name, label, its_id, image, host, first, last, row.token, public)
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
    if nul:  # else it was written before there was a check
        row = value[: VALUE.size + len(name) + 1]
        if check != schema.CHECK.pack(crc32(row, crc32(key))):
            raise ValueError("it is not what was written for that name")
    public = bool(kind & PUBLIC_BIT)
    kind &= ~PUBLIC_BIT
    return ContainerEntry(name, offset, directory, ordinal, kind, variant, public)


def pack_container(first: int, last: int, row: ContainerRow) -> bytes:
    """The inverse of `unpack_container`; when it was first and last seen."""
    return TIMES.pack(first, last) + _encode(row)


def label_of(origin: Origin) -> str:
    """Of what the files at a place are a tree: a container, or another host that a bundle comes
    from. Empty for this one, whose files are where they were.
    """
    if origin.container or origin.scanner != _BUNDLE or not origin.host:
        return origin.container
    return f"host:{origin.host}"


def names_of(origin: Origin, token: bytes) -> tuple[bytes, ...]:
    """What a container may be named, the usual name first."""
    name = spelled(label_of(origin))
    return (name, name + b"~" + token) if token else (name,)


def token_of(origin: Origin) -> bytes:
    """What tells a container from others with its label; empty if none are known, or nothing is."""
    known = b""
    if origin.container.startswith(_OF_NAMESPACE):
        known = b"%d" % origin.mnt_ns_id if origin.mnt_ns_id else b""
    elif origin.container:
        known = as_bytes(image_of(origin).partition(":")[2][:12])
        place = b"" if known else cgroup.place(origin.cgroup)
        known = fingerprint(place)[:6].hex().encode() if place else known
    if origin.container and origin.scanner == _BUNDLE:  # it says what it likes
        return fingerprint(known + b"\0" + as_bytes(origin.host))[:6].hex().encode()
    return known


def is_of(container: Container, origin: Origin) -> bool:
    """Whether a place is in that container, and not in another with its label."""
    return label_of(origin) == container.label and token_of(origin) in (b"", container.token)


def image_of(origin: Origin) -> str:
    """The digest of the image that a place is in; empty if it is in none."""
    found = _IMAGE_DIGEST.match(origin.host)
    return found[0] if found else ""


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


class ContainerTree:
    """The containers that files are known of, and the tree of files of each."""

    def __init__(self, environment: Environment, index: Index) -> None:
        self._env = environment
        self._index = index
        tables = environment.tables
        self._containers = tables["containers"]
        self._labels = tables["labels"]
        self._contents = tables["contents"]

    def number(self, name: bytes) -> int | None:
        """The number of the container with that name."""
        if not 0 < len(name) <= MAX_LABEL:
            return None
        value = self._env.get(self._labels, name)
        return None if value is None else int.from_bytes(value, "big")

    @whole
    def get(self, number: int) -> Container | None:
        """The container with that number."""
        value = self._env.get(self._containers, schema.U32.pack(number))
        return None if value is None else unpack_container(number, value)[0]

    def every(self, after: int = 0) -> Iterator[Container]:
        """All containers in order of numbers, behind ``after``."""
        for key, value in self._index.rows(self._containers, b"", schema.U32.pack(after)):
            try:
                container = unpack_container(int.from_bytes(key, "big"), value)[0]
            except DAMAGE as error:
                raise damaged(error) from error
            yield container

    @whole
    def child(self, container: int, directory: int, name: bytes) -> ContainerEntry | None:
        """What a directory of a container has under a name."""
        key = KEY.pack(container, directory, offset_of(name))
        value = self._env.get(self._contents, key)
        if value is None:
            return None
        entry = unpack_entry(key, value)
        return entry if entry.name == name else None

    def children(self, container: int, directory: int, after: int = 0) -> Iterator[ContainerEntry]:
        """What is in a directory of a container, in order of offsets, behind ``after``."""
        start = KEY.pack(container, directory, after)
        for key, value in self._index.rows(self._contents, start[:8], start):
            try:
                entry = unpack_entry(key, value)
            except DAMAGE as error:
                raise damaged(error) from error
            yield entry
