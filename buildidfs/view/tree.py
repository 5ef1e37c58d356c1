# SPDX-License-Identifier: Apache-2.0
"""The whole tree: the layout of each node, and the fixed names.

<id>/{elf,executable,debug,debuginfo,vdso,kallsyms,path}      `layouts.id_dir`
<id>/variants/<sha256>, <id>/*.dwp                            `layouts.id_dir`
<id>/section/<name>, <id>/[.debug/]<name of .gnu_debuglink>   `layouts.id_dir`
buildid -> .                                                  the tree is a debuginfod
debug/.build-id/ab/cdef…[.debug], debug/.dwz/…                `layouts.debug`
perf/…                                                        `layouts.perf`
.build-id, .dwz, .debug, usr/lib/debug                        links, so that the root itself
                                                              works as --symfs and the like
README, by-path, by-name, containers, missing                 `layouts.browse`
"""

from __future__ import annotations

import enum
import errno
import os
import stat
from binascii import hexlify, unhexlify
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from buildidfs import names
from buildidfs.errors import BuildIdFsError
from buildidfs.model import Kind
from buildidfs.names import DEBUG_SUFFIX, DWP_SUFFIX, KIND_OF
from buildidfs.store.permissions import may_see
from buildidfs.view import nodes
from buildidfs.view.attributes import Attributes, ExtendedAttributes, FileContent, stale
from buildidfs.view.layouts import by_path
from buildidfs.view.layouts.browse import Browse
from buildidfs.view.layouts.debug import DebugLinks, DwzTree, lookup_bucket, populated_buckets
from buildidfs.view.layouts.id_dir import IdDirectories
from buildidfs.view.layouts.perf import PerfTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import Artifact
    from buildidfs.store import OriginRecord, Store
    from buildidfs.store.permissions import Viewer
    from buildidfs.view.layouts.id_dir import MayCome

    Lookup = Callable[[int, bytes], int]
    Served = tuple[Artifact, bool]
    Children = Callable[[int, int], Iterator[tuple[bytes, int, int]]]


_STATIC: dict[int, dict[bytes, int]] = {
    nodes.ROOT: {
        b"buildid": nodes.BUILDID_LINK,
        b"debug": nodes.DEBUG,
        b"perf": nodes.PERF,
        b".build-id": nodes.BUCKETS_LINK,
        b".dwz": nodes.DWZ_LINK,
        b".debug": nodes.PERF_LINK,
        b"usr": nodes.USR,
        b"README": nodes.README,
        b"by-path": nodes.BY_PATH,
        b"by-name": nodes.BY_NAME,
        b"containers": nodes.CONTAINERS,
        b"missing": nodes.MISSING,
    },
    nodes.DEBUG: {b".build-id": nodes.DEBUG_BUCKETS, b".dwz": nodes.DWZ},
    nodes.USR: {b"lib": nodes.USR_LIB},
    nodes.USR_LIB: {b"debug": nodes.USR_LIB_DEBUG_LINK},
}

_TARGETS = {
    nodes.BUILDID_LINK: b".",
    nodes.BUCKETS_LINK: b"debug/.build-id",
    nodes.DWZ_LINK: b"debug/.dwz",
    nodes.PERF_LINK: b"perf",
    nodes.USR_LIB_DEBUG_LINK: b"../../debug",
}

_LINK_SLOTS = frozenset(
    (
        *range(nodes.SLOT_EXECUTABLE_LINK, nodes.SLOT_DWZ_LINK + 1),
        nodes.SLOT_BROWSE_LINK,
        nodes.SLOT_WANTED_LINK,
    )
)
_BUILD_ID_LINKS = frozenset(
    (nodes.SLOT_EXECUTABLE_LINK, nodes.SLOT_DEBUGINFO_LINK, nodes.SLOT_WANTED_LINK)
)
_TYPES = [
    stat.S_IFDIR
    if slot in (nodes.SLOT_DIRECTORY, nodes.SLOT_VARIANTS, nodes.SLOT_SECTIONS, nodes.SLOT_LINKED)
    else stat.S_IFLNK
    if slot in _LINK_SLOTS
    else stat.S_IFREG
    for slot in range(nodes.SLOT_MASK + 1)
]
"""The type bits of st_mode of nodes that belong to a build ID, by slot."""

_ROOT_NAMES = _STATIC[nodes.ROOT]
_OFFSET_IDS = 64
"""Offsets in the root's listing: the fixed names are below, build IDs follow by ordinal."""

_ALIAS_DIGITS = frozenset((8, 32, 64))
_GO_DIGITS = 80
"""The numbers of hexadecimal digits in aliases; a Go build ID has more than 80."""


class Keep(enum.IntEnum):
    """How long a front door may remember that a name leads to a node, or to none."""

    ANNOUNCED = 0
    """Until a commit changes it. The commit announces the name (`View.spellings`)."""
    BRIEFLY = 1
    """For a second. No commit announces the name."""
    NEVER = 2
    """The next look-up may have another answer."""
    PRIVATE = 3
    """Never. Only viewers who `View.may_know` of the entry may see it."""


_ANNOUNCED, _BRIEFLY, _NEVER, _PRIVATE = Keep


def _is_alias_name(name: bytes) -> bool:
    """Return True if an absent name in the root may become a link without an announcement."""
    return len(name) in _ALIAS_DIGITS or len(name) > _GO_DIGITS


def _is_of_debuginfo(name: bytes) -> bool:
    return KIND_OF.get(name) is Kind.DEBUGINFO or name.endswith(DEBUG_SUFFIX)


_STATIC_END = nodes.PERF_BUCKET + 256
_LINK_MODE = stat.S_IFLNK | 0o777


class View:
    """The read-only tree of names over a store, for mount (FUSE) and server (HTTP).

    Nodes are numbers, explained in `nodes`; start with `ROOT`. All methods read the store as it is
    at the moment of the call, and are thread-safe.
    """

    ROOT = nodes.ROOT

    def __init__(
        self, store: Store, *, zero_scripts: bool = True, may_come: MayCome | None = None
    ) -> None:
        """With ``zero_scripts``, ``.debug_gdb_scripts`` reads as zeros in files that no system
        directory of the host has, and the operator has not named.

        ``may_come`` takes a build ID and a kind, and returns True if such a file may be fetched. If
        it is missing, `lookup` finds an empty file that cannot be opened; see `wanted_in`.
        """
        self._store = store
        self._may_come = may_come
        # Set once, when the store was made: no directory looks newer than a core file.
        made = (Path(os.fsdecode(store.path)) / "format").stat()
        self._directory = Attributes(
            stat.S_IFDIR | 0o555, 0, made.st_mtime_ns, made.st_uid, made.st_gid
        )
        self._ids = IdDirectories(
            store, zero_scripts=zero_scripts, shared=self._directory, may_come=may_come
        )
        self._links = DebugLinks(store, self._ids.is_wanted)
        self.wanted_in = self._ids.wanted_in
        self._dwz = DwzTree(store)
        self._perf = PerfTree(store, self._ids)
        self._browse = Browse(store, self._ids, self._directory)
        self._extended = ExtendedAttributes(store)
        self.misses = self._browse.misses
        self._listing = Listing(store, self._ids, self._perf, self._dwz, self._browse)
        self.is_public = self._listing.is_public
        self.may_know = self._listing.may_know
        self._lookups: dict[int, Lookup] = {
            nodes.TAG_ID: self._ids.lookup,
            nodes.TAG_PATH: self._perf.lookup,
            nodes.TAG_DWZ: self._dwz.lookup,
        }
        self._listings: dict[int, Children] = {
            nodes.TAG_ID: self._ids.children,
            nodes.TAG_PATH: self._perf.children,
            nodes.TAG_DWZ: self._dwz.children,
        }
        for tag in range(nodes.TAG_PERF_ID, 2 * nodes.TAG_PERF_ID):
            self._lookups[tag] = self._perf.lookup_file
            self._listings[tag] = self._perf.files
        # A node has 63 bits; a larger number is invalid.
        for tag in range(2 * nodes.TAG_PERF_ID, 4 * nodes.TAG_PERF_ID):
            self._lookups[tag] = self._listings[tag] = _no_node

    # --- for all front doors ---------------------------------------------------------------

    def lookup(self, parent: int, name: bytes) -> tuple[int, Keep]:
        """Return the node of an entry of a directory, 0 if there is none, and how long that may be
        remembered.

        Raises `NeedsReading` if the caller must use `lookup_slowly` in a thread.
        """
        node = self.child(parent, name)
        return node, self._keep(parent, name, node)

    def _keep(self, parent: int, name: bytes, node: int) -> Keep:
        if node == nodes.ABSENT:
            # A commit announces no alias, dwz file or name in the trees for people; nor is it
            # announced when a server may be asked for debuginfo again.
            is_silent = (
                nodes.is_browsing(parent)
                or nodes.is_dwz(parent)
                or (parent == nodes.ROOT and _is_alias_name(name))
                or (self._may_come is not None and _is_of_debuginfo(name))
            )
            return _NEVER if is_silent else _ANNOUNCED
        if parent == nodes.ROOT:
            return _BRIEFLY if nodes.is_alias(node) else _ANNOUNCED
        if nodes.is_place(parent) or name.endswith(DWP_SUFFIX):
            if not self.is_public(parent, name, node):
                return _PRIVATE
            return _BRIEFLY if nodes.is_browsing(parent) or nodes.is_dwz(parent) else _ANNOUNCED
        return _NEVER if nodes.leads_to_wanted(node) else _ANNOUNCED

    def child(self, node: int, name: bytes) -> int:
        """Return the node of an entry of a directory, 0 if there is none.

        Raises `NeedsReading` if the caller must use `lookup_slowly` in a thread.
        """
        if node == nodes.ROOT:
            # `names.parse`, inlined, because this name is looked up most often.
            try:
                raw = unhexlify(name)
            except ValueError:
                return _ROOT_NAMES.get(name, nodes.ABSENT)
            ordinal = self._store.index.ordinal(raw) if hexlify(raw) == name else None
            if ordinal is None:
                return self._alias(name) if _is_alias_name(name) else nodes.ABSENT
            return nodes.of_id(ordinal)
        tag = node >> nodes.TAG_SHIFT
        if tag:
            return self._lookups[tag](node, name)
        return self._lookup_static(node, name)

    def served(self, name: bytes, kind: Kind, *, wait: bool) -> Served | None:
        """Return the served file of a build ID or an alias, and True if its scripts read as zeros.

        Raises `NeedsReading` if that takes a request and the caller cannot ``wait``.
        """
        build_id = names.parse(name)
        ordinal = None if build_id is None else self._store.index.ordinal(build_id)
        if ordinal is None and _is_alias_name(name) and not name.strip(b"0123456789abcdef"):
            ordinal = self._store.aliases.ordinal(name.decode())
        artifact = None if ordinal is None else self._store.index.artifact(ordinal, kind)
        return None if artifact is None else (artifact, self._ids.is_zeroed(artifact))

    def open_served(self, served: Served, *, wait: bool) -> FileContent | None:
        """Open a served file; return None if the whole file has to be read first and the caller
        cannot ``wait``.

        Raises OSError(ESTALE) if it is gone from the store.
        """
        artifact, zeroed = served
        return self._ids.open_artifact(artifact, zeroed=zeroed, wait=wait)

    def lookup_slowly(self, node: int, name: bytes) -> int:
        """Look up an entry for which a file has to be read; raises OSError, `IntegrityError`."""
        if node >> nodes.TAG_SHIFT >= nodes.TAG_PERF_ID:
            return self._perf.lookup_file(node, name, wait=True)
        return self._ids.section(node, name)

    def _alias(self, name: bytes) -> int:
        """Return a link to the directory of the build ID for which ``name`` is an alias."""
        ordinal = self._store.aliases.ordinal(name.decode())
        return nodes.ABSENT if ordinal is None else nodes.of_id(ordinal, nodes.SLOT_BROWSE_LINK)

    def section_of(self, node: int) -> tuple[Artifact, bool]:
        """Return the file of a section, and True if scripts in it read as zeros.

        Raises OSError(ESTALE) if it is gone from the store.
        """
        return self._ids.section_of(node)

    def children(
        self, node: int, after: int = 0, viewer: Viewer | None = None
    ) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of a directory: name, node and offset.

        With a ``viewer``, only entries that lead to a file that this viewer may read are yielded.
        Offsets grow; a listing resumes beyond the offset ``after``. `lookup` also finds entries
        that a listing leaves out; those that not every viewer may know of are `Keep.PRIVATE`.
        """
        entries = self._children(node, after)
        return entries if viewer is None else self._listing.shown(node, entries, viewer)

    def _children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        if node == nodes.ROOT:
            return self._root(after)
        tag = node >> nodes.TAG_SHIFT
        if tag:
            return self._listings[tag](node, after)
        return self._static_children(node, after)

    def file_type(self, node: int) -> int:
        """Return the type bits of st_mode, derived from the number alone."""
        if node >> nodes.TAG_SHIFT == nodes.TAG_ID:
            return _TYPES[node >> nodes.SLOT_SHIFT & nodes.SLOT_MASK]
        if nodes.is_browsing(node):
            return self._browse.file_type(node)
        return stat.S_IFLNK if node in _TARGETS else stat.S_IFDIR

    def attributes(self, node: int) -> Attributes:
        """Return the attributes of a node; raises OSError(ESTALE) if it is gone from the store."""
        if node >> nodes.TAG_SHIFT != nodes.TAG_ID:
            if nodes.is_browsing(node):
                return self._browse.attributes(node)
            return self._link(_TARGETS[node]) if node in _TARGETS else self._directory
        slot = node >> nodes.SLOT_SHIFT & nodes.SLOT_MASK
        if _TYPES[slot] == stat.S_IFDIR:
            return self._directory
        if slot in _LINK_SLOTS:
            return self._link(self.readlink(node))
        return self._ids.attributes(node)

    def readlink(self, node: int) -> bytes:
        """Return the target of a link; raises OSError (EINVAL: not a link, ESTALE: gone)."""
        target = _TARGETS.get(node)
        if target is None:
            slot = nodes.slot_of(node) if node >> nodes.TAG_SHIFT == nodes.TAG_ID else 0
            if slot in _BUILD_ID_LINKS:
                target = self._links.target(node)
            elif slot == nodes.SLOT_PERF_LINK:
                target = self._perf.target(node)
            elif slot == nodes.SLOT_DWZ_LINK:
                target = self._dwz.target(node)
            elif slot == nodes.SLOT_BROWSE_LINK:
                target = by_path.target(self._store, node)
            elif nodes.is_browsing(node):
                target = self._browse.readlink(node)
            else:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            if not target:
                raise stale()
        return target

    def is_there(self, node: int) -> bool:
        """Return True if the file that was missing at a node (`wanted_in`) has arrived."""
        found = self._ids.wanted_in(node)
        return found is not None and self._ids.file(nodes.ordinal_of(node), found[1]) != 0

    def held_in(self, node: int) -> tuple[Artifact, bool] | None:
        """Return the artifact of a file, and True if its scripts read as zeros; None for other
        nodes.

        Raises OSError(ESTALE) if it is gone from the store.
        """
        return self._ids.held_in(node)

    def open(self, node: int, viewer: Viewer | None = None) -> FileContent:
        """Open a file; raises OSError (EISDIR: not a file, ESTALE: gone).

        The text of ``path`` has only places that ``viewer`` may know. A file that may have changed
        since its capture is read as a whole first.
        """
        content = self._open(node, viewer, wait=True)
        assert content is not None
        return content

    def open_now(self, node: int, viewer: Viewer | None = None) -> FileContent | None:
        """Open a file without waiting; return None if `open` would have to read the whole file
        first.
        """
        return self._open(node, viewer, wait=False)

    def extended(self, node: int, viewer: Viewer | None = None) -> list[bytes]:
        """Return the names of a node's extended attributes for a ``viewer``."""
        found = self.held_in(node)
        return [] if found is None else self._extended.names(*found, viewer)

    def extended_value(self, node: int, name: bytes, viewer: Viewer | None = None) -> bytes | None:
        """Return the value of one attribute, None if there is none with that name."""
        found = self.held_in(node)
        return None if found is None else self._extended.value(*found, name, viewer)

    def _open(self, node: int, viewer: Viewer | None, *, wait: bool) -> FileContent | None:
        if node >> nodes.TAG_SHIFT == nodes.TAG_ID:
            slot = node >> nodes.SLOT_SHIFT & nodes.SLOT_MASK
            if slot in (nodes.SLOT_PATH, nodes.SLOT_README):
                return FileContent(text=self._ids.text(node, viewer))
            if slot == nodes.SLOT_WANTED:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            if _TYPES[slot] == stat.S_IFREG:
                return self._ids.open(node, wait=wait)
        elif nodes.is_browsing(node):
            return self._browse.open(node)
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))

    # --- for front doors that cache answers -----------------------------------------------

    def forget(self) -> None:
        """Forget cached modes and owners of files, because a commit may have changed them."""
        self._ids.forget()

    def spellings(self, ordinal: int) -> Iterator[tuple[int, bytes, bool]]:
        """Yield every entry that exists because of a build ID.

        Each is a directory, a name, and True if a commit may make the name lead to another node, or
        to none.
        """
        self.forget()
        lost = self.has_lost(ordinal)
        for directory, name, replaceable in self._spellings(ordinal):
            yield directory, name, replaceable or lost

    def has_lost(self, ordinal: int) -> bool:
        """Return True if files of a build ID were removed a moment ago."""
        return self._store.index.is_going(ordinal)

    def _spellings(self, ordinal: int) -> Iterator[tuple[int, bytes, bool]]:
        build_id = self._store.index.build_id(ordinal)
        if build_id is None:
            return
        spelled = names.spell(build_id)
        yield nodes.ROOT, spelled, False
        bucket = nodes.DEBUG_BUCKET + build_id[0]
        yield bucket, spelled[2:], False
        # A commit may replace this name: debuginfo is withheld from then on if the executable of
        # the commit is trusted more than the debuginfo.
        yield bucket, spelled[2:] + names.DEBUG_SUFFIX, True
        origins = self._store.index.origins(ordinal)
        yield from self._ids.spellings(ordinal, origins)
        paths = list(dict.fromkeys(record.origin.path for record in origins))
        yield from self._perf.spellings(ordinal, paths)

    # --- fixed names -----------------------------------------------------------------------

    def _root(self, after: int) -> Iterator[tuple[bytes, int, int]]:
        if after < _OFFSET_IDS:
            for offset, (name, node) in enumerate(_ROOT_NAMES.items(), 1):
                if offset > after:
                    yield name, node, offset
            after = _OFFSET_IDS
        first, shift = nodes.of_id(0), nodes.ORDINAL_SHIFT
        for ordinal, raw in self._store.index.raw_ids_from(after - _OFFSET_IDS):
            yield hexlify(raw), first | ordinal << shift, ordinal + _OFFSET_IDS

    def _lookup_static(self, node: int, name: bytes) -> int:
        entries = _STATIC.get(node)
        if entries is not None:
            return entries.get(name, nodes.ABSENT)
        if node >= nodes.PERF_BUCKET:
            if nodes.is_browsing(node):
                return self._browse.lookup(node, name)
            return self._perf.lookup_link(node, name) if node < _STATIC_END else nodes.ABSENT
        if node >= nodes.DEBUG_BUCKET:
            return self._links.lookup(node, name)
        if node == nodes.PERF:
            return self._perf.lookup(node, name)
        if node == nodes.DWZ:
            return self._dwz.lookup(node, name)
        if node in (nodes.DEBUG_BUCKETS, nodes.PERF_BUCKETS):
            return lookup_bucket(_bucket_base(node), name)
        return nodes.ABSENT

    def _static_children(self, node: int, after: int) -> Iterator[tuple[bytes, int, int]]:
        if node >= nodes.PERF_BUCKET:
            if nodes.is_browsing(node):
                return self._browse.children(node, after)
            return self._perf.links(node, after) if node < _STATIC_END else iter(())
        if node >= nodes.DEBUG_BUCKET:
            return self._links.children(node, after)
        if node == nodes.PERF:
            return self._perf.children(node, after)
        if node == nodes.DWZ:
            return self._dwz.children(node, after)
        if node in (nodes.DEBUG_BUCKETS, nodes.PERF_BUCKETS):
            return populated_buckets(self._store, _bucket_base(node), after)
        entries = list(_STATIC.get(node, {}).items())[after:]
        return ((name, child, offset) for offset, (name, child) in enumerate(entries, after + 1))

    def _link(self, target: bytes) -> Attributes:
        shared = self._directory
        return Attributes(_LINK_MODE, len(target), shared.mtime_ns, shared.uid, shared.gid)


def _no_node(node: int, _: object) -> NoReturn:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _bucket_base(node: int) -> int:
    return nodes.DEBUG_BUCKET if node == nodes.DEBUG_BUCKETS else nodes.PERF_BUCKET


_MOST_LOOKED_AT = 256
"""The number of names below a directory that are examined. If the viewer may know none of them, the
directory is left out, unless it contains a public file.
"""

_MOST_ROWS = 4096
"""The number of places that are examined for one entry."""


class Listing:
    """Selects the entries of directories of which a viewer may know.

    Listings leave out build IDs without a file that the viewer may read, and in ``variants`` each
    file that the viewer may not read. A lookup still succeeds, because a viewer who knows a build
    ID may use it. If entries show places (`nodes.is_place`), that is not enough, because any user
    can make a file with the build ID of another user's file. In these directories a viewer may know
    only of the places where they could have read the file, and of directories that lead to one.
    """

    def __init__(
        self, store: Store, ids: IdDirectories, perf: PerfTree, dwz: DwzTree, browse: Browse
    ) -> None:
        self._store = store
        self._ids = ids
        self._browse = browse
        self._perf = perf
        self._dwz = dwz

    def shown(
        self, node: int, entries: Iterator[tuple[bytes, int, int]], viewer: Viewer
    ) -> Iterator[tuple[bytes, int, int]]:
        """Yield the entries of a directory of which ``viewer`` may know."""
        of_id = node >> nodes.TAG_SHIFT == nodes.TAG_ID
        if nodes.is_place(node):
            return (entry for entry in entries if self.may_know(node, entry[0], entry[1], viewer))
        if of_id and nodes.slot_of(node) == nodes.SLOT_VARIANTS:
            return (entry for entry in entries if self._may_read(entry[1], viewer))
        if nodes.any_ordinal_of(node):
            return entries  # the viewer knows the build ID
        return (entry for entry in entries if self._leads_to_any(entry[1], viewer))

    def is_public(self, parent: int, name: bytes, node: int) -> bool:
        """Return True if all users may know of an entry. The time does not depend on the
        directory's size.
        """
        if not nodes.is_place(parent):
            return not name.endswith(DWP_SUFFIX) or self._ids.is_public_package(parent, name)
        if nodes.is_browsing(parent):
            return self._browse.is_public(parent, name, node)
        if nodes.is_dwz(parent):
            return self._dwz.is_public(parent, name)
        return self._perf.is_public(parent, name, node)

    def may_know(self, parent: int, name: bytes, node: int, viewer: Viewer) -> bool:
        """Return True if a viewer may know of an entry of a directory.

        The time grows with the number of names below it, up to a limit.
        """
        try:
            return self.is_public(parent, name, node) or self._knows(parent, name, node, viewer)
        except BuildIdFsError:
            return False  # damaged

    def _knows(self, parent: int, name: bytes, node: int, viewer: Viewer) -> bool:
        if not nodes.is_place(parent):
            base = name.removesuffix(DWP_SUFFIX)
            return self._seen((nodes.ordinal_of(parent),), viewer, lambda path: _last(path) == base)
        if not nodes.is_browsing(parent):
            of_dwz = nodes.is_dwz(parent)
            fits, ordinals = (self._dwz if of_dwz else self._perf).places(parent, name, node)
        elif nodes.form_of(parent) == nodes.FORM_CONTENTS or parent == nodes.CONTAINERS:
            places = self._browse.in_container(parent, name, node, viewer)
            return any(islice(places, _MOST_LOOKED_AT))
        else:
            fits, ordinals = self._browse.places(parent, name, node)
        return self._seen(islice(ordinals, _MOST_LOOKED_AT), viewer, fits)

    def _seen(self, ordinals: Iterable[int], viewer: Viewer, fits: Callable[[bytes], bool]) -> bool:
        """Return True if a viewer could have read one of these build IDs at a path that passes
        ``fits``.
        """
        left = _MOST_ROWS
        for ordinal in dict.fromkeys(ordinals):
            records: list[OriginRecord] = self._store.index.origins(ordinal)
            if any(may_see(viewer, each.origin) and fits(each.origin.path) for each in records):
                return True
            left -= len(records)
            if left < 0:
                return False
        return False

    def _may_read(self, node: int, viewer: Viewer) -> bool:
        try:
            shown = self._ids.attributes(node)
        except (OSError, BuildIdFsError):
            return False  # removed since it was listed, or damaged
        return viewer.may_read(shown.mode, shown.uid, shown.gid)

    def _leads_to_any(self, node: int, viewer: Viewer) -> bool:
        ordinal = nodes.any_ordinal_of(node)
        if not ordinal:
            return True  # an entry without a build ID is for all viewers
        try:
            return self._ids.may_read_any(ordinal, viewer)
        except BuildIdFsError:
            return False


def _last(path: bytes) -> bytes:
    return os.path.basename(path.rstrip(b"/"))
