# SPDX-License-Identifier: Apache-2.0
"""Captures and sightings on their way to the disk: bytes first, then rows, then whoever listens."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

import msgspec

from buildidfs.errors import StoreFull
from buildidfs.store import lock, notify
from buildidfs.store.blobs import Staged
from buildidfs.store.journal import JournalWriter
from buildidfs.store.provenance import of_captures
from buildidfs.store.recorder import Recorder
from buildidfs.store.records import CommitResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from buildidfs.model import Digest, Origin, Sighting, Trust
    from buildidfs.store.blobs import Blobs
    from buildidfs.store.environment import Environment, Txn
    from buildidfs.store.records import NewAbsence, NewCapture, NewSeen
    from buildidfs.store.retention import Keeper
    from buildidfs.store.verified import VerifiedBlobs

T = TypeVar("T")


class Commits:
    """Writes to a store, see `Store.commit` and `Store.touch`."""

    def __init__(
        self,
        environment: Environment,
        blobs: Blobs,
        verified: VerifiedBlobs,
        keeper: Callable[[], Keeper | None] = lambda: None,
        judge: Callable[[Origin], Trust] | None = None,
        image_of: Callable[[Origin], str] | None = None,
    ) -> None:
        """``keeper`` gives what makes room for what is written, ``judge`` says how far it is
        believed, ``image_of`` what image a container is of.
        """
        self._env = environment
        self._blobs = blobs
        self._verified = verified
        self._keeper = keeper
        self._judge = judge
        self._image_of = image_of

    def commit(
        self,
        captures: Sequence[NewCapture],
        absent: Sequence[NewAbsence],
        seen: Sequence[NewSeen],
    ) -> CommitResult:
        """All of it, or nothing."""
        captures = [self._judged(new) for new in captures]
        staged = [new.content for new in captures if isinstance(new.content, Staged)]
        sizes = {blob.digest: blob.size for blob in staged}
        added: set[Digest] = set()
        images = self._images([new.sighting for new in captures])

        def work(txn: Txn) -> tuple[CommitResult, int]:
            recorder = Recorder(self._env, txn, self._blobs, added, self._verified.read, images)
            outcomes = tuple([recorder.capture(new) for new in captures])
            for absence in absent:
                recorder.absent(absence)
            recorder.finish()
            if seen:
                JournalWriter(self._env, txn).add(seen)
            changed = tuple(sorted(recorder.changed))
            size = sum(sizes[digest] for digest in added)
            return CommitResult(outcomes, changed, len(added), size), recorder.counters.announced

        def attempt() -> tuple[CommitResult, int]:
            with lock.naming(self._env.root) if staged else contextlib.nullcontext():
                added.update(self._sealed(captures, staged))
                return self._env.write(work)

        if not captures and not absent and not seen:
            return CommitResult()
        try:
            result, count = self._with_room(attempt, staged)
        finally:
            for blob in staged:
                blob.close()
        self._announce(count, result.changed)
        return result

    def _with_room(self, work: Callable[[], T], staged: Sequence[Staged] = ()) -> T:
        if staged:
            return self._with_room_for(work, staged)
        try:
            return work()
        except StoreFull:
            return self._with_room_for(work, staged)

    def _with_room_for(self, work: Callable[[], T], staged: Sequence[Staged]) -> T:
        keeper = self._keeper()
        if keeper is None:
            return work()
        new = {blob.digest: blob.size for blob in staged if self._blobs.file(blob.digest) is None}
        return keeper.writing(sum(new.values()), work, staged)

    def _sealed(self, captures: Sequence[NewCapture], staged: Sequence[Staged]) -> set[Digest]:
        makers: dict[Digest, list[NewCapture]] = {}
        for new in captures:
            digest = new.content.digest if isinstance(new.content, Staged) else new.content
            makers.setdefault(digest, []).append(new)
        return self._blobs.seal(
            staged, self._verified.standing, lambda digest: of_captures(makers[digest], digest)
        )

    def touch(self, sightings: Sequence[Sighting]) -> list[Sighting]:
        """Returns those of which nothing is known any more."""

        def work(txn: Txn) -> tuple[list[Sighting], Recorder]:
            recorder = Recorder(self._env, txn, self._blobs, images=images)
            unknown = [each for each in sightings if not recorder.touch(self._believed(each))]
            recorder.finish()
            return unknown, recorder

        if not sightings:
            return []
        images = self._images(sightings)
        unknown, recorder = self._with_room(lambda: self._env.write(work))
        self._announce(recorder.counters.announced, sorted(recorder.changed))
        return unknown

    def _images(self, sightings: Sequence[Sighting]) -> dict[bytes, str]:
        """The images of their containers, by control group: asked for while nobody has to wait for
        the end of a transaction.
        """
        if self._image_of is None:
            return {}
        origins = {each.origin.cgroup: each.origin for each in sightings if each.origin.container}
        return {group: self._image_of(origin) for group, origin in origins.items()}

    def _judged(self, new: NewCapture) -> NewCapture:
        sighting = self._believed(new.sighting)
        return new if sighting is new.sighting else msgspec.structs.replace(new, sighting=sighting)

    def _believed(self, sighting: Sighting) -> Sighting:
        origin = sighting.origin
        trust = origin.trust if self._judge is None else self._judge(origin)
        if trust is origin.trust:
            return sighting
        origin = msgspec.structs.replace(origin, trust=trust)
        return msgspec.structs.replace(sighting, origin=origin)

    def _announce(self, count: int, ordinals: Sequence[int]) -> None:
        if ordinals:
            notify.announce(self._env.root, count, ordinals)
