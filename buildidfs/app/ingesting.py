# SPDX-License-Identifier: Apache-2.0
"""What is captured beside processes and trees: installed kernels, single files; and its removal."""

from __future__ import annotations

import fnmatch
import os
import re
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.errors import ArtifactMissing
from buildidfs.model import Artifact, BuildId, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.capture.base import Found
    from buildidfs.config import Settings
    from buildidfs.ingest import Summary
    from buildidfs.model import Digest
    from buildidfs.store import Store

    Progress = Callable[[int, str], None]

_HEX: Final = re.compile(r"[0-9a-fA-F]+")
_FILES_SHOWN: Final = 10


def scan_kernel(
    store: Store,
    settings: Settings,
    *,
    everything: bool = False,
    root: bytes | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Capture the running kernel: its symbols, files and loaded modules, with debug files.

    ``everything`` adds all kernels and modules that are installed. With a ``root`` it is only
    these, below that directory. Raises `StoreFull`.
    """
    from buildidfs.capture.scan.kernel import InstalledKernels, KernelScanner
    from buildidfs.ingest import Ingest, StoreMemo

    memo = StoreMemo(store)
    namespaces = settings.container.namespaces

    def found() -> Iterator[Found]:
        if root is None:
            yield from KernelScanner(
                memo,
                all_files=True,
                spool_directory=store.path,
                container_namespaces=namespaces,
            )
        if everything or root is not None:
            yield from InstalledKernels(
                memo,
                root or b"/",
                spool_directory=store.path,
                container_namespaces=namespaces,
            )

    return Ingest(store).run(found(), progress)


def add(
    store: Store,
    settings: Settings,
    paths: Sequence[bytes],
    *,
    build_id: BuildId | None = None,
    kallsyms: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Capture single files and their debug files (`capture.scan.tree`).

    Raises `StoreFull`.
    """
    from buildidfs.capture.scan.tree import GivenFiles
    from buildidfs.ingest import Ingest, StoreMemo

    scanner = GivenFiles(
        StoreMemo(store),
        paths,
        build_id=build_id,
        kallsyms=kallsyms,
        spool_directory=store.path,
        container_namespaces=settings.container.namespaces,
    )
    return Ingest(store).run(scanner, progress)


class Chosen(msgspec.Struct, frozen=True):
    """A blob to be removed, one of the artifacts it is, and where it was seen last.

    ``is_pinned`` says that somebody wants to keep what has that build ID.
    """

    build_id: BuildId
    artifact: Artifact
    path: bytes
    is_pinned: bool


def choose(store: Store, wanted: Iterable[str]) -> list[Chosen]:
    """What is meant by build IDs, or beginnings of them, and patterns of paths.

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
    """What debug information of a build ID is elsewhere; None if none is.

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
