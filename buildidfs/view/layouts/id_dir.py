# SPDX-License-Identifier: Apache-2.0
"""``<id>/``: the directory of a build ID with its files, to which all other trees lead.

<id>/{elf,debug,...}        the best file of each kind, see `names.KIND_OF`
<id>/path                   the paths at which it was seen
<id>/variants/<sha256>      every file that was ever seen with the build ID, served or not
<id>/*.dwp                  the package of its split DWARF
<id>/[.debug/]<name>        its debug file, if .gnu_debuglink of the executable has that name
"""

from __future__ import annotations

import re
import stat
from binascii import hexlify
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.errors import IntegrityError
from buildidfs.formats.elf import other_ids
from buildidfs.formats.elf.header import SHT_NOBITS, SHT_NULL
from buildidfs.formats.elf.sections import Sections as Headers
from buildidfs.model import (
    AliasType,
    Artifact,
    BuildId,
    ByteRange,
    Kind,
    Standing,
    Trust,
    is_shared,
)
from buildidfs.store import Blob
from buildidfs.store.permissions import PUBLIC, may_see, openness
from buildidfs.view import nodes
from buildidfs.view.attributes import (
    CONTROL,
    Attributes,
    FileContent,
    NeedsReading,
    of_artifact,
    stale,
)
from buildidfs.view.layouts.stamped import StampedFiles

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.formats.elf.sections import SectionHeader
    from buildidfs.store import OriginRecord, Store
    from buildidfs.store.permissions import Viewer

    MayCome = Callable[[bytes, Kind], bool]


_RECENT = 512
_LINKS: Final = 16
"""The number of variants of an executable whose links are announced."""
_STAMPED_SHIFT: Final = 16  # for the kind, in the detail of a node with a note
_KINDS = tuple(Kind)
_PACKAGE_NAMES: Final = frozenset(
    name + names.DWP_SUFFIX
    for name, kind in names.KIND_OF.items()
    if kind in (Kind.EXECUTABLE, Kind.DEBUGINFO)
)
_LISTED_PACKAGES = tuple(name + names.DWP_SUFFIX for name in (b"elf", b"debug"))
_LISTED = (*names.KIND_OF, names.PATH, names.VARIANTS, *_LISTED_PACKAGES, names.README)
"""The names that are listed; `lookup` finds more."""
_AMBIGUOUS: Final = b"""\
Unrelated programs have this build ID, so that it does not tell which one is meant, and there is no
elf or debug here. variants/ has all of them by their SHA-256. Each one has a directory of its own
under its adopted ID, which buildidfs show tells.
"""


class IdDirectories:
    """The files of a build ID: artifacts under all their spellings, and ``path``."""

    def __init__(
        self, store: Store, *, zero_scripts: bool, shared: Attributes, may_come: MayCome | None
    ) -> None:
        """``shared`` are the attributes that all directories have: those of the store's directory.

        ``may_come`` as in `View`.
        """
        self._store = store
        self._may_come = may_come
        self._zero_scripts = zero_scripts
        self._shared = shared
        # Results of the latest lookups, for the following getattr and open. An outdated entry does
        # no harm, because the bytes of a node never change.
        self._recent: dict[int, Artifact] = {}
        self._variants = _Variants(store, self.node_of)
        self._packages = _Packages(store)
        self._sections = SectionDir(store)
        self._stamped = StampedFiles(store)

    def forget(self) -> None:
        """Forget cached modes and owners of files, because a commit may have changed them."""
        self._recent.clear()

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        if node & nodes.SLOT_BITS:
            slot = nodes.slot_of(node)
            if slot == nodes.SLOT_SECTIONS:
                raise NeedsReading
            if slot == nodes.SLOT_LINKED:
                return self._linked(nodes.ordinal_of(node), name)
            return self._variants.lookup(node, name)
        kind = names.KIND_OF.get(name)
        if kind is not None:
            ordinal = node >> nodes.ORDINAL_SHIFT & nodes.NUMBER_MASK
            found = self.file(ordinal, kind)
            if found or self._may_come is None or not self.is_wanted(ordinal, kind):
                return found
            return nodes.of_id(ordinal, nodes.SLOT_WANTED, kind)
        ordinal = nodes.ordinal_of(node)
        if name == names.PATH:
            return (
                nodes.of_id(ordinal, nodes.SLOT_PATH) if self._text(ordinal, None) else nodes.ABSENT
            )
        if name == names.VARIANTS and self._store.index.kinds(ordinal):
            return nodes.of_id(ordinal, nodes.SLOT_VARIANTS)
        if name == names.README and self._store.aliases.is_ambiguous(ordinal):
            return nodes.of_id(ordinal, nodes.SLOT_README)
        if name == names.SECTION and self._store.index.kinds(ordinal):
            return nodes.of_id(ordinal, nodes.SLOT_SECTIONS)
        if name.endswith(names.DWP_SUFFIX):
            package = self._packages.lookup(ordinal, name)
            if package is not None:
                return self.file(package, Kind.DEBUGINFO)
        if name == names.LINKED and self._store.index.kinds(ordinal):
            return nodes.of_id(ordinal, nodes.SLOT_LINKED)
        return self._linked(ordinal, name)

    def _linked(self, ordinal: int, name: bytes) -> int:
        """Return the node of the debug file, if the executable refers to it by that name.

        Debuggers look for that name beside a binary without a build ID.
        """
        executable = self._store.index.artifact(ordinal, Kind.EXECUTABLE)
        if executable is None or self._link_name(executable) != name:
            return nodes.ABSENT
        return self.file(ordinal, Kind.DEBUGINFO)

    def _link_name(self, executable: Artifact) -> bytes:
        """Return the name in .gnu_debuglink of an executable, empty if there is none."""
        for each in self._store.aliases.of(executable.digest):
            if each.type is AliasType.LINK:
                return other_ids.link_of(each.value).name
        return b""

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset."""
        if node & nodes.SLOT_BITS:
            if nodes.slot_of(node) == nodes.SLOT_VARIANTS:
                yield from self._variants.children(node, after)
            return
        for offset, name in enumerate(_LISTED[after:], after + 1):
            found = self.lookup(node, name)
            if found and not nodes.is_wanted(found):
                yield name, found, offset

    def is_wanted(self, ordinal: int, kind: Kind) -> bool:
        """Return True if a missing file may be fetched when it is opened.

        This is so for debuginfo, if the build ID is neither adopted nor shared by unrelated
        programs.
        """
        if self._may_come is None or kind is not Kind.DEBUGINFO:
            return False
        raw = self._store.index.build_id(ordinal)
        if raw is None or names.kept_for(BuildId(raw)) != raw:
            return False
        executable = self._store.index.artifact(ordinal, Kind.EXECUTABLE)
        if (executable is not None and executable.adopted) or is_shared(raw):
            return False
        return not self._store.aliases.is_ambiguous(ordinal) and self._may_come(raw, kind)

    def wanted_in(self, node: int) -> tuple[BuildId, Kind] | None:
        """Return build ID and kind of a file that `is_wanted`; None for other nodes."""
        kind = node & nodes.DETAIL_MASK
        if not nodes.is_wanted(node) or kind not in _KINDS:
            return None
        raw = self._store.index.build_id(nodes.ordinal_of(node))
        return None if raw is None else (BuildId(raw), Kind(kind))

    def section(self, node: int, name: bytes) -> int:
        """Return the node of an entry of a directory of sections. Reads the file.

        Raises OSError, `IntegrityError`.
        """
        return self._sections.find(nodes.ordinal_of(node), name)

    def section_of(self, node: int) -> tuple[Artifact, bool]:
        """Return the file of a section, and True if scripts in it read as zeros.

        Raises OSError(ESTALE) if it is gone from the store.
        """
        artifact = self._sections.artifact(node)
        return artifact, self.is_zeroed(artifact)

    def is_public_package(self, node: int, name: bytes) -> bool:
        """Return True if all users may know of a .dwp file under that name."""
        return self._packages.is_public(nodes.ordinal_of(node), name)

    def file(self, ordinal: int, kind: Kind) -> int:
        """Return the node of the best variant of an artifact, `nodes.ABSENT` if there is none."""
        artifact = self._store.index.artifact(ordinal, kind)
        return nodes.ABSENT if artifact is None else self.node_of(artifact)

    def node_of(self, artifact: Artifact) -> int:
        """Return the node of a file, the same in all listings."""
        kind = artifact.kind
        slot = kind | nodes.SLOT_ZEROED if artifact.scripts and self.is_zeroed(artifact) else kind
        node = nodes.of_id(artifact.ordinal, slot, artifact.variant)
        if len(self._recent) >= _RECENT:
            self._recent.clear()
        self._recent[node] = artifact
        return node

    def attributes(self, node: int) -> Attributes:
        """Return the attributes of a file; raises OSError(ESTALE) if it is gone from the store."""
        artifact = self._recent.get(node)
        if artifact is not None:  # as after each lookup
            return of_artifact(artifact)
        slot = nodes.slot_of(node)
        if slot in (nodes.SLOT_PATH, nodes.SLOT_README):
            size = len(self.text(node, PUBLIC))
            return self._attributes_of_text(nodes.ordinal_of(node), size)
        if slot == nodes.SLOT_STAMPED:
            return self._stamped.attributes(self._of_stamped(node))
        if nodes.slot_of(node) == nodes.SLOT_SECTION:
            return self._sections.attributes(node)
        if slot == nodes.SLOT_WANTED:
            shared = self._shared
            mode = stat.S_IFREG | 0o444
            return Attributes(mode, 0, shared.mtime_ns, shared.uid, shared.gid, volatile=True)
        return of_artifact(self._artifact(node))

    def held_in(self, node: int) -> tuple[Artifact, bool] | None:
        """Return the artifact of a file, and True if its scripts read as zeros; None for other
        nodes.

        Raises OSError(ESTALE) if it is gone from the store.
        """
        slot = nodes.slot_of(node) if node >> nodes.TAG_SHIFT == nodes.TAG_ID else 0
        if slot & nodes.KIND_MASK not in _KINDS or slot & ~nodes.SLOT_ZEROED > nodes.KIND_MASK:
            return None
        return self._artifact(node), bool(slot & nodes.SLOT_ZEROED)

    def open(self, node: int, *, wait: bool) -> FileContent | None:
        """Open a file; return None if the whole file has to be read first and the caller cannot
        ``wait``.

        Raises OSError(ESTALE) if the file is gone from the store.
        """
        slot = nodes.slot_of(node)
        if slot == nodes.SLOT_STAMPED:
            artifact = self._of_stamped(node)
            zeros = artifact.scripts if self.is_zeroed(artifact) else ()
            return FileContent(b"", zeros, self._stamped.open(artifact)) if wait else None
        if slot == nodes.SLOT_SECTION:
            zeroed = self.is_zeroed(self._sections.artifact(node))
            return self._sections.open(node, zeroed=zeroed) if wait else None
        artifact = self._recent.get(node) or self._artifact(node)
        try:
            return self.open_artifact(artifact, zeroed=bool(slot & nodes.SLOT_ZEROED), wait=wait)
        except (IntegrityError, OSError):
            self._recent.pop(node, None)
            raise

    def open_artifact(self, artifact: Artifact, *, zeroed: bool, wait: bool) -> FileContent | None:
        """Open a file as `open` does; with ``zeroed``, scripts in it read as zeros."""
        store = self._store
        try:
            blob = (store.open_blob if wait else store.open_blob_now)(artifact.digest)
        except IntegrityError:
            key = artifact.ordinal, artifact.kind, artifact.variant
            if store.index.artifact_variant(*key) is None:
                raise stale() from None  # it was removed meanwhile
            raise
        zeros = artifact.scripts if zeroed else ()
        return None if blob is None else FileContent(b"", zeros, blob)

    def text(self, node: int, viewer: Viewer | None) -> bytes:
        """Return the text of ``path`` or ``README`` as a viewer may see it; the viewer None may see
        all.
        """
        if nodes.slot_of(node) == nodes.SLOT_README:
            return _AMBIGUOUS
        return self._text(nodes.ordinal_of(node), viewer)

    def stamped(self, artifact: Artifact, *, wait: bool) -> int:
        """Return the node of a file with the note of its adopted ID, for perf.

        Raises OSError and `IntegrityError`, and `NeedsReading` if the file has to be read but the
        caller cannot ``wait``.
        """
        if not self._stamped.is_known(artifact):
            if not wait:
                raise NeedsReading
            self._stamped.parts(artifact)
        detail = artifact.kind << _STAMPED_SHIFT | artifact.variant
        return nodes.of_id(artifact.ordinal, nodes.SLOT_STAMPED, detail)

    def _of_stamped(self, node: int) -> Artifact:
        kind, variant = divmod(node & nodes.DETAIL_MASK, 1 << _STAMPED_SHIFT)
        found = None
        if kind in _KINDS:  # another number is invalid
            ordinal = nodes.ordinal_of(node)
            found = self._store.index.artifact_variant(ordinal, Kind(kind), variant)
        if found is None:
            raise stale()
        return found

    def _artifact(self, node: int) -> Artifact:
        artifact = self._recent.get(node)
        if artifact is None:
            kind, variant = nodes.slot_of(node) & nodes.KIND_MASK, node & nodes.DETAIL_MASK
            # An invalid number may have any value.
            if kind in _KINDS and variant <= nodes.VARIANT_MAX:
                artifact = self._store.index.artifact_variant(
                    nodes.ordinal_of(node), Kind(kind), variant
                )
            if artifact is None:
                raise stale()
        return artifact

    def is_zeroed(self, artifact: Artifact) -> bool:
        """Return True if scripts for gdb in a file read as zeros."""
        if not artifact.scripts or not self._zero_scripts:
            return False
        return artifact.trust is not Trust.HOST or artifact.standing < Standing.GIVEN

    def spellings(
        self, ordinal: int, origins: Iterable[OriginRecord]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the entries for a build ID that was seen at these places.

        Each is (directory, name, True if the name may have led elsewhere).
        """
        directory = nodes.of_id(ordinal)
        for name in names.KIND_OF:
            yield directory, name, True
        yield directory, names.PATH, False
        yield directory, names.VARIANTS, False
        yield directory, names.SECTION, False
        yield directory, names.README, False
        yield from self._variants.spellings(ordinal, origins)
        yield from self._packages.spellings(ordinal, origins)
        yield directory, names.LINKED, False
        linked = nodes.of_id(ordinal, nodes.SLOT_LINKED)
        for executable in islice(
            self._store.index.variants_after(ordinal, Kind.EXECUTABLE), _LINKS
        ):
            if name := self._link_name(executable):
                yield directory, name, True
                yield linked, name, True

    def may_read_any(self, ordinal: int, viewer: Viewer) -> bool:
        """Return True if a viewer may read at least one of the files of a build ID."""
        mask, artifact_of = self._store.index.kinds(ordinal), self._store.index.artifact
        for kind in _KINDS:
            if mask >> kind & 1:
                artifact = artifact_of(ordinal, kind)
                if artifact is not None and viewer.may_read(
                    artifact.mode, artifact.uid, artifact.gid
                ):
                    return True
        return any(
            viewer.may_read(artifact.mode, artifact.uid, artifact.gid)
            for artifact in self._artifacts(ordinal)
        )

    def _artifacts(self, ordinal: int) -> Iterator[Artifact]:
        """Yield all files of a build ID, served or not."""
        mask = self._store.index.kinds(ordinal)
        if mask:
            # The build ID has files, but none of them may be served.
            mask |= 1 << Kind.EXECUTABLE | 1 << Kind.DEBUGINFO
        for kind in _KINDS:
            if mask >> kind & 1:
                yield from self._store.index.variants_after(ordinal, kind)

    def _attributes_of_text(self, ordinal: int, size: int) -> Attributes:
        # Readable by users who may read one of the files, as far as one owner and group can express
        # it.
        most, chosen = openness(0), None
        for artifact in self._artifacts(ordinal):
            if chosen is None or openness(artifact.mode) > most:
                most, chosen = openness(artifact.mode), artifact
            if most[0]:
                break
        if chosen is None:
            raise stale()
        return Attributes(
            stat.S_IFREG | chosen.mode & 0o444,
            # The kernel has one size for all users: that of the public part. A read returns all.
            size,
            self._shared.mtime_ns,
            chosen.uid,
            chosen.gid,
            volatile=True,
        )

    def _text(self, ordinal: int, viewer: Viewer | None) -> bytes:
        # Viewers want the place of the binary. Its debug file has another place, which is useful
        # only if no binary was seen.
        records = self._store.index.origins(ordinal)
        origins = [each for each in records if may_see(viewer, each.origin)]
        binaries = [each for each in origins if set(each.kinds) != {Kind.DEBUGINFO}]
        paths = dict.fromkeys(record.origin.path for record in binaries or origins)
        # A newline within a path is escaped as in /proc/PID/maps, so that each line is a path;
        # other characters that a terminal interprets are escaped, too, because people print this
        # file.
        return b"".join(CONTROL.sub(_octal, path) + b"\n" for path in paths)


def _octal(found: re.Match[bytes]) -> bytes:
    return b"".join(b"\\%03o" % byte for byte in found[0])


# --- variants/ -----------------------------------------------------------------------------------

# Offsets in a listing: the kind, then the number of the variant plus one.
_KIND_SHIFT = 17
_VARIANT_MASK = (1 << _KIND_SHIFT) - 1


class _Variants:
    """The directories ``variants``.

    A served variant is the same node as ``<id>/elf`` or ``<id>/debug``. A file of two kinds is
    listed once, under the first kind.
    """

    def __init__(self, store: Store, node_of: Callable[[Artifact], int]) -> None:
        """``node_of`` returns the node of a file, the same in all listings."""
        self._store = store
        self._node_of = node_of

    def lookup(self, node: int, name: bytes) -> int:
        """Return the node of an entry, `nodes.ABSENT` if there is none."""
        digest = names.parse_digest(name)
        if digest is None:
            return nodes.ABSENT
        ordinal = nodes.ordinal_of(node)
        refs = self._store.index.variants_with(digest, ordinal)
        if not refs:
            return nodes.ABSENT
        artifact = self._store.index.artifact_variant(ordinal, *min(refs))
        if artifact is None or artifact.digest != digest:
            return nodes.ABSENT
        return self._node_of(artifact)

    def children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries whose offset is beyond ``after``: name, node, offset."""
        ordinal = nodes.ordinal_of(node)
        first, last = after >> _KIND_SHIFT, (after & _VARIANT_MASK) - 1
        for kind in Kind:
            if kind < first:
                continue
            behind = min(last, nodes.VARIANT_MAX) if kind == first else -1
            for artifact in self._store.index.variants_after(ordinal, kind, behind):
                if kind == min(self._store.index.variants_with(artifact.digest, ordinal))[0]:
                    offset = kind << _KIND_SHIFT | artifact.variant + 1
                    yield hexlify(artifact.digest), self._node_of(artifact), offset

    def spellings(
        self, ordinal: int, origins: Iterable[OriginRecord]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the entries of ``variants``, including files just removed whose origins are still
        known.

        Each is (directory, name, True if the name may have led elsewhere).
        """
        directory = nodes.of_id(ordinal, nodes.SLOT_VARIANTS)
        digests = {record.digest for record in origins}
        for kind in Kind:
            digests |= {each.digest for each in self._store.index.variants_after(ordinal, kind, -1)}
        for digest in digests:
            yield directory, hexlify(digest), True


# --- *.dwp ---------------------------------------------------------------------------------------


class _Packages:
    """The packages of split DWARF, under the names that debuggers look up.

    Debuggers append ``.dwp`` to the name of the file with the skeleton units; gdb uses the name of
    the binary, in the directory of the debug file. So lookups accept all names under which the
    binary was seen, and listings have only the names of files in the same directory.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def lookup(self, ordinal: int, name: bytes) -> int | None:
        """Return the ordinal of the package of a build ID under that name."""
        package = self._package(ordinal)
        if package is None:
            return None
        if name in _PACKAGE_NAMES or name in _package_names(self._store.index.origins(ordinal)):
            return package
        return None

    def is_public(self, ordinal: int, name: bytes) -> bool:
        """Return True if all users may know of a name: it is that of a public path, or of no path
        at all.
        """
        if name in _PACKAGE_NAMES:
            return True
        records = self._store.index.origins(ordinal)
        return name in _package_names(each for each in records if each.origin.is_public)

    def spellings(
        self, ordinal: int, origins: Iterable[OriginRecord]
    ) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the entries for a build ID that was seen at these places; as in
        `IdDirectories.spellings`.

        They are the names of its package. If the build ID is itself that of a package, they are the
        names in the directory of the package's owner.
        """
        build_id = self._store.index.build_id(ordinal)
        owner = None if build_id is None else names.package_owner(build_id)
        if owner is not None:
            found = self._store.index.ordinal(owner)
            if found is None:
                return
            ordinal, origins = found, self._store.index.origins(found)
        elif self._package(ordinal) is None:
            return
        directory = nodes.of_id(ordinal)
        for name in (*_PACKAGE_NAMES, *_package_names(origins)):
            yield directory, name, True

    def _package(self, ordinal: int) -> int | None:
        build_id = self._store.index.build_id(ordinal)
        kept_under = None if build_id is None else names.package_id(BuildId(build_id))
        package = self._store.index.companion(ordinal, kept_under)
        return None if package is None else package.ordinal


def _package_names(origins: Iterable[OriginRecord]) -> dict[bytes, None]:
    """Return the names that a package has, given the places at which its binary was seen."""
    return dict.fromkeys(
        record.origin.path.rpartition(b"/")[2] + names.DWP_SUFFIX for record in origins
    )


# The 22 bits of detail in a node: the kind, the number of the section, and the variant.
_EXECUTABLE_BIT: Final = 1 << 21
_NUMBER_SHIFT: Final = 14
_NUMBER_MAX: Final = 127
_VARIANT_MAX: Final = (1 << _NUMBER_SHIFT) - 1
_REMEMBERED: Final = 512


class SectionDir:
    """``<id>/section/<name>``: sections of the debuginfo, or else of the executable.

    gdb asks debuginfod for a section before it loads a whole debug file for its index. Sections are
    served as they are in the file, compressed or not. The directory is not listed, because a copy
    of the tree would have all bytes twice. `find` and `open` read the file and may wait for a disk,
    so they must run in a thread.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, ByteRange] = {}

    def find(self, ordinal: int, name: bytes) -> int:
        """Return the node of a section of a build ID, `nodes.ABSENT` if there is none.

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
        """Return the file of a section. Raises OSError(ESTALE) if it is gone from the store."""
        detail = node & nodes.DETAIL_MASK
        kind = Kind.EXECUTABLE if detail & _EXECUTABLE_BIT else Kind.DEBUGINFO
        ordinal, variant = nodes.ordinal_of(node), detail & _VARIANT_MAX
        artifact = self._store.index.artifact_variant(ordinal, kind, variant)
        if artifact is None:
            raise stale()
        return artifact

    def attributes(self, node: int) -> Attributes:
        """Return the attributes of the file, with the size of the section. Raises
        OSError(ESTALE).
        """
        artifact = self.artifact(node)
        size = self._extent(node, artifact).size
        # Volatile, because changes of the file's mode are not announced for its sections.
        return msgspec.structs.replace(of_artifact(artifact), size=size, volatile=True)

    def open(self, node: int, *, zeroed: bool) -> FileContent:
        """Open a section; with ``zeroed``, scripts in it read as zeros.

        Raises OSError, `IntegrityError`.
        """
        artifact = self.artifact(node)
        extent = self._extent(node, artifact)
        section = SectionContent(self._store.open_blob(artifact.digest), extent)
        return FileContent(b"", _within(artifact.scripts, extent) if zeroed else (), section)

    def _extent(self, node: int, artifact: Artifact) -> ByteRange:
        """Return the extent of a section in its file; the file is read if the extent is not
        cached.
        """
        extent = self._known.get(node)
        if extent is None:
            headers = self._headers(artifact)
            number = node >> _NUMBER_SHIFT & _NUMBER_MAX
            if number >= len(headers) or not _is_inside(headers[number], artifact):
                raise stale()  # an invalid number
            extent = ByteRange(headers[number].offset, headers[number].size)
            self._remember(node, extent)
        return extent

    def _headers(self, artifact: Artifact) -> list[SectionHeader]:
        """Return the first section headers of a file."""
        whole = ByteRange(0, artifact.size)
        with SectionContent(self._store.open_blob(artifact.digest), whole) as part:
            found = Headers(part.read_at, artifact.size)
        return found.headers[: _NUMBER_MAX + 1]

    def _remember(self, node: int, extent: ByteRange) -> None:
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[node] = extent


class SectionContent(Blob):
    """A part of the content of a blob; `close` also closes the blob."""

    __slots__ = ("_blob", "_extent")

    def __init__(self, blob: Blob, extent: ByteRange) -> None:
        self.fd = -1
        self.is_plain = False
        self.size = extent.size
        self._blob = blob
        self._copy = None
        self._extent = extent

    def pread(self, size: int, offset: int, /) -> bytes:
        """Return up to ``size`` bytes from ``offset``; raises the errors of the blob."""
        size = min(size, max(self._extent.size - offset, 0))
        return self._blob.pread(size, self._extent.offset + offset)

    @property
    def extent(self) -> tuple[int, int] | None:
        """Return descriptor and offset of the section in the file; None if the blob is
        compressed.
        """
        found = self._blob.extent
        return None if found is None else (found[0], found[1] + self._extent.offset)

    @property
    def is_remote(self) -> bool:
        """True if reads may wait for a network."""
        return self._blob.is_remote

    def was_written(self) -> bool:
        """Return True if the file has been written to since it was opened."""
        return self._blob.was_written()

    def close(self) -> None:
        """Close the blob; safe to call twice."""
        self._blob.close()


def _is_inside(header: SectionHeader, artifact: Artifact) -> bool:
    """Return True if a section has bytes, and all of them are in the file."""
    is_there = header.type not in (SHT_NOBITS, SHT_NULL) and header.size > 0
    return is_there and header.offset + header.size <= artifact.size


def _within(extents: tuple[ByteRange, ...], part: ByteRange) -> tuple[ByteRange, ...]:
    """Return the parts of extents that lie in ``part`` of a file, with offsets from its start."""
    found = []
    for each in extents:
        start = max(each.offset, part.offset)
        end = min(each.offset + each.size, part.offset + part.size)
        if start < end:
            found.append(ByteRange(start - part.offset, end - start))
    return tuple(found)
