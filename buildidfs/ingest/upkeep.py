# SPDX-License-Identifier: Apache-2.0
"""The upkeep of a store while other threads capture: limits, compression, rereading of blobs.

Disks lose bits, which only a read detects. Each blob is read about once a month, at a rate that
disturbs no other work. A damaged blob is captured again or goes to quarantine, see `check`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from itertools import islice
from typing import TYPE_CHECKING, Final, Self

import msgspec

from buildidfs import config
from buildidfs.errors import BuildIdFsError, IntegrityError
from buildidfs.linux import threads
from buildidfs.linux.file_ops import on_error
from buildidfs.model import Absence, BuildId, Kind, Origin, Sighting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from buildidfs.capture.base import Progress
    from buildidfs.config import RetentionSettings, Settings
    from buildidfs.linux.child import Child
    from buildidfs.model import Digest
    from buildidfs.store import Store
    from buildidfs.store.retention.eviction import Policy
    from buildidfs.store.retention.plan import Choice
    from buildidfs.store.schema import DigestRow


UPKEEP_S: Final = 60.0
"""Seconds between two checks of the limits while nothing is captured."""

_COLLECT_S: Final = 24 * 3600.0
_REMOVED_AT_ONCE: Final = 256

_log = logging.getLogger(__name__)
EVERY_S: Final = 30 * 86_400
"""Seconds. A blob that was read or written within this time is not read again."""
_PAUSE_S: Final = 3600.0
_FIRST_S: Final = 60.0
# The default of keep-free: journald keeps as much free (or 15 %), and so do other programs.
_FREE_SHARE: Final = 0.05
_FREE_BYTES: Final = 4 << 30
_DERIVERS: Final = 2
_DERIVE_WAIT_S: Final = 1.0
_FEW: Final = 2
# A table of 256 MB, the largest that is read, takes some 300 MB; a program that takes more is
# hostile.
_DERIVER_BYTES: Final = 1 << 30


def compress_after(settings: Settings) -> int | None:
    """Return the age in seconds at which unused blobs are compressed; None for never."""
    age = settings.retention.compress_after
    return None if age is None else config.seconds(age)


def compress(
    store: Store,
    after: int,
    enough: Callable[[], bool] = lambda: False,
    progress: Progress | None = None,
) -> tuple[int, int, int]:
    """Compress blobs that were unused for a number of seconds; ``enough`` ends it early.

    ``progress`` gets the digest of each blob, and the size so far before compression.

    Returns the number of compressed blobs, and the bytes they took before and take now. Raises
    `StoreError`.
    """
    count = before = now = 0
    for digest, done in store.compress(int(time.time()) - after, enough):
        count, before, now = count + 1, before + done.before, now + done.after
        if progress is not None:
            progress(count, digest.hex(), size=before)
    if count:
        _log.info("compressed %d blobs, from %d to %d bytes", count, before, now)
    return count, before, now


class Upkeep(threads.Background):
    """Keeps a store within its policy and clean while other code writes to it.

    A context manager: a thread works within the block. Errors are logged.
    """

    def __init__(
        self, store: Store, every_s: float = UPKEEP_S, *, compress_after: int | None = None
    ) -> None:
        """``compress_after`` is the age in seconds at which unused blobs are compressed."""
        super().__init__("buildidfs-upkeep")
        self._store = store
        self._every_s = every_s
        self._compress_after = compress_after
        self._collected = time.monotonic() - _COLLECT_S

    def _run(self) -> None:
        while not self._ending.wait(self._every_s):
            try:
                self._tend()
            except BuildIdFsError as error:
                _log.warning("cannot look after the store: %s", error)
            except Exception:
                # Capturing does not depend on it.
                _log.exception("cannot look after the store")

    def _tend(self) -> None:
        self._store.enforce()
        now = time.monotonic()
        if now - self._collected >= _COLLECT_S:
            self._collected = now
            self._store.collect()
            if self._compress_after is not None:
                compress(self._store, self._compress_after, self._ending.is_set)


class _Ended(Exception):
    """The block has ended while a file was read."""


class Scrubbing(threads.Background):
    """Reads blobs of a store in a thread of its own, within a ``with`` block.

    Faults are logged. ``first_s`` is the time in seconds before it begins.
    """

    def __init__(self, store: Store, settings: Settings, first_s: float = _FIRST_S) -> None:
        super().__init__("buildidfs-scrub")
        self._store = store
        self._settings = settings
        self._rate = config.size(settings.check.scrub_rate)
        self._first_s = first_s

    def __enter__(self) -> Self:
        return super().__enter__() if self._rate > 0 else self

    def _run(self) -> None:
        threads.stand_back()
        wait = self._first_s
        while not self._ending.wait(wait):
            wait = _PAUSE_S
            try:
                self._read_all()
            except _Ended:
                return
            except BuildIdFsError as error:
                _log.warning("cannot read the blobs: %s", error)
            except Exception:
                # Capturing does not depend on it.
                _log.exception("cannot read the blobs")

    def _read_all(self) -> None:
        damaged = False
        checker = self._store.checker()
        for fault in checker.scrub(self._pace, _is_due):
            _log.error("%s", fault.text)
            damaged = True
        if damaged:
            from buildidfs.ingest import store_check

            for result in store_check.restore(self._store, self._settings):
                level = logging.ERROR if result.state == "lost" else logging.WARNING
                _log.log(level, "%s", result.fault.text)

    def _pace(self, size: int) -> None:
        if self._ending.wait(size / self._rate):
            raise _Ended


def _is_due(row: DigestRow) -> bool:
    last = max(row.verified, row.ctime_ns // 1_000_000_000)
    return time.time() - last > EVERY_S


def policy(settings: RetentionSettings, store_path: str | bytes | os.PathLike[str]) -> Policy:
    """Return the policy of the settings for a store; it depends on the size of the filesystem.

    Without ``keep_free``, a twentieth of the filesystem is kept free, 4 GiB at most. This limit
    only stops the growth of the store: if other programs take space, no captures are removed for
    it. Raises `UsageError`.
    """
    from buildidfs.store.retention.eviction import Policy

    usage = os.statvfs(store_path)
    total = usage.f_blocks * usage.f_frsize

    def size(value: int | str) -> int:
        limit = config.limit(value)
        return limit.bytes + int(limit.share * total)

    asked = settings.keep_free
    keep_free = min(int(total * _FREE_SHARE), _FREE_BYTES) if asked is None else size(asked)
    return Policy(
        max_size=None if settings.max_size is None else size(settings.max_size),
        keep_free=keep_free,
        yields=asked is not None,
        max_age=None if settings.max_age is None else config.seconds(settings.max_age),
        min_age=config.seconds(settings.min_age),
    )


class Pruning:
    """One removal of the blobs that exceed the limits of a store.

    ``blobs`` and ``freed`` (bytes on disk) count the removed blobs, or with ``dry_run`` those that
    would be removed. With ``with_kept``, the choices include the kept blobs.
    """

    def __init__(self, store: Store, policy: Policy, *, dry_run: bool, with_kept: bool) -> None:
        self._store = store
        self._policy = policy
        self._dry_run = dry_run
        self._with_kept = with_kept
        self.blobs = self.freed = 0

    def choices(self) -> Iterator[Choice]:
        """Yield each blob with its decision, after this was carried out. Raises `StoreError`."""
        if not self._dry_run:
            self._store.fold_uses()
        plan = self._store.plan(self._policy, altlinks(self._store), with_kept=self._with_kept)
        for choice in plan if self._dry_run else self._removing(plan):
            self.blobs += choice.is_evicted
            self.freed += choice.candidate.size if choice.is_evicted else 0
            yield choice

    def _removing(self, plan: Iterator[Choice]) -> Iterator[Choice]:
        while batch := list(islice(plan, _REMOVED_AT_ONCE)):
            self._store.remove_chosen([each for each in batch if each.is_evicted])
            yield from batch

    def exceeded(self) -> dict[str, int]:
        """Return the limits that cannot be met, each with the number of missing bytes."""
        freed = self.freed
        if not self._dry_run:
            self._store.collect()
            freed = 0
        lacking = self._store.exceeded(self._policy)
        left = {name: lack - freed for name, lack in lacking.items() if lack > freed}
        if left and not self._dry_run:
            more = self._store.plan(self._policy, altlinks(self._store))
            if next(more, None) is not None:
                return {}  # more has to be removed: another process captures at this moment
        return left


def retain(store: Store, settings: Settings) -> None:
    """Let a store make room for captures according to the settings."""
    kept = settings.retention
    # With default limits the check is not worth its time.
    always = kept != config.RetentionSettings()
    store.retain(lambda: policy(kept, store.path), altlinks(store), always=always)


def open_for_capture(path: str | bytes | os.PathLike[str], settings: Settings) -> Store:
    """Open a store for captures, and create it if it is absent. The settings give its limits, trust
    rules, and the engines that name containers.

    Debug files that are made of captured executables are made by other processes (`Deriver`).
    Raises `StoreError` and its subclasses.
    """
    store = _open(path, settings)
    deriver = Deriver(store, settings)
    store.derive_with(deriver.start, deriver.end)
    deriver.resume()
    return store


def _open(path: str | bytes | os.PathLike[str], settings: Settings) -> Store:
    from buildidfs.ingest import scans
    from buildidfs.store import Store

    store = Store.open(path, create=True)
    with on_error(store.close):
        retain(store, settings)
        scans.believe(store, settings)
        scans.name_containers(store)
    return store


class Deriver:
    """Starts processes that make debug files from executables in a store (`ingest.derived`).

    Such a process may outlive this one, and ends when no requests are left.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store = store
        self._settings = settings
        self._children: list[Child] = []

    def start(self) -> None:
        """Start making all debug files that the store requests now; does not wait or raise."""
        self._children = [child for child in self._children if child.poll() is None]
        # A second process waits for the first, and then looks for further requests.
        if len(self._children) == _DERIVERS:
            return
        try:
            started = start_writer(self._store.path, self._settings)
        except OSError as error:
            _log.warning("cannot make debug files of Go programs: %s", error.strerror)
        else:
            self._children.append(started)

    def end(self) -> None:
        """Wait up to a second if few files are requested: the next command may use the files."""
        if not self._children or self._asked(_FEW + 1) > _FEW:
            return
        until = time.monotonic() + _DERIVE_WAIT_S
        for child in self._children:
            child.wait(max(until - time.monotonic(), 0))

    def resume(self) -> None:
        """Start making files whose requests were left by a killed process."""
        if not self._asked(1):
            return
        from buildidfs.ingest import derived

        with contextlib.suppress(OSError):  # `start` reports it
            if derived.is_at_work(self._store):
                return
        self.start()

    def _asked(self, most: int) -> int:
        """Return the number of requested files, up to ``most``."""
        try:
            return len(self._store.derivations(most))
        except IntegrityError:
            return 0  # a check of the store reports it


# --- the writer: a process that writes to a store for another one ---------------------------------


class CopiedFile(msgspec.Struct):
    """A file from elsewhere to commit: the origin, the build ID and the kind."""

    origin: Origin
    build_id: bytes
    kind: int


class _Order(msgspec.Struct):
    """The work of a writer: commit a file, or make the debug files that the store requests."""

    store: bytes
    settings: bytes
    file: CopiedFile | None


def start_writer(
    store_path: bytes, settings: Settings, file: CopiedFile | None = None, fd: int = -1
) -> Child:
    """Start a process with the lowest priority that commits the ``file`` with the bytes of ``fd``,
    or else makes the debug files that the store requests. Raises OSError.
    """
    from buildidfs.linux import child as child_process  # most commands need none

    order = _Order(store_path, msgspec.json.encode(settings), file)
    # The settings may have passwords, but each user may read the arguments of a process.
    with open(os.memfd_create("buildidfs-order"), "wb", buffering=0) as packed:
        packed.write(msgspec.msgpack.encode(order))
        return child_process.start(
            child_process.module_command(__name__, str(packed.fileno()), str(fd)),
            stdout=child_process.DEVNULL,
            stderr=child_process.DEVNULL if file is None else None,
            cwd="/",
            pass_fds=[each for each in (packed.fileno(), fd) if each >= 0],
            new_session=file is None,
        )


def main(words: Sequence[str]) -> None:
    """Do the work of a writer. The arguments are descriptors of its order and of a file, or -1."""
    order_fd, fd = map(int, words)
    with open(order_fd, "rb") as packed:
        packed.seek(0)
        order = msgspec.msgpack.decode(packed.read(), type=_Order)
    settings = msgspec.json.decode(order.settings, type=config.Settings)
    threads.stand_back(session=order.file is None)
    if order.file is None:
        _derive(order.store, settings)
    else:
        _commit(order.store, settings, order.file, fd)


def _commit(store_path: bytes, settings: Settings, file: CopiedFile, fd: int) -> None:
    from buildidfs.capture.base import PinnedFile
    from buildidfs.ingest import Ingest

    kind = Kind(file.kind)
    given = kind if kind in (Kind.VDSO, Kind.KALLSYMS) else None
    sighting = Sighting(file.origin, time.time_ns())
    pinned = PinnedFile(sighting, fd, given, BuildId(file.build_id), is_copy=True)
    try:
        with open_for_capture(store_path, settings) as store:
            Ingest(store).run([pinned])
    except BuildIdFsError as error:
        raise SystemExit(f"buildidfs: cannot store a file of the bucket: {error}") from None


def _derive(store_path: bytes, settings: Settings) -> None:
    from buildidfs.ingest import derived

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = _DERIVER_BYTES if hard == resource.RLIM_INFINITY else min(_DERIVER_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    with (
        contextlib.suppress(BuildIdFsError, OSError, MemoryError),
        _open(store_path, settings) as store,
    ):
        derived.work(store)


def altlinks(store: Store) -> Callable[[Digest], BuildId | None]:
    """Return a function from the digest of a debug file to the build ID of its dwz file."""

    def altlink(digest: Digest) -> BuildId | None:
        from buildidfs.capture import base

        with contextlib.suppress(BuildIdFsError, OSError):
            with store.blobs.open(digest) as blob:
                described = base.describe(blob.fileno())
            if not isinstance(described, Absence) and described.altlink is not None:
                return described.altlink.build_id
        return None

    return altlink
