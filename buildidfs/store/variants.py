# SPDX-License-Identifier: Apache-2.0
"""The variants of an artifact in one write transaction: which there are, which is served."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from buildidfs.errors import IntegrityError
from buildidfs.model import Artifact, Kind, Origin, Trust
from buildidfs.store import schema
from buildidfs.store.index import prefixed, rank, segments_in

if TYPE_CHECKING:
    from buildidfs.model import Digest
    from buildidfs.store.environment import Environment, Txn

_READ = 0o444


class VariantWriter:
    """Adds, changes and removes variants; the best one of each artifact is always in *artifacts*.

    ``changed`` gets the ordinals of which names, attributes or served bytes are others than before.
    """

    def __init__(
        self, environment: Environment, txn: Txn, counters: schema.Counters, changed: set[int]
    ) -> None:
        self._txn = txn
        self._artifacts = environment.tables["artifacts"]
        self._variants = environment.tables["variants"]
        self._counters = counters
        self._changed = changed
        #: Blobs of which something is served that was not, or in another way.
        self.altered: set[Digest] = set()

    def best(self, ordinal: int, kind: int) -> Artifact | None:
        """The variant that is served."""
        value = self._txn.get(schema.ORDINAL_KIND.pack(ordinal, kind), db=self._artifacts)
        return None if value is None else schema.unpack_artifact(ordinal, kind, value)

    def kept(self, ordinal: int, kind: int, variant: int) -> Artifact:
        """A variant, served or not, that a row of *digests* speaks of."""
        best = self.best(ordinal, kind)
        if best is not None and best.variant == variant:
            return best
        key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
        value = self._txn.get(key, db=self._variants)
        if value is None:
            raise IntegrityError(f"the index has no variant {ordinal}/{kind}/{variant}")
        return schema.unpack_artifact(ordinal, kind, value)

    def add(self, artifact: Artifact) -> None:
        """Record a variant that is not there yet."""
        self.altered.add(artifact.digest)
        best = self.best(artifact.ordinal, artifact.kind)
        if best is None:
            self._counters.artifacts[artifact.kind - 1] += 1
            self._put_best(artifact, best)
        elif self._is_better(artifact, best):
            self._put(best)
            self._put_best(artifact, best)
        else:
            self._put(artifact)

    def change(self, new: Artifact) -> None:
        """Replace the row of a variant by one that is no worse."""
        self.altered.add(new.digest)
        best = self.best(new.ordinal, new.kind)
        if best is None or best.variant == new.variant:
            self._put_best(new, best)
        elif self._is_better(new, best):
            self._txn.delete(_key(new), db=self._variants)
            self._put(best)
            self._put_best(new, best)
        else:
            self._put(new)

    def remove(self, ordinal: int, kind: int, variant: int) -> bool:
        """Remove a variant; False when it was the last one of the artifact."""
        best = self.best(ordinal, kind)
        self._changed.add(ordinal)
        if best is None or best.variant != variant:
            key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
            self._txn.delete(key, db=self._variants)
            return best is not None
        others = self._others(ordinal, kind)
        if others:
            segments = self._segments(ordinal, kind)
            chosen = min(others, key=lambda artifact: rank(artifact, segments))
            self._txn.delete(_key(chosen), db=self._variants)
            self._put_best(chosen, best)
            return True
        self._txn.delete(schema.ORDINAL_KIND.pack(ordinal, kind), db=self._artifacts)
        self._counters.artifacts[kind - 1] -= 1
        if kind == Kind.EXECUTABLE:
            self.choose(ordinal, Kind.DEBUGINFO)
        return False

    def raise_to(self, ordinal: int, kind: int, variant: int, origin: Origin) -> None:
        """Let a variant have the trust of the best place it was seen at, and the owner and mode of
        one where everybody could read it. Of two other places neither lets in all whom the other
        does, so that the first stays.
        """
        old = self.kept(ordinal, kind, variant)
        new = old
        if origin.trust > old.trust:
            new = msgspec.structs.replace(new, trust=Trust(origin.trust))
        mode = origin.shown_mode
        if mode & _READ == _READ != old.mode & _READ:
            uid, gid = origin.identity.uid, origin.identity.gid
            new = msgspec.structs.replace(new, mode=mode, uid=uid, gid=gid)
        if new is not old:
            self.change(new)

    def _is_better(self, artifact: Artifact, than: Artifact) -> bool:
        segments = self._segments(artifact.ordinal, artifact.kind)
        return rank(artifact, segments) < rank(than, segments)

    def _segments(self, ordinal: int, kind: int) -> int:
        """What `rank` is to compare with; nothing depends on it but debuginfo."""
        if kind != Kind.DEBUGINFO:
            return 0
        key = schema.ORDINAL_KIND.pack(ordinal, Kind.EXECUTABLE)
        return segments_in(self._txn.get(key, db=self._artifacts))

    def _others(self, ordinal: int, kind: int) -> list[Artifact]:
        rows = prefixed(self._txn, self._variants, schema.ORDINAL_KIND.pack(ordinal, kind))
        return [schema.unpack_artifact(ordinal, kind, value) for _, value in rows]

    def _put_best(self, artifact: Artifact, before: Artifact | None) -> None:
        key = schema.ORDINAL_KIND.pack(artifact.ordinal, artifact.kind)
        self._txn.put(key, schema.pack_artifact(artifact), db=self._artifacts)
        self._changed.add(artifact.ordinal)
        if artifact.kind is Kind.EXECUTABLE and (
            before is None or before.segments != artifact.segments
        ):
            self.choose(artifact.ordinal, Kind.DEBUGINFO)

    def choose(self, ordinal: int, kind: int) -> None:
        """Serve the best variant there is, after a row it depends on became another."""
        best, others = self.best(ordinal, kind), self._others(ordinal, kind)
        segments = self._segments(ordinal, kind)
        kept = [artifact for artifact in (best, *others) if artifact is not None]
        chosen = min(kept, key=lambda artifact: rank(artifact, segments), default=None)
        if chosen is not None and (best is None or chosen.variant != best.variant):
            self._txn.delete(_key(chosen), db=self._variants)
            if best is None:
                self._counters.artifacts[kind - 1] += 1
            else:
                self._put(best)
            self._put_best(chosen, best)

    def _put(self, artifact: Artifact) -> None:
        self._changed.add(artifact.ordinal)
        self._txn.put(_key(artifact), schema.pack_artifact(artifact), db=self._variants)


def most_variants(trust: Trust) -> int:
    """The last number that a variant from there may get."""
    if trust is Trust.HOST:
        return schema.MAX_VARIANT
    return min(schema.MAX_VARIANT, schema.MAX_FOREIGN_VARIANT)


def _key(artifact: Artifact) -> bytes:
    return schema.ORDINAL_KIND_VARIANT.pack(artifact.ordinal, artifact.kind, artifact.variant)
