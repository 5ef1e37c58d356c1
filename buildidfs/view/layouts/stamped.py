# SPDX-License-Identifier: Apache-2.0
"""Files with an adopted ID, in the form that perf needs: with a note that contains the ID.

Only perf's tree has this form; ``<id>/elf`` has the exact bytes. Header and tail are made on
reading, from the headers of the file. The directories of `layouts.perf` contain these files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.elf import added_note
from buildidfs.store import Blob
from buildidfs.view.attributes import Attributes, of_artifact

if TYPE_CHECKING:
    from buildidfs.formats.elf.added_note import Stamped
    from buildidfs.model import Artifact, Digest
    from buildidfs.store import Store

_REMEMBERED: Final = 64


class StampedFiles:
    """Opens files with a note of their adopted ID."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # One debug file may belong to several adopted IDs.
        self._known: dict[tuple[Digest, int], Stamped | None] = {}

    def is_known(self, artifact: Artifact) -> bool:
        """Return True if `attributes` and `open` need not read the headers of the file."""
        return (artifact.digest, artifact.ordinal) in self._known

    def attributes(self, artifact: Artifact) -> Attributes:
        """Return the attributes of the file with its note. Raises OSError, `IntegrityError`."""
        attributes, parts = of_artifact(artifact), self.parts(artifact)
        return attributes if parts is None else msgspec.structs.replace(attributes, size=parts.size)

    def open(self, artifact: Artifact) -> Blob:
        """Open the file with its note; without it if the note cannot be added.

        Raises OSError, `IntegrityError`.
        """
        parts = self.parts(artifact)
        blob = self._store.open_blob(artifact.digest)
        return blob if parts is None else StampedBlob(blob, parts)

    def parts(self, artifact: Artifact) -> Stamped | None:
        """Return the parts that differ from the exact bytes; None if the note cannot be added."""
        key = artifact.digest, artifact.ordinal
        if key not in self._known:
            build_id = self._store.index.build_id(artifact.ordinal) or b""
            with self._store.blobs.open(artifact.digest) as blob:
                found = added_note.with_note(blob.read_at, blob.size, build_id)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = found
            return found
        return self._known[key]


class StampedBlob(Blob):
    """A blob that is read with another header and with an added tail; `close` also closes
    the blob.
    """

    __slots__ = ("_blob", "_parts")

    def __init__(self, blob: Blob, parts: Stamped) -> None:
        self.fd = -1
        self.is_plain = False
        self.size = parts.size
        self._copy = None
        self._blob = blob
        self._parts = parts

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to ``size`` bytes from ``offset``; raises the errors of the blob."""
        parts = self._parts
        end = min(offset + size, parts.size)
        if offset >= end:
            return b""
        data = bytearray(end - offset)
        if offset < self._blob.size:
            own = self._blob.pread(min(end, self._blob.size) - offset, offset)
            data[: len(own)] = own
        for at, part in ((0, parts.head), (parts.at, parts.tail)):
            first, last = max(offset, at), min(end, at + len(part))
            if first < last:
                data[first - offset : last - offset] = part[first - at : last - at]
        return bytes(data)

    def close(self) -> None:
        """Close the blob; safe to call twice."""
        self._blob.close()
