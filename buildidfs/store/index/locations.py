# SPDX-License-Identifier: Apache-2.0
"""Reads of the places at which files were seen: paths, containers, the journal.

`PathTree` and `FileNames` answer readers who ask by path (perf) or by name. Paths are interned:
each name below its parent has a number, and the ordinals of the build IDs are stored under the
number of the last name. The root is number 0. The last name of each path also has a number of its
own, with the same ordinals.

`ContainerTree` has the files of each container, for browsing when the container is gone; see
`location_rows`.

`Journal` has the build ID that a container saw at a path at a time, even if the bytes were gone
before they could be captured. The query comes from a profile or a core file, which has time, mount
namespace and path.

`share_at` has the shares of places, for all tables of the store that are divided
(`buildidfs.shares`).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from buildidfs.errors import IntegrityError
from buildidfs.formats.container import cgroup
from buildidfs.model import (
    BuildId,
    ContainerNames,
    Kind,
    NamespaceSet,
    Origin,
    bounded_ns,
    fingerprint,
)
from buildidfs.shares import Share, of_user
from buildidfs.store import location_rows, schema
from buildidfs.store.index.queries import (
    DAMAGE,
    batches,
    damaged,
    prefixed,
    rows_after,
    rows_from,
    whole,
)
from buildidfs.store.location_rows import (
    KEY,
    CapturedContainer,
    ContainerEntry,
    offset_of,
    unpack_container,
    unpack_entry,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.store.index.environment import Environment, Table, Txn
    from buildidfs.store.location_rows import JournalRecord, OriginRow, Removal


ROOT = 0

#: The parent of all file names.
NAMES = 2**32 - 1

#: The kinds with a primary path, as bits of ``OrdinalRow.kinds``.
PATH_KINDS = (1 << Kind.EXECUTABLE) | (1 << Kind.VDSO) | (1 << Kind.KALLSYMS)

_NAME_MAX = 255

#: Each name along a new path costs two rows. A user who runs a binary chooses its path, and Linux
#: takes some 2000 names; no tree in use is as deep as this.
_DEPTH_MAX = 128

#: A link of perf's tree, ``../../<path>/<id>``, must fit into PATH_MAX with any build ID.
_LENGTH_MAX = 4096 - len("../../" + "/") - 2 * BuildId.MAX_BYTES - 1

#: A reserved name: files seen below it would be hidden by the tree's own directory.
_TAKEN = b".build-id"


def components(path: bytes) -> list[bytes] | None:
    """Return the names along a path; None if the tree cannot hold them.

    Any user can choose the path of a binary. If others run the same build ID, a path that the tree
    cannot show must not become its primary path.
    """
    names = [name for name in path.split(b"/") if name]
    if not names or len(names) > _DEPTH_MAX or len(path) > _LENGTH_MAX or names[0] == _TAKEN:
        return None
    for name in names:
        if name in (b".", b"..") or len(name) > _NAME_MAX or b"\0" in name:
            return None
    return names


class PathTree:
    """The tree of paths at which files were seen, by number. Path 0 is the root."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        tables = environment.tables
        self._names = tables["names"]
        self._paths = tables["paths"]
        self._pathids = tables["pathids"]
        self._nameids = tables["nameids"]

    def child(self, parent: int, name: bytes) -> int | None:
        """Return the number of ``name`` in ``parent``."""
        if not 0 < len(name) <= _NAME_MAX:
            return None
        value = self._env.get(self._names, schema.U32.pack(parent) + name)
        return None if value is None else schema.number_in(value)

    def number(self, names: Iterable[bytes]) -> int | None:
        """Return the number of the path with these names; None if nothing was seen there."""
        number: int | None = ROOT
        for name in names:
            number = None if number is None else self.child(number, name)
        return number

    def is_public(self, parent: int, name: bytes) -> bool:
        """Return True if all users could read a file at or below ``name`` in ``parent``."""
        if not 0 < len(name) <= _NAME_MAX:
            return False
        value = self._env.get(self._names, schema.U32.pack(parent) + name)
        return value is not None and len(value) > schema.U32.size

    def children(self, parent: int, after: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        """Yield (name, number) of the children in order of names, beyond ``after``."""
        prefix = schema.U32.pack(parent)
        start = None if after is None else prefix + after
        for key, value in rows_after(self._env, self._names, prefix, start):
            yield key[4:], schema.number_in(value)

    def parent(self, number: int) -> tuple[int, bytes] | None:
        """Return (parent, name) of a path; None for the root and unknown numbers."""
        value = self._env.get(self._paths, schema.U32.pack(number))
        return None if value is None else (int.from_bytes(value[:4], "big"), value[4:])

    def spelled(self, number: int) -> bytes:
        """Return the path with that number, with a leading slash; ``b"/"`` for the root."""
        names: list[bytes] = []
        while number != ROOT:
            row = self.parent(number)
            if row is None or len(names) > _DEPTH_MAX:
                raise IntegrityError(f"path {number} of the index does not lead to the root")
            number, name = row
            names.append(name)
        return b"/" + b"/".join(reversed(names))

    def ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Yield the ordinals seen at exactly that path, beyond ``after``."""
        return self.hanging(self._pathids, number, after)

    def has_publicly(self, number: int, ordinal: int) -> bool:
        """Return True if all users could read a file of that build ID at that path."""
        return bool(self._env.get(self._pathids, schema.PATH_ORDINAL.pack(number, ordinal)))

    def hanging(self, table: Table, number: int, after: int) -> Iterator[int]:
        """Yield the ordinals that a table has for a path, beyond ``after``."""
        prefix = schema.U32.pack(number)
        for key, _ in rows_after(self._env, table, prefix, schema.PATH_ORDINAL.pack(number, after)):
            try:
                _, ordinal = schema.PATH_ORDINAL.unpack(key)
            except DAMAGE as error:
                raise damaged(error) from error
            yield ordinal

    def has(self, number: int, ordinal: int) -> bool:
        """Return True if that build ID was seen at exactly that path."""
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        return self._env.get(self._pathids, key) is not None


class FileNames:
    """The file names, that is the last names of paths, by number."""

    def __init__(self, environment: Environment, paths: PathTree) -> None:
        self._env = environment
        self._paths = paths
        self._nameids = environment.tables["nameids"]

    def number(self, name: bytes) -> int | None:
        """Return the number of a file name."""
        return self._paths.child(NAMES, name)

    def every(self, after: int = 0) -> Iterator[tuple[bytes, int]]:
        """Yield (name, number) of all file names in order of names, beyond the name with number
        ``after``.
        """
        found = self._paths.parent(after) if after else (NAMES, None)
        return iter(()) if found is None else self._paths.children(NAMES, found[1])

    def ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Yield the ordinals seen at a path with that file name, beyond ``after``."""
        return self._paths.hanging(self._nameids, number, after)

    def has(self, number: int, ordinal: int) -> bool:
        """Return True if that build ID was seen at a path with that file name."""
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        return self._env.get(self._nameids, key) is not None

    def is_public(self, name: bytes) -> bool:
        """Return True if all users could read some file with that name."""
        return self._paths.is_public(NAMES, name)

    def has_publicly(self, number: int, ordinal: int) -> bool:
        """Return True if all users could read a file of that build ID with that file name."""
        value = self._env.get(self._nameids, schema.PATH_ORDINAL.pack(number, ordinal))
        return value is not None and len(value) > schema.U16.size


CONTAINER_ROOT: Final = 0
MAX_CONTAINERS: Final = 8192
MAX_ENTRIES: Final = 65_536
MAX_CONTENTS: Final = 2**21
MAX_LABEL: Final = 255


_SUFFIX: Final = 24
"""Bytes kept free after a label for the suffix that makes it unique."""
SUFFIX_MARK: Final = b"~"
"""The first byte of that suffix."""


#: Bytes to escape: those that a directory entry cannot have or a terminal would interpret, "%",
#: which begins an escape, and "~", which begins the suffix that makes a label unique.
_UNFIT: Final = re.compile(rb"[\x00-\x1f/%~\x7f]|\xc2[\x80-\x9f]|\A\.")
_OF_NAMESPACE: Final = tuple(f"{name}:" for name in NamespaceSet.__struct_fields__)
BUNDLE: Final = "bundle"
"""`Origin.scanner` of the files of bundles, whose places and times are claims."""
IN_USE: Final = frozenset(("watch", "proc"))
"""`Origin.scanner` of files that a process had mapped."""

#: A file in use that was made within this time may be gone in a moment.
_FRESH_NS: Final = 3600 * 1_000_000_000

_IMAGE_DIGEST: Final = re.compile(r"\A[a-z0-9+._-]+:[0-9a-f]{32,128}(?=/)", re.ASCII)


def is_recent(origin: Origin, most_ns: int = _FRESH_NS) -> bool:
    """Return True for a file that was seen in use within a time, one hour, after it was made."""
    is_young = time.time_ns() - origin.identity.ctime_ns < most_ns
    return is_young and origin.scanner in IN_USE and not origin.archive


def spelled(label: str) -> bytes:
    """Return a label as the name of a directory entry, with misleading characters escaped."""
    name = _UNFIT.sub(_escaped, as_bytes(label))
    if len(name) <= MAX_LABEL - _SUFFIX:
        return name
    return name[: MAX_LABEL - _SUFFIX - 17] + SUFFIX_MARK + fingerprint(name)[:8].hex().encode()


def link_key(called: ContainerNames) -> bytes:
    """Return the key in *labels* of the user-given name of a container; empty if it has none.

    The key begins with a slash, which no directory entry, and so no label, does.
    """
    shown = called.shown.replace("/", "_")
    return b"/" + spelled(shown) if shown else b""


def _escaped(found: re.Match[bytes]) -> bytes:
    return b"".join(b"%%%02X" % byte for byte in found[0])


def label_of(origin: Origin) -> str:
    """Return the label of the tree that a place is in: a container, or the host of a bundle.

    It is empty for this host, whose files need no tree of their own.
    """
    if origin.container or origin.scanner != BUNDLE or not origin.host:
        return origin.container
    return f"host:{origin.host}"


def is_namespace(label: str) -> bool:
    """Return True if a label stands for a namespace, not for a container with an ID."""
    return label.startswith(_OF_NAMESPACE)


def names_of(origin: Origin, token: bytes) -> tuple[bytes, ...]:
    """Return the names that a container may have, the preferred one first."""
    name = spelled(label_of(origin))
    return (name, name + SUFFIX_MARK + token) if token else (name,)


def token_of(origin: Origin) -> bytes:
    """Return bytes that distinguish a container from others with the same label; empty if
    unknown.
    """
    known = b""
    if is_namespace(origin.container):
        known = b"%d" % origin.mnt_ns_id if origin.mnt_ns_id else b""
    elif origin.container:
        known = as_bytes(image_of(origin).partition(":")[2][:12])
        from buildidfs.formats.container import cgroup  # most commands do not need it

        known = known or _token_of_place(cgroup.place(origin.cgroup))
    if origin.container and origin.scanner == BUNDLE:  # its labels are not trusted
        return fingerprint(known + b"\0" + as_bytes(origin.host))[:6].hex().encode()
    return known


def _token_of_place(place: bytes) -> bytes:
    """Return the token of a container by `cgroup.place`."""
    return fingerprint(place)[:6].hex().encode() if place else b""


def is_of(container: CapturedContainer, origin: Origin) -> bool:
    """Return True if a place is in that container, not in another one with its label."""
    return label_of(origin) == container.label and token_of(origin) in (b"", container.token)


def image_of(origin: Origin) -> str:
    """Return the digest of the image that a place is in; empty if it is not in an image."""
    found = _IMAGE_DIGEST.match(origin.host)
    return found[0] if found else ""


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class ContainerTree:
    """The containers of captured files, with a tree of files each."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        tables = environment.tables
        self._containers = tables["containers"]
        self._labels = tables["labels"]
        self._contents = tables["contents"]

    def number(self, name: bytes) -> int | None:
        """Return the number of the container with that name."""
        if not 0 < len(name) <= MAX_LABEL:
            return None
        value = self._env.get(self._labels, name)
        return None if value is None else int.from_bytes(value, "big")

    def linked(self, name: bytes) -> int | None:
        """Return the number of the last container with a user-given name, see `link_key`."""
        if not 0 < len(name) < MAX_LABEL:
            return None
        value = self._env.get(self._labels, b"/" + name)
        return None if value is None else int.from_bytes(value, "big")

    @whole
    def get(self, number: int) -> CapturedContainer | None:
        """Return the container with that number."""
        value = self._env.get(self._containers, schema.U32.pack(number))
        return None if value is None else unpack_container(number, value)[0]

    def labelled(self, label: str) -> CapturedContainer | None:
        """Return the first container with a label: the one whose name has no suffix."""
        number = self.number(spelled(label))
        return None if number is None else self.get(number)

    def placed(self, label: str, group: bytes) -> CapturedContainer | None:
        """Return the container with a label in a control group, which is not an imitation that has
        only the label. Without a control group, or for a namespace, return `labelled`.
        """
        from buildidfs.formats.container import cgroup  # most commands do not need it

        token = b"" if is_namespace(label) else _token_of_place(cgroup.place(group))
        if not token:
            return self.labelled(label)
        for name in (spelled(label), spelled(label) + SUFFIX_MARK + token):
            number = self.number(name)
            found = None if number is None else self.get(number)
            if found is not None and found.token in (b"", token):
                return found
        return None

    def every(self, after: int = 0) -> Iterator[CapturedContainer]:
        """Yield all containers in order of numbers, beyond ``after``."""
        for key, value in rows_after(self._env, self._containers, b"", schema.U32.pack(after)):
            try:
                container = unpack_container(int.from_bytes(key, "big"), value)[0]
            except DAMAGE as error:
                raise damaged(error) from error
            yield container

    @whole
    def child(self, container: int, directory: int, name: bytes) -> ContainerEntry | None:
        """Return the entry of a name in a directory of a container (0: its root)."""
        key = KEY.pack(container, directory, offset_of(name))
        value = self._env.get(self._contents, key)
        if value is None:
            return None
        entry = unpack_entry(key, value)
        return entry if entry.name == name else None

    def children(self, container: int, directory: int, after: int = 0) -> Iterator[ContainerEntry]:
        """Yield entries of a directory of a container, in order of offsets, beyond ``after``."""
        start = KEY.pack(container, directory, after)
        for key, value in rows_after(self._env, self._contents, start[:8], start):
            try:
                entry = unpack_entry(key, value)
            except DAMAGE as error:
                raise damaged(error) from error
            yield entry


class Journal:
    """Reads of the journal."""

    def __init__(self, environment: Environment) -> None:
        self._env = environment
        self._rows = environment.tables["journal"]
        self._recent = environment.tables["recent"]

    def since(self, since_ns: int = 0) -> Iterator[JournalRecord]:
        """Yield the rows last seen at ``since_ns`` or later, in order of last seen.

        No transaction is open while the caller works, so a row that is updated meanwhile is yielded
        again.
        """

        def values(txn: Txn, rows: list[tuple[bytes, bytes]]) -> list[bytes | None]:
            return [txn.get(key[8:], db=self._rows) for key, _ in rows]

        start = schema.U64.pack(sighting_time(since_ns))
        for rows, found in batches(self._env, self._recent, b"", start, values):
            yield from _records([key[8:] for key, _ in rows], found)

    @whole
    def last(self) -> JournalRecord | None:
        """Return the row with the latest sighting."""
        with self._env.read() as txn, txn.cursor(self._recent) as cursor:
            if not cursor.last():
                return None
            key = cursor.key()[8:]
            return _records([key], [txn.get(key, db=self._rows)])[0]

    @whole
    def at(
        self, mnt_ns_id: int | None, path: bytes, boot: bytes | None = None
    ) -> list[JournalRecord]:
        """Return the rows of a path, last seen first; ``mnt_ns_id`` is a mount namespace, None for
        all of them.

        ``boot`` is a boot ID; None searches all boots, in which the number of the namespace is
        ambiguous.
        """
        if mnt_ns_id is None:
            prefix = fingerprint(path)
        else:
            prefix = location_rows.journal_prefix(path, mnt_ns_id, boot)
        with self._env.read() as txn:
            rows = list(prefixed(txn, self._rows, prefix))
        records = [location_rows.unpack_journal(key, value) for key, value in rows]
        # The key has only a hash of the path.
        return _last_first(record for record in records if record.path == path)

    @whole
    def of(self, build_id: BuildId) -> list[JournalRecord]:
        """Return the rows of a build ID, last seen first; reads every row."""
        wanted = bytes(build_id)
        # Most rows need not be decoded.
        return _last_first(
            location_rows.unpack_journal(key, row)
            for key, row in rows_from(self._env, self._rows)
            if location_rows.build_id_in(row) == wanted
        )

    @whole
    def beginning(self, digits: str) -> set[BuildId]:
        """Return the build IDs that begin with hexadecimal digits, or the one that equals them;
        reads every row.
        """
        found = {location_rows.build_id_in(row) for _, row in rows_from(self._env, self._rows)}
        fitting = {BuildId(each) for each in found if each.hex().startswith(digits)}
        whole = {each for each in fitting if each.hex() == digits}
        return whole or fitting

    @whole
    def removals(self) -> dict[BuildId, Removal]:
        """Return the last removal by a limit of each build ID; reads every row."""
        found: dict[BuildId, Removal] = {}
        for _, row in rows_from(self._env, self._rows):
            removed = location_rows.removal_in(row)
            if removed is not None:
                build_id = BuildId(location_rows.build_id_in(row))
                found[build_id] = removed | found.get(build_id)
        return found

    @whole
    def removed(self) -> list[JournalRecord]:
        """Return the rows of files whose bytes a limit has removed; reads every row."""
        return [
            location_rows.unpack_journal(key, row)
            for key, row in rows_from(self._env, self._rows)
            if location_rows.removal_in(row) is not None
        ]


@whole
def _records(keys: list[bytes], values: list[bytes | None]) -> list[JournalRecord]:
    """Decode rows of the journal. Raises `IntegrityError`, for a missing one, too."""
    records = []
    for key, value in zip(keys, values, strict=True):
        if value is None:
            raise IntegrityError(f"the journal has no row {key.hex()}")
        records.append(location_rows.unpack_journal(key, value))
    return records


def _last_first(records: Iterable[JournalRecord]) -> list[JournalRecord]:
    return sorted(records, key=lambda record: (-record.last_seen_ns, -record.first_seen_ns))


def sighting_time(ns: int) -> int:
    """Return the time of a sighting as rows hold it: no earlier than 1970."""
    return max(bounded_ns(ns), 0)


APART_MNT: Final = 1 << NamespaceSet.__struct_fields__.index("mnt")
"""The bit of the mount namespace in `Origin.apart`."""

UNKNOWN: Final = Share("unknown places")

_BUNDLE: Final = BUNDLE.encode()
_BUNDLES: Final = Share("bundles")
_NAMESPACES: Final = Share("mount namespaces without a container")


@functools.lru_cache(maxsize=4096)
def _share_of(
    group: bytes, container: bytes, uid: int, owner: int, *, apart: bool, bundled: bool
) -> Share:
    """Return the share of a file that was seen in the control group ``group``.

    More places give no user a larger share of the store. A control group in a container
    belongs to the container, and all containers and mount namespaces that a user has made are one
    place. The other mount namespaces without a container are one place, and so are the claims in
    bundles. A label proves nothing, so two containers with one label are two places. ``container``
    is the label of the file, ``apart`` is True in another mount namespace than the host's. ``uid``
    owns the file, ``owner`` is `Origin.owner`.
    """
    if bundled:
        return _BUNDLES
    label = container.decode("utf-8", "replace")
    named = "" if is_namespace(label) else label
    if not apart:  # the label is that of an image, a package or a server
        return Share(named) if named and not group else of_user(owner or uid)
    if user := owner or cgroup.user_id(group):
        return of_user(user)
    if outer := cgroup.outermost(group):
        return Share(outer.decode("utf-8", "surrogateescape"))
    return Share(named) if named else _NAMESPACES


def share_at(origin: Origin) -> Share:
    """Return the share of a file at a place."""
    return _share_of(
        origin.cgroup,
        as_bytes(origin.container),
        origin.identity.uid,
        origin.owner,
        apart=bool(origin.apart & APART_MNT),
        bundled=origin.scanner == BUNDLE,
    )


def share_in(row: OriginRow) -> Share:
    """Return the share of a file whose place has that row. It is called for each row."""
    return _share_of(
        row.cgroup,
        row.container,
        row.uid,
        row.owner,
        apart=bool(row.apart & APART_MNT),
        bundled=row.scanner == _BUNDLE,
    )
