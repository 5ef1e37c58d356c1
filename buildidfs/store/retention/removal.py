# SPDX-License-Identifier: Apache-2.0
"""Remove blobs, and all rows to which no other row refers any more.

The removal takes two steps, because the mounts must be informed in between. The first step runs
while no process gives names to blobs: it removes the artifacts from the index and then the files; a
reader that has a file open keeps it. The places and paths of a build ID show which names the kernel
must forget, so they stay until the listeners have acknowledged; the second step removes them. A
crash leaves rows in *gone*, and `clear` is called again for them.

Removals run in batches, so that captures get their turn.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import StoreFull
from buildidfs.model import Digest, Kind
from buildidfs.store import coordination, location_rows, schema
from buildidfs.store.errors import translated
from buildidfs.store.index.aliases import AliasWriter
from buildidfs.store.index.locations import PATH_KINDS, ROOT
from buildidfs.store.index.queries import DAMAGE, IndexRows, prefixed, rows_from
from buildidfs.store.write import uses
from buildidfs.store.write.containers import ContainerPruner
from buildidfs.store.write.locations import PathPruner
from buildidfs.store.write.uses import UseWriter
from buildidfs.store.write.variants import VariantWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from buildidfs.model import Origin
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.index.environment import Environment, Txn

_BATCH: Final = 256

#: The size of a batch if the index cannot grow: it mostly has enough free pages for so few rows.
_SMALL_BATCH = 4


class RemovalResult(msgspec.Struct):
    """The result of a removal.

    ``bytes`` is what the blobs took on disk, ``ids`` counts the build IDs without a blob left.
    ``forbidden`` is True if the check kept some blobs.
    """

    digests: list[bytes] = msgspec.field(default_factory=list)
    blobs: int = 0
    bytes: int = 0
    ids: int = 0
    forbidden: bool = False


def remove(
    env: Environment,
    blobs: Blobs,
    digests: Iterable[Digest],
    *,
    quarantine: bool = False,
    forget: bool = False,
    write_down: Callable[[Txn, Sequence[Digest]], None] = lambda txn, removed: None,
    check: Callable[[], bool] | None = None,
) -> RemovalResult:
    """Remove blobs; those that the index does not know are skipped.

    Announces the changes. ``quarantine`` moves the files to ``quarantine/``. If an executable is
    removed, ``forget`` allows less trusted debuginfo of its build ID to be served again; else such
    debuginfo stays withheld. Blobs are removed in batches. Before the transaction of each batch,
    ``check`` is called while no process commits; if it returns False, the blobs of the batch stay.
    ``write_down`` is called in the transaction. Raises `StoreError`.
    """
    total = RemovalResult()
    rest = iter(digests)
    while batch := list(itertools.islice(rest, _BATCH)):
        try:
            _remove(env, blobs, batch, quarantine, forget, total, write_down, check)
        except StoreFull:
            for start in range(0, len(batch), _SMALL_BATCH):
                few = batch[start : start + _SMALL_BATCH]
                _remove(env, blobs, few, quarantine, forget, total, write_down, check)
    return total


def clear(env: Environment, ordinals: Sequence[int]) -> list[int]:
    """Remove the rows that build IDs in *gone* still have, after the announcement to all mounts.

    Returns the build IDs of which some rows can be found only by a search of all paths.
    """

    def work(txn: Txn) -> list[int]:
        clearer = _Clearer(env, txn)
        return [ordinal for ordinal in ordinals if not clearer.clear(ordinal)]

    return env.write(work) if ordinals else []


def _remove(
    env: Environment,
    blobs: Blobs,
    batch: Sequence[Digest],
    quarantine: bool,
    forget: bool,
    total: RemovalResult,
    write_down: Callable[[Txn, Sequence[Digest]], None],
    check: Callable[[], bool] | None,
) -> None:
    def work(txn: Txn) -> _Remover:
        remover = _Remover(env, txn, forget)
        for digest in batch:
            remover.remove(digest)
        remover.finish()
        write_down(txn, list(remover.rows))
        return remover

    with coordination.removing(env.root):
        if check is not None and not check():
            total.forbidden = True
            return
        remover = env.write(work)
        total.digests += remover.rows
        total.blobs += len(remover.rows)
        total.bytes += sum(row.taken for row in remover.rows.values())
        total.ids += remover.ids
        for digest in remover.rows:
            if quarantine:
                blobs.set_aside(digest)
            else:
                blobs.unlink(digest)
    changed = sorted(remover.changed)
    if changed and coordination.announce(env.root, remover.counters.announced, changed):
        clear(env, changed)


class _Remover:
    """The first step of a removal, in one write transaction; ``rows`` are those of the blobs to
    remove.
    """

    def __init__(self, env: Environment, txn: Txn, forget: bool) -> None:
        self._txn = txn
        self._forget = forget
        self._tables = env.tables
        self._index = IndexRows(env, txn)
        self.counters = self._index.counters
        self.changed: set[int] = set()
        self.rows: dict[Digest, schema.DigestRow] = {}
        self.ids = 0
        self._variants = VariantWriter(env, txn, self.counters, self.changed)
        self._uses = UseWriter(env, txn)
        self._aliases = AliasWriter(env, txn)

    def remove(self, digest: Digest) -> None:
        """Remove the rows of one blob."""
        if (row := self._index.digest_row(digest)) is None:
            return
        self.rows[digest] = row
        for ordinal, kind, variant in row.refs:
            if not self._variants.remove(ordinal, kind, variant, forget=self._forget):
                if self._forget:
                    self._forget_floor(ordinal, kind)
                self._lose(ordinal)
            self._txn.put(schema.U64.pack(ordinal), b"", db=self._tables["gone"])
            self.changed.add(ordinal)
        self._uses.remove(digest, row)
        self._aliases.drop(digest)
        self._txn.delete(digest, db=self._tables["digests"])
        self.counters.blobs -= 1
        self.counters.blob_bytes -= row.size
        self.counters.stored_bytes -= row.taken

    def finish(self) -> None:
        """Write the counters of the store if rows were removed."""
        if self.rows:
            self.counters.announced += bool(self.changed)
            self._index.put_counters()

    def _forget_floor(self, ordinal: int, kind: int) -> None:
        """Drop the floor of a build ID whose executable, or last artifact, was removed
        on purpose.
        """
        if kind == Kind.EXECUTABLE or not self._index.kinds(ordinal):
            self._variants.forget_floor(ordinal)

    def _lose(self, ordinal: int) -> None:
        """Record that a build ID has no artifact of a kind any more."""
        key = schema.U64.pack(ordinal)
        if (named := self._index.named(ordinal)) is None:
            return
        named.kinds = self._index.kinds(ordinal)
        self._index.put_named(ordinal, named)
        ids = self._tables["ids"]
        if not named.kinds and self._txn.get(named.build_id, db=ids) == key:
            self._txn.delete(named.build_id, db=ids)
            self._txn.delete(key, db=self._tables["adopted"])
            self._txn.delete(key, db=self._tables["ambiguous"])
            self.ids += 1


class _Clearer:
    """The second step of a removal, in one write transaction."""

    def __init__(self, env: Environment, txn: Txn) -> None:
        self._txn = txn
        self._tables = env.tables
        self._index = IndexRows(env, txn)
        self._paths = PathPruner(env, txn)
        self._containers = ContainerPruner(env, txn)

    def clear(self, ordinal: int) -> bool:
        """Remove places and paths of removed blobs; return False if some could not be found."""
        key = schema.U64.pack(ordinal)
        if (named := self._index.named(ordinal)) is None:
            self._txn.delete(key, db=self._tables["gone"])
            return True
        dropped, kept = self._drop_origins(ordinal, named)
        self._drop_names(key, dropped, kept)
        self._drop_paths(ordinal, named, dropped, kept)
        for origin in dropped:
            self._containers.drop(origin, ordinal)
        done = bool(named.kinds) or not named.paths
        if named.kinds or not done:
            self._index.put_named(ordinal, named)
        else:
            self._txn.delete(key, db=self._tables["ordinals"])
        if done:
            self._txn.delete(key, db=self._tables["gone"])
        return done

    def _drop_origins(
        self, ordinal: int, named: schema.OrdinalRow
    ) -> tuple[list[Origin], list[tuple[int, Origin]]]:
        """Remove the places of removed bytes; return them, and the remaining places with their
        kinds, oldest first.
        """
        table = self._tables["origins"]
        dropped: list[Origin] = []
        kept: list[tuple[int, int, int, Origin]] = []
        held: dict[Digest, bool] = {}
        for key, value in list(prefixed(self._txn, table, schema.U64.pack(ordinal))):
            try:
                digest, kinds, origin, first, last = location_rows.unpack_origin(value)
            except DAMAGE:
                if named.kinds:
                    continue  # `check` reports it
            else:
                if digest not in held:
                    held[digest] = self._has(digest, ordinal)
                if held[digest]:
                    kept.append((first, last, kinds, origin))
                    continue
                dropped.append(origin)
            self._txn.delete(key, db=table)
            named.origins -= 1
        kept.sort(key=lambda each: each[:2])
        return dropped, [(kinds, origin) for _, _, kinds, origin in kept]

    def _has(self, digest: Digest, ordinal: int) -> bool:
        row = self._index.digest_row(digest)
        return row is not None and any(ref[0] == ordinal for ref in row.refs)

    def _drop_names(
        self, key: bytes, dropped: list[Origin], kept: list[tuple[int, Origin]]
    ) -> None:
        """Remove the names under /.dwz/ that the build ID had at those places."""
        table = self._tables["dwz"]
        names = {location_rows.dwz_name(origin.path) for origin in dropped}
        for name in names - {location_rows.dwz_name(origin.path) for _, origin in kept} - {b""}:
            value = self._txn.get(name, db=table)
            if value is not None and value.startswith(key):
                self._txn.delete(name, db=table)

    def _drop_paths(
        self,
        ordinal: int,
        named: schema.OrdinalRow,
        dropped: list[Origin],
        kept: list[tuple[int, Origin]],
    ) -> None:
        find = self._paths.find
        going = {find(origin.path) for origin in dropped} - {find(each.path) for _, each in kept}
        if not named.kinds & PATH_KINDS:
            if all(find(each.path) != named.primary_path for _, each in kept):
                going.add(named.primary_path)
            named.primary_path = ROOT
        elif named.primary_path in going:
            public_first = sorted(kept, key=lambda each: not each[1].is_public)
            left = (find(origin.path) for kinds, origin in public_first if kinds & PATH_KINDS)
            others = (number for number in left if self._paths.has(number, ordinal))
            # Other names belong to forgotten places, and cannot be found.
            named.primary_path = next(others, named.primary_path)
        for number in going - {named.primary_path}:
            self._paths.drop(named, ordinal, number)


GRACE_S: Final = 3600
"""In seconds: leftovers that changed more recently are kept."""

_MOST_AT_ONCE: Final = 1 << 16


class Collected(msgspec.Struct, rename={"ids": "build_ids"}):
    """Counts of the leftovers; all were removed except those in quarantine.

    ``ids`` counts build IDs with leftovers, ``blobs`` and ``bytes`` files without a row, ``drafts``
    unfinished files. ``quarantined`` and ``quarantine_bytes`` are kept for inspection.
    """

    ids: int = 0
    names: int = 0
    blobs: int = 0
    bytes: int = 0
    drafts: int = 0
    quarantined: int = 0
    quarantine_bytes: int = 0


def collect(env: Environment) -> Collected:
    """Remove blobs and rows to which no row refers any more. Raises `StoreError`."""
    found = Collected()
    uses.fold(env)
    found.ids = _finish_removals(env)
    found.names = _drop_orphaned_names(env)
    before = time.time() - GRACE_S
    with translated(env.root):
        for directory in _directories(os.path.join(env.root, b"blobs")):
            _collect_blobs(env, directory, before, found)
        for path in _drafts(env.root):
            if _older(path, before):
                os.unlink(path)
                found.drafts += 1
        for path in _names(os.path.join(env.root, b"quarantine")):
            found.quarantined += 1
            found.quarantine_bytes += os.lstat(path).st_size
    return found


# --- half-finished removals -----------------------------------------------------------------------


def _finish_removals(env: Environment) -> int:
    """Announce the removals to the mounts, perhaps once more, and remove the remaining rows."""
    left: list[int] = []
    count = 0
    rows = rows_from(env, env.tables["gone"])
    while batch := [int.from_bytes(key, "big") for key, _ in islice(rows, _BATCH)]:
        coordination.announce(env.root, env.write(partial(_count, env)), batch)
        left += clear(env, batch)
        count += len(batch)
        if len(left) >= _MOST_AT_ONCE:
            break
    if left:
        _sweep_paths(env, left)
    return count


def _count(env: Environment, txn: Txn) -> int:
    """Add one to the number of announced changes, and return it."""
    rows = IndexRows(env, txn)
    rows.counters.announced += 1
    rows.put_counters()
    return rows.counters.announced


def _sweep_paths(env: Environment, ordinals: list[int]) -> None:
    """Search all paths for build IDs that were seen at forgotten places, and remove those."""
    wanted = frozenset(ordinals)
    keys = (key for key, _ in rows_from(env, env.tables["pathids"]))
    pairs = (schema.PATH_ORDINAL.unpack(key) for key in keys)
    found = (pair for pair in pairs if pair[1] in wanted)
    while batch := list(islice(found, _BATCH)):
        env.write(partial(_drop_paths, env, batch))
    env.write(partial(_recount, env, ordinals))
    clear(env, ordinals)


def _drop_paths(env: Environment, pairs: list[tuple[int, int]], txn: Txn) -> None:
    pruner, rows = PathPruner(env, txn), IndexRows(env, txn)
    for number, ordinal in pairs:
        named = rows.named(ordinal)
        if named is not None and not named.kinds:
            pruner.drop(named, ordinal, number)
            rows.put_named(ordinal, named)


def _recount(env: Environment, ordinals: list[int], txn: Txn) -> None:
    """Set the count of paths to 0 for these build IDs, after all their paths were removed."""
    rows = IndexRows(env, txn)
    for ordinal in ordinals:
        named = rows.named(ordinal)
        if named is not None and not named.kinds:
            named.paths = 0
            rows.put_named(ordinal, named)


def _drop_orphaned_names(env: Environment) -> int:
    """Remove names under /.dwz/ of removed files whose place is already gone."""
    rows = rows_from(env, env.tables["dwz"])
    ordinals = env.tables["ordinals"]
    orphans = (name for name, value in rows if env.get(ordinals, value[:8]) is None)
    count = 0
    while batch := list(islice(orphans, _BATCH)):
        count += env.write(partial(_drop_names, env, batch))
    return count


def _drop_names(env: Environment, names: list[bytes], txn: Txn) -> int:
    table, count = env.tables["dwz"], 0
    for name in names:
        value = txn.get(name, db=table)
        if value is not None and txn.get(value[:8], db=env.tables["ordinals"]) is None:
            count += txn.delete(name, db=table)
    return count


# --- files ----------------------------------------------------------------------------------------


def _collect_blobs(env: Environment, directory: bytes, before: float, found: Collected) -> None:
    """Collect the blobs in one directory that have no row."""
    rows = env.tables["digests"]
    stray = []
    for path in _names(directory):
        digest = _digest(path)
        if digest is not None and env.get(rows, digest) is None and _older(path, before):
            stray.append((path, digest))
    for start in range(0, len(stray), _BATCH):
        with coordination.removing(env.root):
            for path, digest in stray[start : start + _BATCH]:
                if env.get(rows, digest) is None:
                    found.bytes += os.lstat(path).st_size
                    os.unlink(path)
                    found.blobs += 1


def _digest(path: bytes) -> Digest | None:
    """Return the digest of the blob in a file, or of the blob beside which the file is kept."""
    name = os.path.basename(path).partition(b".")[0]
    if len(name) != 64:
        return None
    with contextlib.suppress(ValueError):
        return Digest(bytes.fromhex(name.decode("ascii", "replace")))
    return None


def _drafts(root: bytes) -> Iterator[bytes]:
    yield from uses.drafts(root)
    for path in _names(root):
        if os.path.basename(path).startswith(b".format."):
            yield path


def _older(path: bytes, before: float) -> bool:
    try:
        return os.lstat(path).st_ctime < before  # the time cannot be set, but giving a name sets it
    except FileNotFoundError:
        return False


def _directories(root: bytes) -> Iterable[bytes]:
    return [path for path in _names(root) if os.path.isdir(path)]


def _names(directory: bytes) -> list[bytes]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []
