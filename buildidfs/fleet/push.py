# SPDX-License-Identifier: Apache-2.0
"""Push: upload the files of a store that a bucket lacks.

If the store serves a file and the bucket has none for the build ID and kind, the file goes below
``buildid/``; if the bucket has other bytes, it goes below ``variant/``. Nothing is overwritten: if
two hosts push one build ID, the first one wins, and different bytes of the other one become a
variant. A file appears in the bucket as a whole, so a process may be killed at any moment; the next
push compares files that the ledger does not know with the bucket. A push adds files to the filter
before it uploads them, so the filter may contain files that the bucket lacks, but contains every
file that the bucket has.

Files that not all users could read where they were captured go to a separate bucket, or nowhere.
Likewise, a manifest lists only places that all users may know of.

`Pusher.run` does one pass over files; `Pusher.follow` then follows the commits to the store.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import select
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from buildidfs import config
from buildidfs.backoff import Backoff
from buildidfs.errors import (
    IntegrityError,
    RemoteDamaged,
    RemoteError,
    RemoteRefused,
    RemoteUnavailable,
    StoreError,
    UsageError,
)
from buildidfs.fleet import manifests, objects
from buildidfs.fleet.bucket import Bucket
from buildidfs.fleet.filters import CLAIM_S, Filter
from buildidfs.fleet.ledger import Ledger, LedgerEntry
from buildidfs.fleet.manifests import PUSHED, VARIANT, ManifestPlace, ManifestRow
from buildidfs.fleet.objects import NO_BUCKET
from buildidfs.linux import machine
from buildidfs.model import Artifact, BuildId, Kind
from buildidfs.store import OriginRecord
from buildidfs.store.permissions import is_public

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Future

    from buildidfs.capture.base import Progress
    from buildidfs.config import RemoteSettings
    from buildidfs.store import Store
    from buildidfs.store.coordination import ChangeListener

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Seconds that a push without --watch waits for a bucket that does not answer."""

DAMAGED: Final = "the blob is damaged: run buildidfs check --repair"

_AHEAD: Final = 4
"""Files that wait for each thread."""
_PAUSES: Final = Backoff(1.0, 60.0, jitter=0.25)
_PASS_S: Final = 3600.0
_WORKERS: Final = 16
_ASK_FIRST: Final = 1 << 20
"""Before a larger file is sent, the bucket is asked if it has the file. A smaller file is sent at
once, on the condition that the bucket lacks it.
"""
_LARGE: Final = 64 << 20
"""Larger files are uploaded in parts. Such an upload cannot have a condition, so it takes a lease
first.
"""
_MOST_IN_MEMORY: Final = 2
"""Files of more than `_ASK_FIRST` bytes that are sent at the same time: each is in memory twice."""
_LEASE_S: Final = 3600.0
_MANIFEST_ROWS: Final = 10_000
_CLAIMED: Final = 1024
"""The number of files added to the filter at a time."""
_NS: Final = 1_000_000_000

_SETTLE_S: Final = 1.0
_POLL_S: Final = 60.0
_LISTEN_S: Final = 0.5
_MOST_CHANGES: Final = 100_000


Put = Literal["sent", "same", "other", "leased"]
"""The result for a file: ``sent``, or not, because under its key the bucket has the ``same`` bytes
or ``other`` bytes, or because another host is uploading it (``leased``).
"""


class PushOptions(msgspec.Struct, frozen=True):
    """Options of a push. ``rate`` is in bytes per second, 0 for no limit. ``patience_s`` is the
    time to wait for a bucket that does not answer, None for ever. ``verify`` compares all files
    with the bucket and ignores the ledger. Objects older than half of ``keep_s`` are touched.
    """

    rate: int = 0
    patience_s: float | None = PATIENCE_S
    verify: bool = False
    keep_s: int | None = None


class PushSummary(msgspec.Struct):
    """Counts of files: sent as the first of their build ID (``pushed``) or as ``variants``, already
    there (``present``), left out because not all users could read them (``private``), being
    uploaded by another host (``leased``). ``bytes`` is the number of bytes sent. ``failed`` has the
    files that could not be sent, with the reason.
    """

    pushed: int = 0
    variants: int = 0
    present: int = 0
    private: int = 0
    leased: int = 0
    bytes: int = 0
    failed: list[str] = msgspec.field(default_factory=list)

    @property
    def files(self) -> int:
        """Return the number of files that were processed."""
        return self.pushed + self.variants + self.present + self.private + self.leased

    def add(self, other: PushSummary) -> None:
        """Add the counts of another summary."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed += other.failed


_COUNTS: Final = tuple(name for name in PushSummary.__struct_fields__ if name != "failed")


class Pace:
    """Limits the bytes per second of all threads together."""

    def __init__(self, rate: int, stop: threading.Event) -> None:
        self._rate = rate
        self._stop = stop
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now)
            self._free_at = start + size / self._rate
        self._stop.wait(start - now)


class Stopped(Exception):
    """`stop` was called."""


class PushTarget:
    """The bucket of a push, with its filter and its ledger."""

    def __init__(self, store: Store, url: str) -> None:
        """Open the ledger; no request is made yet. Raises `UsageError`, `StoreError`."""
        self.bucket = Bucket(url)
        self.ledger = Ledger(store.path, url)
        self._filter = Filter(self.bucket)
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Find out if the bucket is the one that the ledger knows; load its filter or make one.

        Raises `RemoteError`.
        """
        if not self.ledger.recognise(self.bucket.identity(create=True)):
            _log.warning("%s is a new bucket: each file is looked up in it", self.bucket.url)
            self._filter = Filter(self.bucket)
        try:
            self._filter.refresh()
        except RemoteDamaged as error:
            _log.warning("%s; making a new one", error)
        if self._filter.generation is None:
            self._filter.rebuild()

    def claim(self, jobs: Sequence[_Job]) -> None:
        """Add files that are about to be uploaded to the filter. Raises `RemoteError`."""
        with self._lock:
            for job in jobs:
                job.is_new = not self._filter.may_have(job.build_id, job.artifact.kind)
            now = _boot_time()
            self._filter.add((job.build_id, job.artifact.kind) for job in jobs if job.served)
            for job in jobs:
                job.claimed = now

    def renew_claim(self, job: _Job) -> None:
        """Add a file whose upload begins late to the filter once more. Raises `RemoteError`."""
        if job.served and _boot_time() - job.claimed > CLAIM_S:
            self.claim([job])

    def complete_filter(self) -> None:
        """Add pushed files that the filter lacks because it was made anew meanwhile.

        Raises `RemoteError`.
        """
        waiting = self.ledger.unfiltered()
        if waiting:
            self._filter.add((each.build_id, each.kind) for each in waiting if each.state == PUSHED)
            self.ledger.set_filtered(waiting)

    def close(self) -> None:
        """Close the ledger."""
        self.ledger.close()


class _Job(msgspec.Struct):
    """A file to push. ``served`` is True if the store serves it.

    ``claimed`` is the time at which it was added to the filter, in seconds since the machine was
    started. ``is_new`` is True if the filter did not have it before.
    """

    build_id: BuildId
    artifact: Artifact
    target: PushTarget
    served: bool
    origins: list[OriginRecord]
    is_new: bool = False
    claimed: float = 0.0


class Pusher:
    """Pushes the files of a store to a bucket; a context manager. `stop` may be called from any
    thread.
    """

    def __init__(self, store: Store, settings: RemoteSettings, options: PushOptions) -> None:
        """Raises `UsageError`, `RemoteError`, `StoreError`."""
        if not settings.url:
            raise UsageError(NO_BUCKET)
        self._store = store
        self._options = options
        self._stop = threading.Event()
        self._pace = Pace(options.rate, self._stop)
        self._host = machine.host_name()
        self._targets: list[PushTarget] = []
        self._urls = (settings.url, settings.private)
        self._rows: list[ManifestRow] = []
        self._in_memory = threading.Semaphore(_MOST_IN_MEMORY)

    def __enter__(self) -> Pusher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stop(self) -> None:
        """End the push soon; each file is finished or left out."""
        self._stop.set()

    def close(self) -> None:
        """Close the ledgers."""
        for target in self._targets:
            target.close()

    # --- one pass over the store ----------------------------------------------------------------

    def run(
        self,
        ordinals: Iterable[tuple[int, BuildId]] | None = None,
        progress: Progress | None = None,
    ) -> PushSummary:
        """Push the files of some build IDs, or all, and write manifest and filter; return the
        summary.

        Waits while the bucket does not answer. Raises `RemoteUnavailable` if that takes longer than
        ``patience_s``, `RemoteDenied`, `StoreError`.
        """
        self._persistently(self._connect)
        is_all = ordinals is None
        began = time.time_ns()
        since = int(self._public.ledger.value("told") or 0)
        if since > began:
            since = 0  # a time in the future, of a wrong clock
        chosen = self._store.index.build_ids_from() if ordinals is None else ordinals
        summary = PushSummary()
        is_complete = False
        try:
            self._send(self._claimed(self._jobs(chosen, since, summary)), summary, progress)
        except Stopped:
            is_all = False
        finally:
            is_complete = self._finish()
        if is_all and is_complete and not summary.failed:
            self._public.ledger.set_value("told", str(began))
        if is_all and self._options.keep_s is not None:
            self._keep(self._options.keep_s)
        return summary

    @property
    def _public(self) -> PushTarget:
        return self._targets[0]

    def _connect(self) -> None:
        for number, url in enumerate(filter(None, self._urls)):
            if len(self._targets) <= number:
                self._targets.append(PushTarget(self._store, url))
            self._targets[number].refresh()

    def _target(self, artifact: Artifact) -> PushTarget | None:
        """Return the bucket for a file; None if the file must not leave this host."""
        if is_public(artifact):
            return self._public
        return self._targets[1] if len(self._targets) > 1 else None

    def _jobs(
        self, chosen: Iterable[tuple[int, BuildId]], since_ns: int, summary: PushSummary
    ) -> Iterator[_Job]:
        """Yield the files that may have to be sent; add files seen again to the manifest."""
        index = self._store.index
        for ordinal, build_id in chosen:
            origins: list[OriginRecord] | None = None
            for kind in Kind:
                served = index.artifact(ordinal, kind)
                for artifact in index.variants_after(ordinal, kind):
                    target = self._target(artifact)
                    if target is None:
                        summary.private += 1
                        if artifact.first_seen_ns > since_ns:
                            self._rows.append(manifests.private(build_id, kind))
                        continue
                    if origins is None:
                        origins = index.origins(ordinal)
                    if self._is_done(target, build_id, artifact):
                        summary.present += 1
                        if any(each.last_seen_ns > since_ns for each in origins):
                            self._note(build_id, artifact, PUSHED, origins)
                        continue
                    is_served = served is not None and served.variant == artifact.variant
                    yield _Job(build_id, artifact, target, is_served, origins)

    def _claimed(self, jobs: Iterator[_Job]) -> Iterator[_Job]:
        """Add files to the filters, then yield them."""
        while some := list(itertools.islice(jobs, _CLAIMED)):
            for target in self._targets:
                its = [job for job in some if job.target is target]
                if its:
                    self._persistently(functools.partial(target.claim, its))
            yield from some

    def _is_done(self, target: PushTarget, build_id: BuildId, artifact: Artifact) -> bool:
        if self._options.verify:
            return False
        return target.ledger.has(build_id, artifact.kind, artifact.digest)

    def _send(self, jobs: Iterator[_Job], summary: PushSummary, progress: Progress | None) -> None:
        """Send the files in threads; a few files per thread are queued."""
        waiting: deque[tuple[_Job, Future[PushSummary]]] = deque()
        with ThreadPoolExecutor(_WORKERS, "push") as pool:
            try:
                for job in jobs:
                    waiting.append((job, pool.submit(self._sent, job)))
                    if len(waiting) >= _AHEAD * _WORKERS:
                        self._take(*waiting.popleft(), summary, progress)
                while waiting:
                    self._take(*waiting.popleft(), summary, progress)
            except BaseException:  # the threads must end, also after ^C
                self._stop.set()
                for _, future in waiting:
                    future.cancel()
                raise

    def _take(
        self,
        job: _Job,
        future: Future[PushSummary],
        summary: PushSummary,
        progress: Progress | None,
    ) -> None:
        try:
            summary.add(future.result())
        except (IntegrityError, RemoteRefused, StoreError, OSError) as error:
            summary.failed.append(f"{job.build_id} ({job.artifact.kind.name.lower()}): {error}")
        if progress is not None:
            progress(summary.files, str(job.build_id), size=summary.bytes)

    # --- one file ------------------------------------------------------------------------------

    def _sent(self, job: _Job) -> PushSummary:
        """Send a file unless the bucket has it; runs in a thread."""
        target = job.target
        state, put = self._persistently(lambda: self._placed(job))
        if put == "leased":
            return PushSummary(leased=1)
        artifact = job.artifact
        target.ledger.add([LedgerEntry(job.build_id, artifact.kind, artifact.digest, state)])
        if target is self._public:
            self._note(job.build_id, artifact, state, job.origins)
        if put == "same":
            return PushSummary(present=1)
        if state == VARIANT:
            return PushSummary(variants=1, bytes=artifact.size)
        return PushSummary(pushed=1, bytes=artifact.size)

    def _placed(self, job: _Job) -> tuple[str, Put]:
        """Upload a file under the right key; return its state."""
        artifact, target = job.artifact, job.target
        if job.served:
            key = objects.blob_key(job.build_id, artifact.kind)
            put = self._put(target.bucket, key, job, ask=not job.is_new)
            if put != "other":
                return PUSHED, put
        key = objects.variant_key(job.build_id, artifact.kind, artifact.digest)
        put = self._put(target.bucket, key, job, ask=True)
        if put == "other":
            raise IntegrityError(f"{target.bucket.url}/{key}: its name states another SHA-256")
        return VARIANT, put

    def _put(self, bucket: Bucket, key: str, job: _Job, *, ask: bool) -> Put:
        """Write an object unless it exists. With ``ask``, query the bucket first."""
        artifact = job.artifact
        if artifact.size > _LARGE or (ask and artifact.size > _ASK_FIRST):
            found = self._compared(bucket, key, artifact)
            if found is not None:
                return found
        if artifact.size > _LARGE:
            return self._put_large(key, job)
        if self._stop.is_set():
            raise Stopped
        with self._in_memory if artifact.size > _ASK_FIRST else contextlib.nullcontext():
            if self._created(bucket, key, job):
                return "sent"
        found = self._compared(bucket, key, artifact)
        if found is None:
            raise RemoteUnavailable(f"{bucket.url}/{key} was removed a moment ago")
        return found

    def _created(self, bucket: Bucket, key: str, job: _Job) -> bool:
        """Write an object unless one has the key; return False if one has."""
        artifact = job.artifact
        with self._store.blobs.open(artifact.digest) as blob:
            data = blob.pread(blob.size, 0)
        if hashlib.sha256(data).digest() != artifact.digest:
            raise IntegrityError(DAMAGED)
        self._pace.wait(len(data))
        job.target.renew_claim(job)
        return bucket.create(key, data, _described(job, self._host).metadata())

    def _compared(self, bucket: Bucket, key: str, artifact: Artifact) -> Put | None:
        """Compare the object at a key: return "same" or "other"; None if it does not exist."""
        head = bucket.head(key)
        if head is None:
            return None
        digest = objects.described(head.metadata).digest
        if digest is not None or head.size != artifact.size:
            is_same = digest == artifact.digest and head.size == artifact.size
            return "same" if is_same else "other"
        # Another program has uploaded it: the tag of an object in one part is its MD5.
        hasher = hashlib.md5(usedforsecurity=False)
        with self._store.blobs.open(artifact.digest) as blob:
            for chunk in blob.chunks():
                hasher.update(chunk)
        return "same" if head.etag.strip('"') == hasher.hexdigest() else "other"

    def _put_large(self, key: str, job: _Job) -> Put:
        artifact, bucket = job.artifact, job.target.bucket
        lease = objects.lease_key(job.build_id, artifact.kind)
        if not self._leased(job.target, lease):
            return "leased"
        found = self._compared(bucket, key, artifact)
        if found is not None:  # the last holder of the lease has written it since the query
            bucket.delete(lease)
            return found
        with self._store.blobs.open(artifact.digest) as blob:
            if blob.computed() != artifact.digest:
                raise IntegrityError(DAMAGED)
            metadata = _described(job, self._host).metadata()
            bucket.upload(key, self._paced(blob.chunks(), job), metadata)
        bucket.delete(lease)
        # Another host, whose lease has expired, may have finished before or after us.
        return "sent" if self._compared(bucket, key, artifact) == "same" else "other"

    def _paced(self, chunks: Iterable[bytes], job: _Job) -> Iterator[bytes]:
        for chunk in chunks:
            if self._stop.is_set():
                raise Stopped
            self._pace.wait(len(chunk))
            job.target.renew_claim(job)
            yield chunk

    def _leased(self, target: PushTarget, key: str) -> bool:
        """Return True if this store may upload a large file now.

        A lease is valid for an hour by the clock of the storage. If it could not be deleted, it
        expires; a lifecycle rule removes it.
        """
        bucket = target.bucket
        owner = f"{self._host} {target.ledger.token()}".encode()
        if bucket.create(key, owner, {}):
            return True
        held = bucket.peek(key, len(owner) + 1)
        if held is None or held[1] == owner:
            return True  # a lease of an earlier push of this store that was killed
        return bucket.now() - held[0].modified > _LEASE_S

    # --- after the files ------------------------------------------------------------------------

    def _note(
        self, build_id: BuildId, artifact: Artifact, state: str, origins: list[OriginRecord]
    ) -> None:
        """Queue a row for the manifest."""
        places = [
            ManifestPlace(
                each.origin.path.decode("utf-8", "backslashreplace")[: objects.MOST_PATH],
                each.origin.container[:1024],
                each.first_seen_ns // _NS,
                each.last_seen_ns // _NS,
            )
            for each in origins
            if each.digest == artifact.digest and each.origin.is_public
        ]
        self._rows.append(
            ManifestRow(
                str(build_id),
                artifact.kind.name.lower(),
                artifact.digest.hex(),
                artifact.size,
                state,
                tuple(places[: manifests.MOST_PLACES]),
            )
        )

    def _finish(self) -> bool:
        """Write the manifest and complete the filter; return False if the next push has
        to do so.
        """
        try:
            for target in self._targets:
                target.complete_filter()
            while self._rows:
                some = self._rows[:_MANIFEST_ROWS]
                manifests.write(self._public.bucket, self._host, some)
                del self._rows[: len(some)]
        except RemoteError as error:
            _log.warning("the next push must complete the manifest and the filter: %s", error)
            # The next pass over all files queues all of them again.
            self._rows.clear()
            self._public.ledger.set_value("told", "0")
            return False
        return True

    def _keep(self, keep_s: int) -> None:
        """Touch the objects that contain this host's files, so that no lifecycle rule
        removes them.
        """
        for target in self._targets:
            entries = target.ledger.older_than(keep_s / 2)
            if not entries:
                continue
            old = self._persistently(target.bucket.now) - keep_s / 2
            for entry in entries:
                if self._stop.is_set():
                    return
                self._persistently(functools.partial(self._keep_one, target, entry, old))

    def _keep_one(self, target: PushTarget, entry: LedgerEntry, old: float) -> None:
        """Touch the object of a file that was written before ``old`` (seconds, clock of the
        storage).
        """
        if not self._store.index.held(entry.digest):
            target.ledger.forget(entry)  # the other hosts that have the file keep its object
            return
        if entry.state == PUSHED:
            key = objects.blob_key(entry.build_id, entry.kind)
        else:
            key = objects.variant_key(entry.build_id, entry.kind, entry.digest)
        head = target.bucket.head(key)
        is_old = head is not None and head.modified < old
        if head is None or (is_old and not target.bucket.touch(key)):
            target.ledger.forget(entry)  # the next pass pushes the file again
            return
        target.ledger.set_touched(entry)

    # --- outages -------------------------------------------------------------------------------

    def _persistently(self, work: Callable[[], T]) -> T:
        """Repeat ``work`` until the bucket answers, the time is up, or the push is stopped.

        Raises `RemoteUnavailable`, `RemoteDenied`, `Stopped`.
        """
        began = time.monotonic()
        for failures in itertools.count():
            if self._stop.is_set():
                raise Stopped
            try:
                return work()
            except RemoteUnavailable as error:
                patience, pause = self._options.patience_s, _PAUSES.delay(failures)
                if patience is not None and time.monotonic() - began + pause > patience:
                    raise
                if pause > _PAUSES.most / 2:
                    _log.warning("%s; trying again", error)
                self._stop.wait(pause)
        raise AssertionError

    # --- following the store -------------------------------------------------------------------

    def follow(self, ready: Callable[[], None] = lambda: None) -> None:
        """Push all files, then each new capture, until `stop` is called.

        Raises `RemoteDenied`, `StoreError`.
        """
        with contextlib.closing(self._store.listen()) as listener:
            changes = Changes(listener)
            due = 0.0
            with changes, contextlib.suppress(Stopped):
                while not self._stop.is_set():
                    if time.monotonic() >= due:
                        changes.take()
                        self._log(self.run())
                        due = time.monotonic() + _PASS_S
                        ready()
                    ordinals = changes.wait(self._stop)
                    if ordinals is None:
                        due = 0.0
                    elif ordinals:
                        self._log(self.run(self._named(ordinals)))

    def _named(self, ordinals: Iterable[int]) -> list[tuple[int, BuildId]]:
        named = ((each, self._store.index.build_id(each)) for each in sorted(ordinals))
        return [(ordinal, build_id) for ordinal, build_id in named if build_id is not None]

    def _log(self, summary: PushSummary) -> None:
        for failure in summary.failed:
            _log.warning("cannot push %s", failure)
        if summary.pushed or summary.variants:
            _log.info("pushed %d files, %d variants", summary.pushed, summary.variants)


class Changes:
    """Collects the ordinals that commits change, in a thread, so that commits never wait for a
    network.

    A context manager.
    """

    def __init__(self, listener: ChangeListener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._ordinals: set[int] | None = set()
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buildidfs-changes", daemon=True)

    def __enter__(self) -> Changes:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            if not select.select([self._listener], [], [], _LISTEN_S)[0]:
                continue
            found = self._listener.receive()
            self._listener.acknowledge()
            if found is None:
                continue
            with self._lock:
                if not found or self._ordinals is None:
                    self._ordinals = None
                else:
                    self._ordinals.update(found)
                    if len(self._ordinals) > _MOST_CHANGES:
                        self._ordinals = None
            self._news.set()

    def take(self) -> set[int] | None:
        """Return the changes since the last call; None if everything may have changed."""
        self._news.clear()
        with self._lock:
            taken, self._ordinals = self._ordinals, set()
        return taken

    def wait(self, stop: threading.Event) -> set[int] | None:
        """Wait for a change, and a little longer for further changes; None if everything may have
        changed.
        """
        for _ in range(int(_POLL_S / _SETTLE_S)):
            if stop.wait(_SETTLE_S):
                return set()
            if self._news.is_set():
                return self.take()
        return set()


def settings_of(
    settings: RemoteSettings, *, rate: str | None, verify: bool, patience_s: float | None
) -> PushOptions:
    """Return the options of a push, from the settings and the command line. Raises `UsageError`."""
    keep = settings.keep
    return PushOptions(
        config.size(settings.rate if rate is None else rate),
        patience_s,
        verify,
        None if keep is None else config.seconds(keep),
    )


def _boot_time() -> float:
    """Return the seconds since the machine was started, including suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _described(job: _Job, host: str) -> objects.Described:
    artifact = job.artifact
    public = (
        each.origin.path
        for each in job.origins
        if each.digest == artifact.digest and each.origin.is_public
    )
    return objects.Described(
        artifact.digest,
        artifact.quality,
        artifact.trust,
        artifact.scripts,
        artifact.segments,
        artifact.truncated,
        bool(artifact.mode & 0o111),
        artifact.mtime_ns,
        artifact.first_seen_ns,
        next(public, b""),
        host,
    )
