# SPDX-License-Identifier: Apache-2.0
"""Commits of captures and sightings: first the bytes, then the rows, then the announcement."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from buildidfs.errors import StoreFull
from buildidfs.store import coordination
from buildidfs.store.blobs.files import Staged
from buildidfs.store.values import CommitResult, Evictions, NewSeen, Outcome, claimed, timed
from buildidfs.store.write.locations import JournalWriter
from buildidfs.store.write.provenance import of_captures
from buildidfs.store.write.transaction import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from buildidfs.model import ContainerNames, Digest, Origin, Sighting, Standing, Trust
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.blobs.verify import VerifiedBlobs
    from buildidfs.store.index.environment import Environment, Txn
    from buildidfs.store.retention.eviction import Evictor
    from buildidfs.store.values import NewAbsence, NewCapture

    _Called = Mapping[tuple[bytes, str], ContainerNames]

T = TypeVar("T")
_New = TypeVar("_New", "NewCapture", NewSeen)

_log = logging.getLogger(__name__)


class _Batch:
    """The captures of a batch; those in ``dropped`` are omitted."""

    def __init__(self, env: Environment, captures: Sequence[NewCapture]) -> None:
        self._env = env
        self.captures = captures
        contents = ((id(new), new.content) for new in captures)
        self._dropped = {
            key for key, each in contents if isinstance(each, Staged) and not each.claim()
        }

    def __contains__(self, new: NewCapture) -> bool:
        return id(new) not in self._dropped

    def drop(self) -> None:
        """Drop the bytes of the recapturable files.

        Files of several processes are staged at a time. They may fit one by one, and not together.
        """
        for new in self.captures:
            if isinstance(new.content, Staged) and new in self:
                from buildidfs.store.retention.plan import recapturable_place

                if recapturable_place(self._env, new.sighting.origin):
                    self._dropped.add(id(new))
                    new.content.close()

    def entries(self) -> list[NewSeen]:
        """Return journal entries for the captures that were dropped."""
        dropped = [new for new in self.captures if new not in self]
        return [NewSeen(new.sighting, new.build_id, omitted=True) for new in dropped]


class Commits:
    """Writes to a store, see `Store.commit` and `Store.touch`."""

    def __init__(
        self,
        environment: Environment,
        blobs: Blobs,
        verified: VerifiedBlobs,
        keeper: Callable[[], Evictor | None] = lambda: None,
        judge: Callable[[Origin], tuple[Trust, Standing]] | None = None,
        names_of: Callable[[Origin], ContainerNames] | None = None,
        derive: Callable[[], None] = lambda: None,
    ) -> None:
        """``keeper`` returns the object that makes room, ``judge`` decides the trust in a file,
        ``names_of`` returns the names of a container. ``derive`` is called when there are new
        `Store.derivations`.
        """
        self._env = environment
        self._blobs = blobs
        self._verified = verified
        self._keeper = keeper
        self._judge = judge
        self._names_of = names_of
        self._derive = derive

    def commit(
        self, captures: Sequence[NewCapture], absent: Sequence[NewAbsence], seen: Sequence[NewSeen]
    ) -> CommitResult:
        """Commit all the captures, absences and journal entries, or nothing."""
        captures = [self._judged(new) for new in captures]
        seen = [timed(each, time.time_ns()) for each in seen]
        staged = [new.content for new in captures if isinstance(new.content, Staged)]
        sizes = {blob.digest: blob.size for blob in staged}
        added: set[Digest] = set()
        called = self._called([new.sighting for new in captures])
        batch = _Batch(self._env, captures)
        keeper = self._keeper() if staged or absent or any(each.omitted for each in seen) else None
        if keeper is not None and absent and not keeper.has_room_for_rows(len(absent)):
            absent = ()  # such rows only save work, and blobs would have to go for them
        notes = sum(each.omitted for each in seen)
        if keeper is not None and notes and not keeper.has_room_for_rows(notes, of_journal=True):
            seen = [each for each in seen if not each.omitted]
        omitted = [self._judged(each) for each in seen if each.omitted]

        def work(txn: Txn) -> tuple[CommitResult, Recorder]:
            recorder = Recorder(self._env, txn, self._blobs, added, self._verified.read, called)
            outcomes = tuple(
                [
                    recorder.capture(new) if new in batch else Outcome(0, omitted=True)
                    for new in captures
                ]
            )
            for absence in absent:
                recorder.absent(absence)
            for each in (*omitted, *batch.entries()):
                recorder.note(each.build_id, each.sighting.origin)
            recorder.finish()
            self._write_journal(txn, [*seen, *batch.entries()], keeper)
            changed = tuple(sorted(recorder.changed))
            size = sum(sizes[digest] for digest in added)
            return CommitResult(outcomes, changed, size), recorder

        def attempt() -> tuple[CommitResult, Recorder]:
            with coordination.naming(self._env.root) if staged else contextlib.nullcontext():
                if keeper is not None and staged:
                    keeper.settle(staged)
                kept = [new for new in captures if new in batch]
                added.update(self._sealed(kept, called))
                return self._env.write(work)

        if not captures and not absent and not seen:
            return CommitResult()
        try:
            result, recorder = self._with_room(attempt, staged, batch.drop)
        finally:
            for blob in staged:
                blob.close()
        self._publish(captures, result, recorder)
        return result

    def _publish(
        self, captures: Sequence[NewCapture], result: CommitResult, recorder: Recorder
    ) -> None:
        """Announce a committed batch to the mounts, log shared build IDs, and start the maker of
        debug files if it has work.
        """
        self._announce(recorder.counters.announced, result.changed)
        for build_id in recorder.shared:
            _log.warning(
                "unrelated programs share build ID %s: nothing is served under it any more, and"
                " each of them has an adopted ID (see buildidfs show)",
                build_id,
            )
        outcomes = zip(captures, result.outcomes, strict=True)
        if any(new.derive and each.new_variant for new, each in outcomes):
            self._derive()

    def _write_journal(self, txn: Txn, seen: Sequence[NewSeen], keeper: Evictor | None) -> None:
        if not seen:
            return
        journal = JournalWriter(self._env, txn)
        journal.add(seen)
        if keeper is not None and any(each.omitted for each in seen):
            row = Evictions.load(self._env, txn)
            row.omitted += journal.omitted
            row.save(self._env, txn)

    def _with_room(
        self,
        work: Callable[[], T],
        staged: Sequence[Staged] = (),
        drop: Callable[[], None] = lambda: None,
    ) -> T:
        if not staged:
            with contextlib.suppress(StoreFull):
                return work()
        keeper = self._keeper()
        return work() if keeper is None else keeper.writing(work, staged, drop)

    def _sealed(self, captures: Sequence[NewCapture], called: _Called) -> set[Digest]:
        staged = [new.content for new in captures if isinstance(new.content, Staged)]
        makers: dict[Digest, list[NewCapture]] = {}
        for new in captures:
            digest = new.content.digest if isinstance(new.content, Staged) else new.content
            makers.setdefault(digest, []).append(new)
        return self._blobs.seal(
            staged,
            self._verified.standing,
            lambda digest: of_captures(makers[digest], digest, called),
        )

    def touch(self, sightings: Sequence[Sighting]) -> list[Sighting]:
        """Record the sightings; return the sightings of files that the store no longer knows."""

        def work(txn: Txn) -> tuple[list[Sighting], Recorder]:
            recorder = Recorder(self._env, txn, self._blobs, called=called)
            unknown = [each for each in sightings if not recorder.touch(self._believed(each))]
            recorder.finish()
            return unknown, recorder

        if not sightings:
            return []
        called = self._called(sightings)
        unknown, recorder = self._with_room(lambda: self._env.write(work))
        self._announce(recorder.counters.announced, sorted(recorder.changed))
        return unknown

    def _called(self, sightings: Sequence[Sighting]) -> _Called:
        """Return the names of the containers of sightings, by control group and label.

        The caller does this before the transaction begins, so that no other writer waits.
        """
        if self._names_of is None:
            return {}
        origins = (each.origin for each in sightings if each.origin.container)
        by_container = {(origin.cgroup, origin.container): origin for origin in origins}
        return {key: self._names_of(origin) for key, origin in by_container.items()}

    def _judged(self, new: _New) -> _New:
        sighting = self._believed(new.sighting)
        return new if sighting is new.sighting else msgspec.structs.replace(new, sighting=sighting)

    def _believed(self, sighting: Sighting) -> Sighting:
        sighting = claimed(sighting, time.time_ns())
        origin = sighting.origin
        if self._judge is None:
            return sighting
        trust, standing = self._judge(origin)
        if (trust, standing) == (origin.trust, origin.standing):
            return sighting
        origin = msgspec.structs.replace(origin, trust=trust, standing=standing)
        return msgspec.structs.replace(sighting, origin=origin)

    def _announce(self, count: int, ordinals: Sequence[int]) -> None:
        if ordinals:
            coordination.announce(self._env.root, count, ordinals)
