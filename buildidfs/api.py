# SPDX-License-Identifier: Apache-2.0
"""The public Python API, see docs/python.md: a store as build IDs, artifacts and their bytes.

`buildidfs.Store` is the class `Store` of this module. It hides ordinals, digests and transactions,
which may change with each version; the signatures here do not change.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from buildidfs import config, store
from buildidfs.errors import UsageError
from buildidfs.model import OWNER, Artifact, BuildId, Kind, Origin, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO, Self

    from buildidfs.capture.base import Found
    from buildidfs.ingest import ScanSummary
    from buildidfs.store import Blob

    Path = str | bytes | os.PathLike[str]


class Store:
    """A store of captured files; a context manager. Iteration yields every build ID."""

    def __init__(self, opened: store.Store, *, writable: bool) -> None:
        self._store = opened
        self._writable = writable

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Self:
        """Open the store at ``path`` for reading, or with ``create`` for adding files as well.

        ``create`` makes the store if there is none. Raises `StoreMissing`, `StoreVersionError`,
        `StoreFull`, `StoreDamaged`, `StoreError`.
        """
        if not create:
            return cls(store.Store.open(path, read_only=True), writable=False)
        from buildidfs.ingest import upkeep

        return cls(upkeep.open_for_capture(path, config.Settings()), writable=True)

    def close(self) -> None:
        """Close the store; safe to call twice."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[BuildId]:
        for _, build_id in self._store.index.build_ids_from():
            yield build_id

    def __contains__(self, build_id: BuildId) -> bool:
        return bool(self.artifacts(build_id))

    def find(self, text: str) -> BuildId:
        """Return the build ID that starts with the hex digits ``text``.

        Raises `InvalidBuildId`, `AmbiguousBuildId`, `ArtifactMissing`.
        """
        return self._store.match(text)

    def artifacts(self, build_id: BuildId) -> dict[Kind, Artifact]:
        """Return the served artifacts of a build ID by kind; empty if the store has none."""
        ordinal = self._store.index.ordinal(build_id)
        if ordinal is None:
            return {}
        found = {kind: self._store.index.artifact(ordinal, kind) for kind in Kind}
        return {kind: artifact for kind, artifact in found.items() if artifact is not None}

    def paths(self, build_id: BuildId) -> list[bytes]:
        """Return the paths at which files with a build ID were seen, the latest first."""
        ordinal = self._store.index.ordinal(build_id)
        records = [] if ordinal is None else self._store.index.origins(ordinal)
        return list(dict.fromkeys(record.origin.path for record in records))

    def open_blob(self, artifact: Artifact) -> Blob:
        """Open the bytes of an artifact: ``size``, ``pread(size, offset)``, ``fileno()``.

        Use it as a context manager, or close it. Raises `IntegrityError` for a blob whose bytes
        have changed, `StoreError`.
        """
        return self._store.open_blob(artifact.digest)

    def read(self, artifact: Artifact) -> bytes:
        """Return all bytes of an artifact. Raises the errors of `open_blob`."""
        with self.open_blob(artifact) as blob:
            return blob.pread(blob.size, 0)

    def add(self, path: Path, *, build_id: BuildId | None = None) -> ScanSummary:
        """Capture a file and the debug files that belong to it.

        ``build_id`` is the ID for a file that has none. Raises `UsageError` if the store was opened
        for reading, `StoreFull`, `StoreError`.
        """
        from buildidfs.ingest import scans

        self._check_writable()
        return scans.add(self._store, config.Settings(), [os.fsencode(path)], build_id=build_id)

    def add_files(self, files: Iterable[tuple[Path, IO[bytes]]]) -> ScanSummary:
        """Capture open files, each with the path to record it under.

        Takes the files one by one and does not close them; each needs a descriptor (`fileno`). In a
        mount only root may see the recorded paths, because it is unknown which users may reach the
        files. Raises the errors of `add`.
        """
        from buildidfs.ingest import Ingest

        self._check_writable()
        return Ingest(self._store).run(map(_pinned, files))

    def _check_writable(self) -> None:
        if not self._writable:
            raise UsageError("the store was opened for reading; use Store.open(path, create=True)")


def _pinned(item: tuple[Path, IO[bytes]]) -> Found:
    from buildidfs.capture.base import PinnedFile, Unreadable
    from buildidfs.linux import inodes, machine

    path, file = os.fsencode(item[0]), item[1]
    try:
        file.flush()
        fd = os.dup(file.fileno())
    except OSError as error:
        return Unreadable.of(path, error)
    origin = Origin(
        path,
        inodes.identity(fd),
        host=machine.host_name(),
        trust=Trust.UNKNOWN,
        scanner="python",
        reach=OWNER,
    )
    return PinnedFile(Sighting(origin, time.time_ns()), fd)
