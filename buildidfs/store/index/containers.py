# SPDX-License-Identifier: Apache-2.0
"""The files of each container, to be browsed when it is gone; see `location_rows`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from buildidfs.formats.container import cgroup
from buildidfs.model import NamespaceSet, Origin, fingerprint
from buildidfs.store import schema
from buildidfs.store.index.queries import DAMAGE, damaged, whole
from buildidfs.store.location_rows import (
    KEY,
    Container,
    ContainerEntry,
    offset_of,
    unpack_container,
    unpack_entry,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store.index.environment import Environment
    from buildidfs.store.index.queries import Index

ROOT: Final = 0
MAX_CONTAINERS: Final = 8192
MAX_ENTRIES: Final = 65_536
MAX_CONTENTS: Final = 2**21
MAX_LABEL: Final = 255


_SUFFIX: Final = 24
"""Bytes kept free behind a label for what tells two with the same one apart."""


#: What a directory entry cannot have, and what a terminal would obey; "%" is what marks them, and
#: "~" what stands before that which tells two with the same label apart.
_UNFIT: Final = re.compile(rb"[\x00-\x1f/%~\x7f]|\xc2[\x80-\x9f]|\A\.")
_OF_NAMESPACE: Final = tuple(f"{name}:" for name in NamespaceSet.__struct_fields__)
_BUNDLE: Final = "bundle"
_IMAGE_DIGEST: Final = re.compile(r"\A[a-z0-9+._-]+:[0-9a-f]{32,128}(?=/)", re.ASCII)


def spelled(label: str) -> bytes:
    """A label as a directory entry without characters that mislead."""
    name = _UNFIT.sub(_escaped, as_bytes(label))
    if len(name) <= MAX_LABEL - _SUFFIX:
        return name
    return name[: MAX_LABEL - _SUFFIX - 17] + b"~" + fingerprint(name)[:8].hex().encode()


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"".join(b"%%%02X" % byte for byte in found[0])


def label_of(origin: Origin) -> str:
    """Of what the files at a place are a tree: a container, or another host that a bundle comes
    from. Empty for this one, whose files are where they were.
    """
    if origin.container or origin.scanner != _BUNDLE or not origin.host:
        return origin.container
    return f"host:{origin.host}"


def names_of(origin: Origin, token: bytes) -> tuple[bytes, ...]:
    """Names that a container may have, the usual one first."""
    name = spelled(label_of(origin))
    return (name, name + b"~" + token) if token else (name,)


def token_of(origin: Origin) -> bytes:
    """Bytes that tell a container from others with its label; empty if none are known."""
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
    """Return True if a place is in that container, and not in another with its label."""
    return label_of(origin) == container.label and token_of(origin) in (b"", container.token)


def image_of(origin: Origin) -> str:
    """The digest of the image that a place is in; empty if it is in none."""
    found = _IMAGE_DIGEST.match(origin.host)
    return found[0] if found else ""


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


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
        """The entry of a name in a directory of a container (0: its root)."""
        key = KEY.pack(container, directory, offset_of(name))
        value = self._env.get(self._contents, key)
        if value is None:
            return None
        entry = unpack_entry(key, value)
        return entry if entry.name == name else None

    def children(self, container: int, directory: int, after: int = 0) -> Iterator[ContainerEntry]:
        """Entries of a directory of a container, in order of offsets, behind ``after``."""
        start = KEY.pack(container, directory, after)
        for key, value in self._index.rows(self._contents, start[:8], start):
            try:
                entry = unpack_entry(key, value)
            except DAMAGE as error:
                raise damaged(error) from error
            yield entry
