# SPDX-License-Identifier: Apache-2.0
"""`Store`: the directory that keeps every captured binary, and what is known of it.

A capture is stage (bytes in, hashed), then, by the caller, identify the staged bytes, then commit:
bytes are made durable and named by their digest first, then one index transaction makes the whole
batch visible. A process killed in between leaves nothing, or a blob that no row speaks of.

Any number of processes may use one store, readers and writers; each sees a commit at once.
Methods may be called from any thread; one thread at a time commits.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from buildidfs.errors import StoreError
from buildidfs.model import Artifact, BuildId, Digest, FileIdentity, Kind, Sighting
from buildidfs.store import environment, layout
from buildidfs.store.blobs import Blobs, Staged, digest_of
from buildidfs.store.failures import show
from buildidfs.store.index import Index
from buildidfs.store.journal import Journal, JournalWriter
from buildidfs.store.paths import PathTree
from buildidfs.store.recorder import Recorder, load_counters
from buildidfs.store.records import (
    CommitResult,
    Held,
    JournalRecord,
    NewAbsence,
    NewCapture,
    NewSeen,
    OriginRecord,
    Remembered,
    StoreStats,
)

if TYPE_CHECKING:
    from buildidfs.store.environment import Environment, Txn
    from buildidfs.store.notify import Listener

StorePath = str | bytes | os.PathLike[str]

_PARTS = (b"index", b"blobs", b"staging", b"listeners", b"run")


class Store:
    """An open store; a context manager. Make one with `create` or `open`."""

    def __init__(self, path: bytes, env: Environment, blobs: Blobs, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self._env: Environment | None = env
        self._blobs = blobs
        self._index = Index(env)
        self._paths = PathTree(env, self._index)
        self._journal = Journal(env)
        # The hot ones without a step in between.
        self.artifact = self._index.artifact
        self.ordinal = self._index.ordinal
        self.kinds = self._index.kinds

    @classmethod
    def create(cls, path: StorePath) -> Store:
        """Make a store in a new or empty directory, or open the one that is there."""
        return cls.open(path, create=True)

    @classmethod
    def open(
        cls,
        path: StorePath,
        *,
        create: bool = False,
        read_only: bool = False,
        map_size: int | None = None,
    ) -> Store:
        """Open a store; ``create`` makes it where there is none.

        ``map_size`` is for tests: bytes of address space of the index to begin with. Raises
        `StoreMissing`, `StoreVersionError`, `StoreFull`, `StoreError`.
        """
        root = os.path.abspath(os.fsencode(path))
        if create and not read_only and not os.path.exists(os.path.join(root, b"format")):
            layout.make(root, map_size)
        layout.check_format(root)
        env = environment.acquire(root, read_only=read_only, map_size=map_size)
        try:
            with env.read() as txn:
                load_counters(env, txn)
            blobs = Blobs(root, writable=not read_only)
        except BaseException:
            environment.release(env)
            raise
        return cls(root, env, blobs, read_only=read_only)

    def close(self) -> None:
        """Let go of the store; safe to call twice."""
        if self._env is not None:
            env, self._env = self._env, None
            environment.release(env)
            self._blobs.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- build IDs and artifacts -----------------------------------------------------------

    def build_id(self, ordinal: int) -> BuildId | None:
        """The build ID with that number."""
        return self._index.build_id(ordinal)

    def artifact_variant(self, ordinal: int, kind: int, variant: int) -> Artifact | None:
        """One variant, served or not; it stays the same bytes for ever."""
        return self._index.artifact_variant(ordinal, kind, variant)

    def variants(self, ordinal: int, kind: int) -> list[Artifact]:
        """All variants, best first; more than one is a conflict."""
        return self._index.variants(ordinal, kind)

    def origins(self, ordinal: int) -> list[OriginRecord]:
        """Where bytes of a build ID were seen, newest first."""
        return self._index.origins(ordinal)

    def build_ids_from(self, after: int = 0) -> Iterator[tuple[int, BuildId]]:
        """(ordinal, build ID) in order of ordinals, behind ``after``."""
        return self._index.build_ids_from(after)

    def build_ids_with_prefix(
        self, prefix: bytes, after: BuildId | None = None
    ) -> Iterator[tuple[BuildId, int]]:
        """(build ID, ordinal) in order of build IDs that start with ``prefix``."""
        return self._index.build_ids_with_prefix(prefix, after)

    def match(self, text: str) -> BuildId:
        """The only build ID whose hex digits start with ``text``.

        Raises `InvalidBuildId`, `AmbiguousBuildId`, `ArtifactMissing`.
        """
        return self._index.match(text)

    def held(self, digest: Digest) -> Held | None:
        """What is known of bytes with that digest; None when the store does not hold them."""
        return self._index.held(digest)

    def supplementary(self, name: bytes) -> int | None:
        """Ordinal of the dwz file recorded under ``/.dwz/`` as ``name``."""
        return self._index.supplementary(name)

    def supplementaries(
        self, prefix: bytes = b"", after: bytes | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """(name, ordinal) of dwz files, in order of names that start with ``prefix``."""
        return self._index.supplementaries(prefix, after)

    # --- original paths: a tree, root 0 ----------------------------------------------------

    def path_child(self, parent: int, name: bytes) -> int | None:
        """Number of ``name`` in the path ``parent``."""
        return self._paths.child(parent, name)

    def path_children(self, parent: int, after: bytes | None = None) -> Iterator[tuple[bytes, int]]:
        """(name, number) in order of names, behind ``after``."""
        return self._paths.children(parent, after)

    def path_parent(self, number: int) -> tuple[int, bytes] | None:
        """(parent, name); None for the root and for what does not exist."""
        return self._paths.parent(number)

    def path_bytes(self, number: int) -> bytes:
        """The path in full, beginning with a slash."""
        return self._paths.spelled(number)

    def path_ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Ordinals whose executable was seen at exactly that path, behind ``after``."""
        return self._paths.ids(number, after)

    def path_has(self, number: int, ordinal: int) -> bool:
        """Whether that ordinal is among `path_ids`."""
        return self._paths.has(number, ordinal)

    def primary_path(self, ordinal: int) -> int | None:
        """The path its executable was first seen at; None when it has no place in the tree."""
        return self._index.primary_path(ordinal)

    # --- bytes -----------------------------------------------------------------------------

    def open_blob(self, digest: Digest) -> int:
        """A descriptor to read a blob from; raises `IntegrityError` when it is gone."""
        return self._blobs.open(digest)

    def blob_path(self, digest: Digest) -> bytes:
        """Where a blob is, or would be."""
        return self._blobs.path(digest)

    def blob_size(self, digest: Digest) -> int | None:
        """Size of a blob's file in bytes; None when there is none."""
        return self._blobs.size(digest)

    def blob_names(self) -> Iterable[Digest]:
        """Every blob that has a file, in no order."""
        return self._blobs.names()

    # --- capture ---------------------------------------------------------------------------

    def stage(self, fd: int, limit: int | None = None) -> Staged:
        """Take the bytes of an open file into the store's filesystem, hashed, without a name.

        Reads from offset 0, at most ``limit`` bytes (default: the size the file has now).
        Reflinks where the filesystem can. May be called from several threads at once. Raises
        OSError when the source cannot be read, `StoreFull`, `StoreError`.
        """
        self._writable()
        return self._blobs.stage(fd, limit)

    def digest_of(self, fd: int) -> Digest:
        """Hash an open file without copying it; with `held`, cheaper than `stage` for bytes
        that are likely to be here. Raises OSError.
        """
        return digest_of(fd)

    def commit(
        self,
        captures: Sequence[NewCapture],
        absent: Sequence[NewAbsence] = (),
        seen: Sequence[NewSeen] = (),
    ) -> CommitResult:
        """Make a batch durable and visible, all or nothing, and tell the listeners.

        ``seen`` goes into the journal, of which nobody is told.
        Closes what was staged, whatever happens. The batch may be as long as the limit of open
        files allows. Raises `StoreFull`, `StoreError`, and `IntegrityError` for a digest that
        the store does not hold.
        """
        staged = [new.content for new in captures if isinstance(new.content, Staged)]
        try:
            env = self._writable()
            added = self._blobs.seal(staged, lambda digest: self.held(digest) is not None)
        finally:
            sizes = {blob.digest: blob.size for blob in staged}
            for blob in staged:
                blob.close()

        def work(txn: Txn) -> tuple[CommitResult, int]:
            recorder = Recorder(env, txn)
            outcomes = tuple([recorder.capture(new) for new in captures])
            for absence in absent:
                recorder.absent(absence)
            recorder.finish()
            if seen:
                JournalWriter(env, txn).add(seen)
            changed = tuple(sorted(recorder.changed))
            size = sum(sizes[digest] for digest in added)
            return CommitResult(outcomes, changed, len(added), size), recorder.counters.announced

        if not captures and not absent and not seen:
            return CommitResult()
        result, count = env.write(work)
        if result.changed:
            self._announce(count, result.changed)
        return result

    def touch(self, sightings: Sequence[Sighting]) -> list[Sighting]:
        """Record that files which `recall` knew were seen again; returns those unknown by now."""
        env = self._writable()

        def work(txn: Txn) -> tuple[list[Sighting], Recorder]:
            recorder = Recorder(env, txn)
            unknown = [sighting for sighting in sightings if not recorder.touch(sighting)]
            recorder.finish()
            return unknown, recorder

        if not sightings:
            return []
        unknown, recorder = env.write(work)
        if recorder.changed:
            self._announce(recorder.counters.announced, sorted(recorder.changed))
        return unknown

    def recall(self, identity: FileIdentity) -> Remembered | None:
        """What is known of an unchanged file, or None when it has to be read."""
        return self._index.recall(identity)

    def remember(self, absent: Sequence[NewAbsence]) -> None:
        """Remember files without a build ID; `commit` does the same in passing."""
        self.commit((), absent)

    # --- the journal -----------------------------------------------------------------------

    def journal(self, entries: Sequence[NewSeen]) -> None:
        """Keep what was seen, durably and in one transaction; `commit` does the same in passing.

        Nothing is written for what was seen within the minute. Raises `StoreFull`, `StoreError`.
        """
        self.commit((), (), entries)

    def journal_since(self, since_ns: int = 0) -> Iterator[JournalRecord]:
        """What was last seen at ``since_ns`` (Unix time) or later, in order of last seen.

        What is seen again while the caller works comes again, with its new time.
        """
        return self._journal.since(since_ns)

    def journal_at(
        self, mnt_ns_id: int, path: bytes, boot: bytes | None = None
    ) -> list[JournalRecord]:
        """What was seen at a path in a mount namespace, last seen first.

        ``boot`` is a boot ID; None looks at all boots, among which the number is ambiguous.
        """
        return self._journal.at(mnt_ns_id, path, boot)

    # --- the whole -------------------------------------------------------------------------

    def listen(self) -> Listener:
        """Hear of commits, by whatever process; raises `StoreError` where nobody could commit."""
        env = self._opened()

        def count() -> int:
            with env.read() as txn:
                return load_counters(env, txn).announced

        from buildidfs.store.notify import Listener

        return Listener(self.path, count)

    def _announce(self, count: int, ordinals: Sequence[int]) -> None:
        # Sockets are for those who write; what only reads does not wait for their import.
        from buildidfs.store import notify

        notify.announce(self.path, count, ordinals)

    def stats(self) -> StoreStats:
        """How much the store holds."""
        env = self._opened()
        entries = env.entries()
        with env.read() as txn:
            counters = load_counters(env, txn)
        return StoreStats(
            ids=entries["ids"],
            artifacts={kind: counters.artifacts[kind - 1] for kind in Kind},
            variants=entries["variants"],
            blobs=counters.blobs,
            blob_bytes=counters.blob_bytes,
            origins=entries["origins"],
            paths=entries["paths"],
            remembered=entries["seen"],
            index_bytes=env.bytes_used(),
            free_bytes=self._blobs.free_bytes(),
            journal=entries["journal"],
        )

    def check(self, *, digests: bool = False) -> Iterator[str]:
        """What is wrong with the store, one line each; ``digests`` reads every byte as well."""
        from buildidfs.store import check

        return check.problems(self._opened(), self._blobs, digests=digests)

    def _opened(self) -> Environment:
        if self._env is None:
            raise StoreError(f"store {show(self.path)} is closed")
        return self._env

    def _writable(self) -> Environment:
        env = self._opened()
        if self.read_only:
            raise StoreError(f"store {show(self.path)} was opened for reading only")
        return env
