# SPDX-License-Identifier: Apache-2.0
"""The tree of paths that files were seen at, for readers who ask by path (perf), or by name.

Paths are interned: each name below its parent has a number, and the numbers of build IDs hang
from the last one. The root is number 0. The last name of each path has a number of its own, from
which the same build IDs hang.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import BuildId, Kind
from buildidfs.store import schema
from buildidfs.store.index.queries import DAMAGE, damaged, prefixed

if TYPE_CHECKING:
    from buildidfs.store.index.environment import Environment, Table, Txn
    from buildidfs.store.index.queries import Index

ROOT = 0

#: What the last names of paths are children of.
NAMES = 2**32 - 1

#: What has a primary path, as bits of ``OrdinalRow.kinds``.
PATH_KINDS = (1 << Kind.EXECUTABLE) | (1 << Kind.VDSO) | (1 << Kind.KALLSYMS)

_NAME_MAX = 255

#: Each name along a new path costs two rows. A user who runs a binary chooses its path, and Linux
#: takes some 2000 names; no tree in use is as deep as this.
_DEPTH_MAX = 128

#: What perf leads to a path with, ``../../<path>/<id>``, has to fit PATH_MAX with any build ID.
_LENGTH_MAX = 4096 - len("../../" + "/") - 2 * BuildId.MAX_BYTES - 1

#: The tree has a directory of its own there, so what was seen in it could not be reached.
_TAKEN = b".build-id"


def components(path: bytes) -> list[bytes] | None:
    """The names along a path, None when the tree cannot hold them.

    A user who runs a binary chooses its path: one that leads nowhere must not become the primary
    path of a build ID that others run too.
    """
    names = [name for name in path.split(b"/") if name]
    if not names or len(names) > _DEPTH_MAX or len(path) > _LENGTH_MAX or names[0] == _TAKEN:
        return None
    for name in names:
        if name in (b".", b"..") or len(name) > _NAME_MAX or b"\0" in name:
            return None
    return names


class PathTree:
    """The paths that files were seen at, by number. Path 0 is the root."""

    def __init__(self, environment: Environment, index: Index) -> None:
        self._env = environment
        self._index = index
        tables = environment.tables
        self._names = tables["names"]
        self._paths = tables["paths"]
        self._pathids = tables["pathids"]
        self._nameids = tables["nameids"]

    def child(self, parent: int, name: bytes) -> int | None:
        """Number of ``name`` in ``parent``."""
        if not 0 < len(name) <= _NAME_MAX:
            return None
        value = self._env.get(self._names, schema.U32.pack(parent) + name)
        return None if value is None else schema.number_in(value)

    def is_public(self, parent: int, name: bytes) -> bool:
        """Return True if everybody could read a file at or below ``name`` in ``parent``."""
        if not 0 < len(name) <= _NAME_MAX:
            return False
        value = self._env.get(self._names, schema.U32.pack(parent) + name)
        return value is not None and len(value) > schema.U32.size

    def children(self, parent: int, after: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        """(name, number) in order of names, behind ``after``."""
        prefix = schema.U32.pack(parent)
        start = None if after is None else prefix + after
        for key, value in self._index.rows(self._names, prefix, start):
            yield key[4:], schema.number_in(value)

    def parent(self, number: int) -> tuple[int, bytes] | None:
        """(parent, name) of a path; None for the root and for what does not exist."""
        value = self._env.get(self._paths, schema.U32.pack(number))
        return None if value is None else (int.from_bytes(value[:4], "big"), value[4:])

    def spelled(self, number: int) -> bytes:
        """The path from the root, with a leading slash; ``b"/"`` for the root."""
        names: list[bytes] = []
        while number != ROOT:
            row = self.parent(number)
            if row is None or len(names) > _DEPTH_MAX:
                raise IntegrityError(f"path {number} of the index does not lead to the root")
            number, name = row
            names.append(name)
        return b"/" + b"/".join(reversed(names))

    def ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Ordinals seen at exactly that path, behind ``after``."""
        return self.hanging(self._pathids, number, after)

    def has_publicly(self, number: int, ordinal: int) -> bool:
        """Return True if everybody could read a file of that build ID at that path."""
        return bool(self._env.get(self._pathids, schema.PATH_ORDINAL.pack(number, ordinal)))

    def hanging(self, table: Table, number: int, after: int) -> Iterator[int]:
        """Ordinals that hang from a path in a table, behind ``after``."""
        prefix = schema.U32.pack(number)
        for key, _ in self._index.rows(table, prefix, schema.PATH_ORDINAL.pack(number, after)):
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
    """The last names of those paths, by number."""

    def __init__(self, environment: Environment, paths: PathTree) -> None:
        self._env = environment
        self._paths = paths
        self._nameids = environment.tables["nameids"]

    def number(self, name: bytes) -> int | None:
        """The number of a file name."""
        return self._paths.child(NAMES, name)

    def every(self, after: int = 0) -> Iterator[tuple[bytes, int]]:
        """(name, number) of all file names in order of names, behind the one of that number."""
        found = self._paths.parent(after) if after else (NAMES, None)
        return iter(()) if found is None else self._paths.children(NAMES, found[1])

    def ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Ordinals seen at a path with that file name, behind ``after``."""
        return self._paths.hanging(self._nameids, number, after)

    def has(self, number: int, ordinal: int) -> bool:
        """Return True if that build ID was seen at a path with that file name."""
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        return self._env.get(self._nameids, key) is not None

    def is_public(self, name: bytes) -> bool:
        """Return True if everybody could read some file with that name."""
        return self._paths.is_public(NAMES, name)

    def has_publicly(self, number: int, ordinal: int) -> bool:
        """Return True if everybody could read a file of that build ID with that file name."""
        value = self._env.get(self._nameids, schema.PATH_ORDINAL.pack(number, ordinal))
        return value is not None and len(value) > schema.U16.size


class PathWriter:
    """Adds paths within one write transaction."""

    def __init__(self, environment: Environment, txn: Txn, counters: schema.Counters) -> None:
        self._txn = txn
        self._counters = counters
        tables = environment.tables
        self._names = tables["names"]
        self._paths = tables["paths"]
        self._pathids = tables["pathids"]
        self._nameids = tables["nameids"]
        self._cache: dict[tuple[int, bytes], tuple[int, bool]] = {}

    def add(
        self, row: schema.OrdinalRow, ordinal: int, path: bytes, *, primary: bool, public: bool
    ) -> bool:
        """Hang a build ID from a path; True when it was not there. ``row`` is counted up.

        It is the ``primary`` path if it may be, and there is none yet, or none that is public.
        ``public`` says that everybody could read the file there.
        """
        names = components(path)
        if names is None:
            return False
        primary = primary and (
            row.primary_path == ROOT or (public and not self._is_public(row.primary_path, ordinal))
        )
        if row.paths >= schema.MAX_PATHS and not primary:
            return False  # before its names are written: they would be there for nothing
        number = ROOT
        for name in names:
            number = self._intern(number, name, public=public)
        if primary:
            row.primary_path = number
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        mark = schema.PUBLIC if public else b""
        added: bool = self._txn.put(key, mark, overwrite=False, db=self._pathids)
        if added:
            row.paths += 1
            self.add_name(ordinal, names[-1], public=public)
        elif public and not self._txn.get(key, db=self._pathids):
            self._txn.put(key, mark, db=self._pathids)
            self.add_name(ordinal, names[-1], public=True, count=0)
        return added

    def add_name(self, ordinal: int, name: bytes, *, public: bool, count: int = 1) -> None:
        """Count one more path of a build ID with that last name, or ``count``."""
        key = schema.PATH_ORDINAL.pack(self._intern(NAMES, name, public=public), ordinal)
        value = self._txn.get(key, bytes(schema.U16.size), db=self._nameids)
        before = int.from_bytes(value[: schema.U16.size], "big")
        mark = schema.PUBLIC if public else value[schema.U16.size :]
        self._txn.put(key, schema.U16.pack(before + count) + mark, db=self._nameids)

    def _is_public(self, number: int, ordinal: int) -> bool:
        return bool(self._txn.get(schema.PATH_ORDINAL.pack(number, ordinal), db=self._pathids))

    def _intern(self, parent: int, name: bytes, *, public: bool) -> int:
        known = self._cache.get((parent, name))
        if known is not None and (known[1] or not public):
            return known[0]
        key = schema.U32.pack(parent) + name
        value = self._txn.get(key, db=self._names)
        if value is None:
            number, marked = self._new(parent, name, key), False
        else:
            number, marked = schema.number_in(value), len(value) > schema.U32.size
        if public and not marked:
            self._txn.put(key, schema.U32.pack(number) + schema.PUBLIC, db=self._names)
        self._cache[parent, name] = number, marked or public
        return number

    def _new(self, parent: int, name: bytes, key: bytes) -> int:
        number = self._counters.next_path
        if number > schema.MAX_NUMBER:
            raise StoreError(f"the store holds as many paths as it can number ({number - 1})")
        self._counters.next_path += 1
        self._txn.put(key, schema.U32.pack(number), db=self._names)
        self._txn.put(schema.U32.pack(number), schema.U32.pack(parent) + name, db=self._paths)
        return number


class PathPruner:
    """Removes paths within one write transaction."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        tables = environment.tables
        self._names = tables["names"]
        self._paths = tables["paths"]
        self._pathids = tables["pathids"]
        self._nameids = tables["nameids"]

    def find(self, path: bytes) -> int:
        """The number of a path; `ROOT` for what has none."""
        number = ROOT
        for name in components(path) or ():
            value = self._txn.get(schema.U32.pack(number) + name, db=self._names)
            if value is None:
                return ROOT
            number = schema.number_in(value)
        return number

    def has(self, number: int, ordinal: int) -> bool:
        """Return True if a build ID hangs from a path."""
        key = schema.PATH_ORDINAL.pack(number, ordinal)
        return self._txn.get(key, db=self._pathids) is not None

    def drop(self, row: schema.OrdinalRow, ordinal: int, number: int) -> None:
        """Take a build ID from a path, and the path away if nothing hangs from it any more.

        ``row`` is counted down.
        """
        if self._txn.delete(schema.PATH_ORDINAL.pack(number, ordinal), db=self._pathids):
            row.paths -= 1
            self._drop_name(number, ordinal)
            self._prune(number)

    def _drop_name(self, number: int, ordinal: int) -> None:
        """One path less with the last name of that one."""
        path = self._txn.get(schema.U32.pack(number), db=self._paths)
        named = path and self._txn.get(schema.U32.pack(NAMES) + path[4:], db=self._names)
        if not named:
            return
        key = named[: schema.U32.size] + schema.U64.pack(ordinal)
        value = self._txn.get(key, bytes(schema.U16.size), db=self._nameids)
        count = int.from_bytes(value[: schema.U16.size], "big")
        if count > 1:
            rest = value[schema.U16.size :]
            self._txn.put(key, schema.U16.pack(count - 1) + rest, db=self._nameids)
        elif self._txn.delete(key, db=self._nameids):
            self._prune(schema.number_in(named))

    def _prune(self, number: int) -> None:
        tables = (self._pathids, self._nameids, self._names)
        while number not in (ROOT, NAMES):
            key = schema.U32.pack(number)
            if any(_has_any(self._txn, table, key) for table in tables):
                return
            value = self._txn.get(key, db=self._paths)
            if value is None:
                return
            self._txn.delete(value, db=self._names)
            self._txn.delete(key, db=self._paths)
            number = int.from_bytes(value[:4], "big")


def _has_any(txn: Txn, table: Table, prefix: bytes) -> bool:
    return next(prefixed(txn, table, prefix), None) is not None
