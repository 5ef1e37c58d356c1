# SPDX-License-Identifier: Apache-2.0
"""The loop of all pushes: `Uploader` sends the files of a store in threads, again and again.

The loop limits the rate, waits while the receiver does not answer, and follows the commits to the
store. A subclass knows the receiver, which is a bucket in `push`.
"""

from __future__ import annotations

import contextlib
import logging
import random
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

import msgspec

from buildidfs import config
from buildidfs.errors import IntegrityError, RemoteRefused, RemoteUnavailable, StoreError
from buildidfs.model import Artifact, BuildId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    from buildidfs.capture.base import Progress
    from buildidfs.config import RemoteSettings
    from buildidfs.store import Store
    from buildidfs.store.coordination import Listener

T = TypeVar("T")

_log = logging.getLogger(__name__)

PATIENCE_S: Final = 60.0
"""Seconds that a push without --watch waits for a receiver that does not answer."""

DAMAGED: Final = "the blob is damaged: run buildidfs check --repair"

_AHEAD: Final = 4
"""Files that wait for each thread."""
_FIRST_PAUSE_S: Final = 1.0
_MOST_PAUSE_S: Final = 60.0
_SETTLE_S: Final = 1.0
_PASS_S: Final = 3600.0
_POLL_S: Final = 60.0
_LISTEN_S: Final = 0.5
_MOST_CHANGES: Final = 100_000


class Options(msgspec.Struct, frozen=True):
    """Options of a push. ``rate`` is in bytes per second, 0 for no limit. ``patience_s`` is the
    time to wait for a receiver that does not answer, None for ever. ``verify`` compares all files
    with the receiver and ignores the ledger. Objects of a bucket older than half of ``keep_s`` are
    touched.
    """

    rate: int = 0
    patience_s: float | None = PATIENCE_S
    verify: bool = False
    keep_s: int | None = None


class Summary(msgspec.Struct):
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

    def add(self, other: Summary) -> None:
        """Add the counts of another summary."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failed += other.failed


_COUNTS: Final = tuple(name for name in Summary.__struct_fields__ if name != "failed")


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


class Job(msgspec.Struct):
    """A file to send."""

    build_id: BuildId
    artifact: Artifact


J = TypeVar("J", bound=Job)


class Uploader(ABC, Generic[J]):
    """Sends the files of a store; a context manager. `stop` may be called from any thread."""

    workers: int
    """Number of files that are sent at the same time."""

    def __init__(self, store: Store, options: Options) -> None:
        self._store = store
        self._options = options
        self._stop = threading.Event()
        self._pace = Pace(options.rate, self._stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Close files and connections."""

    def stop(self) -> None:
        """End the push soon; each file is finished or left out."""
        self._stop.set()

    @abstractmethod
    def run(
        self,
        ordinals: Iterable[tuple[int, BuildId]] | None = None,
        progress: Progress | None = None,
    ) -> Summary:
        """Push the files of some build IDs, or all; return the summary.

        Waits while the receiver does not answer. Raises `RemoteUnavailable` if that takes longer
        than ``patience_s``, `RemoteDenied`, `StoreError`.
        """

    @abstractmethod
    def _sent(self, job: J) -> Summary:
        """Send a file unless the receiver has it; runs in a thread."""

    def _send(self, jobs: Iterator[J], summary: Summary, progress: Progress | None) -> None:
        """Send the files in threads; a few files per thread are queued."""
        waiting: deque[tuple[J, Future[Summary]]] = deque()
        with ThreadPoolExecutor(self.workers, "push") as pool:
            try:
                for job in jobs:
                    waiting.append((job, pool.submit(self._sent, job)))
                    if len(waiting) >= _AHEAD * self.workers:
                        self._take(*waiting.popleft(), summary, progress)
                while waiting:
                    self._take(*waiting.popleft(), summary, progress)
            except BaseException:  # the threads must end, also after ^C
                self._stop.set()
                for _, future in waiting:
                    future.cancel()
                raise

    def _take(
        self, job: J, future: Future[Summary], summary: Summary, progress: Progress | None
    ) -> None:
        try:
            summary.add(future.result())
        except (IntegrityError, RemoteRefused, StoreError, OSError) as error:
            summary.failed.append(f"{job.build_id} ({job.artifact.kind.name.lower()}): {error}")
        if progress is not None:
            progress(summary.files, str(job.build_id), size=summary.bytes)

    # --- outages -------------------------------------------------------------------------------

    def _persistently(self, work: Callable[[], T]) -> T:
        """Repeat ``work`` until the receiver answers, the time is up, or the push is stopped.

        Raises `RemoteUnavailable`, `RemoteDenied`, `Stopped`.
        """
        began = time.monotonic()
        pause = _FIRST_PAUSE_S
        while True:
            if self._stop.is_set():
                raise Stopped
            try:
                return work()
            except RemoteUnavailable as error:
                patience = self._options.patience_s
                if patience is not None and time.monotonic() - began + pause > patience:
                    raise
                if pause >= _MOST_PAUSE_S:
                    _log.warning("%s; trying again", error)
                # Hosts must not all come back at the same moment.
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _MOST_PAUSE_S)

    # --- following the store -------------------------------------------------------------------

    def follow(self, ready: Callable[[], None] = lambda: None) -> None:
        """Push all files, then each new capture, until `stop` is called.

        Raises `RemoteDenied`, `StoreError`.
        """
        with contextlib.closing(self._store.listen()) as listener:
            changes = _Changes(listener)
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

    def _log(self, summary: Summary) -> None:
        for failure in summary.failed:
            _log.warning("cannot push %s", failure)
        if summary.pushed or summary.variants:
            _log.info("pushed %d files, %d variants", summary.pushed, summary.variants)


class _Changes:
    """Collects the ordinals that commits change, in a thread, so that commits never wait for a
    network.

    A context manager.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._ordinals: set[int] | None = set()
        self._news = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="buildidfs-changes", daemon=True)

    def __enter__(self) -> _Changes:
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
) -> Options:
    """Return the options of a push, from the settings and the command line. Raises `UsageError`."""
    keep = settings.keep
    return Options(
        config.size(settings.rate if rate is None else rate),
        patience_s,
        verify,
        None if keep is None else config.seconds(keep),
    )
