# SPDX-License-Identifier: Apache-2.0
"""Taking blobs away, and with them every row that nothing speaks of any more.

It takes two steps, because the mounts have to be told in between. First, while nobody else names
blobs: the artifacts go from the index, and then the files; who has one open keeps it. What depends
on a build ID without being content (its places, its paths) says which names the kernel has to
forget, so it stays until the listeners have heard: the second step removes it. A crash leaves rows
in *gone*, and `clear` is called again for them.

Done in batches, so that captures get their turn.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from buildidfs.errors import StoreFull
from buildidfs.model import Kind
from buildidfs.store import lock, notify
from buildidfs.store.index.paths import PATH_KINDS, ROOT, PathPruner
from buildidfs.store.index.queries import DAMAGE, prefixed
from buildidfs.store.schema import locations, schema
from buildidfs.store.write.containers import ContainerPruner
from buildidfs.store.write.last_used import UseWriter
from buildidfs.store.write.transaction import load_counters
from buildidfs.store.write.variants import VariantWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from buildidfs.model import Digest, Origin
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.index.environment import Environment, Txn

_BATCH = 256

#: An index that cannot grow has pages to rewrite so many rows with, mostly.
_SMALL_BATCH = 4


class Removed(msgspec.Struct):
    """What was taken away: ``bytes`` on the disk, and ``ids``, those that nothing is left of."""

    digests: list[bytes] = msgspec.field(default_factory=list)
    blobs: int = 0
    bytes: int = 0
    ids: int = 0


def remove(
    env: Environment,
    blobs: Blobs,
    digests: Iterable[Digest],
    *,
    quarantine: bool = False,
    forget: bool = False,
    write_down: Callable[[Txn, Sequence[Digest]], None] = lambda txn, removed: None,
    check: Callable[[], bool] | None = None,
) -> Removed:
    """Remove blobs; those that the index does not know are passed over.

    Tells the listeners. ``quarantine`` keeps the files, in ``quarantine/``. ``forget`` lets other
    debuginfo of a build ID be served again whose executable is removed; else it is withheld as
    before. ``write_down`` is called in the transaction that removes some, ``check`` before it while
    nobody commits: if it is False these stay. Raises `StoreError`.
    """
    total = Removed()
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
    """Remove what is left of build IDs in *gone*, of which all mounts were told.

    Returns those of which something stays, since it can only be found by going through all paths.
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
    total: Removed,
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

    with lock.removing(env.root):
        if check is not None and not check():
            return
        remover = env.write(work)
        total.digests += remover.rows
        total.blobs += len(remover.rows)
        total.bytes += sum(row.disk_bytes for row in remover.rows.values())
        total.ids += remover.ids
        for digest in remover.rows:
            if quarantine:
                blobs.set_aside(digest)
            else:
                blobs.unlink(digest)
    changed = sorted(remover.changed)
    if changed and notify.announce(env.root, remover.counters.announced, changed):
        clear(env, changed)


class _Remover:
    """The first step, in one write transaction; ``rows`` are those of the blobs to take away."""

    def __init__(self, env: Environment, txn: Txn, forget: bool) -> None:
        self._txn = txn
        self._forget = forget
        self._tables = env.tables
        self.counters = load_counters(env, txn)
        self.changed: set[int] = set()
        self.rows: dict[Digest, schema.DigestRow] = {}
        self.ids = 0
        self._variants = VariantWriter(env, txn, self.counters, self.changed)
        self._uses = UseWriter(env, txn)

    def remove(self, digest: Digest) -> None:
        """Remove the rows of one blob."""
        value = self._txn.get(digest, db=self._tables["digests"])
        if value is None:
            return
        row = self.rows[digest] = schema.DigestRow.unpack(value)
        for ordinal, kind, variant in row.refs:
            if not self._variants.remove(ordinal, kind, variant, forget=self._forget):
                if self._forget:
                    self._forget_floor(ordinal, kind)
                self._lose(ordinal)
            self._txn.put(schema.U64.pack(ordinal), b"", db=self._tables["gone"])
            self.changed.add(ordinal)
        self._uses.remove(digest, row)
        self._txn.delete(digest, db=self._tables["digests"])
        self.counters.blobs -= 1
        self.counters.blob_bytes -= row.size
        self.counters.stored_bytes -= row.disk_bytes

    def finish(self) -> None:
        """Write the counters."""
        if self.rows:
            self.counters.announced += bool(self.changed)
            self._txn.put(schema.COUNTERS_KEY, self.counters.pack(), db=self._tables["meta"])

    def _forget_floor(self, ordinal: int, kind: int) -> None:
        """The executable of a build ID was removed on purpose, or all there was of it."""
        if kind == Kind.EXECUTABLE or not self._variants.kinds(ordinal):
            self._variants.forget_floor(ordinal)

    def _lose(self, ordinal: int) -> None:
        """There is no artifact of one of the kinds any more."""
        key = schema.U64.pack(ordinal)
        value = self._txn.get(key, db=self._tables["ordinals"])
        if value is None:
            return
        named = schema.OrdinalRow.unpack(value)
        named.kinds = self._variants.kinds(ordinal)
        self._txn.put(key, named.pack(), db=self._tables["ordinals"])
        ids = self._tables["ids"]
        if not named.kinds and self._txn.get(named.build_id, db=ids) == key:
            self._txn.delete(named.build_id, db=ids)
            self.ids += 1


class _Clearer:
    """The second step, in one write transaction."""

    def __init__(self, env: Environment, txn: Txn) -> None:
        self._txn = txn
        self._tables = env.tables
        self._paths = PathPruner(env, txn)
        self._containers = ContainerPruner(env, txn)

    def clear(self, ordinal: int) -> bool:
        """Remove places and paths of blobs that are gone; False if some could not be found."""
        key = schema.U64.pack(ordinal)
        value = self._txn.get(key, db=self._tables["ordinals"])
        if value is None:
            self._txn.delete(key, db=self._tables["gone"])
            return True
        named = schema.OrdinalRow.unpack(value)
        dropped, kept = self._drop_origins(ordinal, named)
        self._drop_names(key, dropped, kept)
        self._drop_paths(ordinal, named, dropped, kept)
        for origin in dropped:
            self._containers.drop(origin, ordinal)
        done = bool(named.kinds) or not named.paths
        if named.kinds or not done:
            self._txn.put(key, named.pack(), db=self._tables["ordinals"])
        else:
            self._txn.delete(key, db=self._tables["ordinals"])
        if done:
            self._txn.delete(key, db=self._tables["gone"])
        return done

    def _drop_origins(
        self, ordinal: int, named: schema.OrdinalRow
    ) -> tuple[list[Origin], list[tuple[int, Origin]]]:
        """Remove the places of bytes that are gone; returns them, and those that stay with their
        kinds, oldest first.
        """
        table = self._tables["origins"]
        dropped: list[Origin] = []
        kept: list[tuple[int, int, int, Origin]] = []
        held: dict[Digest, bool] = {}
        for key, value in list(prefixed(self._txn, table, schema.U64.pack(ordinal))):
            try:
                digest, kinds, origin, first, last = locations.unpack_origin(value)
            except DAMAGE:
                if named.kinds:
                    continue  # for `check` to tell of
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
        value = self._txn.get(digest, db=self._tables["digests"])
        if value is None:
            return False
        return any(ref[0] == ordinal for ref in schema.DigestRow.unpack(value).refs)

    def _drop_names(
        self, key: bytes, dropped: list[Origin], kept: list[tuple[int, Origin]]
    ) -> None:
        """Remove the names under /.dwz/ that it had at those places."""
        table = self._tables["dwz"]
        names = {locations.dwz_name(origin.path) for origin in dropped}
        for name in names - {locations.dwz_name(origin.path) for _, origin in kept} - {b""}:
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
            # Those it has besides are of places that were forgotten, and nobody can find them.
            named.primary_path = next(others, named.primary_path)
        for number in going - {named.primary_path}:
            self._paths.drop(named, ordinal, number)
