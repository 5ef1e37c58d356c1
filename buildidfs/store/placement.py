# SPDX-License-Identifier: Apache-2.0
"""Which executable of a build ID a process had mapped, by the offsets of its code in the file.

A tool that rewrites a program after the link (patchelf, LIEF, strip with another page size) keeps
its build ID, but may move its code within the file. Profiles count in offsets of the file, so each
function of the one file is another function of the other. A mapping shows which file it was: it
begins at the offset of a segment, and for a program without PIE its address is known. Each such
executable has an adopted ID of its own.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.errors import IntegrityError
from buildidfs.formats.elf import header as elf_header
from buildidfs.model import AliasType, Artifact, BuildId, Kind
from buildidfs.store.index.locations import IN_USE
from buildidfs.store.index.ranking import is_withheld

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from buildidfs.model import Digest
    from buildidfs.store.store import Store

_PAGE: Final = 4096
_LARGER_PAGES: Final = (1 << 14, 1 << 16)  # of other machines
_MOST_LAYOUTS: Final = 16
_MOST_KNOWN: Final = 1 << 14
_ET_EXEC: Final = 2


NOT_AS_MAPPED: Final = (
    "the store has another file with its build ID: the mapped one had its code at other offsets"
)
OFFSETS_DIFFER: Final = (
    "files with its build ID have their code at different offsets, and nothing tells which it was"
)


ADDRESSES_DIFFER: Final = (
    "files with its build ID are loaded at different addresses, and nothing tells which it was"
)


class Extent(NamedTuple):
    """An executable mapping of a file: addresses from ``start`` to ``end``, from ``offset``."""

    start: int
    end: int
    offset: int


class PlacedCode(msgspec.Struct, frozen=True):
    """An executable, and where its code is.

    ``build_id`` is the ID under which this file is served: its adopted ID if the files of its build
    ID differ in this; None if it has none. ``code`` is that of all files with the same offsets,
    which may be loaded at different addresses.
    """

    artifact: Artifact
    build_id: BuildId | None
    code: tuple[_Code, ...]

    def fit(self, extent: Extent) -> int:
        """Return how well a mapping fits the file: 0 for not at all, 3 for offset and size of
        code.
        """
        return max((each.fit(extent) for each in self.code), default=0)


class _Code(NamedTuple):
    """A loaded segment; ``is_fixed`` if it is loaded at the address that it names."""

    segment: elf_header.Segment
    is_fixed: bool

    def fit(self, extent: Extent) -> int:
        """See `PlacedCode.fit`."""
        segment, (start, end, offset) = self.segment, extent
        if self.is_fixed and start - offset != segment.address - segment.offset:
            return 0
        first, behind = segment.offset & -_PAGE, segment.offset + segment.size
        if not segment.flags & elf_header.PF_X:
            return int(offset == first)  # old programs may execute all that they read
        if offset == first:
            last = behind + _PAGE - 1 & -_PAGE
            return 3 if end - start == last - first else 2
        is_part = first < offset < behind
        return int(is_part or any(offset == segment.offset & -size for size in _LARGER_PAGES))


class Placement:
    """Chooses among the executables of build IDs; keeps what it has read of them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[BuildId, tuple[PlacedCode, ...]] = {}
        self._grouped: dict[BuildId, list[list[Artifact]]] = {}

    def forget(self) -> None:
        """Forget the files, after the store got new captures."""
        self._known.clear()
        self._grouped.clear()

    def choose(self, build_id: BuildId, extents: Sequence[Extent]) -> tuple[BuildId, str]:
        """Return the ID of the executable to which all mappings of a process fit, or ``build_id``
        and the reason why the store may have another file.
        """
        differing = self.differing(build_id)
        if not extents:
            return build_id, OFFSETS_DIFFER if differing else ""
        fits = self._mapped(build_id, extents)
        if not fits and self._of(build_id):
            return build_id, NOT_AS_MAPPED
        if not differing:
            return build_id, ""
        own = fits[0].build_id if len(fits) == 1 else None
        return (build_id, OFFSETS_DIFFER) if own is None else (own, "")

    def differing(self, build_id: BuildId) -> tuple[PlacedCode, ...]:
        """Return one executable for each placement of the code, the best first; empty if all files
        of the build ID have it at the same offsets.
        """
        return self._of(build_id) if len(self._groups(build_id)) > 1 else ()

    def _groups(self, build_id: BuildId) -> list[list[Artifact]]:
        found = self._grouped.get(build_id)
        if found is None:
            if len(self._grouped) >= _MOST_KNOWN:
                self.forget()
            ordinal = self._store.index.ordinal(build_id) or 0
            found = self._grouped[build_id] = differing(self._store, ordinal)
        return found

    def is_moved(self, build_id: BuildId, address: int) -> bool:
        """Return True if an address stands for different code of files with the build ID, all of
        which have their code at the same offsets.
        """
        if len(groups := self._groups(build_id)) != 1 or len(groups[0]) == 1:
            return False
        segments = (each.segment for placed in self._of(build_id) for each in placed.code)
        offsets = {
            each.offset + address - each.address
            for each in segments
            if each.address <= address < each.address + each.size
        }
        return len(offsets) > 1

    def _mapped(self, build_id: BuildId, extents: Iterable[Extent]) -> tuple[PlacedCode, ...]:
        """Return the executables to which all mappings fit: one, if they identify it.

        The result is empty if a mapping fits none that the store has.
        """
        left = self._of(build_id)
        for extent in extents:
            fits = [(each.fit(extent), each) for each in left]
            best = max((fit for fit, _ in fits), default=0)
            left = tuple(each for fit, each in fits if fit == best) if best else ()
        return left

    def _of(self, build_id: BuildId) -> tuple[PlacedCode, ...]:
        found = self._known.get(build_id)
        if found is None:
            found = self._known[build_id] = self._read(build_id)
        return found

    def _read(self, build_id: BuildId) -> tuple[PlacedCode, ...]:
        groups = self._groups(build_id)
        several = len(groups) > 1
        found = []
        for group in groups:
            code = [each for artifact in group for each in self._code(artifact.digest)]
            if code:
                own = self._adopted(group[0]) if several else build_id
                found.append(PlacedCode(group[0], own, tuple(code)))
        return tuple(found)

    def _adopted(self, artifact: Artifact) -> BuildId | None:
        adopted = self._store.aliases.adopted_id(artifact.digest)
        is_served = adopted is not None and self._store.index.ordinal(adopted) is not None
        return adopted if is_served else None

    def _code(self, digest: Digest) -> list[_Code]:
        try:
            with self._store.open_blob(digest) as blob:
                parsed = elf_header.parse_header(blob.read_at(0, min(blob.size, _PAGE)))
                loads = elf_header.loaded(blob.read_at, blob.size)
        except (OSError, IntegrityError):
            return []  # its readers report that it is damaged
        is_fixed = parsed is not None and parsed[1][0] == _ET_EXEC
        return [_Code(each, is_fixed) for each in loads if each.size]


def differing(store: Store, ordinal: int) -> list[list[Artifact]]:
    """Return the executables of a build ID in groups, each with its code at the same offsets.

    The served one comes first. The result is empty if none is served.
    """
    best = store.index.artifact(ordinal, Kind.EXECUTABLE)
    if best is None:
        return []
    variants = islice(store.index.variants_after(ordinal, Kind.EXECUTABLE), _MOST_LAYOUTS)
    others = [each for each in variants if each.variant != best.variant and not each.truncated]
    if not others:
        return [[best]]
    found: dict[object, list[Artifact]] = {}
    own, code = (_alias(store, best, kind) for kind in (AliasType.OFFSETS, AliasType.CODE))
    for each in (best, *others):
        offsets, its = (_alias(store, each, kind) for kind in (AliasType.OFFSETS, AliasType.CODE))
        # Code hashes contain addresses: they differ if all of the code has moved in memory.
        is_comparable = its and code and each.segments == best.segments
        # Earlier versions captured files without the alias.
        placed = offsets if offsets and own else own
        found.setdefault((placed, its if is_comparable else code), []).append(each)
    return list(found.values())


def differs(store: Store, ordinal: int) -> bool:
    """Return True if the executables of a build ID have their code at other offsets."""
    return len(differing(store, ordinal)) > 1


def for_offsets(store: Store, ordinal: int, kind: Kind) -> Artifact | None:
    """Return the file of a build ID to serve to a reader that counts in offsets of the file.

    If the executables have their code at other offsets, it is the only one that a process was seen
    to have mapped, of those with as much trust as the best, or debuginfo that fits it. Returns None
    if there is no such file, because nothing is better than the names of other functions.
    """
    served = store.index.artifact(ordinal, kind)
    groups = differing(store, ordinal) if served is not None else []
    if len(groups) < 2:
        return served
    best = groups[0][0]
    used = {each.digest for each in store.index.origins(ordinal) if each.origin.scanner in IN_USE}
    mapped = [
        [each for each in group if each.digest in used and each.trust is best.trust]
        for group in groups
    ]
    left = [number for number, group in enumerate(mapped) if group]
    if len(left) != 1:
        return None
    if kind is Kind.EXECUTABLE:
        return mapped[left[0]][0]
    others = {
        each.digest for number, group in enumerate(groups) if number != left[0] for each in group
    }
    debuginfo = store.index.variants(ordinal, kind)  # the best first
    fits = (each for each in debuginfo if each.digest not in others)
    return next((each for each in fits if not is_withheld(each, best)), None)


def _alias(store: Store, artifact: Artifact, kind: AliasType) -> bytes:
    found = (each.value for each in store.aliases.of(artifact.digest) if each.type is kind)
    return next(found, b"")
