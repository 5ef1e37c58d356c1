# SPDX-License-Identifier: Apache-2.0
"""One write transaction: captures and sightings become rows.

All state comes from the transaction, so that it can run again after room was made, and several
processes can write to one store.
"""

from __future__ import annotations

import time
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import msgspec

from buildidfs.errors import IntegrityError, StoreError
from buildidfs.model import (
    Alias,
    AliasType,
    Artifact,
    BuildId,
    Digest,
    Kind,
    Origin,
    Sighting,
    Trust,
)
from buildidfs.store import location_rows, schema
from buildidfs.store.blobs.files import Staged
from buildidfs.store.index.aliases import MOST_JOINED, AliasWriter, is_shared_by
from buildidfs.store.index.locations import BUNDLE
from buildidfs.store.index.queries import IndexRows, prefixed
from buildidfs.store.index.ranking import belief, belief_in, chosen
from buildidfs.store.values import NewAbsence, NewCapture, Outcome
from buildidfs.store.write import provenance
from buildidfs.store.write.containers import NOTHING_CALLED
from buildidfs.store.write.locations import PlaceWriter
from buildidfs.store.write.uses import UseWriter
from buildidfs.store.write.variants import VariantWriter, most_variants

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from buildidfs.model import ContainerNames, FileIdentity
    from buildidfs.store.blobs.files import BlobFile, Blobs
    from buildidfs.store.index.environment import Environment, Txn

#: For each kind of a shared build ID, at most this many files get an adopted ID.
_ADOPTED_MAX: Final = 256

#: A stamp of the memo is updated only if it is off by more, which saves writes.
_STAMP_SLACK_S = 86_400


class Recorder:
    """The writes of one transaction; call `finish` last.

    ``added`` has the blobs that were just written, with the data beside them. ``read`` has the file
    and the encoding of each other blob that was read. ``called`` is for `ContainerWriter`.
    ``shared`` collects the build IDs that turned out to belong to unrelated programs.
    """

    def __init__(
        self,
        environment: Environment,
        txn: Txn,
        blobs: Blobs,
        added: Collection[Digest] = frozenset(),
        read: Callable[[Digest], tuple[BlobFile, int | None] | None] = lambda digest: None,
        called: Mapping[tuple[bytes, str], ContainerNames] = NOTHING_CALLED,
    ) -> None:
        self._env = environment
        self._txn = txn
        self._blobs = blobs
        self._added = added
        self._read = read
        self._described: set[Digest] = set()
        self._now_ns = time.time_ns()
        tables = environment.tables
        self._meta = tables["meta"]
        self._ids = tables["ids"]
        self._ordinals = tables["ordinals"]
        self._digests = tables["digests"]
        self._origins = tables["origins"]
        self._seen = tables["seen"]
        self._rows = IndexRows(environment, txn)
        self.counters = self._rows.counters
        self.changed: set[int] = set()
        self.shared: list[BuildId] = []
        self._places = PlaceWriter(environment, txn, self.counters, self.changed, called)
        self._variants = VariantWriter(environment, txn, self.counters, self.changed)
        self._uses = UseWriter(environment, txn)
        self._memo = MemoWriter(environment, txn)
        self._aliases = AliasWriter(environment, txn)

    def finish(self) -> None:
        """Write the counters, and the new data beside the blobs."""
        self._places.finish()
        for digest in (self._variants.altered - self._described) | self._places.naming:
            self._describe(digest)
        # In the same transaction as the rows: a mount that reads the number and then the rows
        # misses no change, and one that misses a number knows it.
        if self.changed:
            self.counters.announced += 1
        self._rows.put_counters()

    # --- a capture -------------------------------------------------------------------------

    def capture(self, new: NewCapture) -> Outcome:
        """Record one file whose blob is in place; do nothing if the blob was removed meanwhile.

        The file is recorded under each build ID to which it belongs. An executable whose build ID
        is shared by unrelated programs also has an adopted ID. A debug file without a build ID
        belongs to the build IDs of the binaries that name it.
        """
        outcome = self._capture(new)
        if not outcome.ordinal or outcome.refused:
            return outcome
        digest = new.content.digest if isinstance(new.content, Staged) else new.content
        for other, alias in new.codes:
            is_there = self._txn.get(other, db=self._digests) is not None
            if is_there and self._aliases.put(other, (alias,)):
                self._aliases.file(other)
                self._variants.altered.add(other)
        if new.shared is not None:
            self._lend(digest, self._shared(new.shared), new.kinds, new.sighting)
        elif Kind.EXECUTABLE in new.kinds:
            self._learn(outcome, digest, new)
        elif outcome.new_variant and Kind.DEBUGINFO in new.kinds:
            for each in islice(self._variants.every(outcome.ordinal, Kind.EXECUTABLE), MOST_JOINED):
                if not each.adopted:
                    self._lend_debuginfo(digest, each.digest)
        self._join(outcome.ordinal, digest, new)
        return outcome

    def _shared(self, build_id: BuildId) -> int:
        """Return the ordinal of a known shared build ID, of which no file is served."""
        ordinal = self._named(build_id)[0]
        if not self._variants.is_ambiguous(ordinal):
            self._variants.make_ambiguous(ordinal)
            self.shared.append(build_id)
        return ordinal

    def _learn(self, outcome: Outcome, digest: Digest, new: NewCapture) -> None:
        """Find out if unrelated programs share a build ID, and give them adopted IDs."""
        ordinal = outcome.ordinal
        if self._variants.is_ambiguous(ordinal):
            self._adopt(digest, new.kinds, new.sighting)
            return
        best = self._variants.best(ordinal, Kind.EXECUTABLE)
        if best is None or not outcome.new_variant or best.adopted:
            return
        self._learn_offsets(ordinal, digest)
        if all(belief(each) != belief(best) for each in self._of(digest, ordinal)):
            return
        others = self._variants.every(ordinal, Kind.EXECUTABLE)
        if not is_shared_by(best, others, self._aliases):
            return
        kept = [
            each
            for kind in Kind
            for each, _ in chosen(
                ((each, None) for each in self._variants.every(ordinal, kind)), _ADOPTED_MAX
            )
        ]
        self._variants.make_ambiguous(ordinal)
        self.shared.append(new.build_id)
        for each in kept:
            self._adopt(each.digest, (each.kind,), None)

    def _learn_offsets(self, ordinal: int, new: Digest) -> None:
        """Give a ``new`` executable and others of its build ID their adopted IDs, if a tool that
        rewrote the program has moved its code in the file.

        Their debuginfo then belongs to the adopted IDs, too. `store.placement` chooses among them.
        """
        own = self._aliases.value(new, AliasType.OFFSETS)
        executables = islice(self._variants.every(ordinal, Kind.EXECUTABLE), MOST_JOINED)
        others = [
            each.digest
            for each in executables
            if self._aliases.value(each.digest, AliasType.OFFSETS) not in (b"", own)
        ]
        if not own or not others:
            return
        debuginfo = islice(self._variants.every(ordinal, Kind.DEBUGINFO), MOST_JOINED)
        lent = [each for each in debuginfo if not self._has_kind(each, Kind.EXECUTABLE)]
        for digest in (new, *others):
            kinds = tuple(each.kind for each in self._of(digest, ordinal))
            self._adopt(digest, kinds, None)
            for each in lent:
                self._lend_debuginfo(each.digest, digest)

    def _has_kind(self, artifact: Artifact, kind: Kind) -> bool:
        """Return True if the bytes of a variant also are of another kind."""
        return any(each.kind is kind for each in self._of(artifact.digest, artifact.ordinal))

    def _lend_debuginfo(self, debuginfo: Digest, executable: Digest) -> None:
        """Record debuginfo under the adopted ID of an executable with a build ID, if it has one."""
        htl = self._aliases.value(executable, AliasType.HTL)
        value = self._txn.get(htl, db=self._ids) if htl else None
        if value is not None and self._variants.is_adopted(int.from_bytes(value, "big")):
            self._lend(debuginfo, int.from_bytes(value, "big"), (Kind.DEBUGINFO,), None)

    def _adopt(self, digest: Digest, kinds: tuple[Kind, ...], sighting: Sighting | None) -> None:
        """Record a blob under its adopted ID as well."""
        htl = self._aliases.value(digest, AliasType.HTL)
        if htl:
            self._lend(digest, self._named(BuildId(htl))[0], kinds, sighting)

    def _join(self, ordinal: int, digest: Digest, new: NewCapture) -> None:
        """Join debug files without a build ID with the binaries to which they belong."""
        aliases = dict(self._aliases.of(digest))
        link, crc = aliases.get(AliasType.LINK, b""), aliases.get(AliasType.CRC32, b"")
        if link and Kind.EXECUTABLE in new.kinds:
            debugs = self._aliases.blobs(Alias(AliasType.CRC32, link[:4]))
            named = (debug for debug in debugs if self._has_name(debug, link[4:]))
            for debug in islice(named, MOST_JOINED):
                self._give(debug, ordinal)
        if crc:
            name = new.sighting.origin.path.rpartition(b"/")[2]
            for binary in self._aliases.blobs(Alias(AliasType.LINK, crc + name))[:MOST_JOINED]:
                for other in self._executables(binary):
                    self._give(digest, other, new.sighting)
        code = aliases.get(AliasType.CODE, b"")
        if not code or aliases.get(AliasType.HTL) != new.build_id:
            return
        for twin in self._aliases.blobs(Alias(AliasType.CODE, code))[:MOST_JOINED]:
            for other in self._executables(twin):
                if twin != digest and self._variants.is_adopted(other):
                    self._give(digest, other, new.sighting)
                    if Kind.EXECUTABLE in new.kinds:
                        self._give(twin, ordinal)

    def _of(self, digest: Digest, ordinal: int) -> list[Artifact]:
        """Return the variants of a build ID with those bytes."""
        row = self._rows.digest_row(digest)
        refs = [] if row is None else row.refs
        return [self._variants.kept(*ref) for ref in refs if ref[0] == ordinal]

    def _raise(self, digest: Digest, refs: Iterable[tuple[int, int, int]], origin: Origin) -> None:
        """Raise the belief in a blob under some build IDs to that in a place."""
        grown = [self._variants.raise_to(*ref, origin) for ref in refs]
        if any(grown):
            self._aliases.file(digest)

    def _executables(self, digest: Digest) -> list[int]:
        """Return the ordinals of the build IDs of which a blob is an executable."""
        row = self._rows.digest_row(digest)
        refs = [] if row is None else row.refs
        return [ordinal for ordinal, kind, _ in refs if kind == Kind.EXECUTABLE][:MOST_JOINED]

    def _has_name(self, digest: Digest, name: bytes) -> bool:
        """Return True if a blob was seen under a file name."""
        row = self._rows.digest_row(digest)
        return row is not None and any(
            origin.path.rpartition(b"/")[2] == name
            for ordinal in {ref[0] for ref in row.refs}
            for origin, _, _ in self._origins_of(digest, ordinal)
        )

    def _give(self, digest: Digest, ordinal: int, sighting: Sighting | None = None) -> None:
        """Record a blob as debuginfo of a build ID, if either the blob or the binary has no build
        ID of its own.
        """
        row = self._rows.digest_row(digest)
        own = next((ref for ref in row.refs if ref[1] == Kind.DEBUGINFO), None) if row else None
        if own is None:
            return
        if self._variants.kept(*own).adopted or self._variants.is_adopted(ordinal):
            self._lend(digest, ordinal, (Kind.DEBUGINFO,), sighting)

    def _lend(
        self, digest: Digest, ordinal: int, kinds: tuple[Kind, ...], sighting: Sighting | None
    ) -> None:
        """Record a blob under another build ID as well, with its places.

        If the blob is already recorded under that build ID, only the ``sighting`` is added.
        """
        row = self._rows.digest_row(digest)
        if row is None or not row.refs:
            return
        like, named = self._variants.kept(*row.refs[0]), self._ordinal_row(ordinal)
        missing = [kind for kind in kinds if (ordinal, kind) not in {ref[:2] for ref in row.refs}]
        for kind in missing:
            number = named.next_variant[kind - 1]
            if number > most_variants(like.trust):
                return
            named.next_variant[kind - 1] += 1
            row.refs.append((ordinal, kind, number))
            adopted = self._aliases.value(digest, AliasType.HTL) == named.build_id
            self._variants.add(
                msgspec.structs.replace(
                    like, ordinal=ordinal, kind=kind, variant=number, adopted=adopted
                )
            )
        if not missing:
            if sighting is not None:
                own = [ref for ref in row.refs if ref[0] == ordinal]
                self._raise(digest, own, sighting.origin)
                self._see(digest, row, ordinal, named, sighting)
            return
        self._rows.put_digest_row(digest, row)
        named.kinds = self._rows.kinds(ordinal)
        self._rows.put_named(ordinal, named)
        for origin, first, last in self._origins_of(digest, like.ordinal):
            for when in dict.fromkeys((first, last)):
                self._see(digest, row, ordinal, named, Sighting(origin, when))

    def _refused(self, number: int, ordinal: int, new: NewCapture) -> str | None:
        """Return the reason why a build ID gets no variant with that number, None if it does.

        The numbers are never used again, so further ones go to owners with few places.
        """
        origin = new.sighting.origin
        if number > most_variants(origin.trust):
            return f"build ID {new.build_id} has as many variants as can be numbered"
        is_shared = number > schema.UNDIVIDED_VARIANTS and origin.trust is not Trust.HOST
        if is_shared and self._places.fills(ordinal, origin):
            return f"build ID {new.build_id} has too many variants from the same owner"
        return None

    def _origins_of(self, digest: Digest, ordinal: int) -> list[tuple[Origin, int, int]]:
        """Return the places of a blob under a build ID, each with the times of its sightings."""
        found = []
        for _, value in prefixed(self._txn, self._origins, schema.U64.pack(ordinal)):
            of, _, origin, first, last = location_rows.unpack_origin(value)
            if of == digest:
                found.append((origin, first, last))
        return found

    def _capture(self, new: NewCapture) -> Outcome:
        if not new.kinds:
            raise ValueError("a capture has at least one kind")
        content = new.content
        digest = content.digest if isinstance(content, Staged) else content
        row = self._rows.digest_row(digest)
        new_blob = row is None
        if row is None:
            # The caller found these bytes in the store and copied nothing; a removal came between.
            if not isinstance(content, Staged):
                return Outcome(0, gone=True)
            row = schema.DigestRow(content.size)
            if digest in self._added:
                self._described.add(digest)
        elif isinstance(content, Staged):
            self._refile(digest, row)
        has_more = self._aliases.put(digest, new.aliases)
        if has_more and not new_blob:
            self._variants.altered.add(digest)
        if new.shared == new.build_id:
            self._shared(new.build_id)
        ordinal, named, new_id = self._named(new.build_id)
        # Under one build ID, the same bytes have one trust and one mode: otherwise the host's libc
        # would keep the trust of the container that ran it first.
        # A file without a build ID may be lent to several. The trust and the readers that a place
        # gives it under one of them must not pass to another.
        same = [ref for ref in row.refs if ref[0] == ordinal]
        like = self._variants.kept(*same[0]) if same else None
        new_variant, refused = self._add_variants(row, named, ordinal, digest, new, like)
        if not any(ref[0] == ordinal for ref in row.refs):
            return Outcome(ordinal, refused=refused)
        if new_blob:
            self._add_blob(digest, row, new.sighting)
        if new_variant:
            self._rows.put_digest_row(digest, row)
            if new.derive:
                key = schema.derivation_key(digest)
                self._txn.put(key, schema.pack_derivation(key, new.build_id), db=self._meta)
        if new_blob:
            place = new.sighting.origin
            worth = belief_in(place.trust, place.standing)
            self._aliases.file(digest, dict.fromkeys(new.aliases), worth)
        elif new_variant or has_more:
            self._aliases.file(digest)
        if like is not None:
            own = [ref for ref in row.refs if ref[0] == ordinal]
            self._raise(digest, own, new.sighting.origin)
        if new.supplement is not None:
            self._places.refer(ordinal, *new.supplement, new.sighting.origin)
            if not new.truncated:
                self.note(new.supplement[1], new.sighting.origin)
        self._see(digest, row, ordinal, named, new.sighting)
        self._remember(new, digest)
        return Outcome(ordinal, new_id, new_variant, new_blob, refused)

    def _remember(self, new: NewCapture, digest: Digest) -> None:
        """Record the identity of a captured file, unless its bytes may have changed meanwhile."""
        identity = new.sighting.origin.identity
        if not new.remember:
            self._memo.forget(identity)
        else:
            self._memo.put(identity, new.sighting.seen_ns, 0, digest)

    def adopt(self, new: NewCapture, shown: Mapping[str, Any], form: int, used: int) -> None:
        """Record a staged blob whose file is in place with the encoding ``form``.

        ``shown`` are fields of its earlier `Artifact`, ``used`` is the time of its last use (Unix
        time, s).
        """
        assert isinstance(new.content, Staged)
        outcome = self.capture(new)
        digest = new.content.digest
        row = self._rows.digest_row(digest)
        if row is None:
            return
        for ref in row.refs:
            if ref[0] == outcome.ordinal:
                old = self._variants.kept(*ref)
                self._variants.change(msgspec.structs.replace(old, **shown))
                self._variants.choose(ref[0], ref[1])
        row.form = form
        self._uses.note(digest, row, used, new.sighting.origin.trust)
        self._rows.put_digest_row(digest, row)

    def _refile(self, digest: Digest, row: schema.DigestRow) -> None:
        """Update the row of a blob that was just verified or rewritten, because its file may
        differ.
        """
        file = self._blobs.file(digest)
        if file is None or file == (row.stored, row.inode, row.ctime_ns):
            return
        if digest in self._added:
            row.form = schema.FORM_PLAIN
            self._variants.altered.add(digest)
        elif not self._take_form(digest, row):
            return  # opening the blob reads all of it
        self._file(digest, row)
        self._rows.put_digest_row(digest, row)

    def _take_form(self, digest: Digest, row: schema.DigestRow) -> bool:
        """Record the encoding of the file that was read; return False if it has changed."""
        file, form = self._read(digest) or (None, None)
        if form is None or file != self._blobs.file(digest):
            return False
        if form or row.form != schema.FORM_DENSE:
            row.form = form
        return True

    def _describe(self, digest: Digest) -> None:
        """Write the data beside a blob from its rows. This changes the ctime of its file."""
        row, file = self._rows.digest_row(digest), self._blobs.file(digest)
        if row is None or file is None:
            return
        # This comes before the commit. If the process is killed in between, the change time of the
        # file is not that of its row, and the next open reads the whole blob.
        data = provenance.of_rows(self._env, self._txn, digest, row)
        if data != self._blobs.origin(digest):
            self._blobs.keep_origin(digest, data)
            if file == (
                row.stored,
                row.inode,
                row.ctime_ns,
            ):  # the file that was read is that of the row
                self._file(digest, row)
                self._rows.put_digest_row(digest, row)

    def _file(self, digest: Digest, row: schema.DigestRow) -> None:
        file = self._blobs.file(digest)
        if file is None:
            raise IntegrityError(f"blob {digest} is gone before it was recorded")
        self.counters.stored_bytes += row.refer_to(file, self._blobs.disk_bytes(digest))

    def _named(self, build_id: BuildId) -> tuple[int, schema.OrdinalRow, bool]:
        value = self._txn.get(build_id, db=self._ids)
        if value is not None:
            ordinal = int.from_bytes(value, "big")
            named = self._ordinal_row(ordinal)
            # LMDB does not check its pages.
            if named.build_id != build_id:
                raise IntegrityError(f"the index is damaged: build ID {build_id} leads to another")
            return ordinal, named, False
        ordinal = self.counters.next_ordinal
        if ordinal > schema.MAX_NUMBER:
            raise StoreError(f"the store holds as many build IDs as it can number ({ordinal - 1})")
        self.counters.next_ordinal += 1
        # Both directions, so that each can be checked against the other: a flipped bit in one of
        # them must not lead to the file of another build ID.
        key, named = schema.U64.pack(ordinal), schema.OrdinalRow(build_id)
        self._txn.put(build_id, key, db=self._ids)
        self._txn.put(key, named.pack(), db=self._ordinals)
        return ordinal, named, True

    def _ordinal_row(self, ordinal: int) -> schema.OrdinalRow:
        if (named := self._rows.named(ordinal)) is None:
            raise IntegrityError(f"the index has no build ID number {ordinal}")
        return named

    def _add_blob(self, digest: Digest, row: schema.DigestRow, sighting: Sighting) -> None:
        """Count a new blob, and file it with its last use and its form on disk."""
        self.counters.blobs += 1
        self.counters.blob_bytes += row.size
        self._uses.add(digest, row, self._used(sighting), sighting.origin.trust)
        self._take_form(digest, row)
        self._file(digest, row)

    def _add_variants(
        self,
        row: schema.DigestRow,
        named: schema.OrdinalRow,
        ordinal: int,
        digest: Digest,
        new: NewCapture,
        like: Artifact | None,
    ) -> tuple[bool, str]:
        """Add an artifact of each kind that the bytes do not have yet.

        Returns True if there is a new one, and why one was refused, else "".
        """
        is_new, refused = False, None
        for kind in new.kinds:
            if any(ref[0] == ordinal and ref[1] == kind for ref in row.refs):
                continue
            if refused := self._refused(named.next_variant[kind - 1], ordinal, new):
                continue
            self._add_variant(row, named, ordinal, kind, digest, new, like)
            is_new = True
        return is_new, refused or ""

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
        """Add an artifact; ``like`` is another artifact with the same bytes."""
        identity = new.sighting.origin.identity
        # Never used again, even after a removal: the number is a part of the inode number, whose
        # pages the kernel caches without limit.
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
            new.sighting.origin.shown_mode,
            identity.uid,
            identity.gid,
            new.quality,
            new.sighting.origin.trust,
            new.sighting.seen_ns,
            new.scripts,
            new.segments,
            new.truncated,
            new.sighting.origin.standing,
            self._aliases.value(digest, AliasType.HTL) == named.build_id,
        )
        if like is not None:
            artifact = msgspec.structs.replace(
                artifact,
                mode=like.mode,
                uid=like.uid,
                gid=like.gid,
                trust=like.trust,
                standing=like.standing,
            )
        self._variants.add(artifact)

    # --- sightings of recorded bytes ---------------------------------------------------------

    def touch(self, sighting: Sighting) -> bool:
        """Record a new sighting of a file; return False if the memo does not know the file."""
        key = schema.seen_key(sighting.origin.identity)
        value = None if key is None else self._txn.get(key, db=self._seen)
        if key is None or value is None:
            return False
        stamp, tag = schema.SEEN.unpack_from(value)
        # The stamp only decides which rows go if the table is full. An update for each sighting
        # would make each scan a write to the whole table.
        now = schema.stamp_of(sighting.seen_ns)
        if now - stamp > _STAMP_SLACK_S:
            self._txn.put(
                key, schema.SEEN.pack(now, tag) + value[schema.SEEN.size :], db=self._seen
            )
        if tag:
            return True
        digest = Digest(value[schema.SEEN.size :])
        row = self._rows.digest_row(digest)
        # A struck blob (inode and change time 0) is damaged: the caller must capture the file
        # again.
        if row is None or not row.refs or not (row.inode or row.ctime_ns):
            return False
        ordinals = {ref[0] for ref in row.refs}
        if all(self._just_seen(digest, row, ordinal, sighting) for ordinal in ordinals):
            return True
        if len(ordinals) == 1:  # with several, the memo does not show which of them was seen
            self._raise(digest, row.refs, sighting.origin)
        for ordinal in ordinals:
            named = self._ordinal_row(ordinal)
            self._see(digest, row, ordinal, named, sighting, recognised=True)
        return True

    def _just_seen(
        self, digest: Digest, row: schema.DigestRow, ordinal: int, sighting: Sighting
    ) -> bool:
        """Return True if the place was recorded less than a minute ago, and no row would change."""
        old = self._txn.get(
            location_rows.origin_key(ordinal, digest, sighting.origin), db=self._origins
        )
        if old is None:
            return False
        first, last = location_rows.TIMES.unpack_from(old)
        if not first <= sighting.seen_ns < last + schema.LAST_SEEN_SLACK_NS:
            return False
        kinds = schema.mask_of(tuple(Kind(kind) for of, kind, _ in row.refs if of == ordinal))
        reach = location_rows.reach_in(old)
        if sighting.origin.reach not in (0, reach):
            return False
        return location_rows.pack_origin(digest, kinds, sighting.origin, first, last, reach) == old

    def _see(
        self,
        digest: Digest,
        row: schema.DigestRow,
        ordinal: int,
        named: schema.OrdinalRow,
        sighting: Sighting,
        *,
        recognised: bool = False,
    ) -> None:
        """Write a place and the rows that depend on it; ``recognised`` as in `PlaceWriter.see`."""
        origin = sighting.origin
        if self._uses.note(digest, row, self._used(sighting), origin.trust):
            self._rows.put_digest_row(digest, row)
        before = named.pack()
        named.kinds = self._rows.kinds(ordinal)
        refs = [ref for ref in row.refs if ref[0] == ordinal]
        self._places.see(digest, refs, named, sighting, recognised=recognised)
        after = named.pack()
        if after != before or self._txn.get(schema.U64.pack(ordinal), db=self._ordinals) != after:
            self._txn.put(schema.U64.pack(ordinal), after, db=self._ordinals)

    def _used(self, sighting: Sighting) -> int:
        """Return the stamp of the use that a sighting is.

        A sighting in a bundle is a claim about another host, so the use is the import.
        """
        imported = sighting.origin.scanner == BUNDLE
        return schema.stamp_of(self._now_ns if imported else sighting.seen_ns)

    def note(self, build_id: BuildId, origin: Origin) -> None:
        """Withhold debuginfo of a build ID if its belief is less than that of ``origin``."""
        self._variants.raise_floor(build_id, origin.trust, origin.standing)

    def absent(self, new: NewAbsence) -> None:
        """Remember that a file has no build ID."""
        if not new.remember:
            self._memo.forget(new.identity)
            return
        self._memo.put(new.identity, new.seen_ns, schema.ABSENCE_TAGS[new.absence], b"")


#: If a file changed this shortly before it was read, it may change again within the same tick of
#: the filesystem's clock, and then looks unchanged; git calls such a file racily clean.
_RACY_NS: Final = 2_000_000_000

#: Rows compared to find the oldest one if the table is full.
_CANDIDATES: Final = 8

#: Rows that are examined for each new one, and removed if their blob is gone. So at most a third of
#: all rows are useless, however many blobs are captured and removed.
_LOOKED_AT: Final = 4


class MemoWriter:
    """Adds rows to the memo, within its limit."""

    def __init__(self, environment: Environment, txn: Txn) -> None:
        self._txn = txn
        self._seen = environment.tables["seen"]
        self._digests = environment.tables["digests"]

    def put(self, identity: FileIdentity, seen_ns: int, tag: int, digest: bytes) -> None:
        """Remember the result for a file: tag 0 and a digest, or why it has no build ID."""
        # No key: an identity that another file may get, such as that of a reused device number
        # without a boot ID and a mount ID.
        key = schema.seen_key(identity)
        if key is None or seen_ns - identity.ctime_ns < _RACY_NS:
            return
        value = schema.SEEN.pack(schema.stamp_of(seen_ns), tag) + digest
        self._txn.put(key, value, db=self._seen)
        if not tag:
            self._forget_gone(key[::-1])
        if self._txn.stat(self._seen)["entries"] > schema.MAX_SEEN:
            self._forget_near(key[::-1])

    def forget(self, identity: FileIdentity) -> None:
        """Drop the row of a file that can change without a trace in its identity."""
        key = schema.seen_key(identity)
        if key is not None:
            self._txn.delete(key, db=self._seen)

    def _rows_at(self, place: bytes, most: int) -> list[tuple[bytes, bytes]]:
        """Return a few rows from the random key ``place`` on (keys are hashes)."""
        with self._txn.cursor(self._seen) as cursor:
            found = cursor.set_range(place) or cursor.first()
            return list(islice(cursor, most)) if found else []

    def _forget_gone(self, place: bytes) -> None:
        """Drop the rows of removed blobs among a few rows from ``place`` on."""
        for key, value in self._rows_at(place, _LOOKED_AT):
            digest = value[schema.SEEN.size :]
            if digest and self._txn.get(digest, db=self._digests) is None:
                self._txn.delete(key, db=self._seen)

    def _forget_near(self, place: bytes) -> None:
        """Drop the oldest of a few rows from ``place`` on."""
        rows = self._rows_at(place, _CANDIDATES)
        self._txn.delete(min((value[:4], key) for key, value in rows)[1], db=self._seen)
