# SPDX-License-Identifier: Apache-2.0
"""Whether the index agrees with itself, with the blobs, and the blobs with their digests.

Blobs that no row speaks of are not wrong: a process that was killed leaves them, and the next
capture of the same bytes takes them over.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from buildidfs.errors import BuildIdFsError
from buildidfs.model import Digest
from buildidfs.store import places, schema
from buildidfs.store.blobs import Blobs, digest_of
from buildidfs.store.index import DAMAGE, prefixed, rank
from buildidfs.store.paths import ROOT

if TYPE_CHECKING:
    from buildidfs.model import Artifact
    from buildidfs.store.environment import Environment, Table, Txn


def problems(env: Environment, blobs: Blobs, *, digests: bool) -> Iterator[str]:
    """Lines for people, none for a sound store. Holds one read transaction while it runs."""
    with env.read() as txn:
        checker = _Checker(env.tables, txn, blobs)
        parts = (
            checker.ids(),
            checker.artifacts(),
            checker.blobs(digests),
            checker.places(),
            checker.journal(),
        )
        for part in parts:
            try:
                yield from part
            except (*DAMAGE, BuildIdFsError) as error:
                yield f"rows that cannot be read: {error}"


class _Checker:
    def __init__(self, tables: dict[str, Table], txn: Txn, blobs: Blobs) -> None:
        self._tables = tables
        self._txn = txn
        self._blobs = blobs
        self._artifacts: dict[tuple[int, int, int], bytes] = {}

    def _rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        return prefixed(self._txn, self._tables[table], b"")

    def _count(self, table: str) -> int:
        return self._txn.stat(self._tables[table])["entries"]

    def ids(self) -> Iterator[str]:
        """Build IDs and ordinals name each other."""
        for key, value in self._rows("ids"):
            row = self._txn.get(value, db=self._tables["ordinals"])
            if row is None or schema.build_id_of(row) != key:
                yield f"build ID {key.hex()} has no ordinal that knows of it"
        if self._count("ids") != self._count("ordinals"):
            yield f"{self._count('ids')} build IDs have {self._count('ordinals')} ordinals"
        last = max((int.from_bytes(key, "big") for key, _ in self._rows("ordinals")), default=0)
        if self._counters().next_ordinal <= last:
            yield f"the next ordinal would be {self._counters().next_ordinal}, but {last} is used"

    def artifacts(self) -> Iterator[str]:
        """Every artifact has a build ID, and the best variant is the one that is served."""
        counts: Counter[int] = Counter()
        for key, value in self._rows("artifacts"):
            ordinal, kind = schema.ORDINAL_KIND.unpack(key)
            counts[kind] += 1
            best = schema.unpack_artifact(ordinal, kind, value)
            named = self._txn.get(key[:8], db=self._tables["ordinals"])
            if named is None or not named[0] & 1 << kind:
                yield f"artifact {ordinal}/{kind} is not known to its build ID"
            self._note(best)
            for _, other in prefixed(self._txn, self._tables["variants"], key):
                variant = schema.unpack_artifact(ordinal, kind, other)
                self._note(variant)
                if rank(variant) < rank(best):
                    yield f"variant {variant.variant} of {ordinal}/{kind} should be served"
        if len(self._artifacts) != self._count("artifacts") + self._count("variants"):
            yield "there are variants of which none is served"
        for kind, count in enumerate(self._counters().artifacts, 1):
            if counts[kind] != count:
                yield f"{counts[kind]} artifacts of kind {kind} are counted as {count}"

    def _note(self, artifact: Artifact) -> None:
        self._artifacts[artifact.ordinal, artifact.kind, artifact.variant] = artifact.digest

    def blobs(self, digests: bool) -> Iterator[str]:
        """Every artifact has its blob, every blob its size, and its digest."""
        count = size = 0
        for key, value in self._rows("digests"):
            digest = Digest(key)
            row = schema.DigestRow.unpack(value)
            count, size = count + 1, size + row.size
            for ref in row.refs:
                if self._artifacts.pop(ref, None) != digest:
                    yield f"blob {digest} has no artifact {_spelled(ref)}"
            found = self._blobs.size(digest)
            if found is None:
                yield f"blob {digest} is missing"
            elif found != row.size:
                yield f"blob {digest} has {found} bytes instead of {row.size}"
            elif digests and self._read(digest) != digest:
                yield f"blob {digest} has other bytes"
        for ref in self._artifacts:
            yield f"artifact {_spelled(ref)} has no blob"
        counters = self._counters()
        if (counters.blobs, counters.blob_bytes) != (count, size):
            yield f"{count} blobs are counted as {counters.blobs}"

    def _read(self, digest: Digest) -> Digest:
        fd = self._blobs.open(digest)
        try:
            return digest_of(fd)
        finally:
            os.close(fd)

    def places(self) -> Iterator[str]:
        """Origins and paths belong to build IDs, and are counted right."""
        origins: Counter[bytes] = Counter(key[:8] for key, _ in self._rows("origins"))
        paths: Counter[bytes] = Counter(key[4:] for key, _ in self._rows("pathids"))
        for key, value in self._rows("ordinals"):
            row = schema.OrdinalRow.unpack(value)
            if (row.origins, row.paths) != (origins.pop(key, 0), paths.pop(key, 0)):
                yield f"origins or paths of {row.build_id} are counted wrongly"
            if row.primary_path != ROOT and not self._has_path(row.primary_path):
                yield f"the first path of {row.build_id} does not exist"
        if origins or paths:
            yield "there are origins or paths of unknown build IDs"
        for key, _ in self._rows("pathids"):
            if not self._has_path(int.from_bytes(key[:4], "big")):
                yield f"path {key[:4].hex()} does not exist"
        for key, value in self._rows("paths"):
            if self._txn.get(value, db=self._tables["names"]) != key:
                yield f"path {key.hex()} is not in its parent"
        for _, value in self._rows("origins"):
            places.unpack_origin(value)

    def journal(self) -> Iterator[str]:
        """Every row of the journal has its place in the order of time, and nothing else has."""
        if not self._tables.keys() >= schema.LATER_TABLES:
            return  # a store from before, opened for reading
        for key, value in self._rows("journal"):
            record = places.unpack_journal(key, value)
            if record.last_seen_ns < record.first_seen_ns:
                yield f"journal row {key.hex()} was last seen before it was first seen"
            order = schema.U64.pack(record.last_seen_ns) + key
            if self._txn.get(order, db=self._tables["recent"]) is None:
                yield f"journal row {key.hex()} has no place in the order of time"
        for order, _ in self._rows("recent"):
            if self._txn.get(order[8:], db=self._tables["journal"]) is None:
                yield f"the order of time has a journal row {order[8:].hex()} that is not there"
        if self._count("journal") != self._count("recent"):
            yield f"{self._count('journal')} journal rows are ordered as {self._count('recent')}"

    def _has_path(self, number: int) -> bool:
        return self._txn.get(schema.U32.pack(number), db=self._tables["paths"]) is not None

    def _counters(self) -> schema.Counters:
        value = self._txn.get(schema.COUNTERS_KEY, db=self._tables["meta"])
        return schema.Counters.unpack(value or b"")


def _spelled(ref: tuple[int, int, int]) -> str:
    return "/".join(str(int(number)) for number in ref)
