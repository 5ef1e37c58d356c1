# SPDX-License-Identifier: Apache-2.0
"""``<id>/section/<name>``: one section of the debuginfo, or else of the executable.

A debuginfod client asks for it, and gdb does before it loads all of a debug file for its index.
Sections are served as they are in the file, compressed or not. The directory is not listed, lest a
copy of the tree has everything twice. To find a section is to read the file, which may wait for a
disk: `Sections.find` and `Sections.open` are for a thread of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.elf.header import SHT_NOBITS, SHT_NULL
from buildidfs.formats.elf.sections import Sections as Headers
from buildidfs.model import Artifact, ByteRange, Kind
from buildidfs.store import Blob
from buildidfs.view import nodes
from buildidfs.view.attributes import Attributes, FileContent, of_artifact, stale

if TYPE_CHECKING:
    from buildidfs.formats.elf.sections import SectionHeader
    from buildidfs.store import Store

# The 22 bits of detail in a node: the kind, the number of the section, and the variant.
_EXECUTABLE_BIT: Final = 1 << 21
_NUMBER_SHIFT: Final = 14
_NUMBER_MAX: Final = 127
_VARIANT_MAX: Final = (1 << _NUMBER_SHIFT) - 1
_REMEMBERED: Final = 512


class Sections:
    """Finds and opens sections."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, ByteRange] = {}

    def find(self, ordinal: int, name: bytes) -> int:
        """The node of a section of a build ID, `nodes.ABSENT` if there is none.

        Reads the file. Raises OSError, `IntegrityError`.
        """
        for kind, bit in ((Kind.DEBUGINFO, 0), (Kind.EXECUTABLE, _EXECUTABLE_BIT)):
            artifact = self._store.index.artifact(ordinal, kind)
            if artifact is None or artifact.variant > _VARIANT_MAX:
                continue
            for number, header in enumerate(self._headers(artifact)):
                if header.name == name and _is_inside(header, artifact):
                    detail = bit | number << _NUMBER_SHIFT | artifact.variant
                    node = nodes.of_id(ordinal, nodes.SLOT_SECTION, detail)
                    self._remember(node, ByteRange(header.offset, header.size))
                    return node
        return nodes.ABSENT

    def artifact(self, node: int) -> Artifact:
        """The file that a section is of. Raises OSError(ESTALE) if it is gone from the store."""
        detail = node & nodes.DETAIL_MASK
        kind = Kind.EXECUTABLE if detail & _EXECUTABLE_BIT else Kind.DEBUGINFO
        ordinal, variant = nodes.ordinal_of(node), detail & _VARIANT_MAX
        artifact = self._store.index.artifact_variant(ordinal, kind, variant)
        if artifact is None:
            raise stale()
        return artifact

    def attributes(self, node: int) -> Attributes:
        """The attributes of the file, with the size of the section. Raises OSError(ESTALE)."""
        artifact = self.artifact(node)
        size = self._extent(node, artifact).size
        # Volatile, since a change of the file's mode is not told for its sections.
        return msgspec.structs.replace(of_artifact(artifact), size=size, volatile=True)

    def open(self, node: int, *, zeroed: bool) -> FileContent:
        """Open a section; with ``zeroed``, scripts in it read as zeros.

        Raises OSError, `IntegrityError`.
        """
        artifact = self.artifact(node)
        extent = self._extent(node, artifact)
        section = Section(self._store.open_blob(artifact.digest), extent)
        return FileContent(b"", _within(artifact.scripts, extent) if zeroed else (), section)

    def _extent(self, node: int, artifact: Artifact) -> ByteRange:
        """The extent of a section in its file, which is read if the extent was forgotten."""
        extent = self._known.get(node)
        if extent is None:
            headers = self._headers(artifact)
            number = node >> _NUMBER_SHIFT & _NUMBER_MAX
            if number >= len(headers) or not _is_inside(headers[number], artifact):
                raise stale()  # a number that was made up
            extent = ByteRange(headers[number].offset, headers[number].size)
            self._remember(node, extent)
        return extent

    def _headers(self, artifact: Artifact) -> list[SectionHeader]:
        """The first section headers of a file."""
        whole = ByteRange(0, artifact.size)
        with Section(self._store.open_blob(artifact.digest), whole) as part:
            found = Headers(part.read_at, artifact.size)
        return found.headers[: _NUMBER_MAX + 1]

    def _remember(self, node: int, extent: ByteRange) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[node] = extent


class Section(Blob):
    """A part of the content of a blob, which it closes."""

    __slots__ = ("_blob", "_extent")

    def __init__(self, blob: Blob, extent: ByteRange) -> None:
        self.fd = -1
        self.is_plain = False
        self.size = extent.size
        self._blob = blob
        self._copy = None
        self._extent = extent

    def pread(self, size: int, offset: int, /) -> bytes:
        """Up to ``size`` bytes from ``offset``; raises OSError(ESTALE) if the file was written."""
        size = min(size, max(self._extent.size - offset, 0))
        data = self._blob.pread(size, self._extent.offset + offset)
        if self._blob.was_written():
            raise stale()
        return data

    def close(self) -> None:
        """Close the blob; safe to call twice."""
        self._blob.close()


def _is_inside(header: SectionHeader, artifact: Artifact) -> bool:
    """Return True if a section has bytes, all of them in the file."""
    is_there = header.type not in (SHT_NOBITS, SHT_NULL) and header.size > 0
    return is_there and header.offset + header.size <= artifact.size


def _within(extents: tuple[ByteRange, ...], part: ByteRange) -> tuple[ByteRange, ...]:
    """The parts of extents that lie in a part of a file, counted from its start."""
    found = []
    for each in extents:
        start = max(each.offset, part.offset)
        end = min(each.offset + each.size, part.offset + part.size)
        if start < end:
            found.append(ByteRange(start - part.offset, end - start))
    return tuple(found)
