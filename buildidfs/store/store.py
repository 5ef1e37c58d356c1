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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from buildidfs.errors import StoreError
from buildidfs.store import layout
from buildidfs.store.blobs.files import Blobs, Staged
from buildidfs.store.errors import not_to_be_written
from buildidfs.store.index import environment
from buildidfs.store.index.reading import Reader
from buildidfs.store.write.transaction import load_counters

if TYPE_CHECKING:
    from buildidfs.model import BuildId, Digest, Origin, Sighting, Standing, Trust
    from buildidfs.store.blobs.compress import Compressed
    from buildidfs.store.index.environment import Environment
    from buildidfs.store.records import CommitResult, NewAbsence, NewCapture, NewSeen
    from buildidfs.store.retention.evicted import Tally
    from buildidfs.store.retention.eviction import AltLinks
    from buildidfs.store.retention.gc import Collected
    from buildidfs.store.retention.policy import Keeper, Policy
    from buildidfs.store.retention.removal import Removed
    from buildidfs.store.write.commit import Commits

StorePath = str | bytes | os.PathLike[str]


class Store(Reader):
    """An open store; a context manager. Make one with `create` or `open`."""

    def __init__(self, path: bytes, env: Environment, blobs: Blobs, *, read_only: bool) -> None:
        super().__init__(path, env, blobs)
        self.read_only = read_only
        self._keeper: Keeper | None = None
        self._make_keeper: Callable[[], Keeper] | None = None
        self._making = threading.Lock()
        self._judge: Callable[[Origin], tuple[Trust, Standing]] | None = None
        self._image_of: Callable[[Origin], str] | None = None

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
        `StoreMissing`, `StoreVersionError`, `StoreFull`, `StoreDamaged`, `StoreError`.
        """
        root = os.path.abspath(os.fsencode(path))
        if create and not read_only and not os.path.exists(os.path.join(root, b"format")):
            layout.make(root, map_size)
        env = layout.acquire(root, read_only=read_only, map_size=map_size)
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
            self.flush_uses()
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

    # --- capture ---------------------------------------------------------------------------

    def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
        """Take the bytes of an open file into the store's filesystem, hashed, without a name.

        Reads from offset 0, at most ``limit`` bytes (default: the size the file has now).
        Reflinks where the filesystem can. May be called from several threads at once. Raises
        OSError when the source cannot be read, or (EFBIG) is larger than the store may become,
        `Recapturable` when there is no room for a file that is still at ``origin``, `StoreFull`,
        `StoreError`.
        """
        self._writable()
        keeper = self._keeping()
        if keeper is None:
            return self._blobs.stage(fd, limit)
        status = os.fstat(fd)
        size = min(status.st_size, status.st_blocks * 512)
        size = size if limit is None else min(size, limit)
        return keeper.staging(origin, size, lambda more: self._blobs.stage(fd, limit, size, more))

    def commit(
        self,
        captures: Sequence[NewCapture],
        absent: Sequence[NewAbsence] = (),
        seen: Sequence[NewSeen] = (),
    ) -> CommitResult:
        """Make a batch durable and visible, all or nothing, and tell the listeners.

        ``seen`` goes into the journal, of which nobody is told.
        Closes what was staged, whatever happens. The batch may be as long as the limit of open
        files allows. What was given as a digest that the store does not hold any more is left
        out (`Outcome.gone`). Raises `StoreFull`, `StoreError`.
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
        """Record that files which `recall` knew were seen again; returns those unknown by now."""
        return self._commits().touch(sightings)

    def believe(self, judge: Callable[[Origin], tuple[Trust, Standing]]) -> None:
        """From now on let ``judge`` decide how far what is written is believed."""
        self._judge = judge

    def name_images(self, image_of: Callable[[Origin], str]) -> None:
        """From now on let ``image_of`` say what images containers are of that files are seen in.

        It gives text for people, empty where it does not know: then it is asked again when more is
        seen in that container. It must be quick, and not raise.
        """
        self._image_of = image_of

    def journal(self, entries: Sequence[NewSeen]) -> None:
        """Keep what was seen, durably and in one transaction; `commit` does the same in passing.

        Nothing is written for what was seen within the minute. Raises `StoreFull`, `StoreError`.
        """
        self.commit((), (), entries)

    def remember(self, absent: Sequence[NewAbsence]) -> None:
        """Remember files without a build ID; `commit` does the same in passing."""
        self.commit((), absent)

    # --- what is kept, and what goes ---------------------------------------------------------

    def retain(
        self,
        policy: Policy | Callable[[], Policy],
        altlinks: AltLinks = lambda digest: None,
        *,
        always: bool = True,
    ) -> None:
        """From now on make room for what is staged and committed, within ``policy``.

        A function is asked for it when it is first needed; unless ``always``, that is not before
        something is staged. ``altlinks`` tells of the blob of a debug file which build ID its
        .gnu_debugaltlink names.
        """
        env = self._writable()

        def make() -> Keeper:
            from buildidfs.store.retention.policy import Keeper

            return Keeper(env, self._blobs, policy() if callable(policy) else policy, altlinks)

        self._make_keeper = make
        self._keeper = make() if always else None

    def enforce(self) -> None:
        """Remove what the policy given to `retain` does not want to keep. Raises `StoreError`."""
        if self._keeper is not None:
            self._keeper.enforce()

    @property
    def tally(self) -> Tally:
        """What was removed to keep within the policy since `take_tally` was called."""
        from buildidfs.store.retention.evicted import Tally

        return Tally() if self._keeper is None else self._keeper.tally

    def take_tally(self) -> Tally:
        """`tally`, and begin anew."""
        return self.tally if self._keeper is None else self._keeper.take_tally()

    @property
    def most_staged(self) -> int | None:
        """Bytes that may wait to be committed, where there is a policy."""
        keeper = self._keeping()
        return None if keeper is None else keeper.most_staged

    def _keeping(self) -> Keeper | None:
        if self._keeper is None and self._make_keeper is not None:
            with self._making:
                self._keeper = self._keeper or self._make_keeper()
        return self._keeper

    def pin(self, build_ids: Iterable[BuildId], name: bytes = b"") -> int:
        """Keep build IDs, present or not, for somebody; returns how many were not pinned so.

        Raises `UsageError` for a name of more than 390 bytes.
        """
        from buildidfs.store.index import pins

        return pins.pin(self._writable(), build_ids, name, time.time_ns())

    def unpin(self, build_ids: Iterable[BuildId]) -> int:
        """Take back pins without a name; returns how many there were."""
        from buildidfs.store.index import pins

        return pins.unpin(self._writable(), build_ids)

    def unpin_name(self, name: bytes) -> int:
        """Take back all pins with a name; returns how many there were."""
        from buildidfs.store.index import pins

        return pins.unpin_name(self._writable(), name)

    def fold_uses(self) -> int:
        """Take in what readers have opened; returns how much of it was new. Raises `StoreError`."""
        from buildidfs.store.write import use_log

        return use_log.fold(self._writable())

    def collect(self) -> Collected:
        """Remove what killed processes have left behind. Raises `StoreError`."""
        from buildidfs.store.retention import gc

        return gc.collect(self._writable())

    def remove(self, digests: Iterable[Digest], *, quarantine: bool = False) -> Removed:
        """Remove blobs, and all that nothing speaks of any more once they are gone.

        Tells the listeners; who has such a file open can read it to its end. ``quarantine``
        keeps the files, in ``quarantine/``. What the store does not hold is passed over. Raises
        `StoreFull` when the index has no room even for that, `StoreError`.
        """
        from buildidfs.store.retention import removal

        env = self._writable()
        return removal.remove(env, self._blobs, digests, quarantine=quarantine)

    def compress(
        self, unused_since: int, enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Digest, Compressed]]:
        """Compress blobs that were last used before that time (Unix time, s); tells of each.

        They take less room, and are read as before. ``enough`` ends it early. Raises `StoreFull`,
        `StoreError` (also where the package zstandard is missing).
        """
        from buildidfs.store.blobs.compress import Compressor

        return Compressor(self._writable(), self._blobs, self._verified).run(unused_since, enough)

    def _commits(self) -> Commits:
        from buildidfs.store.write.commit import Commits  # which who only reads does without

        return Commits(
            self._writable(),
            self._blobs,
            self._verified,
            self._keeping,
            self._judge,
            self._image_of,
        )

    def _writable(self) -> Environment:
        env = self._opened()
        if self.read_only:
            raise not_to_be_written(self.path)
        return env
