# SPDX-License-Identifier: Apache-2.0
"""What a store can be asked: the reading half of `Store`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from buildidfs.errors import StoreError
from buildidfs.model import Artifact, BuildId, Digest, FileIdentity, Kind, Origin
from buildidfs.store import lost_files
from buildidfs.store.blobs.hashing import digest_of
from buildidfs.store.blobs.verify import VerifiedBlobs
from buildidfs.store.errors import show
from buildidfs.store.index.containers import ContainerTree
from buildidfs.store.index.journal import Journal
from buildidfs.store.index.paths import NAMES, PathTree
from buildidfs.store.index.queries import Index
from buildidfs.store.records import (
    Content,
    Held,
    JournalRecord,
    OriginRecord,
    Pin,
    Remembered,
    StoreStats,
)
from buildidfs.store.schema import schema
from buildidfs.store.write.transaction import load_counters

if TYPE_CHECKING:
    from buildidfs.store.blobs.files import Blobs
    from buildidfs.store.blobs.verify import OpenBlob
    from buildidfs.store.fsck.check import Checker
    from buildidfs.store.index.containers import Container, ContainerEntry
    from buildidfs.store.index.environment import Environment
    from buildidfs.store.lost_files import Lost
    from buildidfs.store.notify import Listener
    from buildidfs.store.retention.evicted import Evictions
    from buildidfs.store.retention.eviction import AltLinks
    from buildidfs.store.retention.policy import Choice, Policy

#: Blobs of which it is remembered that they were opened, until that is flushed.
_MOST_USES = 1 << 16


class Reader:
    """Questions about one store; each answer is true of one moment. From any thread."""

    def __init__(self, path: bytes, env: Environment, blobs: Blobs) -> None:
        self.path = path
        self._env: Environment | None = env
        self._blobs = blobs
        self._verified = VerifiedBlobs(env, blobs)
        self._index = Index(env)
        self._paths = PathTree(env, self._index)
        self._containers = ContainerTree(env, self._index)
        self._journal = Journal(env)
        self._used: set[Digest] = set()
        # The hot ones without a step in between.
        self.artifact = self._index.artifact
        self.ordinal = self._index.ordinal
        self.kinds = self._index.kinds

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

    def variants_after(self, ordinal: int, kind: int, after: int = -1) -> Iterator[Artifact]:
        """All variants in order of their numbers, behind ``after``."""
        return self._index.variants_after(ordinal, kind, after)

    def conflicts(self) -> Iterator[tuple[int, int]]:
        """(ordinal, kind) of all artifacts that have several variants, in order."""
        return self._index.conflicts()

    def why(self, ordinal: int, kept: Sequence[Artifact]) -> list[str]:
        """For each of the `variants` of an artifact, why it is served or is not, in words."""
        from buildidfs.store.explain import why

        return why(kept, self.artifact(ordinal, Kind.EXECUTABLE))

    def variants_with(self, digest: Digest, ordinal: int) -> list[tuple[int, int]]:
        """(kind, variant) of each variant of a build ID that has those bytes."""
        return self._index.variants_with(digest, ordinal)

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
        """What is known of bytes with that digest; None when the store does not hold them, or
        somebody touched the file they are in.
        """
        held = self._index.held(digest)
        return held if held is not None and self._verified.is_untouched(digest) else None

    def supplementary(self, name: bytes) -> int | None:
        """Ordinal of the dwz file recorded under ``/.dwz/`` as ``name``."""
        return self._index.supplementary(name)

    def is_public_supplementary(self, name: bytes) -> bool:
        """Whether everybody could read the file that `supplementary` finds."""
        return self._index.is_public_supplementary(name)

    def supplementaries(
        self, prefix: bytes = b"", after: bytes | None = None
    ) -> Iterator[tuple[bytes, int]]:
        """(name, ordinal) of dwz files, in order of names that start with ``prefix``."""
        return self._index.supplementaries(prefix, after)

    # --- original paths: a tree, root 0 ----------------------------------------------------

    def path_child(self, parent: int, name: bytes) -> int | None:
        """Number of ``name`` in the path ``parent``."""
        return self._paths.child(parent, name)

    def path_is_public(self, parent: int, name: bytes) -> bool:
        """Whether everybody could read something that was seen at ``name`` in the path ``parent``,
        or below it.
        """
        return self._paths.is_public(parent, name)

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
        """Ordinals that were seen at exactly that path, behind ``after``."""
        return self._paths.ids(number, after)

    def path_has(self, number: int, ordinal: int) -> bool:
        """Whether that ordinal is among `path_ids`."""
        return self._paths.has(number, ordinal)

    def path_has_publicly(self, number: int, ordinal: int) -> bool:
        """Whether everybody could read that at the path."""
        return self._paths.is_public_at(number, ordinal)

    def file_name(self, name: bytes) -> int | None:
        """Number of a file name: what paths have behind their last slash."""
        return self._paths.child(NAMES, name)

    def file_names(self, after: int = 0) -> Iterator[tuple[bytes, int]]:
        """(name, number) of all file names in order of names, behind the one of that number."""
        found = self._paths.parent(after) if after else (NAMES, None)
        return iter(()) if found is None else self._paths.children(NAMES, found[1])

    def file_name_ids(self, number: int, after: int = 0) -> Iterator[int]:
        """Ordinals that were seen at a path with that file name, behind ``after``."""
        return self._paths.named(number, after)

    def file_name_has(self, number: int, ordinal: int) -> bool:
        """Whether that ordinal is among `file_name_ids`."""
        return self._paths.has_named(number, ordinal)

    def file_name_is_public(self, name: bytes) -> bool:
        """Whether everybody could read something with that file name."""
        return self._paths.is_public(NAMES, name)

    def file_name_has_publicly(self, number: int, ordinal: int) -> bool:
        """Whether everybody could read that with the file name of that number."""
        return self._paths.is_named_publicly(number, ordinal)

    # --- containers ------------------------------------------------------------------------

    def container_number(self, name: bytes) -> int | None:
        """Number of the container with that name."""
        return self._containers.number(name)

    def container(self, number: int) -> Container | None:
        """The container with that number."""
        return self._containers.container(number)

    def containers(self, after: int = 0) -> Iterator[Container]:
        """All containers that files are known of, in order of numbers, behind ``after``."""
        return self._containers.every(after)

    def container_child(self, container: int, directory: int, name: bytes) -> ContainerEntry | None:
        """What a directory of a container (0: its root) has under a name."""
        return self._containers.child(container, directory, name)

    def container_children(
        self, container: int, directory: int, after: int = 0
    ) -> Iterator[ContainerEntry]:
        """What is in a directory of a container, in order of offsets, behind ``after``."""
        return self._containers.children(container, directory, after)

    def is_going(self, ordinal: int) -> bool:
        """Whether blobs of it were removed a moment ago: names may be gone that were there."""
        return self._index.is_going(ordinal)

    def primary_path(self, ordinal: int) -> int | None:
        """The path its executable was first seen at; None when it has no place in the tree."""
        return self._index.primary_path(ordinal)

    # --- bytes -----------------------------------------------------------------------------

    def open_blob(self, digest: Digest) -> int:
        """A descriptor to read a blob from, with the bytes that were captured.

        Reads all of it first where its file may have been changed. Raises `IntegrityError` when it
        is gone, or has other bytes. It counts as a use of the blob.
        """
        fd = self.look_into(digest)
        self._note_use(digest)
        return fd

    def look_into(self, digest: Digest) -> int:
        """`open_blob`, for what is not what blobs are kept for."""
        return self._content(self._verified.open(digest))

    def open_content(self, digest: Digest) -> int | Content:
        """The same, but for a blob that is not a file of its own something to read it from."""
        content = self._readable(self._verified.open(digest))
        self._note_use(digest)
        return content

    def open_content_now(self, digest: Digest) -> int | Content | None:
        """The same without waiting for more than an open: None where all has to be read first."""
        opened = self._verified.open_now(digest)
        if opened is None:
            return None
        self._note_use(digest)
        return self._readable(opened) if opened.form else opened.fd

    def _readable(self, opened: OpenBlob) -> int | Content:
        if opened.form != schema.FORM_ZSTD:
            return opened.fd
        from buildidfs.store.blobs.zstd import CompressedBlob

        return CompressedBlob(opened.fd)

    def _content(self, opened: OpenBlob) -> int:
        """A descriptor of the content itself."""
        if opened.form != schema.FORM_ZSTD:
            return opened.fd
        from buildidfs.store.blobs.zstd import inflate

        return inflate(opened.fd)

    def blob_path(self, digest: Digest) -> bytes:
        """Where a blob is, or would be."""
        return self._blobs.path(digest)

    def blob_size(self, digest: Digest) -> int | None:
        """Size of a blob's file in bytes; None when there is none."""
        return self._blobs.size(digest)

    def blob_names(self) -> Iterable[Digest]:
        """Every blob that has a file, in no order."""
        return self._blobs.names()

    # --- what is kept ----------------------------------------------------------------------

    def pins(self, name: bytes | None = None) -> Iterator[Pin]:
        """All pins, or those with one name, in order of length and value of the build IDs."""
        from buildidfs.store.index import pins

        return pins.every(self._opened(), name)

    def pins_of(self, build_id: BuildId) -> list[Pin]:
        """The pins of one build ID."""
        from buildidfs.store.index import pins

        return pins.of(self._opened(), build_id)

    def last_use(self, digest: Digest) -> int:
        """When a blob was last opened, or seen where it comes from: seconds of Unix time, up to an
        hour too early; 0 for what the store does not hold.
        """
        return self._index.last_use(digest)

    def plan(self, policy: Policy, altlinks: AltLinks, *, stays: bool = False) -> Iterator[Choice]:
        """What a policy would remove now, in that order; then, with ``stays``, what it keeps."""
        from buildidfs.store.retention import policy as retention_policy

        return retention_policy.plan(self._opened(), self._blobs, policy, altlinks, stays=stays)

    def exceeded(self, policy: Policy) -> dict[str, int]:
        """By how many bytes the limits of a policy are exceeded, by their names; else not more
        than 0.
        """
        from buildidfs.store.retention import policy as retention_policy

        return retention_policy.lacks(self._opened(), self._blobs, policy)

    def evictions(self) -> Evictions:
        """What was removed to make room since the store was made, and what was only noted."""
        from buildidfs.store.retention import evicted as evictions

        env = self._opened()
        with env.read() as txn:
            return evictions.load(env, txn)

    def can_be_had(self, origin: Origin) -> str:
        """Where the file seen at a place can be had now, in words; empty if it may be gone."""
        from buildidfs.store.retention import eviction

        return eviction.can_be_had(self._opened(), origin)

    def flush_uses(self) -> None:
        """Leave what was opened since the last time for whoever writes next; never fails."""
        used, self._used = self._used, set()
        if used:
            from buildidfs.store.write import use_log

            use_log.leave(self.path, list(used))

    def _note_use(self, digest: Digest) -> None:
        if len(self._used) < _MOST_USES:
            self._used.add(digest)

    # --- files that were seen before --------------------------------------------------------

    def digest_of(self, fd: int) -> Digest:
        """Hash an open file without copying it; with `held`, cheaper than `stage` for bytes
        that are likely to be here. Raises OSError.
        """
        return digest_of(fd)

    def recall(self, identity: FileIdentity) -> Remembered | None:
        """What is known of an unchanged file, or None when it has to be read."""
        return self._index.recall(identity)

    def knows_place(self, origin: Origin) -> bool:
        """Whether a file that is known was seen at that place, by who knew who could get at it."""
        return self._index.knows_place(origin)

    # --- the journal -----------------------------------------------------------------------

    def journal_since(self, since_ns: int = 0) -> Iterator[JournalRecord]:
        """What was last seen at ``since_ns`` (Unix time) or later, in order of last seen.

        What is seen again while the caller works comes again, with its new time.
        """
        return self._journal.since(since_ns)

    def journal_last(self) -> JournalRecord | None:
        """The row of the journal that was last seen last; None if it is empty."""
        return self._journal.last()

    def lost_since(self, since_ns: int = 0) -> Iterator[Lost]:
        """The files that were seen at ``since_ns`` or later, and lost, in order of time."""
        return lost_files.since(self.path, since_ns)

    def journal_at(
        self, mnt_ns_id: int | None, path: bytes, boot: bytes | None = None
    ) -> list[JournalRecord]:
        """What was seen at a path in a mount namespace, or (None) in any, last seen first.

        ``boot`` is a boot ID; None looks at all boots, among which the number is ambiguous.
        """
        return self._journal.at(mnt_ns_id, path, boot)

    def journal_of(self, build_id: BuildId) -> list[JournalRecord]:
        """Where a build ID was seen, last seen first. There is no index: all rows are read."""
        return self._journal.of(build_id)

    # --- the whole -------------------------------------------------------------------------

    def listen(self) -> Listener:
        """Hear of commits, by whatever process; raises `StoreError` where nobody could commit."""
        env = self._opened()

        def count() -> int:
            with env.read() as txn:
                return load_counters(env, txn).announced

        from buildidfs.store.notify import Listener

        return Listener(self.path, count)

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
            stored_bytes=counters.stored_bytes,
            pins=entries["pins"],
        )

    def check(self, *, digests: bool = False) -> Iterator[str]:
        """What is wrong with the store, one line each; ``digests`` reads every byte as well."""
        checker = self.checker()
        for faults in (checker.rows(), checker.counts(), checker.files(whole=digests)):
            for fault in faults:
                yield fault.text

    def checker(self) -> Checker:
        """What looks for faults, part by part."""
        from buildidfs.store.fsck.check import Checker

        return Checker(self._opened(), self._blobs, self._verified)

    def _opened(self) -> Environment:
        if self._env is None:
            raise StoreError(f"store {show(self.path)} is closed")
        return self._env
