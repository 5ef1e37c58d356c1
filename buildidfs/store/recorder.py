# SPDX-License-Identifier: Apache-2.0
"""One write transaction: captures and sightings become rows.

Everything is read from the transaction, nothing from memory, so that the work can be run again
when the map had to grow, and so that several processes may write to one store.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import msgspec

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import Artifact, BuildId, Digest, FileIdentity, Kind, Origin, Sighting, Trust
from buildidfs.store import places, schema
from buildidfs.store.blobs import Staged
from buildidfs.store.index import prefixed, rank
from buildidfs.store.paths import PathWriter
from buildidfs.store.records import NewAbsence, NewCapture, Outcome

if TYPE_CHECKING:
    from buildidfs.store.environment import Environment, Txn

#: A file changed this shortly before it was looked at may change again within the same tick of
#: the filesystem's clock, and then looks unchanged; git calls such a file racily clean.
_RACY_NS = 2_000_000_000

#: A stamp of the memo is brought up to date only when it is off by more: that saves a write.
_STAMP_SLACK_S = 86_400

#: Rows of the memo of which the oldest goes when it is full.
_CANDIDATES = 8

_PATH_KINDS = (1 << Kind.EXECUTABLE) | (1 << Kind.VDSO) | (1 << Kind.KALLSYMS)

_WORLD_READABLE = 0o004
_MEMFD = b"/memfd:"


class Recorder:
    """The writes of one transaction; call `finish` last."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        tables = environment.tables
        self._meta = tables["meta"]
        self._ids = tables["ids"]
        self._ordinals = tables["ordinals"]
        self._artifacts = tables["artifacts"]
        self._variants = tables["variants"]
        self._digests = tables["digests"]
        self._origins = tables["origins"]
        self._dwz = tables["dwz"]
        self._seen = tables["seen"]
        self.counters = load_counters(environment, txn)
        self._paths = PathWriter(environment, txn, self.counters)
        self.changed: set[int] = set()

    def finish(self) -> None:
        """Write the counters."""
        if self.changed:
            self.counters.announced += 1
        value = self.counters.pack()
        if value != self._txn.get(schema.COUNTERS_KEY, db=self._meta):
            self._txn.put(schema.COUNTERS_KEY, value, db=self._meta)

    # --- a capture -------------------------------------------------------------------------

    def capture(self, new: NewCapture) -> Outcome:
        """Record one file whose blob is in place."""
        if not new.kinds:
            raise ValueError("a capture has at least one kind")
        content = new.content
        digest = content.digest if isinstance(content, Staged) else content
        row = self._digest_row(digest)
        new_blob = row is None
        if row is None:
            if not isinstance(content, Staged):
                raise IntegrityError(f"the store holds no blob {digest}")
            row = schema.DigestRow(content.size)
        ordinal, named, new_id = self._named(new.build_id)
        # A file without a build ID of its own may stand for several. What one place says of it
        # under one of them is no reason to believe it, or to show it, under another.
        same = [ref for ref in row.refs if ref[0] == ordinal]
        like = self._kept(*same[0]) if same else None
        new_variant, refused = False, ""
        for kind in new.kinds:
            if any(ref[0] == ordinal and ref[1] == kind for ref in row.refs):
                continue
            if named.next_variant[kind - 1] > _most_variants(new.sighting.origin.trust):
                refused = f"build ID {new.build_id} has as many variants as can be numbered"
                continue
            self._add_variant(row, named, ordinal, kind, digest, new, like)
            new_variant = True
        if not any(ref[0] == ordinal for ref in row.refs):
            return Outcome(ordinal, refused=refused)
        if new_blob:
            self.counters.blobs += 1
            self.counters.blob_bytes += row.size
        if new_variant:
            self._txn.put(digest, row.pack(), db=self._digests)
        for ref in same:
            self._raise(*ref, new.sighting.origin)
        new_origin = self._see(digest, row, ordinal, named, new.sighting)
        if not (isinstance(content, Staged) and content.changed):
            self._remember(new.sighting, digest)
        return Outcome(ordinal, new_id, new_variant, new_blob, new_origin, refused)

    def _digest_row(self, digest: Digest) -> schema.DigestRow | None:
        value = self._txn.get(digest, db=self._digests)
        return None if value is None else schema.DigestRow.unpack(value)

    def _named(self, build_id: BuildId) -> tuple[int, schema.OrdinalRow, bool]:
        value = self._txn.get(build_id, db=self._ids)
        if value is not None:
            ordinal = int.from_bytes(value, "big")
            return ordinal, self._ordinal_row(ordinal), False
        ordinal = self.counters.next_ordinal
        if ordinal > schema.MAX_NUMBER:
            raise StoreError(f"the store holds as many build IDs as it can number ({ordinal - 1})")
        self.counters.next_ordinal += 1
        self._txn.put(build_id, schema.U64.pack(ordinal), db=self._ids)
        return ordinal, schema.OrdinalRow(build_id), True

    def _ordinal_row(self, ordinal: int) -> schema.OrdinalRow:
        value = self._txn.get(schema.U64.pack(ordinal), db=self._ordinals)
        if value is None:
            raise IntegrityError(f"the index has no build ID number {ordinal}")
        return schema.OrdinalRow.unpack(value)

    def _add_variant(
        self,
        row: schema.DigestRow,
        named: schema.OrdinalRow,
        ordinal: int,
        kind: Kind,
        digest: Digest,
        new: NewCapture,
        like: Artifact | None,
    ) -> None:
        """Add an artifact; ``like`` is another one with the same bytes."""
        identity = new.sighting.origin.identity
        variant = named.next_variant[kind - 1]
        named.next_variant[kind - 1] += 1
        row.refs.append((ordinal, kind, variant))
        artifact = Artifact(
            ordinal,
            kind,
            variant,
            digest,
            row.size,
            identity.mtime_ns,
            shown_mode(_mode_of(new.sighting.origin)),
            identity.uid,
            identity.gid,
            new.quality,
            new.sighting.origin.trust,
            new.sighting.seen_ns,
            new.scripts,
        )
        if like is not None:
            artifact = msgspec.structs.replace(
                artifact, mode=like.mode, uid=like.uid, gid=like.gid, trust=like.trust
            )
        best = self._best(ordinal, kind)
        if best is None:
            named.kinds |= 1 << kind
            self.counters.artifacts[kind - 1] += 1
            self._put_best(artifact)
        elif rank(artifact) < rank(best):
            self._put_variant(best)
            self._put_best(artifact)
        else:
            self._put_variant(artifact)

    # --- a sighting of bytes that have their rows --------------------------------------------

    def touch(self, sighting: Sighting) -> bool:
        """Record that a file which the memo knows was seen again; False when it does not."""
        key = schema.seen_key(sighting.origin.identity)
        if key is None:
            return False
        value = self._txn.get(key, db=self._seen)
        if value is None:
            return False
        stamp, tag = schema.SEEN.unpack_from(value)
        now = _stamp(sighting.seen_ns)
        if now - stamp > _STAMP_SLACK_S:
            self._txn.put(
                key, schema.SEEN.pack(now, tag) + value[schema.SEEN.size :], db=self._seen
            )
        if tag:
            return True
        digest = Digest(value[schema.SEEN.size :])
        row = self._digest_row(digest)
        if row is None or not row.refs:
            return False
        ordinals = {ref[0] for ref in row.refs}
        if all(self._just_seen(digest, row, ordinal, sighting) for ordinal in ordinals):
            return True
        if len(ordinals) == 1:  # else the memo does not tell which of them was meant
            for ref in row.refs:
                self._raise(*ref, sighting.origin)
        for ordinal in ordinals:
            self._see(digest, row, ordinal, self._ordinal_row(ordinal), sighting)
        return True

    def _just_seen(
        self, digest: Digest, row: schema.DigestRow, ordinal: int, sighting: Sighting
    ) -> bool:
        """Whether that very place was recorded within a minute: then there is nothing to write."""
        key = places.origin_key(ordinal, digest, sighting.origin)
        old = self._txn.get(key, db=self._origins)
        if old is None:
            return False
        first, last = places.TIMES.unpack_from(old)
        if not first <= sighting.seen_ns < last + schema.LAST_SEEN_SLACK_NS:
            return False
        kinds = schema.mask_of(tuple(Kind(kind) for of, kind, _ in row.refs if of == ordinal))
        return places.pack_origin(digest, kinds, sighting.origin, first, last) == old

    def _see(
        self,
        digest: Digest,
        row: schema.DigestRow,
        ordinal: int,
        named: schema.OrdinalRow,
        sighting: Sighting,
    ) -> bool:
        """Write the origin, and what follows from it; True when it is a new one."""
        origin = sighting.origin
        before = named.pack()
        kinds = schema.mask_of(tuple(Kind(kind) for of, kind, _ in row.refs if of == ordinal))
        if kinds & _PATH_KINDS and self._paths.add(named, ordinal, origin.path):
            self.changed.add(ordinal)
        new_origin = self._put_origin(digest, kinds, ordinal, named, sighting)
        self._add_dwz(ordinal, named, origin, new_origin)
        after = named.pack()
        if after != before or self._txn.get(schema.U64.pack(ordinal), db=self._ordinals) != after:
            self._txn.put(schema.U64.pack(ordinal), after, db=self._ordinals)
        return new_origin

    def _raise(self, ordinal: int, kind: int, variant: int, origin: Origin) -> None:
        """Let trust and mode of a variant follow the best place it was seen at."""
        old = self._kept(ordinal, kind, variant)
        trust = max(old.trust, origin.trust)
        mode, seen_mode = old.mode, _mode_of(origin)
        if seen_mode & _WORLD_READABLE and not mode & _WORLD_READABLE:
            mode = shown_mode(seen_mode)
        if trust == old.trust and mode == old.mode:
            return
        new = msgspec.structs.replace(old, trust=Trust(trust), mode=mode)
        best = self._best(ordinal, kind)
        if best is None or best.variant == variant:
            self._put_best(new)
        elif rank(new) < rank(best):
            self._txn.delete(_variant_key(new), db=self._variants)
            self._put_variant(best)
            self._put_best(new)
        else:
            self._put_variant(new)

    def _best(self, ordinal: int, kind: int) -> Artifact | None:
        value = self._txn.get(schema.ORDINAL_KIND.pack(ordinal, kind), db=self._artifacts)
        return None if value is None else schema.unpack_artifact(ordinal, kind, value)

    def _kept(self, ordinal: int, kind: int, variant: int) -> Artifact:
        """A variant, served or not, that a row of *digests* speaks of."""
        best = self._best(ordinal, kind)
        if best is not None and best.variant == variant:
            return best
        key = schema.ORDINAL_KIND_VARIANT.pack(ordinal, kind, variant)
        value = self._txn.get(key, db=self._variants)
        if value is None:
            raise IntegrityError(f"the index has no variant {ordinal}/{kind}/{variant}")
        return schema.unpack_artifact(ordinal, kind, value)

    def _put_best(self, artifact: Artifact) -> None:
        key = schema.ORDINAL_KIND.pack(artifact.ordinal, artifact.kind)
        self._txn.put(key, schema.pack_artifact(artifact), db=self._artifacts)
        self.changed.add(artifact.ordinal)

    def _put_variant(self, artifact: Artifact) -> None:
        self._txn.put(_variant_key(artifact), schema.pack_artifact(artifact), db=self._variants)

    def _put_origin(
        self,
        digest: Digest,
        kinds: int,
        ordinal: int,
        named: schema.OrdinalRow,
        sighting: Sighting,
    ) -> bool:
        key = places.origin_key(ordinal, digest, sighting.origin)
        old = self._txn.get(key, db=self._origins)
        first = last = sighting.seen_ns
        if old is not None:
            times = places.TIMES.unpack_from(old)
            first, last = min(first, times[0]), max(last, times[1])
        elif named.origins >= schema.MAX_ORIGINS:
            self._drop_origin(ordinal)
        else:
            named.origins += 1
        value = places.pack_origin(digest, kinds, sighting.origin, first, last)
        self._txn.put(key, value, db=self._origins)
        return old is None

    def _drop_origin(self, ordinal: int) -> None:
        """Make room: not the first seen goes, but of the others the one last seen longest ago."""
        rows = prefixed(self._txn, self._origins, schema.U64.pack(ordinal))
        times = [(*places.TIMES.unpack_from(value), key) for key, value in rows]
        times.remove(min(times))
        self._txn.delete(min(times, key=lambda row: row[1])[2], db=self._origins)

    def _add_dwz(
        self, ordinal: int, named: schema.OrdinalRow, origin: Origin, new_origin: bool
    ) -> None:
        _, found, name = origin.path.rpartition(b"/.dwz/")
        if not found or not 0 < len(name) <= schema.MAX_DWZ_NAME:
            return
        old = self._txn.get(name, db=self._dwz)
        if old is None and named.origins >= schema.MAX_ORIGINS:
            return  # a container can make any number of links to one file
        if old is not None:
            of, trust = schema.DWZ.unpack(old)
            later = trust == origin.trust and of != ordinal and new_origin
            if not (origin.trust > trust or later):
                return
        self._txn.put(name, schema.DWZ.pack(ordinal, origin.trust), db=self._dwz)
        self.changed.add(ordinal)

    # --- the memo --------------------------------------------------------------------------

    def _remember(self, sighting: Sighting, digest: Digest) -> None:
        self._put_seen(sighting.origin.identity, sighting.seen_ns, 0, digest)

    def absent(self, new: NewAbsence) -> None:
        """Remember that a file has no build ID."""
        self._put_seen(new.identity, new.seen_ns, schema.ABSENCE_TAGS[new.absence], b"")

    def _put_seen(self, identity: FileIdentity, seen_ns: int, tag: int, digest: bytes) -> None:
        key = schema.seen_key(identity)
        if key is None or seen_ns - identity.ctime_ns < _RACY_NS:
            return
        self._txn.put(key, schema.SEEN.pack(_stamp(seen_ns), tag) + digest, db=self._seen)
        if self._txn.stat(self._seen)["entries"] > schema.MAX_SEEN:
            self._forget_near(key[::-1])

    def _forget_near(self, place: bytes) -> None:
        """Drop the oldest of a few rows at a place that is as good as random: keys are hashes."""
        with self._txn.cursor(self._seen) as cursor:
            rows = []
            if cursor.set_range(place) or cursor.first():
                for key, value in itertools.islice(cursor, _CANDIDATES):
                    rows.append((value[:4], key))
        self._txn.delete(min(rows)[1], db=self._seen)


def load_counters(environment: Environment, txn: Txn) -> schema.Counters:
    """The counters of a store; raises `StoreError` where there are none."""
    value = txn.get(schema.COUNTERS_KEY, db=environment.tables["meta"])
    if value is None:
        raise StoreError("the index has no counters: the store is damaged")
    return schema.Counters.unpack(value)


def shown_mode(mode: int) -> int:
    """Permission bits of an artifact: those of the original, without writing and without set-ID."""
    if mode & _WORLD_READABLE:
        return 0o444 | (mode & 0o111)
    return mode & 0o555


def _mode_of(origin: Origin) -> int:
    """The mode of a file as seen there, as far as it says who could read it.

    A memfd says 0777, but has no name: only who may look into its processes gets at it.
    """
    mode = origin.identity.mode
    return mode & ~0o077 if origin.path.startswith(_MEMFD) else mode


def _most_variants(trust: Trust) -> int:
    """The last number that a variant from there may get."""
    if trust is Trust.HOST:
        return schema.MAX_VARIANT
    return min(schema.MAX_VARIANT, schema.MAX_FOREIGN_VARIANT)


def _variant_key(artifact: Artifact) -> bytes:
    return schema.ORDINAL_KIND_VARIANT.pack(artifact.ordinal, artifact.kind, artifact.variant)


def _stamp(ns: int) -> int:
    return min(max(ns // 1_000_000_000, 0), 2**32 - 1)
