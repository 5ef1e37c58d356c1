# SPDX-License-Identifier: Apache-2.0
"""The source files of a build ID, out of the archive that a store keeps of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.formats import source_archive
from buildidfs.model import Kind, Quality
from buildidfs.store import is_withheld
from buildidfs.view import FileContent
from buildidfs.view.layouts.id_dir import Section
from buildidfs.view.permissions import is_public

if TYPE_CHECKING:
    from buildidfs.model import Artifact, ByteRange, Digest
    from buildidfs.store import Store

_MOST_LISTED: Final = 100_000
"""Source files in the lists that are kept in memory."""


class Sources:
    """Finds and opens source files. May be used from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        # The lists of the archives that were asked for last; a digest is the same list for ever.
        self._lists: OrderedDict[Digest, dict[bytes, ByteRange]] = OrderedDict()

    def artifact(self, ordinal: int) -> Artifact | None:
        """The archive of the sources of a build ID.

        None if there is none, if it is believed less than the executable, or if not all users may
        read the debug information.
        """
        index = self._store.index
        build_id = index.build_id(ordinal)
        kept_under = None if build_id is None else names.sources_id(build_id)
        found = None if kept_under is None else index.ordinal(kept_under)
        artifact = None if found is None else index.artifact(found, Kind.DEBUGINFO)
        if artifact is None or build_id is None:
            return None
        executable = index.artifact(ordinal, Kind.EXECUTABLE)
        if is_withheld(artifact, executable, index.floor(build_id)):
            return None
        return artifact if self._may_be_named(ordinal) else None

    def _may_be_named(self, ordinal: int) -> bool:
        """Return True unless the debug information that names the sources is private."""
        for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
            found = self._store.index.artifact(ordinal, kind)
            if found is not None and found.quality >= Quality.DEBUGINFO:
                return is_public(found)
        return True

    def open(self, artifact: Artifact, path: bytes) -> FileContent | None:
        """Open a source file of an archive, None if it has none at that path.

        Raises OSError, `IntegrityError`.
        """
        blob = self._store.open_blob(artifact.digest)
        try:
            with self._lock:
                files = self._lists.get(artifact.digest)
            if files is None:
                files = source_archive.unpack(blob.read_at, blob.size) or {}
                with self._lock:
                    self._lists[artifact.digest] = files
                    while len(self._lists) > 1 and self._listed() > _MOST_LISTED:
                        self._lists.popitem(last=False)
            extent = files.get(path)
            if extent is not None:
                return FileContent(b"", (), Section(blob, extent))
        except BaseException:
            blob.close()
            raise
        blob.close()
        return None

    def _listed(self) -> int:
        return sum(map(len, self._lists.values()))
