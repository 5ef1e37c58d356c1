# SPDX-License-Identifier: Apache-2.0
"""`Store`: the directory that keeps all captured binaries and their index.

A capture has three steps. `stage` copies and hashes the bytes. The caller identifies the staged
bytes. `commit` makes the bytes durable and gives them their digest as a name; then one index
transaction makes the whole batch visible. If a process is killed in between, it leaves nothing, or
a blob without a row.

Any number of processes may use one store, as readers and writers; each sees a commit at once.
Methods may be called from any thread; one thread at a time commits.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from buildidfs.errors import StoreError
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Kind
from buildidfs.names import printable
from buildidfs.store.blobs.files import Blobs, Staged, digest_of
from buildidfs.store.blobs.verify import Blob, VerifiedBlobs
from buildidfs.store.errors import not_to_be_written
from buildidfs.store.index import environment
from buildidfs.store.index.aliases import Aliases
from buildidfs.store.index.environment import load_counters
from buildidfs.store.index.history import History
from buildidfs.store.index.locations import ContainerTree, FileNames, Journal, PathTree
from buildidfs.store.index.queries import Index, Pins
from buildidfs.store.values import Evictions, Held, StoreStats

if TYPE_CHECKING:
    from buildidfs.model import (
        Artifact,
        BuildId,
        ContainerNames,
        Digest,
        Origin,
        Sighting,
        Standing,
        Trust,
    )
    from buildidfs.store.commit import Commits
    from buildidfs.store.coordination import ChangeListener
    from buildidfs.store.fsck.check import Checker
    from buildidfs.store.index.environment import Environment
    from buildidfs.store.jit_maps import JitMaps
    from buildidfs.store.retention.compress import Compressed
    from buildidfs.store.retention.eviction import Evictor, Policy
    from buildidfs.store.retention.plan import AltLinks, Choice
    from buildidfs.store.retention.removal import Collected, RemovalResult
    from buildidfs.store.run_files import LostFiles
    from buildidfs.store.values import (
        CommitResult,
        NewAbsence,
        NewCapture,
        NewSeen,
        Tally,
    )

StorePath = str | bytes | os.PathLike[str]

#: The number of opened blobs that are remembered before `flush_uses` is called.
_MOST_USES: Final = 1 << 16


def _do_nothing() -> None:
    """Stand in for an optional function that was not given."""


class Store:
    """An open store; a context manager. Make one with `create` or `open`.

    Each part answers questions, each answer from one moment: ``index`` about build IDs and
    artifacts, ``paths`` and ``file_names`` about the paths at which files were seen, ``containers``
    about the files of each container, ``journal`` about sightings, ``pins`` about pins, ``history``
    about the past, ``blobs`` about the bytes, ``jit_maps`` about the names of generated code.
    """

    def __init__(self, path: bytes, env: Environment, files: Blobs, *, read_only: bool) -> None:
        self.path = path
        self.read_only = read_only
        self.blobs = VerifiedBlobs(env, files)
        self.index = Index(env)
        self.aliases = Aliases(env, self.index)
        self.paths = PathTree(env)
        self.file_names = FileNames(env, self.paths)
        self.containers = ContainerTree(env)
        self.journal = Journal(env)
        self.pins = Pins(env)
        self.history = History(env)
        self._env: Environment | None = env
        self._files = files
        self._used: set[Digest] = set()
        self._keeper: Evictor | None = None
        self._make_keeper: Callable[[], Evictor] | None = None
        self._making = threading.Lock()
        self._derive: Callable[[], None] = _do_nothing
        self._end_deriving: Callable[[], None] = _do_nothing
        self._judge: Callable[[Origin], tuple[Trust, Standing]] | None = None
        self._names_of: Callable[[Origin], ContainerNames] | None = None

    @classmethod
    def create(cls, path: StorePath) -> Store:
        """Make a store in a new or empty directory, or open an existing one."""
        return cls.open(path, create=True)

    @classmethod
    def open(cls, path: StorePath, *, create: bool = False, read_only: bool = False) -> Store:
        """Open a store; with ``create``, make it if it does not exist.

        Raises `StoreMissing`, `StoreVersionError`, `StoreFull`, `StoreDamaged`, `StoreError`.
        """
        root = os.path.abspath(os.fsencode(path))
        if create and not read_only and not os.path.exists(os.path.join(root, b"format")):
            environment.make(root)
        env = environment.acquire_present(root, read_only=read_only)
        with on_error(partial(environment.release, env)):
            with env.read() as txn:
                load_counters(env, txn)
            blobs = Blobs(root, writable=not read_only)
        return cls(root, env, blobs, read_only=read_only)

    def close(self) -> None:
        """Close the store; safe to call twice."""
        if self._env is not None:
            self._end_deriving()
            self.flush_uses()
            env, self._env = self._env, None
            environment.release(env)
            self._files.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def match(self, text: str) -> BuildId:
        """Return the build ID that ``text`` is the beginning or an alias of; see
        `Aliases.resolve`.
        """
        return self.aliases.resolve(text)[0]

    # --- bytes -----------------------------------------------------------------------------

    def held(self, digest: Digest) -> Held | None:
        """Return the facts about bytes with that digest.

        Returns None if the store does not have them, or if their file was touched.
        """
        held = self.index.held(digest)
        return held if held is not None and self.blobs.is_untouched(digest) else None

    def open_blob(self, digest: Digest) -> Blob:
        """Open a blob with the bytes that were captured, and record that as a use.

        Reads the whole blob first if its file may have changed. Raises `IntegrityError` if the blob
        is gone, or has other bytes. ``blobs.open`` does the same without recording a use.
        """
        blob = self.blobs.open(digest)
        self.note_use(digest)
        return blob

    def open_blob_now(self, digest: Digest) -> Blob | None:
        """Do the same as `open_blob` without waiting; return None if the whole blob has to be read
        first.
        """
        blob = self.blobs.open_now(digest)
        if blob is not None:
            self.note_use(digest)
        return blob

    def digest_of(self, fd: int) -> Digest:
        """Hash an open file without copying it. Raises OSError.

        If the store probably has the bytes, this and `held` together are cheaper than `stage`.
        """
        return digest_of(fd)

    def flush_uses(self) -> None:
        """Leave the next writer a record of the blobs opened since the last call; raises
        no errors.
        """
        used, self._used = self._used, set()
        if used:
            from buildidfs.store.write import uses

            uses.leave(self.path, list(used))

    def note_use(self, digest: Digest) -> None:
        """Record a use of a blob without opening it."""
        if len(self._used) < _MOST_USES:
            self._used.add(digest)

    # --- capture ---------------------------------------------------------------------------

    def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
        """Copy the bytes of an open file into the store's filesystem, without a name, and hash
        them.

        Reads from offset 0, at most ``limit`` bytes (default: the present size of the file). Makes
        a reflink if the filesystem supports it. May be called from several threads at once. Raises
        OSError if the source cannot be read, or (EFBIG) is larger than the store may become,
        `Recapturable` if there is no room, but the file still exists at ``origin``, `StoreFull`,
        `StoreError`.
        """
        self._writable()
        keeper = self._keeping()
        if keeper is None:
            return self._files.stage(fd, limit)
        status = os.fstat(fd)
        size = min(status.st_size, status.st_blocks * 512)
        size = size if limit is None else min(size, limit)
        return keeper.staging(origin, size, lambda more: self._files.stage(fd, limit, size, more))

    def commit(
        self,
        captures: Sequence[NewCapture],
        absent: Sequence[NewAbsence] = (),
        seen: Sequence[NewSeen] = (),
    ) -> CommitResult:
        """Make a batch durable and visible, all or nothing, and announce it to the listeners.

        ``seen`` goes into the journal, and is not announced. Closes all staged files in any case.
        The length of the batch is limited only by the number of open files. If a capture has a
        digest that the store no longer holds, it is left out (`Outcome.gone`). Raises `StoreFull`,
        `StoreError`.
        """
        try:
            commits = self._commits()
        except StoreError:
            for new in captures:
                if isinstance(new.content, Staged):
                    new.content.close()
            raise
        return commits.commit(captures, absent, seen)

    def touch(self, sightings: Sequence[Sighting]) -> list[Sighting]:
        """Record that files known to `recall` were seen again; return the sightings of files that
        are no longer known.
        """
        return self._commits().touch(sightings)

    def believe(self, judge: Callable[[Origin], tuple[Trust, Standing]]) -> None:
        """Let ``judge`` decide the trust of all captures from now on."""
        self._judge = judge

    def name_containers(self, names_of: Callable[[Origin], ContainerNames]) -> None:
        """Let ``names_of`` return the names of the containers of all sightings from now on.

        If it returns `NO_NAMES`, it is called again for the next sighting in that container. It
        must be quick, and not raise.
        """
        self._names_of = names_of

    def derive_with(self, start: Callable[[], None], end: Callable[[], None]) -> None:
        """From now on call ``start`` if there are new `derivations`, and ``end`` at `close`.

        ``start`` must be quick, and neither may raise.
        """
        self._derive, self._end_deriving = start, end

    def derivations(self, most: int = 64) -> list[tuple[Digest, BuildId]]:
        """Return up to ``most`` executables from which a debug file is to be made, each with its
        build ID.

        Such a file is made after the capture, because it takes seconds. The row stays until
        `derived` is called, so a killed process loses no request.
        """
        from buildidfs.store.index import queries

        return queries.derivations(self._opened(), most)

    def derived(self, digest: Digest) -> None:
        """Record that a debug file was made from an executable, or cannot be made. Raises
        `StoreError`.
        """
        from buildidfs.store.index import queries

        queries.derived(self._writable(), digest)

    def note_seen(self, entries: Sequence[NewSeen]) -> None:
        """Write journal entries, durably and in one transaction; `commit` writes them too.

        Entries that were written within the last minute are skipped. Raises `StoreFull`,
        `StoreError`.
        """
        self.commit((), (), entries)

    def remember(self, absent: Sequence[NewAbsence]) -> None:
        """Remember files without a build ID, so that they are not read again; `commit` does so,
        too.
        """
        self.commit((), absent)

    # --- removal and compression -------------------------------------------------------------

    def retain(
        self,
        policy: Policy | Callable[[], Policy],
        altlinks: AltLinks = lambda digest: None,
        *,
        always: bool = True,
    ) -> None:
        """Make room for all captures from now on, within ``policy``.

        If ``policy`` is a function, it is called at once with ``always``, and else when the first
        file is staged. ``altlinks`` returns the build ID in the
        .gnu_debugaltlink of a debug file's blob.
        """
        env = self._writable()

        def make() -> Evictor:
            from buildidfs.store.retention.eviction import Evictor

            return Evictor(env, self._files, policy() if callable(policy) else policy, altlinks)

        self._make_keeper = make
        self._keeper = make() if always else None

    def plan(
        self, policy: Policy, altlinks: AltLinks, *, with_kept: bool = False
    ) -> Iterator[Choice]:
        """Yield the blobs a policy would remove, in order; ``with_kept`` adds the kept ones."""
        from buildidfs.store.retention import eviction

        return eviction.plan(self._opened(), self._files, policy, altlinks, with_kept=with_kept)

    def remove_chosen(self, chosen: Sequence[Choice]) -> RemovalResult:
        """Remove blobs of a plan as `remove` does, and write into the journal that a limit has
        removed them.
        """
        from buildidfs.store.retention import eviction

        return eviction.remove_chosen(self._writable(), self._files, chosen)

    def exceeded(self, policy: Policy) -> dict[str, int]:
        """Return by how many bytes each limit of a policy is exceeded, by its name; 0 or less if it
        is not.
        """
        from buildidfs.store.retention import eviction

        return eviction.exceeded(self._opened(), self._files, policy)

    def evictions(self) -> Evictions:
        """Return the counts of the blobs removed to make room and of the omitted files, since the
        store was made.
        """
        env = self._opened()
        with env.read() as txn:
            return Evictions.load(env, txn)

    def recapturable_place(self, origin: Origin) -> str | None:
        """Return the place at which the host still has the file of an origin; None if it may be
        gone.
        """
        from buildidfs.store.retention import plan

        return plan.recapturable_place(self._opened(), origin)

    def enforce(self) -> None:
        """Remove the blobs that the policy given to `retain` does not allow to stay. Raises
        `StoreError`.
        """
        if self._keeper is not None:
            self._keeper.enforce()

    @functools.cached_property
    def jit_maps(self) -> JitMaps:
        """Return the names of generated code.

        The module is loaded on first use, because `list` does not need it.
        """
        from buildidfs.store.jit_maps import JitMaps

        def max_size() -> int | None:
            keeper = self._keeping()
            return None if keeper is None else keeper.policy.max_size

        return JitMaps(self.path, max_size)

    @property
    def tally(self) -> Tally:
        """Return the counts of the blobs that the policy removed since the last `take_tally`."""
        from buildidfs.store.values import Tally

        return Tally() if self._keeper is None else self._keeper.tally

    def take_tally(self) -> Tally:
        """Return the `tally`, and begin a new one."""
        return self.tally if self._keeper is None else self._keeper.take_tally()

    @property
    def most_staged(self) -> int | None:
        """Return the maximum number of staged bytes that should wait for a commit; None without a
        policy.
        """
        keeper = self._keeping()
        return None if keeper is None else keeper.most_staged

    def _keeping(self) -> Evictor | None:
        if self._keeper is None and self._make_keeper is not None:
            with self._making:
                self._keeper = self._keeper or self._make_keeper()
        return self._keeper

    def pin(self, build_ids: Iterable[BuildId], name: bytes = b"") -> int:
        """Pin build IDs, captured or not, under a name; return the number of new pins.

        Raises `UsageError` for a name of more than 390 bytes.
        """
        return Pins(self._writable()).add(build_ids, name)

    def unpin(self, build_ids: Iterable[BuildId]) -> int:
        """Remove pins without a name; return their number."""
        return Pins(self._writable()).remove(build_ids)

    def unpin_name(self, name: bytes) -> int:
        """Remove all pins with a name; return their number."""
        pins = Pins(self._writable())
        return pins.remove([each.build_id for each in pins.every(name)], name)

    def fold_uses(self) -> int:
        """Record the uses in the files that readers have left, and return the number of new uses.

        Raises `StoreError`.
        """
        from buildidfs.store.write import uses

        return uses.fold(self._writable())

    def collect(self) -> Collected:
        """Remove the leftovers of killed processes. Raises `StoreError`."""
        from buildidfs.store.retention import removal

        return removal.collect(self._writable())

    def set_aside(self, digests: Iterable[Digest]) -> RemovalResult:
        """Move damaged blobs to ``quarantine/`` as `remove` removes them; they count as losses.
        Raises `StoreError`.
        """
        from buildidfs.store.retention import eviction

        return eviction.set_aside(self._writable(), self._files, digests)

    def remove(self, digests: Iterable[Digest], *, forget: bool = False) -> RemovalResult:
        """Remove blobs, and all rows that nothing refers to afterwards.

        Announces the changes; a reader that has such a file open can read it to its end.
        ``forget`` also drops the floors of the build IDs (see `schema`). Digests that the store
        does not hold are skipped. Raises `StoreFull` if the index has no room even for a removal,
        `StoreError`.
        """
        from buildidfs.store.retention import removal

        env = self._writable()
        return removal.remove(env, self._files, digests, forget=forget)

    def compress(
        self, unused_since: int, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Digest, Compressed]]:
        """Compress blobs that were last used before that time (Unix time, s); yield each.

        They take less room, and are read as before. Stops when ``enough`` returns True. Raises
        `StoreFull`, and `StoreError`, also if the package zstandard is missing.
        """
        from buildidfs.store.retention.compress import Compressor

        return Compressor(self._writable(), self._files, self.blobs).run(unused_since, enough)

    # --- the whole store ---------------------------------------------------------------------

    def why(self, ordinal: int, kept: Sequence[Artifact]) -> list[str]:
        """Return for each of the `variants` of an artifact the reason why it is served or not."""
        from buildidfs.store.index.ranking import why

        if self.aliases.is_ambiguous(ordinal):
            return ["has a build ID that unrelated programs share"] * len(kept)
        build_id = self.index.build_id(ordinal)
        floor = 0 if build_id is None else self.index.floor(build_id)
        return why(kept, self.index.artifact(ordinal, Kind.EXECUTABLE), floor)

    def lost_since(self, since_ns: int = 0) -> Iterator[LostFiles]:
        """Yield the files that were seen at ``since_ns`` or later and lost, in order of time."""
        from buildidfs.store import run_files

        return run_files.lost_since(self.path, since_ns)

    def listen(self) -> ChangeListener:
        """Return a listener for commits by any process; raises `StoreError` on a read-only
        filesystem.
        """
        env = self._opened()

        def count() -> int:
            with env.read() as txn:
                return load_counters(env, txn).announced

        from buildidfs.store.coordination import ChangeListener

        return ChangeListener(self.path, count)

    def stats(self) -> StoreStats:
        """Return the counts and sizes of the store."""
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
            free_bytes=self._files.free_bytes(),
            journal=entries["journal"],
            stored_bytes=counters.stored_bytes,
            pins=entries["pins"],
            adopted=entries.get("adopted", 0),
            ambiguous=entries.get("ambiguous", 0),
        )

    def check(self, *, digests: bool = False) -> Iterator[str]:
        """Yield the faults of the store, one line each; with ``digests``, read every
        byte as well.
        """
        checker = self.checker()
        for faults in (checker.rows(), checker.files(whole=digests)):
            for fault in faults:
                yield fault.text

    def checker(self) -> Checker:
        """Return an object that looks for faults, part by part."""
        from buildidfs.store.fsck.check import Checker

        return Checker(self._opened(), self._files, self.blobs)

    def _commits(self) -> Commits:
        from buildidfs.store.commit import Commits  # readers do not need it

        return Commits(
            self._writable(),
            self._files,
            self.blobs,
            self._keeping,
            self._judge,
            self._names_of,
            self._derive,
        )

    def _writable(self) -> Environment:
        env = self._opened()
        if self.read_only:
            raise not_to_be_written(self.path)
        return env

    def _opened(self) -> Environment:
        if self._env is None:
            raise StoreError(f"store {printable(self.path)} is closed")
        return self._env
