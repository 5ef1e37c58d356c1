# SPDX-License-Identifier: Apache-2.0
"""Find artifacts in a store, and tell what it has and lacks of a build ID."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.errors import ArtifactMissing, InvalidBuildId
from buildidfs.model import Artifact, BuildId, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.model import Digest
    from buildidfs.store import Store

_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_FILES_SHOWN: Final = 10
_LEAST_DIGITS: Final = 16


def named_build_id(store: Store, text: str) -> BuildId:
    """A build ID that the store knows by its beginning, or one in full that it may get to know.

    Raises `InvalidBuildId`, `AmbiguousBuildId`.
    """
    try:
        return store.index.match(text)
    except ArtifactMissing:
        if len(text) < _LEAST_DIGITS:
            raise InvalidBuildId(
                f"nothing is known of build ID {text}: what is not here yet has to be given in full"
            ) from None
        return BuildId.from_hex(text.lower())


class Chosen(msgspec.Struct, frozen=True):
    """A blob to be removed, one of the artifacts it is, and where it was seen last.

    ``is_pinned`` says that a pin keeps what has that build ID.
    """

    build_id: BuildId
    artifact: Artifact
    path: bytes
    is_pinned: bool


def choose(store: Store, wanted: Iterable[str]) -> list[Chosen]:
    """Return the blobs meant by build IDs, or beginnings of them, and patterns of paths.

    Of a build ID everything is; of paths the files seen at one that matches, as a whole, with ``*``
    for anything. Each blob comes once. Raises `ArtifactMissing` for what means nothing,
    `AmbiguousBuildId`.
    """
    chosen: dict[Digest, Chosen] = {}
    for text in wanted:
        found = _by_id(store, text) if _HEX.fullmatch(text) else _by_path(store, text)
        for each in found:
            chosen.setdefault(each.artifact.digest, each)
    return list(chosen.values())


def _by_id(store: Store, text: str) -> Iterator[Chosen]:
    build_id = store.index.match(text)
    yield from _blobs(store, store.index.ordinal(build_id) or 0, build_id)
    package = names.package_id(build_id)
    if package is not None and (ordinal := store.index.ordinal(package)) is not None:
        yield from _blobs(store, ordinal, package)


def _by_path(store: Store, glob: str) -> Iterator[Chosen]:
    pattern = re.compile(os.fsencode(fnmatch.translate(glob)))
    found = False
    for ordinal, build_id in store.index.build_ids_from():
        for each in _blobs(store, ordinal, build_id, pattern):
            found = True
            yield each
    if not found:
        raise ArtifactMissing(
            f"nothing was seen at {glob!r}; a pattern has to match the whole path"
        )


def _blobs(
    store: Store, ordinal: int, build_id: BuildId, pattern: re.Pattern[bytes] | None = None
) -> Iterator[Chosen]:
    """The blobs of a build ID, or those of them that were seen at a path which matches."""
    is_pinned = bool(store.pins.of(names.package_owner(build_id) or build_id))
    paths: dict[Digest, bytes] = {}
    for record in store.index.origins(ordinal):
        if pattern is None or pattern.match(record.origin.path):
            paths.setdefault(record.digest, record.origin.path)
    for kind in Kind:
        for artifact in store.index.variants(ordinal, kind):
            if pattern is None or artifact.digest in paths:
                path = paths.get(artifact.digest, b"")
                yield Chosen(build_id, artifact, path, is_pinned)


class SplitDwarf(msgspec.Struct, frozen=True):
    """Debug information that is in files of its own.

    ``units`` are so many, ``files`` the names of the first by which the compiler wrote them, and
    ``package`` is what their .dwp file is kept under, if it was seen.
    """

    units: int
    files: tuple[bytes, ...]
    package: BuildId | None


def split_dwarf(store: Store, build_id: BuildId) -> SplitDwarf | None:
    """Return the split DWARF of a build ID; None if it has none.

    Raises `IntegrityError`.
    """
    from buildidfs.formats.elf import splitdwarf

    ordinal = store.index.ordinal(build_id) or 0
    for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
        artifact = store.index.artifact(ordinal, kind)
        if artifact is None:
            continue
        with store.blobs.open(artifact.digest) as blob:
            found = list(splitdwarf.skeletons(blob.read_at, blob.size))
        if found:
            paths = [os.path.join(each.directory, each.name) for each in found[:_FILES_SHOWN]]
            package = names.package_id(build_id)
            if package is not None and store.index.ordinal(package) is None:
                package = None
            return SplitDwarf(len(found), tuple(paths), package)
    return None
