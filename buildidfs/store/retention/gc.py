# SPDX-License-Identifier: Apache-2.0
"""What processes that were killed have left behind: blobs without a row, half-finished removals.

Nothing of it is wrong, and all of it takes room. It is found a directory or a page of rows at a
time, while captures and readers go on; a blob goes only while nobody gives names to blobs, since
the row of a new one is about to be written.
"""

from __future__ import annotations

import contextlib
import os
import time
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import Digest
from buildidfs.store import lock, notify
from buildidfs.store.errors import translated
from buildidfs.store.index.paths import PathPruner
from buildidfs.store.index.queries import Index
from buildidfs.store.retention import removal
from buildidfs.store.schema import schema
from buildidfs.store.write import use_log
from buildidfs.store.write.transaction import load_counters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.store.index.environment import Environment, Txn

GRACE_S: Final = 3600
"""What is younger is left alone."""

_BATCH: Final = 256
_MOST_AT_ONCE: Final = 1 << 16


class Collected(msgspec.Struct):
    """What was found, and removed but for the quarantine.

    ``ids`` counts build IDs of which something was left, ``blobs`` and ``bytes`` files that no row
    spoke of, ``drafts`` files that were never finished. ``quarantined`` and ``quarantine_bytes``
    are for somebody to look at.
    """

    ids: int = 0
    names: int = 0
    blobs: int = 0
    bytes: int = 0
    drafts: int = 0
    quarantined: int = 0
    quarantine_bytes: int = 0


def collect(env: Environment) -> Collected:
    """Remove what nothing speaks of any more. Raises `StoreError`."""
    found = Collected()
    use_log.fold(env)
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
    """Tell the mounts, once more maybe, and clear what is left of build IDs."""
    left: list[int] = []
    count = 0
    rows = Index(env).rows(env.tables["gone"], b"", None)
    while batch := [int.from_bytes(key, "big") for key, _ in islice(rows, _BATCH)]:
        notify.announce(env.root, env.write(partial(_count, env)), batch)
        left += removal.clear(env, batch)
        count += len(batch)
        if len(left) >= _MOST_AT_ONCE:
            break
    if left:
        _sweep_paths(env, left)
    return count


def _count(env: Environment, txn: Txn) -> int:
    """The number of an announcement."""
    counters = load_counters(env, txn)
    counters.announced += 1
    txn.put(schema.COUNTERS_KEY, counters.pack(), db=env.tables["meta"])
    return counters.announced


def _sweep_paths(env: Environment, ordinals: list[int]) -> None:
    """Go through all paths for those of build IDs that were seen at places nobody remembers."""
    wanted = frozenset(ordinals)
    keys = (key for key, _ in Index(env).rows(env.tables["pathids"], b"", None))
    pairs = (schema.PATH_ORDINAL.unpack(key) for key in keys)
    found = (pair for pair in pairs if pair[1] in wanted)
    while batch := list(islice(found, _BATCH)):
        env.write(partial(_drop_paths, env, batch))
    env.write(partial(_recount, env, ordinals))
    removal.clear(env, ordinals)


def _drop_paths(env: Environment, pairs: list[tuple[int, int]], txn: Txn) -> None:
    pruner, table = PathPruner(env, txn), env.tables["ordinals"]
    for number, ordinal in pairs:
        value = txn.get(schema.U64.pack(ordinal), db=table)
        if value is not None and not value[0]:
            row = schema.OrdinalRow.unpack(value)
            pruner.drop(row, ordinal, number)
            txn.put(schema.U64.pack(ordinal), row.pack(), db=table)


def _recount(env: Environment, ordinals: list[int], txn: Txn) -> None:
    """All paths were looked at: what is still counted never was there."""
    table = env.tables["ordinals"]
    for ordinal in ordinals:
        value = txn.get(schema.U64.pack(ordinal), db=table)
        if value is not None and not value[0]:
            row = schema.OrdinalRow.unpack(value)
            row.paths = 0
            txn.put(schema.U64.pack(ordinal), row.pack(), db=table)


def _drop_orphaned_names(env: Environment) -> int:
    """Names under /.dwz/ of what is gone; the place that brought them was forgotten before."""
    rows = Index(env).rows(env.tables["dwz"], b"", None)
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
    """Blobs of one directory that no row speaks of."""
    rows = env.tables["digests"]
    stray = []
    for path in _names(directory):
        digest = _digest(path)
        if digest is not None and env.get(rows, digest) is None and _older(path, before):
            stray.append((path, digest))
    for start in range(0, len(stray), _BATCH):
        with lock.removing(env.root):
            for path, digest in stray[start : start + _BATCH]:
                if env.get(rows, digest) is None:
                    found.bytes += os.lstat(path).st_size
                    os.unlink(path)
                    found.blobs += 1


def _digest(path: bytes) -> Digest | None:
    """The blob that a file is, or is kept beside of."""
    name = os.path.basename(path).partition(b".")[0]
    if len(name) != 64:
        return None
    with contextlib.suppress(ValueError):
        return Digest(bytes.fromhex(name.decode("ascii", "replace")))
    return None


def _drafts(root: bytes) -> Iterator[bytes]:
    yield from use_log.drafts(root)
    for path in _names(root):
        if os.path.basename(path).startswith(b".format."):
            yield path


def _older(path: bytes, before: float) -> bool:
    try:
        return os.lstat(path).st_ctime < before  # nobody can set it, and giving a name does
    except FileNotFoundError:
        return False


def _directories(root: bytes) -> Iterable[bytes]:
    return [path for path in _names(root) if os.path.isdir(path)]


def _names(directory: bytes) -> list[bytes]:
    try:
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []
