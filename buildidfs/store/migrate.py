# SPDX-License-Identifier: Apache-2.0
"""Stores of older formats become stores of this one.

Nobody else may have the store open. The file ``format`` is changed first, from when on older
programs refuse the store; then all rows are, in one transaction, and with them the format in
*meta*, which decides. Cut off in between, the migration is run again by whoever opens the store
for writing next. Cut off before, or out of room, the store is what it was.

What a row of the older format was is written here and nowhere else. A row that does not decode
is left as it is, for `check` to find.
"""

from __future__ import annotations

import os
import struct
import threading
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import StoreLocked
from buildidfs.model import Digest, Sighting, Trust
from buildidfs.store import environment, layout, places, presence, schema
from buildidfs.store.blobs import Blobs
from buildidfs.store.containerwriter import ContainerWriter
from buildidfs.store.index import DAMAGE, prefixed
from buildidfs.store.paths import PATH_KINDS, PathWriter
from buildidfs.store.uses import UseWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.store.environment import Environment, Txn

_ROWS: Final = 4096

_running = threading.Lock()


class Migrated(msgspec.Struct, frozen=True):
    """What was done: formats before and now, and how much there was to convert."""

    before: int
    now: int
    ids: int
    blobs: int


def run(path: str | bytes | os.PathLike[str], *, map_size: int | None = None) -> Migrated | None:
    """Bring a store to the format of this program; None when it has that.

    Raises `StoreLocked` when anybody has it open, `StoreFull` (nothing is changed then),
    `StoreVersionError` for a newer format, `StoreMissing`, `StoreError`.
    """
    root = os.path.abspath(os.fsencode(path))
    with _running:
        if (env := layout.acquire(root, read_only=False, map_size=map_size)) is not None:
            environment.release(env)
            return None
        try:
            with environment.alone(root, map_size=map_size) as env:
                return _convert(root, env)
        except StoreLocked as error:
            raise StoreLocked(f"{error}, and has to be converted first: {_who(root)}") from error


def _who(root: bytes) -> str:
    """What to do about those who use a store."""
    users = ", ".join(f"{each.role} (pid {each.pid})" for each in presence.present(root))
    return f"end {users or 'whatever uses it'}, then run buildidfs migrate"


def _convert(root: bytes, env: Environment) -> Migrated:
    with env.read() as txn:
        before = layout.rows_format(env, txn)
    blobs = Blobs(root, writable=False)
    try:
        with layout.new_format(root, schema.FORMAT_VERSION):
            return env.write(lambda txn: _steps(env, txn, blobs, before))
    finally:
        blobs.close()


def _steps(env: Environment, txn: Txn, blobs: Blobs, before: int) -> Migrated:
    for version in range(before, schema.FORMAT_VERSION):
        if version not in _STEPS:
            raise environment.damaged(env.root, f"has rows of no format: {version}")
        _STEPS[version](env, txn, blobs)
    txn.put(schema.FORMAT_KEY, schema.U32.pack(schema.FORMAT_VERSION), db=env.tables["meta"])
    return Migrated(
        before,
        schema.FORMAT_VERSION,
        txn.stat(env.tables["ids"])["entries"],
        txn.stat(env.tables["digests"])["entries"],
    )


def _rows(env: Environment, txn: Txn, table: str) -> Iterator[tuple[bytes, bytes]]:
    """All rows, each of which may be written while they are walked through."""
    start = b""
    while rows := list(islice(prefixed(txn, env.tables[table], b"", start), _ROWS)):
        yield from rows
        start = rows[-1][0] + b"\0"


# --- format 1: no uses, no files of blobs, no segments, paths of executables alone ------------

#: next ordinal and path, announced, blobs, their bytes; artifacts by kind.
_COUNTERS_1: Final = Struct(">5Q4Q")
#: As it is now, up to the segments; then extents of scripts.
_ARTIFACT_1: Final = Struct(">H32sQqHIIBBQ")
#: Size; then the artifacts.
_DIGEST_1: Final = Struct(">Q")


def _from_1(env: Environment, txn: Txn, blobs: Blobs) -> None:
    """``segments`` stay 0, which contradicts nothing: `scrub` fills them in as it reads."""
    numbers = txn.get(schema.COUNTERS_KEY, db=env.tables["meta"]) or b""
    if len(numbers) != _COUNTERS_1.size:
        raise environment.damaged(env.root, "has not the counters of format 1")
    for table in ("artifacts", "variants"):
        for key, value in _rows(env, txn, table):
            if len(value) >= _ARTIFACT_1.size:
                row = value[: _ARTIFACT_1.size] + bytes(8) + value[_ARTIFACT_1.size :]
                txn.put(key, row, db=env.tables[table])
    stored = _digests_from_1(env, txn, blobs)
    ordinal, path, announced, blob_count, size, *artifacts = _COUNTERS_1.unpack(numbers)
    counters = schema.Counters(ordinal, path, announced, blob_count, size, stored, artifacts)
    _places_from_1(env, txn, counters)
    txn.put(schema.COUNTERS_KEY, counters.pack(), db=env.tables["meta"])


def _digests_from_1(env: Environment, txn: Txn, blobs: Blobs) -> int:
    """Returns how many bytes all files have."""
    uses, table = UseWriter(env, txn), env.tables["digests"]
    stored = 0
    for key, value in _rows(env, txn, "digests"):
        try:
            digest = Digest(key)
            (size,) = _DIGEST_1.unpack_from(value)
            refs = list(schema.ORDINAL_KIND_VARIANT.iter_unpack(value[_DIGEST_1.size :]))
        except (struct.error, ValueError):
            continue
        row = schema.DigestRow(size, refs)
        if (file := blobs.file(digest)) is not None:
            row.stored, row.inode, row.ctime_ns = file.stored, file.inode, file.ctime_ns
        uses.add(digest, row, 0, Trust.UNKNOWN)
        txn.put(key, row.pack(), db=table)
        stored += row.stored
    for _, value in _rows(env, txn, "origins"):
        try:
            digest, _, origin, _, last = places.unpack_origin(value)
            row = schema.DigestRow.unpack(txn.get(digest, db=table) or b"")
        except DAMAGE:
            continue
        if uses.note(digest, row, schema.stamp_of(last), origin.trust):
            txn.put(digest, row.pack(), db=table)
    return stored


def _places_from_1(env: Environment, txn: Txn, counters: schema.Counters) -> None:
    """Only executables had paths, and nothing was found by name or by container."""
    paths = PathWriter(env, txn, counters)
    behind = counters.next_path
    for key, _ in _rows(env, txn, "pathids"):
        number, ordinal = schema.PATH_ORDINAL.unpack(key)
        value = txn.get(key[:4], db=env.tables["paths"])
        if value is not None and number < behind:
            paths.add_name(ordinal, value[4:], public=False)
    containers = ContainerWriter(env, txn, counters)
    for key, value in _rows(env, txn, "origins"):
        try:
            digest, kinds, origin, first, last = places.unpack_origin(value)
            row = schema.DigestRow.unpack(txn.get(digest, db=env.tables["digests"]) or b"")
            named = schema.OrdinalRow.unpack(txn.get(key[:8], db=env.tables["ordinals"]) or b"")
        except DAMAGE:
            continue
        ordinal = int.from_bytes(key[:8], "big")
        primary, public = bool(kinds & PATH_KINDS), origin.is_public
        if paths.add(named, ordinal, origin.path, primary=primary, public=public):
            txn.put(key[:8], named.pack(), db=env.tables["ordinals"])
        refs = [ref for ref in row.refs if ref[0] == ordinal]
        for moment in (first, last) if refs else ():
            containers.see(Sighting(origin, moment), min(refs), public=public)
    containers.finish()


_STEPS: Final[dict[int, Callable[[Environment, Txn, Blobs], None]]] = {1: _from_1}
